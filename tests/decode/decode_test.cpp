// SPDX-License-Identifier: Apache-2.0
// The `decode` kernels without a GPU: what ldmatrix fetches for the column engine, and bank conflicts; the merge tree;
// tiles, workspace and plans. Links tessera_cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>

#include "api/units.hpp"
#include "decode/algorithms.hpp"
#include "decode/layout.hpp"
#include "gpu/eight_bits.hpp"
#include "tests/support/fragments.hpp"

namespace tessera::decode {
namespace {

using test::conflicts, test::loaded, test::Place, test::TileMemory;

// --- fragments and banks

constexpr int all_rows[] = {8, 16, 32, 64}, all_keys[] = {32, 64};

// "mma.m16n8k16": with g = lane / 4 and t = lane % 4, register r of a holds row g + 8 (r % 2), terms 2 t + 8 (r / 2)
// and the next; register r of b holds column g, terms 2 t + 8 r and the next.
TEST(Fragments, OfVHaveDimsAsRowsAndKeysAsTerms) {
  for (const int keys : all_keys)
    for (const int warps : {4, 8}) {
      const TileMemory memory(keys, 256);
      for (int warp = 0; warp < warps; ++warp)
        for (int v = 0; v < 256 / (16 * warps); ++v)
          for (int j = 0; j < keys / 16; ++j) {
            const auto address = [&](int lane) {
              return (gpu::lane_byte(v_key(lane), v_dim(lane)) ^ gpu::column_turn(warp)) + gpu::panel_step(keys, warp) +
                     v * gpu::panel_step(keys, warps) + j * gpu::bytes_of_16_rows;
            };
            EXPECT_EQ(conflicts(16, address), 1);
            for (int lane = 0; lane < 32; ++lane)
              for (int r = 0; r < 4; ++r) {
                const int dim = 16 * (warps * v + warp) + lane / 4 + 8 * (r % 2);
                const int key = 16 * j + lane % 4 * 2 + 8 * (r / 2);
                ASSERT_EQ(loaded(memory, lane, r, true, address), std::pair(Place(key, dim), Place(key + 1, dim)));
              }
          }
    }
}

TEST(Fragments, OfQHaveRowsAsColumns) {
  for (const int rows : all_rows) {
    const TileMemory memory(rows, 256);
    for (int k = 0; k < 8; ++k)
      for (int c = 0; c < rows / 8; ++c) {
        const auto address = [&](int lane) {
          return (gpu::tile_byte(rows, q_row(lane), q_dim(lane)) ^ q_turn(k)) + q_step(rows, k) +
                 c * 8 * gpu::panel_row_bytes;
        };
        EXPECT_EQ(conflicts(16, address), 1);
        for (int lane = 0; lane < 32; ++lane)
          for (int r = 0; r < 4; ++r) {
            const int row = 8 * c + lane / 4, dim = 32 * k + 16 * (r / 2) + 8 * (r % 2) + lane % 4 * 2;
            ASSERT_EQ(loaded(memory, lane, r, false, address), std::pair(Place(row, dim), Place(row, dim + 1)));
          }
      }
  }
}

// P is stored from accumulators of S^T, whose rows are keys, and loaded as the right operand of O^T.
TEST(Fragments, OfPGoFromAccumulatorsToOperands) {
  for (const int rows : all_rows)
    for (const int keys : all_keys) {
      const TileMemory memory(keys, rows, [&](int key, int row) { return p_byte(rows, key, row); });
      for (int c = 0; c < rows / 8; ++c) {
        for (int key = 0; key < keys; key += 8) {
          const auto stored = [&](int lane) {
            const int first = p_byte(rows, key / 16 * 16 + gpu::accumulator_row(lane, 0), lane % 4 * 2);
            return (first ^ p_turn(c)) + key % 16 * rows * 2;
          };
          EXPECT_EQ(conflicts(4, stored), 1) << rows;
          for (int lane = 0; lane < 32; ++lane)
            EXPECT_EQ(memory.at(stored(lane)), Place(key + lane / 4, 8 * c + lane % 4 * 2));
        }
        for (int j = 0; j < keys / 32; ++j) {
          const auto address = [&](int lane) { return (p_byte(rows, p_key(lane), 0) ^ p_turn(c)) + j * 32 * rows * 2; };
          EXPECT_EQ(conflicts(16, address), 1) << rows;
          for (int lane = 0; lane < 32; ++lane)
            for (int r = 0; r < 4; ++r) {
              const int key = 32 * j + 16 * (r / 2) + 8 * (r % 2) + lane % 4 * 2, row = 8 * c + lane / 4;
              ASSERT_EQ(loaded(memory, lane, r, true, address), std::pair(Place(key, row), Place(key + 1, row)));
            }
        }
      }
    }
}

// O on its way to memory: value e of an accumulator, by dims and rows; then eight dims of a row by each thread.
TEST(Banks, OfOutputsHaveNoConflicts) {
  for (const int Dv : {64, 128, 192, 256})
    for (int e = 0; e < 4; ++e)
      EXPECT_EQ(
          conflicts(4, [&](int lane) { return 4 * ((lane % 4 * 2 + e % 2) * out_pitch(Dv) + lane / 4 + e / 2 * 8); }),
          1);
}

// --- the tree

struct HostMath {
  static float exp2(float x) { return std::exp2(x); }
  static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
};

bool same_bits(float a, float b) { return __builtin_bit_cast(UInt32, a) == __builtin_bit_cast(UInt32, b); }

TEST(Merge, AnEmptySideChangesNoBit) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const RowState empty{-inf, 0};
  for (const RowState state : {RowState{3, 7}, {-200, 1}, {-inf, nan}, {inf, 1}, empty})
    for (const float o : {-0.0f, 0.0f, 1e-45f, -3.5f, nan}) {
      const Merged before = merge<HostMath>(empty, state), behind = merge<HostMath>(state, empty);
      for (const RowState& after : {before.state, behind.state})
        EXPECT_TRUE(same_bits(after.m, state.m) && same_bits(after.l, state.l));
      EXPECT_TRUE(same_bits(merged<HostMath>(behind.weights, o, nan), o));
      if (!state.empty()) {
        EXPECT_TRUE(same_bits(merged<HostMath>(before.weights, nan, o), o));
      }
    }
}

TEST(Merge, IsTheUnionOfTwoSetsOfKeys) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(-30, 30);
  for (int round = 0; round < 1000; ++round) {
    const RowState a{uniform(random), 31 + uniform(random)}, b{uniform(random), 31 + uniform(random)};
    const float oa = uniform(random), ob = uniform(random);
    const Merged both = merge<HostMath>(a, b);
    const double wa = std::exp2(double(a.m) - both.state.m), wb = std::exp2(double(b.m) - both.state.m);
    EXPECT_EQ(both.state.m, std::max(a.m, b.m));
    EXPECT_NEAR(both.state.l, a.l * wa + b.l * wb, 1e-6 * both.state.l);
    EXPECT_NEAR(merged<HostMath>(both.weights, oa, ob), oa * wa + ob * wb, 1e-5);
  }
}

