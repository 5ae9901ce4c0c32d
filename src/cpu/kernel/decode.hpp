// Decoding, few queries against many keys: memory-bound. So every row of K and V is read once for all the queries of a
// few heads, and 16-bit ones are widened in registers. S has a row per (head, query) and a lane per key, unlike
// elsewhere: there are few rows. Included by cpu/isa/*.cpp inside their target region.
#pragma once

#if HWY_TARGET == HWY_AVX3
// Of neighbouring 128-bit blocks the sums: first those of `a`, then those of `b`.
HWY_INLINE Vec add_blocks(Vec a, Vec b) {
  return Vec{_mm512_add_ps(_mm512_shuffle_f32x4(a.raw, b.raw, 0x88), _mm512_shuffle_f32x4(a.raw, b.raw, 0xdd))};
}
#endif

// Sums of the lanes of `lanes` vectors, one per lane of the result.
HWY_INLINE Vec sums_of(const Vec (&x)[lanes]) {
  const hn::RepartitionToWide<FloatTag> wide;
  Vec fours[lanes / 4];  // in every 128-bit block, that block's share of four sums
  TESSERA_UNROLL
  for (Int64 n = 0; n < lanes / 4; ++n) {
    const Vec *a = x + 4 * n,
              first = hn::Add(hn::InterleaveLower(FloatTag(), a[0], a[1]), hn::InterleaveUpper(FloatTag(), a[0], a[1]));
    const Vec second =
        hn::Add(hn::InterleaveLower(FloatTag(), a[2], a[3]), hn::InterleaveUpper(FloatTag(), a[2], a[3]));
    const auto low = hn::BitCast(wide, first), high = hn::BitCast(wide, second);
    fours[n] = hn::Add(hn::BitCast(FloatTag(), hn::InterleaveLower(wide, low, high)),
                       hn::BitCast(FloatTag(), hn::InterleaveUpper(wide, low, high)));
  }
#if HWY_TARGET == HWY_AVX3
  return add_blocks(add_blocks(fours[0], fours[1]), add_blocks(fours[2], fours[3]));
#elif HWY_TARGET == HWY_AVX2
  return hn::Add(hn::ConcatLowerLower(FloatTag(), fours[1], fours[0]),
                 hn::ConcatUpperUpper(FloatTag(), fours[1], fours[0]));
#else
  return fours[0];
#endif
}

// bf16 in rows whose length is a multiple of two vectors. Two vectors at a time are widened by one instruction each if
// the first gets the numbers with even places and the second those with odd ones; rows of Q and O are then kept in that
// order.
struct PairedBF16 {
  UInt16 bits;
};
inline constexpr Int64 pair_width = 2 * lanes;

template <class T>
HWY_INLINE void widen_two(const T* p, Vec (&out)[2]) {
  out[0] = widen_vector(p), out[1] = widen_vector(p + lanes);
}
HWY_INLINE void widen_two(const PairedBF16* p, Vec (&out)[2]) {
  const auto both = hn::BitCast(IntTag(), load(reinterpret_cast<const float*>(p)));
  out[0] = hn::BitCast(FloatTag(), hn::ShiftLeft<16>(both));
  out[1] = hn::BitCast(FloatTag(), hn::And(both, hn::Set(IntTag(), -65536)));
}
// Such rows have no single vector.
HWY_INLINE Vec widen_vector(const PairedBF16*) { return hn::Zero(FloatTag()); }

HWY_INLINE bool is_paired(Type type, Int64 width) { return type == Type::bf16 && width % pair_width == 0; }

