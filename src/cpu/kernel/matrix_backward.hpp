// SPDX-License-Identifier: Apache-2.0
// The backward pass on the matrix unit: backward.hpp's steps as a software pipeline, in which each tile's exponentials
// overlap with the products of its neighbours, as in matrix_forward.hpp. Included by cpu/isa/amx.cpp inside its target
// region.
//
// At D = 128 a tile takes 960 products of 16 cycles, and some 20 vector operations for each of its 768 vectors. Two
// blocks of keys go side by side, so that Q and dO, which each product wants in another form, are packed half as often.
#pragma once

static_assert(key_blocks_beside == 2);  // as many as are written out below
// Q and dO of a block of queries: depth along a row (Qt, dOt), depth along the queries (Qp, dOp).
template <int pieces>
struct QueryOperands {
  Pairs Qt, dOt, Qp, dOp;

  QueryOperands(Int64 D, Int64 Dv, Scratch& s) :
      Qt(take_pairs<pieces>(s, tiled(D) / 2, block_q)), dOt(take_pairs<pieces>(s, tiled(Dv) / 2, block_q)),
      Qp(take_pairs<pieces>(s, block_q / 2, tiled(D))), dOp(take_pairs<pieces>(s, block_q / 2, tiled(Dv))) {}
};

// A block of keys: its operands, and its gradients.
template <int pieces>
struct KeyOperands {
  Halves K, V, Kt;
  float *dK, *dV;

  KeyOperands(Int64 D, Int64 Dv, Scratch& s) :
      K(take_halves<pieces>(s, key_rows, tiled(D))), V(take_halves<pieces>(s, key_rows, tiled(Dv))),
      Kt(take_halves<pieces>(s, tiled(D), key_rows)), dK(s.take(key_rows * tiled(D))),
      dV(s.take(key_rows * tiled(Dv))) {}
};

// What one tile leaves for the next step, double-buffered: products, then P and dS as left operands, and dS as a right
// one.
template <int pieces>
struct TileOperands {
  float *S, *dP;
  Halves P, dS;
  Pairs dSt;

  explicit TileOperands(Scratch& s) :
      S(s.take(block_k * block_q)), dP(s.take(block_k * block_q)), P(take_halves<pieces>(s, block_k, block_q)),
      dS(take_halves<pieces>(s, block_k, block_q)), dSt(take_pairs<pieces>(s, block_k / 2, block_q)) {}
};

template <int pieces>
struct MatrixBackward {
  KeyOperands<pieces> keys[key_blocks_beside];
  QueryOperands<pieces> queries[3];  // triple-buffered: of a tile, the one before and the one after
  TileOperands<pieces> turns[2];
  Halves Q, dO;  // rows on their way to the operands
  float *derivative, *Z;

  MatrixBackward(Int64 D, Int64 Dv, Scratch& s) :
      keys{{D, Dv, s}, {D, Dv, s}}, queries{{D, Dv, s}, {D, Dv, s}, {D, Dv, s}}, turns{TileOperands<pieces>(s),
                                                                                       TileOperands<pieces>(s)},
      Q(take_halves<pieces>(s, block_q, tiled(D))), dO(take_halves<pieces>(s, block_q, tiled(Dv))),
      derivative(s.take(block_k * block_q)), Z(s.take(block_k * block_q)) {}

  HWY_INLINE void load_keys(const HeadJob& head, Range range, const KeyOperands<pieces>& out) const {
    transpose_halves<pieces>(out.K, load_key_rows<pieces>(head.k, range, head.D, out.K), out.Kt);
    load_key_rows<pieces>(head.v, range, head.Dv, out.V);
    fill(out.dK, key_rows * tiled(head.D), 0);
    fill(out.dV, key_rows * tiled(head.Dv), 0);
  }
  // Rows that see nothing become 0, since they may hold anything.
  HWY_INLINE void load_queries(const BackwardJob& job, const Tile& tile, const QueryOperands<pieces>& out) const {
    for (Int64 i = 0; i < tile.width; ++i) {
      if (i >= tile.ni || blind(job, tile, i)) {
        clear_row<pieces>(Q, i), clear_row<pieces>(dO, i);
        continue;
      }
      split_row<pieces>(job.head.q, tile.i0 + i, job.head.D, Q, i);
      split_row<pieces>(job.d_o, tile.i0 + i, job.head.Dv, dO, i);
    }
    pair_columns<pieces>(Q, tile.width, out.Qt);
    pair_columns<pieces>(dO, tile.width, out.dOt);
    pair_rows<pieces>(Q, tile.width, out.Qp);
    pair_rows<pieces>(dO, tile.width, out.dOp);
  }
};

