// SPDX-License-Identifier: Apache-2.0
// The `mma` kernels without a GPU: what ldmatrix and mma.sync fetch, emulated as the PTX ISA describes them; bank
// conflicts of every access to shared memory; tiles and plans. Links tessera_cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>

#include "api/units.hpp"
#include "mma/algorithms.hpp"
#include "mma/layout.hpp"
#include "mma/tiles.hpp"
#include "tests/support/fragments.hpp"

namespace tessera::mma {
namespace {

using test::conflicts, test::loaded, test::Place, test::TileMemory;

// --- fragments

// The address that the kernel computes for columns 16 k and rows 16 j of a tile, from the lane's own.
int kernel_address(int lane_at, int rows, int k, int j) {
  return (lane_at ^ column_turn(k)) + panel_step(rows, k) + j * bytes_of_16_rows;
}

class Fragments : public testing::TestWithParam<std::tuple<int, int>> {};

// "mma.m16n8k16": with g = lane / 4 and t = lane % 4, register r of a holds row g + 8 (r % 2), terms 2 t + 8 (r / 2)
// and the next; register r of b holds column g, terms 2 t + 8 r and the next.
TEST_P(Fragments, AreWhatProductsExpect) {
  const auto& [rows, columns] = GetParam();
  const TileMemory memory(rows, columns);
  for (int j = 0; j < rows / 16; ++j)
    for (int k = 0; k < columns / 16; ++k)
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const auto load = [&](int r, bool turned, int (*row)(int), int (*column)(int)) {
          return loaded(memory, lane, r, turned,
                        [&](int l) { return kernel_address(lane_byte(row(l), column(l)), rows, k, j); });
        };
        for (int r = 0; r < 4; ++r) {
          const int own_row = 16 * j + g + 8 * (r % 2), own_term = 16 * k + 2 * t + 8 * (r / 2);
          ASSERT_EQ(load(r, false, a_row, a_column), std::pair(Place(own_row, own_term), Place(own_row, own_term + 1)));
          // K: columns of S are rows of the tile. V: columns of O are columns of the tile, terms are rows.
          const int key = 16 * j + g + 8 * (r / 2), term = 16 * k + 2 * t + 8 * (r % 2);
          ASSERT_EQ(load(r, false, b_row, b_column), std::pair(Place(key, term), Place(key, term + 1)));
          const int column = 16 * k + g + 8 * (r / 2), row = 16 * j + 2 * t + 8 * (r % 2);
          ASSERT_EQ(load(r, true, t_row, t_column), std::pair(Place(row, column), Place(row + 1, column)));
        }
      }
}

INSTANTIATE_TEST_SUITE_P(Tiles, Fragments,
                         testing::Combine(testing::Values(16, 32, 64, 128), testing::Values(64, 128, 192, 256)));

// Values 8 j to 8 j + 7 of an accumulator, packed in pairs, are registers of a whose terms are columns 16 j to 16 j
// + 15.
TEST(Fragment, AnAccumulatorIsTheNextOperand) {
  for (int lane = 0; lane < 32; ++lane)
    for (int n = 0; n < 128; ++n) {
      const int j = n / 8, r = n % 8 / 2;
      EXPECT_EQ(gpu::accumulator_row(lane, n), lane / 4 + 8 * (r % 2));
      EXPECT_EQ(gpu::accumulator_column(lane, n), 16 * j + 2 * (lane % 4) + 8 * (r / 2) + n % 2);
    }
}

// --- banks

TEST(Banks, LoadsOfFragmentsHaveNoConflicts) {
  for (const int rows : {16, 32, 64, 128})
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < rows / 16; ++j)
        for (const auto& [row, column] : {std::pair(&a_row, &a_column), {&b_row, &b_column}, {&t_row, &t_column}})
          EXPECT_EQ(
              conflicts(16, [&](int lane) { return kernel_address(lane_byte(row(lane), column(lane)), rows, k, j); }),
              1);
}

