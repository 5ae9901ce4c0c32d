// SPDX-License-Identifier: Apache-2.0
// The backward pass: a group of keys at a time, P recomputed from LSE; docs/algorithm.md, "Backward, tile by tile".
// Tiles of S, P, dP, dS are transposed (a key per row, a query per lane), dQ too. Included by cpu/isa/*.cpp inside
// their region.
#pragma once

struct BackwardScratch {
  VectorBackward products;
  float *P, *dS, *derivative, *Z, *dK[key_blocks_beside], *dV[key_blocks_beside];

  BackwardScratch(Int64 D, Int64 Dv, Scratch& s) :
      products(D, Dv, s), P(s.take(block_k * block_q)), dS(s.take(block_k * block_q)),
      derivative(s.take(block_k * block_q)), Z(s.take(block_k * block_q)) {
    for (Int64 n = 0; n < key_blocks_beside; ++n) {
      dK[n] = s.take(block_k * VectorBackward::padded(D));
      dV[n] = s.take(block_k * VectorBackward::padded(Dv));
    }
  }
};

// The image of dQ of one block of queries, of a sum that goes on.
HWY_NOINLINE void start_image(const BackwardJob& job, Int64 query_block) {
  load_transposed(job.dq_from, tile_of(query_range(job.head, query_block), {}), job.head.D, 1.0f,
                  job.dq_images + query_block * job.image_rows * block_q);
}

// delta = dO . O - dLSE and lse2 of one block of queries, and the image of dQ where it does not start from 0. Rows that
// see nothing get lse2 = +inf, so that P = 0.
HWY_NOINLINE void prepare_block(const BackwardJob& job, Int64 query_block) {
  const HeadJob& head = job.head;
  HWY_ALIGN float O[512], dO[512];
  for (Int64 i = query_block * block_q; i < (query_block + 1) * block_q; ++i) {
    job.delta[i] = 0;
    job.lse2[i] = infinity;
    if (i >= head.nq) continue;
    const double lse = job.lse.get(i, 0);
    if (lse == -__builtin_inf()) continue;
    widen_row(job.o, i, head.Dv, 1.0f, O);
    widen_row(job.d_o, i, head.Dv, 1.0f, dO);
    double delta = job.d_lse ? -job.d_lse.get(i, 0) : 0, sums[8] = {};  // eight accumulators: one is bound by latency
    Int64 d = 0;
    for (; d + 8 <= head.Dv; d += 8)
      for (Int64 n = 0; n < 8; ++n) sums[n] += double(O[d + n]) * double(dO[d + n]);
    for (; d < head.Dv; ++d) delta += double(O[d]) * double(dO[d]);
    for (const double sum : sums) delta += sum;
    job.delta[i] = static_cast<float>(delta);
    job.lse2[i] = static_cast<float>(lse * log2e<double>);
  }
  if (job.dq_images && job.dq_from) start_image(job, query_block);
}

// P = 2^(S - lse2), in place, of scores that lack `factor` unless they are `scaled`.
template <bool scaled, class Beside>
HWY_INLINE void probabilities(const Tile& tile, const float* lse2, float factor, Beside& beside, float* S) {
  TESSERA_FOR_TILE(tile, j, i) {
    float* at = S + j * block_q + i;
    const Vec base = load(lse2 + tile.i0 + i);
    store(exp2_any(scaled ? hn::Sub(load(at), base) : hn::MulSub(load(at), set(factor), base)), at);
    if (i == 0) beside.advance();
  }
}

// dS = P (dP - delta), in place of dP.
template <class Beside>
HWY_INLINE void score_gradients(const Tile& tile, const float* P, const float* delta, Beside& beside, float* dP) {
  TESSERA_FOR_TILE(tile, j, i) {
    const Int64 at = j * block_q + i;
    store(hn::Mul(load(P + at), hn::Sub(load(dP + at), load(delta + tile.i0 + i))), dP + at);
    if (i == 0) beside.advance();
  }
}

// P (times the dropout factors) and dS of one tile, before the derivative of its scores. The tile's keys begin at row
// `first` of those loaded.
template <class Beside>
HWY_INLINE void recompute(const BackwardJob& job, const Tile& tile, Int64 first, const BackwardScratch& s,
                          Beside& beside) {
  const HeadJob& head = job.head;
  s.products.scores(head, tile, first, s.P);
  const float factor = finish_scores<true>(head, tile, s.P, s.derivative);
  probabilities<true>(tile, job.lse2, factor, beside, s.P);
  s.products.value_products(head, tile, first, s.dS);
  if (head.options.dropout) {
    dropout_factors(head, tile, s.Z);
    multiply_tile(tile, s.Z, s.dS);
  }
  score_gradients(tile, s.P, job.delta, beside, s.dS);
  if (head.options.dropout) multiply_tile(tile, s.Z, s.P);
}

