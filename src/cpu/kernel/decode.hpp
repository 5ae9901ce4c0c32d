// SPDX-License-Identifier: Apache-2.0
// Decoding, few queries against many keys: memory-bound. So every row of K and V is read once for all the queries of a
// few heads, and widened there. S has a row per (head, query) and a lane per key, unlike
// elsewhere: there are few rows. Included by cpu/isa/*.cpp inside their target region.
#pragma once

// What a job keeps from step to step. Dqv: the width of qv, or 0.
struct DecodeState {
  float *Q, *Qv, *O, *m;
  double* l;

  DecodeState(Int64 D, Int64 Dv, Int64 Dqv, Scratch& s) :
      Q(s.take(decode_rows * round_up(D, lanes))), Qv(s.take(decode_rows * round_up(Dqv, lanes))),
      O(s.take(decode_rows * round_up(Dv, lanes))), m(s.take(block_q)),
      l(reinterpret_cast<double*>(s.take(2 * block_q))) {}
};

struct DecodeScratch {
  float *S, *second, *part, *K, *V, *states;
  Int64 D, Dv, Dqv;

  DecodeScratch(Int64 D, Int64 Dv, Scratch& s, Int64 Dqv) :
      S(s.take(decode_rows * block_q)), second(s.take(decode_rows * block_q)), part(s.take(decode_rows * block_q)),
      K(s.take(decode_step * round_up(D, lanes))), V(s.take(decode_step * round_up(Dv, lanes))), states(s.take(0)),
      D(D), Dv(Dv), Dqv(Dqv) {
    for (Int64 n = 0; n < decode_jobs; ++n) DecodeState(D, Dv, Dqv, s);
  }

  // What the steps of one job need.
  struct Block {
    float *Q, *Qv, *O, *m;
    double* l;
    float *S, *second, *part, *K, *V;  // second: products of qv and v; part: numbers of one group of dims
    Int64 Q_stride, O_stride;
  };
  HWY_INLINE Block job(Int64 n) const {
    Scratch one(states);
    const DecodeState unused(D, Dv, Dqv, one);
    Scratch place(states + n * one.bytes() / Int64(sizeof(float)));
    const DecodeState state(D, Dv, Dqv, place);
    return {
        state.Q, state.Qv, state.O, state.m, state.l, S, second, part, K, V, round_up(D, lanes), round_up(Dv, lanes)};
  }
};
using DecodeBlock = DecodeScratch::Block;

// How rows of K and V are read: by types and head dims alone.
struct Readings {
  Reading K, V;
};
HWY_INLINE Readings readings_of(const HeadJob& head) {
#if defined(TESSERA_DOT_PRODUCTS)
  if (takes_pairs(head)) return {paired_reading(head.k.type), paired_reading(head.v.type)};
#endif
  return {reading_of(head.k.type, head.D), reading_of(head.v.type, head.Dv)};
}

// Rows of a step as the products read them: where they lie, or widened in scratch. `width` of them is used.
HWY_INLINE const StepTile& readable(const StepTile& keys, Int64 count, Int64 width, float* room, StepTile& widened) {
  if (width % lanes == 0) return keys;
  load_rows(keys, 0, count, width, room);
  widened = in_scratch(room, round_up(width, lanes));
  return widened;
}

// Products of keys, or values, with rows of Q, which carry the scores' factor; `width` is a multiple of the lanes.
HWY_INLINE void row_products(Reading as, const StepTile& keys, Int64 count, const float* Q, Int64 Q_stride, Int64 width,
                             Int64 rows, const DecodePrefetch& next, float* S) {
  if (as == Reading::f32) dot_all<float>(keys, count, Q, Q_stride, rows, width, next, S);
  if (as == Reading::f16) dot_all<F16>(keys, count, Q, Q_stride, rows, width, next, S);
  if (as == Reading::bf16) dot_all<BF16>(keys, count, Q, Q_stride, rows, width, next, S);
  if (as == Reading::paired_bf16) dot_all<PairedBF16>(keys, count, Q, Q_stride, rows, width, next, S);
  if (as == Reading::i8) dot_all<Int8>(keys, count, Q, Q_stride, rows, width, next, S);
  if (as == Reading::e4m3) dot_all<EachE4M3>(keys, count, Q, Q_stride, rows, width, next, S);
#if HWY_TARGET == HWY_AVX3
  if (as == Reading::tabled_e4m3) dot_all<TabledE4M3>(keys, count, Q, Q_stride, rows, width, next, S);
#endif
#if defined(TESSERA_DOT_PRODUCTS)
  if (as == Reading::dot_bf16) dot_all<DotBF16>(keys, count, Q, Q_stride, rows, width, next, S);
  if (as == Reading::dot_e4m3) dot_all<DotE4M3>(keys, count, Q, Q_stride, rows, width, next, S);
#endif
}

