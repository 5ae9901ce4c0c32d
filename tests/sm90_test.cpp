// The Hopper kernels without a GPU: where tensor copies, wgmma and stmatrix put and look for elements, emulated as the
// PTX ISA describes it; the barrier protocol of producer and consumers, run as state machines in random order; plans.
// Links tessera_static.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <vector>

#include "api/units.hpp"
#include "cuda/device.hpp"
#include "sm90/layout.hpp"
#include "sm90/plan.hpp"

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

TEST(Layout, SharedMemoryFitsAndTilesAreAligned) {
  for (const api::HeadDims dims : {api::HeadDims{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}}) {
    const ForwardPlan plan =
        plan_forward(api::plain_problem(Pass::forward, Type::bf16, dims), cuda::target_named("sm_90a"));
    ASSERT_EQ(plan.reason, "");
    const Layout l = layout_of(plan.config);
    EXPECT_LE(l.bytes, cuda::target_named("sm_90a").shared_bytes) << dims.D;
    for (const int offset : {l.Q, l.K, l.V, l.O, l.q_bytes, l.k_bytes, l.v_bytes, l.o_bytes})
      EXPECT_EQ(offset % 1024, 0);
  }
}

// --- the protocol of barriers, as in sm90/kernel/forward.cuh

// mbarrier: phases end when all arrivals and all announced bytes (here: one announced copy) are in.
struct ModelBarrier {
  int count = 0, arrived = 0, copies = 0, phase = 0;
  bool done(int parity) const { return phase % 2 != parity; }  // the phase of this parity has ended
  void arrive() { ++arrived, settle(); }
  void expect() { ++copies, arrive(); }
  void complete() { --copies, settle(); }
  void settle() {
    ASSERT_LE(arrived, count);
    if (arrived == count && copies == 0) arrived = 0, ++phase;
  }
};

struct Slot {
  ModelBarrier full, empty;
  int holds = -1;  // which tile of which work
  int readers = 0;
};

// One role's program: a list of operations, each of which may have to wait. Returns false while it waits.
using Operation = std::function<bool()>;

struct Model {
  int warpgroups, stages;
  std::vector<int> tiles;  // of keys, per tile of queries
  bool O_in_Q;
  std::vector<Slot> q, k, v;
  std::vector<std::pair<Slot*, int>> in_flight;  // copies on their way

  Model(int warpgroups, int stages, std::vector<int> tiles, bool O_in_Q) :
      warpgroups(warpgroups), stages(stages), tiles(std::move(tiles)), O_in_Q(O_in_Q), q(warpgroups), k(stages),
      v(stages) {
    for (Slot& s : q) s.full.count = 1, s.empty.count = 1;
    for (auto* ring : {&k, &v})
      for (Slot& s : *ring) s.full.count = 1, s.empty.count = warpgroups;
  }

  Operation load(Slot& slot, int uses, int what) {
    return [this, &slot, uses, what] {
      if (!slot.empty.done((uses + 1) % 2)) return false;
      EXPECT_EQ(slot.readers, 0) << "overwritten while it is read";
      slot.full.expect();
      in_flight.push_back({&slot, what});
      return true;
    };
  }

  std::vector<Operation> producer() {
    std::vector<Operation> program;
    int loads_k = 0, loads_v = 0, loads_q = 0, number = 0;
    const auto key = [&](int what) { program.push_back(load(k[at(loads_k)], loads_k / stages, what)), ++loads_k; };
    const auto value = [&](int what) { program.push_back(load(v[at(loads_v)], loads_v / stages, what)), ++loads_v; };
    for (const int n : tiles) {
      const int work = 1000 * number++;
      if (n == 0) continue;
      key(work);
      for (Slot& slot : q) program.push_back(load(slot, loads_q, work));
      ++loads_q;
      for (int j = 1; j < n; ++j) key(work + j), value(work + j - 1);
      value(work + n - 1);
    }
    return program;
  }

  std::vector<Operation> consumer(int w) {
    std::vector<Operation> program;
    int reads_k = 0, reads_v = 0, reads_q = 0, number = 0;
    const auto take = [&](Slot& slot, int uses, int what) {
      program.push_back([&slot, uses, what] {
        if (!slot.full.done(uses % 2)) return false;
        EXPECT_EQ(slot.holds, what);
        ++slot.readers;
        return true;
      });
    };
    const auto give = [&](Slot& slot) {
      program.push_back([&slot] { return --slot.readers, slot.empty.arrive(), true; });
    };
    for (const int n : tiles) {
      const int work = 1000 * number++;
      if (n == 0) continue;
      take(q[std::size_t(w)], reads_q++, work);
      const auto take_k = [&](int j) { take(k[at(reads_k)], reads_k / stages, work + j); };
      const auto take_v = [&](int j) { take(v[at(reads_v)], reads_v / stages, work + j); };
      const auto give_k = [&] { give(k[at(reads_k++)]); };
      const auto give_v = [&] { give(v[at(reads_v++)]); };
      take_k(0), give_k();
      for (int j = 1; j < n; ++j) take_k(j), take_v(j - 1), give_k(), give_v();
      if (!O_in_Q) give(q[std::size_t(w)]);
      take_v(n - 1), give_v();
      if (O_in_Q) give(q[std::size_t(w)]);
    }
    return program;
  }