// What the span's group adds to dQ of a block of queries, transposed.
HWY_INLINE float* image_of(const KeySpanJob& span, const BackwardJob& job, Int64 query_block) {
  return job.dq_images + (span.group * query_blocks(job.head.nq) + query_block) * job.image_rows * block_q;
}

// Whether a tile is the first of its queries in its group: it replaces what the workspace held before.
HWY_INLINE bool starts_image(const KeySpanJob& span, const BackwardJob& job, Range queries, Int64 key_block) {
  return !job.dq_from && key_block == greater(span.first_block, visible_keys(job.head.mask, queries).begin / block_k);
}

HWY_INLINE Range keys_of(const KeySpanJob& span) {
  return {span.block_begin * block_k, lesser(span.block_end * block_k, span.jobs[0].head.nk)};
}

// The queries that the span sums over.
HWY_INLINE Range queries_of(const KeySpanJob& span) {
  const Range seeing = visible_queries(span.jobs[0].head.mask, keys_of(span));
  return {greater(seeing.begin, span.queries.begin), lesser(seeing.end, span.queries.end)};
}

// The spans of a group add to a part of its image in the order of their keys, so that the sum is deterministic. This
// span's turn comes when all spans before it that see these queries have added.
struct Turn {
  int* turns;  // null: this span adds nothing
  int before;
};
HWY_INLINE Turn turn_of(const KeySpanJob& span, const BackwardJob& job, Int64 query_block) {
  const Range seen = visible_keys(job.head.mask, query_range(job.head, query_block)), keys = keys_of(span);
  if (!job.dq_images || greater(seen.begin, keys.begin) >= lesser(seen.end, keys.end)) return {nullptr, 0};
  const Int64 first = greater(seen.begin / block_k, span.first_block) - span.first_block;
  const Int64 before = (span.block_begin - span.first_block) / key_blocks_beside - first / key_blocks_beside;
  return {job.turns + span.group * query_blocks(job.head.nq) + query_block, static_cast<int>(before)};
}
HWY_INLINE void begin_turn(const KeySpanJob& span, const BackwardJob& job, Int64 query_block) {
  if (const Turn turn = turn_of(span, job, query_block); turn.turns) await_turn(turn.turns, turn.before);
}
// This span has added all it will.
HWY_INLINE void end_turn(const KeySpanJob& span, const BackwardJob& job, Int64 query_block) {
  if (const Turn turn = turn_of(span, job, query_block); turn.turns)
    __atomic_store_n(turn.turns, turn.before + 1, __ATOMIC_RELEASE);
}

// Of the next block of queries, if the head has one, Q and dO and its image of dQ.
HWY_INLINE PrefetchQueue queries_to_prefetch(const KeySpanJob& span, const BackwardJob& job, Int64 query_block) {
  const Range rows = query_range(job.head, query_block);
  if (rows.empty()) return {};
  PrefetchQueue prefetch{3, {{job.head.q, rows, job.head.D}, {job.d_o, rows, job.head.Dv}}};
  if (job.dq_images) {
    char* image = reinterpret_cast<char*>(image_of(span, job, query_block));
    prefetch.rows[2] = {Rows{Type::f32, image, block_q * Int64(sizeof(float))}, {0, job.head.D}, block_q};
  }
  return prefetch;
}

// One block of queries, which is loaded, against one block of keys: adds to dK, dV (which start at the block's first
// key) and dQ's image.
HWY_INLINE void backward_tile(const KeySpanJob& span, const BackwardJob& job, Range queries, Int64 key_block,
                              const BackwardScratch& s, PrefetchQueue& prefetch, float* dK, float* dV) {
  const HeadJob& head = job.head;
  const Range keys = key_range(head, queries, key_block);
  if (keys.empty()) return;
  const Tile tile = tile_of(queries, keys);
  const Int64 first = tile.j0 - key_block * block_k;

  recompute(job, tile, first, s, prefetch);
  if (span.dv) s.products.add_dv(head, tile, s.P, dV + first * VectorBackward::padded(head.Dv));
  if (head.options.need_derivative()) multiply_tile(tile, s.derivative, s.dS);
  if (head.dS_scale != 1) scale_tile(tile, head.dS_scale, s.dS);
  if (span.dk) s.products.add_dk(head, tile, s.dS, dK + first * VectorBackward::padded(head.D));
  if (job.dq_images) {
    begin_turn(span, job, queries.begin / block_q);
    float* image = image_of(span, job, queries.begin / block_q);
    s.products.add_dq(head, tile, first, s.dS, starts_image(span, job, queries, key_block), image);
  }
}