// A NaN among the scores of one side leaves m as it was, but not l: it must not be taken for an empty side.
TEST(Merge, KeepsNaN) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const RowState other : {RowState{3, 7}, {-inf, nan}}) {
    EXPECT_TRUE(std::isnan(merge<HostMath>({-inf, nan}, other).state.l));
    EXPECT_TRUE(std::isnan(merge<HostMath>(other, {-inf, nan}).state.l));
  }
}

TEST(Nodes, AreThoseAboveTheLeaves) {
  for (Int32 first = 0; first < 40; ++first)
    for (Int32 end = first + 1; end < 70; ++end)
      for (int level = 0; level < 8; ++level) {
        std::set<Int32> nodes;
        for (Int32 leaf = first; leaf < end; ++leaf) nodes.insert(leaf >> level);
        const Nodes above = Nodes{first, end}.above(level);
        ASSERT_EQ(above, (Nodes{*nodes.begin(), *nodes.rbegin() + 1}));
        Int32 leaves = 0;
        for (Int32 node = above.first; node < above.end; ++node)
          leaves += leaves_under({first, end}, node, level).count();
        ASSERT_EQ(leaves, end - first);
      }
  EXPECT_EQ(leaves_of({}), (Nodes{0, 1}));
  EXPECT_EQ(leaves_of({255, 257}), (Nodes{0, 2}));
  EXPECT_EQ(leaves_of({256, 512}), (Nodes{1, 2}));
  EXPECT_EQ(levels_above(1), 0);
  EXPECT_EQ(levels_above(2), 1);
  EXPECT_EQ(levels_above(33), 6);
}

// --- tiles and plans

constexpr const char* architectures[] = {"sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100a", "sm_120a"};

