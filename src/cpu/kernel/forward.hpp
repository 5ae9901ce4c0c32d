// The forward pass of a few blocks of queries: docs/algorithm.md, "Online softmax", with S, P and O transposed so that
// each query owns a lane. Included by cpu/isa/*.cpp inside their target region.
#pragma once

struct ForwardScratch {
  float *Q, *O, *m;  // of each block of queries
  double* l;  // likewise; f64: many nearly equal terms would drift in f32, and LSE promises one unit in the last place
  float *S, *K, *V, *Z, *sum, *alpha;

  ForwardScratch(Int64 D, Int64 Dv, Scratch& scratch) :
      Q(scratch.take(forward_blocks * D * block_q)), O(scratch.take(forward_blocks * Dv * block_q)),
      m(scratch.take(forward_blocks * block_q)),
      l(reinterpret_cast<double*>(scratch.take(forward_blocks * 2 * block_q))), S(scratch.take(block_k * block_q)),
      K(scratch.take(block_k * D)), V(scratch.take(block_k * Dv)), Z(scratch.take(block_k * block_q)),
      sum(scratch.take(block_q)), alpha(scratch.take(block_q)) {}

  // The same with the state of block n.
  HWY_INLINE ForwardScratch of_block(Int64 n, Int64 D, Int64 Dv) const {
    ForwardScratch s = *this;
    s.Q += n * D * block_q, s.O += n * Dv * block_q, s.m += n * block_q, s.l += n * block_q;
    return s;
  }
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

HWY_INLINE void start_block(const HeadJob& head, const Tile& whole, const ForwardScratch& scratch) {
  load_transposed(head.q, whole, head.D, head.q_factor, scratch.Q);
  // A sink is a key with the score `sink` and no value.
  fill(scratch.m, block_q, head.sink);
  for (Int64 i = 0; i < block_q; ++i) scratch.l[i] = head.sink == -infinity ? 0 : 1;
  fill(scratch.O, head.Dv * block_q, 0);
}

// One block of queries against keys whose rows of K and V are at hand.
HWY_INLINE void forward_tile(const HeadJob& head, const Tile& tile, const Panel& K, const Panel& V,
                             const ForwardScratch& scratch) {
  float *S = scratch.S, *O = scratch.O;
  multiply<Operand::rows, Result::replace>(K.rows, K.stride, scratch.Q, block_q, S, block_q, tile.nj, tile.width,
                                           head.D);
  finish_scores(head, tile, S, nullptr);
  softmax_update(tile, scratch);
  rescale(tile, head.Dv, scratch.alpha, O);
  if (head.threshold > 0) {
    dropout_factors(head, tile, scratch.Z);
    multiply_tile(tile, scratch.Z, S);
  }
  multiply<Operand::transposed, Result::add>(V.rows, V.stride, S, block_q, O, block_q, head.Dv, tile.width, tile.nj);
}

// Several neighbouring blocks of queries share what they load of K and V. Their results do not depend on each other.
HWY_NOINLINE void forward(const ForwardJob& job, Range blocks, float* memory) {
  const HeadJob& head = job.head;
  Scratch pieces(memory);
  const ForwardScratch all(head.D, head.Dv, pieces);
  for (Int64 n = blocks.begin; n < blocks.end; ++n)
    start_block(head, tile_of(query_range(head, n), {}), all.of_block(n - blocks.begin, head.D, head.Dv));

  const Range seen = visible_keys(head.mask, {blocks.begin * block_q, lesser(blocks.end * block_q, head.nq)});
  for (Int64 block = seen.begin / block_k; block * block_k < seen.end; ++block) {
    const Range loaded{greater(seen.begin, block * block_k), lesser(seen.end, (block + 1) * block_k)};
    const Panel K = load_panel(head.k, loaded, head.D, blocks.size() > 1, all.K);
    const Panel V = load_panel(head.v, loaded, head.Dv, blocks.size() > 1, all.V);
    for (Int64 n = blocks.begin; n < blocks.end; ++n) {
      const Range queries = query_range(head, n), keys = key_range(head, queries, block);
      if (keys.empty()) continue;
      const Int64 first = keys.begin - loaded.begin;
      forward_tile(head, tile_of(queries, keys), {K.at(first), K.stride}, {V.at(first), V.stride},
                   all.of_block(n - blocks.begin, head.D, head.Dv));
    }
  }
  for (Int64 n = blocks.begin; n < blocks.end; ++n)
    finish_forward(job, tile_of(query_range(head, n), {}), all.of_block(n - blocks.begin, head.D, head.Dv));
}
