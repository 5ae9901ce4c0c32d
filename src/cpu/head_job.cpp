// SPDX-License-Identifier: Apache-2.0
// See cpu/head_job.hpp.
#include "cpu/head_job.hpp"

#include "math/softmax.hpp"

namespace tessera::cpu {

Rows head_rows(const TokenRows& rows, Int64 h) {
  if (!rows) return {};
  return {rows.type, static_cast<char*>(rows.at(0, h)), rows.token * size_of(rows.type)};
}

RowNumbers head_numbers(RowNumbers numbers, Int64 h) {
  if (numbers) numbers.base += h * numbers.head * size_of(numbers.type);
  return numbers;
}

PairNumbers head_pairs(PairNumbers pairs, Int64 h) {
  if (pairs) pairs.base += h * pairs.head * size_of(pairs.type);
  return pairs;
}

CarriedState head_state(const State& state, const Problem& p, const Sequence& s, Int64 h) {
  return {.o = head_rows(token_rows(state.o, p, s.b, s.q_begin), h),
          .m = head_numbers(row_numbers(state.m, p, s), h),
          .l = head_numbers(row_numbers(state.l, p, s), h)};
}

HeadJob head_job(const Problem& p, const Call& call, const Sequence& s, Int64 h) {
  const Options& o = p.options;
  const DropoutSeed seed = dropout_seed(call.options, call.inputs.rng);
  const Int64 kv = h / p.heads_per_kv();
  const UInt32 threshold = dropout_threshold(o.dropout);
  const auto scale = static_cast<float>(o.scale);
  return {.D = p.D,
          .Dv = p.Dv,
          .nq = s.nq,
          .nk = s.nk,
          .q = head_rows(token_rows(call.inputs.q, p, s.b, s.q_begin), h),
          .qv = head_rows(token_rows(call.inputs.qv, p, s.b, s.q_begin), h),
          .k = keys_of(p, call, s, kv),
          .v = values_of(p, call, s, kv),
          .mask = s.mask,
          .rows = s.rows,
          .scale = o.part_invariant ? 1 : scale,
          .dS_scale = o.part_invariant ? scale : 1,
          .options = p.score_options(),
          .score = rounded(score_numbers_of(call, p, s.b, h, log2e<double>)),
          .bias = head_pairs(pair_numbers(call.inputs.bias, s), h),
          .visible = head_pairs(pair_numbers(call.inputs.mask, s), h),
          .sink = static_cast<float>(sink_of(call, h) * log2e<double>),
          .threshold = threshold,
          .keep_scale = static_cast<float>(dropout_scale(threshold)),
          .key = dropout_key(seed.seed, seed.offset),
          .b0 = s.batch,
          .h0 = h + o.head0,
          .row0 = s.row0,
          .col0 = s.col0};
}

std::vector<Sequence> all_sequences(const Problem& p, const Call& call) {
  std::vector<Sequence> list;
  for (Int64 b = 0; b < p.B; ++b)
    if (const Sequence s = sequence_of(p, call, b); s.nq > 0 || s.nk > 0) list.push_back(s);
  return list;
}

}  // namespace tessera::cpu
