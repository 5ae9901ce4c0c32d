// That the compile gate notices what it is there for, and that its sets hold what they say. Links tessera_static; what
// needs NVRTC is skipped, visibly, where there is none.
// Implements docs/architecture.md, "Compiling kernels".
#include "tests/gate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/nvrtc.hpp"

namespace tessera::gate {
namespace {

GateUnit unit(const char* text) { return {{"test", "test", {text, "sm_80"}}, false}; }

cuda::Compiled with(const cuda::Resources& resources, double seconds = 1) {
  cuda::Compiled compiled;
  compiled.resources = resources, compiled.seconds = seconds;
  return compiled;
}

TEST(Fault, NamesWhatIsWrong) {
  const GateUnit strict = unit("");
  EXPECT_EQ(fault_of(strict, with({.registers = 255})), "");
  EXPECT_EQ(fault_of(strict, with({.spill_bytes = 8})), "spills 8 bytes");
  EXPECT_EQ(fault_of(strict, with({.stack_bytes = 16})), "keeps 16 bytes in local memory");
  EXPECT_NE(fault_of(strict, with({.serialised_wgmma = true})).find("C7510"), std::string::npos);
  EXPECT_EQ(fault_of(strict, with({}, 3.5)), "takes 3.5 s to compile; at most 3");
}

TEST(Fault, TheControlGroupMaySpillButNotTakeLong) {
  GateUnit control = unit("");
  control.may_spill = true;
  EXPECT_EQ(fault_of(control, with({.spill_bytes = 8, .stack_bytes = 16})), "");
  EXPECT_NE(fault_of(control, with({}, 3.5)), "");
}

// 96 values in at most 64 registers; the compiler may not load them again, since out may be in.
const char* const spilling = R"(
extern "C" __global__ __launch_bounds__(1024) void kernel(const float* in, float* out) {
  float values[96];
  for (int i = 0; i < 96; ++i) values[i] = in[i];
  for (int i = 0; i < 96; ++i) out[i] = values[95 - i];
})";

// An array that cannot be in registers, since its index is known at run time only.
const char* const in_local_memory = R"(
extern "C" __global__ void kernel(const int* in, int* out) {
  int counts[64];
  for (int i = 0; i < 64; ++i) counts[i] = 0;
  for (int i = 0; i < 1000; ++i) ++counts[in[i] & 63];
  for (int i = 0; i < 64; ++i) out[i] = counts[i];
})";

const char* const sound = R"(extern "C" __global__ void kernel(float* out) { out[threadIdx.x] = 1; })";

TEST(Judge, RefusesUnitsThatSpill) {
  REQUIRE_NVRTC();
  const GateUnit u = unit(spilling);
  EXPECT_NE(judge(u).fault.find("spills"), std::string::npos) << judge(u).fault;
}

TEST(Judge, RefusesArraysInLocalMemory) {
  REQUIRE_NVRTC();
  const GateUnit u = unit(in_local_memory);
  EXPECT_NE(judge(u).fault.find("in local memory"), std::string::npos) << judge(u).fault;
}

TEST(Judge, RefusesWhatDoesNotCompile) {
  REQUIRE_NVRTC();
  const GateUnit u = unit("__global__ void kernel() { undeclared(); }");
  EXPECT_NE(judge(u).fault.find("undeclared"), std::string::npos) << judge(u).fault;
}

TEST(Judge, AGateCountsItsFaults) {
  REQUIRE_NVRTC();
  EXPECT_EQ(run_gate({unit(sound), unit(spilling), unit(sound), unit(in_local_memory)}, 2), 2u);
}

TEST(Sets, HoldEachUnitOnce) {
  for (const UnitSet& set : {quick_units(), all_units()}) {
    std::set<std::pair<std::string, std::string>> different;
    for (const GateUnit& u : set.units) different.insert({u.named.unit.architecture, u.named.unit.text});
    EXPECT_EQ(different.size(), set.units.size());
  }
}

