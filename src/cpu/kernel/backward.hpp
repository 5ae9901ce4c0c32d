// The backward pass: a group of keys at a time, P recomputed from LSE; docs/algorithm.md, "Backward, tile by tile".
// Tiles of S, P, dP, dS are transposed (a key per row, a query per lane), dQ too. Included by cpu/isa/*.cpp inside
// their region.
#pragma once

struct BackwardScratch {
  float *Qt, *dOt, *Q, *dO, *K, *V, *P, *dS, *derivative, *Z, *dK, *dV;

  BackwardScratch(Int64 D, Int64 Dv, Scratch& s) :
      Qt(s.take(D * block_q)), dOt(s.take(Dv * block_q)), Q(s.take(block_q * round_up(D, lanes))),
      dO(s.take(block_q * round_up(Dv, lanes))), K(s.take(block_k * D)), V(s.take(block_k * Dv)),
      P(s.take(block_k * block_q)), dS(s.take(block_k * block_q)), derivative(s.take(block_k * block_q)),
      Z(s.take(block_k * block_q)), dK(s.take(block_k * round_up(D, lanes))),
      dV(s.take(block_k * round_up(Dv, lanes))) {}
};

// delta = dO . O - dLSE and lse2 of one block of queries. Rows that see nothing get lse2 = +inf, so that P = 0.
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
    double delta = job.d_lse ? -job.d_lse.get(i, 0) : 0;
    for (Int64 d = 0; d < head.Dv; ++d) delta += double(O[d]) * double(dO[d]);
    job.delta[i] = static_cast<float>(delta);
    job.lse2[i] = static_cast<float>(lse * 1.44269504088896340736);
  }
}

// P = 2^(S - lse2), in place.
HWY_INLINE void probabilities(const Tile& tile, const float* lse2, float* S) {
  TESSERA_FOR_TILE(tile, j, i) {
    float* at = S + j * block_q + i;
    store(exp2_any(hn::Sub(load(at), load(lse2 + tile.i0 + i))), at);
  }
}

// dS = P (dP - delta), in place of dP.
HWY_INLINE void score_gradients(const Tile& tile, const float* P, const float* delta, float* dP) {
  TESSERA_FOR_TILE(tile, j, i) {
    const Int64 at = j * block_q + i;
    store(hn::Mul(load(P + at), hn::Sub(load(dP + at), load(delta + tile.i0 + i))), dP + at);
  }
}

// Zeroes the lanes of rows that see nothing: their q and dO may hold anything.
HWY_INLINE void clear_dead_lanes(const Tile& tile, const float* lse2, Int64 width, float* transposed) {
  for (Int64 i = 0; i < tile.ni; ++i)
    if (lse2[tile.i0 + i] == infinity)
      for (Int64 d = 0; d < width; ++d) transposed[d * block_q + i] = 0;
}
HWY_INLINE void clear_dead_rows(const Tile& tile, const float* lse2, Int64 padded, float* rows) {
  for (Int64 i = 0; i < tile.ni; ++i)
    if (lse2[tile.i0 + i] == infinity) fill(rows + i * padded, padded, 0);
}

// What both users of a tile need of its queries: q and dO, transposed.
HWY_INLINE void load_queries(const BackwardJob& job, const Tile& tile, const BackwardScratch& s) {
  load_transposed(job.head.q, tile, job.head.D, job.head.q_factor, s.Qt);
  load_transposed(job.d_o, tile, job.head.Dv, 1.0f, s.dOt);
  clear_dead_lanes(tile, job.lse2, job.head.D, s.Qt);
  clear_dead_lanes(tile, job.lse2, job.head.Dv, s.dOt);
}

// P (times the dropout factors) and dS of one tile, before the softcap's derivative. K and V start at the tile's keys.
HWY_INLINE void recompute(const BackwardJob& job, const Tile& tile, Panel K, Panel V, const BackwardScratch& s) {
  const HeadJob& head = job.head;
  multiply<Operand::rows, Result::replace>(K.rows, K.stride, s.Qt, block_q, s.P, block_q, tile.nj, tile.width, head.D);
  finish_scores(head, tile, s.P, s.derivative);
  probabilities(tile, job.lse2, s.P);
  multiply<Operand::rows, Result::replace>(V.rows, V.stride, s.dOt, block_q, s.dS, block_q, tile.nj, tile.width,
                                           head.Dv);
  if (head.threshold > 0) {
    dropout_factors(head, tile, s.Z);
    multiply_tile(tile, s.Z, s.dS);
  }
  score_gradients(tile, s.P, job.delta, s.dS);
  if (head.threshold > 0) multiply_tile(tile, s.Z, s.P);
}

