// SPDX-License-Identifier: Apache-2.0
// The ends of f32's range. Below: probabilities that are lost, what the judge allows for that and what it does not.
// Above: what scores and sums that f32 cannot hold give, on every kernel, and that nothing happens before they are
// there. Links tessera_cases. Implements docs/numerics.md, "The rule" and "Beyond f32's range".
#include <cmath>
#include <limits>

#include "cases/tiles.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// --- below: probabilities that underflow ----------------------------------------------------------------------------

// A few keys under a sink that leaves them probabilities of about 2^-exponent.
CaseData below_a_sink(Type type, double exponent) {
  CaseData data = build({.name = "sink",
                         .Nq = 3,
                         .Nk = 3,
                         .D = 8,
                         .type = type,
                         .bias = true,
                         .bias_dims = {.i = false, .j = false},
                         .sinks = Sinks::finite,
                         .f32_o = true,
                         .f32_grads = true});
  for (std::int64_t h = 0; h < data.sinks.elements(); ++h) data.sinks.set(h, exponent * std::log(2.0));
  return data;
}

// All outputs of a kernel that has lost every probability.
std::vector<OutputReport> judged_zeros(CaseData& data) {
  const Expectation expected = expect(data);
  std::vector<OutputReport> reports;
  for (const auto& [name, output, wanted] : {std::tuple{"o", &data.o, &expected.o},
                                             {"dq", &data.dq, &expected.dq},
                                             {"dk", &data.dk, &expected.dk},
                                             {"dv", &data.dv, &expected.dv},
                                             {"dbias", &data.dbias, &expected.dbias},
                                             {"dsinks", &data.dsinks, &expected.dsinks}}) {
    for (std::int64_t e = 0; e < output->elements(); ++e) output->set(e, 0);
    reports.push_back(compare(name, *output, *wanted));
  }
  return reports;
}

TEST(Underflow, TheJudgeAllowsWhatF32CannotHold) {
  for (Type type : {Type::f32, Type::bf16})
    for (const double exponent : {127.0, 132.0, 140.0}) {
      CaseData data = below_a_sink(type, exponent);
      for (const OutputReport& report : judged_zeros(data)) {
        EXPECT_TRUE(report.ok) << report.name << " 2^-" << exponent;
        // Still smaller ones are lost in the model too, whose outputs are f32.
        EXPECT_TRUE(report.needs_underflow() || exponent > 128) << report.name << " 2^-" << exponent;
      }
    }
}

TEST(Underflow, TheJudgeRefusesToLoseMore) {
  for (Type type : {Type::f32, Type::bf16})
    for (const double exponent : {5.0, 26.0, 60.0, 90.0}) {
      CaseData data = below_a_sink(type, exponent);
      for (const OutputReport& report : judged_zeros(data))
        EXPECT_FALSE(report.ok) << report.name << " 2^-" << exponent;
    }
}

// The tables have cases that pass by this term alone, on every kernel that computes in f32. (bf16 and f16 end so close
// to where they are that rounding to the type may explain them.)
TEST(Underflow, TheTablesNeedTheTerm) {
  int needed = 0;
  for (const Case& c : suite("corner")) {
    if (!c.name.starts_with("underflow_") || c.type != Type::f32) continue;
    for (const std::string& kernel : cpu_kernels()) {
      const CaseReport report = run_case(c, Execution{.kernel = kernel.c_str()});
      expect_ok(report);
      EXPECT_EQ(underflowed({.cases = {report}}), 1) << to_text(report);
      ++needed;
    }
  }
  EXPECT_GE(needed, 6);
}

// The running maximum lags behind: the second tile's keys are 2^7 above the first's, which serves as the maximum, and
// the third tile's one key is so far above both that the factor from the old maximum to the new one is below 2^-126,
// although the second tile's probabilities are not. Only they have a value.
TEST(Underflow, AMaximumThatLagsLosesNoMore) {
  constexpr std::int64_t Nk = 2 * tile_k + 1;
  for (const std::string& kernel : available_kernels())
    for (Type type : {Type::f32, Type::bf16}) {
      CaseData data = build({.name = "lag",
                             .Nq = 20,
                             .Nk = Nk,
                             .Hq = 1,
                             .Hk = 1,
                             .D = 8,
                             .type = type,
                             .bias = true,
                             .bias_dims = {.i = false},
                             .bias_f32 = true});
      for (std::int64_t e = 0; e < data.q.elements(); ++e) data.q.set(e, 0);
      for (std::int64_t j = 0; j < Nk; ++j) data.bias.set(j, j < tile_k ? 0 : j + 1 < Nk ? 5 : 92);
      for (std::int64_t e = 0; e < data.v.elements(); ++e)
        if (e / 8 < tile_k || e / 8 + 1 == Nk) data.v.set(e, 0);
      expect_accurate(data, {.kernel = kernel.c_str()});
    }
}

