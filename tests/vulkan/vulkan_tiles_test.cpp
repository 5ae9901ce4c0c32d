// SPDX-License-Identifier: Apache-2.0
// vk_tiled with the tiles that GPUs get, on whatever device is here: against float64, the same bits in every batch; and
// which tile a device gets. Links tessera_cases. Implements docs/vulkan.md, "Rungs".
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>

#include "cases/device.hpp"
#include "cases/random.hpp"
#include "core/failure.hpp"
#include "tests/vulkan/support.hpp"
#include "vulkan/plan.hpp"

namespace tessera::test {
namespace {

using vulkan::small_tile, vulkan::wide_tile, vulkan::tall_tile, vulkan::TileShape;

constexpr Execution on_tiles{.device = vulkan_device, .kernel = "vk_tiled"};
// By name only: 64 x 64 by 128 invocations, and more rows than columns in little memory; both in patches.
constexpr TileShape eight_rows{8, 16, 8, 32, 8}, narrow{16, 8, 4, 32, 8};

// As TESSERA_VULKAN_TILE has it, while it lives.
class TakenTile {
 public:
  explicit TakenTile(const TileShape& t) :
      TakenTile(text(t.row_threads, "x", t.column_threads, "x", t.own, "x", t.depth, "x", t.patch)) {}
  explicit TakenTile(const std::string& tile) { setenv("TESSERA_VULKAN_TILE", tile.c_str(), 1); }
  ~TakenTile() { unsetenv("TESSERA_VULKAN_TILE"); }
  TakenTile(const TakenTile&) = delete;
};

struct Setting {
  const char* name;
  TileShape shape;
  std::size_t every, random;  // so many-th case of the features, and so many random ones
  std::int64_t most_dims;     // llvmpipe compiles eight rows of more for long
  std::size_t least;          // cases that must have passed
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

class VulkanTiles : public VulkanWith<Setting> {
 protected:
  void SetUp() override {
    VulkanWith<Setting>::SetUp();
    if (IsSkipped()) return;
    const vulkan::MatrixFacts& facts = vulkan::own_device(0).facts().matrices;
    if (facts.shared_bytes < GetParam().shape.shared_bytes())
      GTEST_SKIP() << "the device has " << facts.shared_bytes << " bytes of shared memory";
  }
};

TEST_P(VulkanTiles, AgreeWithFloat64) {
  const TakenTile taken(GetParam().shape);
  std::vector<Case> all_cases;
  const auto take = [&](const Case& c) {
    if (c.type != Type::f64 && std::max(c.D, c.dim_v()) <= GetParam().most_dims) all_cases.push_back(c);
  };
  for (const Case& c : random_small_cases(700000, GetParam().random)) take(c);
  std::size_t number = 0;
  for (const Case& c : suite("features"))
    if (c.B * c.Hq * c.Nq * c.Nk * c.D <= 8000000 && ++number % GetParam().every == 0) take(c);
  std::size_t passed = 0;
  for (const Case& c : all_cases) {
    const CaseReport report = run_case(c, on_tiles);
    expect_ok(report);
    passed += !report.skipped;
  }
  std::cout << GetParam().name << ": " << passed << " of " << all_cases.size() << " passed\n" << std::flush;
  EXPECT_GE(passed, GetParam().least);
}

struct Results {
  explicit Results(CaseData& data) {
    Placed placed(data, vulkan_device);
    placed.upload();
    Execution execution = on_tiles;
    const Plan plan = Plan::forward(placed.inputs(), placed.outputs(), data.options(), execution);
    said = plan.describe();
    plan.run(placed.inputs(), placed.outputs(), data.options(), execution);
    const Plan back = Plan::backward(placed.inputs(), placed.saved(), placed.gradients(), data.options(), execution);
    said_back = back.describe();
    const DeviceMemory workspace(vulkan_device, back.workspace_size());
    execution.workspace = workspace.data(), execution.workspace_bytes = workspace.size();
    back.run(placed.inputs(), placed.saved(), placed.gradients(), data.options(), execution);
    placed.download();
  }
  std::string said, said_back;
};

TEST_P(VulkanTiles, ASequenceKeepsItsBitsInAnyBatch) {
  const TakenTile taken(GetParam().shape);
  Case c{.name = "small"};
  c.B = 2, c.Nq = 150, c.Nk = 170, c.Hq = 4, c.Hk = 2, c.D = 60, c.options.causal = true;
  CaseData both = build(c), again = build(c);
  const Results first(both), second(again);
  c.B = 1;
  CaseData one = build(c);  // the generator fills tensors in order: q differs, so it is copied
  const auto copy = [](const Buffer& from, Buffer& to) {
    for (std::int64_t e = 0; e < to.elements(); ++e) to.set(e, from.get(e));
  };
  copy(both.q, one.q), copy(both.k, one.k), copy(both.v, one.v), copy(both.d_o, one.d_o);
  const Results alone(one);
  const std::string tile = text("tiles of ", GetParam().shape.rows(), " x ", GetParam().shape.columns(), ", ",
                                GetParam().shape.threads(), " invocations");
  EXPECT_NE(first.said.find(tile), std::string::npos) << first.said;
  EXPECT_NE(first.said_back.find(tile), std::string::npos) << first.said_back;
  for (const auto buffer : {&CaseData::o, &CaseData::lse, &CaseData::dq, &CaseData::dk, &CaseData::dv}) {
    expect_same_bits(both.*buffer, again.*buffer, "in two runs");
    for (std::int64_t e = 0; e < (one.*buffer).elements(); ++e)
      ASSERT_EQ((both.*buffer).get(e), (one.*buffer).get(e)) << e;
  }
}

// Whatever a query that sees no key holds, and its dO: no sum has it.
TEST_P(VulkanTiles, BlindQueriesAreInNoSum) {
  constexpr std::int64_t blind = 70;
  Case c{.name = "blind"};
  c.B = 1, c.Nq = 150, c.Nk = 90, c.Hq = 2, c.Hk = 1, c.D = 60;
  c.options.causal = true, c.options.alignment = Alignment::offset, c.options.diagonal_offset = -blind;
  for (const TileShape& shape : {GetParam().shape, small_tile}) {
    const TakenTile taken(shape);
    CaseData plain = build(c), poisoned = build(c);
    for (Buffer* buffer : {&poisoned.q, &poisoned.d_o})
      for (std::int64_t e = 0; e < blind * c.Hq * c.D; ++e) buffer->set(e, std::nan(""));
    const Results first(plain), second(poisoned);
    for (const auto buffer : {&CaseData::o, &CaseData::dq, &CaseData::dk, &CaseData::dv})
      expect_same_bits(plain.*buffer, poisoned.*buffer, "with and without numbers in blind rows");
  }
}

INSTANTIATE_TEST_SUITE_P(All, VulkanTiles,
                         testing::Values(Setting{"64 x 64", wide_tile, 8, 80, 256, 85},
                                         Setting{"64 x 64 by 128", eight_rows, 12, 60, 64, 50},
                                         Setting{"64 x 32", narrow, 12, 60, 64, 50},
                                         Setting{"128 x 64", tall_tile, 12, 60, 64, 50}),
                         [](const auto& info) { return text("Tile", info.index); });

// Without a device: what one gets, by its shared memory and its invocations.
Problem problem(std::int64_t dims, Pass pass, Type type = Type::f32) {
  Problem p;
  p.device = vulkan_device, p.pass = pass;
  p.q_type = p.k_type = p.v_type = p.o_type = type;
  p.B = 1, p.Nq = p.Nk = 200, p.Hq = p.Hk = 2, p.D = p.Dv = dims;
  if (pass == Pass::backward) p.d_o = p.dq = p.dk = p.dv = type;
  return p;
}

vulkan::MatrixFacts device(bool gpu, std::int32_t invocations, std::int32_t shared_bytes, bool many_registers = false) {
  vulkan::MatrixFacts facts;
  facts.gpu = gpu, facts.many_registers = many_registers, facts.invocations = invocations,
  facts.shared_bytes = shared_bytes;
  return facts;
}

TEST(TilesOfDevices, HaveRoomThere) {
  const auto choice = [](std::int64_t dims, Pass pass, const vulkan::MatrixFacts& facts) {
    return vulkan::tile_for(problem(dims, pass), facts).shape;
  };
  const vulkan::MatrixFacts rich = device(true, 1024, 49152, true);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    EXPECT_EQ(choice(64, pass, rich), tall_tile);
    EXPECT_EQ(choice(128, pass, rich), tall_tile);
    EXPECT_EQ(choice(129, pass, rich), wide_tile);
    EXPECT_EQ(vulkan::tile_for(problem(64, pass, Type::f16), rich).shape, tall_tile);
    EXPECT_EQ(choice(64, pass, device(true, 1024, 32768, true)), wide_tile);
  }
  const vulkan::MatrixFacts large = device(true, 1024, 49152);
  EXPECT_EQ(choice(64, Pass::forward, large), wide_tile);
  EXPECT_EQ(choice(64, Pass::backward, large), wide_tile);
  const vulkan::MatrixFacts middle = device(true, 256, 32768);
  EXPECT_EQ(choice(64, Pass::forward, middle), wide_tile);
  EXPECT_EQ(choice(256, Pass::backward, middle), wide_tile);
  EXPECT_EQ(choice(64, Pass::backward, device(true, 128, 65536)), small_tile);
  EXPECT_EQ(choice(64, Pass::backward, device(false, 1024, 65536)), small_tile);
  const vulkan::Steps steps = plan_tiled(problem(64, Pass::backward), large);
  ASSERT_EQ(steps.list.size(), 3U);
  EXPECT_EQ(steps.list[1].blocks, 8) << "64 queries a workgroup";
  EXPECT_EQ(steps.list[2].constants, (vulkan::Constants{1, 1, 1, 256, 16, 16, 4, 32, 16, wide_tile.quads(), 1, 0, 64}));
  EXPECT_EQ(plan_tiled(problem(128, Pass::backward), large).list.size(), 3U);
  EXPECT_EQ(plan_tiled(problem(129, Pass::backward), large).list.size(), 4U) << "dK and dV apart";
  const vulkan::MatrixFacts processor;
  EXPECT_EQ(plan_tiled(problem(128, Pass::backward), processor).list.size(), 3U);
  EXPECT_EQ(plan_tiled(problem(129, Pass::backward), processor).list.size(), 4U) << "dK and dV apart";
}

TEST(TilesOfDevices, ByNameTheyAreCheckedToo) {
  const vulkan::MatrixFacts middle = device(true, 256, 32768);
  const Problem p = problem(128, Pass::backward);
  for (const char* wrong : {"", "64x64", "16x16x4x32", "16x16x4x32x16x1", "16x16x4x32x16 ", "4x16x8x32x16",
                            "16x32x8x32x16", "16x16x6x32x16", "16x16x4x48x16", "8x8x4x64x16", "8x16x4x32x16"}) {
    const TakenTile taken{std::string(wrong)};
    EXPECT_EQ(plan_tiled(p, middle).reason,
              text("TESSERA_VULKAN_TILE is '", wrong, "'; must be five numbers, as 16x16x4x32x8: 8 or 16 invocations ",
                   "along rows and along columns, 4 or 8 rows of each, 32 or 64 dims, 8 or all columns of a patch; no ",
                   "fewer rows than columns"));
  }
  {
    const TakenTile taken(tall_tile);
    EXPECT_EQ(plan_tiled(p, middle).reason,
              "TESSERA_VULKAN_TILE is '16x16x8x32x16', which takes 256 invocations and 44544 bytes of shared memory; "
              "the device has 256 and 32768");
  }
  const TakenTile taken(eight_rows);
  const vulkan::Steps steps = plan_tiled(p, middle);
  ASSERT_EQ(steps.list.size(), 4U) << steps.reason;
  EXPECT_EQ(steps.list[1].constants, (vulkan::Constants{0, 1, 0, 128, 8, 16, 8, 32, 8, 1152, 1, 0, 128}));
  EXPECT_EQ(steps.list[2].name, "backward of keys: dV") << "eight rows of both sums are too many for registers";
  EXPECT_EQ(steps.note, "tiles of 64 x 64, 128 invocations");
}

}  // namespace
}  // namespace tessera::test
