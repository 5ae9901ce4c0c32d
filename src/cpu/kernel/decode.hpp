// SPDX-License-Identifier: Apache-2.0
// Decoding, few queries against many keys: memory-bound. So every row of K and V is read once for all the queries of a
// few heads, and widened there. S has a row per (head, query) and a lane per key, unlike elsewhere: there are few rows.
// Included by cpu/isa/*.cpp inside their target region.
#pragma once

// What the steps of one job need. S, m, l and alpha have a row for each of the job's, and perhaps a few more; those of
// the jobs of a task follow one another.
struct DecodeBlock {
  float *Q, *Qv, *O, *S, *m, *alpha;
  double* l;
  float *second, *part, *K, *V;  // second: products of qv and v; part: numbers of one group of dims
  Int64 Q_stride, O_stride;
};

// Dqv: the width of qv, or 0. A job's rows follow those of the one before, so that rows of all jobs lie in the L1 cache
// together.
struct DecodeScratch {
  static constexpr Int64 most_rows = decode_jobs * decode_rows;
  float *S, *m, *alpha;
  double* l;
  float *second, *part, *K, *V, *Q, *Qv, *O;

  DecodeScratch(Int64 D, Int64 Dv, Scratch& s, Int64 Dqv) :
      S(s.take(most_rows * score_stride)), m(s.take(most_rows)), alpha(s.take(most_rows)),
      l(reinterpret_cast<double*>(s.take(2 * most_rows))), second(s.take(decode_rows * score_stride)),
      part(s.take(decode_rows * score_stride)), K(s.take(decode_step * round_up(D, lanes))),
      V(s.take(decode_step * round_up(Dv, lanes))), Q(s.take(most_rows * round_up(D, lanes))),
      Qv(s.take(most_rows * round_up(Dqv, lanes))), O(s.take(most_rows * round_up(Dv, lanes))) {}

  // Of a job whose rows begin at `row`.
  HWY_INLINE DecodeBlock job(Int64 row, Int64 Q_stride, Int64 O_stride) const {
    return {Q + row * Q_stride,
            Qv + row * O_stride,
            O + row * O_stride,
            S + row * score_stride,
            m + row,
            alpha + row,
            l + row,
            second,
            part,
            K,
            V,
            Q_stride,
            O_stride};
  }
};

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
struct WidenedRows {
  const char* rows[decode_step];
};
HWY_INLINE StepTile readable(const StepTile& keys, Int64 count, Int64 width, float* room, WidenedRows& widened) {
  if (width % lanes == 0) return keys;
  load_rows(keys, 0, count, width, room);
  for (Int64 r = 0; r < decode_step; ++r)
    widened.rows[r] = reinterpret_cast<const char*>(room + r * round_up(width, lanes));
  return {Type::f32, widened.rows, 0, keys.scales, keys.groups};
}

// Products of keys, or values, with rows of Q, which carry the scores' factor; `width` is a multiple of the lanes.
HWY_NOINLINE void row_products(Reading as, const StepTile& keys, Int64 count, const float* Q, Int64 Q_stride,
                               Int64 width, Int64 rows, LineStream* ahead, float* S) {
  if (as == Reading::f32) dot_all<float>(keys, count, Q, Q_stride, rows, width, ahead, S);
  if (as == Reading::f16) dot_all<F16>(keys, count, Q, Q_stride, rows, width, ahead, S);
  if (as == Reading::bf16) dot_all<BF16>(keys, count, Q, Q_stride, rows, width, ahead, S);
  if (as == Reading::paired_bf16) dot_all<PairedBF16>(keys, count, Q, Q_stride, rows, width, ahead, S);
  if (as == Reading::i8) dot_all<Int8>(keys, count, Q, Q_stride, rows, width, ahead, S);
  if (as == Reading::e4m3) dot_all<EachE4M3>(keys, count, Q, Q_stride, rows, width, ahead, S);
#if HWY_TARGET == HWY_AVX3
  if (as == Reading::tabled_e4m3) dot_all<TabledE4M3>(keys, count, Q, Q_stride, rows, width, ahead, S);
#endif
#if defined(TESSERA_DOT_PRODUCTS)
  if (as == Reading::dot_bf16) dot_all<DotBF16>(keys, count, Q, Q_stride, rows, width, ahead, S);
  if (as == Reading::dot_e4m3) dot_all<DotE4M3>(keys, count, Q, Q_stride, rows, width, ahead, S);
  if (as == Reading::dot_i8) dot_all<DotI8>(keys, count, Q, Q_stride, rows, width, ahead, S);
#endif
}

