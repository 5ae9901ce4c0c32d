// The forward pass of one block of queries: docs/algorithm.md, "Online softmax", with S, P and O transposed so that
// each query owns a lane. Included by cpu/isa/*.cpp inside their target region.
#pragma once

struct ForwardScratch {
  float *Q, *O, *S, *K, *V, *Z, *m, *l, *alpha;

  ForwardScratch(Int64 D, Int64 Dv, Scratch& scratch) :
      Q(scratch.take(D * block_q)), O(scratch.take(Dv * block_q)), S(scratch.take(block_k * block_q)),
      K(scratch.take(block_k * D)), V(scratch.take(block_k * Dv)), Z(scratch.take(block_k * block_q)),
      m(scratch.take(block_q)), l(scratch.take(block_q)), alpha(scratch.take(block_q)) {}
};

// Scores become P = 2^(S - m); m and l take the tile in; alpha = 2^(m_old - m). Four vectors at a time, so that maxima
// and sums stay in registers.
template <int vectors>
HWY_INLINE void softmax_columns(Int64 rows, float* S, float* m, float* l, float* alpha) {
  Vec top[vectors], base[vectors], sum[vectors];
  TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) top[n] = load(m + n * lanes);
  for (Int64 j = 0; j < rows; ++j) TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) top[n] = hn::Max(top[n], load(S + j * block_q + n * lanes));
  TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) {
    // Exponents of a row that has seen nothing are taken relative to 0: -inf - (-inf) would be NaN.
    base[n] = hn::IfThenElse(hn::Eq(top[n], set(-infinity)), hn::Zero(FloatTag()), top[n]);
    const Vec factor = exp2_bounded(hn::Sub(load(m + n * lanes), base[n]));
    store(top[n], m + n * lanes);
    store(factor, alpha + n * lanes);
    sum[n] = hn::Zero(FloatTag());
  }
  for (Int64 j = 0; j < rows; ++j) TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) {
    float* at = S + j * block_q + n * lanes;
    const Vec P = exp2_bounded(hn::Sub(load(at), base[n]));
    sum[n] = hn::Add(sum[n], P);
    store(P, at);
  }
  TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n)
    store(hn::MulAdd(load(l + n * lanes), load(alpha + n * lanes), sum[n]), l + n * lanes);
}

HWY_NOINLINE void softmax_update(const Tile& tile, float* S, float* m, float* l, float* alpha) {
  Int64 i = 0;
  for (; i + 4 * lanes <= tile.width; i += 4 * lanes) softmax_columns<4>(tile.nj, S + i, m + i, l + i, alpha + i);
  for (; i < tile.width; i += lanes) softmax_columns<1>(tile.nj, S + i, m + i, l + i, alpha + i);
}

// O *= alpha, unless no maximum rose: multiplying by 1 changes nothing.
HWY_INLINE void rescale(const Tile& tile, Int64 Dv, const float* alpha, float* O) {
  bool all_one = true;
  for (Int64 i = 0; i < tile.width; i += lanes)
    all_one = all_one && hn::AllTrue(FloatTag(), hn::Eq(load(alpha + i), set(1.0f)));
  if (all_one) return;
  for (Int64 d = 0; d < Dv; ++d)
    for (Int64 i = 0; i < tile.width; i += lanes) {
      float* at = O + d * block_q + i;
      store(hn::Mul(load(at), load(alpha + i)), at);
    }
}

// O / l and LSE = log(l) + m go to the caller's tensors.
HWY_INLINE void finish_forward(const ForwardJob& job, const Tile& tile, const ForwardScratch& scratch) {
  float* inverse = scratch.alpha;
  for (Int64 i = 0; i < tile.ni; ++i) {
    const float m = scratch.m[i], l = scratch.l[i];
    inverse[i] = l == 0 ? 0 : 1 / l;
    if (!job.lse) continue;
    const double ln2 = 0.693147180559945309417;
    job.lse.set(tile.i0 + i, 0, l == 0 ? -__builtin_inf() : (double(m) + __builtin_log2(double(l))) * ln2);
  }
  store_transposed(scratch.O, tile, job.head.Dv, inverse, false, job.o);
}

HWY_NOINLINE void forward_block(const ForwardJob& job, Int64 query_block, float* memory) {
  const HeadJob& head = job.head;
  Scratch pieces(memory);
  const ForwardScratch scratch(head.D, head.Dv, pieces);
  float *S = scratch.S, *O = scratch.O, *m = scratch.m, *l = scratch.l, *alpha = scratch.alpha;

  const Range queries = query_range(head, query_block);
  const Tile whole = tile_of(queries, {});
  load_transposed(head.q, whole, head.D, head.q_factor, scratch.Q);
  // A sink is a key with the score `sink` and no value.
  fill(m, block_q, head.sink);
  fill(l, block_q, head.sink == -infinity ? 0.0f : 1.0f);
  fill(O, head.Dv * block_q, 0);

  const Range seen = visible_keys(head.mask, queries);
  for (Int64 block = seen.begin / block_k; block * block_k < seen.end; ++block) {
    const Range keys = key_range(head, queries, block);
    const Tile tile = tile_of(queries, keys);
    const Panel K = load_panel(head.k, keys, head.D, scratch.K);
    multiply<Operand::rows, Result::replace>(K.rows, K.stride, scratch.Q, block_q, S, block_q, tile.nj, tile.width,
                                             head.D);
    finish_scores(head, tile, S, nullptr);
    softmax_update(tile, S, m, l, alpha);
    rescale(tile, head.Dv, alpha, O);
    if (head.threshold > 0) {
      dropout_factors(head, tile, scratch.Z);
      multiply_tile(tile, scratch.Z, S);
    }
    const Panel V = load_panel(head.v, keys, head.Dv, scratch.V);
    multiply<Operand::transposed, Result::add>(V.rows, V.stride, S, block_q, O, block_q, head.Dv, tile.width, tile.nj);
  }
  finish_forward(job, whole, scratch);
}