Problem problem(std::int64_t Nq, std::int64_t group, api::HeadDims dims, Type type = Type::bf16) {
  Problem p = api::plain_problem(Pass::forward, type, dims);
  p.Nq = Nq, p.Hq = p.Hk * group;
  return p;
}

gpu::Steps planned(const Problem& p, const char* architecture = "sm_90a") {
  return algorithms().back().plan(p, cuda::target_named(architecture));
}
gpu::Steps planned_many(const Problem& p, const char* architecture = "sm_90a") {
  return fallbacks().front().plan(p, cuda::target_named(architecture));
}

// Every number of rows has a tile, and how many keys it has depends on nothing but the GPU and the head dims.
TEST(Tiles, FitAndHaveKeysByHeadDimsAlone) {
  int tiles = 0;
  for (const char* architecture : architectures) {
    const cuda::Target target = cuda::target_named(architecture);
    for (const std::int64_t D : {8, 64, 72, 128, 192, 256})
      for (const std::int64_t Dv : {8, 64, 128, 256}) {
        const auto keys_of = [](const Config& c) { return c.tile_keys / c.parts; };  // they decide about bits
        const int keys = keys_of(*tile_of(problem(1, 1, {D, Dv}), target));
        for (const Type type : {Type::f16, Type::bf16})
          for (const std::int64_t rows : {1, 8, 9, 31, 33, 64})
            for (const int change : {0, 1, 2, 3}) {
              Problem p = problem(rows, 1, {D, Dv}, type);
              if (change == 1) p.pages = Pages{.count = 7, .v_count = 7, .size = 1, .entries = 5};
              if (change == 2) p.o_type = Type::f32, p.slopes = 1, p.options.softcap = 1;
              if (change == 3) p.B = 1, p.Nk = 1 << 20;
              const std::optional<Config> c = tile_of(p, target);
              ASSERT_TRUE(c) << architecture << " " << D << " " << Dv << " " << rows;
              const std::optional<Config> direct = tile_of(p, target, true);
              ASSERT_TRUE(direct) << architecture << " " << D << " " << Dv << " " << rows;
              EXPECT_EQ(keys_of(*c), keys);
              EXPECT_EQ(keys_of(*direct), keys);
              EXPECT_EQ(leaf_keys % c->tile_keys, 0);
              EXPECT_TRUE(c->D >= D && c->Dv >= Dv && c->stages >= 2 && c->levels >= 1);
              constexpr int reserved = 1024;
              EXPECT_LE((layout_of(*c).bytes + reserved) * c->blocks_per_sm, target.shared_bytes + reserved);
              ++tiles;
            }
      }
  }
  EXPECT_EQ(tiles, 7 * 24 * 2 * 6 * 4);
}

// What the kernel makes of a byte, but for the one instruction that the host has not.
TEST(EightBits, AreExactInF16) {
  for (UInt32 code = 0; code < 256; ++code) {
    const auto byte = static_cast<unsigned char>(code);
    const UInt32 shifted = gpu::e4m3_shifted(code << 8 | (255 - code) << 24);
    const float low = widen(F16{UInt16(shifted)}) * widen(F16{UInt16(gpu::e4m3_factor)});
    const UInt32 bits = gpu::with_nan(narrow<F16>(low).bits, shifted);
    const float wanted = widen(E4M3{byte}), got = widen(F16{UInt16(bits)});
    EXPECT_TRUE(got == wanted || (got != got && wanted != wanted)) << code << ": " << got << " and not " << wanted;
    const UInt32 biased = (gpu::i8_pair & 0xff00u) | (code ^ 0x80u);
    EXPECT_EQ(widen(F16{UInt16(biased)}) - widen(F16{UInt16(gpu::i8_bias)}), widen(static_cast<Int8>(byte)));
  }
}

TEST(Tiles, HaveAsManyRowsAsThereAre) {
  const cuda::Target target = cuda::target_named("sm_90a");
  const std::pair<std::int64_t, int> expected[] = {{1, 8}, {8, 8}, {9, 16}, {17, 32}, {33, 64}, {64, 64}};
  for (const auto& [rows, tile] : expected) {
    EXPECT_EQ(tile_of(problem(rows, 1, {128, 128}), target)->rows, tile);
    EXPECT_EQ(tile_of(problem(rows, 1, {192, 128}), target)->rows, std::min(tile, 32));
    Problem scaled = problem(rows, 1, {128, 128}), latent = problem(rows, 1, {64, 512});
    scaled.k_scale = 1, latent.qv = true;
    EXPECT_EQ(tile_of(scaled, target)->rows, std::min(tile, 32));
    EXPECT_EQ(tile_of(latent, target)->rows, std::min(tile, 16));
    Problem grouped = problem(rows, 1, {256, 256});
    grouped.v_scale = latent.v_scale = scaled.v_scale = 4;
    EXPECT_EQ(tile_of(scaled, target)->rows, std::min(tile, 32));
    EXPECT_EQ(tile_of(grouped, target)->rows, std::min(tile, 16));
    EXPECT_EQ(tile_of(latent, target)->rows, 8);
  }
}

