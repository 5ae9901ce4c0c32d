// SPDX-License-Identifier: Apache-2.0
// The Hopper backward kernels on a Hopper GPU: tables and random configurations against float64; the same bits 1000
// times, on any stream, in a graph and for a sequence in any company. Links tessera_cases.
// tests/sm90/sm90_backward_test.cpp runs the kernels' text without a GPU.
#include "sm90/one_pass_plan.hpp"
#include "sm90/plan.hpp"
#include "sm90/unit.hpp"
#include "tests/gpu/hopper.hpp"

namespace tessera::test {
namespace {

constexpr std::size_t parts = 28, configurations = 500;
constexpr std::uint64_t first_seed = 61000;

// Both passes of a case, in 16 bits; only gradients in f32 accumulate.
Case in_16_bits(Case c) {
  c.backward = true, c.no_lse = c.f32_do = false;
  if (c.type == Type::f32) c.type = Type::bf16;
  if (!c.grads.any()) c.grads = {};
  c.options.accumulate = c.options.accumulate && c.f32_grads;
  return c;
}

std::vector<Case> long_sequences() {
  std::vector<Case> all;
  for (const api::HeadDims dims : {api::HeadDims{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}})
    for (const bool causal : {false, true})
      for (const Type type : {Type::f16, Type::bf16}) {
        Case c{.name = "long", .Nq = 1000, .Nk = 1300, .Hq = 4, .Hk = 2, .D = dims.D, .Dv = dims.Dv, .type = type};
        c.options.causal = causal, c.dlse = true, c.seed = all.size() + 1;
        all.push_back(c);
        c.name = "in any order", c.options.deterministic = false;
        if (dims.D <= 128) all.push_back(c);
      }
  return all;
}

std::vector<Case> all_cases() {
  std::vector<Case> all = long_sequences();
  for (const Case& c : extreme_numbers()) all.push_back(c);
  for (const Case& c : suite("all")) all.push_back(c);
  for (const Case& c : random_cases(first_seed, configurations)) all.push_back(aligned(c));
  for (Case& c : all) c = in_16_bits(c);
  return all;
}

std::string unit_of(const Case& c) {
  std::string all;
  const Problem problem = problem_of(c, Pass::backward);
  const sm90::OnePassPlan one = sm90::plan_one_pass(problem, cuda::properties(gpu.id));
  if (one.reason.empty()) return sm90::one_pass_unit_text(one.config);
  const sm90::BackwardPlan plan = sm90::plan_backward(problem, cuda::properties(gpu.id));
  for (const sm90::BackwardPlan::Pass& pass : plan.passes) all += sm90::backward_unit_text(pass.config);
  return all;
}

class GpuHopperGradients : public HopperWith<std::size_t> {};

TEST_P(GpuHopperGradients, AgreeWithFloat64) {
  expect_agreement(cases_of_part(all_cases(), GetParam(), parts, unit_of));
}

INSTANTIATE_TEST_SUITE_P(All, GpuHopperGradients, testing::Range(std::size_t{0}, parts));

class GpuHopperBackward : public Hopper {};

TEST_F(GpuHopperBackward, IsWhatACallGets) {
  for (const Type type : {Type::f16, Type::bf16}) {
    const Case plain{.name = "default", .type = type};
    Case everything{.name = "default", .D = 256, .type = type, .bias = true, .mask = true};
    everything.options = {.softcap = 5, .dropout = 0.1}, everything.slopes = Slopes::per_head;
    const std::pair<Case, std::string> expected[] = {{plain, "hopper_one_pass"}, {everything, "hopper_two_pass"}};
    for (const auto& [spec, kernel] : expected) {
      CaseData data = build(spec);
      const Placed placed(data, gpu);
      const Plan plan =
          Plan::backward(placed.inputs(), placed.saved(), placed.gradients(), data.options(), {.device = gpu});
      EXPECT_EQ(plan.kernel(), kernel);
    }
  }
}

TEST_F(GpuHopperBackward, GivesTheSameBitsOnAStreamAndInAGraph) {
  for (const std::size_t n : {std::size_t{1}, std::size_t{4}})
    expect_same_bits_on_a_stream_and_in_a_graph(in_16_bits(repeated()[n]));
}

class GpuHopperBackwardRepetitions : public HopperWith<std::size_t> {};

TEST_P(GpuHopperBackwardRepetitions, GiveTheSameBits) {
  expect_same_bits_each_time(in_16_bits(repeated()[GetParam()]));
}

INSTANTIATE_TEST_SUITE_P(All, GpuHopperBackwardRepetitions, testing::Range(std::size_t{0}, repeated().size()));

class GpuHopperBackwardCompany : public HopperWith<std::tuple<std::int64_t, Type>> {};

TEST_P(GpuHopperBackwardCompany, ASequenceHasTheSameBitsAloneInABatchAndPacked) {
  const auto& [D, type] = GetParam();
  for (const Case& spec : lone_sequences(D, type, true)) {
    expect_same_bits_in_company(spec);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuHopperBackwardCompany,
                         testing::Combine(testing::Values(64, 128, 256), testing::Values(Type::f16, Type::bf16)));

}  // namespace
}  // namespace tessera::test