// One block of queries against one block of keys: adds to dK, dV (which start at the block's first key) and dQ's image.
HWY_INLINE void backward_tile(const KeyGroupJob& group, const BackwardJob& job, Int64 query_block, Int64 key_block,
                              Panel K, Panel V, const BackwardScratch& s) {
  const HeadJob& head = job.head;
  const Range queries = query_range(head, query_block), keys = key_range(head, queries, key_block);
  if (keys.empty()) return;
  const Tile tile = tile_of(queries, keys);
  const Int64 first = tile.j0 - key_block * block_k;
  const Int64 D_padded = round_up(head.D, lanes), Dv_padded = round_up(head.Dv, lanes);
  K.rows = K.at(first), V.rows = V.at(first);

  load_queries(job, tile, s);
  recompute(job, tile, K, V, s);
  if (group.dv) {
    load_rows(job.d_o, tile.i0, tile.ni, head.Dv, s.dO);
    clear_dead_rows(tile, job.lse2, Dv_padded, s.dO);
    multiply<Operand::rows, Result::add>(s.P, block_q, s.dO, Dv_padded, s.dV + first * Dv_padded, Dv_padded, tile.nj,
                                         Dv_padded, tile.ni);
  }
  if (head.softcap > 0) multiply_tile(tile, s.derivative, s.dS);
  if (group.dk) {
    load_rows(head.q, tile.i0, tile.ni, head.D, s.Q);
    clear_dead_rows(tile, job.lse2, D_padded, s.Q);
    multiply<Operand::rows, Result::add>(s.dS, block_q, s.Q, D_padded, s.dK + first * D_padded, D_padded, tile.nj,
                                         D_padded, tile.ni);
  }
  if (job.dq_images) {
    const Int64 blocks = query_blocks(head.nq);
    float* image = job.dq_images + (group.group * blocks + query_block) * head.D * block_q;
    // The group's first tile of these queries replaces what the workspace held before.
    const Int64 first_block = greater(group.block_begin, visible_keys(head.mask, queries).begin / block_k);
    if (key_block == first_block)
      multiply<Operand::transposed, Result::replace>(K.rows, K.stride, s.dS, block_q, image, block_q, head.D,
                                                     tile.width, tile.nj);
    else
      multiply<Operand::transposed, Result::add>(K.rows, K.stride, s.dS, block_q, image, block_q, head.D, tile.width,
                                                 tile.nj);
  }
}

// Rows of dK or dV, times `factor`, to the caller's tensor.
HWY_INLINE void store_gradient(const Rows& out, Range keys, Int64 width, float factor, bool accumulate, float* rows) {
  if (!out) return;
  const Int64 padded = round_up(width, lanes);
  for (Int64 j = 0; j < keys.size(); ++j) {
    float* row = rows + j * padded;
    for (Int64 d = 0; d < padded; d += lanes) store(hn::Mul(load(row + d), set(factor)), row + d);
    narrow_row(out, keys.begin + j, width, accumulate, row);
  }
}

HWY_NOINLINE void backward_key_group(const KeyGroupJob& group, float* memory) {
  const HeadJob& any = group.jobs[0].head;
  Scratch pieces(memory);
  const BackwardScratch s(any.D, any.Dv, pieces);
  for (Int64 block = group.block_begin; block < group.block_end; ++block) {
    const Range keys{block * block_k, lesser((block + 1) * block_k, any.nk)};
    const Panel K = load_panel(any.k, keys, any.D, true, s.K), V = load_panel(any.v, keys, any.Dv, true, s.V);
    fill(s.dK, block_k * round_up(any.D, lanes), 0);
    fill(s.dV, block_k * round_up(any.Dv, lanes), 0);
    const Range queries = visible_queries(any.mask, keys);
    for (Int64 h = 0; h < group.heads; ++h)
      for (Int64 q = queries.begin / block_q; q * block_q < queries.end; ++q)
        backward_tile(group, group.jobs[h], q, block, K, V, s);
    store_gradient(group.dk, keys, any.D, any.scale, group.accumulate, s.dK);
    store_gradient(group.dv, keys, any.Dv, 1.0f, group.accumulate, s.dV);
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
  for (Int64 g = 0; g < key_groups(head.nk); ++g) {
    const Int64 begin = group_begin(head.nk, g) * block_k, end = group_begin(head.nk, g + 1) * block_k;
    if (seen.empty() || seen.end <= begin || end <= seen.begin) continue;  // the group never saw these queries
    const float* image = job.dq_images + (g * query_blocks(head.nq) + query_block) * head.D * block_q;
    for (Int64 d = 0; d < head.D; ++d)
      for (Int64 i = 0; i < tile.width; i += lanes) {
        const Int64 at = d * block_q + i;
        store(hn::Add(load(sum + at), load(image + at)), sum + at);
      }
  }
  store_transposed(sum, tile, head.D, factor, accumulate, dq);
}
