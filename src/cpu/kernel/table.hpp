// The last file of a target region without a matrix unit: scratch sizes and what the instruction set exports.
// Included by cpu/isa/region.hpp; matrix_table.hpp is its counterpart.
#pragma once

inline constexpr const char* unit = nullptr;
HWY_INLINE int pieces(const Problem&) { return 0; }

template <class Layout>
HWY_INLINE Int64 bytes_of(const Problem& p) {
  Scratch scratch(nullptr);
  const Layout layout(p.D, p.Dv, scratch);
  (void)layout;
  if (p.dbias) scratch.take(block_k * block_q);  // bias_gradient's sums
  return scratch.bytes();
}

HWY_INLINE Int64 scratch_bytes(const Problem& p) {
  return p.pass == Pass::forward ? greater(bytes_of<ForwardScratch<VectorForward>>(p), bytes_of<DecodeScratch>(p))
                                 : bytes_of<BackwardScratch>(p);
}

// The task's own loading serves as well.
HWY_INLINE Int64 pack_bytes(const Problem&) { return 0; }
HWY_INLINE void pack_keys(const HeadJob&, Range, float*, float*) {}

HWY_INLINE void forward(const ForwardJob& job, Range blocks, float* scratch) {
  forward_blocks_of(job, blocks, scratch);
}

HWY_INLINE Int64 image_rows(Int64 D) { return D; }

HWY_INLINE void key_span(const KeySpanJob& job, float* scratch) { backward_key_span(job, scratch); }