// Scales of 128 dims: of dims that one covers, and of keys alone, too.
TEST(Tiles, HaveGroupsOfDims) {
  const cuda::Target target = cuda::target_named("sm_90a");
  const auto groups = [&](api::HeadDims dims, int k_scale, int v_scale) {
    Problem p = problem(1, 1, dims);
    p.k_scale = k_scale, p.v_scale = v_scale;
    const Config c = *tile_of(p, target);
    return std::pair{c.k_groups, c.v_groups};
  };
  EXPECT_EQ(groups({128, 128}, 4, 4), (std::pair{1, 1}));
  EXPECT_EQ(groups({192, 128}, 4, 4), (std::pair{2, 1}));
  EXPECT_EQ(groups({256, 256}, 4, 3), (std::pair{2, 1}));
  EXPECT_EQ(groups({256, 256}, 0, 4), (std::pair{1, 2}));
  EXPECT_EQ(groups({576, 512}, 4, 4), (std::pair{5, 4}));
}

TEST(Plans, AreTwoLaunches) {
  for (const char* architecture : architectures) {
    const gpu::Steps steps = planned(problem(1, 4, {128, 128}), architecture);
    ASSERT_EQ(steps.reason, "");
    ASSERT_EQ(steps.list.size(), 2U);
    EXPECT_EQ(steps.list[0].name, "decode_schedule");
    EXPECT_EQ(steps.list[1].name, "decode_attend");
    EXPECT_EQ(steps.list[0].blocks, 1);
    EXPECT_LE(steps.list[1].blocks, 2 * cuda::target_named(architecture).multiprocessors);
  }
  Problem none = problem(0, 1, {64, 64});
  EXPECT_EQ(planned(none).reason, "");
  EXPECT_TRUE(planned(none).list.empty());
}

// `decode_direct`: the same launches without a queue; where GPUs have clusters, one.
TEST(Plans, HaveNoQueueWhereWorkItemsAreFew) {
  const auto direct = [](const Problem& p, const char* architecture = "sm_90a") {
    return algorithms().front().plan(p, cuda::target_named(architecture));
  };
  const auto expect_tiles = [&](Problem p, const char* wanted, int threads) {
    p.Nk = 1000;
    const gpu::Steps steps = direct(p);
    ASSERT_EQ(steps.reason, "");
    ASSERT_EQ(steps.list.size(), 1U);
    EXPECT_EQ(steps.list.back().tiles, wanted);
    EXPECT_EQ(steps.list.back().threads, threads);
    EXPECT_EQ(steps.list.back().blocks % steps.list.back().cluster, 0);
    EXPECT_EQ(planned(p).list.back().tiles.find("queue"), std::string::npos);
  };
  Problem p = problem(1, 4, {128, 128});
  p.B = 8, p.Hk = 8, p.Hq = 32;
  expect_tiles(p, "tiles of 8 rows x 128 keys, 8 warps, no schedule", 256);
  p.B = 5;
  EXPECT_EQ(direct(p, "sm_86").list.back().tiles, "tiles of 8 rows x 64 keys, 8 warps, no queue");
  p.B = 8, p.Nk = 8193;
  EXPECT_EQ(direct(p).list.back().cluster, 2);
  EXPECT_EQ(direct(p).list.back().tiles, "tiles of 8 rows x 128 keys, 8 warps, no schedule");
  p.B = 1;  // clusters would not find room at the same time
  EXPECT_EQ(direct(p).list.back().cluster, 1);
  EXPECT_EQ(direct(p).list.back().tiles, "tiles of 8 rows x 128 keys, 8 warps, no queue");
  for (const auto& [D, Nk, blocks] :
       {std::tuple(128, 1024, 4), {128, 2048, 8}, {128, 2049, 1}, {64, 4096, 16}, {64, 4097, 1}}) {
    Problem few = problem(1, 4, {D, D});  // a block has one leaf, or there is no cluster
    few.B = 1, few.Nk = Nk;
    EXPECT_EQ(direct(few).list.back().cluster, blocks) << D << " " << Nk;
  }
  Problem uneven = p;  // a queue makes up for what differs
  uneven.B = 8, uneven.Nk = 4096, uneven.seqused_k = true;
  EXPECT_EQ(direct(uneven).reason, "");
  uneven.Nk = 4097;
  EXPECT_EQ(direct(uneven).reason,
            "B is 8, Nq is 1 and Hk is 8: 8 tiles of rows in clusters of 2, of which one may have 4097 keys and the "
            "others none; without a queue this kernel takes at most 2048 for each block then");
  uneven.B = 1;
  EXPECT_EQ(direct(uneven).reason, "");
  p.B = 6;
  EXPECT_EQ(direct(p, "sm_86").reason,
            "B is 6, Nq is 1 and Hk is 8: 6 tiles of rows, times Hk 48; without a queue this kernel takes at most 42");
  p.B = 17;
  EXPECT_EQ(direct(p).reason,
            "B is 17, Nq is 1 and Hk is 8: 17 tiles of rows, times Hk 136; without a queue this kernel takes at most "
            "132");
  p.B = 16, p.k_type = p.v_type = Type::e4m3;
  EXPECT_NE(direct(p).reason, "");
  expect_tiles(problem(1, 4, {128, 64}), "tiles of 8 rows x 64 keys, 4 warps, no schedule", 128);
  expect_tiles(problem(4, 4, {64, 128}), "tiles of 16 rows x 128 keys, 8 warps, no schedule", 256);
  expect_tiles(problem(16, 4, {64, 64}), "tiles of 32 rows x 64 keys, 4 warps, no schedule", 128);
  p = problem(16, 4, {256, 256});  // two tiles for a sequence of 16 queries, six by tokens
  p.packed = true, p.B = 4, p.options.max_seqlen_q = 16;
  EXPECT_EQ(direct(p).reason, "tiles of rows are numbered by packed tokens; without a queue, by sequences");
  EXPECT_EQ(direct(problem(17, 4, {64, 64})).reason, planned(problem(17, 4, {64, 64})).reason);
}

