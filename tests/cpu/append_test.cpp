// SPDX-License-Identifier: Apache-2.0
// Append: what each new token's row in the cache holds, judged against a rotation in float64, and that nothing else of
// the cache changes; every way to say where tokens go, every layout of a cache, on any number of threads.
// Links tessera_cases. Implements docs/algorithm.md, "Append".
#include <sys/mman.h>

#include <cstring>

#include "tests/support/new_tokens.hpp"

namespace tessera::test {
namespace {

TEST(Append, EveryFormLayoutAndRotation) {
  std::uint64_t seed = 0;
  for (const Where where : wheres)
    for (const bool packed : {false, true})
      for (const Cache cache : {Cache::tokens_first, Cache::heads_first, Cache::slices})
        for (const std::int64_t rotated : {0, 2, 6, 8})
          for (const bool interleaved : {false, true}) {
            Trial t{.where = where, .packed = packed, .interleaved = interleaved, .rotated = rotated, .cache = cache};
            t.positions = ++seed % 3 == 0, t.queries = seed % 4 == 0 ? 5 : 0, t.seed = seed;
            judge(t, 1 + static_cast<int>(seed % 3));
            if (HasFatalFailure()) return;
          }
}

TEST(Append, EveryPairOfTypes) {
  constexpr Type types[] = {Type::f32, Type::f16, Type::bf16, Type::f64};
  for (const Type from : types)
    for (const Type to : types)
      for (const Type v_to : types)
        for (const std::int64_t rotated : {0, 6})
          for (const bool own : {false, true}) {
            Trial t{.rotated = rotated, .queries = 4, .from = from, .to = to, .v_to = v_to};
            t.trigonometry = own ? from : Type::f32;
            judge(t, 1);
            if (HasFatalFailure()) return;
          }
}

TEST(Append, EightBitsAndScales) {
  std::uint64_t seed = 0;
  for (const Where where : wheres)
    for (const bool packed : {false, true})
      for (const Type to : {Type::e4m3, Type::i8, Type::f16})
        for (const Type from : {Type::f32, Type::bf16, Type::f64})
          for (const Scaled scaled :
               {Scaled::no, Scaled::all, Scaled::by_head, Scaled::by_sequence, Scaled::by_token, Scaled::by_group}) {
            if (scaled == Scaled::by_sequence && where == Where::slots && packed) continue;
            if (scaled >= Scaled::by_token && to == Type::f16) continue;
            Trial t{.where = where, .packed = packed, .rotated = ++seed % 2 == 0 ? 6 : 0};
            t.from = from, t.to = to, t.v_to = seed % 3 == 0 ? to : Type::e4m3, t.scaled = scaled, t.seed = seed;
            t.bad_entries = seed % 5 == 0, t.cache = caches[seed % 5];
            if (scaled == Scaled::by_group && seed % 2 == 0) t.D = 130, t.Dv = 256;
            judge(t, 1 + static_cast<int>(seed % 3));
            if (HasFatalFailure()) return;
          }
}

// What e4m3 has no number for becomes the largest, NaN stays, and neither spoils a computed scale.
TEST(Append, SaturatesAndKeepsNaN) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  float rows[4][4] = {{1000, -1000, NAN, 447}, {infinity, -infinity, 7, -14}, {0, 0, 0, 0}, {0, NAN, 0, 1e-44f}};
  for (const bool computed : {false, true})
    for (const Type type : {Type::e4m3, Type::i8}) {
      Buffer k(type, {4, 1, 1, 4}), v(type, {4, 1, 1, 4}), k_scale(Type::f32, {4, 1, 1}), v_scale(Type::f32, {4, 1, 1});
      std::int32_t slots[] = {0, 1, 2, 3};
      AppendArgs a{.k_new = Tensor(rows, Type::f32, {4, 1, 4}), .v_new = Tensor(rows, Type::f32, {4, 1, 4})};
      a.k = k.tensor(), a.v = v.tensor(), a.slots = Tensor(slots, Type::i32, {4});
      if (computed) a.k_scale = k_scale.tensor(), a.v_scale = v_scale.tensor();
      append(a);
      const double most = type == Type::i8 ? 127 : 448, least = type == Type::i8 && !computed ? -128 : -most;
      const double unit = computed ? 1000 / most : 1;
      const auto expect = [&](std::int64_t e, double wanted) {
        const bool right = wanted == wanted
                               ? std::abs(k.get(e) - wanted) <= (type == Type::i8 ? 0.5 : std::abs(wanted) / 16)
                           : type == Type::i8 ? k.get(e) == 0
                                              : k.get(e) != k.get(e);
        EXPECT_TRUE(right) << e << ": " << k.get(e) << " and not " << wanted;
      };
      expect(0, most), expect(1, least), expect(2, NAN), expect(3, std::min(447 / unit, most));
      // Infinities saturate; the scale is that of 14.
      const double beside = type == Type::i8 ? -128 : -448;
      expect(4, most), expect(5, computed && type == Type::i8 ? beside : least);
      expect(6, computed ? most / 2 : 7), expect(7, computed ? -most : -14);
      for (std::int64_t e = 8; e < 12; ++e) expect(e, 0);
      expect(13, NAN);
      if (computed) {
        EXPECT_FLOAT_EQ(static_cast<float>(k_scale.get(0)), static_cast<float>(1000 / most));
        EXPECT_FLOAT_EQ(static_cast<float>(k_scale.get(1)), static_cast<float>(14 / most));
        EXPECT_EQ(k_scale.get(2), 0);
      }
      ++case_count.judged;
    }
}

// Keys that were stored in eight bits, and attention over them: near what it is over the tokens themselves.
TEST(Append, EightBitsThenAttend) {
  for (const Type type : {Type::e4m3, Type::i8}) {
    const Case spec{.name = "eight", .Nq = 1, .Nk = 60, .Hq = 4, .Hk = 2, .D = 32, .backward = false};
    CaseData data = build(spec);
    forward(data.inputs(), data.outputs(), data.options());
    Buffer k(type, {5, 16, 2, 32}), v(type, {5, 16, 2, 32}), o(Type::f32, {1, 1, 4, 32});
    Buffer k_scale(Type::f32, {5, 16, 2}), v_scale(Type::f32, {5, 16, 2});
    std::int32_t table[] = {3, 0, 4, 1}, used = 60;
    AppendArgs a{.k_new = data.k.tensor(), .v_new = data.v.tensor(), .k = k.tensor(), .v = v.tensor()};
    a.seqused_k = Tensor(&used, Type::i32, {1}), a.block_table = Tensor(table, Type::i32, {1, 4});
    a.k_scale = k_scale.tensor(), a.v_scale = v_scale.tensor();
    append(a);
    Inputs in = data.inputs();
    in.k = a.k, in.v = a.v, in.seqused_k = a.seqused_k, in.block_table = a.block_table;
    in.k_scale = a.k_scale, in.v_scale = a.v_scale;
    forward(in, {.o = o.tensor()}, data.options());
    double error = 0, size = 0;
    for (std::int64_t e = 0; e < o.elements(); ++e)
      error += std::pow(o.get(e) - data.o.get(e), 2), size += std::pow(data.o.get(e), 2);
    EXPECT_LT(std::sqrt(error / size), type == Type::i8 ? 0.02 : 0.06);
    EXPECT_GT(error, 0);
    ++case_count.judged;
  }
}

TEST(Append, RandomConfigurations) {
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    judge(random_trial(seed), static_cast<int>(1 + seed % 4));
    if (HasFatalFailure()) return;
  }
}