// --- above: scores and sums that overflow ---------------------------------------------------------------------------

constexpr std::int64_t Nk = 2, D = 2;

// Ones everywhere, so that a row whose scores are equal has O = 1. Few queries and many take different paths.
CaseData ones(std::int64_t Nq, const Case& options) {
  Case c = options;
  c.name = "ones", c.Nq = Nq, c.Nk = Nk, c.Hq = c.Hk = 1, c.D = D, c.options.scale = 1;
  CaseData data = build(c);
  for (Buffer* input : {&data.q, &data.k, &data.v, &data.d_o})
    for (std::int64_t e = 0; e < input->elements(); ++e) input->set(e, 1);
  return data;
}

// Runs on every kernel that computes in f32; the reference has float64's range, and LSE alone can leave f32's.
template <class Change, class Look>
void on_f32_kernels(const Case& options, Change change, Look look) {
  for (const std::string& kernel : cpu_kernels())
    for (const std::int64_t Nq : {2, 20, 70}) {
      SCOPED_TRACE(kernel + " " + std::to_string(Nq));
      CaseData data = ones(Nq, options);
      change(data);
      run(data, {.kernel = kernel.c_str()});
      look(data);
    }
}

bool all_nan(const Buffer& x, std::int64_t row = 0, std::int64_t rows = 1) {
  const std::int64_t width = x.elements() / rows;
  for (std::int64_t d = 0; d < width; ++d)
    if (!std::isnan(x.get(row * width + d))) return false;
  return true;
}

// Query 0 is NaN and reaches what it sees; the other queries' rows are what they would be.
void expect_row_lost(const CaseData& data) {
  const std::int64_t Nq = data.spec.Nq;
  EXPECT_TRUE(all_nan(data.o, 0, Nq) && std::isnan(data.lse.get(0)) && all_nan(data.dq, 0, Nq));
  EXPECT_TRUE(all_nan(data.dk) && all_nan(data.dv));
  for (std::int64_t e = D; e < data.o.elements(); ++e) EXPECT_TRUE(data.o.get(e) == 1 && data.dq.get(e) == 0) << e;
}

TEST(Overflow, OfAScoreUpwardsLosesItsRow) {
  on_f32_kernels(
      {}, [](CaseData& x) { x.q.set(0, 1e20), x.k.set(0, 1e20); }, expect_row_lost);
  // Both signs in one product: infinity minus infinity, although the score is 0.
  const auto both_signs = [](CaseData& x) { x.q.set(0, 1e20), x.q.set(1, -1e20), x.k.set(0, 1e20), x.k.set(1, 1e20); };
  on_f32_kernels({}, both_signs, expect_row_lost);
}

// The other rows do not look at the numbers that do it.
void hide_all_from_row_0(CaseData& x) {
  for (std::int64_t i = 0; i < x.spec.Nq; ++i) x.q.set(i * D, i == 0 ? 1e20 : 0);
  x.k.set(0, -1e20), x.k.set(D, -1e20);
}

TEST(Overflow, OfAScoreDownwardsHidesTheKey) {
  const auto low = [](CaseData& x) { x.q.set(0, 1e20), x.k.set(0, -1e20); };
  on_f32_kernels({}, low, [](const CaseData& x) {
    for (std::int64_t e = 0; e < x.o.elements(); ++e) EXPECT_EQ(x.o.get(e), 1);
    EXPECT_EQ(x.dv.get(0), 0);
    EXPECT_EQ(x.dv.get(D), x.spec.Nq);
  });
  // All keys of a row: it sees none.
  on_f32_kernels({}, hide_all_from_row_0, [](const CaseData& x) {
    EXPECT_EQ(x.o.get(0), 0);
    EXPECT_EQ(x.lse.get(0), -infinity);
    EXPECT_EQ(x.dq.get(0), 0);
    EXPECT_EQ(x.o.get(D), 1);
    EXPECT_NEAR(x.dv.get(0), (x.spec.Nq - 1) / 2.0, 1e-4);
  });
}

