// SPDX-License-Identifier: Apache-2.0
// The Hopper forward kernel on a Hopper GPU: tables and random configurations against float64; the same bits 1000
// times, on any stream, in a graph and for a sequence in any company. Links tessera_cases.
// tests/sm90/sm90_machine_test.cpp runs the kernel's text without a GPU.
#include "sm90/tiles.hpp"
#include "sm90/unit.hpp"
#include "tests/gpu/hopper.hpp"
#include "tests/support/long_rows.hpp"

namespace tessera::test {
namespace {

constexpr std::size_t parts = 28, configurations = 500;
constexpr std::uint64_t first_seed = 51000;

// The forward pass of a case, in 16 bits.
Case in_16_bits(Case c) {
  c.backward = c.options.accumulate = false;
  if (c.type == Type::f32) c.type = Type::bf16;
  return c;
}

std::vector<Case> all_cases() {
  std::vector<Case> all = extreme_numbers();
  for (const Case& c : suite("all")) all.push_back(c);
  for (const Case& c : random_cases(first_seed, configurations)) all.push_back(aligned(c));
  for (Case& c : all) c = in_16_bits(c);
  return all;
}

std::string unit_of(const Case& c) {
  const std::optional<sm90::Config> tile = sm90::forward_tile(problem_of(c, Pass::forward));
  return tile ? sm90::forward_unit_text(*tile) : "";
}

class GpuHopperCases : public HopperWith<std::size_t> {};

TEST_P(GpuHopperCases, AgreeWithFloat64) { expect_agreement(cases_of_part(all_cases(), GetParam(), parts, unit_of)); }

INSTANTIATE_TEST_SUITE_P(All, GpuHopperCases, testing::Range(std::size_t{0}, parts));

class GpuHopper : public Hopper {};

TEST_F(GpuHopper, IsWhatACallGets) {
  for (const Type type : {Type::f16, Type::bf16}) {
    CaseData data = build({.name = "default", .type = type, .backward = false});
    const Placed placed(data, gpu);
    EXPECT_EQ(Plan::forward(placed.inputs(), placed.outputs(), data.options(), {.device = gpu}).kernel(),
              hopper_kernel);
  }
}

TEST_F(GpuHopper, RowsMayBeLongerThanHeads) {
  LongRows data;
  Placed placed(data.rows, gpu);
  placed.upload();
  const Inputs inputs = data.narrowed(placed.inputs());
  const Outputs outputs = data.narrowed(placed.outputs());
  const Execution execution{.device = gpu, .kernel = hopper_kernel};
  Plan::forward(inputs, outputs, data.rows.options(), execution)
      .run(inputs, outputs, data.rows.options(), execution);  // a grid of a tile per block needs no workspace
  placed.download();
  data.judge();
}

// Tiles are taken from a count in the workspace, which a kernel before this one sets to 0 while this one starts.
TEST_F(GpuHopper, GivesTheSameBitsOnAStreamAndInAGraph) {
  expect_same_bits_on_a_stream_and_in_a_graph(in_16_bits(repeated()[1]));
}

class GpuHopperRepetitions : public HopperWith<std::size_t> {};

TEST_P(GpuHopperRepetitions, GiveTheSameBits) { expect_same_bits_each_time(in_16_bits(repeated()[GetParam()])); }

INSTANTIATE_TEST_SUITE_P(All, GpuHopperRepetitions, testing::Range(std::size_t{0}, repeated().size()));

class GpuHopperCompany : public HopperWith<std::tuple<std::int64_t, Type>> {};

TEST_P(GpuHopperCompany, ASequenceHasTheSameBitsAloneInABatchAndPacked) {
  const auto& [D, type] = GetParam();
  for (const Case& spec : lone_sequences(D, type, false)) {
    expect_same_bits_in_company(spec);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuHopperCompany,
                         testing::Combine(testing::Values(64, 128, 256), testing::Values(Type::f16, Type::bf16)));

}  // namespace
}  // namespace tessera::test
