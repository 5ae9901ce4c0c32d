// The products of attention on the matrix unit, with operands in pieces of bf16: the counterpart of product.hpp and
// vector_products.hpp. S and P are transposed here too, so everything between two products is the same text.
// Included by cpu/isa/amx.cpp inside its target region.
#pragma once

// Products of piece i of one operand with piece j of the other are summed for i + j <= order, small ones first. Scores
// of f16 take all of them, so that they are exact; what the others leave out is smaller than the last piece's rounding.
template <int pieces>
inline constexpr int score_order = pieces == 1 ? 0 : 2;
template <int pieces>
inline constexpr int value_order = pieces - 1;

// 32 x 32 numbers of C in four tiles.
template <int pieces, int order, Result result>
HWY_INLINE void multiply_tiles(const Halves& a, const Pairs& b, float* c, Int64 ldc, Int64 depth) {
  const Int64 row_bytes = ldc * 4;
  if (result == Result::add) {
    tile_load<0>(c, row_bytes), tile_load<1>(c + 16, row_bytes);
    tile_load<2>(c + 16 * ldc, row_bytes), tile_load<3>(c + 16 * ldc + 16, row_bytes);
  } else {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  }
  for (int total = order; total >= 0; --total)
    for (int i = 0; i <= total; ++i) {
      const int j = total - i;
      if (i >= pieces || j >= pieces) continue;
      for (Int64 k = 0; k < depth; k += 32) {
        tile_load<4>(a.row(0, i) + k, a.stride * 2);
        tile_load<6>(b.row(k / 2, j), b.stride * 4);
        tile_dot<0, 4, 6>();
        tile_load<7>(b.row(k / 2, j) + 16, b.stride * 4);
        tile_dot<1, 4, 7>();
        tile_load<5>(a.row(16, i) + k, a.stride * 2);
        tile_dot<2, 5, 6>();
        tile_dot<3, 5, 7>();
      }
    }
  tile_store<0>(c, row_bytes), tile_store<1>(c + 16, row_bytes);
  tile_store<2>(c + 16 * ldc, row_bytes), tile_store<3>(c + 16 * ldc + 16, row_bytes);
}

// C [rows x width] (+)= A [rows x depth] B [depth x width]; all three are multiples of tile_step.
template <int pieces, int order, Result result>
HWY_NOINLINE void multiply_matrix(Halves a, Pairs b, float* c, Int64 ldc, Int64 rows, Int64 width, Int64 depth) {
  for (Int64 n = 0; n < width; n += tile_step)
    for (Int64 m = 0; m < rows; m += tile_step)
      multiply_tiles<pieces, order, result>({a.row(m), a.stride, a.piece}, {b.at + n, b.stride, b.piece},
                                            c + m * ldc + n, ldc, depth);
}

// Rows of a block of keys, and as many zeros behind them as a product of a tile that begins anywhere may read.
inline constexpr Int64 key_rows = block_k + tile_step;

template <int pieces>
HWY_INLINE Int64 load_key_rows(const Rows& source, Range keys, Int64 width, const Halves& out) {
  for (Int64 r = 0; r < keys.size(); ++r) {
    fetch_row(source, keys.begin + r + rows_ahead, width);
    split_row<pieces>(source, keys.begin + r, width, out, r);
  }
  const Int64 end = lesser(tiled(keys.size()) + tile_step, key_rows);
  for (Int64 r = keys.size(); r < end; ++r) clear_row<pieces>(out, r);
  return end;
}

HWY_INLINE Halves from_row(Halves x, Int64 r) { return {x.at + r * x.stride, x.stride, x.piece}; }
HWY_INLINE Halves from_column(Halves x, Int64 c) { return {x.at + c, x.stride, x.piece}; }

template <int pieces>
struct MatrixForward {
  static constexpr bool scaled = false;  // q_factor would not survive in bf16
  static constexpr Int64 padded(Int64 width) { return tiled(width); }