// The same times the keys' scales and, where the products come in pairs, the scores' factor. Where groups of dims have
// scales of their own, their products are scaled one by one, in order.
HWY_INLINE void scaled_products(Reading as, const StepTile& keys, Int64 count, const float* Q, Int64 Q_stride,
                                Int64 width, Int64 rows, float factor, LineStream* ahead, float* S, float* part) {
  if (keys.groups == 1) {
    row_products(as, keys, count, Q, Q_stride, width, rows, ahead, S);
    return multiply_by_scales(keys, 0, count, rows, factor, S, S);
  }
  for (Int64 g = 0, d = 0; g < keys.groups; ++g, d += scale_width) {
    float* out = g == 0 ? S : part;
    row_products(as, from_dim(keys, d), count, Q + (in_pairs(as) ? d / 2 : d), Q_stride, lesser(scale_width, width - d),
                 rows, g == 0 ? ahead : nullptr, out);
    multiply_by_scales(keys, g, count, rows, factor, out, out);
    if (g > 0) add_numbers(part, count, rows, S);
  }
}

// S = K q, times the keys' scales, for every row of the job; with qv, plus V qv.
HWY_INLINE void decode_products(const HeadJob& any, Readings as, const StepTile& K, const StepTile* V, Int64 count,
                                Int64 rows, LineStream* ahead, const DecodeBlock& s) {
  WidenedRows widened;
  scaled_products(as.K, readable(K, count, any.D, s.K, widened), count, s.Q, s.Q_stride, round_up(any.D, lanes), rows,
                  in_pairs(as.K) ? any.score.factor : 1, ahead, s.S, s.part);
  if (!V) return;
  scaled_products(as.V, readable(*V, count, any.Dv, s.V, widened), count, s.Qv, s.O_stride, s.O_stride, rows, 1,
                  nullptr, s.second, s.part);
  add_numbers(s.second, count, rows, s.S);
}

// O += P V, of `Dv` dims.
HWY_NOINLINE void add_products(Reading as, const StepTile& V, Int64 count, const float* P, Int64 rows,
                               LineStream* ahead, Int64 Dv, float* O, Int64 O_stride) {
  if (as == Reading::f32) add_all_values<float>(V, count, P, rows, ahead, Dv, O, O_stride);
  if (as == Reading::f16) add_all_values<F16>(V, count, P, rows, ahead, Dv, O, O_stride);
  if (as == Reading::bf16) add_all_values<BF16>(V, count, P, rows, ahead, Dv, O, O_stride);
  if (as == Reading::paired_bf16) add_all_values<PairedBF16>(V, count, P, rows, ahead, Dv, O, O_stride);
  if (as == Reading::i8) add_all_values<Int8>(V, count, P, rows, ahead, Dv, O, O_stride);
  if (as == Reading::e4m3) add_all_values<EachE4M3>(V, count, P, rows, ahead, Dv, O, O_stride);
#if HWY_TARGET == HWY_AVX3
  if (as == Reading::tabled_e4m3) add_all_values<TabledE4M3>(V, count, P, rows, ahead, Dv, O, O_stride);
#endif
#if defined(TESSERA_DOT_PRODUCTS)
  if (as == Reading::dot_bf16) add_all_values<DotBF16>(V, count, P, rows, ahead, Dv, O, O_stride);
  if (as == Reading::dot_e4m3) add_all_values<DotE4M3>(V, count, P, rows, ahead, Dv, O, O_stride);
  if (as == Reading::dot_i8) add_all_values<DotI8>(V, count, P, rows, ahead, Dv, O, O_stride);
#endif
}

// P times V's scales of a group, in the form in which products read it.
HWY_INLINE void weights(Reading as, const StepTile& V, Int64 group, Int64 count, Int64 rows, const float* P,
                        float* out) {
#if defined(TESSERA_DOT_PRODUCTS)
  if (in_pairs(as)) return pair_weights(V.scales ? V.scales + group * decode_step : nullptr, rows, P, out);
#endif
  (void)as;
  multiply_by_scales(V, group, count, rows, 1, P, out);
}

