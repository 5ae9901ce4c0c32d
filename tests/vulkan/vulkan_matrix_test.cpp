// SPDX-License-Identifier: Apache-2.0
// vk_matrix: on the device's own cooperative matrices, where it lists any, and everywhere with matrices that are
// computed without them (emulated_matrices.glsl), in shapes and types of real devices. Against float64, with the
// validation layers on. Uses src/vulkan directly. Links tessera_cases. Implements docs/vulkan.md, "vk_matrix".
#include <cstdlib>
#include <iostream>

#include "cases/device.hpp"
#include "cases/random.hpp"
#include "tests/vulkan/support.hpp"
#include "vulkan/matrix_backward.spv.hpp"
#include "vulkan/matrix_forward.spv.hpp"
#include "vulkan/plan.hpp"

namespace tessera::test {
namespace {

constexpr Execution on_matrices{.device = vulkan_device, .kernel = "vk_matrix"};

// One shape that the tests put in the place of the device's, while it lives.
class Emulated {
 public:
  explicit Emulated(vulkan::MatrixShape shape) :
      stand_in{.forward = {"emulated_matrix_forward", matrix_forward_spv},
               .backward = {"emulated_matrix_backward", matrix_backward_spv},
               .shape = shape} {
    vulkan::stand_in_for_matrices(&stand_in);
  }
  ~Emulated() { vulkan::stand_in_for_matrices(nullptr); }
  Emulated(const Emulated&) = delete;

