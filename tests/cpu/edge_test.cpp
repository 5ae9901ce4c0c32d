// SPDX-License-Identifier: Apache-2.0
// What a table row cannot say: NaN and Inf that must or must not travel, rows masked by hand, merge, the dropout mask,
// errors that leave everything alone, several threads calling at once.
// Links tessera_cases. Implements the contract's list "Edge cases that broke others".
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <thread>

#include "cases/random.hpp"
#include "cases/tiles.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
const double nan = std::nan("");

template <class Body>
void on_each_kernel(Body body) {
  for (const std::string& kernel : available_kernels()) {
    SCOPED_TRACE(kernel);
    body(Execution{.kernel = kernel.c_str()});
  }
}

constexpr std::array types{Type::f32, Type::f16, Type::bf16};

// --- NaN and infinity in the inputs ---------------------------------------------------------------------------------

constexpr std::int64_t N = 500, D = 16;

Case causal_square(Type type) {
  return {.name = "causal", .Nq = N, .Nk = N, .Hq = 1, .Hk = 1, .D = D, .type = type, .options = {.causal = true}};
}

bool row_has_nan(const Buffer& x, std::int64_t row, std::int64_t width) {
  for (std::int64_t d = 0; d < width; ++d)
    if (std::isnan(x.get(row * width + d))) return true;
  return false;
}
bool row_all_nan(const Buffer& x, std::int64_t row, std::int64_t width) {
  for (std::int64_t d = 0; d < width; ++d)
    if (!std::isnan(x.get(row * width + d))) return false;
  return true;
}
void expect_rows_same(const Buffer& a, const Buffer& b, std::int64_t rows, std::int64_t width, const char* what) {
  const auto x = a.bits(), y = b.bits();
  for (std::int64_t e = 0; e < rows * width; ++e)
    ASSERT_EQ(x[static_cast<std::size_t>(e)], y[static_cast<std::size_t>(e)]) << what << a.index(e);
}

TEST(Nan, InAQueryReachesItsRowAndNoOther) {
  on_each_kernel([](const Execution& execution) {
    for (Type type : types) {
      CaseData clean = build(causal_square(type)), dirty = build(causal_square(type));
      const std::int64_t row = 200;
      dirty.q.set(row * D + 3, nan);
      run(clean, execution), run(dirty, execution);
      EXPECT_TRUE(row_all_nan(dirty.o, row, D));
      EXPECT_TRUE(std::isnan(dirty.lse.get(row)));
      EXPECT_TRUE(row_all_nan(dirty.dq, row, D));
      for (std::int64_t i = 0; i < N; ++i) {
        if (i == row) continue;
        ASSERT_FALSE(row_has_nan(dirty.o, i, D)) << i;
        ASSERT_FALSE(row_has_nan(dirty.dq, i, D)) << i;
      }
      for (std::int64_t j = 0; j <= row; ++j) ASSERT_TRUE(row_all_nan(dirty.dk, j, D)) << "key " << j << " is seen";
      for (std::int64_t j = 2 * tile_k; j < N; ++j) ASSERT_FALSE(row_has_nan(dirty.dk, j, D)) << "key " << j;
    }
  });
}

TEST(Nan, InAKeyReachesTheRowsThatSeeIt) {
  on_each_kernel([](const Execution& execution) {
    const bool exact = std::string(execution.kernel) == "reference";
    for (Type type : types) {
      CaseData clean = build(causal_square(type)), dirty = build(causal_square(type));
      const std::int64_t key = 300;
      dirty.k.set(key * D + 5, nan);
      run(clean, execution), run(dirty, execution);
      for (std::int64_t i = key; i < N; ++i) {
        ASSERT_TRUE(row_all_nan(dirty.o, i, D)) << i;
        ASSERT_TRUE(std::isnan(dirty.lse.get(i))) << i;
      }
      // Rows before the key's tile share nothing with it; the reference keeps it out of every row that is blind to it.
      const std::int64_t apart = exact ? key : key / tile_k * tile_k;
      expect_rows_same(clean.o, dirty.o, apart, D, "o");
      expect_rows_same(clean.dq, dirty.dq, apart, D, "dq");
    }
  });
}