// dS, a row for each key: stores of pairs from accumulators, and loads of its transpose, as multiply_turned addresses
// them. Every element has a place of its own, and comes to where the product of queries and keys expects it.
TEST(Banks, OfTransposedScoresHaveNoConflicts) {
  for (const int keys : {32, 64, 128})
    for (const int queries : {32, 64}) {
      const int rows = dS_rows(keys, queries);
      std::map<int, Place> cells;
      for (int key = 0; key < keys; ++key)
        for (int query = 0; query < queries; ++query) {
          const int byte = dS_byte(keys, queries, key, query);
          EXPECT_LT(byte, 2 * keys * queries);
          EXPECT_TRUE(cells.emplace(byte, Place{key, query}).second);
        }
      for (int row = 0; row < keys; row += 8)
        for (int c = 0; c < queries / 8; ++c) {
          const auto stored = [&](int lane) {
            const int first =
                dS_byte(keys, queries, row / 16 * 16 + gpu::accumulator_row(lane, 0), gpu::accumulator_column(lane, 0));
            return (first ^ c * gpu::chunk_bytes) + row % 16 * gpu::panel_row_bytes;
          };
          EXPECT_EQ(conflicts(4, stored), 1);
          for (int lane = 0; lane < 32; ++lane)
            EXPECT_EQ(cells.at(stored(lane)), Place(row + lane / 4, gpu::accumulator_column(lane, 4 * c)));
        }
      for (int j = 0; j < keys / 16; ++j)
        for (int r = 0; r < queries / 16; ++r) {
          const auto loaded_row = [&](int lane) {
            return (dS_byte(keys, queries, b_row(lane), b_column(lane)) ^
                    column_turn(16 * j / rows * queries / 16 + r)) +
                   16 * j % rows * gpu::panel_row_bytes;
          };
          EXPECT_EQ(conflicts(16, loaded_row), 1);
          for (int lane = 0; lane < 32; ++lane)
            EXPECT_EQ(cells.at(loaded_row(lane)), Place(16 * j + lane % 8 + lane / 16 * 8, 16 * r + lane / 8 % 2 * 8));
        }
    }
}

// Copies of 16 bytes, which aligned tensors get, have none either. Those of 8 and 4 bytes have some: a warp's chunks of
// several rows lie in the same places of their rows.
TEST(Banks, CopiesHaveNoConflictsIfAligned) {
  for (const int rows : {16, 32, 64, 128})
    for (int warp = 0; warp < 8; ++warp)
      for (const auto& [bytes, most] : {std::pair(16, 1), {8, 2}, {4, 4}})
        for (int at = 0; at < 16; at += bytes)
          EXPECT_EQ(conflicts(bytes,
                              [&, at = at](int lane) {
                                const int thread = 32 * warp + lane;
                                return gpu::tile_byte(rows, copy_row(thread), copy_column(thread)) + at;
                              }),
                    most);
}

// Every chunk of a panel is copied once.
TEST(Copies, CoverATile) {
  for (const int threads : {128, 256}) {
    std::set<Place> copied;
    for (int thread = 0; thread < threads; ++thread)
      EXPECT_TRUE(copied.insert({copy_row(thread), copy_column(thread)}).second);
    EXPECT_EQ(copied.size(), static_cast<std::size_t>(8 * copy_rows_at_once(threads)));
    EXPECT_EQ(copied.rbegin()->first, copy_rows_at_once(threads) - 1);
    EXPECT_EQ(copy_rows_at_once(threads) % 8, 0) << "or the swizzle would change from step to step";
  }
}

// --- tiles

TEST(Classes, AreByArchitecture) {
  const std::map<std::string, std::string> expected{{"sm_75", "sm_75"},    {"sm_80", "sm_80"},    {"sm_86", "sm_89"},
                                                    {"sm_87", "sm_80"},    {"sm_89", "sm_89"},    {"sm_90a", "sm_90"},
                                                    {"sm_100a", "sm_100"}, {"sm_103a", "sm_100"}, {"sm_110a", "sm_100"},
                                                    {"sm_120a", "sm_89"},  {"sm_121a", "sm_89"}};
  for (const auto& [architecture, name] : expected) {
    const TileClass* of = class_of(cuda::target_named(architecture));
    ASSERT_NE(of, nullptr) << architecture;
    EXPECT_EQ(of->name, name) << architecture;
  }
  EXPECT_EQ(class_of({7, 0, 96 << 10, 80}), nullptr);
  EXPECT_EQ(class_names(), "sm_100, sm_90, sm_80, sm_89, sm_75");
}