// The same bits on any number of threads: what is written is a row's own.
TEST(Append, ThreadsChangeNothing) {
  Trial t{.where = Where::apart, .packed = true, .P = 5, .D = 40, .Dv = 32, .rotated = 24, .queries = 1};
  t.from = Type::bf16, t.to = Type::f16, t.counts = {200, 1, 33}, t.before = {0, 2, 3}, t.positions = true;
  Prepared one(t);
  append(one.a, {.threads = 1});
  for (const int threads : {2, 3, 7}) {
    Prepared other(t);
    append(other.a, {.threads = threads});
    expect_same_bits(one.k, other.k, "k"), expect_same_bits(one.v, other.v, "v");
    expect_same_bits(one.q_out, other.q_out, "q_out");
    ++case_count.judged;
  }
}

// Rows that are not rotated, and the dims behind those that are, keep every bit, of NaN too.
TEST(Append, WhatIsNotRotatedKeepsItsBits) {
  for (const Type type : {Type::f32, Type::f16, Type::bf16})
    for (const std::int64_t rotated : {0, 4}) {
      Prepared p({.where = Where::piece, .rotated = rotated, .from = type, .to = type, .v_to = type});
      const auto bytes = static_cast<std::size_t>(tessera::size_of(type));
      auto* elements = static_cast<std::byte*>(p.a.k_new.data);
      const auto at = [&](const Tensor& tensor, std::int64_t b, std::int64_t j, std::int64_t d) {
        return static_cast<std::byte*>(tensor.data) +
               (b * tensor.strides[0] + j * tensor.strides[1] + d) * tessera::size_of(type);
      };
      std::byte* odd = at(p.a.k_new, 1, 2, 5);
      for (std::size_t n = 0; n < bytes; ++n) odd[n] = std::byte(n + 1 == bytes ? 0x7f : 0xfd - 16 * n);  // NaN
      EXPECT_NE(odd, elements);
      append(p.a);
      EXPECT_EQ(std::memcmp(at(p.a.k, 1, p.place[5], 5), odd, bytes), 0) << cases::name_of(type);
      ++case_count.judged;
    }
}

