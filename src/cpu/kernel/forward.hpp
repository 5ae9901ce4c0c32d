// SPDX-License-Identifier: Apache-2.0
// The forward pass of a few blocks of queries: docs/algorithm.md, "Online softmax", with S, P and O transposed so that
// each query owns a lane. Included by cpu/isa/*.cpp inside their target region.
#pragma once

template <class Products>
struct ForwardScratch {
  Products products;
  float *O, *m;  // of each block of queries
  double* l;     // likewise; f64: many nearly equal terms would drift in f32, and LSE promises one ulp
  float *S, *Z, *sum, *alpha;

  ForwardScratch(Int64 D, Int64 Dv, Scratch& scratch) :
      products(D, Dv, scratch), O(scratch.take(forward_blocks * Products::padded(Dv) * block_q)),
      m(scratch.take(forward_blocks * block_q)),
      l(reinterpret_cast<double*>(scratch.take(forward_blocks * 2 * block_q))), S(scratch.take(block_k * block_q)),
      Z(scratch.take(block_k * block_q)), sum(scratch.take(block_q)), alpha(scratch.take(block_q)) {}

  // What the steps of one block of queries need.
  struct Block {
    float *O, *m;
    double* l;
    float *S, *Z, *sum, *alpha;
  };
  HWY_INLINE Block block(Int64 n, Int64 Dv) const {
    return {O + n * Products::padded(Dv) * block_q, m + n * block_q, l + n * block_q, S, Z, sum, alpha};
  }
};

// Products times the scores' factor, minus the row's base, which is one of them. The product is rounded by itself, as
// the base was: of scores beyond 2^31 the one that gave the base would otherwise differ from it by more than an
// exponent may. By MulAdd, since a compiler may contract Mul and Sub.
HWY_INLINE Vec exponent_of(const float* products, Vec factor, Vec base) {
  return hn::Sub(hn::MulAdd(load(products), factor, hn::Zero(FloatTag())), base);
}

// P = 2^(S - base); products that are not scores yet have still to be multiplied by `factor`.
template <bool scaled, Exactness exactness>
HWY_INLINE Vec exponential(const float* S, Vec factor, Vec base) {
  return exp2_bounded<exactness>(scaled ? hn::Sub(load(S), base) : exponent_of(S, factor, base));
}

// Work that overlaps with a softmax, advanced between its steps: prefetching, products on the matrix unit, or nothing.
struct Nothing {
  HWY_INLINE void advance() {}
};

// Scores become P = 2^(S - m), and m takes the tile in if that raises it by more than `slack`, so that O need not be
// rescaled each time: P is at most 2^slack. alpha = 2^(m_old - m), and sum is that of P over the tile. Several vectors
// at a time, from lane i on, so that maxima and sums stay in registers. `factor` is positive.
inline constexpr float slack = 8;
template <int vectors, bool scaled, class Kept, class Beside>
HWY_INLINE void softmax_columns(Int64 rows, Int64 i, Vec factor, const Kept& kept, Beside& beside, const float* S,
                                float* m, float* sum, float* alpha) {
  Vec top[vectors], base[vectors], total[vectors], lost[vectors];
  TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) top[n] = set(-infinity);
  for (Int64 begin = 0; begin < rows; begin += 16) {
    for (Int64 j = begin; j < lesser(begin + 16, rows); ++j) TESSERA_UNROLL
    for (int n = 0; n < vectors; ++n) top[n] = hn::Max(top[n], load(S + j * block_q + n * lanes));
    beside.advance();
  }
  TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) {
    const Vec before = load(m + n * lanes), here = scaled ? top[n] : hn::Mul(top[n], factor);
    top[n] = hn::IfThenElse(hn::Gt(here, hn::Add(before, set(slack))), here, before);
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
      const float* at = S + j * block_q + n * lanes;
      const Vec none = hn::Zero(FloatTag());
      const Vec first = exponential<scaled, Kept::exactness>(at, factor, base[n]);
      const Vec second = left > 1 ? exponential<scaled, Kept::exactness>(at + block_q, factor, base[n]) : none;
      kept.keep(j, i + n * lanes, first, second);
      Vec P = hn::Add(first, second);
      if (left > 2) {
        const Vec third = exponential<scaled, Kept::exactness>(at + 2 * block_q, factor, base[n]);
        const Vec fourth = left > 3 ? exponential<scaled, Kept::exactness>(at + 3 * block_q, factor, base[n]) : none;
        kept.keep(j + 2, i + n * lanes, third, fourth);
        P = hn::Add(P, hn::Add(third, fourth));
      }
      const Vec term = hn::Sub(P, lost[n]);
      const Vec next = hn::Add(total[n], term);
      lost[n] = hn::Sub(hn::Sub(next, total[n]), term);
      total[n] = next;
      beside.advance();
    }
  }
  TESSERA_UNROLL
  for (int n = 0; n < vectors; ++n) store(total[n], sum + n * lanes);
}

