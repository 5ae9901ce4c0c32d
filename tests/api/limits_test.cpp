// SPDX-License-Identifier: Apache-2.0
// Sizes, positions and emptiness at their limits: arithmetic that does not wrap, calls at the furthest positions,
// batches of sequences without tokens, no heads, and the GPU planners, which need no GPU, over shapes of every size.
// Links tessera_cases. Implements docs/algorithm.md, "Limits" and "Empty tensors".
#include "core/limits.hpp"

#include <array>
#include <cmath>
#include <limits>

#include "api/kernels.hpp"
#include "api/units.hpp"
#include "cases/generator.hpp"
#include "core/check.hpp"
#include "core/tensor.hpp"
#include "ladder/ladder.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max(), most_int32 = (std::int64_t{1} << 31) - 1;

TEST(Sizes, StayAtTheLargestNumber) {
  EXPECT_EQ(product({3, 5, 7}), 105);
  EXPECT_EQ(product({}), 1);
  EXPECT_EQ(product({largest, 1}), largest);
  EXPECT_EQ(product({largest / 2 + 1, 2}), beyond_limits);
  EXPECT_EQ(product({largest, largest, 4}), beyond_limits);
  EXPECT_EQ(product({largest, 2, 0}), 0);
  EXPECT_EQ(sum({1, 2, 4}), 7);
  EXPECT_EQ(sum({largest, 1, 1}), beyond_limits);
  EXPECT_EQ(rounded_up(0, 64), 0);
  EXPECT_EQ(rounded_up(1, 64), 64);
  EXPECT_EQ(rounded_up(64, 64), 64);
  EXPECT_EQ(rounded_up(largest - 3, 64), beyond_limits);
}

// --- views of more tokens than memory holds

// A view is made before any call looks at it. Under UBSan nothing here may wrap either.
TEST(Sizes, ViewsBeyondMemoryDoNotWrap) {
  constexpr std::int64_t half = std::int64_t{1} << 32;
  const Tensor t(nullptr, Type::f32, {2, half, half, 1});
  EXPECT_EQ(t.strides, (std::array<std::int64_t, 4>{largest, half, 1, 1}));
  EXPECT_EQ(t.elements(), largest);
  EXPECT_EQ(Tensor(nullptr, Type::f32, {half, half, 0}).elements(), 0);
  EXPECT_EQ(alignment_of(t), 4);
}

// One row of memory for all tokens.
Tensor repeated(float& row, std::int64_t tokens) {
  Tensor t(&row, Type::f32, {1, tokens, 1, 1});
  t.strides = {0, 0, 0, 1};
  return t;
}

TEST(Sizes, WorkspaceGrowsUntilItIsRefused) {
  float row = 1, lse = 1;
  for (const std::string& kernel : cpu_kernels()) {
    const Execution execution{.threads = 1, .kernel = kernel.c_str()};
    std::size_t before = 0;
    for (std::int64_t tokens = 64; tokens <= most_tokens; tokens *= 2) {
      Inputs in;
      in.q = repeated(row, tokens), in.k = in.v = repeated(row, 1);
      Tensor numbers(&lse, Type::f32, {1, 1, tokens});
      numbers.strides = {0, 0, 0, 0};
      const Plan plan = Plan::backward(in, {.o = in.q, .lse = numbers, .d_o = in.q, .d_lse = {}},
                                       {.dq = {}, .dk = in.k, .dv = in.v, .dbias = {}, .dsinks = {}}, {}, execution);
      ASSERT_GE(plan.workspace_size(), static_cast<std::size_t>(2 * tokens) * sizeof(float)) << kernel << " " << tokens;
      ASSERT_GT(plan.workspace_size(), before) << kernel << " " << tokens;
      before = plan.workspace_size();
    }
  }
}

// The tables go as far as every kernel counts; the kernels of the CPU count to the end.
TEST(Sizes, AsManyKeysAsAreAllowed) {
  std::vector<Execution> executions;
  const std::vector<std::string> kernels = available_kernels();
  for (const std::string& kernel : kernels) executions.push_back({.kernel = kernel.c_str()});
  for (const char* name : {"endless_keys_most_f32", "endless_keys_causal_most_bf16", "endless_keys_one_query_most_f32",
                           "endless_keys_bias_mask_most_f16", "endless_keys_packed_most_bf16"}) {
    Case spec = find_case(name);
    spec.endless_k = most_tokens;
    for (const CaseReport& report : run_case(spec, executions))
      EXPECT_TRUE(report.ok && !report.skipped) << to_text(report);
  }
}