TEST(Nan, InfinityInAValueReachesTheRowsThatSeeIt) {
  on_each_kernel([](const Execution& execution) {
    const bool exact = std::string(execution.kernel) == "reference";
    for (Type type : types) {
      CaseData clean = build(causal_square(type)), dirty = build(causal_square(type));
      const std::int64_t key = 300;
      dirty.v.set(key * D + 5, infinity);
      run(clean, execution), run(dirty, execution);
      for (std::int64_t i = key; i < N; ++i) ASSERT_FALSE(std::isfinite(dirty.o.get(i * D + 5))) << i;
      expect_rows_same(clean.o, dirty.o, exact ? key : key / tile_k * tile_k, D, "o");
    }
  });
}

TEST(Nan, InBiasReachesItsRow) {
  on_each_kernel([](const Execution& execution) {
    CaseData data = build({.name = "bias", .Nq = 70, .Nk = 200, .Hq = 2, .Hk = 2, .D = 8, .bias = true});
    data.bias.set((1 * 70 + 20) * 200 + 150, nan);
    run(data, execution);
    for (std::int64_t i = 0; i < 70; ++i)
      for (std::int64_t h = 0; h < 2; ++h)
        EXPECT_EQ(row_has_nan(data.o, i * 2 + h, 8), h == 1 && i == 20) << h << " " << i;
  });
}

// --- rows masked by hand --------------------------------------------------------------------------------------------

constexpr std::int64_t Mq = 3 * tile_q + 9, Mk = 2 * tile_k + 40;

// Blind rows in the first, a middle and the last query tile; a whole middle tile; rows that see one key tile only.
bool hidden(std::int64_t i, std::int64_t j) {
  if (i < 3 || (i >= tile_q && i < 2 * tile_q) || i >= Mq - 4) return true;
  if (i == 10) return j < tile_k;                     // the first key tile is empty for this row
  if (i == 11) return j >= tile_k && j < 2 * tile_k;  // a middle one
  if (i == 12) return j >= 2 * tile_k;                // the last
  if (i == 13) return j < Mk - 1;                     // only the very last key
  if (i == 14) return j > 0;                          // only the very first
  return j >= 20 && j < 30;                           // keys that (nearly) no row sees
}

TEST(BlindRows, ByMaskInFirstMiddleAndLastTiles) {
  on_each_kernel([](const Execution& execution) {
    for (Type type : types)
      for (Sinks sinks : {Sinks::none, Sinks::finite}) {
        CaseData data = build({.name = "blind",
                               .Nq = Mq,
                               .Nk = Mk,
                               .Hq = 1,
                               .Hk = 1,
                               .D = 24,
                               .type = type,
                               .mask = true,
                               .sinks = sinks,
                               .dlse = true});
        for (std::int64_t e = 0; e < Mq * Mk; ++e) data.mask.set(e, hidden(e / Mk, e % Mk) ? 0 : 1);
        expect_accurate(data, execution);
        if (sinks == Sinks::none) {
          EXPECT_EQ(data.lse.get(tile_q + 1), -infinity);
        }
      }
  });
}

TEST(BlindRows, ByInfiniteBiasInFirstMiddleAndLastTiles) {
  on_each_kernel([](const Execution& execution) {
    for (Type type : types) {
      CaseData data = build(
          {.name = "blind", .Nq = Mq, .Nk = Mk, .Hq = 1, .Hk = 1, .D = 24, .type = type, .bias = true, .dlse = true});
      for (std::int64_t e = 0; e < Mq * Mk; ++e)
        if (hidden(e / Mk, e % Mk)) data.bias.set(e, -infinity);
      expect_accurate(data, execution);
      EXPECT_EQ(data.lse.get(0), -infinity);
      EXPECT_EQ(data.o.get(0), 0);
    }
  });
}

TEST(Window, RightZeroIsCausalToTheBit) {
  on_each_kernel([](const Execution& execution) {
    Case causal{.name = "causal", .Nq = 200, .Nk = 450, .D = 24, .options = {.causal = true}}, window = causal;
    window.options = {.window_right = 0};
    CaseData a = build(causal), b = build(window);
    run(a, execution), run(b, execution);
    expect_same_bits(a.o, b.o, "o");
    expect_same_bits(a.dk, b.dk, "dk");
  });
}