// P = 2^(S - lse2) and dS = P (dP - delta) of a tile, straight into the products' operands. S lacks `factor`. `scaled`:
// dS is multiplied by dS_scale.
template <int pieces, bool scaled, class Beside>
HWY_NOINLINE void gradients_of_tile(const BackwardJob& job, const Tile& tile, float factor,
                                    const TileOperands<pieces>& s, Beside& beside) {
  constexpr Exactness exactness = AsPairs<pieces>::exactness;
  const float *lse2 = job.lse2 + tile.i0, *delta = job.delta + tile.i0;
  const AsPairs<pieces> dSt{s.dSt};
  for (Int64 j = 0; j < tile.nj; j += 2)
    for (Int64 i = 0; i < tile.width; i += 32) {
      Vec dS[2][2];  // of two keys, two vectors of queries
      TESSERA_UNROLL
      for (int r = 0; r < 2; ++r) {
        Vec P[2];
        TESSERA_UNROLL
        for (int n = 0; n < 2; ++n) {
          const Int64 at = (j + r) * block_q + i + n * lanes;
          const Vec exponent = exponent_of(s.S + at, set(factor), load(lse2 + i + n * lanes));
          const Vec zero = hn::Zero(FloatTag());
          P[n] = j + r < tile.nj ? exp2_any<exactness>(exponent) : zero;
          dS[r][n] = j + r < tile.nj ? hn::Mul(P[n], hn::Sub(load(s.dP + at), load(delta + i + n * lanes))) : zero;
          if (scaled) dS[r][n] = hn::Mul(dS[r][n], set(job.head.dS_scale));
        }
        keep_row<pieces>(s.P, j + r, i, P[0], P[1]);
        keep_row<pieces>(s.dS, j + r, i, dS[r][0], dS[r][1]);
      }
      TESSERA_UNROLL
      for (int n = 0; n < 2; ++n) dSt.keep(j, i + n * lanes, dS[0][n], dS[1][n]);
      beside.advance();
    }
}

// The same with a derivative of the scores or dropout, pass by pass.
template <int pieces>
HWY_NOINLINE void gradients_with_options(const BackwardJob& job, const Tile& tile, float factor,
                                         const TileOperands<pieces>& s, const float* derivative, float* Z) {
  const HeadJob& head = job.head;
  Nothing nothing;
  probabilities<false>(tile, job.lse2, factor, nothing, s.S);
  if (head.options.dropout) {
    dropout_factors(head, tile, Z);
    multiply_tile(tile, Z, s.dP);
  }
  score_gradients(tile, s.S, job.delta, nothing, s.dP);
  if (head.options.dropout) multiply_tile(tile, Z, s.S);
  if (head.options.need_derivative()) multiply_tile(tile, derivative, s.dP);
  if (head.dS_scale != 1) scale_tile(tile, head.dS_scale, s.dP);
  split_keys<pieces>(tile, s.S, s.P);
  split_keys<pieces>(tile, s.dP, s.dS);
  AsPairs<pieces>{s.dSt}.keep_tile(tile, s.dP);
}

// A tile: a block of queries of a head against one of the blocks of keys that lie side by side.
struct BackwardPlace {
  Tile tile;
  Int64 head, query_block, beside;
};

// The tiles of some blocks of keys: head by head, block of queries by block of queries.
class BackwardWalk {
 public:
  HWY_INLINE explicit BackwardWalk(const KeySpanJob& span) :
      span(span), any(span.jobs[0].head), queries(queries_of(span)), query_block(queries.begin / block_q),
      block(span.block_begin) {}

  HWY_INLINE bool next(BackwardPlace& place) {
    for (; head < span.heads; ++head, query_block = queries.begin / block_q)
      for (; query_block * block_q < queries.end; ++query_block, block = span.block_begin)
        while (block < span.block_end) {
          const Range rows = query_range(any, query_block), keys = key_range(any, rows, block++);
          if (keys.empty()) continue;
          place = {tile_of(rows, keys), head, query_block, block - 1 - span.block_begin};
          return true;
        }
    return false;
  }

 private:
  const KeySpanJob& span;
  const HeadJob& any;
  Range queries;
  Int64 head = 0, query_block, block;
};

// The keys of a task against all the queries that see them. What one turn writes, the next one reads.
template <int pieces>
struct MatrixKeySpan {
  const KeySpanJob& span;
  const HeadJob& any;
  const MatrixBackward<pieces>& memory;