// --- positions

// With Q = 0 and V = the identity, O is the mask times a constant; so is dQ's share of a key.
TEST(Positions, DropoutIsTheMaskUpToTheFurthest) {
  constexpr std::int64_t Nq = 21, Nk = 37, far = furthest_position;
  for (const std::string& kernel : available_kernels())
    for (const std::array<std::int64_t, 4>& at : {std::array{far, far, far, far},
                                                  {-far, -far, -far, -far},
                                                  {far - 17, far - 1, most_int32, most_int32},
                                                  {-far, far, 0, -1},
                                                  {(std::int64_t{1} << 33) - 9, (std::int64_t{1} << 34) - 13, 1, 2}}) {
      Case spec{.name = "far", .B = 2, .Nq = Nq, .Nk = Nk, .Hq = 2, .Hk = 1, .D = Nk, .Dv = Nk};
      spec.options = {.dropout = 0.4, .seed = 8, .row0 = at[0], .col0 = at[1], .head0 = at[2], .batch0 = at[3]};
      spec.backward = false, spec.distribution = Distribution::identity;
      CaseData data = build(spec);
      for (std::int64_t e = 0; e < data.q.elements(); ++e) data.q.set(e, 0);
      run(data, {.kernel = kernel.c_str()});
      const Buffer mask(Type::u8, {2, 2, Nq, Nk});
      dropout_mask(mask.tensor(), data.options());
      const double kept_value = 1.0 / Nk / (1 - std::round(65536 * 0.4) / 65536);
      for (std::int64_t e = 0; e < mask.elements(); ++e) {
        const std::int64_t j = e % Nk, i = e / Nk % Nq, h = e / Nk / Nq % 2, b = e / Nk / Nq / 2;
        ASSERT_EQ(mask.get(e), kept(8, 0, 0.4, b + at[3], h + at[2], i + at[0], j + at[1])) << mask.index(e);
        ASSERT_NEAR(data.o.get(((b * Nq + i) * 2 + h) * Nk + j), mask.get(e) * kept_value, 1e-6)
            << kernel << " " << mask.index(e) << " at " << at[0] << "," << at[1];
      }
    }
}

// --- emptiness

// Sequences beyond number, none with a token: every gradient that has elements is 0, at once.
TEST(Empty, MoreSequencesThanMemoryHolds) {
  for (const std::string& kernel : available_kernels())
    for (const bool packed : {false, true})
      for (const std::int64_t heads : {0, 2}) {
        SCOPED_TRACE(kernel + (packed ? " packed " : " padded ") + std::to_string(heads));
        const Execution execution{.kernel = kernel.c_str()};
        std::int32_t zero = 0;
        const auto rows = [&](std::int64_t tokens) {
          return packed ? Tensor(nullptr, Type::f32, {tokens, heads, 8})
                        : Tensor(nullptr, Type::f32, {most_int32, tokens, heads, 8});
        };
        // Without heads there may be tokens.
        const std::int64_t tokens = heads == 0 && !packed ? 3 : 0;
        Inputs in;
        in.q = in.k = in.v = rows(tokens);
        if (packed) {
          in.cu_seqlens_q = Tensor(&zero, Type::i32, {1 << 20});  // as many as are read in no time
          in.cu_seqlens_q.strides[0] = 0, in.cu_seqlens_k = in.cu_seqlens_q;
        }
        const Tensor lse = packed ? Tensor(nullptr, Type::f32, {heads, tokens})
                                  : Tensor(nullptr, Type::f32, {most_int32, heads, tokens});
        const Buffer bias = filled(Type::f32, {1, 1, 1, 1}, 1), sinks = filled(Type::f32, {heads}, 1);
        in.bias = bias.tensor(), in.sinks = sinks.tensor();
        const Buffer dbias(Type::f32, {1, 1, 1, 1}), dsinks(Type::f32, {heads});
        forward(in, {.o = rows(tokens), .lse = lse}, {}, execution);
        backward(in, {.o = rows(tokens), .lse = lse, .d_o = rows(tokens), .d_lse = {}},
                 {.dq = in.q, .dk = in.k, .dv = in.v, .dbias = dbias.tensor(), .dsinks = dsinks.tensor()}, {},
                 execution);
        EXPECT_EQ(dbias.get(0), 0);
        for (double x : dsinks.values()) EXPECT_EQ(x, 0);
      }
}