// Every pair of head dims, with options and without, in every class.
TEST(Tiles, FitTheClass) {
  int tiles = 0;
  for (const TileClass& of : tile_classes())
    for (std::int64_t D = 1; D <= 256; D += 5)
      for (std::int64_t Dv = 1; Dv <= 256; Dv += 5)
        for (const bool general : {false, true}) {
          Problem p = api::plain_problem(Pass::forward, Type::f16, {D, Dv});
          if (general) p.options.dropout = 0.5;
          if ((D + Dv) % 2 == 0) p.pages = Pages{.count = 9, .v_count = 9, .size = 16, .entries = 9};
          const std::optional<Config> c = forward_tile(p, of);
          ASSERT_TRUE(c) << of.name << " " << D << " " << Dv;
          EXPECT_GE(c->D, D);
          EXPECT_GE(c->Dv, Dv);
          EXPECT_EQ(c->general, general);
          constexpr int reserved = 1024;  // of every block, but on sm_75
          EXPECT_LE((layout_of(*c).bytes + reserved) * c->blocks_per_sm, of.shared_bytes + reserved) << D << " " << Dv;
          ++tiles;
        }
  EXPECT_EQ(tiles, 5 * 52 * 52 * 2);
}

// Bits depend on how many keys a tile has. So that must not depend on lengths, alignment or the output's type.
TEST(Tiles, KeysOfATileDependOnNothingThatBitsMayNot) {
  for (const TileClass& of : tile_classes())
    for (const api::HeadDims dims : {api::HeadDims{64, 64}, {128, 128}, {192, 128}, {256, 256}}) {
      const Problem plain = api::plain_problem(Pass::forward, Type::f16, dims);
      const int keys = forward_tile(plain, of)->block_keys;
      for (const int change : {0, 1, 2, 3, 4, 5}) {
        Problem p = plain;
        if (change == 5) p.pages = Pages{.count = 9, .v_count = 9, .size = 16, .entries = 9};
        if (change == 0) p.B = 1, p.Nq = 3, p.Nk = 100000;
        if (change == 1) p.alignment = 2;
        if (change == 2) p.o_type = Type::f32;
        if (change == 3) p.packed = true, p.Hk = 1;
        if (change == 4) p.options.causal = true, p.lse = false;
        EXPECT_EQ(forward_tile(p, of)->block_keys, keys) << of.name << " " << change;
      }
    }
}

// --- plans

// dBias is another family's, and so are sequences of few rows.
std::vector<gpu::Algorithm> kernels() {
  const gpu::AddSteps nothing = [](gpu::Steps&, const Problem&, const cuda::Target&) {};
  return algorithms(nothing, nothing);
}
gpu::Algorithm kernel_named(const std::string& name) {
  const std::vector<gpu::Algorithm> all = kernels();
  return *std::ranges::find(all, name, &gpu::Algorithm::name);
}
gpu::Algorithm forward_kernel() { return kernel_named("mma"); }
gpu::Algorithm backward_kernel() { return kernel_named("mma_two_pass"); }
gpu::Algorithm one_pass_kernel() { return kernel_named("mma_one_pass"); }

std::string reason(const Problem& p, const char* architecture) {
  return forward_kernel().plan(p, cuda::target_named(architecture)).reason;
}

TEST(Plans, SayWhatTheyRefuse) {
  const auto plain = [](Type type, api::HeadDims dims) { return api::plain_problem(Pass::forward, type, dims); };
  EXPECT_EQ(reason(plain(Type::bf16, {64, 64}), "sm_80"), "");
  EXPECT_EQ(reason(plain(Type::f32, {64, 64}), "sm_80"), "type is f32; this kernel takes f16 and bf16");
  EXPECT_EQ(reason(plain(Type::bf16, {64, 64}), "sm_75"), "type is bf16; sm_75 multiplies f16 only");
  EXPECT_EQ(reason(plain(Type::f16, {256, 257}), "sm_90a"), "D is 256 and Dv is 257; this kernel has tiles up to 256");
  EXPECT_EQ(reason(api::plain_problem(Pass::backward, Type::f16, {64, 64}), "sm_90a"),
            "pass is backward; this kernel is for the forward pass");
  Problem longest = plain(Type::f16, {64, 64});
  longest.Nk = (std::int64_t{1} << 29) + 1;
  EXPECT_EQ(reason(longest, "sm_80"), "Nq is 4096 and Nk is 536870913; this kernel counts up to 536870912 tokens");
  EXPECT_EQ(forward_kernel().plan(plain(Type::f16, {64, 64}), {7, 0, 96 << 10, 80}).reason,
            "the GPU is sm_70; this kernel has tiles for sm_100, sm_90, sm_80, sm_89, sm_75");
}

