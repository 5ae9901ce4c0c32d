// SPDX-License-Identifier: Apache-2.0
// The kernel `amx` is there, whether emulated (tests/cpu/amx.cmake) or real, and plans what it should. Compiled
// together with the tests that judge its numbers, which would have nothing to judge without it. Skipped without
// AVX-512. Implements docs/cpu_kernels.md, "The matrix unit".
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

std::size_t forward_bytes(std::int64_t keys) {
  Inputs in;
  in.q = Tensor(nullptr, Type::bf16, {1, 100, 4, 64});
  in.k = in.v = Tensor(nullptr, Type::bf16, {1, keys, 2, 64});
  return Plan::forward(in, {.o = in.q, .lse = {}}, {}, {.threads = 2, .kernel = "amx"}).workspace_size();
}

std::string plan_of(Type type, const char* kernel) {
  Case spec{.name = "planned", .Nq = 3, .Nk = 5, .D = 8};
  spec.type = type;
  const CaseData data = build(spec);
  return Plan::forward(data.inputs(), data.outputs(), {}, {.kernel = kernel}).describe();
}

TEST(Amx, IsTheKernelUnderTest) { EXPECT_EQ(available_kernels(), std::vector<std::string>{"amx"}); }

TEST(Amx, TakesAsManyPiecesAsATypeNeeds) {
  EXPECT_NE(plan_of(Type::bf16, nullptr).find("every operand the sum of 1 bf16"), std::string::npos);
  EXPECT_NE(plan_of(Type::f16, nullptr).find("every operand the sum of 2 bf16"), std::string::npos);
  EXPECT_NE(plan_of(Type::f32, "amx").find("every operand the sum of 3 bf16"), std::string::npos);
  EXPECT_NE(plan_of(Type::f32, nullptr).find("not amx        refused: type is f32"), std::string::npos);
}

TEST(Amx, PlanSaysWhatIsPackedAndWhatTheUnitDoesNotDo) {
  EXPECT_NE(plan_of(Type::bf16, "amx").find("K and V packed once per KV head, "), std::string::npos);
  Case spec{.name = "planned", .Nq = 3, .Nk = 5, .D = 8};
  spec.bias = true;
  const CaseData data = build(spec);
  const Plan plan = Plan::backward(data.inputs(), data.saved(), data.gradients(), data.options(), {.kernel = "amx"});
  EXPECT_NE(plan.describe().find("dBias by multiply-adds in f32"), std::string::npos);
}

TEST(Amx, WorkspaceHoldsKAndVPackedUpToABound) {
  const std::size_t least = forward_bytes(1), some = forward_bytes(1 << 12), most = forward_bytes(1 << 22);
  EXPECT_GE(some - least, std::size_t{2} * ((1 << 12) - 192) * 2 * 64 * 2);
  EXPECT_LE(some - least, std::size_t{3} * (1 << 12) * 2 * 64 * 2);
  EXPECT_LE(most - least, std::size_t{64} << 20);
  EXPECT_EQ(most, forward_bytes(1 << 24));
}

// O of B sequences with nine queries and two heads, whose K and V are the numbers from `first` on of one long list.
std::vector<std::uint16_t> output(std::int64_t B, std::int64_t keys, std::int64_t first, const Options& options) {
  constexpr std::int64_t D = 96;
  std::vector<std::uint16_t> q(static_cast<std::size_t>(B * 9 * 2 * D)), o(q);
  std::vector<std::uint16_t> k(static_cast<std::size_t>(B * keys * 2 * D));
  const auto number = [](std::uint64_t n) { return static_cast<std::uint16_t>(0x3f00 + (n * 2654435761u >> 9) % 128); };
  for (std::size_t n = 0; n < q.size(); ++n) q[n] = number(n % (9 * 2 * D));
  for (std::size_t n = 0; n < k.size(); ++n) k[n] = number(static_cast<std::uint64_t>(first * 2 * D) + n);
  Inputs in;
  in.q = Tensor(q.data(), Type::bf16, {B, 9, 2, D});
  in.k = in.v = Tensor(k.data(), Type::bf16, {B, keys, 2, D});
  forward(in, {.o = Tensor(o.data(), Type::bf16, {B, 9, 2, D}), .lse = {}}, options, {.threads = 2, .kernel = "amx"});
  return o;
}

TEST(Amx, SequencesPackedInRoundsHaveTheBitsOfOneAlone) {
  constexpr std::int64_t keys = 200, sequences = 250;  // 83 MiB of packs
  const std::vector<std::uint16_t> all = output(sequences, keys, 0, {});
  for (const std::int64_t b : {0, 120, 249}) {
    const std::vector<std::uint16_t> one = output(1, keys, b * keys, {});
    EXPECT_TRUE(std::equal(one.begin(), one.end(), all.begin() + b * std::int64_t(one.size()))) << b;
  }
}

TEST(Amx, KeysTooManyToPackAheadGiveTheSameBits) {
  constexpr std::int64_t few = 3 * 192 + 50, many = 900 * 192 + 50;
  Options last_keys;
  last_keys.causal = true;
  last_keys.window_left = 500;
  EXPECT_EQ(output(1, many, 0, last_keys), output(1, few, many - few, last_keys));
}

}  // namespace
}  // namespace tessera::test
