// SPDX-License-Identifier: Apache-2.0
// The last file of a target region without a matrix unit: scratch sizes and what the instruction set exports.
// Included by cpu/isa/region.hpp; matrix_table.hpp is its counterpart.
#pragma once

inline constexpr const char* unit = nullptr;
HWY_INLINE int pieces(const Problem&) { return 0; }

HWY_INLINE Int64 scratch_bytes(const Problem& p) {
  if (p.pass == Pass::forward) return vector_forward_bytes(p);
  return p.dbias ? bias_gradient_bytes(p) : bytes_of<BackwardScratch>(p);
}

// Products by multiply-adds read K and V as they are: panels gain nothing.
HWY_INLINE Int64 panel_bytes(const Problem&) { return 0; }
HWY_INLINE void pack_panel(const HeadJob&, Range, float*, float*) {}

HWY_INLINE void forward(const ForwardJob& job, Range blocks, float* scratch) {
  forward_blocks_of(job, blocks, scratch);
}

HWY_INLINE Int64 image_rows(Int64 D) { return D; }

HWY_INLINE void key_span(const KeySpanJob& job, float* scratch) { backward_key_span(job, scratch); }
