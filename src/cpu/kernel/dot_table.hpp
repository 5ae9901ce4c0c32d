// SPDX-License-Identifier: Apache-2.0
// The last file of a target region with dot products of bf16: q of bf16 goes their way, other types that of
// multiply-adds in f32. Included by cpu/isa/region.hpp in place of table.hpp and matrix_table.hpp.
#pragma once

inline constexpr const char* unit = "dot products of bf16";

HWY_INLINE int pieces(const Problem& p) {
  return p.q_type == Type::bf16 && fits_unit(p) && (!p.d_o || *p.d_o == Type::bf16);
}
HWY_INLINE bool takes_dots(const HeadJob& head) { return head.q.type == Type::bf16 && fits_unit(head); }

HWY_INLINE Int64 scratch_bytes(const Problem& p) {
  const bool paired = pieces(p) > 0;
  if (p.pass == Pass::forward)
    return paired ? greater(bytes_of<ForwardScratch<MatrixForward<1>>>(p), decode_scratch_bytes(p))
                  : vector_forward_bytes(p);
  const Int64 products = greater(bytes_of<MatrixBackward<1>>(p), paired ? 0 : bytes_of<BackwardScratch>(p));
  return p.dbias ? greater(products, bias_gradient_bytes(p)) : products;
}

HWY_INLINE Int64 panel_bytes(const Problem& p) {
  return pieces(p) > 0 ? PackedKeys<1>::floats(p.D, p.Dv) * Int64(sizeof(float)) : 0;
}
HWY_INLINE void pack_panel(const HeadJob& head, Range keys, float* panel, float* scratch) {
  pack_panel_of<1>(head, keys, panel, scratch);
}

HWY_INLINE void forward(const ForwardJob& job, Range blocks, float* scratch) {
  if (takes_dots(job.head)) return matrix_forward<1>(job, blocks, scratch);
  forward_blocks_of(job, blocks, scratch);
}

HWY_INLINE Int64 image_rows(Int64 D) { return tiled(D); }

HWY_INLINE void key_span(const KeySpanJob& job, float* scratch) {
  if (takes_dots(job.jobs[0].head) && job.jobs[0].d_o.type == Type::bf16) return matrix_key_span<1>(job, scratch);
  backward_key_span(job, scratch);
}