TEST(Plans, SayWhatTheyRefuseOfCaches) {
  Problem plain = api::plain_problem(Pass::forward, Type::bf16, {64, 64});
  Problem pages = plain;
  pages.pages = Pages{.count = 9, .v_count = 9, .size = 16, .entries = 300};
  EXPECT_EQ(reason(pages, "sm_80"), "");
  plain.k_type = plain.v_type = Type::e4m3;
  EXPECT_EQ(reason(plain, "sm_80"),
            "k or v has another type than q, or scales; this kernel takes that of keys in pages");
  pages.k_type = Type::i8, pages.k_scale = 2;
  EXPECT_EQ(reason(pages, "sm_80"), "");
  pages.v_scale = 3;
  EXPECT_EQ(reason(pages, "sm_80"),
            "v_scale has 3 dimensions; this kernel takes one for each head, or sequence and head");
  pages.v_type = Type::f16;
  EXPECT_EQ(reason(pages, "sm_80"), "v has type f16; this kernel takes q's, bf16, e4m3 and i8");

  const gpu::Algorithm mixed = kernel_named("mma_mixed");
  const auto reason_of = [&](const Problem& p) { return mixed.plan(p, cuda::target_named("sm_80")).reason; };
  EXPECT_EQ(reason_of(plain), "k and v are in no pages; mma takes padded and packed ones");
  pages.v_type = Type::bf16, pages.v_scale = 0, pages.packed = true;
  EXPECT_EQ(reason_of(pages), "");
  pages.options.max_seqlen_q = 64;
  EXPECT_EQ(reason_of(pages), "no sequence has more than 64 rows of queries for each KV head");
}

// The library reads TESSERA_TILES once, so each value has a process of its own, which tells what it got.
void expect_tiles(const char* name, const char* architecture, const char* told) {
  EXPECT_EXIT(
      {
        setenv("TESSERA_TILES", name, 1);
        const Problem p = api::plain_problem(Pass::forward, Type::f16, {128, 128});
        const gpu::Steps steps = forward_kernel().plan(p, cuda::target_named(architecture));
        std::fputs(steps.reason.empty() ? steps.list.front().unit.c_str() : steps.reason.c_str(), stderr);
        std::exit(0);
      },
      testing::ExitedWithCode(0), told)
      << name << " on " << architecture;
}

TEST(Plans, HaveTheTilesThatTheEnvironmentNames) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // begins anew, and has read nothing
  expect_tiles("sm_90", "sm_90a", "warps = 4, .row_tiles = 2, .block_keys = 64, .stages = 2");
  expect_tiles("sm_80", "sm_90a", "warps = 4, .row_tiles = 2, .block_keys = 48, .stages = 2");
  expect_tiles(
      "sm_89", "sm_90a",
      "warps = 8, .row_tiles = 1, .block_keys = 64, .stages = 2, .spreads_copies = false, .q_registers = true");
  expect_tiles("sm_75", "sm_90a", "turing = true");
  expect_tiles("sm_100", "sm_90a", "block_keys = 48");
  expect_tiles("", "sm_90a", "stages = 2");
  expect_tiles("sm_91", "sm_90a", "TESSERA_TILES is 'sm_91'; must be one of sm_100, sm_90, sm_80, sm_89, sm_75");
  expect_tiles("sm_90", "sm_89", "the tiles of sm_90 take up to 232448 bytes of shared memory; sm_89 has 101376");
}

// Every pair of head dims has its gradients, in as many launches as its registers demand, but on sm_75.
TEST(Plans, OfTheBackwardPassFitTheClass) {
  int launches = 0;
  for (const TileClass& of : tile_classes())
    for (std::int64_t D = 1; D <= 256; D += 15)
      for (std::int64_t Dv = 1; Dv <= 256; Dv += 15)
        for (const bool general : {false, true}) {
          Problem p = api::plain_problem(Pass::backward, Type::f16, {D, Dv});
          if (general) p.options.dropout = 0.5;
          const gpu::Steps steps = backward_kernel().plan(p, {of.major, of.minor, of.shared_bytes, 100});
          if (of.turing() && !steps.reason.empty()) {
            EXPECT_GT(D + Dv, 256);
            continue;
          }
          ASSERT_EQ(steps.reason, "") << of.name << " " << D << " " << Dv;
          for (const gpu::Step& step : steps.list) {
            EXPECT_LE(step.shared_bytes, of.shared_bytes) << step.name;
            launches += step.name.starts_with("mma_backward");
          }
        }
  EXPECT_GT(launches, 4 * 18 * 18 * 2 * 2);
  EXPECT_EQ(backward_kernel()
                .plan(api::plain_problem(Pass::forward, Type::f16, {64, 64}), cuda::target_named("sm_80"))
                .reason,
            "pass is forward; this kernel is for the backward pass");
  Problem wide = api::plain_problem(Pass::backward, Type::f16, {64, 64});
  wide.d_o = Type::f32;
  EXPECT_EQ(backward_kernel().plan(wide, cuda::target_named("sm_80")).reason,
            "dO is f32 and Q is f16; this kernel takes both in one type");
  EXPECT_EQ(backward_kernel()
                .plan(api::plain_problem(Pass::backward, Type::f16, {256, 256}), cuda::target_named("sm_75"))
                .reason,
            "D is 256 and Dv is 256; no tile fits the 65536 bytes of shared memory of sm_75");
}