// The products of a few keys with a few rows of Q, which fill a vector: out[row][key].
template <class T, int rows>
HWY_INLINE void dot_block(const T* const (&keys)[lanes / rows], const float* Q, Int64 Q_stride, Int64 D, float* out) {
  constexpr int count = lanes / rows;
  Vec sums[lanes];
  TESSERA_UNROLL
  for (int n = 0; n < lanes; ++n) sums[n] = hn::Zero(FloatTag());
  Int64 d = 0;
  for (; d + pair_width <= D; d += pair_width) {
    Vec q[rows][2];
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r) q[r][0] = load(Q + r * Q_stride + d), q[r][1] = load(Q + r * Q_stride + d + lanes);
    TESSERA_UNROLL
    for (int k = 0; k < count; ++k) {
      Vec key[2];
      widen_two(keys[k] + d, key);
      TESSERA_UNROLL
      for (int r = 0; r < rows; ++r) {
        Vec& sum = sums[r * count + k];
        sum = hn::MulAdd(key[1], q[r][1], hn::MulAdd(key[0], q[r][0], sum));
      }
    }
  }
  if (d < D) TESSERA_UNROLL
  for (int k = 0; k < count; ++k) {
    const Vec key = widen_vector(keys[k] + d);
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r)
      sums[r * count + k] = hn::MulAdd(key, load(Q + r * Q_stride + d), sums[r * count + k]);
  }
  store(sums_of(sums), out);
}

// Prefetches the rows of K and V that the next step will read; without a head, none. K's while K is read and V's while
// V is, so that memory is busy all the time.
struct DecodePrefetch {
  const HeadJob* head = nullptr;
  Int64 key = 0;
  HWY_INLINE void prefetch_key(Int64 j) const {
    if (head) prefetch_row(head->k, key + j, head->D);
  }
  HWY_INLINE void prefetch_value(Int64 j) const {
    if (head) prefetch_row(head->v, key + j, head->Dv);
  }
};

// Row r of keys whose type is T.
template <class T>
HWY_INLINE const T* row_of(const KeyTile& tile, Int64 r) {
  return reinterpret_cast<const T*>(tile.row(r));
}
// Rows that were widened into scratch.
HWY_INLINE KeyTile in_scratch(const float* rows, Int64 stride) {
  return {Type::f32, reinterpret_cast<const char*>(rows), stride * Int64(sizeof(float))};
}

// S[row][j] for `count` keys, a few rows at a time.
template <class T, int rows>
HWY_NOINLINE void dot_keys(KeyTile K, Int64 count, const float* Q, Int64 Q_stride, Int64 D, const DecodePrefetch& next,
                           float* S) {
  constexpr Int64 step = lanes / rows;
  for (Int64 j = 0; j < count; j += step) {
    const T* keys[step];
    // Lanes past the last key read its row again: no load leaves the tensor.
    for (Int64 k = 0; k < step; ++k) {
      keys[k] = row_of<T>(K, lesser(j + k, count - 1));
      next.prefetch_key(j + k);
    }
    // A row of S is padded behind its last key.
    if (rows == 1) {
      dot_block<T, rows>(keys, Q, Q_stride, D, S + j);
      continue;
    }
    HWY_ALIGN float out[lanes];
    dot_block<T, rows>(keys, Q, Q_stride, D, out);
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r) __builtin_memcpy(S + r * block_q + j, out + r * step, step * sizeof(float));
  }
}

template <class T>
HWY_INLINE void dot_all(KeyTile K, Int64 count, const float* Q, Int64 Q_stride, Int64 rows, Int64 D,
                        const DecodePrefetch& next, float* S) {
  if (rows == 1) return dot_keys<T, 1>(K, count, Q, Q_stride, D, next, S);
  if (rows == 2) return dot_keys<T, 2>(K, count, Q, Q_stride, D, next, S);
  for (Int64 r = 0; r < rows; r += 4)
    dot_keys<T, 4>(K, count, Q + r * Q_stride, Q_stride, D, r == 0 ? next : DecodePrefetch{}, S + r * block_q);
}