  HWY_INLINE Int64 first(const BackwardPlace& place) const {
    return place.tile.j0 - (span.block_begin + place.beside) * block_k;
  }
  // S^T = K Q^T and dP^T = V dO^T
  HWY_INLINE void add_recomputed(const BackwardPlace& place, const QueryOperands<pieces>& queries, int turn,
                                 ProductsBeside<pieces>& out) const {
    const KeyOperands<pieces>& keys = memory.keys[place.beside];
    const TileOperands<pieces>& s = memory.turns[turn];
    const Int64 rows = tiled(place.tile.nj), width = place.tile.width;
    out.add({Result::replace, Terms::all, from_row(keys.K, first(place)), queries.Qt, s.S, block_q, rows, width,
             tiled(any.D)});
    out.add({Result::replace, Terms::most, from_row(keys.V, first(place)), queries.dOt, s.dP, block_q, rows, width,
             tiled(any.Dv)});
  }
  // dV += P^T dO, dK += dS^T Q and dQ^T (+)= K^T dS^T
  HWY_INLINE void add_gradients(const BackwardPlace& place, const QueryOperands<pieces>& queries, int turn,
                                ProductsBeside<pieces>& out) const {
    const KeyOperands<pieces>& keys = memory.keys[place.beside];
    const TileOperands<pieces>& s = memory.turns[turn];
    const BackwardJob& job = span.jobs[place.head];
    const Int64 rows = tiled(place.tile.nj), width = place.tile.width, D = tiled(any.D), Dv = tiled(any.Dv);
    if (span.dv)
      out.add({Result::add, Terms::most, s.P, queries.dOp, keys.dV + first(place) * Dv, Dv, rows, Dv, width});
    if (span.dk) out.add({Result::add, Terms::most, s.dS, queries.Qp, keys.dK + first(place) * D, D, rows, D, width});
    if (!job.dq_images) return;
    begin_turn(span, job, place.query_block);
    float* image = image_of(span, job, place.query_block);
    const Range block = query_range(any, place.query_block);
    const bool starts = starts_image(span, job, block, span.block_begin + place.beside);
    out.add({starts ? Result::replace : Result::add, Terms::most, from_column(keys.Kt, first(place)), s.dSt, image,
             block_q, D, width, rows});
  }

  HWY_INLINE void vector_part(const BackwardPlace& place, int turn, ProductsBeside<pieces>& beside) const {
    const BackwardJob& job = span.jobs[place.head];
    const TileOperands<pieces>& s = memory.turns[turn];
    const float factor = finish_scores<false>(job.head, place.tile, s.S, memory.derivative);
    if (job.head.options.need_derivative() || job.head.options.dropout) {
      gradients_with_options<pieces>(job, place.tile, factor, s, memory.derivative, memory.Z);
    } else {
      beside.start(ceil_div(place.tile.nj, 2) * (place.tile.width / 32));
      if (job.head.dS_scale == 1)
        gradients_of_tile<pieces, false>(job, place.tile, factor, s, beside);
      else
        gradients_of_tile<pieces, true>(job, place.tile, factor, s, beside);
    }
    // A product takes whole tiles: zeros behind the last key.
    for (Int64 j = place.tile.nj; j < tiled(place.tile.nj); ++j) clear_row<pieces>(s.P, j), clear_row<pieces>(s.dS, j);
    clear_pairs_behind<pieces>(place.tile, s.dSt);
  }

  HWY_INLINE void run() const {
    BackwardWalk walk(span);
    BackwardPlace place{}, next{}, before{};
    Int64 loaded = 0;                             // blocks of queries so far; the last three are there
    bool more = walk.next(place), added = false;  // added: the gradients of the tile `before`
    if (!more) return;
    memory.load_queries(span.jobs[place.head], place.tile, memory.queries[0]);
    PrefetchQueue prefetch = queries_to_prefetch(span, span.jobs[place.head], place.query_block + 1);
    ProductsBeside<pieces> pending;  // the gradients of the tile before
    add_recomputed(place, memory.queries[0], 0, pending);
    pending.finish();
    pending = {};
    for (int turn = 0; more; turn ^= 1, place = next) {
      const QueryOperands<pieces>& queries = memory.queries[loaded % 3];
      more = walk.next(next);
      if (more && (next.head != place.head || next.query_block != place.query_block)) {
        memory.load_queries(span.jobs[next.head], next.tile, memory.queries[++loaded % 3]);
        prefetch = queries_to_prefetch(span, span.jobs[next.head], next.query_block + 1);
      }
      pending.prefetch(prefetch);
      if (more) add_recomputed(next, memory.queries[loaded % 3], turn ^ 1, pending);
      vector_part(place, turn, pending);
      pending.finish();
      pending = {};
      if (added && (before.head != place.head || before.query_block != place.query_block)) end_turn_of(before);
      add_gradients(place, queries, turn, pending);
      before = place, added = true;
    }
    pending.finish();
    end_turn_of(before);
  }

 private:
  HWY_INLINE void end_turn_of(const BackwardPlace& place) const {
    end_turn(span, span.jobs[place.head], place.query_block);
  }
};

template <int pieces>
HWY_NOINLINE void matrix_key_span(const KeySpanJob& span, float* room) {
  const HeadJob& any = span.jobs[0].head;
  const Int64 begin = span.block_begin, count = span.block_end - begin;
  Scratch scratch(room);
  const MatrixBackward<pieces> memory(any.D, any.Dv, scratch);
  for (Int64 n = 0; n < count; ++n) memory.load_keys(any, key_block_range(any, begin + n), memory.keys[n]);
  MatrixKeySpan<pieces>{span, any, memory}.run();
  for (Int64 n = 0; n < count; ++n) {
    const Range keys = key_block_range(any, begin + n);
    store_gradient(span.dk, span.key0, keys, any.D, tiled(any.D), any.scale, span.accumulate, memory.keys[n].dK);
    store_gradient(span.dv, span.key0, keys, any.Dv, tiled(any.Dv), 1.0f, span.accumulate, memory.keys[n].dV);
  }
}
