// SPDX-License-Identifier: Apache-2.0
// The products of attention by multiply-adds in f32: which operands they have and how those are loaded. forward.hpp and
// backward.hpp are written over this; matrix_forward.hpp and matrix_backward.hpp are their counterparts.
// Included by cpu/isa/*.cpp inside their target region.
#pragma once

// What the operands of a matrix unit, and dot products of bf16, are made from: K and V of q's type, or of 8 bits, which
// one piece of bf16 holds, beside a q of 16; without scales, or with one for all dims of a key; no qv.
HWY_INLINE bool fits_unit(Type q, Type keys, Int64 scale_groups) {
  return (keys == q || (bytes_each(q) == 2 && bytes_each(keys) == 1)) && scale_groups == 1;
}
HWY_INLINE bool fits_unit(const HeadJob& head) {
  return fits_unit(head.q.type, head.k.type, head.k.scale_groups) &&
         fits_unit(head.q.type, head.v.type, head.v.scale_groups) && !head.qv;
}
HWY_INLINE bool fits_unit(const Problem& p) {
  const Int64 K_groups = p.k_scale == 4 ? ceil_div(p.D, scale_width) : 1;
  const Int64 V_groups = p.v_scale == 4 ? ceil_div(p.Dv, scale_width) : 1;
  return fits_unit(p.q_type, p.k_type, K_groups) && fits_unit(p.q_type, p.v_type, V_groups) && !p.qv;
}

// Where the softmax leaves P: in place of the scores.
struct InPlace {
  static constexpr Exactness exactness = Exactness::f32;
  float* S;
  // Rows j and j + 1 of the lanes from i on. S has padding for a row behind the last one.
  HWY_INLINE void keep(Int64 j, Int64 i, Vec even, Vec odd) const {
    store(even, S + j * block_q + i);
    store(odd, S + (j + 1) * block_q + i);
  }
  // A whole tile that is there already.
  HWY_INLINE void keep_tile(const Tile&, const float*) const {}
};

// Operands of the forward pass: Q^T of each block of a task, and one block of keys. q carries the scores' factor, so
// products are the rule's arguments.
struct VectorForward {
  static constexpr Int64 padded(Int64 width) { return width; }

  float *Qt, *K_room, *V_room;
  float* Qvt = nullptr;  // qv's, if there is one
  Panel K{}, V{};

  VectorForward(Int64 D, Int64 Dv, Scratch& s) :
      Qt(s.take(forward_blocks * D * block_q)), K_room(s.take(block_k * D)), V_room(s.take(block_k * Dv)) {}
  static constexpr Int64 second_floats(Int64 Dv) { return forward_blocks * Dv * block_q; }  // of Qvt

  HWY_INLINE void load_queries(const HeadJob& head, const Tile& tile, Int64 n) {
    load_transposed(head.q, tile, head.D, head.score.factor, Qt + n * head.D * block_q);
    if (Qvt) load_transposed(head.qv, tile, head.Dv, head.score.factor, Qvt + n * head.Dv * block_q);
  }
  HWY_INLINE void load_keys(const HeadJob& head, Range keys, bool reused) {
    K = load_panel(head.k, keys, head.D, reused, K_room);
    V = load_panel(head.v, keys, head.Dv, reused, V_room);
  }
  // S^T = K Q^T, plus V Qv^T, of block n; the tile's keys begin at row `first` of those loaded.
  HWY_INLINE void scores(const HeadJob& head, const Tile& tile, Int64 n, Int64 first, float* S) const {
    multiply<Operand::rows, Result::replace>(K.at(first), K.stride, Qt + n * head.D * block_q, block_q, S, block_q,
                                             tile.nj, tile.width, head.D);
    if (Qvt)
      multiply<Operand::rows, Result::add>(V.at(first), V.stride, Qvt + n * head.Dv * block_q, block_q, S, block_q,
                                           tile.nj, tile.width, head.Dv);
  }
  // O^T += V^T P^T
  HWY_INLINE void add_values(const HeadJob& head, const Tile& tile, Int64 first, const float* P, float* O) const {
    multiply<Operand::transposed, Result::add>(V.at(first), V.stride, P, block_q, O, block_q, head.Dv, tile.width,
                                               tile.nj);
  }
};