// (1 + e)^2 - 1 without e^2, which an FMA would keep: GPUs compute these bits, too.
TEST(Append, EachProductOfARotationIsRounded) {
  for (const Type type : {Type::f32, Type::f64}) {
    const double e = type == Type::f32 ? 0x1p-12 : 0x1p-27, x = 1 + e;
    Buffer k_new(type, {1, 1, 2}), v_new(type, {1, 1, 2}), k(type, {1, 1, 1, 2}), v(type, {1, 1, 1, 2});
    Buffer cos(type, {1, 1}), sin(type, {1, 1});
    k_new.set(0, x), k_new.set(1, 1), cos.set(0, x), sin.set(0, 1), v_new.set(0, 0), v_new.set(1, 0);
    std::int32_t slot = 0, position = 0;
    AppendArgs a{.k_new = k_new.tensor(), .v_new = v_new.tensor(), .k = k.tensor(), .v = v.tensor()};
    a.slots = Tensor(&slot, Type::i32, {1}), a.positions = Tensor(&position, Type::i32, {1});
    a.rotary_cos = cos.tensor(), a.rotary_sin = sin.tensor();
    append(a);
    EXPECT_EQ(k.get(0), 2 * e) << (type == Type::f32 ? "f32" : "f64");
    EXPECT_EQ(k.get(1), 2 * x) << (type == Type::f32 ? "f32" : "f64");
    ++case_count.judged;
  }
}

TEST(Append, RotatesQueriesInPlace) {
  for (const bool interleaved : {false, true}) {
    Trial t{.interleaved = interleaved, .rotated = 6, .queries = 3, .from = Type::f16};
    Prepared apart(t), in_place(t);
    append(apart.a);
    in_place.a.q_out = in_place.a.q;
    append(in_place.a);
    expect_same_bits(apart.q_out, in_place.q, "q");
    ++case_count.judged;
  }
}

// FlashAttention's queries without an order: all at the place of the first new key.
TEST(Append, QueriesMayHavePositionsOfTheirOwn) {
  Trial t{.rotated = 8, .queries = 4};
  Prepared p(t), ordered(t);
  std::vector<std::int32_t> places;
  for (const std::int64_t n : t.before) places.insert(places.end(), 4, static_cast<std::int32_t>(n));
  p.a.q_positions = Tensor(places.data(), Type::i32, {3, 4});
  append(p.a), append(ordered.a);
  for (std::int64_t row = 0; row < 3 * 4 * p.t.Hq; ++row)
    for (std::int64_t d = 0; d < p.t.D; ++d) {
      const std::int64_t place = p.t.before[static_cast<std::size_t>(row / (4 * p.t.Hq))];
      expect_rounded(p.q_out.get(row * p.t.D + d), rotated(p, p.q, row * p.t.D, d, place), Type::f32, "q");
    }
  expect_same_bits(p.k, ordered.k, "k");
  ++case_count.judged;
}