  Halves K, V, Vt, Q;  // V and Q: rows on their way to their final form
  Pairs Qt, P;

  MatrixForward(Int64 D, Int64 Dv, Scratch& s) :
      K(take_halves<pieces>(s, key_rows, tiled(D))), V(take_halves<pieces>(s, key_rows, tiled(Dv))),
      Vt(take_halves<pieces>(s, tiled(Dv), key_rows)), Q(take_halves<pieces>(s, block_q, tiled(D))),
      Qt(take_pairs<pieces>(s, forward_blocks * tiled(D) / 2, block_q)),
      P(take_pairs<pieces>(s, block_k / 2, block_q)) {}

  HWY_INLINE void load_queries(const HeadJob& head, const Tile& tile, Int64 n) {
    for (Int64 i = 0; i < tile.ni; ++i) split_row<pieces>(head.q, tile.i0 + i, head.D, Q, i);
    for (Int64 i = tile.ni; i < tile.width; ++i) clear_row<pieces>(Q, i);
    pair_columns<pieces>(Q, tile.width, queries(head, n));
  }
  HWY_INLINE void load_keys(const HeadJob& head, Range keys, bool) {
    load_key_rows<pieces>(head.k, keys, head.D, K);
    transpose_halves<pieces>(V, load_key_rows<pieces>(head.v, keys, head.Dv, V), Vt);
  }
  HWY_INLINE void scores(const HeadJob& head, const Tile& tile, Int64 n, Int64 first, float* S) const {
    multiply_matrix<pieces, score_order<pieces>, Result::replace>(from_row(K, first), queries(head, n), S, block_q,
                                                                  tiled(tile.nj), tile.width, tiled(head.D));
  }
  HWY_INLINE AsPairs<pieces> kept(const float*) const { return {P}; }
  HWY_INLINE void take_probabilities(const Tile& tile, const float* kept) const { pair_keys<pieces>(tile, kept, P); }
  HWY_INLINE void add_values(const HeadJob& head, const Tile& tile, Int64 first, const float*, float* O) const {
    clear_pairs_behind<pieces>(tile, P);
    multiply_matrix<pieces, value_order<pieces>, Result::add>(from_column(Vt, first), P, O, block_q, tiled(head.Dv),
                                                              tile.width, tiled(tile.nj));
  }

 private:
  HWY_INLINE Pairs queries(const HeadJob& head, Int64 n) const {
    return {Qt.row(n * tiled(head.D) / 2), Qt.stride, Qt.piece};
  }
};

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
    multiply_matrix<pieces, score_order<pieces>, Result::replace>(from_row(K, first), Qt, S, block_q, tiled(tile.nj),
                                                                  tile.width, tiled(head.D));
  }
  HWY_INLINE void value_products(const HeadJob& head, const Tile& tile, Int64 first, float* dP) const {
    multiply_matrix<pieces, value_order<pieces>, Result::replace>(from_row(V, first), dOt, dP, block_q, tiled(tile.nj),
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
    pair_keys<pieces>(tile, dS, right);
    clear_pairs_behind<pieces>(tile, right);
    const Halves keys = from_column(Kt, first);
    const Int64 rows = tiled(head.D), depth = tiled(tile.nj);
    if (rows == head.D && replace)
      multiply_matrix<pieces, value_order<pieces>, Result::replace>(keys, right, image, block_q, rows, tile.width,
                                                                    depth);
    if (rows == head.D && !replace)
      multiply_matrix<pieces, value_order<pieces>, Result::add>(keys, right, image, block_q, rows, tile.width, depth);
    if (rows == head.D) return;
    // The image has D rows and no more.
    multiply_matrix<pieces, value_order<pieces>, Result::replace>(keys, right, image_room, block_q, rows, tile.width,
                                                                  depth);
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
    multiply_matrix<pieces, value_order<pieces>, Result::add>(left, queries, out, width, tiled(tile.nj), width,
                                                              tile.width);
  }
};
