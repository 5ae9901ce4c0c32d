// SPDX-License-Identifier: Apache-2.0
// The Hopper kernels without a GPU: where tensor copies, wgmma and stmatrix put and look for elements, emulated as the
// PTX ISA describes it; and plans. Links tessera_static.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "api/kernels.hpp"
#include "api/units.hpp"
#include "cuda/device.hpp"
#include "sm90/layout.hpp"
#include "sm90/plan.hpp"
#include "sm90/tiles.hpp"

namespace tessera::sm90 {
namespace {

// --- layouts

// Shared memory as numbered elements of two bytes: what a tensor copy of a tile of `rows` x `columns` leaves there.
class Memory {
 public:
  Memory(int rows, int columns) : rows(rows), columns(columns) {
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < columns; ++column) place(copied_to(row, column), row, column);
  }
  std::pair<int, int> at(UInt32 byte) const { return cells.at(byte); }
  std::size_t size() const { return cells.size(); }

  // The copy with a 128-byte swizzle: panels of 64 columns one after another; bits 4 to 6 of an address are those of
  // the plain one xor its bits 7 to 9.
  UInt32 copied_to(int row, int column) const {
    const UInt32 plain = UInt32(column / 64 * rows * 128 + row * 128 + column % 64 * 2);
    return swizzled(plain);
  }
  static UInt32 swizzled(UInt32 byte) { return byte ^ (byte >> 7 & 7) << 4; }

 private:
  void place(UInt32 byte, int row, int column) {
    EXPECT_TRUE(cells.emplace(byte, std::pair{row, column}).second) << "two elements at byte " << byte;
  }
  int rows, columns;
  std::map<UInt32, std::pair<int, int>> cells;
};

struct Fields {
  UInt32 start, leading, stride;
};
Fields fields_of(Operand o) {
  EXPECT_EQ(o.bits >> 62, 1u) << "128-byte swizzle";
  return {UInt32(o.bits & 0x3fff) * 16, UInt32(o.bits >> 16 & 0x3fff) * 16, UInt32(o.bits >> 32 & 0x3fff) * 16};
}

// Where wgmma looks for element (row, k) of an operand whose contraction runs along its rows, and for (k, column) of
// one whose contraction runs over its rows.
UInt32 fetched_along_rows(Operand o, int row, int k) {
  const Fields f = fields_of(o);
  return Memory::swizzled(f.start + UInt32(row / 8) * f.stride + UInt32(row % 8 * 128 + k * 2));
}
UInt32 fetched_over_rows(Operand o, int k, int column) {
  const Fields f = fields_of(o);
  return Memory::swizzled(f.start + UInt32(column / 64) * f.leading + UInt32(k / 8) * f.stride +
                          UInt32(k % 8 * 128 + column % 64 * 2));
}

TEST(Layout, TileByteIsWhereTensorCopiesPutAnElement) {
  for (const auto& [rows, columns] : {std::pair{64, 128}, {96, 64}, {128, 192}, {64, 256}}) {
    const Memory memory(rows, columns);
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < columns; ++column)
        ASSERT_EQ(UInt32(tile_byte(rows, row, column)), memory.copied_to(row, column)) << row << " " << column;
  }
}

TEST(Layout, ProductsAlongRowsFetchTheirOperands) {
  for (const auto& [rows, columns] : {std::pair{64, 64}, {96, 64}, {128, 128}, {64, 192}, {64, 256}}) {
    const Memory memory(rows, columns);
    for (int step = 0; step < columns / 16; ++step)
      for (int row = 0; row < rows; ++row)
        for (int k = 0; k < 16; ++k) {
          const Operand o = along_rows(0).plus(step_along_rows(rows, step));
          ASSERT_EQ(memory.at(fetched_along_rows(o, row, k)), (std::pair{row, 16 * step + k}));
        }
  }
}

TEST(Layout, ProductsOverRowsFetchTheirOperands) {
  for (const auto& [rows, columns] : {std::pair{96, 64}, {128, 128}, {96, 128}, {64, 192}, {64, 256}}) {
    const Memory memory(rows, columns);
    for (int step = 0; step < rows / 16; ++step)
      for (int k = 0; k < 16; ++k)
        for (int column = 0; column < columns; ++column) {
          const Operand o = over_rows(0, rows).plus(step_over_rows(step));
          ASSERT_EQ(memory.at(fetched_over_rows(o, k, column)), (std::pair{16 * step + k, column}));
        }
  }
}