// O[row][d ...] += sum over the keys of P[row][j] V[j][d ...], for `cols` vectors and a few rows.
template <class T, int rows, int cols>
HWY_INLINE void add_values_block(KeyTile V, Int64 d, Int64 count, const float* P, const DecodePrefetch& next, float* O,
                                 Int64 O_stride) {
  Vec sums[rows][cols];
  TESSERA_UNROLL
  for (int r = 0; r < rows; ++r) TESSERA_UNROLL
  for (int c = 0; c < cols; ++c) sums[r][c] = hn::Zero(FloatTag());
  for (Int64 j = 0; j < count; ++j) {
    next.prefetch_value(j);
    const T* row = row_of<T>(V, j) + d;
    Vec weight[rows];
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r) weight[r] = set(P[r * block_q + j]);
    TESSERA_UNROLL
    for (int c = 0; c + 2 <= cols; c += 2) {
      Vec value[2];
      widen_two(row + c * lanes, value);
      TESSERA_UNROLL
      for (int r = 0; r < rows; ++r) {
        sums[r][c] = hn::MulAdd(weight[r], value[0], sums[r][c]);
        sums[r][c + 1] = hn::MulAdd(weight[r], value[1], sums[r][c + 1]);
      }
    }
    if (cols == 1) {
      const Vec value = widen_vector(row);
      TESSERA_UNROLL
      for (int r = 0; r < rows; ++r) sums[r][0] = hn::MulAdd(weight[r], value, sums[r][0]);
    }
  }
  TESSERA_UNROLL
  for (int r = 0; r < rows; ++r) TESSERA_UNROLL
  for (int c = 0; c < cols; ++c) {
    float* out = O + r * O_stride + c * lanes;
    store(hn::Add(load(out), sums[r][c]), out);
  }
}

template <class T, int rows>
HWY_NOINLINE void add_values_of(KeyTile V, Int64 count, const float* P, const DecodePrefetch& next, float* O,
                                Int64 O_stride) {
  constexpr int cols = rows == 1 ? 8 : lanes < 16 ? 2 : 4;  // as many accumulators as fit the registers
  Int64 d = 0;
  for (; d + cols * lanes <= O_stride; d += cols * lanes)
    add_values_block<T, rows, cols>(V, d, count, P, d == 0 ? next : DecodePrefetch{}, O + d, O_stride);
  for (; d + pair_width <= O_stride; d += pair_width)
    add_values_block<T, rows, 2>(V, d, count, P, d == 0 ? next : DecodePrefetch{}, O + d, O_stride);
  for (; d < O_stride; d += lanes)
    add_values_block<T, rows, 1>(V, d, count, P, d == 0 ? next : DecodePrefetch{}, O + d, O_stride);
}

template <class T>
HWY_INLINE void add_all_values(KeyTile V, Int64 count, const float* P, Int64 rows, const DecodePrefetch& next, float* O,
                               Int64 O_stride) {
  if (rows == 1) return add_values_of<T, 1>(V, count, P, next, O, O_stride);
  if (rows == 2) return add_values_of<T, 2>(V, count, P, next, O, O_stride);
  for (Int64 r = 0; r < rows; r += 4)
    add_values_of<T, 4>(V, count, P + r * block_q, r == 0 ? next : DecodePrefetch{}, O + r * O_stride, O_stride);
}

// What a job keeps from step to step.
struct DecodeState {
  float *Q, *O, *m;
  double* l;

  DecodeState(Int64 D, Int64 Dv, Scratch& s) :
      Q(s.take(decode_rows * round_up(D, lanes))), O(s.take(decode_rows * round_up(Dv, lanes))), m(s.take(block_q)),
      l(reinterpret_cast<double*>(s.take(2 * block_q))) {}
};

struct DecodeScratch {
  float *S, *K, *V, *states;
  Int64 Q_stride, O_stride;

  DecodeScratch(Int64 D, Int64 Dv, Scratch& s) :
      S(s.take(decode_rows * block_q)), K(s.take(decode_step * round_up(D, lanes))),
      V(s.take(decode_step * round_up(Dv, lanes))), states(s.take(0)), Q_stride(round_up(D, lanes)),
      O_stride(round_up(Dv, lanes)) {
    for (Int64 n = 0; n < decode_jobs; ++n) DecodeState(D, Dv, s);
  }