TEST(Empty, MasksAndMergesOfNothingAreDoneAtOnce) {
  const std::int64_t many = std::int64_t{1} << 30;
  dropout_mask(Tensor(nullptr, Type::u8, {many, many, 0, 1}), {.dropout = 0.5});
  const Outputs part{.o = Tensor(nullptr, Type::f32, {many, many, 0, 1}),
                     .lse = Tensor(nullptr, Type::f32, {many, 0, many})};
  merge({part, part}, part);
}

// --- planners of GPUs

// What every plan that is not refused keeps to.
void expect_launchable(const gpu::Steps& steps, const Problem& p, const std::string& what) {
  for (const gpu::Step& step : steps.list) {
    ASSERT_GT(step.blocks, 0) << what << ": " << step.name << ", " << text_of(p);
    ASSERT_LE(step.blocks, most_int32) << what << ": " << step.name << ", " << text_of(p);
  }
  const std::int64_t common = gpu::workspace_bytes(p, steps.accumulators);
  ASSERT_TRUE(0 <= common && common <= most_bytes) << what << ", " << text_of(p);
  ASSERT_TRUE(0 <= steps.own_bytes && steps.own_bytes <= most_bytes) << what << ", " << text_of(p);
}

// How many kernels take the problem. Each is planned, so that a planner that divides by nothing shows.
int expect_sound_plans(const Problem& p, const cuda::Target& target) {
  int takers = 0;
  for (const gpu::Algorithm& algorithm : api::gpu_algorithms()) {
    const gpu::Steps steps = algorithm.plan(p, target);
    if (!steps.reason.empty()) continue;
    ++takers;
    expect_launchable(steps, p, algorithm.name);
  }
  return takers;
}

constexpr const char* architectures[] = {"sm_75", "sm_80", "sm_90a"};

// Everything is asked for, dBias and dSink too.
Problem full_problem(Pass pass, Type type) {
  Problem p = api::plain_problem(pass, type, {64, 64});
  if (pass == Pass::backward) p.sinks = true, p.dsinks = Type::f32;
  return p;
}

TEST(GpuPlans, EmptyProblemsAreTakenWithoutUselessLaunches) {
  for (const char* architecture : architectures)
    for (Pass pass : {Pass::forward, Pass::backward})
      for (Type type : {Type::f32, Type::bf16})
        for (const bool packed : {false, true})
          for (const auto& change : std::initializer_list<void (*)(Problem&)>{
                   [](Problem& p) { p.Hq = p.Hk = 0; }, [](Problem& p) { p.Hq = 0; }, [](Problem& p) { p.B = 0; },
                   [](Problem& p) { p.B = 0, p.Hq = p.Hk = 0, p.Nq = p.Nk = 0; }, [](Problem& p) { p.Nq = 0; },
                   [](Problem& p) { p.Nk = 0; }, [](Problem& p) { p.Nq = p.Nk = 0, p.B = most_sequences; },
                   [](Problem& p) { p.Nq = p.Nk = 0, p.Hq = p.Hk = most_heads; },
                   [](Problem& p) { p.Hq = p.Hk = 0, p.B = most_sequences, p.Nq = p.Nk = most_tokens >> 20; }}) {
            Problem p = full_problem(pass, type);
            p.packed = packed;
            change(p);
            EXPECT_GE(expect_sound_plans(p, cuda::target_named(architecture)), 1) << text_of(p);
            // Of what has no queries, nothing is computed.
            const gpu::Steps steps = ladder::vector_steps(p, cuda::target_named(architecture));
            if (pass == Pass::forward && !p.has_queries()) {
              EXPECT_TRUE(steps.list.empty()) << text_of(p);
            }
          }
}

