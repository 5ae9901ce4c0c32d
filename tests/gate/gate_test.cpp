// SPDX-License-Identifier: Apache-2.0
// That the compile gate notices what it is there for, and that its sets hold what they say. Links tessera_static; what
// needs NVRTC is skipped, visibly, where there is none.
// Implements docs/architecture.md, "Compiling kernels".
#include "tests/gate/gate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/support/nvrtc.hpp"

namespace tessera::gate {
namespace {

GateUnit unit(const char* text) { return {{"test", "test", {text, "sm_80"}}, false}; }

std::string fault(const GateUnit& u, const cuda::Resources& resources, double times = 1) {
  cuda::Compiled compiled;
  compiled.resources = resources;
  return fault_of(u, compiled, times);
}

TEST(Fault, NamesWhatIsWrong) {
  const GateUnit strict = unit("");
  EXPECT_EQ(fault(strict, {.registers = 255}, 19.9), "");
  EXPECT_EQ(fault(strict, {.spill_bytes = 8}), "spills 8 bytes");
  EXPECT_EQ(fault(strict, {.stack_bytes = 16}), "keeps 16 bytes in local memory");
  EXPECT_NE(fault(strict, {.serialised_wgmma = true}).find("C7510"), std::string::npos);
  EXPECT_EQ(fault(strict, {}, 20.5), "takes 20.5 times as long to compile as the reference unit; at most 20 times");
}

TEST(Fault, TheControlGroupMaySpillButNotTakeLong) {
  GateUnit control = unit("");
  control.may_spill = true;
  EXPECT_EQ(fault(control, {.spill_bytes = 8, .stack_bytes = 16}), "");
  EXPECT_NE(fault(control, {}, 20.5), "");
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
  EXPECT_NE(judge(u, 1).fault.find("spills"), std::string::npos) << judge(u, 1).fault;
}

TEST(Judge, RefusesArraysInLocalMemory) {
  REQUIRE_NVRTC();
  const GateUnit u = unit(in_local_memory);
  EXPECT_NE(judge(u, 1).fault.find("in local memory"), std::string::npos) << judge(u, 1).fault;
}

TEST(Judge, RefusesWhatDoesNotCompile) {
  REQUIRE_NVRTC();
  const GateUnit u = unit("__global__ void kernel() { undeclared(); }");
  EXPECT_NE(judge(u, 1).fault.find("undeclared"), std::string::npos) << judge(u, 1).fault;
}

// The machine is as fast as it is: a reference that seems fast, as one compiled before others made the machine busy, is
// compiled again beside the unit.
TEST(Judge, ComparesCompileTimesWithTheReferencesOfTheSameMoment) {
  REQUIRE_NVRTC();
  const GateUnit u = unit(sound);
  const Judged judged = judge(u, 1e-6);
  EXPECT_EQ(judged.fault, "");
  EXPECT_GT(judged.times, 0);
  EXPECT_LT(judged.times, 20);
}

TEST(Judge, AGateCountsItsFaults) {
  REQUIRE_NVRTC();
  EXPECT_EQ(run_gate({unit(sound), unit(spilling), unit(sound), unit(in_local_memory)}, 2), 2u);
}

// --- what is compiled

using Settings = std::set<std::string>;

const UnitSet& known_set() {
  static const UnitSet set = known_units();
  return set;
}
const UnitSet& quick_set() {
  static const UnitSet set = chosen_units(known_set(), Depth::quick);
  return set;
}
const UnitSet& full_set() {
  static const UnitSet set = chosen_units(known_set(), Depth::full);
  return set;
}

// The settings of every unit of a kernel.
std::vector<Settings> settings(const UnitSet& set, const std::string& kernel) {
  std::vector<Settings> out;
  for (const GateUnit& u : set.units) {
    if (u.named.kernel != kernel) continue;
    const std::vector<std::string> list = settings_of(u.named.unit);
    out.emplace_back(list.begin(), list.end());
  }
  return out;
}

bool met(const std::vector<Settings>& units, const std::vector<std::string>& wanted) {
  return std::any_of(units.begin(), units.end(), [&](const Settings& u) {
    return std::all_of(wanted.begin(), wanted.end(), [&](const std::string& s) { return u.count(s) > 0; });
  });
}

TEST(Settings, AreTheGpuAndTheConfiguration) {
  const cuda::Unit u{"constexpr Config config{.D = 64, .mask = true, .alibi = false, .bias = Element::f32};\n",
                     "sm_75"};
  EXPECT_EQ(settings_of(u), (std::vector<std::string>{"GPU = sm_75", "D = 64", "mask = true", "alibi = false",
                                                      "bias = Element::f32", "options = 2"}));
  EXPECT_EQ(settings_of({"void tessera_kernel() {}", "sm_80"}), std::vector<std::string>{"GPU = sm_80"});
}

TEST(Sets, HoldEachUnitOnceAndOnlyKnownOnes) {
  const auto units = [](const UnitSet& set) {
    std::set<std::pair<std::string, std::string>> different;
    for (const GateUnit& u : set.units) different.insert({u.named.unit.architecture, u.named.unit.text});
    EXPECT_EQ(different.size(), set.units.size());
    return different;
  };
  const auto known = units(known_set()), quick = units(quick_set()), full = units(full_set());
  EXPECT_TRUE(std::includes(known.begin(), known.end(), quick.begin(), quick.end()));
  EXPECT_TRUE(std::includes(known.begin(), known.end(), full.begin(), full.end()));
  EXPECT_LT(quick.size() * 5, full.size());
  EXPECT_LT(full.size() * 3, known.size());
}

TEST(Sets, HoldEveryKernelAndSetting) {
  std::map<std::string, Settings> kernels;
  for (const GateUnit& u : known_set().units) {
    const std::vector<std::string> list = settings_of(u.named.unit);
    kernels[u.named.kernel].insert(list.begin(), list.end());
  }
  for (const char* kernel :
       {"naive_forward", "warp_backward", "vector_forward", "vector_bias_gradient", "mma_forward", "mma_one_pass",
        "mma_backward_queries", "mma_backward_keys", "hopper_forward", "hopper_one_pass", "hopper_backward_keys"})
    EXPECT_TRUE(kernels.count(kernel)) << kernel;
  for (const auto& [kernel, all] : kernels)
    for (const UnitSet* set : {&quick_set(), &full_set()}) {
      const std::vector<Settings> units = settings(*set, kernel);
      EXPECT_FALSE(units.empty()) << kernel;
      const bool all_tiles = set == &full_set() || kernel.starts_with("vector") || kernel.starts_with("hopper");
      for (const std::string& setting : all)
        if (all_tiles || setting.starts_with("element")) {
          EXPECT_TRUE(met(units, {setting})) << kernel << " " << setting;
        }
    }
}

// Every pair of options in all four ways.
TEST(Sets, TheQuickOneHoldsAllPairsOfOptions) {
  const std::vector<std::string> options{"softcap", "alibi", "mask", "dropout", "bias"};
  const auto is_on = [](const Settings& unit, const std::string& option) {
    return !unit.count(option + " = false") && !unit.count(option + " = tessera::gpu::Element::none");
  };
  for (const char* kernel :
       {"vector_forward", "vector_backward_keys", "vector_backward_queries", "mma_forward", "mma_backward_keys",
        "mma_backward_queries", "hopper_forward", "hopper_backward_keys", "hopper_backward_queries"})
    for (const std::string& first : options)
      for (const std::string& second : options) {
        std::set<std::pair<bool, bool>> seen;
        for (const Settings& unit : settings(quick_set(), kernel))
          seen.insert({is_on(unit, first), is_on(unit, second)});
        EXPECT_EQ(seen.size(), first == second ? 2U : 4U) << kernel << " " << first << ", " << second;
      }
}

TEST(Sets, TheQuickOneHoldsKernelsWithoutOptionsAndWithAll) {
  for (const char* kernel : {"vector_forward", "vector_backward_keys", "vector_backward_queries"})
    EXPECT_TRUE(met(settings(quick_set(), kernel),
                    {"softcap = true", "alibi = true", "mask = true", "dropout = true", "wide_loads = true"}))
        << kernel;
  for (const char* kernel : {"mma_forward", "mma_backward_keys", "mma_backward_queries", "hopper_forward",
                             "hopper_backward_keys", "hopper_backward_queries"}) {
    const std::vector<Settings> units = settings(quick_set(), kernel);
    EXPECT_TRUE(met(units, {"softcap = true", "alibi = true", "mask = true", "dropout = true"})) << kernel;
    EXPECT_TRUE(met(units, {"softcap = false", "alibi = false", "mask = false", "dropout = false"})) << kernel;
  }
}

// Five tiles, with any two options and in both types, but not with every set of options.
TEST(Sets, TheFullOneHoldsPairsOfOptionsInEveryTileOfHopper) {
  const std::vector<Settings> units = settings(full_set(), "hopper_forward");
  for (const char* tile : {"D = 64", "D = 128", "D = 192", "D = 256", "Dv = 192"})
    for (const char* first : {"softcap = true", "softcap = false"})
      for (const char* second : {"dropout = true", "dropout = false"})
        EXPECT_TRUE(met(units, {tile, first, second})) << tile << first << second;
  for (const char* tile : {"D = 64", "D = 128", "D = 192", "D = 256", "Dv = 192"})
    for (const char* type : {"element = tessera::gpu::Element::f16", "element = tessera::gpu::Element::bf16"})
      EXPECT_TRUE(met(units, {tile, type})) << tile << type;
}

// Every architecture by itself, and pairs of options in every class.
TEST(Sets, HoldMmaForEveryArchitecture) {
  for (const char* gpu :
       {"sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"})
    for (const char* kernel : {"mma_forward", "mma_one_pass"})
      EXPECT_TRUE(met(settings(full_set(), kernel), {std::string("GPU = ") + gpu})) << kernel << " " << gpu;
  for (const char* gpu : {"sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a"})
    for (const char* other : {"D = 64", "D = 128", "D = 256", "ordered = true", "ordered = false"})
      EXPECT_EQ(met(settings(full_set(), "mma_one_pass"), {std::string("GPU = ") + gpu, other}),
                gpu != std::string("sm_75") || other != std::string("D = 256"))
          << gpu << " " << other;
  for (const char* gpu : {"sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a"})
    for (const char* first : {"softcap = true", "alibi = true", "mask = true"})
      EXPECT_TRUE(met(settings(full_set(), "mma_forward"), {std::string("GPU = ") + gpu, first, "dropout = true"}))
          << gpu << first;
}

// "sm_75, backward, f16 256, bias: mma: REASON; mma_two_pass: REASON".
TEST(Sets, SayWhyAProblemIsRefused) {
  std::set<std::string> families;
  for (const std::string& refused : known_set().refused) {
    const std::size_t colon = refused.find(": ");
    ASSERT_NE(colon, std::string::npos) << refused;
    const std::string reason = refused.substr(colon + 2);
    EXPECT_GT(reason.size(), 20u) << refused;
    EXPECT_FALSE(reason.ends_with(": ")) << refused;
    EXPECT_EQ(reason.find(": ;"), std::string::npos) << refused;
    families.insert(reason.starts_with("mma") ? "mma" : "ladder");
  }
  EXPECT_EQ(families, (std::set<std::string>{"ladder", "mma"}));
}

TEST(Sets, OnlyTheControlGroupMaySpill) {
  const UnitSet& set = quick_set();
  const auto strict = [](const GateUnit& u) { return !u.may_spill; };
  EXPECT_GT(std::count_if(set.units.begin(), set.units.end(), strict), 100);
  for (const GateUnit& u : set.units) EXPECT_EQ(u.may_spill, u.named.kernel.starts_with("naive")) << u.named.kernel;
}

}  // namespace
}  // namespace tessera::gate