  std::size_t at(int uses) const { return std::size_t(uses % stages); }

  // Any role, or any copy, goes on at any time. True: all of them come to their end.
  bool run(std::mt19937& random) {
    std::vector<std::vector<Operation>> roles{producer()};
    for (int w = 0; w < warpgroups; ++w) roles.push_back(consumer(w));
    std::vector<std::size_t> next(roles.size(), 0);
    for (int idle = 0; idle < 2000;) {
      const std::size_t role = random() % (roles.size() + 1);
      bool moved = false;
      if (role == roles.size()) {
        if (!in_flight.empty()) {
          const std::size_t n = random() % in_flight.size();
          const auto [slot, what] = in_flight[n];
          in_flight.erase(in_flight.begin() + std::ptrdiff_t(n));
          slot->holds = what, slot->full.complete(), moved = true;
        }
      } else if (next[role] < roles[role].size()) {
        moved = roles[role][next[role]]();
        next[role] += moved;
      }
      idle = moved ? 0 : idle + 1;
    }
    for (std::size_t role = 0; role < roles.size(); ++role)
      if (next[role] < roles[role].size()) return false;
    return in_flight.empty();
  }
};

TEST(Protocol, ComesToItsEndAndNothingIsOverwritten) {
  std::mt19937 random(7);
  const std::vector<std::vector<int>> works{{1}, {2}, {3}, {0}, {0, 1, 0}, {5, 0, 2, 1}, {1, 1, 1, 1}, {17, 16, 3}};
  for (const int warpgroups : {2, 3})
    for (const int stages : {2, 3, 4})
      for (const bool O_in_Q : {false, true})
        for (const std::vector<int>& tiles : works)
          for (int round = 0; round < 20; ++round)
            ASSERT_TRUE(Model(warpgroups, stages, tiles, O_in_Q).run(random)) << warpgroups << " " << stages;
}

TEST(Protocol, TheModelNoticesAMissingArrival) {
  std::mt19937 random(7);
  Model model(2, 2, {9}, false);
  model.k[0].empty.count = 3;  // as if one warpgroup never gave K back
  EXPECT_FALSE(model.run(random));
}

// --- plans

TEST(Plan, RefusalsNameWhatIsInTheWay) {
  const cuda::Target hopper = cuda::target_named("sm_90a");
  const auto reason = [&](auto change) {
    Problem p = api::plain_problem(Pass::forward, Type::bf16, {128, 128});
    change(p);
    return plan_forward(p, hopper).reason;
  };
  EXPECT_EQ(reason([](Problem&) {}), "");
  EXPECT_EQ(reason([](Problem& p) { p.q_type = Type::f32; }), "type is f32; this kernel takes f16 and bf16");
  EXPECT_EQ(reason([](Problem& p) { p.alignment = 8; }),
            "pointers and strides are aligned to 8 bytes; tensor copies need 16");
  EXPECT_EQ(reason([](Problem& p) { p.D = p.Dv = 80; }), "");  // padded
  EXPECT_EQ(reason([](Problem& p) { p.D = 264; }), "D is 264 and Dv is 128; this kernel has tiles up to 256");
  EXPECT_EQ(reason([](Problem& p) { p.options.scale = -1; }), "scale is -1; this kernel takes positive ones");
  EXPECT_EQ(plan_forward(api::plain_problem(Pass::forward, Type::bf16, {128, 128}), cuda::target_named("sm_80")).reason,
            "the GPU is sm_80; this kernel needs sm_90a");
}

TEST(Plan, EveryTileHasANumberAndABlock) {
  for (const std::int64_t N : {1, 64, 129, 4096, 5000}) {
    Problem p = api::plain_problem(Pass::forward, Type::f16, {64, 64});
    p.B = 3, p.Hq = 6, p.Hk = 2, p.Nq = N;
    const ForwardPlan plan = plan_forward(p, cuda::target_named("sm_90a"));
    EXPECT_EQ(plan.tiles, 18 * ((N + 191) / 192));
    EXPECT_EQ(18 % plan.section, 0) << "sections hold whole heads";
    EXPECT_LE(plan.grid, plan.tiles);
    EXPECT_GE(plan.grid, 1);
  }
}

}  // namespace
}  // namespace tessera::sm90
