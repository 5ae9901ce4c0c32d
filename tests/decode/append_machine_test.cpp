// SPDX-License-Identifier: Apache-2.0
// The kernel `append` on the emulated machine: its own text, beside the CPU's append, on the same trials. Every byte of
// the caches, scales and queries must be the same. And what a GPU cannot refuse: lengths, slots and positions that do
// not exist. Links tessera_cases. Implements docs/algorithm.md, "Append".
#include <gtest/gtest.h>

#include "gpu/append.hpp"
#include "tests/emulated/watch.hpp"
#include "tests/support/new_tokens.hpp"

// Device code, behind what stands in for CUDA.
#include "gpu/kernel/append.cuh"

namespace tessera::test {
namespace {

// `as_if_narrow`: one number at a time, whatever the alignment.
void append_emulated(const AppendArgs& a, bool as_if_narrow = false) {
  const Appending call = check_append(a, {});
  ASSERT_EQ(gpu::append_refusal(call), "");
  gpu::AppendParams params = gpu::append_params(call);
  if (as_if_narrow) params.wide = 0;
  emulated::Watch watch;
  watch.tensor(a.k, "k"), watch.tensor(a.v, "v"), watch.tensor(a.q_out, "q_out"), watch.tensor(a.status, "status");
  watch.tensor(a.k_scale, "k_scale"), watch.tensor(a.v_scale, "v_scale");
  emulated::Machine::here().run(static_cast<int>(gpu::append_blocks(params)), gpu::append_threads, 0,
                                [&] { gpu::append(params); });
}

int wide = 0, narrow_ones = 0;

void compare(const Trial& trial) {
  SCOPED_TRACE(describe(trial));
  Prepared on_cpu(trial), emulated(trial), narrow(trial);
  append(on_cpu.a, {.threads = 1});
  append_emulated(emulated.a), append_emulated(narrow.a, true);
  gpu::append_params(check_append(emulated.a, {})).wide ? ++wide : ++narrow_ones;
  for (Prepared* other : {&emulated, &narrow}) {
    expect_same_bits(on_cpu.k, other->k, "k");
    if (on_cpu.v) expect_same_bits(on_cpu.v, other->v, "v");
    if (on_cpu.q_out) expect_same_bits(on_cpu.q_out, other->q_out, "q_out");
    if (on_cpu.k_scale) expect_same_bits(on_cpu.k_scale, other->k_scale, "k_scale");
    if (on_cpu.v_scale) expect_same_bits(on_cpu.v_scale, other->v_scale, "v_scale");
    EXPECT_EQ(on_cpu.status, other->status);
    EXPECT_TRUE(other->k.margins_intact() && (!other->v || other->v.margins_intact()));
    EXPECT_TRUE(!other->q_out || other->q_out.margins_intact());
    EXPECT_TRUE(!other->k_scale || (other->k_scale.margins_intact() && other->v_scale.margins_intact()));
  }
  ++case_count.judged;
}

TEST(AppendMachine, RandomConfigurationsHaveTheCpusBits) {
  for (std::uint64_t seed = 1; seed <= 250; ++seed) {
    compare(random_trial(seed));
    if (HasFailure()) return;
  }
}

TEST(AppendMachine, EveryFormScaleAndRotationInChunks) {
  std::uint64_t seed = 0;
  for (const Where where : wheres)
    for (const bool packed : {false, true})
      for (const Type to : {Type::e4m3, Type::i8, Type::f16, Type::bf16})
        for (const Scaled scaled : {Scaled::no, Scaled::all, Scaled::by_head, Scaled::by_sequence, Scaled::by_token}) {
          if (scaled == Scaled::by_sequence && where == Where::slots && packed) continue;
          const bool eight = to == Type::e4m3 || to == Type::i8;
          if (scaled == Scaled::by_token && !eight) continue;
          Trial t{.where = where, .packed = packed, .interleaved = ++seed % 2 == 0, .D = 24, .Dv = 16};
          t.rotated = seed % 3 * 8, t.queries = seed % 4 == 0 ? 2 : 0, t.scaled = scaled, t.seed = seed;
          t.from = seed % 2 ? Type::bf16 : Type::f32, t.to = to, t.v_to = eight ? Type::e4m3 : to;
          t.bad_entries = seed % 5 == 0, t.cache = Cache::heads_first;
          compare(t);
          if (HasFailure()) return;
        }
}

// Both ways of moving numbers were taken.
TEST(AppendMachine, RowsInChunksAndOneByOne) {
  Trial t{.where = Where::slots, .packed = false, .P = 4, .Hk = 1, .D = 64, .Dv = 32, .rotated = 32, .queries = 1};
  t.cache = Cache::heads_first, t.positions = true;
  Prepared aligned(t), again(t);
  // Tokens in memory of their own, which is aligned.
  Buffer k_new(t.from, {3, 3, 1, 64}), v_new(t.from, {3, 3, 1, 32}), q(t.from, {3, 3, t.Hq, 64});
  for (std::int64_t e = 0; e < k_new.elements(); ++e) k_new.set(e, std::sin(double(e)));
  for (std::int64_t e = 0; e < v_new.elements(); ++e) v_new.set(e, std::cos(double(e)));
  for (std::int64_t e = 0; e < q.elements(); ++e) q.set(e, std::cos(0.1 * double(e)));
  Buffer cos(Type::f32, {40, 16}), sin(Type::f32, {40, 16}), q_out(t.from, {3, 3, t.Hq, 64}),
      q_out2(t.from, {3, 3, t.Hq, 64});
  for (std::int64_t e = 0; e < cos.elements(); ++e) cos.set(e, std::cos(double(e))), sin.set(e, std::sin(double(e)));
  for (Prepared* p : {&aligned, &again}) {
    p->a.k_new = k_new.tensor(), p->a.v_new = v_new.tensor(), p->a.q = q.tensor();
    p->a.rotary_cos = cos.tensor(), p->a.rotary_sin = sin.tensor();
  }
  aligned.a.q_out = q_out.tensor(), again.a.q_out = q_out2.tensor();
  ASSERT_TRUE(gpu::append_params(check_append(aligned.a, {})).wide);
  append_emulated(aligned.a), append(again.a);
  expect_same_bits(aligned.k, again.k, "k"), expect_same_bits(aligned.v, again.v, "v");
  expect_same_bits(q_out, q_out2, "q_out");
  ++case_count.judged;
}

// Nobody can refuse what lies in a GPU's memory. Rows without a place are left out, others written, the word says it.
TEST(AppendMachine, LengthsAndPositionsBeyondBoundsAreLeftOut) {
  for (const Where where : {Where::table, Where::indptr, Where::piece})
    for (const std::int32_t length : {-7, 1, 1000}) {  // shorter than the new tokens, beyond the cache
      Trial t{.where = where, .rotated = 4, .queries = 3};
      Prepared right(t), wrong(t);
      append_emulated(right.a);
      wrong.lengths[1] = length;
      append_emulated(wrong.a);
      if (where != Where::piece) {
        EXPECT_EQ(wrong.status, 4 | beyond_bounds);
        EXPECT_EQ(right.status, 4);
      }
      EXPECT_TRUE(wrong.k.margins_intact() && wrong.v.margins_intact() && wrong.q_out.margins_intact());
      std::size_t same = 0, left_out = 0;
      for (std::int64_t e = 0; e < right.k.elements(); ++e) {
        if (right.k.untouched(e)) continue;
        const bool unwritten = wrong.k.untouched(e);
        unwritten ? ++left_out : ++same;
        if (!unwritten && length != 1) {
          EXPECT_EQ(right.k.get(e), wrong.k.get(e));
        }
      }
      EXPECT_EQ(left_out, length == 1 ? left_out : std::size_t(3 * t.Hk * t.D)) << "length " << length;
      EXPECT_GE(same, std::size_t(6 * t.Hk * t.D));
      ++case_count.judged;
    }
  for (const std::int32_t position : {-1, 40, 2147483647}) {
    Trial t{.where = Where::slots, .rotated = 4, .queries = 3};
    Prepared p(t);
    p.slots = {0, 1, 2, 3, 4, 5, 6, 7, 8}, p.narrow_slots = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    p.positions[4] = position;
    append_emulated(p.a);
    EXPECT_EQ(p.status, 4 | beyond_bounds);
    for (std::int64_t token = 0; token < 9; ++token) {
      EXPECT_EQ(p.k.untouched(token * t.Hk * t.D), token == 4) << token;
      EXPECT_EQ(p.q_out.untouched(token * t.Hq * t.D), token == 4) << token;
      EXPECT_FALSE(p.v.untouched(token * t.Hk * t.Dv));
    }
    ++case_count.judged;
  }
}

// cu_seqlens that make no sense: those sequences are left out, the others are as they were.
TEST(AppendMachine, OffsetsWithoutMeaningAreLeftOut) {
  Trial t{.where = Where::table, .packed = true, .rotated = 4};
  Prepared right(t), wrong(t);
  append_emulated(right.a);
  wrong.offsets[2] = 1 << 20;
  append_emulated(wrong.a);
  EXPECT_TRUE(wrong.k.margins_intact());
  std::size_t same = 0;
  for (std::int64_t e = 0; e < right.k.elements(); ++e) {
    if (wrong.k.untouched(e)) continue;
    EXPECT_EQ(right.k.get(e), wrong.k.get(e));
    ++same;
  }
  EXPECT_EQ(same, std::size_t(3 * t.Hk * t.D));
  ++case_count.judged;
}

TEST(AppendMachine, QueriesInPlaceAndWithPositionsOfTheirOwn) {
  Trial t{.rotated = 8, .queries = 4, .from = Type::f16};
  Prepared apart(t), in_place(t), own(t), own_cpu(t);
  append_emulated(apart.a);
  in_place.a.q_out = in_place.a.q;
  append_emulated(in_place.a);
  expect_same_bits(apart.q_out, in_place.q, "q");
  std::vector<std::int32_t> places{1, 2, 3, 4, 9, 9, 9, 9, 0, 39, 0, 39};
  for (Prepared* p : {&own, &own_cpu}) p->a.q_positions = Tensor(places.data(), Type::i32, {3, 4});
  append_emulated(own.a), append(own_cpu.a);
  expect_same_bits(own.q_out, own_cpu.q_out, "q");
  ++case_count.judged;
}

TEST(AppendMachine, RefusesWhatGpusDoNotTake) {
  Trial t{.from = Type::f64};
  Prepared p(t);
  EXPECT_EQ(gpu::append_refusal(check_append(p.a, {})),
            "k_new: has type f64; append on GPUs takes f32, f16 and bf16, and caches of 8 bits");
  ++case_count.judged;
}

}  // namespace
}  // namespace tessera::test