// Times log2(e), what is beyond 2.3e38 is infinite. The most negative number, which is some callers' mask, hides a key.
TEST(Overflow, OfABiasIsAnInfiniteBias) {
  Case c;
  c.bias = true, c.bias_dims = {.b = false, .h = false, .i = false};
  const double most = std::numeric_limits<float>::max();
  const auto biases = [](double first, double second) {
    return [=](CaseData& x) { x.bias.set(0, first), x.bias.set(1, second); };
  };
  on_f32_kernels(c, biases(-most, 0), [](const CaseData& x) {
    EXPECT_EQ(x.o.get(0), 1);
    EXPECT_EQ(x.lse.get(0), 2);
    EXPECT_EQ(x.dv.get(0), 0);
  });
  on_f32_kernels(c, biases(-most, -most), [](const CaseData& x) {
    EXPECT_EQ(x.o.get(0), 0);
    EXPECT_EQ(x.lse.get(0), -infinity);
    EXPECT_EQ(x.dv.get(0), 0);
  });
  on_f32_kernels(c, biases(most, 0), [](const CaseData& x) { EXPECT_TRUE(all_nan(x.o) && all_nan(x.lse)); });
  on_f32_kernels(c, biases(2e38, 2e38), [](const CaseData& x) {  // not yet
    EXPECT_EQ(x.o.get(0), 1);
    EXPECT_NEAR(x.lse.get(0), 2e38, 1e32);
  });
}

TEST(Overflow, OfSlopesAndSinks) {
  Case sloped, sunk;
  sloped.slopes = Slopes::per_head, sloped.options.col0 = 100, sunk.sinks = Sinks::finite;
  on_f32_kernels(
      sloped, [](CaseData& x) { x.slopes.set(0, 1e38); },
      [](const CaseData& x) {
        EXPECT_EQ(x.o.get(0), 0);
        EXPECT_EQ(x.lse.get(0), -infinity);
      });
  on_f32_kernels(
      sloped, [](CaseData& x) { x.slopes.set(0, -1e38); }, [](const CaseData& x) { EXPECT_TRUE(all_nan(x.o)); });
  on_f32_kernels(
      sunk, [](CaseData& x) { x.sinks.set(0, -3e38); }, [](const CaseData& x) { EXPECT_EQ(x.o.get(0), 1); });
  on_f32_kernels(
      sunk, [](CaseData& x) { x.sinks.set(0, 3e38); },
      [](const CaseData& x) { EXPECT_TRUE(all_nan(x.o) && all_nan(x.lse)); });
  on_f32_kernels(
      sunk, [](CaseData& x) { x.sinks.set(0, 2e38); },
      [](const CaseData& x) {
        EXPECT_EQ(x.o.get(0), 0);
        EXPECT_NEAR(x.lse.get(0), 2e38, 1e32);
      });
}

// A softcap comes before infinity can do harm.
TEST(Overflow, OfAScoreUnderASoftcapIsTheCap) {
  Case c;
  c.options.softcap = 5;
  on_f32_kernels(
      c, [](CaseData& x) { x.q.set(0, 1e20), x.k.set(0, 1e20); },
      [](const CaseData& x) {
        EXPECT_EQ(x.o.get(0), 1);
        EXPECT_NEAR(x.lse.get(0), 5 + std::log(2.0), 1e-5);  // both keys
        EXPECT_EQ(x.dq.get(0), 0);
      });
}