// One pass takes what makes all gradients without options of scores, where the class has tiles, and says why not.
TEST(Plans, OfOnePassSayWhatTheyRefuse) {
  const auto reason_of = [](const Problem& p, const char* architecture = "sm_90a") {
    return one_pass_kernel().plan(p, cuda::target_named(architecture)).reason;
  };
  const Problem plain = api::plain_problem(Pass::backward, Type::bf16, {64, 64});
  const auto changed = [&](auto change) {
    Problem p = plain;
    change(p);
    return p;
  };
  for (const char* architecture : {"sm_80", "sm_89", "sm_100a"}) EXPECT_EQ(reason_of(plain, architecture), "");
  EXPECT_EQ(reason_of(api::plain_problem(Pass::forward, Type::bf16, {64, 64})),
            "pass is forward; this kernel is for the backward pass");
  EXPECT_EQ(reason_of(changed([](Problem& p) { p.dk.reset(); })),
            "not all of dQ, dK and dV are asked for; one pass makes all of them");
  EXPECT_EQ(reason_of(changed([](Problem& p) { p.d_o = Type::f32; })),
            "dO is f32 and Q is bf16; one pass takes both in one type");
  EXPECT_EQ(reason_of(changed([](Problem& p) { p.options.scale = -1; })), "scale is -1; one pass takes scales above 0");
  EXPECT_EQ(reason_of(changed([](Problem& p) { p.options.softcap = 5; })), "softcap is 5; one pass takes none");
  EXPECT_EQ(reason_of(changed([](Problem& p) {
              p.mask = Broadcast{Type::u8, {1, 1, 1, 1}};
            })),
            "a mask tensor is given; one pass takes causal and window only");
  EXPECT_EQ(reason_of(changed([](Problem& p) { p.B = 2, p.Nq = 7, p.Nk = 5, p.Hq = 0, p.Hk = 1; })),
            "B is 2, Nq is 7, Nk is 5, Hq is 0 and Hk is 1; one pass needs at least one of each");
  EXPECT_EQ(reason_of(plain, "sm_75"), "type is bf16; sm_75 multiplies f16 only");
  EXPECT_EQ(reason_of(api::plain_problem(Pass::backward, Type::f16, {128, 128}), "sm_75"), "");
  EXPECT_EQ(reason_of(api::plain_problem(Pass::backward, Type::f16, {64, 129}), "sm_75"),
            "D is 64 and Dv is 129; one pass has no tile for them in the class of sm_75");
  EXPECT_EQ(reason_of(changed([](Problem& p) { p.B = 1 << 20, p.Hq = p.Hk = 64; })),
            "B is 1048576, Hq is 64, Nq is 4096 and Nk is 4096, in 8589934592 tiles; one pass counts up to 2147483647");
}