// PTX ISA, "Register fragments": of 16 columns of an operand in registers, register r of a thread holds the columns
// 2 (thread % 4) + 8 (r / 2) and the next one, of the row thread % 32 / 4 + 8 (r % 2) of its warp's 16.
TEST(Layout, PackedAccumulatorsAreAnOperand) {
  for (int thread = 0; thread < 128; ++thread)
    for (int k = 0; k < 8; ++k)
      for (int r = 0; r < 4; ++r)
        for (int half = 0; half < 2; ++half) {
          const int n = 8 * k + 2 * r + half;  // registers are packed pairs, in their order
          EXPECT_EQ(accumulator_row(thread, n), thread / 32 * 16 + thread % 32 / 4 + 8 * (r % 2));
          EXPECT_EQ(accumulator_column(thread, n), 16 * k + 2 * (thread % 4) + 8 * (r / 2) + half);
        }
}

// stmatrix.x4: lanes 8 r ... 8 r + 7 give the addresses of the eight rows of matrix r, whose element (i, j) comes from
// lane 4 i + j / 2, half j % 2 of register r.
TEST(Layout, StoredMatricesFormATile) {
  constexpr int columns = 128;
  const Memory memory(64, columns);
  std::size_t stored = 0;
  for (int warp = 0; warp < 4; ++warp)
    for (int k = 0; k < columns / 16; ++k)
      for (int r = 0; r < 4; ++r)
        for (int i = 0; i < 8; ++i)
          for (int j = 0; j < 8; ++j, ++stored) {
            const int addressing = warp * 32 + 8 * r + i, owning = warp * 32 + 4 * i + j / 2;
            const int byte = tile_byte(64, store_row(addressing), store_column(addressing, k)) + 2 * j;
            const int n = 8 * k + 2 * r + j % 2;
            ASSERT_EQ(memory.at(UInt32(byte)), (std::pair{accumulator_row(owning, n), accumulator_column(owning, n)}));
          }
  EXPECT_EQ(stored, memory.size());
}

// --- plans