  // What the steps of one job need.
  struct Block {
    float *Q, *O, *m;
    double* l;
    float *S, *K, *V;
    Int64 Q_stride, O_stride;
  };
  HWY_INLINE Block job(Int64 n, Int64 D, Int64 Dv) const {
    Scratch one(states);
    const DecodeState unused(D, Dv, one);
    Scratch place(states + n * one.bytes() / Int64(sizeof(float)));
    const DecodeState state(D, Dv, place);
    return {state.Q, state.O, state.m, state.l, S, K, V, Q_stride, O_stride};
  }
};
using DecodeBlock = DecodeScratch::Block;

// Products of K and q, which carries the scores' factor, for every row of the job.
HWY_INLINE void decode_products(const DecodeJob& job, Range keys, Int64 rows, const DecodePrefetch& next,
                                const DecodeBlock& s) {
  const HeadJob& any = job.heads[0];
  const KeyTile K = any.k.tile(keys.begin);
  const Int64 count = keys.size();
  if (any.D % lanes != 0) {
    load_rows(K, 0, count, any.D, s.K);
    return dot_all<float>(in_scratch(s.K, s.Q_stride), count, s.Q, s.Q_stride, rows, s.Q_stride, next, s.S);
  }
  if (K.type == Type::f32) dot_all<float>(K, count, s.Q, s.Q_stride, rows, any.D, next, s.S);
  if (K.type == Type::f16) dot_all<F16>(K, count, s.Q, s.Q_stride, rows, any.D, next, s.S);
  if (is_paired(K.type, any.D))
    dot_all<PairedBF16>(K, count, s.Q, s.Q_stride, rows, any.D, next, s.S);
  else if (K.type == Type::bf16)
    dot_all<BF16>(K, count, s.Q, s.Q_stride, rows, any.D, next, s.S);
}

// Some keys of one query, for the rule: `first` is the distance of the first lane.
struct DecodeElement {
  Int64 first;

  // Rounded one by one: a long cache reaches beyond the integers that f32 holds.
  HWY_INLINE VectorMath<1>::Number distance() const {
    HWY_ALIGN float all[lanes];
    for (Int64 n = 0; n < lanes; ++n) all[n] = static_cast<float>(first + n);
    return {{load(all)}};
  }
  HWY_INLINE VectorMath<1>::Number bias() const { return VectorMath<1>::set(0); }  // with a bias, tiles are computed
};

HWY_NOINLINE void apply_rule(const HeadJob& head, Int64 first, Int64 width, float* scores) {
  const ScoreOptions options = head.options;
  const ScoreNumbers<float> numbers = head.score;
  for (Int64 j = 0; j < width; j += lanes) {
    const VectorMath<1>::Number argument{{load(scores + j)}};
    store(ScoreRule<VectorMath<1>>::score(options, numbers, argument, DecodeElement{first + j}).of[0], scores + j);
  }
}

// The rule and the band, row by row of the job; -inf behind the last key.
HWY_INLINE void decode_scores(const DecodeJob& job, Range keys, Int64 rows, float* S) {
  static_assert(decode_step <= block_q, "a row of S has block_q numbers");
  const HeadJob& any = job.heads[0];
  const Int64 count = keys.size(), width = round_up(count, lanes);
  const bool whole = tile_class(any.mask, {0, any.nq}, keys) == TileClass::full;
  for (Int64 row = 0; row < rows; ++row) {
    float* scores = S + row * block_q;
    const HeadJob& head = job.heads[row / any.nq];
    const Int64 corner = keys.begin - row % any.nq;
    if (any.options.change_scores()) apply_rule(head, corner - head.shift, width, scores);
    fill(scores + count, width - count, -infinity);
    for (Int64 j = 0; j < count && !whole; ++j) {
      const Int64 distance = corner + j;
      if (distance < head.mask.low || distance > head.mask.high) scores[j] = -infinity;
    }
  }
}