// How often advance() is called meanwhile, about.
constexpr Int64 softmax_steps(const Tile& tile) { return ceil_div(tile.nj, 4) * (tile.width / lanes); }

template <bool scaled, class Kept, class Block, class Beside>
HWY_NOINLINE void softmax_update(const Tile& tile, float factor, const Kept& kept, const Block& s, Beside& beside) {
  Int64 i = 0;
  for (; i + 4 * lanes <= tile.width; i += 4 * lanes)
    softmax_columns<4, scaled>(tile.nj, i, set(factor), kept, beside, s.S + i, s.m + i, s.sum + i, s.alpha + i);
  for (; i < tile.width; i += lanes)
    softmax_columns<1, scaled>(tile.nj, i, set(factor), kept, beside, s.S + i, s.m + i, s.sum + i, s.alpha + i);
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

// LSE of one row from its state. (No template: gcc would instantiate log_sum_exp outside of the target region.)
HWY_INLINE double natural_lse(float m, double l) { return log_sum_exp(double(m), l, log2_of) * ln2<double>; }

// What rows carry from call to call: m, l and O as they are between two tiles.
HWY_NOINLINE void load_state(const CarriedState& from, const Tile& tile, Int64 Dv, float* O, float* m, double* l) {
  for (Int64 i = 0; i < tile.ni; ++i) {
    m[i] = static_cast<float>(from.m.get(tile.i0 + i, 0));
    l[i] = from.l.get(tile.i0 + i, 0);
  }
  load_transposed(from.o, tile, Dv, 1.0f, O);
}
HWY_NOINLINE void store_state(const CarriedState& to, const Tile& tile, Int64 Dv, const float* O, const float* m,
                              const double* l) {
  HWY_ALIGN float one[block_q];
  fill(one, block_q, 1);
  for (Int64 i = 0; i < tile.ni; ++i) {
    to.m.set(tile.i0 + i, 0, double(m[i]));
    to.l.set(tile.i0 + i, 0, l[i]);
  }
  store_transposed(O, tile, Dv, one, false, to.o);
}

// O / l and LSE = log(l) + m go to the caller's tensors; or the state as it is.
template <class Block>
HWY_INLINE void finish_forward(const ForwardJob& job, const Tile& tile, const Block& s) {
  float* inverse = s.alpha;
  if (job.to) return store_state(job.to, tile, job.head.Dv, s.O, s.m, s.l);
  for (Int64 i = 0; i < tile.ni; ++i) {
    inverse[i] = s.l[i] == 0 ? 0 : static_cast<float>(double(job.head.keep_scale) / s.l[i]);
    if (job.lse) job.lse.set(tile.i0 + i, 0, natural_lse(s.m[i], s.l[i]));
  }
  store_transposed(s.O, tile, job.head.Dv, inverse, false, job.o);
}

template <class Block>
HWY_INLINE void start_block(const ForwardJob& job, const Tile& tile, Int64 O_rows, const Block& s) {
  const HeadJob& head = job.head;
  // A sink is a key with the score `sink` and no value.
  fill(s.m, block_q, head.sink);
  for (Int64 i = 0; i < block_q; ++i) s.l[i] = head.sink == -infinity ? 0 : 1;
  fill(s.O, O_rows * block_q, 0);
  if (job.from) load_state(job.from, tile, head.Dv, s.O, s.m, s.l);
}

// Products become P, where `kept` wants it.
template <bool scaled, class Kept, class Block, class Beside>
HWY_INLINE void softmax_tile(const HeadJob& head, const Tile& tile, const Kept& kept, const Block& s, Beside& beside) {
  const float factor = finish_scores<scaled>(head, tile, s.S, nullptr);
  if (!head.options.dropout) {
    softmax_update<scaled>(tile, factor, kept, s, beside);
  } else {
    softmax_update<scaled>(tile, factor, InPlace{s.S}, s, beside);
    dropout_factors(head, tile, s.Z);
    drop(tile, s.Z, s.S);
    kept.keep_tile(tile, s.S);
  }
}

// Of the next block of keys K and V or, after the last one, the rows of O.
HWY_INLINE PrefetchQueue keys_to_prefetch(const ForwardJob& job, Range next, Range queries) {
  const HeadJob& head = job.head;
  if (next.empty()) return {2, {{job.to ? job.to.o : job.o, queries, head.Dv}}};
  return {2, {{head.k, next, head.D}, {head.v, next, head.Dv}}};
}

// Block n of the task's queries against keys that are loaded, from row `first` on.
HWY_INLINE void forward_tile(const HeadJob& head, const Tile& tile, Int64 n, Int64 first, PrefetchQueue& prefetch,
                             const ForwardScratch<VectorForward>& scratch) {
  const auto s = scratch.block(n, head.Dv);
  scratch.products.scores(head, tile, n, first, s.S);
  softmax_tile<true>(head, tile, InPlace{s.S}, s, prefetch);
  rescale(tile, head.Dv, s.alpha, s.O);
  scratch.products.add_values(head, tile, first, s.S, s.O);
}

// Several neighbouring blocks of queries share what they load of K and V. Their results do not depend on each other.
HWY_NOINLINE void forward_blocks_of(const ForwardJob& job, Range blocks, float* memory) {
  const HeadJob& head = job.head;
  Scratch pieces(memory);
  ForwardScratch<VectorForward> all(head.D, head.Dv, pieces);
  if (head.qv) all.products.Qvt = pieces.take(VectorForward::second_floats(head.Dv));
  for (Int64 n = blocks.begin; n < blocks.end; ++n) {
    const Tile tile = tile_of(query_range(head, n), {});
    all.products.load_queries(head, tile, n - blocks.begin);
    start_block(job, tile, head.Dv, all.block(n - blocks.begin, head.Dv));
  }
  const Range queries{blocks.begin * block_q, lesser(blocks.end * block_q, head.nq)};
  const Range seen = visible_keys(head.mask, queries);
  for (Int64 block = seen.begin / block_k; block * block_k < seen.end; ++block) {
    const Range loaded{greater(seen.begin, block * block_k), lesser(seen.end, (block + 1) * block_k)};
    all.products.load_keys(head, loaded, blocks.size() > 1);
    PrefetchQueue prefetch = keys_to_prefetch(job, {loaded.end, lesser(seen.end, (block + 2) * block_k)}, queries);
    for (Int64 n = blocks.begin; n < blocks.end; ++n) {
      const Range rows = query_range(head, n), keys = key_range(head, rows, block);
      if (keys.empty()) continue;
      forward_tile(head, tile_of(rows, keys), n - blocks.begin, keys.begin - loaded.begin, prefetch, all);
    }
  }
  for (Int64 n = blocks.begin; n < blocks.end; ++n)
    finish_forward(job, tile_of(query_range(head, n), {}), all.block(n - blocks.begin, head.Dv));
}