 private:
  vulkan::MatrixStandIn stand_in;
};

double pairs(const Case& c) {
  double sum = c.packed() ? 0 : static_cast<double>(c.B * c.Nq * c.Nk);
  for (std::size_t b = 0; b < c.packed_q.size(); ++b) sum += 1.0 * c.packed_q[b] * c.packed_k[b];
  return sum * static_cast<double>(c.Hq) * static_cast<double>(c.D + c.dim_v());
}

struct Limits {
  std::int64_t most_dims;
  double most_pairs;
  std::size_t every;  // so many-th case alone
};

// Cases of one type; those that vk_matrix refuses must have one of its reasons.
void expect_agreement(const char* name, Type type, const Limits& limits) {
  const std::vector<Case> all_cases = name == std::string("random") ? random_cases(20260, 400) : suite(name);
  SuiteReport all;
  std::size_t counted = 0;
  for (const Case& c : all_cases) {
    if (c.type != type || std::max(c.D, c.dim_v()) > limits.most_dims || pairs(c) > limits.most_pairs) continue;
    if (counted++ % limits.every != 0) continue;
    const CaseReport report = run_case(c, on_matrices);
    expect_ok(report);
    ++(report.skipped ? all.skipped : report.ok ? all.passed : all.failed);
    all.cases.push_back(report);
    if (!report.skipped) continue;
    const std::string why = report.messages.empty() ? "" : report.messages.front();
    if (why.find("takes both in one type") == std::string::npos && why.find("rounds of loops") == std::string::npos)
      ADD_FAILURE() << "refused: " << report.name << ": " << why;
  }
  std::cout << name << ": " << all.passed << " passed, " << all.skipped << " refused\n"
            << worst_table(all) << std::flush;
  EXPECT_GE(all.passed, 2U);
}

struct Setting {
  vulkan::MatrixShape shape;
  Type type;
  const char* suite;
  Limits limits;
};
void PrintTo(const Setting& s, std::ostream* out) {
  *out << s.suite << " on " << s.shape.m << "x" << s.shape.n << "x" << s.shape.k;
}
class EmulatedMatrices : public VulkanWith<Setting> {
 protected:
  void SetUp() override {
    VulkanWith<Setting>::SetUp();
    if (!IsSkipped() && !std::getenv("TESSERA_EMULATED_MATRICES"))
      GTEST_SKIP() << "llvmpipe compiles these for minutes; TESSERA_EMULATED_MATRICES=1 runs them";
  }
};

TEST_P(EmulatedMatrices, AgreeWithFloat64) {
  const Setting s = GetParam();
  const Emulated matrices(s.shape);
  expect_agreement(s.suite, s.type, s.limits);
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedMatrices,
                         testing::Values(Setting{{16, 16, 16}, Type::bf16, "features", {64, 4e7, 8}},
                                         Setting{{16, 8, 16}, Type::f16, "random", {64, 3e5, 1}}));

TEST(MatrixShapes, TheLargestThatDividesAStrip) {
  using vulkan::MatrixShape, vulkan::best_shape;
  EXPECT_EQ(best_shape({}), MatrixShape{});
  EXPECT_EQ(best_shape({{16, 8, 8}, {16, 16, 16}, {16, 8, 16}}), (MatrixShape{16, 16, 16}));  // NVIDIA lists these
  EXPECT_EQ(best_shape({{8, 16, 16}}), (MatrixShape{8, 16, 16}));                             // Intel
  EXPECT_EQ(best_shape({{8, 8, 8}}), (MatrixShape{8, 8, 8}));                                 // llvmpipe 26
  EXPECT_EQ(best_shape({{32, 32, 16}, {16, 16, 64}, {12, 16, 16}, {0, 16, 16}}), MatrixShape{});
}

// Without a device: what a plan says, and that registers decide whether rows are kept.
TEST(MatrixPlans, SayWhatTheyUseAndRefuse) {
  Problem p;
  p.device = vulkan_device;
  p.q_type = p.k_type = p.v_type = p.o_type = Type::f16;
  p.B = 1, p.Nq = p.Nk = 100, p.Hq = p.Hk = 2, p.D = p.Dv = 64;
  vulkan::MatrixFacts facts{.f16 = {{16, 16, 16}, ""}, .bf16 = {{}, "no such thing"}, .lanes = 32};
  const vulkan::Steps steps = plan_matrix(p, facts);
  ASSERT_EQ(steps.list.size(), 1U) << steps.reason;
  EXPECT_EQ(steps.list[0].blocks, 2);
  EXPECT_EQ(steps.list[0].constants, (vulkan::Constants{1, 1, 0, 256, 16, 16, 16, 1, 0, 1, 0, 1, 1}));
  EXPECT_EQ(steps.note, "matrices of 16x16x16, subgroups of 32");
  p.D = p.Dv = 256;
  EXPECT_EQ(plan_matrix(p, facts).list.at(0).constants[7], 0) << "Q of 256 dims is kept beside O";
  p.q_type = p.k_type = p.v_type = Type::bf16;
  EXPECT_EQ(plan_matrix(p, facts).reason, "the device cannot: no such thing; vk_tiled needs none of it");
  p.q_type = p.k_type = p.v_type = Type::f32;
  EXPECT_EQ(plan_matrix(p, facts).reason, "the type is f32; vk_matrix takes f16 and bf16, vk_tiled all three");
  p.q_type = p.k_type = p.v_type = Type::f16, p.pass = Pass::backward, p.d_o = Type::f32;
  EXPECT_EQ(plan_matrix(p, facts).reason, "dO is f32 and Q is f16; this kernel takes both in one type");
}

class Matrices : public VulkanWith<Type> {
 protected:
  void SetUp() override {
    VulkanWith<Type>::SetUp();
    if (IsSkipped()) return;
    const vulkan::MatrixFacts& facts = vulkan::own_device(0).facts().matrices;
    const std::string& missing = (GetParam() == Type::f16 ? facts.f16 : facts.bf16).missing;
    if (!missing.empty()) GTEST_SKIP() << "no cooperative matrices to test: " << missing;
    if (facts.lockstep) most_dims = 64;  // llvmpipe compiles more of them for minutes
  }
  std::int64_t most_dims = 256;
};

TEST_P(Matrices, AgreeWithFloat64) {
  for (const char* name : {"regular", "features", "corner", "random"})
    expect_agreement(name, GetParam(), {most_dims, 4e7, 1});
}

INSTANTIATE_TEST_SUITE_P(Types, Matrices, testing::Values(Type::f16, Type::bf16),
                         [](const auto& info) { return info.param == Type::f16 ? "f16" : "bf16"; });

}  // namespace
}  // namespace tessera::test