// The scores of a few rows become P; as softmax_columns, across lanes. Row r of O must be multiplied by alpha[r].
template <int rows>
HWY_INLINE void decode_softmax(Int64 count, float* S, float* m, double* l, float* alpha) {
  Vec top[rows], base[rows], total[rows];
  TESSERA_UNROLL
  for (int r = 0; r < rows; ++r) {
    top[r] = set(-infinity), total[r] = hn::Zero(FloatTag());
    for (Int64 j = 0; j < count; j += lanes) top[r] = hn::Max(top[r], load(S + r * block_q + j));
    top[r] = hn::MaxOfLanes(FloatTag(), top[r]);
  }
  TESSERA_UNROLL
  for (int r = 0; r < rows; ++r) {
    const float before = m[r], here = hn::GetLane(top[r]);
    m[r] = here > before + slack ? here : before;
    base[r] = set(m[r] == -infinity ? 0 : m[r]);
    alpha[r] = m[r] == before && before != -infinity ? 1 : hn::GetLane(exp2_bounded(hn::Sub(set(before), base[r])));
  }
  for (Int64 j = 0; j < count; j += lanes) TESSERA_UNROLL
  for (int r = 0; r < rows; ++r) {
    float* at = S + r * block_q + j;
    const Vec P = exp2_bounded(hn::Sub(load(at), base[r]));
    store(P, at);
    total[r] = hn::Add(total[r], P);
  }
  TESSERA_UNROLL
  for (int r = 0; r < rows; ++r)
    l[r] = l[r] * double(alpha[r]) + double(hn::GetLane(hn::SumOfLanes(FloatTag(), total[r])));
}

// O += P V
HWY_INLINE void decode_values(const HeadJob& any, Range keys, Int64 rows, const DecodePrefetch& next,
                              const DecodeBlock& s) {
  const KeyTile V = any.v.tile(keys.begin);
  const Int64 count = keys.size();
  if (any.Dv % lanes != 0) {
    load_rows(V, 0, count, any.Dv, s.V);
    return add_all_values<float>(in_scratch(s.V, s.O_stride), count, s.S, rows, next, s.O, s.O_stride);
  }
  if (V.type == Type::f32) add_all_values<float>(V, count, s.S, rows, next, s.O, s.O_stride);
  if (V.type == Type::f16) add_all_values<F16>(V, count, s.S, rows, next, s.O, s.O_stride);
  if (is_paired(V.type, any.Dv))
    add_all_values<PairedBF16>(V, count, s.S, rows, next, s.O, s.O_stride);
  else if (V.type == Type::bf16)
    add_all_values<BF16>(V, count, s.S, rows, next, s.O, s.O_stride);
}

HWY_INLINE void start_decode(const DecodeJob& job, const DecodeBlock& s) {
  const HeadJob& any = job.heads[0];
  fill(s.Q, decode_rows * s.Q_stride, 0);
  fill(s.O, decode_rows * s.O_stride, 0);
  fill(s.m, block_q, -infinity);
  for (Int64 i = 0; i < block_q; ++i) s.l[i] = 0;
  for (Int64 row = 0; row < job.count * any.nq; ++row) {
    float* Q = s.Q + row * s.Q_stride;
    if (!is_paired(any.k.type, any.D)) {
      widen_row(job.heads[row / any.nq].q, row % any.nq, any.D, any.score.factor, Q);
      continue;
    }
    HWY_ALIGN float in_order[576];
    widen_row(job.heads[row / any.nq].q, row % any.nq, any.D, any.score.factor, in_order);
    for (Int64 d = 0; d < any.D; d += pair_width) {
      Vec even, odd;
      hn::LoadInterleaved2(FloatTag(), in_order + d, even, odd);
      store(even, Q + d);
      store(odd, Q + d + lanes);
    }
  }
}

