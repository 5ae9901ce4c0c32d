// SPDX-License-Identifier: Apache-2.0
// Scores and softmax of decoding's rows, which have a lane per key. Included by cpu/isa/*.cpp inside their target
// region.
#pragma once

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
  const HeadJob& any = job.heads[0];
  const Int64 count = keys.size(), width = round_up(count, lanes);
  const bool whole = is_whole(any, {0, any.nq}, keys);
  if (whole && count == width && !any.options.change_scores()) return;
  for (Int64 row = 0; row < rows; ++row) {
    float* scores = S + row * score_stride;
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

// The scores of rows become P; as softmax_columns, across lanes. Row r of O must be multiplied by alpha[r]. A vector's
// worth of rows at a time: none then waits for its own maximum, and the rest has a row per lane. What a row's numbers
// become does not depend on the rows beside it.
HWY_INLINE void decode_softmax(Int64 count, Int64 rows, float* S, float* m, double* l, float* alpha) {
  for (Int64 first = 0; first < rows; first += lanes) {
    const Int64 here = lesser(lanes, rows - first);
    float* scores = S + first * score_stride;
    Vec x[lanes];
    for (Int64 r = 0; r < lanes; ++r) x[r] = set(-infinity);
    for (Int64 r = 0; r < here; ++r)
      for (Int64 j = 0; j < count; j += lanes) x[r] = hn::Max(x[r], load(scores + r * score_stride + j));
    const Vec top = across_lanes<Largest>(x), before = load(m + first);
    const Vec after = hn::IfThenElse(hn::Gt(top, hn::Add(before, set(slack))), top, before);
    store(after, m + first);
    const Vec base = hn::IfThenElse(hn::Eq(after, set(-infinity)), hn::Zero(FloatTag()), after);
    HWY_ALIGN float bases[lanes];
    HWY_ALIGN float sums[lanes];
    store(base, bases);
    const Lane moved = hn::Or(hn::Ne(before, after), hn::Eq(before, set(-infinity)));
    Vec factor = set(1);
    if (!hn::AllFalse(FloatTag(), moved)) factor = hn::IfThenElse(moved, exp2_bounded(hn::Sub(before, base)), factor);
    store(factor, alpha + first);
    for (Int64 r = 0; r < here; ++r) {
      Vec total = hn::Zero(FloatTag());
      for (Int64 j = 0; j < count; j += lanes) {
        float* at = scores + r * score_stride + j;
        const Vec P = exp2_bounded(hn::Sub(load(at), set(bases[r])));
        store(P, at);
        total = hn::Add(total, P);
      }
      x[r] = total;
    }
    store(across_lanes<Sum>(x), sums);
    for (Int64 r = 0; r < here; ++r) l[first + r] = l[first + r] * double(alpha[first + r]) + double(sums[r]);
  }
}