TEST(Plans, SayWhatTheyRefuse) {
  const auto reason = [](const Problem& p, const char* architecture = "sm_90a") {
    return planned(p, architecture).reason;
  };
  Problem p = problem(1, 4, {64, 64});
  EXPECT_EQ(reason(p), "");
  EXPECT_EQ(reason(p, "sm_75"), "the GPU is sm_75; this kernel runs on sm_80 and later");
  p.q_type = Type::f32;
  EXPECT_EQ(reason(p), "type is f32; this kernel takes f16 and bf16");
  EXPECT_EQ(reason(problem(17, 4, {64, 64})),
            "Nq is 17 and 4 heads share a KV head; this kernel takes at most 64 rows of queries for each");
  EXPECT_EQ(reason(problem(16, 4, {64, 64})), "");
  EXPECT_EQ(reason(problem(1, 1, {576, 512})), "");
  EXPECT_EQ(reason(problem(1, 1, {576, 512}), "sm_89"), "no tile fits the 101376 bytes of shared memory");
  p = problem(1, 4, {64, 64}), p.k_type = Type::e4m3, p.v_type = Type::i8;
  EXPECT_EQ(reason(p), "");
  p.v_type = Type::bf16;
  EXPECT_EQ(reason(p), "v has type bf16; beside these types of q, k and v this kernel takes e4m3, i8 and f16");
  p.k_type = Type::f16;
  EXPECT_EQ(reason(p), "k has type f16; beside these types of q, k and v this kernel takes e4m3, i8 and bf16");
  p = problem(1, 4, {64, 64}), p.alignment = 8;
  EXPECT_EQ(reason(p), "q, k and v are aligned to 8 bytes; this kernel copies 16 at a time");
  p = problem(1, 4, {64, 64}), p.bias = Broadcast{Type::bf16, {1, 1, 1, 1}};
  EXPECT_EQ(reason(p), "a bias is given; this kernel takes softcap and ALiBi");
  p.bias.reset(), p.mask = Broadcast{Type::u8, {1, 1, 1, 1}};
  EXPECT_EQ(reason(p), "a mask is given; this kernel takes softcap and ALiBi");
  p.mask.reset(), p.options.dropout = 0.5;
  EXPECT_EQ(reason(p), "dropout is 0.5; this kernel has none");
  p = problem(1, 4, {64, 64}), p.Nk = (std::int64_t{1} << 30) + 1;
  EXPECT_EQ(reason(p), "Nk is 1073741825; this kernel counts up to 1073741824 keys");
  p = problem(1, 4, {64, 64}), p.B = std::int64_t{1} << 26, p.Hk = 2, p.Hq = 8;
  EXPECT_EQ(reason(p), "B is 67108864, Nq is 1 and Hk is 2; this kernel counts up to 67108864 groups of 8 rows");
  EXPECT_EQ(planned(api::plain_problem(Pass::backward, Type::bf16, {64, 64})).reason,
            "pass is backward; this kernel is for the forward pass");
  // A packed batch may be of one long sequence, unless the caller says that it is not.
  p = problem(65, 1, {64, 64}), p.packed = true;
  EXPECT_NE(reason(p), "");
  p.options.max_seqlen_q = 64;
  EXPECT_EQ(reason(p), "");
}

