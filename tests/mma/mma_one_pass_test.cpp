// SPDX-License-Identifier: Apache-2.0
// The `mma` one-pass backward kernel's own text, run on the host (tests/emulated) with what comes before and after it,
// against float64; and the order of additions to dQ. Links tessera_cases; its include path puts tests/emulated before
// src.
#include <functional>
#include <map>

#include "tests/emulated/backward.hpp"
#include "tests/emulated/steps.hpp"
#include "tests/emulated/turns.hpp"
#include "tests/mma/mma_cases.hpp"
#include "tests/support/company.hpp"
#include "tests/support/senseless.hpp"

namespace tessera::mma {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];
}

#include "mma_one_pass_units.hpp"  // written while this is built

namespace tessera::mma {
namespace {

void run_backward(cases::CaseData& data, const char* architecture, int turn_tiles) {
  const Problem problem = backward_problem(data);
  const gpu::Steps steps = one_pass_steps_of(problem, architecture, turn_tiles);
  ASSERT_EQ(steps.reason, "");
  emulated::run_steps(steps, problem, emulated::backward_call(data), mma_one_pass_units, memory);
}

// How many turns are passed on at once decides about no bit.
void expect_same_bits_of_more_turns(const OnePassCase& c, const cases::CaseData& expected) {
  for (int n = 2; n <= most_turn_tiles; ++n) {
    SCOPED_TRACE(n);
    cases::CaseData data = cases::build(c.c.spec);
    forward(data.inputs(), data.outputs(), data.options(), {});
    run_backward(data, c.architecture, n);
    test::expect_same_outputs(expected, data);
  }
}

class MmaOnePass : public testing::TestWithParam<const char*> {};

TEST_P(MmaOnePass, AgreesWithTheReference) {
  int ran = 0;
  for (const OnePassCase& c : one_pass_cases()) {
    if (c.c.spec.name != GetParam()) continue;
    SCOPED_TRACE(c.architecture);
    emulated::check(c.c, [&](cases::CaseData& data) {
      forward(data.inputs(), data.outputs(), data.options(), {});
      run_backward(data, c.architecture, 1);
      if (c.c.spec.options.deterministic) expect_same_bits_of_more_turns(c, data);
    });
    if (HasFailure()) return;
    ++ran;
  }
  EXPECT_GT(ran, 0) << "there is no such group";
}

INSTANTIATE_TEST_SUITE_P(Groups, MmaOnePass,
                         testing::Values("Full", "OneToManyTiles", "HeadDimsBetweenTiles", "GroupsOfHeads", "Causal",
                                         "QueriesThatSeeNothing", "Windows", "PackedSequences", "Fronts", "UsedLengths",
                                         "Layouts", "Unaligned", "SinksAndLseGradient", "WideGradients", "Accumulation",
                                         "ExtremeNumbers"),
                         [](const auto& info) { return std::string(info.param); });

TEST(MmaOnePassLengths, SenselessOnesTouchNoOtherSequences) {
  for (int n = 1; n <= most_turn_tiles; ++n)
    test::check_senseless_lengths(test::senseless_base(64, Type::bf16, true), true,
                                  [&](cases::CaseData& data) { run_backward(data, "sm_90a", n); });
}

// Two at once where no mask is, not even one that hides nothing. In any order there are no turns.
TEST(MmaOnePassPlans, ChooseHowManyTurnsArePassedOnAtOnce) {
  cases::CaseData data = cases::build({.name = "turns", .Nq = 70, .Nk = 70, .D = 128, .type = Type::bf16});
  const auto chosen = [&](auto change, std::optional<int> asked = {}) {
    Problem p = backward_problem(data);
    change(p);
    const std::string unit = one_pass_steps(p, cuda::target_named("sm_90a"), asked).list[1].unit;
    const std::string setting = ".turn_tiles = ";
    return std::stoi(unit.substr(unit.find(setting) + setting.size()));
  };
  const auto nothing = [](Problem&) {};
  EXPECT_EQ(chosen(nothing), 2);
  EXPECT_EQ(chosen(nothing, 1), 1);
  const std::function<void(Problem&)> masks[] = {[](Problem& p) { p.options.causal = true; },
                                                 [](Problem& p) { p.options.window_left = 1000; },
                                                 [](Problem& p) { p.options.window_right = 1000; }};
  for (const auto& mask : masks) {
    EXPECT_EQ(chosen(mask), 1);
    EXPECT_EQ(chosen(mask, 2), 2);
  }
  EXPECT_EQ(chosen([](Problem& p) { p.options.deterministic = false; }), 1);
  EXPECT_EQ(chosen([](Problem& p) { p.options.deterministic = false; }, 2), 1);
}

// --- the order of additions to a tile's sum, without the arithmetic

constexpr OnePassConfig turns_config{.D = 128, .Dv = 128, .warps = 8, .row_tiles = 1, .block_queries = 64};

OnePassWork work_of(const gpu::Question& x, int section, Int64 number) {
  OnePassWork w{};
  const Int64 blocks = gpu::block_count(x.cu_seqlens_k.data, x.Nk, keys_of(turns_config), x.B);
  const Int32 heads = x.cu_seqlens_k.data ? x.Hk : x.B * x.Hk;
  describe_one_pass<turns_config>(x, Int32(blocks * x.Hk / heads), section, Int32(number), w);
  return w;
}

int random_section(const gpu::Question& x, std::mt19937& random) {
  const int heads = x.cu_seqlens_k.data ? x.Hk : x.B * x.Hk;
  int section = 1;
  while (random() % 2 && heads % (2 * section) == 0) section *= 2;
  return section;
}

// Turns are passed on when the tiles of a group have been added to.
class MmaOnePassTurns : public testing::TestWithParam<int> {};

TEST_P(MmaOnePassTurns, ComeForAnyNumberOfResidentBlocks) {
  const int turn_tiles = GetParam();
  std::mt19937 random(11);
  int waits = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<Int32> q, k;
    const gpu::Question x = emulated::random_question(random, q, k);
    OnePassMemory memory{};
    memory.tiles_per_head = Int32(gpu::block_count(x.cu_seqlens_q.data, x.Nq, turns_config.block_queries, x.B));
    for (const int resident : {1, 2, 3, 8, 1000}) {
      const int section = random_section(x, random);
      const auto visits_of = [&](Int64 number) {
        const OnePassWork w = work_of(x, section, number);
        std::vector<emulated::Visit> visits;
        if (w.first >= w.rows) return visits;
        if (w.begin >= w.end) return visits;
        for (OnePassWork::Place at = w.first_place(); w.exists(at); at = w.after(at))
          visits.push_back({w.tile_number(memory, at), turn_at<turns_config>(w, at.n),
                            w.tile_number(memory, at) - at.n % turn_tiles});
        return visits;
      };
      const Int64 blocks = x.Hk * gpu::block_count(x.cu_seqlens_k.data, x.Nk, keys_of(turns_config), x.B);
      const int waited = emulated::run_turns(blocks, visits_of, resident, true, random);
      ASSERT_GE(waited, 0) << "Nq " << x.Nq << " Nk " << x.Nk << " resident " << resident;
      ASSERT_TRUE(resident > 1 || waited == 0);
      waits += waited;
    }
  }
  EXPECT_GT(waits, 1000);  // else the order was never in question
}

INSTANTIATE_TEST_SUITE_P(All, MmaOnePassTurns, testing::Range(1, most_turn_tiles + 1));

TEST(MmaOnePassBlocks, AreTakenOnceAndThoseOfAHeadInOrder) {
  std::mt19937 random(12);
  int padded = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<Int32> q, k;
    const gpu::Question x = emulated::random_question(random, q, k);
    const int section = random_section(x, random);
    std::map<std::pair<Int32, Int32>, Int32> next;  // key of a sequence's head
    Int64 keys = 0;
    for (Int64 n = 0; n < x.Hk * gpu::block_count(x.cu_seqlens_k.data, x.Nk, keys_of(turns_config), x.B); ++n) {
      const OnePassWork w = work_of(x, section, n);
      if (w.first >= w.rows) continue;
      Int32& at = next[{w.b, w.row_head}];
      ASSERT_EQ(w.first, at) << "sequence " << w.b << ", head " << w.row_head;
      at += keys_of(turns_config), keys += lesser(keys_of(turns_config), w.rows - w.first);
    }
    if (x.cu_seqlens_k.data) continue;
    EXPECT_EQ(keys, x.B * x.Hk * x.Nk);
    ++padded;
  }
  EXPECT_GT(padded, 50);
}

}  // namespace
}  // namespace tessera::mma