// A packed batch without sequences: nothing to compute, but gradients have rows, and they are zero.
TEST(Empty, PackedBatchOfNoSequences) {
  on_each_kernel([](const Execution& execution) {
    const Buffer cu = of(Type::i32, {1}, {0}), q(Type::f32, {4, 2, 8}), k(Type::f32, {5, 2, 8}),
                 v(Type::f32, {5, 2, 8});
    const Buffer o(Type::f32, {4, 2, 8}), lse(Type::f32, {2, 4}), d_o(Type::f32, {4, 2, 8});
    const Buffer dq(Type::f32, {4, 2, 8}), dk(Type::f32, {5, 2, 8}), dv(Type::f32, {5, 2, 8});
    Inputs in;
    in.q = q.tensor(), in.k = k.tensor(), in.v = v.tensor(), in.cu_seqlens_q = in.cu_seqlens_k = cu.tensor();
    forward(in, {.o = o.tensor(), .lse = lse.tensor()}, {}, execution);
    backward(in, {.o = o.tensor(), .lse = lse.tensor(), .d_o = d_o.tensor(), .d_lse = {}},
             {.dq = dq.tensor(), .dk = dk.tensor(), .dv = dv.tensor(), .dbias = {}, .dsinks = {}}, {}, execution);
    EXPECT_TRUE(o.untouched(0));
    for (const Buffer* gradient : {&dq, &dk, &dv})
      for (double x : gradient->values()) EXPECT_EQ(x, 0);
  });
}

// The judge's float64 gradients leave padding to what the kernels share, so it is looked at here.
void expect_zero_in_unused_rows(const Buffer& gradient, const CaseData& data, bool keys) {
  const std::int64_t heads = keys ? data.spec.Hk : data.spec.Hq, width = heads * data.spec.D;  // D is Dv
  std::vector<bool> used(static_cast<std::size_t>(gradient.elements() / width));
  for (const Sequence& s : data.sequences)
    for (std::int64_t i = 0; i < (keys ? s.Nk : s.Nq); ++i)
      used[static_cast<std::size_t>((keys ? s.row_k : s.row_q) + i)] = true;
  EXPECT_TRUE(std::find(used.begin(), used.end(), false) != used.end()) << "all rows are used";
  for (std::int64_t e = 0; e < gradient.elements(); ++e)
    if (!used[static_cast<std::size_t>(e / width)]) {
      ASSERT_EQ(gradient.get(e), 0) << gradient.index(e);
    }
}

TEST(Padding, HasGradientsOfZero) {
  on_each_kernel([](const Execution& execution) {
    for (const char* name : {"seqused_f32", "packed_seqused_f32"}) {
      CaseData data = build(find_case(name));
      SCOPED_TRACE(describe(data.spec));
      run(data, execution);
      expect_zero_in_unused_rows(data.dq, data, false);
      expect_zero_in_unused_rows(data.dk, data, true);
      expect_zero_in_unused_rows(data.dv, data, true);
    }
  });
}

// --- the dropout mask -----------------------------------------------------------------------------------------------

TEST(Dropout, EntryPointFollowsTheDefinition) {
  const Options options{.dropout = 0.3,
                        .seed = 0x123456789ABCDEF0,
                        .seed_offset = 0xFEDCBA9876543210,
                        .row0 = 5,
                        .col0 = 1001,
                        .head0 = 3,
                        .batch0 = 70000};
  const Buffer mask(Type::u8, {2, 3, 37, 67}, {.gap = 3});
  dropout_mask(mask.tensor(), options);
  for (std::int64_t e = 0; e < mask.elements(); ++e) {
    const std::int64_t j = e % 67, i = e / 67 % 37, h = e / 67 / 37 % 3, b = e / 67 / 37 / 3;
    ASSERT_EQ(mask.get(e), kept(options.seed, options.seed_offset, 0.3, b + 70000, h + 3, i + 5, j + 1001))
        << mask.index(e);
  }
  EXPECT_TRUE(mask.margins_intact());
}

TEST(Dropout, TensorOfSeedAndOffsetMeansTheSame) {
  const Buffer from_host(Type::u8, {1, 2, 9, 40}), from_tensor(Type::u8, {1, 2, 9, 40});
  const Buffer rng = of(Type::i64, {2}, {91, 17});
  dropout_mask(from_host.tensor(), {.dropout = 0.5, .seed = 91, .seed_offset = 17});
  dropout_mask(from_tensor.tensor(), {.dropout = 0.5}, rng.tensor());
  expect_same_bits(from_host, from_tensor, "mask");
}

TEST(Dropout, KeepsItsShare) {
  for (double p : {0.1, 0.5, 0.9}) {
    const Buffer mask(Type::u8, {2, 4, 128, 128});
    dropout_mask(mask.tensor(), {.dropout = p, .seed = 2026});
    const auto values = mask.values();
    const auto n = static_cast<double>(values.size());
    EXPECT_NEAR(std::accumulate(values.begin(), values.end(), 0.0) / n, 1 - p, 5 * std::sqrt(p * (1 - p) / n));
  }
}