// Operands of the backward pass: blocks of keys side by side, one block of queries.
struct VectorBackward {
  static constexpr Int64 padded(Int64 width) { return round_up(width, lanes); }  // of a row of dK or dV

  float *Qt, *dOt, *Q, *dO, *K_room[key_blocks_beside], *V_room[key_blocks_beside];
  Panel K{}, V{};  // those in use

  VectorBackward(Int64 D, Int64 Dv, Scratch& s) :
      Qt(s.take(D * block_q)), dOt(s.take(Dv * block_q)), Q(s.take(block_q * padded(D))),
      dO(s.take(block_q * padded(Dv))) {
    for (Int64 n = 0; n < key_blocks_beside; ++n) K_room[n] = s.take(block_k * D), V_room[n] = s.take(block_k * Dv);
  }

  struct Keys {
    Panel K, V;
  };
  HWY_INLINE Keys load_keys(const HeadJob& head, Range keys, bool reused, Int64 beside) const {
    return {load_panel(head.k, keys, head.D, reused, K_room[beside]),
            load_panel(head.v, keys, head.Dv, reused, V_room[beside])};
  }
  HWY_INLINE void use_keys(const Keys& keys) { K = keys.K, V = keys.V; }
  // q and dO, as they are and transposed. Rows that see nothing become 0, since they may hold anything.
  HWY_INLINE void load_queries(const BackwardJob& job, const Tile& tile) {
    const Int64 D = job.head.D, Dv = job.head.Dv;
    load_transposed(job.head.q, tile, D, job.head.score.factor, Qt);
    load_transposed(job.d_o, tile, Dv, 1.0f, dOt);
    load_rows(job.head.q, tile.i0, tile.ni, D, Q);
    load_rows(job.d_o, tile.i0, tile.ni, Dv, dO);
    for (Int64 i = 0; i < tile.ni; ++i) {
      if (!blind(job, tile, i)) continue;
      for (Int64 d = 0; d < D; ++d) Qt[d * block_q + i] = 0;
      for (Int64 d = 0; d < Dv; ++d) dOt[d * block_q + i] = 0;
      fill(Q + i * padded(D), padded(D), 0);
      fill(dO + i * padded(Dv), padded(Dv), 0);
    }
  }
  // S^T = K Q^T
  HWY_INLINE void scores(const HeadJob& head, const Tile& tile, Int64 first, float* S) const {
    multiply<Operand::rows, Result::replace>(K.at(first), K.stride, Qt, block_q, S, block_q, tile.nj, tile.width,
                                             head.D);
  }
  // dP^T = V dO^T
  HWY_INLINE void value_products(const HeadJob& head, const Tile& tile, Int64 first, float* dP) const {
    multiply<Operand::rows, Result::replace>(V.at(first), V.stride, dOt, block_q, dP, block_q, tile.nj, tile.width,
                                             head.Dv);
  }
  // dV += P^T dO; `dV` starts at the tile's first key, here and for dK.
  HWY_INLINE void add_dv(const HeadJob& head, const Tile& tile, const float* P, float* dV) const {
    add_rows(tile, padded(head.Dv), P, dO, dV);
  }
  // dK += dS^T Q
  HWY_INLINE void add_dk(const HeadJob& head, const Tile& tile, const float* dS, float* dK) const {
    add_rows(tile, padded(head.D), dS, Q, dK);
  }
  // dQ^T (+)= K^T dS^T
  HWY_INLINE void add_dq(const HeadJob& head, const Tile& tile, Int64 first, const float* dS, bool replace,
                         float* image) const {
    const float* keys = K.at(first);
    if (replace)
      multiply<Operand::transposed, Result::replace>(keys, K.stride, dS, block_q, image, block_q, head.D, tile.width,
                                                     tile.nj);
    else
      multiply<Operand::transposed, Result::add>(keys, K.stride, dS, block_q, image, block_q, head.D, tile.width,
                                                 tile.nj);
  }

 private:
  HWY_INLINE void add_rows(const Tile& tile, Int64 width, const float* left, const float* right, float* out) const {
    multiply<Operand::rows, Result::add>(left, block_q, right, width, out, width, tile.nj, width, tile.ni);
  }
};
