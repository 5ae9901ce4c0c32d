// The Hopper kernels on a Hopper GPU: tables and random configurations against float64, and the same bits every time.
// Links tessera_cases. Cases are made to fit what the kernel takes so far; tests/sm90_machine_test.cpp runs its text
// without a GPU.
#include <iostream>

#include "cases/random.hpp"
#include "tests/gpu_support.hpp"

namespace tessera::test {
namespace {

constexpr const char* hopper = "hopper";
constexpr std::size_t parts = 8;

// The forward pass of a case, in 16 bits, without what the kernel refuses.
Case fitting(Case c) {
  const Sinks sinks = c.sinks;
  c = made_plain(c);
  c.sinks = sinks, c.backward = false, c.f32_o = false;
  if (c.type == Type::f32) c.type = Type::bf16;
  return c;
}

class GpuHopper : public GpuWith<std::size_t> {
 protected:
  void SetUp() override {
    GpuWith<std::size_t>::SetUp();
    if (!IsSkipped() && cuda::properties(gpu.id).major != 9) GTEST_SKIP() << "no GPU to test: it is not a Hopper";
  }
};

TEST_P(GpuHopper, AgreesWithFloat64) {
  std::vector<Case> cases;
  for (const Case& c : suite("all")) cases.push_back(fitting(c));
  for (const Case& c : random_cases(51000, 500)) cases.push_back(fitting(c));
  std::size_t ran = 0;
  for (std::size_t n = GetParam(); n < cases.size(); n += parts) {
    const CaseReport report = run_case(cases[n], Execution{.device = gpu, .kernel = hopper});
    expect_ok(report);
    ran += !report.skipped;
  }
  std::cout << "ran " << ran << " cases\n";
  EXPECT_GE(ran, cases.size() / parts / 3) << "a test in which nearly everything was refused has shown nothing";
}

INSTANTIATE_TEST_SUITE_P(All, GpuHopper, testing::Range(std::size_t{0}, parts));

}  // namespace
}  // namespace tessera::test
