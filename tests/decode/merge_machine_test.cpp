// SPDX-License-Identifier: Apache-2.0
// The kernel `merge` on the emulated machine: its own text, beside the CPU's merge. Both compute in float64, so every
// byte must be the same. Links tessera_cases. Implements docs/algorithm.md, "Merge".
#include <gtest/gtest.h>

#include <limits>

#include "cases/generator.hpp"
#include "core/check.hpp"
#include "gpu/merge.hpp"
#include "tests/emulated/watch.hpp"
#include "tests/support/support.hpp"

// Device code, behind what stands in for CUDA.
#include "gpu/kernel/merge.cuh"

namespace tessera::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

void merge_emulated(const std::vector<Outputs>& partials, const Outputs& merged) {
  check_merge(partials, merged, {});
  ASSERT_EQ(gpu::merge_refusal(partials, merged), "");
  const gpu::MergeParams params = gpu::merge_params(partials, merged);
  emulated::Watch watch;
  watch.tensor(merged.o, "o"), watch.tensor(merged.lse, "lse");
  emulated::Machine::here().run(static_cast<int>(gpu::merge_blocks(params)), gpu::merge_threads, 0,
                                [&] { gpu::merge(params); });
}

// Parts of one shape, padded or packed; rows that a part did not see hold NaN.
struct Parts {
  std::vector<Buffer> o, lse;
  std::vector<Outputs> views;

  Parts(Generator& g, int count, const Shape& shape) {
    constexpr Type types[] = {Type::f32, Type::f16, Type::bf16};
    const bool packed = shape.size() == 3;
    const std::size_t n = packed ? 0 : 1;
    const std::int64_t B = packed ? 1 : shape[0], N = shape[n], H = shape[n + 1], D = shape[n + 2];
    const Shape of_lse = packed ? Shape{H, N} : Shape{B, H, N};
    for (int part = 0; part < count; ++part) {
      o.emplace_back(types[g.between(0, 2)], shape, Layout{.gap = g.between(0, 3), .shift = g.between(0, 2)});
      lse.emplace_back(Type::f32, of_lse, Layout{.step = g.between(1, 3)});
      for (std::int64_t row = 0; row < lse.back().elements(); ++row)
        lse.back().set(row, g.chance(0.3) ? -infinity : 20 * g.normal());
      for (std::int64_t e = 0; e < o.back().elements(); ++e)
        if (lse.back().get((e / (D * H * N) * H + e / D % H) * N + e / (D * H) % N) > -infinity)
          o.back().set(e, g.normal());
    }
    for (std::size_t part = 0; part < o.size(); ++part)
      views.push_back({.o = o[part].tensor(), .lse = lse[part].tensor()});
  }
};

TEST(MergeMachine, HasTheCpusBits) {
  constexpr Type types[] = {Type::f32, Type::f16, Type::bf16};
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    Generator g(seed);
    const std::int64_t N = g.between(1, 6), H = g.between(1, 3), D = g.between(1, 70);
    const Shape shape = g.chance(0.5) ? Shape{N, H, D} : Shape{g.between(1, 3), N, H, D};
    const Shape of_lse = shape.size() == 3 ? Shape{H, N} : Shape{shape[0], H, N};
    const Parts parts(g, static_cast<int>(seed == 7 ? gpu::most_parts : g.between(1, 6)), shape);
    const Type type = types[g.between(0, 2)];
    const Buffer o(type, shape, {.gap = 1}), lse(Type::f32, of_lse), o2(type, shape, {.gap = 1}),
        lse2(Type::f32, of_lse);
    merge(parts.views, {.o = o.tensor(), .lse = lse.tensor()}, {.threads = 1});
    merge_emulated(parts.views, {.o = o2.tensor(), .lse = seed % 4 == 0 ? Tensor{} : lse2.tensor()});
    expect_same_bits(o, o2, "o");
    if (seed % 4 != 0) expect_same_bits(lse, lse2, "lse");
    EXPECT_TRUE(o2.margins_intact() && lse2.margins_intact());
    ++case_count.judged;
    if (HasFailure()) return;
  }
}

TEST(MergeMachine, InPlaceGivesTheSameBits) {
  Generator g(5);
  const Parts parts(g, 3, {2, 6, 3, 40});
  const Buffer o(parts.o[1].type(), {2, 6, 3, 40}), lse(Type::f32, {2, 3, 6});
  merge_emulated(parts.views, {.o = o.tensor(), .lse = lse.tensor()});
  merge_emulated(parts.views, parts.views[1]);
  expect_same_bits(o, parts.o[1], "o"), expect_same_bits(lse, parts.lse[1], "lse");
  ++case_count.judged;
}

TEST(MergeMachine, RefusesWhatGpusDoNotTake) {
  Generator g(6);
  const Parts parts(g, gpu::most_parts + 1, {1, 1, 1});
  EXPECT_EQ(gpu::merge_refusal(parts.views, parts.views[0]),
            "n: is 53; on GPUs merge takes at most 52 partial results");
  const Buffer o(Type::f64, {1, 1, 1}), lse(Type::f64, {1, 1});
  const Outputs wide{.o = o.tensor(), .lse = lse.tensor()};
  const std::vector<Outputs> one{wide};
  EXPECT_EQ(gpu::merge_refusal(one, parts.views[0]),
            "partials[0]: has type f64; on GPUs merge takes f32, f16 and bf16");
  ++case_count.judged;
}

}  // namespace
}  // namespace tessera::test