HWY_INLINE void decode_step_of(const DecodeJob& job, Range keys, const DecodePrefetch& next, const DecodeBlock& s) {
  const HeadJob& any = job.heads[0];
  const Int64 rows = job.count * any.nq;
  decode_products(job, keys, rows, next, s);
  decode_scores(job, keys, rows, s.S);
  float alpha[decode_rows];
  Int64 row = 0;
  for (; row + 4 <= rows; row += 4)
    decode_softmax<4>(keys.size(), s.S + row * block_q, s.m + row, s.l + row, alpha + row);
  for (; row < rows; ++row) decode_softmax<1>(keys.size(), s.S + row * block_q, s.m + row, s.l + row, alpha + row);
  for (row = 0; row < rows; ++row)
    for (Int64 d = 0; d < s.O_stride && alpha[row] != 1; d += lanes) {
      float* at = s.O + row * s.O_stride + d;
      store(hn::Mul(load(at), set(alpha[row])), at);
    }
  decode_values(any, keys, rows, next, s);
}

// m, l and O of every row.
HWY_INLINE void store_partials(const DecodeJob& job, const DecodeBlock& s) {
  const HeadJob& any = job.heads[0];
  for (Int64 row = 0; row < job.count * any.nq; ++row) {
    float* out = job.partials + row * job.row_stride;
    out[0] = s.m[row], out[1] = static_cast<float>(s.l[row]);
    const float* O = s.O + row * s.O_stride;
    if (is_paired(any.v.type, any.Dv))
      for (Int64 d = 0; d < any.Dv; d += pair_width)
        hn::StoreInterleaved2(load(O + d), load(O + d + lanes), FloatTag(), out + 2 + d);
    else
      for (Int64 d = 0; d < any.Dv; ++d) out[2 + d] = O[d];
  }
}

HWY_NOINLINE void decode(const DecodeJob* jobs, Int64 count, Range keys, float* memory) {
  const Int64 D = jobs[0].heads[0].D, Dv = jobs[0].heads[0].Dv;
  Scratch pieces(memory);
  const DecodeScratch s(D, Dv, pieces);
  // Rows that a job lacks are computed from zeros, and lanes behind the last key are overwritten: nobody looks at them.
  fill(s.S, decode_rows * block_q, 0);
  for (Int64 n = 0; n < count; ++n) start_decode(jobs[n], s.job(n, D, Dv));
  for (Int64 j = keys.begin; j < keys.end; j += decode_step)
    for (Int64 n = 0; n < count; ++n) {
      const bool last = n + 1 == count;
      const DecodePrefetch next{&jobs[last ? 0 : n + 1].heads[0], last ? j + decode_step : j};
      decode_step_of(jobs[n], {j, lesser(j + decode_step, keys.end)}, next, s.job(n, D, Dv));
    }
  for (Int64 n = 0; n < count; ++n) store_partials(jobs[n], s.job(n, D, Dv));
}

// The chunks' results in order: m, l, O relative to a common maximum, the sink as a key of its own.
HWY_NOINLINE void finish_decode(const ForwardJob& job, const float* partials, Int64 chunks) {
  const HeadJob& head = job.head;
  HWY_ALIGN float O[512];
  for (Int64 i = 0; i < head.nq; ++i) {
    const float* row = partials + i * chunks * (head.Dv + 2);
    float m = head.sink;
    // NaN, of a row that saw one, must win, and then stay.
    for (Int64 c = 0; c < chunks; ++c)
      if (const float x = row[c * (head.Dv + 2)]; x > m || x != x) m = x;
    const float base = m == -infinity ? 0 : m;
    double l = head.sink == -infinity ? 0 : __builtin_exp2(double(head.sink - base));
    fill(O, head.Dv, 0);
    for (Int64 c = 0; c < chunks; ++c) {
      const float* part = row + c * (head.Dv + 2);
      if (part[1] == 0) continue;  // saw nothing
      const double weight = __builtin_exp2(double(part[0]) - double(base));
      l += weight * double(part[1]);
      const auto factor = static_cast<float>(weight);
      for (Int64 d = 0; d < head.Dv; ++d) O[d] += factor * part[2 + d];
    }
    const float inverse = l == 0 ? 0 : static_cast<float>(1 / l);
    for (Int64 d = 0; d < head.Dv; ++d) O[d] *= inverse;
    narrow_row(job.o, i, head.Dv, false, O);
    if (job.lse) job.lse.set(i, 0, natural_lse(m, l));
  }
}