// Every pair of the options that change the code of `vector`, in the text that is compiled.
TEST(Sets, TheQuickOneHoldsAllPairs) {
  const UnitSet set = quick_units();
  const std::vector<std::string> on{".softcap = true", ".alibi = true", ".mask = true", ".dropout = true",
                                    ".wide_loads = false"};
  for (const char* kernel : {"vector_forward", "vector_backward"})
    for (std::size_t a = 0; a < on.size(); ++a)
      for (std::size_t b = a; b < on.size(); ++b) {
        const auto holds = [&](const GateUnit& u) {
          if (!u.named.kernel.starts_with(kernel)) return false;
          for (std::size_t i = 0; i < on.size(); ++i)
            if ((u.named.unit.text.find(on[i]) != std::string::npos) != (i == a || i == b)) return false;
          return true;
        };
        EXPECT_TRUE(std::any_of(set.units.begin(), set.units.end(), holds)) << kernel << on[a] << on[b];
      }
}

bool says(const GateUnit& u, const std::string& words) { return u.named.unit.text.find(words) != std::string::npos; }

// Every pair of the options that change the code of `hopper`.
TEST(Sets, TheQuickOneHoldsAllPairsOfHopper) {
  const UnitSet set = quick_units();
  const std::vector<std::string> on{".softcap = true",
                                    ".alibi = true",
                                    ".mask = true",
                                    ".dropout = true",
                                    ".o = tessera::simt::Element::f32",
                                    ".bias = tessera::simt::Element::bf16",
                                    ".bias = tessera::simt::Element::f32"};
  for (std::size_t a = 0; a < on.size(); ++a)
    for (std::size_t b = a; b < on.size(); ++b) {
      const auto holds = [&](const GateUnit& u) {
        if (u.named.kernel != "hopper_forward" || !says(u, "{.D = 128, .Dv = 128,")) return false;
        for (std::size_t i = 0; i < on.size(); ++i)
          if (says(u, on[i]) != (i == a || i == b)) return false;
        return true;
      };
      const bool two_types_of_bias = a + 2 == on.size() && b + 1 == on.size();
      EXPECT_NE(std::any_of(set.units.begin(), set.units.end(), holds), two_types_of_bias) << on[a] << on[b];
    }
}

// Five tiles in two types: without options in the quick set; with every set of options in the full one, where a type
// has tiles of its own. A bias is none, of the inputs' type or f32; a scale that is not positive is an option, too.
TEST(Sets, HoldTheTilesOfHopper) {
  const auto count = [](const UnitSet& set, const std::vector<std::string>& words) {
    return std::count_if(set.units.begin(), set.units.end(), [&](const GateUnit& u) {
      return u.named.kernel == "hopper_forward" &&
             std::all_of(words.begin(), words.end(), [&](const std::string& w) { return says(u, w); });
    });
  };
  const std::string f16 = ".element = tessera::simt::Element::f16, .o = tessera::simt::Element::f16";
  const std::string bf16 = ".element = tessera::simt::Element::bf16, .o = tessera::simt::Element::bf16";
  const UnitSet quick = quick_units(), full = all_units();
  EXPECT_EQ(count(quick, {f16, ".general = false"}), 5);
  EXPECT_EQ(count(quick, {bf16, ".general = false"}), 5);
  constexpr int sets_of_options = 2 * 2 * 2 * 2 * 3 + 1;
  EXPECT_EQ(count(full, {bf16}), 5 * sets_of_options);
  EXPECT_EQ(count(full, {f16, ".halves_S = true"}), 3 * sets_of_options);
}

TEST(Sets, OnlyTheControlGroupMaySpill) {
  const UnitSet set = quick_units();
  const auto strict = [](const GateUnit& u) { return !u.may_spill; };
  EXPECT_GT(std::count_if(set.units.begin(), set.units.end(), strict), 100);
  for (const GateUnit& u : set.units) EXPECT_EQ(u.may_spill, u.named.kernel.starts_with("naive")) << u.named.kernel;
}

}  // namespace
}  // namespace tessera::gate
