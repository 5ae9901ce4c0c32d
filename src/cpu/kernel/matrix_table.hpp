// SPDX-License-Identifier: Apache-2.0
// The last file of a target region with a matrix unit: how many pieces of bf16 a type takes, scratch sizes, and what
// the instruction set exports. Included by cpu/isa/region.hpp in place of table.hpp.
#pragma once

inline constexpr const char* unit = "the matrix unit";

HWY_INLINE int pieces_of(Type type) { return type == Type::bf16 ? 1 : type == Type::f16 ? 2 : 3; }
HWY_INLINE int pieces_of(const HeadJob& head) { return fits_unit(head) ? pieces_of(head.q.type) : 0; }

// 0: other keys, and a qv, are computed by multiply-adds in f32.
HWY_INLINE int pieces(const Problem& p) {
  if (!fits_unit(p)) return 0;
  const Int64 inputs = pieces_of(p.q_type);
  return static_cast<int>(p.d_o ? greater(inputs, pieces_of(*p.d_o)) : inputs);
}

template <int pieces>
HWY_INLINE Int64 pass_bytes(const Problem& p) {
  return p.pass == Pass::forward ? greater(bytes_of<ForwardScratch<MatrixForward<pieces>>>(p), decode_scratch_bytes(p))
                                 : bytes_of<MatrixBackward<pieces>>(p);
}

HWY_INLINE Int64 scratch_bytes(const Problem& p) {
  const int count = pieces(p);
  if (count == 0) return vector_forward_bytes(p);
  const Int64 bytes = count == 1 ? pass_bytes<1>(p) : count == 2 ? pass_bytes<2>(p) : pass_bytes<3>(p);
  return p.dbias ? greater(bytes, bias_gradient_bytes(p)) : bytes;
}

HWY_INLINE Int64 panel_bytes(const Problem& p) {
  const int count = pieces(p);
  if (count == 0) return 0;
  const Int64 floats = count == 1   ? PackedKeys<1>::floats(p.D, p.Dv)
                       : count == 2 ? PackedKeys<2>::floats(p.D, p.Dv)
                                    : PackedKeys<3>::floats(p.D, p.Dv);
  return floats * Int64(sizeof(float));
}

HWY_INLINE void pack_panel(const HeadJob& head, Range keys, float* panel, float* scratch) {
  const int count = pieces_of(head);
  if (count == 1) pack_panel_of<1>(head, keys, panel, scratch);
  if (count == 2) pack_panel_of<2>(head, keys, panel, scratch);
  if (count == 3) pack_panel_of<3>(head, keys, panel, scratch);
}

HWY_INLINE void forward(const ForwardJob& job, Range blocks, float* scratch) {
  const int count = pieces_of(job.head);
  if (count == 0) return forward_blocks_of(job, blocks, scratch);
  const Session session;
  if (count == 1) matrix_forward<1>(job, blocks, scratch);
  if (count == 2) matrix_forward<2>(job, blocks, scratch);
  if (count == 3) matrix_forward<3>(job, blocks, scratch);
}

HWY_INLINE Int64 image_rows(Int64 D) { return tiled(D); }

HWY_INLINE void key_span(const KeySpanJob& job, float* scratch) {
  const Session session;
  const int count = static_cast<int>(greater(pieces_of(job.jobs[0].head), pieces_of(job.jobs[0].d_o.type)));
  if (count == 1) matrix_key_span<1>(job, scratch);
  if (count == 2) matrix_key_span<2>(job, scratch);
  if (count == 3) matrix_key_span<3>(job, scratch);
}