// Pages more than 2^32 elements apart. Only what is used has memory.
TEST(Append, PoolsLargerThan32Bits) {
  for (const bool slots : {false, true}) {
    Trial t{.where = slots ? Where::slots : Where::table, .packed = slots, .wide_slots = true, .rotated = 8};
    Prepared p(t);
    constexpr std::int64_t page_stride = (std::int64_t{1} << 32) + 1024;
    const auto bytes = static_cast<std::size_t>((2 * page_stride + 4096) * 4);
    std::int64_t slot_numbers[] = {11, 0, 6, 5, -3, 1};
    std::int32_t entries[] = {2, 1, 0, 0, 1, 2, 1, 0, 2};
    if (slots) p.a.slots = Tensor(slot_numbers, Type::i64, {6});
    p.table.assign(std::begin(entries), std::end(entries)), p.lengths = {6, 3, 11};
    if (!slots) p.a.block_table = Tensor(p.table.data(), Type::i32, {3, 3});
    char* pools[2];
    for (const bool value : {false, true}) {
      void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      ASSERT_NE(memory, MAP_FAILED);
      pools[value] = static_cast<char*>(memory);
      const std::int64_t width = value ? p.t.Dv : p.t.D;
      (value ? p.a.v : p.a.k) = Tensor(memory, Type::f32, {3, 4, p.t.Hk, width});
      (value ? p.a.v : p.a.k).strides[0] = page_stride;
      (value ? p.v : p.k) = Buffer(Type::f32, {3, 4, p.t.Hk, width});  // the same cache in little memory
    }
    AppendArgs small = p.a;
    small.k = p.k.tensor(), small.v = p.v.tensor();
    append(p.a, {.threads = 2}), append(small, {.threads = 2});
    std::int64_t compared = 0;
    for (const bool value : {false, true}) {
      const Tensor& pool = value ? p.a.v : p.a.k;
      const Buffer& near = value ? p.v : p.k;
      const std::int64_t row = pool.strides[1], page = 4 * row;
      for (std::int64_t e = 0; e < near.elements(); ++e) {
        if (near.untouched(e)) continue;
        EXPECT_EQ(load_element(pool.data, pool.type, e / page * page_stride + e % page), near.get(e));
        ++compared;
      }
      munmap(pools[value], bytes);
    }
    EXPECT_EQ(compared, (slots ? 5 : 9) * p.t.Hk * (p.t.D + p.t.Dv));
    ++case_count.judged;
  }
}

// Step by step through pages, and attention over them: the bits of one call on the keys all together.
TEST(Append, ThenAttendGivesTheBitsOfAllKeysAtOnce) {
  for (const std::string& kernel : available_kernels()) {
    const Case spec{
        .name = "steps", .Nq = 1, .Nk = 40, .Hq = 4, .Hk = 2, .D = 16, .type = Type::bf16, .backward = false};
    CaseData data = build(spec);
    forward(data.inputs(), data.outputs(), data.options(), {.kernel = kernel.c_str()});
    Buffer k(Type::bf16, {9, 5, 2, 16}), v(Type::bf16, {9, 5, 2, 16}), o(Type::bf16, {1, 1, 4, 16});
    std::int32_t table[] = {8, 0, 3, 7, 1, 5, 2, 6}, used = 0;
    AppendArgs a{.k = k.tensor(), .v = v.tensor()};
    a.seqused_k = Tensor(&used, Type::i32, {1}), a.block_table = Tensor(table, Type::i32, {1, 8});
    for (const std::int64_t step : {1, 7, 12, 1, 1, 18}) {  // inside a page, across pages
      a.k_new = data.k.tensor(), a.v_new = data.v.tensor();
      for (Tensor* rows : {&a.k_new, &a.v_new}) {
        rows->data = static_cast<std::byte*>(rows->data) + used * rows->strides[1] * 2;
        rows->shape[1] = step;
      }
      used += static_cast<std::int32_t>(step);
      append(a);
    }
    Inputs in = data.inputs();
    in.k = a.k, in.v = a.v, in.seqused_k = a.seqused_k, in.block_table = a.block_table;
    forward(in, {.o = o.tensor()}, data.options(), {.kernel = kernel.c_str()});
    expect_same_bits(o, data.o, kernel);
    ++case_count.judged;
  }
}

}  // namespace
}  // namespace tessera::test
