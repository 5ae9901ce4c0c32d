// SPDX-License-Identifier: Apache-2.0
// One sequence in different company: alone, in a batch, packed among others; and the cases that are worth comparing bit
// by bit.
// Included by the tests of determinism and batch invariance, of the CPU and of GPUs.
#pragma once

#include <algorithm>
#include <vector>

#include "tests/support/support.hpp"

namespace tessera::test {

// Gradients included; cases with partial tiles both ways.
inline std::vector<Case> mixes() {
  return {
      {.name = "plain", .Nq = 130, .Nk = 400, .Hq = 4, .Hk = 2, .D = 40},
      {.name = "causal_gqa", .Nq = 140, .Nk = 400, .Hq = 6, .Hk = 2, .D = 32, .options = {.causal = true}},
      {.name = "window_softcap",
       .Nq = 300,
       .Nk = 210,
       .Hq = 2,
       .Hk = 1,
       .D = 24,
       .Dv = 56,
       .options = {.softcap = 3, .window_left = 100, .window_right = 40},
       .dlse = true},
      {.name = "bias_mask_dropout",
       .Nq = 129,
       .Nk = 385,
       .Hq = 2,
       .Hk = 2,
       .D = 16,
       .options = {.causal = true, .dropout = 0.3, .seed = 5},
       .bias = true,
       .bias_f32 = true,
       .mask = true},
      {.name = "alibi_sinks",
       .Nq = 66,
       .Nk = 194,
       .Hq = 4,
       .Hk = 1,
       .D = 72,
       .slopes = Slopes::per_head,
       .sinks = Sinks::finite,
       .dlse = true,
       .f32_o = true,
       .f32_grads = true},
      {.name = "one_query", .Nq = 1, .Nk = 500, .Hq = 8, .Hk = 2, .D = 64},
  };
}

inline void expect_same_outputs(const CaseData& a, const CaseData& b) {
  expect_same_bits(a.o, b.o, "o");
  expect_same_bits(a.lse, b.lse, "lse");
  expect_same_bits(a.dq, b.dq, "dq");
  expect_same_bits(a.dk, b.dk, "dk");
  expect_same_bits(a.dv, b.dv, "dv");
  expect_same_bits(a.dbias, b.dbias, "dbias");
  expect_same_bits(a.dsinks, b.dsinks, "dsinks");
}

inline constexpr std::size_t neighbours = 7, place = 3;

struct Company {
  const char* name;
  Case spec;
};

inline std::vector<Company> companies(const Case& alone) {
  const auto Nq = static_cast<std::int32_t>(alone.Nq), Nk = static_cast<std::int32_t>(alone.Nk);
  const std::vector<std::int32_t> lengths_q = {5, Nq + 40, 0, Nq, 64, 1, 2 * Nq};
  const std::vector<std::int32_t> lengths_k = {200, Nk, 30, Nk, 0, Nk + 9, 17};
  Case equal = alone, padded = alone, packed = alone, hinted = alone;
  equal.B = neighbours;
  padded.B = neighbours, padded.Nq = 2 * Nq + 64, padded.Nk = std::max(Nk + 9, 200);
  padded.used_q = lengths_q, padded.used_k = lengths_k;
  packed.packed_q = lengths_q, packed.packed_k = lengths_k;
  hinted = packed, hinted.style = Style::heads_first;
  hinted.front_q = 90, hinted.front_k = 140, hinted.tail_q = 70, hinted.tail_k = 3;
  hinted.options.max_seqlen_q = 2 * Nq + 1000, hinted.options.max_seqlen_k = Nk + 1000;
  return {{"equal lengths", equal},
          {"padded", padded},
          {"packed", packed},
          {"packed, padding, hints, other strides", hinted}};
}

// Calls visit(element of the lone sequence, element in company) for each element of a Q-like tensor.
template <class Visit>
void each_row_element(std::int64_t row_a, std::int64_t row_b, std::int64_t rows, std::int64_t width, Visit visit) {
  for (std::int64_t e = 0; e < rows * width; ++e) visit(row_a * width + e, row_b * width + e);
}
template <class Visit>
void each_lse_element(const CaseData& a, const CaseData& b, Visit visit) {
  const Sequence &s = a.sequences[0], &t = b.sequences[place];
  for (std::int64_t h = 0; h < a.spec.Hq; ++h)
    for (std::int64_t i = 0; i < s.Nq; ++i) visit(s.lse_first + h * s.lse_head + i, t.lse_first + h * t.lse_head + i);
}
template <class Visit>
void each_score_element(const Buffer& a, const Buffer& b, Visit visit) {
  const std::int64_t Mq = a.size(2), Mk = a.size(3), H = a.size(1);
  for (std::int64_t e = 0; e < a.elements(); ++e) {
    const std::int64_t j = e % Mk, i = e / Mk % Mq, h = e / Mk / Mq;
    visit(e, ((static_cast<std::int64_t>(place) * H + h) * b.size(2) + i) * b.size(3) + j);
  }
}

inline void take_place(const CaseData& alone, CaseData& company) {
  const Sequence &s = alone.sequences[0], &t = company.sequences[place];
  const Case& c = alone.spec;
  const auto copy = [](const Buffer& from, Buffer& to) {
    return [&from, &to](std::int64_t a, std::int64_t b) { to.set(b, from.get(a)); };
  };
  each_row_element(s.row_q, t.row_q, s.Nq, c.Hq * c.D, copy(alone.q, company.q));
  each_row_element(s.row_k, t.row_k, s.Nk, c.Hk * c.D, copy(alone.k, company.k));
  each_row_element(s.row_k, t.row_k, s.Nk, c.Hk * c.dim_v(), copy(alone.v, company.v));
  each_row_element(s.row_q, t.row_q, s.Nq, c.Hq * c.dim_v(), copy(alone.d_o, company.d_o));
  if (alone.d_lse) each_lse_element(alone, company, copy(alone.d_lse, company.d_lse));
  if (alone.bias) each_score_element(alone.bias, company.bias, copy(alone.bias, company.bias));
  if (alone.mask) each_score_element(alone.mask, company.mask, copy(alone.mask, company.mask));
}

inline void expect_same_sequence(const CaseData& alone, const CaseData& company) {
  const Sequence &s = alone.sequences[0], &t = company.sequences[place];
  const Case& c = alone.spec;
  const auto same = [](const char* name, const Buffer& x, const Buffer& y) {
    return [name, &x, a = x.bits(), b = y.bits()](std::int64_t m, std::int64_t n) {
      if (testing::Test::HasFatalFailure()) return;  // one element is enough to see
      ASSERT_EQ(a[static_cast<std::size_t>(m)], b[static_cast<std::size_t>(n)]) << name << x.index(m);
    };
  };
  each_row_element(s.row_q, t.row_q, s.Nq, c.Hq * c.dim_v(), same("o", alone.o, company.o));
  each_lse_element(alone, company, same("lse", alone.lse, company.lse));
  if (!c.backward) return;
  each_row_element(s.row_q, t.row_q, s.Nq, c.Hq * c.D, same("dq", alone.dq, company.dq));
  each_row_element(s.row_k, t.row_k, s.Nk, c.Hk * c.D, same("dk", alone.dk, company.dk));
  each_row_element(s.row_k, t.row_k, s.Nk, c.Hk * c.dim_v(), same("dv", alone.dv, company.dv));
  if (alone.dbias) each_score_element(alone.dbias, company.dbias, same("dbias", alone.dbias, company.dbias));
}

}  // namespace tessera::test