// More rows: the same two launches, the same compiled kernels, tile after tile. Tokens bound what is packed, whatever
// the longest sequence may be.
TEST(Plans, OfManyRowsAreThoseOfFew) {
  for (const char* architecture : architectures)
    for (const api::HeadDims dims : {api::HeadDims{64, 64}, {128, 128}, {64, 512}}) {
      Problem few = problem(64, 1, dims), many = problem(1, 128, dims);
      few.qv = many.qv = dims.Dv == 512;
      const gpu::Steps steps = planned_many(many, architecture);
      ASSERT_EQ(steps.reason, "");
      ASSERT_EQ(steps.list.size(), 2U);
      for (std::size_t n = 0; n < 2; ++n) EXPECT_EQ(steps.list[n].unit, planned(few, architecture).list[n].unit);
      EXPECT_EQ(planned_many(few, architecture).reason,
                "no sequence has more than 64 rows of queries for each KV head");
      many.alignment = 8;
      EXPECT_EQ(planned_many(many, architecture).reason,
                "q, k and v are aligned to 8 bytes; this kernel copies 16 at a time");
    }
  constexpr std::int64_t MB = 1 << 20;
  Problem p = problem(100'000, 4, {128, 128});
  p.packed = true, p.B = 4096, p.Nk = 1 << 20;
  EXPECT_LT(planned_many(p).own_bytes, 80 * MB);
  p.packed = false;
  EXPECT_EQ(planned_many(p).reason,
            "B is 4096, Nq is 100000 and Hk is 8; this kernel counts up to 67108864 groups of 8 rows");
}

// From upper bounds alone, and of a size that does not follow the batch.
TEST(Plans, BoundTheWorkspace) {
  constexpr std::int64_t MB = 1 << 20;
  Problem p = problem(1, 4, {128, 128});
  p.B = 64, p.Hk = 8, p.Hq = 32, p.Nk = 131072;
  EXPECT_LT(planned(p).own_bytes, 24 * MB);
  p.B = 4096;
  EXPECT_LT(planned(p).own_bytes, 26 * MB);
  p.B = 1, p.Nk = 256;  // one leaf: nothing to merge
  EXPECT_LT(planned(p).own_bytes, 1024);
  p.Nk = 257, p.Hk = 1, p.Hq = 4;
  EXPECT_LT(planned(p).own_bytes, 20000);
}

// Whatever lengths turn out to be, every work item has a place, and every family a count.
TEST(Plans, HoldTheWorkspaceThatLengthsCanAskFor) {
  for (const std::int64_t B : {1, 3, 64})
    for (const std::int64_t Nk : {1, 256, 257, 5000, 131072, 1 << 24})
      for (const std::int64_t Nq : {1, 16, 64}) {
        Problem p = problem(Nq, 1, {128, 128});
        p.B = B, p.Nk = Nk;
        const cuda::Target target = cuda::target_named("sm_90a");
        const Config c = *tile_of(p, target);
        const Carved carved = carve(p, target, c, nullptr);
        const std::int64_t groups = p.B * p.Hk * ceil_div(Nq, c.rows);
        EXPECT_EQ(carved.memory.most_items, groups + carved.memory.most_slots);
        const int levels = levels_above(ceil_div(Nk, leaf_keys));
        EXPECT_GE(carved.memory.climbs * family_levels, levels);
        EXPECT_GE(carved.memory.stack_levels + c.levels, levels);
        EXPECT_EQ(carved.memory.most_slots == 0, Nk <= leaf_keys);
      }
}

}  // namespace
}  // namespace tessera::decode
