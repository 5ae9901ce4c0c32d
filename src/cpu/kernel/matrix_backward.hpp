// The operands of the backward pass on the matrix unit: the counterpart of vector_products.hpp's. S and P are
// transposed here too, so everything between two products is the same text. Included by cpu/isa/amx.cpp inside its
// target region.
#pragma once

template <int pieces>
struct MatrixBackward {
  static constexpr bool scaled = false;
  static constexpr Int64 padded(Int64 width) { return tiled(width); }
  static constexpr Int64 rows = key_rows;

  Halves K, V, Kt, Q, dO, left;   // left: P, then dS, as a left operand
  Pairs Qt, dOt, Qp, dOp, right;  // Qt, dOt: depth along a row; Qp, dOp: depth along queries; right: dS
  float* image_room;

  MatrixBackward(Int64 D, Int64 Dv, Scratch& s) :
      K(take_halves<pieces>(s, key_rows, tiled(D))), V(take_halves<pieces>(s, key_rows, tiled(Dv))),
      Kt(take_halves<pieces>(s, tiled(D), key_rows)), Q(take_halves<pieces>(s, block_q, tiled(D))),
      dO(take_halves<pieces>(s, block_q, tiled(Dv))), left(take_halves<pieces>(s, block_k, block_q)),
      Qt(take_pairs<pieces>(s, tiled(D) / 2, block_q)), dOt(take_pairs<pieces>(s, tiled(Dv) / 2, block_q)),
      Qp(take_pairs<pieces>(s, block_q / 2, tiled(D))), dOp(take_pairs<pieces>(s, block_q / 2, tiled(Dv))),
      right(take_pairs<pieces>(s, block_k / 2, block_q)), image_room(s.take(tiled(D) * block_q)) {}

  HWY_INLINE void load_keys(const HeadJob& head, Range keys, bool) {
    transpose_halves<pieces>(K, load_key_rows<pieces>(head.k, keys, head.D, K), Kt);
    load_key_rows<pieces>(head.v, keys, head.Dv, V);
  }
  // Rows that see nothing become 0, since they may hold anything.
  HWY_INLINE void load_queries(const BackwardJob& job, const Tile& tile) {
    for (Int64 i = 0; i < tile.width; ++i) {
      if (i >= tile.ni || blind(job, tile, i)) {
        clear_row<pieces>(Q, i), clear_row<pieces>(dO, i);
        continue;
      }
      split_row<pieces>(job.head.q, tile.i0 + i, job.head.D, Q, i);
      split_row<pieces>(job.d_o, tile.i0 + i, job.head.Dv, dO, i);
    }
    pair_columns<pieces>(Q, tile.width, Qt);
    pair_columns<pieces>(dO, tile.width, dOt);
  }
  HWY_INLINE void scores(const HeadJob& head, const Tile& tile, Int64 first, float* S) const {
    multiply_matrix<pieces, Terms::all, Result::replace>(from_row(K, first), Qt, S, block_q, tiled(tile.nj), tile.width,
                                                         tiled(head.D));
  }
  HWY_INLINE void value_products(const HeadJob& head, const Tile& tile, Int64 first, float* dP) const {
    multiply_matrix<pieces, Terms::most, Result::replace>(from_row(V, first), dOt, dP, block_q, tiled(tile.nj),
                                                          tile.width, tiled(head.Dv));
  }
  HWY_INLINE void add_dv(const BackwardJob& job, const Tile& tile, const float* P, float* dV) const {
    pair_rows<pieces>(dO, tile.width, dOp);
    add_rows(tile, P, dOp, tiled(job.head.Dv), dV);
  }
  HWY_INLINE void add_dk(const BackwardJob& job, const Tile& tile, const float* dS, float* dK) const {
    pair_rows<pieces>(Q, tile.width, Qp);
    add_rows(tile, dS, Qp, tiled(job.head.D), dK);
  }
  HWY_INLINE void add_dq(const HeadJob& head, const Tile& tile, Int64 first, const float* dS, bool replace,
                         float* image) const {
    AsPairs<pieces>{right}.keep_tile(tile, dS);
    clear_pairs_behind<pieces>(tile, right);
    const Halves keys = from_column(Kt, first);
    const Int64 rows = tiled(head.D), depth = tiled(tile.nj);
    if (rows == head.D && replace)
      multiply_matrix<pieces, Terms::most, Result::replace>(keys, right, image, block_q, rows, tile.width, depth);
    if (rows == head.D && !replace)
      multiply_matrix<pieces, Terms::most, Result::add>(keys, right, image, block_q, rows, tile.width, depth);
    if (rows == head.D) return;
    // The image has D rows and no more.
    multiply_matrix<pieces, Terms::most, Result::replace>(keys, right, image_room, block_q, rows, tile.width, depth);
    for (Int64 d = 0; d < head.D; ++d)
      for (Int64 i = 0; i < tile.width; i += lanes) {
        const Vec term = load(image_room + d * block_q + i);
        float* out = image + d * block_q + i;
        store(replace ? term : hn::Add(load(out), term), out);
      }
  }

 private:
  HWY_INLINE void add_rows(const Tile& tile, const float* X, const Pairs& queries, Int64 width, float* out) const {
    split_keys<pieces>(tile, X, left);
    multiply_matrix<pieces, Terms::most, Result::add>(left, queries, out, width, tiled(tile.nj), width, tile.width);
  }
};