// Sums of values are divided by l in the end only: two values of 3e38 have an infinite sum, and a mean that is not.
TEST(Overflow, OfASumReachesItsElement) {
  on_f32_kernels(
      {}, [](CaseData& x) { x.v.set(0, 3e38), x.v.set(D, 3e38); },
      [](const CaseData& x) {
        EXPECT_EQ(x.o.get(0), infinity);
        EXPECT_EQ(x.o.get(1), 1);
        EXPECT_FALSE(std::isfinite(x.dq.get(0)));
        EXPECT_FALSE(std::isfinite(x.dk.get(0)));
        EXPECT_NEAR(x.dv.get(0), x.spec.Nq / 2.0, 1e-4);
      });
  // dP = dO . v of query 0 and key 0, and with it delta: that query's dQ and the keys that it sees.
  on_f32_kernels(
      {}, [](CaseData& x) { x.d_o.set(0, 1e20), x.v.set(0, 1e20); },
      [](const CaseData& x) {
        EXPECT_TRUE(std::isfinite(x.o.get(0)) && std::isfinite(x.dv.get(0)));
        EXPECT_FALSE(std::isfinite(x.dq.get(0)));
        EXPECT_FALSE(std::isfinite(x.dk.get(0)));
        EXPECT_FALSE(std::isfinite(x.dk.get(D)));
        EXPECT_EQ(x.dq.get(D), 0);
      });
}

TEST(Overflow, TheReferenceHasFloat64sRange) {
  const Execution reference{.kernel = "reference"};
  CaseData data = ones(3, {});
  data.q.set(0, 1e20), data.k.set(0, 1e20), data.v.set(1, 3e38), data.v.set(D + 1, 3e38);
  run(data, reference);
  EXPECT_EQ(data.o.get(0), 1);
  EXPECT_NEAR(data.o.get(1), 3e38, 1e32);
  // LSE is f32: the backward pass finds p = 0 in a row whose LSE is infinite.
  EXPECT_EQ(data.lse.get(0), infinity);
  EXPECT_EQ(data.dq.get(0), 0);
  CaseData low = ones(3, {});
  hide_all_from_row_0(low);
  run(low, reference);
  EXPECT_EQ(low.o.get(0), 1);
  EXPECT_EQ(low.lse.get(0), -infinity);
  EXPECT_EQ(low.dv.get(0), 1);  // of the other two rows
}

// Up to 2^80 the rule holds, wherever the size sits; scores end at 2^22.
TEST(Overflow, IsNotReachedBelowTheStatedSize) {
  struct Sizes {
    double q, k, v, d_o, scale;
  };
  const Sizes all[] = {{0x1p39, 0x1p39, 1, 1, 0x1p-78},
                       {0x1p-60, 0x1p76, 1, 1, 0x1p-16},
                       {1, 1, 0x1p76, 0x1p-60, 1},
                       {1, 1, 0x1p-60, 0x1p74, 1},
                       {0x1p10, 0x1p10, 1, 1, 1}};
  for (const std::string& kernel : available_kernels())
    for (Type type : {Type::f32, Type::bf16})
      for (const Sizes& sizes : all) {
        Case c{.name = "large", .Nq = 70, .Nk = 2 * tile_k + 5, .D = 16, .type = type};
        c.options.scale = sizes.scale / 4;
        CaseData data = build(c);
        const auto grow = [](Buffer& x, double factor) {
          for (std::int64_t e = 0; e < x.elements(); ++e) x.set(e, x.get(e) * factor);
        };
        grow(data.q, sizes.q), grow(data.k, sizes.k), grow(data.v, sizes.v), grow(data.d_o, sizes.d_o);
        expect_accurate(data, {.kernel = kernel.c_str()});
      }
}

// The forward pass goes on beyond: each row has a winner, whose product with the scores' factor must be rounded as in
// the maximum. (The backward pass knows LSE alone, whose rounding is then more than an exponent.)
TEST(Overflow, OfTheForwardPassIsNotReachedByLargeScores) {
  for (const std::string& kernel : available_kernels())
    for (Type type : {Type::f32, Type::bf16})
      for (const double size : {0x1p16, 0x1p20, 0x1p30}) {
        CaseData data = build({.name = "winners", .Nq = 70, .Nk = 2 * tile_k + 5, .D = 16, .type = type});
        for (Buffer* input : {&data.q, &data.k})
          for (std::int64_t e = 0; e < input->elements(); ++e) input->set(e, input->get(e) * size);
        run(data, {.kernel = kernel.c_str()});
        const Expectation expected = expect(data);
        for (const OutputReport& report : {compare("o", data.o, expected.o), compare_lse(data.lse, expected.lse)})
          EXPECT_TRUE(report.ok) << kernel << " " << size << " " << report.name << " " << report.detail;
      }
}

}  // namespace
}  // namespace tessera::test