// With Q = 0 and V = the identity, O is the mask times a constant.
TEST(Dropout, ForwardUsesTheMask) {
  on_each_kernel([](const Execution& execution) {
    constexpr std::int64_t Nq = 70, Nk = 210;
    Case spec{.name = "dropout",
              .B = 2,
              .Nq = Nq,
              .Nk = Nk,
              .Hq = 2,
              .Hk = 1,
              .D = 210,
              .Dv = 210,
              .options = {.dropout = 0.4, .seed = 8, .row0 = 3, .col0 = 6},
              .backward = false,
              .distribution = Distribution::identity};
    CaseData data = build(spec);
    for (std::int64_t e = 0; e < data.q.elements(); ++e) data.q.set(e, 0);
    run(data, execution);
    const Buffer mask(Type::u8, {2, 2, Nq, Nk});
    dropout_mask(mask.tensor(), data.options());
    const double kept_value = 1.0 / Nk / (1 - std::round(65536 * 0.4) / 65536);
    for (std::int64_t e = 0; e < mask.elements(); ++e) {
      const std::int64_t j = e % Nk, i = e / Nk % Nq, h = e / Nk / Nq % 2, b = e / Nk / Nq / 2;
      ASSERT_NEAR(data.o.get(((b * Nq + i) * 2 + h) * Nk + j), mask.get(e) * kept_value, 1e-7) << mask.index(e);
    }
  });
}

// --- errors and threads ---------------------------------------------------------------------------------------------

void expect_error_without_effect(CaseData& data, const Options& options, const Execution& execution = {}) {
  const auto message = describe(data.spec);
  EXPECT_THROW(forward(data.inputs(), data.outputs(), options, execution), Error) << message;
  EXPECT_THROW(backward(data.inputs(), data.saved(), data.gradients(), options, execution), Error) << message;
  for (const Buffer* output : {&data.o, &data.lse, &data.dq, &data.dk, &data.dv})
    for (std::int64_t e = 0; e < output->elements(); ++e) ASSERT_TRUE(output->untouched(e));
}

TEST(Errors, LeaveOutputsUntouched) {
  CaseData data = build({.name = "errors", .Nq = 9, .Nk = 20, .D = 8});
  for (const Options& options : {Options{.scale = nan}, Options{.softcap = -1}, Options{.diagonal_offset = 3},
                                 Options{.window_left = -2}, Options{.dropout = 1}, Options{.dropout = -0.1}})
    expect_error_without_effect(data, options);
  expect_error_without_effect(data, {}, {.kernel = "no such kernel"});
  CaseData packed = build(find_case("packed_f32"));
  packed.cu_k.set(1, 100000);
  expect_error_without_effect(packed, packed.options());
  CaseData used = build(find_case("seqused_f32"));
  used.used_k.set(0, -4);
  expect_error_without_effect(used, used.options());
}

TEST(Errors, WorkspaceThatIsTooSmallLeavesOutputsUntouched) {
  on_each_kernel([](const Execution& execution) {
    CaseData data = build({.name = "workspace", .Nq = 70, .Nk = 300, .D = 64});
    const Plan plan = Plan::backward(data.inputs(), data.saved(), data.gradients(), {}, execution);
    if (plan.workspace_size() < 2) return;  // nothing to be short of
    Buffer little(Type::u8, {static_cast<std::int64_t>(plan.workspace_size()) - 1});
    Execution short_of = execution;
    short_of.workspace = little.tensor().data, short_of.workspace_bytes = plan.workspace_size() - 1;
    EXPECT_THROW(plan.run(data.inputs(), data.saved(), data.gradients(), {}, short_of), Error);
    EXPECT_TRUE(data.dq.untouched(0));
  });
}

TEST(Callers, SeveralThreadsAtOnce) {
  constexpr std::uint64_t first = 400, callers = 4, rounds = 6;
  const auto at_once = [&](std::uint64_t caller) {
    for (std::uint64_t n = 0; n < rounds; ++n) {
      const Case spec = random_case(first + caller * rounds + n);
      CaseData alone = build(spec), among = build(spec);
      run(alone, {.threads = 1});
      run(among, {.threads = 3});
      expect_same_bits(alone.o, among.o, "o " + describe(spec));
      expect_same_bits(alone.dk, among.dk, "dk " + describe(spec));
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t caller = 0; caller < callers; ++caller) threads.emplace_back(at_once, caller);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace tessera::test