// The same times the keys' scales, which `source` has; `keys` are its rows as products read them. Where groups of dims
// have scales of their own, their products are scaled one by one, in order.
HWY_INLINE void scaled_products(Reading as, const StepTile& source, const StepTile& keys, Int64 count, const float* Q,
                                Int64 width, Int64 rows, const DecodePrefetch& next, float* S, float* part) {
  if (source.groups == 1) {
    row_products(as, keys, count, Q, width, width, rows, next, S);
    return multiply_by_scales(source, 0, count, rows, S, S);
  }
  for (Int64 g = 0, d = 0; g < source.groups; ++g, d += scale_width) {
    float* out = g == 0 ? S : part;
    row_products(as, from_dim(keys, count, d), count, Q + (in_pairs(as) ? d / 2 : d), width,
                 lesser(scale_width, width - d), rows, g == 0 ? next : DecodePrefetch{}, out);
    multiply_by_scales(source, g, count, rows, out, out);
    if (g > 0) add_numbers(part, count, rows, S);
  }
}

// S = K q, times the keys' scales, for every row of the job; with qv, plus V qv.
HWY_INLINE void decode_products(const HeadJob& any, const StepKeys& step, const StepTile& K, const StepTile& V,
                                Int64 rows, const DecodePrefetch& next, const DecodeBlock& s) {
  const Int64 count = step.keys.size();
  const Readings as = readings_of(any);
  scaled_products(as.K, step.K, K, count, s.Q, s.Q_stride, rows, next, s.S, s.part);
#if defined(TESSERA_DOT_PRODUCTS)
  if (in_pairs(as.K)) multiply_by_factor(any.score.factor, count, rows, s.S);
#endif
  if (!any.qv) return;
  scaled_products(as.V, step.V, V, count, s.Qv, s.O_stride, rows, {}, s.second, s.part);
  add_numbers(s.second, count, rows, s.S);
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
  const bool whole = is_whole(any, {0, any.nq}, keys);
  for (Int64 row = 0; row < rows; ++row) {
    float* scores = S + row * block_q;
    const HeadJob& head = job.heads[row / any.nq];
    const Int64 i = row % any.nq, corner = keys.begin - i;
    if (any.options.change_scores()) apply_rule(head, keys.begin - head.rows.place(i), width, scores);
    fill(scores + count, width - count, -infinity);
    for (Int64 j = 0; j < count && !whole; ++j) {
      const Int64 distance = corner + j;
      if (distance < head.mask.low || distance > head.mask.high) scores[j] = -infinity;
      if (head.rows && !head.rows.visible(i, keys.begin + j)) scores[j] = -infinity;
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

// O += P V, of `Dv` dims. P may be rounded on the way.
HWY_INLINE void add_products(Reading as, const StepTile& V, Int64 count, float* P, Int64 rows,
                             const DecodePrefetch& next, Int64 Dv, float* O, Int64 O_stride) {
  if (as == Reading::f32) add_all_values<float>(V, count, P, rows, next, Dv, O, O_stride);
  if (as == Reading::f16) add_all_values<F16>(V, count, P, rows, next, Dv, O, O_stride);
  if (as == Reading::bf16) add_all_values<BF16>(V, count, P, rows, next, Dv, O, O_stride);
  if (as == Reading::paired_bf16) add_all_values<PairedBF16>(V, count, P, rows, next, Dv, O, O_stride);
  if (as == Reading::i8) add_all_values<Int8>(V, count, P, rows, next, Dv, O, O_stride);
  if (as == Reading::e4m3) add_all_values<EachE4M3>(V, count, P, rows, next, Dv, O, O_stride);
#if HWY_TARGET == HWY_AVX3
  if (as == Reading::tabled_e4m3) add_all_values<TabledE4M3>(V, count, P, rows, next, Dv, O, O_stride);
#endif
#if defined(TESSERA_DOT_PRODUCTS)
  if (in_pairs(as)) pair_weights(rows, P);
  if (as == Reading::dot_bf16) add_all_values<DotBF16>(V, count, P, rows, next, Dv, O, O_stride);
  if (as == Reading::dot_e4m3) add_all_values<DotE4M3>(V, count, P, rows, next, Dv, O, O_stride);
#endif
}

// O += P V with V's scales, which `source` has and P takes in.
HWY_INLINE void decode_values(Reading as, const StepTile& source, const StepTile& V, Int64 count, Int64 rows,
                              const DecodePrefetch& next, const DecodeBlock& s) {
  if (source.groups == 1) {
    multiply_by_scales(source, 0, count, rows, s.S, s.S);
    return add_products(as, V, count, s.S, rows, next, s.O_stride, s.O, s.O_stride);
  }
  for (Int64 g = 0, d = 0; g < source.groups; ++g, d += scale_width) {
    multiply_by_scales(source, g, count, rows, s.S, s.part);
    add_products(as, from_dim(V, count, d), count, s.part, rows, g == 0 ? next : DecodePrefetch{},
                 lesser(scale_width, s.O_stride - d), s.O + d, s.O_stride);
  }
}

// A row of q or qv, times the scores' factor unless its products come in pairs, in the order in which rows of its keys
// are widened.
HWY_INLINE void load_query(const Rows& source, Int64 i, Reading as, Int64 width, float factor, float* out) {
#if defined(TESSERA_DOT_PRODUCTS)
  if (in_pairs(as)) return load_paired_query(source, i, as, width, out);
#endif
  if (as != Reading::paired_bf16)
    return widen_row(source, i, width, factor * (as == Reading::e4m3 ? e4m3_factor : 1), out);
  HWY_ALIGN float in_order[576];
  widen_row(source, i, width, factor, in_order);
  for (Int64 d = 0; d < width; d += pair_width) {
    Vec even, odd;
    hn::LoadInterleaved2(FloatTag(), in_order + d, even, odd);
    store(even, out + d);
    store(odd, out + d + lanes);
  }
}

HWY_INLINE void start_decode(const DecodeJob& job, const DecodeBlock& s) {
  const HeadJob& any = job.heads[0];
  const Readings as = readings_of(any);
  fill(s.Q, decode_rows * s.Q_stride, 0);
  if (any.qv) fill(s.Qv, decode_rows * s.O_stride, 0);
  fill(s.O, decode_rows * s.O_stride, 0);
  fill(s.m, block_q, -infinity);
  for (Int64 i = 0; i < block_q; ++i) s.l[i] = 0;
  for (Int64 row = 0; row < job.count * any.nq; ++row) {
    const HeadJob& head = job.heads[row / any.nq];
    load_query(head.q, row % any.nq, as.K, any.D, any.score.factor, s.Q + row * s.Q_stride);
    if (any.qv) load_query(head.qv, row % any.nq, as.V, any.Dv, any.score.factor, s.Qv + row * s.O_stride);
  }
}

HWY_INLINE void decode_step_of(const DecodeJob& job, const StepKeys& step, const DecodePrefetch& next,
                               const DecodeBlock& s) {
  const HeadJob& any = job.heads[0];
  const Range keys = step.keys;
  const Int64 rows = job.count * any.nq;
  StepTile K_widened, V_widened;
  const StepTile& K = readable(step.K, keys.size(), any.D, s.K, K_widened);
  const StepTile& V = readable(step.V, keys.size(), any.Dv, s.V, V_widened);
  decode_products(any, step, K, V, rows, next, s);
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
  decode_values(readings_of(any).V, step.V, V, keys.size(), rows, next, s);
}

// m, l and O of every row.
HWY_INLINE void store_partials(const DecodeJob& job, const DecodeBlock& s) {
  const HeadJob& any = job.heads[0];
  for (Int64 row = 0; row < job.count * any.nq; ++row) {
    float* out = job.partials + row * job.row_stride;
    out[0] = s.m[row], out[1] = static_cast<float>(s.l[row]);
    const float* O = s.O + row * s.O_stride;
    const Reading as = readings_of(any).V;
#if defined(TESSERA_DOT_PRODUCTS)
    if (in_pairs(as)) {
      store_paired_row(O, as, any.Dv, out + 2);
      continue;
    }
#endif
    if (as == Reading::paired_bf16)
      for (Int64 d = 0; d < any.Dv; d += pair_width)
        hn::StoreInterleaved2(load(O + d), load(O + d + lanes), FloatTag(), out + 2 + d);
    else
      for (Int64 d = 0; d < any.Dv; ++d) out[2 + d] = as == Reading::e4m3 ? O[d] * e4m3_factor : O[d];
  }
}

// Empty behind the last key.
HWY_INLINE Range step_from(Int64 j, Range keys) { return {lesser(j, keys.end), lesser(j + decode_step, keys.end)}; }

HWY_NOINLINE void decode(const DecodeJob* jobs, Int64 count, Range keys, float* memory) {
  const HeadJob& any = jobs[0].heads[0];
  Scratch pieces(memory);
  const DecodeScratch s(any.D, any.Dv, pieces, any.qv ? any.Dv : 0);
  // Rows that a job lacks are computed from zeros, and lanes behind the last key are overwritten: nobody looks at them.
  fill(s.S, decode_rows * block_q, 0);
  for (Int64 n = 0; n < count; ++n) start_decode(jobs[n], s.job(n));
  Int64 K_from_first[decode_jobs], V_from_first[decode_jobs];
  for (Int64 n = 0; n < count; ++n) {
    K_from_first[n] = jobs[n].heads[0].k.base - any.k.base;
    V_from_first[n] = jobs[n].heads[0].v.base - any.v.base;
  }
  StepKeys steps[2], firsts[2];  // of this job and the next; of the first job, in this step and the next
  int turn = 0, first = 0;
  firsts[first].find_rows(any, step_from(keys.begin, keys));
  for (Int64 j = keys.begin; j < keys.end; j += decode_step, first ^= 1) {
    StepKeys& ahead = firsts[first ^ 1];
    ahead.find_rows(any, step_from(j + decode_step, keys));
    firsts[first].load_scales(any);
    prefetch_first_lines(ahead.K, ahead.keys.size());
    prefetch_first_lines(ahead.V, ahead.keys.size());
    RowStream K_ahead, V_ahead;
    K_ahead.start(ahead.K, ahead.keys.size(), K_from_first, count, any.D);
    V_ahead.start(ahead.V, ahead.keys.size(), V_from_first, count, any.Dv);
    for (Int64 n = 0; n < count; ++n, turn ^= 1) {
      const StepKeys& step = n == 0 ? firsts[first] : steps[turn];
      StepKeys& beside = steps[turn ^ 1];
      if (n + 1 < count) beside.find_beside(step, jobs[n + 1].heads[0]);
      const bool unread = j == keys.begin && n + 1 < count;
      decode_step_of(jobs[n], step, {&K_ahead, &V_ahead, unread ? &beside : nullptr, any.D, any.Dv}, s.job(n));
    }
  }
  for (Int64 n = 0; n < count; ++n) store_partials(jobs[n], s.job(n));
}

HWY_INLINE Int64 decode_scratch_bytes(const Problem& p) {
  Scratch scratch(nullptr);
  const DecodeScratch layout(p.D, p.Dv, scratch, p.qv ? p.Dv : 0);
  (void)layout;
  return scratch.bytes();
}

// What a thread needs where products are multiply-adds in f32.
HWY_INLINE Int64 vector_forward_bytes(const Problem& p) {
  const Int64 second = p.qv ? VectorForward::second_floats(p.Dv) * Int64(sizeof(float)) : 0;
  return greater(bytes_of<ForwardScratch<VectorForward>>(p) + second, decode_scratch_bytes(p));
}

// The chunks' results in order: m, l, O relative to a common maximum, the sink as a key of its own. They are finished,
// or leave as a state.
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
    if (job.to) {
      job.to.m.set(i, 0, double(m)), job.to.l.set(i, 0, l);
      narrow_row(job.to.o, i, head.Dv, false, O);
      continue;
    }
    const float inverse = l == 0 ? 0 : static_cast<float>(1 / l);
    for (Int64 d = 0; d < head.Dv; ++d) O[d] *= inverse;
    narrow_row(job.o, i, head.Dv, false, O);
    if (job.lse) job.lse.set(i, 0, natural_lse(m, l));
  }
}
