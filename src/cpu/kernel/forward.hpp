// The forward pass of one block of queries: docs/algorithm.md, "Online softmax", with S, P and O transposed so that
// each query owns a lane. Included by cpu/isa/*.cpp inside their target region.
#pragma once

struct ForwardScratch {
  float *Q, *O, *S, *K, *V, *Z, *m, *sum, *alpha;
  double* l;  // f64: a sum of many nearly equal terms would drift in f32, and LSE promises one unit in the last place

  ForwardScratch(Int64 D, Int64 Dv, Scratch& scratch) :
      Q(scratch.take(D * block_q)), O(scratch.take(Dv * block_q)), S(scratch.take(block_k * block_q)),
      K(scratch.take(block_k * D)), V(scratch.take(block_k * Dv)), Z(scratch.take(block_k * block_q)),
      m(scratch.take(block_q)), sum(scratch.take(block_q)), alpha(scratch.take(block_q)),
      l(reinterpret_cast<double*>(scratch.take(2 * block_q))) {}
};

// P = 2^(S - base), in place.
HWY_INLINE Vec exponentiate(float* S, Vec base) {
  const Vec P = exp2_bounded(hn::Sub(load(S), base));
  store(P, S);
  return P;
}

// Scores become P = 2^(S - m) and m takes the tile in; alpha = 2^(m_old - m), and sum is that of P over the tile.
// Several vectors at a time, so that maxima and sums stay in registers.
template <int vectors>
HWY_INLINE void softmax_columns(Int64 rows, float* S, float* m, float* sum, float* alpha) {
  Vec top[vectors], base[vectors], total[vectors], lost[vectors];
  TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) top[n] = load(m + n * lanes);
  for (Int64 j = 0; j < rows; ++j) TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) top[n] = hn::Max(top[n], load(S + j * block_q + n * lanes));
  TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) {
    // Exponents of a row that has seen nothing are taken relative to 0: -inf - (-inf) would be NaN.
    base[n] = hn::IfThenElse(hn::Eq(top[n], set(-infinity)), hn::Zero(FloatTag()), top[n]);
    store(exp2_bounded(hn::Sub(load(m + n * lanes), base[n])), alpha + n * lanes);
    store(top[n], m + n * lanes);
    total[n] = lost[n] = hn::Zero(FloatTag());
  }
  // Four rows at a time are summed in pairs, and the fours with compensation (Kahan).
  for (Int64 j = 0; j < rows; j += 4) {
    const Int64 left = rows - j;
    TESSERA_UNROLL
    for (int n = 0; n < vectors; ++n) {
      float* at = S + j * block_q + n * lanes;
      Vec P = exponentiate(at, base[n]);
      if (left > 1) P = hn::Add(P, exponentiate(at + block_q, base[n]));
      if (left > 2) {
        Vec other = exponentiate(at + 2 * block_q, base[n]);
        if (left > 3) other = hn::Add(other, exponentiate(at + 3 * block_q, base[n]));
        P = hn::Add(P, other);
      }
      const Vec term = hn::Sub(P, lost[n]);
      const Vec next = hn::Add(total[n], term);
      lost[n] = hn::Sub(hn::Sub(next, total[n]), term);
      total[n] = next;
    }
  }
  TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) store(total[n], sum + n * lanes);
}

HWY_NOINLINE void softmax_update(const Tile& tile, const ForwardScratch& s) {
  Int64 i = 0;
  for (; i + 4 * lanes <= tile.width; i += 4 * lanes)
    softmax_columns<4>(tile.nj, s.S + i, s.m + i, s.sum + i, s.alpha + i);
  for (; i < tile.width; i += lanes) softmax_columns<1>(tile.nj, s.S + i, s.m + i, s.sum + i, s.alpha + i);
  for (i = 0; i < tile.width; ++i) s.l[i] = s.l[i] * double(s.alpha[i]) + double(s.sum[i]);
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
HWY_INLINE void finish_forward(const ForwardJob& job, const Tile& tile, const ForwardScratch& s) {
  float* inverse = s.alpha;
  for (Int64 i = 0; i < tile.ni; ++i) {
    inverse[i] = s.l[i] == 0 ? 0 : static_cast<float>(1 / s.l[i]);
    const double ln2 = 0.693147180559945309417;
    if (job.lse) job.lse.set(tile.i0 + i, 0, log_sum_exp(double(s.m[i]), s.l[i], log2_of) * ln2);
  }
  store_transposed(s.O, tile, job.head.Dv, inverse, false, job.o);
}

HWY_NOINLINE void forward_block(const ForwardJob& job, Int64 query_block, float* memory) {
  const HeadJob& head = job.head;
  Scratch pieces(memory);
  const ForwardScratch scratch(head.D, head.Dv, pieces);
  float *S = scratch.S, *O = scratch.O;

  const Range queries = query_range(head, query_block);
  const Tile whole = tile_of(queries, {});
  load_transposed(head.q, whole, head.D, head.q_factor, scratch.Q);
  // A sink is a key with the score `sink` and no value.
  fill(scratch.m, block_q, head.sink);
  for (Int64 i = 0; i < block_q; ++i) scratch.l[i] = head.sink == -infinity ? 0 : 1;
  fill(O, head.Dv * block_q, 0);

  const Range seen = visible_keys(head.mask, queries);
  for (Int64 block = seen.begin / block_k; block * block_k < seen.end; ++block) {
    const Range keys = key_range(head, queries, block);
    const Tile tile = tile_of(queries, keys);
    const Panel K = load_panel(head.k, keys, head.D, scratch.K);
    multiply<Operand::rows, Result::replace>(K.rows, K.stride, scratch.Q, block_q, S, block_q, tile.nj, tile.width,
                                             head.D);
    finish_scores(head, tile, S, nullptr);
    softmax_update(tile, scratch);
    rescale(tile, head.Dv, scratch.alpha, O);
    if (head.threshold > 0) {
      dropout_factors(head, tile, scratch.Z);
      multiply_tile(tile, scratch.Z, S);
    }
    const Panel V = load_panel(head.v, keys, head.Dv, scratch.V);
    multiply<Operand::transposed, Result::add>(V.rows, V.stride, S, block_q, O, block_q, head.Dv, tile.width, tile.nj);
  }
  finish_forward(job, whole, scratch);
}
