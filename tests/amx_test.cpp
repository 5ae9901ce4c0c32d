// The kernel `amx` is there, whether emulated (tests/amx.cmake) or real, and plans what it should. Compiled together
// with the tests that judge its numbers, which would have nothing to judge without it.
// Implements docs/architecture.md, "The matrix unit".
#include "tests/support.hpp"

namespace tessera::test {
namespace {

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

std::string plan_of(Type type, const char* kernel) {
  Case spec{.name = "planned", .Nq = 3, .Nk = 5, .D = 8};
  spec.type = type;
  const CaseData data = build(spec);
  return Plan::forward(data.inputs(), data.outputs(), {}, {.kernel = kernel}).describe();
}

TEST(Amx, IsTheKernelUnderTest) {
  const std::vector<std::string> expected = has_avx512() ? std::vector<std::string>{"amx"} : std::vector<std::string>{};
  EXPECT_EQ(available_kernels(), expected);
}

TEST(Amx, TakesAsManyPiecesAsATypeNeeds) {
  if (!has_avx512()) return;
  EXPECT_NE(plan_of(Type::bf16, nullptr).find("every operand the sum of 1 bf16"), std::string::npos);
  EXPECT_NE(plan_of(Type::f16, nullptr).find("every operand the sum of 2 bf16"), std::string::npos);
  EXPECT_NE(plan_of(Type::f32, "amx").find("every operand the sum of 3 bf16"), std::string::npos);
  EXPECT_NE(plan_of(Type::f32, nullptr).find("not amx        refused: type is f32"), std::string::npos);
}

}  // namespace
}  // namespace tessera::test