TEST(GpuPlans, RefusalsNameTheGrid) {
  const cuda::Target target = cuda::target_named("sm_80");
  Problem p = full_problem(Pass::forward, Type::f32);
  p.B = most_sequences;
  EXPECT_EQ(ladder::naive_steps(p, target).reason,
            "naive_forward would take 1099511627264 blocks; a GPU launches at most 2147483647");
  p = full_problem(Pass::forward, Type::f32);
  p.Nk = (std::int64_t{1} << 34) + 1;
  EXPECT_EQ(ladder::vector_steps(p, target).reason,
            "Nq is 4096 and Nk is 17179869185; this rung counts up to 17179869184 tokens");
  EXPECT_EQ(ladder::naive_steps(p, target).reason, "");
  p = api::plain_problem(Pass::backward, Type::f32, {1, 1});
  p.Nq = most_tokens, p.Hq = 1 << 10, p.Hk = 1, p.B = 1;
  EXPECT_EQ(ladder::naive_steps(p, target).reason,
            "the workspace would take more than 2^56 bytes, which no process can have");
}

// Sizes that are small, at the limit or anything between, but with element counts that the checks let pass.
Problem random_problem(Generator& g) {
  const auto size = [&](std::int64_t most) {
    const std::int64_t powers = g.between(0, 62);
    return std::min(most, g.chance(0.1) ? most : g.chance(0.1) ? 0 : g.between(0, std::int64_t{1} << powers));
  };
  const Type types[] = {Type::f32, Type::f16, Type::bf16};
  for (;;) {
    Problem p = full_problem(g.chance(0.5) ? Pass::forward : Pass::backward, types[g.between(0, 2)]);
    p.packed = g.chance(0.4);
    p.B = size(most_sequences), p.Nq = size(most_tokens), p.Nk = size(most_tokens);
    p.Hk = size(most_heads), p.Hq = p.Hk * g.between(0, 3);
    p.D = g.between(1, 576), p.Dv = g.between(1, 512);
    if (g.chance(0.7)) p.D = p.Dv = 64;
    p.seqused_q = g.chance(0.3), p.options.causal = g.chance(0.5), p.options.deterministic = g.chance(0.7);
    if (g.chance(0.6)) p.sinks = false, p.dsinks.reset();
    const auto elements = [&](std::int64_t tokens, std::int64_t heads) {
      const auto one = [](std::int64_t n) { return std::max<std::int64_t>(n, 1); };
      return product({p.packed ? 1 : one(p.B), one(tokens), one(heads), std::max(p.D, p.Dv)});
    };
    if (p.Hq <= most_heads && elements(p.Nq, p.Hq) < beyond_limits && elements(p.Nk, p.Hk) < beyond_limits) return p;
  }
}

TEST(GpuPlans, AnyShapeIsSoundOrRefused) {
  int takers = 0, refused = 0;
  for (std::uint64_t seed = 1; seed <= 20000 && !HasFailure(); ++seed) {
    Generator g(seed);
    const Problem p = random_problem(g);
    const int found = expect_sound_plans(p, cuda::target_named(architectures[seed % 3]));
    takers += found, refused += found == 0;
  }
  EXPECT_GT(takers, 1000);
  EXPECT_GT(refused, 1000);
}

// A stride that tensor copies cannot have takes another kernel, not an error of the device.
TEST(GpuPlans, FarStridesAreSeen) {
  Tensor near(nullptr, Type::bf16, {1, 128, 2, 64}, {DeviceType::cuda, 0});
  const auto far_in = [&](std::int64_t stride) {
    Inputs in;
    in.q = in.k = in.v = near;
    in.k.strides[1] = stride;
    return check_forward(in, {.o = near, .lse = {}}, {}, {}).far_strides;
  };
  EXPECT_FALSE(far_in(0));
  EXPECT_FALSE(far_in((std::int64_t{1} << 39) - 8));
  EXPECT_TRUE(far_in(std::int64_t{1} << 39));
  EXPECT_TRUE(far_in(-64));
  near.shape[1] = 1, near.strides[1] = largest;
  EXPECT_FALSE(far_in(largest));
  near.shape[1] = 128, near.strides[1] = 128;
  const Saved saved{.o = near, .lse = Tensor(nullptr, Type::f32, {1, 2, 128}, near.device), .d_o = near, .d_lse = {}};
  Inputs in;
  in.q = in.k = in.v = near;
  EXPECT_FALSE(check_backward(in, saved, {}, {}, {}).far_strides);
  Saved other = saved;
  other.d_o.strides[2] = -64;
  EXPECT_TRUE(check_backward(in, other, {}, {}, {}).far_strides);
}

}  // namespace
}  // namespace tessera::test