// Rows of dK or dV, times `factor`, to the caller's tensor.
HWY_INLINE void store_gradient(const Rows& out, Int64 key0, Range keys, Int64 width, Int64 padded, float factor,
                               bool accumulate, float* rows) {
  if (!out) return;
  for (Int64 j = 0; j < keys.size(); ++j) {
    float* row = rows + j * padded;
    for (Int64 d = 0; d < padded; d += lanes) store(hn::Mul(load(row + d), set(factor)), row + d);
    narrow_row(out, keys.begin - key0 + j, width, accumulate, row);
  }
}

HWY_NOINLINE void backward_key_span(const KeySpanJob& span, float* memory) {
  const HeadJob& any = span.jobs[0].head;
  const Int64 D_padded = VectorBackward::padded(any.D), Dv_padded = VectorBackward::padded(any.Dv);
  const Int64 begin = span.block_begin, count = span.block_end - begin;
  Scratch pieces(memory);
  BackwardScratch s(any.D, any.Dv, pieces);
  VectorBackward::Keys keys[key_blocks_beside];
  for (Int64 n = 0; n < count; ++n) {
    keys[n] = s.products.load_keys(any, key_block_range(any, begin + n), true, n);
    fill(s.dK[n], block_k * D_padded, 0);
    fill(s.dV[n], block_k * Dv_padded, 0);
  }
  const Range seeing = queries_of(span);
  for (Int64 h = 0; h < span.heads; ++h)
    for (Int64 q = seeing.begin / block_q; q * block_q < seeing.end; ++q) {
      const BackwardJob& job = span.jobs[h];
      const Range queries = query_range(any, q);
      PrefetchQueue prefetch = queries_to_prefetch(span, job, q + 1);
      s.products.load_queries(job, tile_of(queries, {}));
      for (Int64 n = 0; n < count; ++n) {
        s.products.use_keys(keys[n]);
        backward_tile(span, job, queries, begin + n, s, prefetch, s.dK[n], s.dV[n]);
      }
      end_turn(span, job, q);
    }
  for (Int64 n = 0; n < count; ++n) {
    const Range range = key_block_range(any, begin + n);
    store_gradient(span.dk, span.key0, range, any.D, D_padded, any.scale, span.accumulate, s.dK[n]);
    store_gradient(span.dv, span.key0, range, any.Dv, Dv_padded, 1.0f, span.accumulate, s.dV[n]);
  }
}

// dQ of one block of queries: the groups' images, summed in order.
HWY_NOINLINE void finish_dq_block(const BackwardJob& job, const Rows& dq, bool accumulate, Int64 query_block,
                                  float* memory) {
  const HeadJob& head = job.head;
  float *sum = memory, *factor = memory + head.D * block_q;
  fill(factor, block_q, head.scale);
  fill(sum, head.D * block_q, 0);
  const Range queries = query_range(head, query_block);
  const Tile tile = tile_of(queries, {});
  const Range seen = visible_keys(head.mask, queries);
  if (job.dq_from && seen.empty()) return;  // the rows are there already
  for (Int64 g = 0; g < job.groups; ++g) {
    const Int64 begin = group_begin(head.nk, job.groups, g) * block_k;
    const Int64 end = group_begin(head.nk, job.groups, g + 1) * block_k;
    if (seen.empty() || seen.end <= begin || end <= seen.begin) continue;  // the group never saw these queries
    const float* image = job.dq_images + (g * query_blocks(head.nq) + query_block) * job.image_rows * block_q;
    for (Int64 d = 0; d < head.D; ++d)
      for (Int64 i = 0; i < tile.width; i += lanes) {
        const Int64 at = d * block_q + i;
        store(hn::Add(load(sum + at), load(image + at)), sum + at);
      }
  }
  store_transposed(sum, tile, head.D, factor, accumulate, dq);
}