// O += P V with V's scales, which P takes in.
HWY_INLINE void decode_values(Reading as, const StepTile& V, Int64 count, Int64 rows, LineStream* ahead,
                              const DecodeBlock& s) {
  if (V.groups == 1) {
    weights(as, V, 0, count, rows, s.S, s.S);
    return add_products(as, V, count, s.S, rows, ahead, s.O_stride, s.O, s.O_stride);
  }
  for (Int64 g = 0, d = 0; g < V.groups; ++g, d += scale_width) {
    weights(as, V, g, count, rows, s.S, s.part);
    add_products(as, from_dim(V, d), count, s.part, rows, g == 0 ? ahead : nullptr, lesser(scale_width, s.O_stride - d),
                 s.O + d, s.O_stride);
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

// Rows of S that the products of so many rows write.
HWY_INLINE Int64 written_rows(Int64 rows) { return rows <= 2 ? rows : round_up(rows, 4); }

HWY_INLINE void start_decode(const DecodeJob& job, Readings as, const DecodeBlock& s) {
  const HeadJob& any = job.heads[0];
  const Int64 written = written_rows(job.count * any.nq);
  fill(s.Q, written * s.Q_stride, 0);
  if (any.qv) fill(s.Qv, written * s.O_stride, 0);
  fill(s.O, written * s.O_stride, 0);
  for (Int64 row = 0; row < job.count * any.nq; ++row) {
    const HeadJob& head = job.heads[row / any.nq];
    load_query(head.q, row % any.nq, as.K, any.D, any.score.factor, s.Q + row * s.Q_stride);
    if (any.qv) load_query(head.qv, row % any.nq, as.V, any.Dv, any.score.factor, s.Qv + row * s.O_stride);
  }
}

// The part of a step after its softmax.
HWY_INLINE void decode_outputs(const DecodeJob& job, Readings as, const StepTile& V, Int64 count, LineStream* ahead,
                               const DecodeBlock& s) {
  const HeadJob& any = job.heads[0];
  const Int64 rows = job.count * any.nq;
  for (Int64 row = 0; row < rows; ++row)
    for (Int64 d = 0; d < s.O_stride && s.alpha[row] != 1; d += lanes) {
      float* at = s.O + row * s.O_stride + d;
      store(hn::Mul(load(at), set(s.alpha[row])), at);
    }
  WidenedRows widened;
  decode_values(as.V, readable(V, count, any.Dv, s.V, widened), count, rows, ahead, s);
}

// m, l and O of every row.
HWY_INLINE void store_partials(const DecodeJob& job, Reading as, const DecodeBlock& s) {
  const HeadJob& any = job.heads[0];
  for (Int64 row = 0; row < job.count * any.nq; ++row) {
    float* out = job.partials + row * job.row_stride;
    out[0] = s.m[row], out[1] = static_cast<float>(s.l[row]);
    const float* O = s.O + row * s.O_stride;
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

// A step takes K of all jobs first, then their softmax, then V of all jobs: the softmax of one row after another would
// wait for its own results.
HWY_NOINLINE void decode(const DecodeJob* jobs, Int64 count, Range keys, float* memory) {
  const HeadJob& any = jobs[0].heads[0];
  const Readings as = readings_of(any);
  const Int64 K_bytes = any.D * bytes_each(any.k.type), V_bytes = any.Dv * bytes_each(any.v.type);
  Scratch pieces(memory);
  const DecodeScratch s(any.D, any.Dv, pieces, any.qv ? any.Dv : 0);
  const Int64 Q_stride = round_up(in_pairs(as.K) ? any.D / 2 : any.D, lanes), O_stride = round_up(any.Dv, lanes);
  DecodeBlock blocks[decode_jobs];
  Int64 K_from_first[decode_jobs], V_from_first[decode_jobs], rows = 0;
  for (Int64 n = 0; n < count; ++n) {
    blocks[n] = s.job(rows, Q_stride, O_stride), rows += written_rows(jobs[n].count * any.nq);
    start_decode(jobs[n], as, blocks[n]);
    K_from_first[n] = jobs[n].heads[0].k.base - any.k.base;
    V_from_first[n] = jobs[n].heads[0].v.base - any.v.base;
  }
  // Rows that a job lacks are computed from zeros, and lanes behind the last key are overwritten: nobody looks at them.
  fill(s.S, round_up(rows, lanes) * score_stride, 0);
  fill(s.m, rows, -infinity), fill(s.m + rows, round_up(rows, lanes) - rows, 0);
  for (Int64 i = 0; i < rows; ++i) s.l[i] = 0;
  StepKeys steps[2];  // this step and the next one
  steps[0].find(any, step_from(keys.begin, keys));
  TileRoom room, second_room;
  int turn = 0;
  for (Int64 j = keys.begin; j < keys.end; j += decode_step, turn ^= 1) {
    const StepKeys& here = steps[turn];
    StepKeys& ahead = steps[turn ^ 1];
    ahead.find(any, step_from(j + decode_step, keys));
    const Int64 size = here.keys.size();
    const bool unread = j == keys.begin;  // no step before has prefetched this one's rows
    LineStream stream;
    stream.start(any.k, ahead.K, ahead.keys.size(), K_from_first, count, K_bytes);
    for (Int64 n = 0; n < count; ++n) {
      const HeadJob& head = jobs[n].heads[0];
      const StepTile K = tile_of_job(here.K, any.k, head.k, here.keys, room);
      StepTile V;
      if (any.qv) V = tile_of_job(here.V, any.v, head.v, here.keys, second_room);
      if (unread && n + 1 < count) prefetch_rows(here.K, K_from_first[n + 1], size, K_bytes);
      decode_products(head, as, K, any.qv ? &V : nullptr, size, jobs[n].count * any.nq, &stream, blocks[n]);
      decode_scores(jobs[n], here.keys, jobs[n].count * any.nq, blocks[n].S);
      stream.catch_up(n, count);
    }
    decode_softmax(size, rows, s.S, s.m, s.l, s.alpha);
    stream.start(any.v, ahead.V, ahead.keys.size(), V_from_first, count, V_bytes);
    for (Int64 n = 0; n < count; ++n) {
      const StepTile V = tile_of_job(here.V, any.v, jobs[n].heads[0].v, here.keys, room);
      if (unread && n + 1 < count) prefetch_rows(here.V, V_from_first[n + 1], size, V_bytes);
      decode_outputs(jobs[n], as, V, size, &stream, blocks[n]);
      stream.catch_up(n, count);
    }
  }
  for (Int64 n = 0; n < count; ++n) store_partials(jobs[n], as.V, blocks[n]);
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
