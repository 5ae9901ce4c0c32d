// SPDX-License-Identifier: Apache-2.0
// The bits of a row that `decode` computes: the same whatever else a call holds, however its work is cut and in
// whatever order it is finished, wherever keys lie. On the emulated machine. Links tessera_cases; its include path puts
// tests/emulated before src. Implements docs/algorithm.md, "Promises".
#include "tests/decode/direct_checks.hpp"

#include "tests/support/far_pages.hpp"
#include "tests/support/senseless.hpp"

namespace tessera::decode {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];
}

#include "decode_units.hpp"  // written while this is built

namespace tessera::decode {
namespace {

using cases::Case;
using cases::CaseData;

void run(const Call& call, const Run& how = {}) { run_plan(problem_of(call), call, how, decode_units, memory); }

CaseData ran(const Case& spec, const Run& how = {}) {
  CaseData data = cases::build(spec);
  run(call_of(data), how);
  return data;
}

void expect_same(const CaseData& expected, const CaseData& data) {
  test::expect_same_bits(expected.o, data.o, "o");
  test::expect_same_bits(expected.lse, data.lse, "lse");
}

// --- how the work is cut, and in which order it is finished

TEST(DecodeBits, DoNotDependOnLevelOrderOrMultiprocessors) {
  for (const bool options : {false, true})
    for (const auto& [Nq, group] : {std::pair(1, 3), {4, 3}}) {
      if (options && Nq > 1) continue;
      const Case spec = lone_sequence(Nq, group, options);
      const CaseData expected = ran(spec);
      for (const int multiprocessors : {1, 3, 132}) {
        if (multiprocessors == 132 && Nq > 1) continue;
        expect_same(expected, ran(spec, {.multiprocessors = multiprocessors}));
      }
      for (int level = 0; level <= 3; ++level)
        for (const std::uint32_t seed : {1u, 2u}) {
          SCOPED_TRACE(testing::Message() << "level " << level << " seed " << seed);
          expect_same(expected, ran(spec, {.level = level, .shuffle = seed}));
          if (HasFatalFailure()) return;
        }
    }
}

// More leaves than a family has siblings, cut at every level: families of families, and a stack that leaves shared
// memory. Keys from a window on, so that families lack first ones, and two neighbours meet at the root alone.
TEST(DecodeBits, DoNotDependOnHowManyFamiliesAreClimbed) {
  for (const std::int64_t window : {std::int64_t{-1}, std::int64_t{400}, std::int64_t{4500}}) {
    Case spec = with_rows("long", 1, 3, 256 * 18 + 5);
    spec.type = Type::bf16, spec.backward = false, spec.options.causal = true, spec.options.window_left = window;
    CaseData expected = cases::build(spec);
    const cases::Expectation reference = cases::expect(expected);
    run(call_of(expected));
    const cases::OutputReport report = cases::compare("o", expected.o, reference.o);
    EXPECT_TRUE(report.ok) << report.detail;
    for (int level = 0; level <= 5; ++level) {
      SCOPED_TRACE(testing::Message() << "window " << window << " level " << level);
      expect_same(expected, ran(spec, {.level = level, .shuffle = 5u}));
      if (HasFatalFailure()) return;
    }
  }
}

// Whoever has room for long sequences works on two tiles of keys at once; each has a maximum of its own.
TEST(DecodeBits, DoNotDependOnTheRoomOfAPlan) {
  for (const Case& spec : short_sequences()) {
    SCOPED_TRACE(cases::describe(spec));
    const CaseData expected = ran(spec), data = cases::build(spec);
    Problem problem = problem_of(call_of(data));
    problem.Nk = much_room;
    const gpu::Steps steps = steps_of(problem, target_of("sm_90a", 2));
    EXPECT_NE(steps.list.back().tiles.find("128 keys, 8 warps"), std::string::npos) << steps.list.back().tiles;
    run_plan(problem, call_of(data), {}, decode_units, memory);
    expect_same(expected, data);
    if (HasFailure()) return;
  }
}

// --- without a queue

TEST(DecodeDirect, BitsAreThoseOfAQueue) { check_direct(direct_cases(), decode_units, memory); }

// --- company

// Copies sequence 0 of `alone` into place b of a batch: queries, keys and values.
void take_place(const CaseData& alone, CaseData& company, std::size_t b) {
  const auto copy = [](const cases::Buffer& from, cases::Buffer& to, std::int64_t row, std::int64_t count,
                       std::int64_t width) {
    for (std::int64_t e = 0; e < count * width; ++e) to.set(row * width + e, from.get(e));
  };
  const cases::Sequence &s = company.sequences[b], &a = alone.sequences[0];
  ASSERT_TRUE(s.Nq == a.Nq && s.Nk == a.Nk);
  const Case& c = alone.spec;
  copy(alone.q, company.q, s.row_q, s.Nq, c.Hq * c.D);
  copy(alone.k, company.k, s.row_k, s.Nk, c.Hk * c.D), copy(alone.v, company.v, s.row_k, s.Nk, c.Hk * c.dim_v());
}

// Alone, in a padded batch of longer ones, and packed, wherever; with neighbours of so many rows that tiles of 16, 32
// and 64 rows take the place of tiles of 8, and of more rows than a tile has.
TEST(DecodeBits, DoNotDependOnCompany) {
  Case lone = with_rows("lone", 2, 1, 300);
  lone.type = Type::bf16, lone.backward = false, lone.options.causal = true, lone.seed = 5;
  const CaseData alone = ran(lone);
  for (const std::int64_t longest : {2, 9, 17, 64, 130})
    for (const bool packed : {false, true})
      for (const std::size_t b : {std::size_t{0}, std::size_t{2}}) {
        SCOPED_TRACE(testing::Message() << "longest " << longest << " packed " << packed << " place " << b);
        Case spec = lone;
        spec.seed = 17, spec.B = 3;
        std::vector<std::int32_t> q(3, static_cast<std::int32_t>(longest)), k{700, 1, 400};
        q[b] = 2, k[b] = 300;
        if (packed)
          spec.packed_q = q, spec.packed_k = k, spec.options.max_seqlen_q = longest;
        else
          spec.Nq = longest, spec.Nk = 700, spec.used_q = q, spec.used_k = k;
        CaseData company = cases::build(spec);
        take_place(alone, company, b);
        run(call_of(company), {.multiprocessors = 3, .shuffle = 3u});
        EXPECT_EQ(test::bits_of_sequence(company, b, false), test::bits_of_sequence(alone, 0, false));
        if (HasFailure()) return;
      }
}

// The last rows of a prompt, in a call of their own: a prompt may come in chunks of any size, or in one.
TEST(DecodeBits, DoNotDependOnTheChunksOfAPrompt) {
  Case spec = lone_sequence(70, 1, false);
  spec.Nk = 330;
  const CaseData whole = ran(spec);
  for (const std::int64_t count : {1, 40, 66}) {
    spec.Nq = count;
    const CaseData chunk = cases::build(spec);
    Call call = call_of(chunk);
    call.inputs = whole.inputs();
    Tensor& q = call.inputs.q;
    q.data = static_cast<std::byte*>(q.data) + (70 - count) * q.strides[1] * 2, q.shape[1] = count;
    run(call);
    const std::vector<std::uint64_t> bits = chunk.o.bits(), all = whole.o.bits();
    EXPECT_TRUE(std::equal(bits.begin(), bits.end(), all.end() - count * 64)) << count;
    EXPECT_NE(chunk.o.get(0), 0);
    for (std::int64_t n = 0; n < count; ++n) EXPECT_EQ(chunk.lse.get(n), whole.lse.get(70 - count + n));
  }
}

// What the other rows of a tile are: heads of the same KV head with queries of any size.
TEST(DecodeBits, DoNotDependOnNeighboursInATile) {
  const Case spec = lone_sequence(4, 3, false);
  const auto row_of = [&](double size) {
    CaseData data = cases::build(spec);
    const std::int64_t width = spec.Hq * spec.D;  // of a query; the third one's second head stays as it is
    for (std::int64_t e = 0; e < data.q.elements(); ++e)
      if (e / width != 2 || e % width / spec.D != 1) data.q.set(e, data.q.get(e) * size);
    run(call_of(data));
    std::vector<std::uint64_t> bits = data.o.bits();
    return std::vector<std::uint64_t>(bits.begin() + 2 * width + spec.D, bits.begin() + 2 * width + 2 * spec.D);
  };
  EXPECT_EQ(row_of(1), row_of(50));
}

TEST(DecodeLengths, SenselessOnesTouchNoOtherSequences) {
  Case spec = test::senseless_base(64, Type::bf16, true);
  spec.options.max_seqlen_q = 32, spec.Hq = spec.Hk = 2;
  test::check_senseless_lengths(spec, false, [](CaseData& data) { run(call_of(data)); });
}

// Tokens in reverse order in memory, which views with negative strides put right.
TEST(DecodeBits, DoNotDependOnTheSignOfStrides) {
  Case spec = with_rows("reversed", 4, 3, 300);
  spec.type = Type::bf16, spec.backward = false, spec.options.causal = true;
  const CaseData expected = ran(spec);
  CaseData data = cases::build(spec);
  Call call = call_of(data);
  const auto reverse = [](const cases::Buffer& from, cases::Buffer& to, Tensor& view) {
    const std::int64_t tokens = view.shape[1], width = view.shape[2] * view.shape[3];
    for (std::int64_t e = 0; e < tokens * width; ++e) to.set((tokens - 1 - e / width) * width + e % width, from.get(e));
    view.data = static_cast<std::byte*>(view.data) + (tokens - 1) * view.strides[1] * 2, view.strides[1] *= -1;
  };
  reverse(expected.q, data.q, call.inputs.q), reverse(expected.k, data.k, call.inputs.k);
  reverse(expected.v, data.v, call.inputs.v);
  run(call);
  expect_same(expected, data);
}

// --- pages

// The paged call has the contiguous one's bits, and sets these bits of the status word.
void expect_paged(const CaseData& expected, const test::PagedCase& paged, std::int32_t bits, const Run& how = {}) {
  CaseData data = cases::build(expected.spec);
  std::int32_t status = 4;  // somebody else's bit
  Call call = call_of(data);
  call.inputs = paged.in, call.outputs.status = Tensor(&status, Type::i32, {1});
  run(call, how);
  expect_same(expected, data);
  EXPECT_EQ(status, 4 | bits);
  EXPECT_TRUE(data.o.margins_intact() && data.lse.margins_intact());
}

class DecodePages : public testing::TestWithParam<std::int64_t> {};

TEST_P(DecodePages, EveryLayoutAndTableGivesTheBitsOfContiguousKeys) {
  const std::int64_t P = GetParam();
  Case spec = with_rows("paged", 1, 3, 600);
  spec.B = 6, spec.type = Type::bf16, spec.backward = false, spec.options.causal = true;
  spec.used_k = {0, 1, 255, 257, 600, static_cast<std::int32_t>(std::min<std::int64_t>(P, 599) + 1)};
  const CaseData expected = ran(spec);
  std::size_t turn = 0;
  for (const test::Cache cache : test::caches)
    for (const test::Table table : test::tables)
      for (const std::int64_t places : {std::int64_t{0}, std::int64_t{1}, P - 1, P + 1}) {
        if (++turn % 2 == 0 && places > 0) continue;
        test::Paging paging{.page_size = P, .cache = cache, .table = table, .seed = turn};
        if (places > 0) paging.leftpad.assign(6, static_cast<std::int32_t>(places));
        SCOPED_TRACE(describe(paging));
        expect_paged(expected, test::PagedCase(expected, paging), 0,
                     {.multiprocessors = 1 + static_cast<int>(turn % 3), .shuffle = static_cast<std::uint32_t>(turn)});
        if (HasFatalFailure()) return;
      }
}

INSTANTIATE_TEST_SUITE_P(Sizes, DecodePages, testing::Values(1, 3, 16, 48, 64, 256, 528));

// Blocks without a queue read lengths and tables themselves.
TEST(DecodePaged, WithoutAQueue) {
  Case spec = with_rows("Direct", 1, 3, 700);
  spec.D = 128, spec.B = 4, spec.type = Type::bf16, spec.backward = false, spec.used_k = {0, 1, 257, 700};
  const CaseData expected = ran(spec, {.multiprocessors = 3});
  for (const test::Table table : test::tables) {
    test::PagedCase paged(expected, {.page_size = 16, .table = table, .leftpad = {5, 0, 1, 40}});
    for (const int multiprocessors : {8, 132})
      expect_paged(expected, paged, 0, {.multiprocessors = multiprocessors, .direct = true});
  }
  // Lengths that are cut: the status word is told, and the bits are a queue's.
  std::vector<std::int32_t> lengths{std::numeric_limits<std::int32_t>::min(), -1, 701, 257};
  const test::PagedCase paged(expected, {.page_size = 16});
  const auto cut = [&](const decode::Run& how) {
    CaseData data = cases::build(spec);
    std::int32_t status = 4;
    Call call = call_of(data);
    call.inputs = paged.in, call.inputs.seqused_k = Tensor(lengths.data(), Type::i32, {4});
    call.outputs.status = Tensor(&status, Type::i32, {1});
    run(call, how);
    EXPECT_EQ(status, 4 | beyond_bounds | page_outside_pool);  // the third sequence has no pages behind key 257
    return data;
  };
  expect_same(cut({}), cut({.multiprocessors = 132, .direct = true}));
}

TEST(DecodePaged, PoolsLargerThan32Bits) {
  for (const bool direct : {false, true})
    for (const std::int64_t distance : {test::far_apart, -test::far_apart}) {
      Case spec = with_rows("far", 1, 3, 600);
      spec.D = direct ? 128 : 64, spec.B = 2, spec.type = Type::bf16, spec.backward = false, spec.used_k = {600, 257};
      const CaseData expected = ran(spec);
      test::PagedCase paged(expected, {.page_size = 48, .table = test::Table::apart});
      const test::FarPages far(paged, distance);
      expect_paged(expected, paged, 0, {.multiprocessors = 8, .direct = direct});
    }
}

// Queries packed, keys paged: mixed batches, with a window behind which pages are given back.
TEST(DecodePaged, MixedBatchesAndWindows) {
  for (const std::int32_t longest : {4, 30}) {
    Case spec = with_rows("mixed", longest, 3, 700);
    spec.type = Type::bf16, spec.backward = false, spec.options.causal = true, spec.options.window_left = 100;
    spec.packed_q = {1, longest, 0, 3}, spec.packed_k = {700, 300, 20, 257}, spec.options.max_seqlen_q = longest;
    const CaseData expected = ran(spec);
    for (const std::int64_t P : {1, 16}) {
      test::PagedCase paged(expected, {.page_size = P, .leftpad = {3, 0, 1, 40}});
      for (const std::int64_t j : {0, 100, 500}) paged.entry(0, j) = -1;  // which nobody sees
      expect_paged(expected, paged, 0);
    }
  }
}

// A used entry outside of the pool reads as zeros and sets the bit; other sequences keep theirs.
TEST(DecodePaged, EntriesOutsideThePoolReadAsZeros) {
  constexpr std::int64_t P = 16;
  for (const test::Table table : test::tables)
    for (const std::int32_t bad : {1 << 30, -1, std::numeric_limits<std::int32_t>::min(), 0}) {
      Case spec = with_rows("bad", 1, 3, 300);
      spec.B = 2, spec.type = Type::bf16, spec.backward = false;
      CaseData data = cases::build(spec);
      test::PagedCase paged(data, {.page_size = P, .table = table});
      const std::int32_t entry = bad == 0 ? static_cast<std::int32_t>(paged.pages) : bad;
      for (const std::int64_t j : {std::int64_t{0}, 5 * P, std::int64_t{299}}) {
        paged.entry(1, j) = entry;
        for (const bool side : {false, true}) {
          if (table == test::Table::apart && side) continue;  // the other table is as it was
          cases::Buffer& rows = side ? data.v : data.k;
          for (std::int64_t key = j / P * P; key < std::min<std::int64_t>(300, j / P * P + P); ++key)
            for (std::int64_t e = 0; e < 64; ++e) rows.set((data.sequences[1].row_k + key) * 64 + e, 0);
        }
      }
      run(call_of(data));
      CaseData again = cases::build(spec);
      std::int32_t status = 4;
      Call call = call_of(again);
      call.inputs = paged.in, call.outputs.status = Tensor(&status, Type::i32, {1});
      run(call);
      expect_same(data, again);
      EXPECT_EQ(status, 4 | page_outside_pool);
    }
}

}  // namespace
}  // namespace tessera::decode
