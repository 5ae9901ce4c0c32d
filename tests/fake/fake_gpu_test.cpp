// SPDX-License-Identifier: Apache-2.0
// Every case of the tables, and random ones, planned and run on GPUs that are not there: grids, blocks, shared memory,
// tensor maps, pointers in bounds, workspace.
// Links tessera_cases and the fake libcuda and NVRTC. Implements docs/architecture.md, "One call on a GPU".
#include <map>

#include "cases/random.hpp"
#include "tests/fake/support.hpp"

namespace tessera::test {
namespace {

struct Count {
  int ran = 0, launched = 0;
};

void expect_promises(const std::vector<Case>& cases, std::map<std::string, Count>& counts) {
  std::size_t turn = 0;
  for (const Case& spec : cases) {
    CaseData data = build(spec);
    for (const std::string& kernel : gpu_kernels) {
      const int device = device_for(kernel, turn++);
      // `tiled` adds in whatever order; `hopper` has a kernel for it too.
      data.spec.options.deterministic = kernel != "tiled" && (kernel != "hopper" || turn % 4 < 2);
      SCOPED_TRACE(kernel + " on cuda:" + std::to_string(device) + ": " + describe(spec));
      const OnFake on(data, device);
      for (const FakePass pass : {FakePass::forward, FakePass::backward}) {
        if (pass == FakePass::backward && !spec.backward) continue;
        std::size_t launches = 0;
        constexpr std::size_t shifts[] = {0, 1, 8, 63};
        if (!keeps_promises(on.call(pass, kernel.c_str()), shifts[turn % std::size(shifts)], launches)) continue;
        Count& count = counts[kernel + (pass == FakePass::forward ? " forward" : " backward")];
        ++count.ran, count.launched += launches > 0;
      }
      if (testing::Test::HasFailure()) return;  // one is enough to read
    }
  }
}

void expect_all_ran(const std::map<std::string, Count>& counts, int fewest) {
  for (const std::string& kernel : gpu_kernels)
    for (const char* pass : {" forward", " backward"}) {
      const auto found = counts.find(kernel + pass);
      const Count count = found == counts.end() ? Count{} : found->second;
      EXPECT_GE(count.launched, fewest) << kernel << pass;
      std::cout << kernel << pass << ": " << count.ran << " cases, " << count.launched << " with launches\n";
    }
}

// What the kernels without options take, in the type that `n` chooses.
Case without_options(Case c, std::size_t n) {
  c.mask = c.bias = c.rng = false, c.slopes = Slopes::none, c.sinks = Sinks::none;
  c.options.softcap = c.options.dropout = 0, c.options.accumulate = false, c.options.deterministic = n % 2 == 0;
  c.options.scale = default_scale, c.f32_grads = c.f32_do = false, c.grads = {};
  c.type = n % 3 == 0 ? Type::f32 : n % 3 == 1 ? Type::f16 : Type::bf16;
  if (c.type != Type::f32) c.style = Style::contiguous, c.D = (c.D + 7) / 8 * 8, c.Dv = (c.Dv + 7) / 8 * 8;
  c.name += "_plain";
  return c;
}

class FakeTables : public FakeGpuWith<const char*> {};

TEST_P(FakeTables, LaunchesAreLegalAndInBounds) {
  std::map<std::string, Count> counts;
  expect_promises(suite(GetParam()), counts);
  expect_all_ran(counts, 1);
}

INSTANTIATE_TEST_SUITE_P(All, FakeTables, testing::Values("regular", "features", "corner"));

class FakeRandom : public FakeGpu {};

TEST_F(FakeRandom, LaunchesAreLegalAndInBounds) {
  std::map<std::string, Count> counts;
  std::vector<Case> cases = random_cases(16'000, 200);
  // The early rungs and Hopper's one-pass backward take few of those: the same again without options, in three types.
  for (std::size_t n = 0; n < 100; ++n) cases.push_back(without_options(cases[n], n));
  expect_promises(cases, counts);
  expect_all_ran(counts, 20);
}

// In order and in any order, whose workspaces differ.
class FakeMmaOnePass : public FakeGpuWith<bool> {};

TEST_P(FakeMmaOnePass, LaunchesAreLegalAndInBounds) {
  std::size_t ran = 0, turn = 0;
  for (const Case& spec : random_cases(17'000, 150)) {
    CaseData data = build(without_options(spec, 4));
    if (!data.spec.backward) continue;
    data.spec.options.deterministic = GetParam();
    const OnFake on(data, device_for("mma", turn++));
    SCOPED_TRACE(describe(spec));
    std::size_t launches = 0;
    if (keeps_promises(on.call(FakePass::backward, "mma_one_pass"), 0, launches)) ran += launches > 0;
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(ran, 20u);
}

INSTANTIATE_TEST_SUITE_P(All, FakeMmaOnePass, testing::Bool());

}  // namespace
}  // namespace tessera::test