constexpr api::HeadDims tile_dims[] = {{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};

// What changes a tile, one at a time.
struct Option {
  const char* name;
  void (*apply)(Problem& p);
};
const Option options[] = {
    {"softcap", [](Problem& p) { p.options.softcap = 30; }},
    {"alibi", [](Problem& p) { p.slopes = 1; }},
    {"mask",
     [](Problem& p) {
       p.mask = Broadcast{Type::u8, {1, 1, p.Nq, p.Nk}};
     }},
    {"bias",
     [](Problem& p) {
       p.bias = Broadcast{p.q_type, {p.B, p.Hq, p.Nq, p.Nk}};
     }},
    {"f32 bias",
     [](Problem& p) {
       p.bias = Broadcast{Type::f32, {p.B, p.Hq, p.Nq, p.Nk}};
     }},
    {"dropout", [](Problem& p) { p.options.dropout = 0.1; }},
    {"scale", [](Problem& p) { p.options.scale = -1; }},
    {"f32 O", [](Problem& p) { p.o_type = Type::f32; }},
};

const cuda::Target target = cuda::target_named("sm_90a");

// What a kernel launches for a problem, by its name.
gpu::Steps steps_of(const std::string& kernel, const Problem& p) {
  for (const gpu::Algorithm& algorithm : api::gpu_algorithms())
    if (algorithm.name == kernel) return algorithm.plan(p, target);
  return gpu::Steps::refused("there is no kernel " + kernel);
}

ForwardPlan hopper_plan(const Problem& p) { return plan_forward(p, cuda::target_named("sm_90a")); }

// Calls f with every head dim that has a tile, both types, and every set of options.
template <class Function>
void for_plans(Function f, Pass pass = Pass::forward) {
  for (const api::HeadDims dims : tile_dims)
    for (const Type type : {Type::f16, Type::bf16})
      for (unsigned set = 0; set < 1u << std::size(options); ++set) {
        Problem p = api::plain_problem(pass, type, dims);
        std::string name = api::text_of(dims);
        for (std::size_t n = 0; n < std::size(options); ++n)
          if (set >> n & 1) options[n].apply(p), name += ", ", name += options[n].name;
        f(p, name);
        if (testing::Test::HasFatalFailure()) return;
      }
}

TEST(Plan, EveryOptionIsTakenAndItsTilesFit) {
  const int room = cuda::target_named("sm_90a").shared_bytes;
  for_plans([&](const Problem& p, const std::string& name) {
    const ForwardPlan plan = hopper_plan(p);
    ASSERT_EQ(plan.reason, "") << name;
    const Layout l = layout_of(plan.config);
    ASSERT_LE(l.bytes, room) << name;
    for (const int offset : {l.Q, l.K, l.V, l.O, l.q_bytes, l.k_bytes, l.v_bytes, l.o_bytes})
      ASSERT_EQ(offset % 1024, 0) << name;
  });
}

// `c`: of either pass.
template <class AnyConfig>
void expect_options(const AnyConfig& c, const Problem& p, const std::string& name) {
  const gpu::ScoreConfig& o = c.options;
  ASSERT_EQ(o.softcap, p.options.softcap > 0) << name;
  ASSERT_EQ(o.alibi, p.slopes > 0) << name;
  ASSERT_EQ(o.mask, p.mask.has_value()) << name;
  ASSERT_EQ(o.dropout, p.options.dropout > 0) << name;
  ASSERT_EQ(o.bias, !p.bias                      ? Element::none
                    : p.bias->type == Type::f32  ? Element::f32
                    : p.bias->type == Type::bf16 ? Element::bf16
                                                 : Element::f16)
      << name;
  // A maximum of products is one of scores, and -inf times their factor is -inf, only if that is positive and nothing
  // comes on top.
  const bool any = o.softcap || o.alibi || o.mask || o.dropout || p.bias || p.options.scale <= 0;
  ASSERT_EQ(c.general, any) << name;
}

TEST(Plan, TheKernelKnowsWhichOptionsAreOn) {
  for_plans([&](const Problem& p, const std::string& name) {
    const Config c = hopper_plan(p).config;
    expect_options(c, p, name);
    ASSERT_EQ(c.o == Element::f32, p.o_type == Type::f32) << name;
    ASSERT_FALSE(c.stages_O && c.o == Element::f32) << name << ": O's tile has 16-bit elements";
    ASSERT_EQ(c.halves_S, p.q_type == Type::f16 && p.D > 128) << name;
    ASSERT_FALSE(c.general && c.p_buffers != 1) << name << ": scores are replaced one by one, in their place";
  });
}

// Or a sequence's bits would depend on its company.
TEST(Plan, TilesDoNotDependOnLengthsHeadsOrBatch) {
  for_plans([&](const Problem& p, const std::string& name) {
    Problem other = p;
    other.B = 7, other.Nq = 1, other.Nk = 77, other.Hq = 16, other.Hk = 2, other.packed = true;
    other.seqused_k = true, other.options.causal = true, other.options.window_left = 5, other.sinks = true;
    ASSERT_EQ(hopper_plan(p).config, hopper_plan(other).config) << name;
  });
}

TEST(Plan, HeadDimsBetweenTilesArePadded) {
  for (const auto& [D, Dv, tile_D, tile_Dv] : {std::tuple{8, 8, 64, 64},
                                               {40, 64, 64, 64},
                                               {64, 72, 128, 128},
                                               {96, 96, 128, 128},
                                               {136, 8, 192, 128},
                                               {160, 160, 192, 192},
                                               {200, 64, 256, 256},
                                               {8, 256, 256, 256}}) {
    const Config c = hopper_plan(api::plain_problem(Pass::forward, Type::bf16, {D, Dv})).config;
    EXPECT_EQ(c.D, tile_D) << D << " " << Dv;
    EXPECT_EQ(c.Dv, tile_Dv) << D << " " << Dv;
  }
}

TEST(Plan, RefusalsNameWhatIsInTheWay) {
  const auto reason = [&](auto change) {
    Problem p = api::plain_problem(Pass::forward, Type::bf16, {128, 128});
    change(p);
    return hopper_plan(p).reason;
  };
  EXPECT_EQ(reason([](Problem&) {}), "");
  EXPECT_EQ(reason([](Problem& p) { p.q_type = Type::f32; }), "type is f32; this kernel takes f16 and bf16");
  EXPECT_EQ(reason([](Problem& p) { p.alignment = 8; }),
            "pointers and strides are aligned to 8 bytes; tensor copies need 16");
  EXPECT_EQ(reason([](Problem& p) { p.D = 264; }), "D is 264 and Dv is 128; this kernel has tiles up to 256");
  EXPECT_EQ(reason([](Problem& p) { p.B = 2, p.Nk = 0; }),
            "B is 2, Nq is 4096, Nk is 0, Hq is 8 and Hk is 8; tensor copies need at least one of each");
  EXPECT_NE(reason([](Problem& p) { p.B = 0; }), "");
  EXPECT_EQ(reason([](Problem& p) { p.Hq = p.Hk = 0; }),
            "B is 2, Nq is 4096, Nk is 4096, Hq is 0 and Hk is 0; tensor copies need at least one of each");
  EXPECT_EQ(reason([](Problem& p) { p.k_type = Type::e4m3; }),
            "k or v has another type than q, or scales; this kernel takes neither");
  EXPECT_EQ(reason([](Problem& p) { p.pages = Pages{.count = 9, .v_count = 9, .size = 15, .entries = 256}; }),
            "pages hold 15 keys; tensor copies of them are too small below 16");
  EXPECT_EQ(reason([](Problem& p) { p.far_strides = true; }),
            "a stride is negative, or 2^40 bytes or more; tensor copies take strides from 0 to below that");
  EXPECT_EQ(reason([](Problem& p) { p.B = 1 << 27; }),
            "B is 134217728, Hq is 8, Hk is 8, Nq is 4096 and Nk is 4096, in 34359738368 tiles; this kernel counts up "
            "to 1073741824");
  EXPECT_EQ(reason([](Problem& p) { p.Nq = std::int64_t{1} << 31; }),
            "Nq is 2147483648 and Nk is 4096; this kernel counts up to 536870912 tokens");
  EXPECT_EQ(plan_forward(api::plain_problem(Pass::forward, Type::bf16, {128, 128}), cuda::target_named("sm_80")).reason,
            "the GPU is sm_80; this kernel needs sm_90a");
}

BackwardPlan backward_plan(const Problem& p) { return plan_backward(p, cuda::target_named("sm_90a")); }

TEST(BackwardPlan, EveryOptionIsTakenAndItsTilesFit) {
  const int room = cuda::target_named("sm_90a").shared_bytes;
  const auto fits = [&](const Problem& p, const std::string& name, std::size_t passes) {
    const BackwardPlan plan = backward_plan(p);
    ASSERT_EQ(plan.reason, "") << name;
    ASSERT_EQ(plan.passes.size(), passes) << name;
    for (const BackwardPlan::Pass& pass : plan.passes) {
      const BackwardConfig& c = pass.config;
      const BackwardLayout l = layout_of(c);
      ASSERT_LE(l.bytes, room) << name;
      for (const int offset : {l.row_QK, l.row_VO, l.column_QK, l.column_VO, l.P, l.row_QK_bytes, l.row_VO_bytes,
                               l.column_QK_bytes, l.column_VO_bytes, l.P_bytes})
        ASSERT_EQ(offset % 1024, 0) << name;
      ASSERT_EQ(c.block_columns % 16, 0) << name << ": columns are contracted 16 at a time";
      // One tile's sums may be multiplied together with the next one's scores.
      ASSERT_TRUE(c.stages >= 2 && (c.vo_stages >= 2 || c.dV == Element::none)) << name;
      const bool whole = c.warpgroups == 2 && c.dQK != Element::none && c.dV != Element::none;
      ASSERT_TRUE(whole || !c.paired) << name << ": half a pair";
      ASSERT_EQ(c.halves_S, p.q_type == Type::f16 && p.D > 128) << name << ": P would not be the forward pass's";
      ASSERT_FALSE(c.paired && c.drains) << name << ": pairs have no such text";
      expect_options(c, p, name);
    }
  };
  const auto every = [&](const Problem& p, const std::string& name) {
    fits(p, name, 2);
    Problem one = p;
    one.dk.reset();
    fits(one, name + ", no dK", 2);
    one.dk.swap(one.dv);
    fits(one, name + ", no dV", 2);
  };
  for_plans(every, Pass::backward);
}

// Or a sequence's bits would depend on its company.
TEST(BackwardPlan, TilesDoNotDependOnLengthsHeadsOrBatch) {
  const auto same = [&](const Problem& p, const std::string& name) {
    Problem other = p;
    other.B = 7, other.Nq = 1, other.Nk = 77, other.Hq = 16, other.Hk = 2, other.packed = true;
    other.seqused_k = true, other.options.causal = true, other.options.window_left = 5, other.sinks = true;
    for (std::size_t n = 0; n < 2; ++n)
      ASSERT_EQ(backward_plan(p).passes[n].config, backward_plan(other).passes[n].config) << name;
  };
  for_plans(same, Pass::backward);
}

TEST(BackwardPlan, OnlyWhatIsAskedForIsComputed) {
  Problem p = api::plain_problem(Pass::backward, Type::bf16, {96, 80});
  ASSERT_EQ(backward_plan(p).passes.size(), 2u);
  EXPECT_EQ(backward_plan(p).passes[0].config.side, Side::queries);
  EXPECT_EQ(backward_plan(p).passes[0].config.D, 128);
  p.dq.reset(), p.dv = Type::f32;
  ASSERT_EQ(backward_plan(p).passes.size(), 1u);
  const BackwardConfig keys = backward_plan(p).passes[0].config;
  EXPECT_EQ(keys.side, Side::keys);
  EXPECT_EQ(keys.dQK, Element::bf16);
  EXPECT_EQ(keys.dV, Element::f32);
  p.dk.reset(), p.dv.reset();
  EXPECT_TRUE(backward_plan(p).passes.empty());
  const auto names = [&] {
    std::string all;
    for (const gpu::Step& step : steps_of("hopper_two_pass", p).list) all += step.name + " ";
    return all;
  };
  EXPECT_EQ(names(), "delta ");
  p.sinks = true, p.dsinks = Type::f32;
  EXPECT_EQ(names(), "delta sink_gradient ");
  p.bias = Broadcast{Type::bf16, {1, 1, 1, 1}}, p.dbias = Type::bf16;
  EXPECT_EQ(names(), "delta vector_bias_gradient sink_gradient ");
}

TEST(BackwardPlan, RefusalsNameWhatIsInTheWay) {
  const auto reason = [&](auto change) {
    Problem p = api::plain_problem(Pass::backward, Type::bf16, {128, 128});
    change(p);
    return backward_plan(p).reason;
  };
  EXPECT_EQ(reason([](Problem&) {}), "");
  EXPECT_EQ(reason([](Problem& p) { p.q_type = Type::f32; }), "type is f32; this kernel takes f16 and bf16");
  EXPECT_EQ(reason([](Problem& p) { p.d_o = Type::f32; }),
            "dO is f32 and Q is bf16; this kernel takes both in one type");
  EXPECT_EQ(reason([](Problem& p) { p.Dv = 257; }), "D is 128 and Dv is 257; this kernel has tiles up to 256");
}

// Kernels that know no options of scores, of Hopper and of the ladder, get their reasons from one place.
TEST(Plan, OptionsOfScoresAreRefusedByName) {
  const struct {
    void (*change)(Problem&);
    const char* reason;
  } rows[] = {
      {[](Problem& p) { p.options.softcap = 5; }, "softcap is 5"},
      {[](Problem& p) { p.options.dropout = 0.25; }, "dropout is 0.25"},
      {[](Problem& p) { p.slopes = 1; }, "ALiBi slopes are given"},
      {[](Problem& p) {
         p.bias = Broadcast{Type::bf16, {1, 1, 1, 1}};
       },
       "a bias is given"},
  };
  for (const auto& row : rows) {
    Problem p = api::plain_problem(Pass::backward, Type::bf16, {128, 128});
    EXPECT_EQ(steps_of("hopper_one_pass", p).reason, "");
    EXPECT_EQ(steps_of("naive", p).reason, "");
    row.change(p);
    EXPECT_EQ(steps_of("hopper_one_pass", p).reason, std::string(row.reason) + "; one pass takes none");
    EXPECT_EQ(steps_of("naive", p).reason, std::string(row.reason) + "; this rung takes none");
  }
}

TEST(Plan, EveryTileHasANumberAndABlock) {
  for (const std::int64_t N : {1, 64, 129, 4096, 5000}) {
    Problem p = api::plain_problem(Pass::forward, Type::f16, {64, 64});
    p.B = 3, p.Hq = 6, p.Hk = 2, p.Nq = N;
    const ForwardPlan plan = hopper_plan(p);
    const int rows = rows_of(plan.config);
    EXPECT_EQ(plan.tiles, 18 * ((N + rows - 1) / rows));
    EXPECT_EQ(18 % plan.section, 0) << "sections hold whole heads";
    EXPECT_LE(plan.grid, plan.tiles);
    EXPECT_GE(plan.grid, 1);
  }
}

// Tensor cores cut sums off: the scale makes up for it, by less than LSE's own bound.
TEST(Plan, TheScaleIsCorrectedByAFewRoundings) {
  for_plans([](const Problem& p, const std::string& name) {
    const double factor = score_scale(p) / p.options.scale;
    ASSERT_GE(factor, 1) << name;
    ASSERT_LE(factor, 1 + 8 * 0x1p-24) << name;
  });
}

}  // namespace
}  // namespace tessera::sm90