// Tiles of one pass fit the class, and the parts of dQ are what its product can make.
TEST(Plans, OfOnePassFitTheClass) {
  int tiles = 0;
  for (const TileClass& of : tile_classes())
    for (std::int64_t D = 1; D <= 256; D += 15)
      for (std::int64_t Dv = 1; Dv <= 256; Dv += 15) {
        const Problem p = api::plain_problem(Pass::backward, Type::f16, {D, Dv});
        const std::optional<OnePassConfig> c = one_pass_tile(p, of);
        EXPECT_EQ(c.has_value(), !of.turing() || std::max(D, Dv) <= 128);
        if (!c) continue;
        EXPECT_GE(c->D, D);
        EXPECT_GE(c->Dv, Dv);
        EXPECT_EQ(c->turing, of.turing());
        const int reserved = of.turing() ? 0 : 1024;  // of every block
        EXPECT_LE((layout_of(*c).bytes + reserved) * c->blocks_per_sm, of.shared_bytes + reserved) << D << " " << Dv;
        const QuerySums sums = sums_of(*c);
        EXPECT_EQ(sums.columns() % 16, 0);
        EXPECT_EQ(64 % sums.columns(), 0) << "a part's columns would cross a panel";
        EXPECT_EQ(sums.part_numbers() * sums.warps, sums.tile_numbers());
        ++tiles;
      }
  EXPECT_EQ(tiles, 4 * 18 * 18 + 9 * 9);
}

// Keys of a block and queries of a tile decide about bits: they must not depend on lengths or alignment.
TEST(Plans, OfOnePassHaveTilesThatDependOnNothingThatBitsMayNot) {
  for (const char* architecture : {"sm_75", "sm_80", "sm_89", "sm_90a"})
    for (const api::HeadDims dims : {api::HeadDims{64, 64}, {128, 128}, {256, 256}}) {
      const TileClass& of = *class_of(cuda::target_named(architecture));
      if (of.turing() && dims.D > 128) continue;  // has no tile
      const Problem plain = api::plain_problem(Pass::backward, of.turing() ? Type::f16 : Type::bf16, dims);
      const OnePassConfig tile = *one_pass_tile(plain, of);
      for (const int change : {0, 1, 2, 3}) {
        Problem p = plain;
        if (change == 0) p.B = 1, p.Nq = 3, p.Nk = 100000;
        if (change == 1) p.alignment = 2;
        if (change == 2) p.dq = p.dk = p.dv = Type::f32;
        if (change == 3) p.packed = true, p.Hk = 1, p.options.causal = true;
        const OnePassConfig other = *one_pass_tile(p, of);
        EXPECT_EQ(keys_of(other), keys_of(tile)) << change;
        EXPECT_EQ(other.block_queries, tile.block_queries) << change;
      }
    }
}

TEST(Plans, OfOnePassHaveThreeLaunches) {
  Problem p = api::plain_problem(Pass::backward, Type::bf16, {64, 64});
  p.B = 3, p.Hq = 6, p.Hk = 2, p.Nq = 1000, p.Nk = 700;
  for (const bool deterministic : {true, false}) {
    p.options.deterministic = deterministic;
    const gpu::Steps steps = one_pass_kernel().plan(p, cuda::target_named("sm_90a"));
    ASSERT_EQ(steps.list.size(), 3u);
    EXPECT_EQ(steps.list[0].name, "mma_prepare");
    EXPECT_EQ(steps.list[0].blocks, 3 * 6 * 16);
    EXPECT_EQ(steps.list[1].name, "mma_one_pass");
    EXPECT_EQ(steps.list[1].blocks, 3 * 2 * 6);
    EXPECT_EQ(steps.list[2].name, "mma_finish");
    EXPECT_EQ(steps.list[2].blocks, 3 * 6 * 32);
    // A count for every tile of dQ, one of the works that are taken, and the sums.
    const std::int64_t tiles = 3 * 6 * 32, counts = deterministic ? 1 + tiles : 1;
    EXPECT_EQ(steps.own_bytes, round_up(4 * counts, 16) + tiles * 32 * 64 * 4);
  }
}

TEST(Plans, HaveABlockForEveryTileOfQueries) {
  for (const bool packed : {false, true}) {
    Problem p = api::plain_problem(Pass::forward, Type::bf16, {128, 128});
    p.B = 3, p.Hq = 6, p.Hk = 2, p.Nq = 1000, p.packed = packed;
    const gpu::Steps steps = forward_kernel().plan(p, cuda::target_named("sm_80"));
    ASSERT_EQ(steps.list.size(), 1u);
    EXPECT_EQ(steps.list.front().blocks, packed ? 6 * (1000 / 128 + 3) : 3 * 6 * 8);
    EXPECT_EQ(steps.list.front().threads, 128);
  }
  Problem none = api::plain_problem(Pass::forward, Type::bf16, {128, 128});
  none.Nq = 0;
  EXPECT_TRUE(forward_kernel().plan(none, cuda::target_named("sm_80")).list.empty());
}

}  // namespace
}  // namespace tessera::mma
