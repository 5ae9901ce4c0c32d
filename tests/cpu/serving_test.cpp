// SPDX-License-Identifier: Apache-2.0
// A decoding step over an 8-bit cache as engines run it: the bits of a sequence among neighbours, in any order of the
// batch, any size of pages, beside a growing prompt; long caches; pools beyond 2^32 elements with their scales;
// workspace full of NaN; every code of 8 bits; masks at the bounds between ways to compute. Links tessera_cases.
// Implements docs/algorithm.md, "Promises" and "Paged keys and values".
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/support/pages.hpp"

namespace tessera::test {
namespace {

// One pool of pages that several sequences share, [pages, P, Hk, D], with a scale for every key.
struct Pool {
  static constexpr std::int64_t Hk = 2, Hq = 8, D = 128;
  Type type;
  std::int64_t P, pages;
  Buffer k, v, k_scale, v_scale;

  Pool(Type type, std::int64_t P, std::int64_t pages) :
      type(type), P(P), pages(pages), k(type, {pages, P, Hk, D}), v(type, {pages, P, Hk, D}),
      k_scale(Type::f32, {pages, P, Hk}), v_scale(Type::f32, {pages, P, Hk}) {}

  // The keys of a sequence go to its pages; what they are follows from `seed` and their number alone.
  void fill(const std::vector<std::int32_t>& table, std::int64_t length, std::uint64_t seed) {
    Generator g(seed);
    for (std::int64_t j = 0; j < length; ++j)
      for (std::int64_t h = 0; h < Hk; ++h) {
        const std::int64_t row = (table[static_cast<std::size_t>(j / P)] * P + j % P) * Hk + h;
        k_scale.set(row, 0.01 * (0.5 + g.uniform())), v_scale.set(row, 0.01 * (0.5 + g.uniform()));
        for (std::int64_t d = 0; d < D; ++d)
          k.set(row * D + d, std::round(100 * g.normal())), v.set(row * D + d, std::round(100 * g.normal()));
      }
  }
};

struct Member {
  std::int64_t length, queries;
  std::uint64_t seed;
};

// O and LSE of every member of a packed batch, in the batch's order; pages are dealt out in an order of the batch's
// own.
std::vector<std::vector<double>> attend(const std::vector<Member>& batch, Type type, std::int64_t P, int threads,
                                        const std::string& kernel) {
  std::int64_t entries = 1, all = 0, tokens = 0;
  for (const Member& m : batch) {
    entries = std::max(entries, (m.length + P - 1) / P);
    all += (m.length + P - 1) / P, tokens += m.queries;
  }
  Pool pool(type, P, all + 2);
  std::vector<std::int32_t> order(static_cast<std::size_t>(all)), table, lengths, ends{0};
  std::iota(order.begin(), order.end(), 2);
  std::reverse(order.begin(), order.end());
  Buffer q(Type::bf16, {tokens, Pool::Hq, Pool::D}), o(Type::f32, {tokens, Pool::Hq, Pool::D});
  Buffer lse(Type::f32, {Pool::Hq, tokens});
  std::size_t next = 0;
  std::int64_t element = 0;
  for (const Member& m : batch) {
    std::vector<std::int32_t> own(static_cast<std::size_t>(entries), -7);
    for (std::int64_t n = 0; n < (m.length + P - 1) / P; ++n) own[static_cast<std::size_t>(n)] = order[next++];
    pool.fill(own, m.length, m.seed);
    table.insert(table.end(), own.begin(), own.end());
    lengths.push_back(static_cast<std::int32_t>(m.length));
    ends.push_back(ends.back() + static_cast<std::int32_t>(m.queries));
    Generator g(m.seed, 9);
    for (std::int64_t e = 0; e < m.queries * Pool::Hq * Pool::D; ++e) q.set(element++, g.normal());
  }
  const auto B = static_cast<std::int64_t>(batch.size());
  Inputs in;
  in.q = q.tensor(), in.k = pool.k.tensor(), in.v = pool.v.tensor();
  in.k_scale = pool.k_scale.tensor(), in.v_scale = pool.v_scale.tensor();
  in.cu_seqlens_q = Tensor(ends.data(), Type::i32, {B + 1}), in.seqused_k = Tensor(lengths.data(), Type::i32, {B});
  in.block_table = Tensor(table.data(), Type::i32, {B, entries});
  // Workspace of the caller's, full of NaN.
  const Outputs out{.o = o.tensor(), .lse = lse.tensor()};
  const Options options{.causal = true};
  const Plan plan = Plan::forward(in, out, options, {.threads = threads, .kernel = kernel.c_str()});
  std::vector<std::byte> workspace(plan.workspace_size() + 64, std::byte{0xff});
  auto* place = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 63) / 64 * 64);
  plan.run(
      in, out, options,
      {.threads = threads, .workspace = place, .workspace_bytes = plan.workspace_size(), .kernel = kernel.c_str()});
  std::vector<std::vector<double>> results;
  for (std::int64_t b = 0, row = 0; b < B; row += batch[static_cast<std::size_t>(b++)].queries) {
    std::vector<double> one;
    for (std::int64_t i = row; i < row + batch[static_cast<std::size_t>(b)].queries; ++i)
      for (std::int64_t h = 0; h < Pool::Hq; ++h) {
        one.push_back(lse.get(h * tokens + i));
        for (std::int64_t d = 0; d < Pool::D; ++d) one.push_back(o.get((i * Pool::Hq + h) * Pool::D + d));
      }
    results.push_back(one);
  }
  EXPECT_TRUE(o.margins_intact() && lse.margins_intact());
  ++case_count.judged;
  return results;
}

constexpr Type bytes[] = {Type::e4m3, Type::i8};

// One token of a sequence of 300 keys, three of one of 77: alone, among others, in reverse, in other pages, on other
// threads, and beside a prompt that grows by one token.
TEST(Steps, ASequenceHasItsBitsInEveryCompany) {
  const auto kernels = available_kernels();
  for (const Type type : bytes)
    for (const std::string& kernel : kernels) {
      SCOPED_TRACE(kernel + " " + cases::name_of(type));
      const Member one{300, 1, 11}, three{77, 3, 12};
      const auto first = attend({one}, type, 16, 1, kernel), second = attend({three}, type, 16, 2, kernel);
      for (const double x : first[0]) ASSERT_TRUE(std::isfinite(x));
      std::vector<Member> batch{one, three};
      Generator g(5);
      for (std::uint64_t n = 0; n < 10; ++n) batch.push_back({g.between(0, 60), g.between(0, 2), 100 + n});
      for (const std::int64_t P : {1, 16, 48}) {
        const auto together = attend(batch, type, P, 2, kernel);
        EXPECT_EQ(together[0], first[0]) << "pages of " << P;
        EXPECT_EQ(together[1], second[0]) << "pages of " << P;
      }
      std::reverse(batch.begin(), batch.end());
      const auto reversed = attend(batch, type, 16, 7, kernel);
      EXPECT_EQ(reversed.back(), first[0]);
      EXPECT_EQ(reversed[reversed.size() - 2], second[0]);
      for (const std::int64_t prompt : {64, 65, 130}) {
        const auto beside = attend({{prompt, prompt, 13}, one, three}, type, 16, 2, kernel);
        EXPECT_EQ(beside[1], first[0]) << "prompt of " << prompt;
        EXPECT_EQ(beside[2], second[0]) << "prompt of " << prompt;
      }
    }
}

// A cache of 8193 keys, one more than whole chunks of any size: pages of every size have the bits of one page.
TEST(Steps, LongCachesHaveTheSameBitsInPagesOfAnySize) {
  const auto kernels = available_kernels();
  std::size_t turn = 0;
  for (const Type type : bytes) {
    const std::string& kernel = kernels[turn++ % kernels.size()];
    const auto whole = attend({{8193, 1, 21}}, type, 8193, 1, kernel);
    for (const std::int64_t P : {1, 3, 64, 528})
      EXPECT_EQ(attend({{8193, 1, 21}}, type, P, 2, kernel)[0], whole[0]) << kernel << ", pages of " << P;
  }
}

// Needles in 65536 and in 131072 keys: one key looks like the query, and its value is what comes out.
TEST(Needles, AreFoundInEightBits) {
  constexpr std::int64_t D = 64;
  const auto kernels = cpu_kernels();
  std::size_t turn = 0;
  for (const Type type : bytes)
    for (const std::string& kernel : kernels) {
      const std::int64_t Nk = turn++ % 2 ? 65536 : 131072;
      Buffer q(Type::f32, {1, 1, 1, D}), k(type, {1, Nk, 1, D}), v(type, {1, Nk, 1, D}), o(Type::f32, {1, 1, 1, D});
      Buffer scale = of(Type::f32, {1}, {0.25});
      std::memset(k.tensor().data, 0, static_cast<std::size_t>(Nk * D));
      std::memset(v.tensor().data, type == Type::i8 ? 5 : 0x3c, static_cast<std::size_t>(Nk * D));  // 5, or 1.5
      const std::int64_t needle = Nk - 22326;
      for (std::int64_t d = 0; d < D; ++d) {
        const double x = d % 3 - 1;
        q.set(d, x), k.set(needle * D + d, 24 * x), v.set(needle * D + d, static_cast<double>(d % 7) - 3);
      }
      Inputs in;
      in.q = q.tensor(), in.k = k.tensor(), in.v = v.tensor(), in.k_scale = in.v_scale = scale.tensor();
      forward(in, {.o = o.tensor()}, {}, {.threads = 2, .kernel = kernel.c_str()});
      double score = 0;
      for (std::int64_t e = 0; e < D; ++e) score += q.get(e) * 0.25 * k.get(needle * D + e) / 8;
      EXPECT_GT(score, 30);  // that of all others is 0
      const double weight = std::exp(-score) * static_cast<double>(Nk - 1);
      for (std::int64_t d = 0; d < D; ++d) {
        const double hay = 0.25 * (type == Type::i8 ? 5 : 1.5), found = 0.25 * (static_cast<double>(d % 7) - 3);
        EXPECT_NEAR(o.get(d), (found + weight * hay) / (1 + weight), 1e-6) << kernel << " " << d;
      }
      ++case_count.judged;
    }
}

// One key for each sequence, with 64 of the 256 codes: O is that key's value, and LSE of head h what dim h of K says.
TEST(Codes, OfEightBitsMeanTheirNumbers) {
  constexpr std::int64_t B = 4, D = 64;
  for (const std::string& kernel : cpu_kernels())
    for (const Type type : bytes)
      for (const Type q_type : {Type::bf16, Type::f16, Type::f32})
        for (const std::int64_t queries : {1, 9}) {
          Buffer q = filled(q_type, {B, queries, D, D}, 0), k(type, {B, 1, 1, D}), v(type, {B, 1, 1, D});
          Buffer o(Type::f32, {B, queries, D, D}), lse(Type::f32, {B, D, queries});
          const auto code = [&](std::int64_t n) { return static_cast<std::uint8_t>(n); };
          const bool nan_codes = type == Type::e4m3;
          for (std::int64_t n = 0; n < B * D; ++n) {
            const bool is_nan = nan_codes && (n & 0x7f) == 0x7f;  // in K it would reach every head
            static_cast<std::uint8_t*>(k.tensor().data)[n] = code(is_nan ? n - 1 : n);
            static_cast<std::uint8_t*>(v.tensor().data)[n] = code(n);
          }
          for (std::int64_t row = 0; row < B * queries; ++row)
            for (std::int64_t h = 0; h < D; ++h) q.set((row * D + h) * D + h, 1);
          Inputs in;
          in.q = q.tensor(), in.k = k.tensor(), in.v = v.tensor();
          forward(in, {.o = o.tensor(), .lse = lse.tensor()}, {.scale = 1}, {.kernel = kernel.c_str()});
          for (std::int64_t b = 0; b < B; ++b)
            for (std::int64_t i = 0; i < queries; ++i)
              for (std::int64_t h = 0; h < D; ++h) {
                const double score = k.get(b * D + h);
                ASSERT_NEAR(lse.get((b * D + h) * queries + i), score, 1e-6 * (1 + std::abs(score))) << kernel;
                for (std::int64_t d = 0; d < D; ++d) {
                  const double value = v.get(b * D + d), got = o.get(((b * queries + i) * D + h) * D + d);
                  ASSERT_EQ(std::isnan(got), std::isnan(value)) << kernel;
                  if (std::isnan(value)) continue;
                  ASSERT_NEAR(got, value, 1e-4 * std::abs(value)) << kernel;
                }
              }
          ++case_count.judged;
        }
}

// Nq times the query heads of a KV head, on both sides of every bound between ways to compute: 8 queries, 8, 16 and 64
// rows. Windows that skip chunks, sinks, softcap, ALiBi, trees, and rows that see nothing.
TEST(Masks, AgreeWithFloat64OnBothSidesOfTheBounds) {
  constexpr std::pair<std::int64_t, std::int64_t> shapes[] = {{1, 1},  {1, 7},  {7, 1}, {8, 1}, {1, 8},  {9, 1}, {3, 3},
                                                              {1, 16}, {1, 17}, {7, 9}, {8, 8}, {13, 5}, {65, 1}};
  const auto kernels = cpu_kernels();
  std::vector<Execution> executions;
  for (const std::string& kernel : kernels) executions.push_back({.kernel = kernel.c_str()});
  std::size_t turn = 0;
  for (const auto& [queries, group] : shapes)
    for (const int kind : {0, 1, 2, 3, 4}) {
      Case spec{.name = "mask", .B = 1, .Nq = queries, .Nk = 600, .Hq = group, .Hk = 1, .D = 64, .backward = false};
      spec.name = "rows_" + std::to_string(queries * group) + "_" + std::to_string(kind);
      spec.type = turn % 3 ? Type::bf16 : Type::f16, spec.options.causal = true;
      const Cached eight{turn % 2 ? Type::e4m3 : Type::i8, Scales::per_key};
      if (++turn % 4) spec.cached_k = spec.cached_v = eight;
      if (kind == 0) spec.options.window_left = 40;
      if (kind == 1) spec.sinks = Sinks::finite, spec.options.softcap = 2;
      if (kind == 2) spec.slopes = Slopes::per_head;
      if (kind == 3) spec.tree = Tree::random, spec.positions = true, spec.options.causal = false;
      if (kind == 4) spec.Nk = 3;  // fewer keys than queries: the first rows see none
      for (const CaseReport& report : run_case(spec, executions)) expect_ok(report);
    }
}

// Pages and their scales more than 2^32 elements apart. Only what is used has memory.
TEST(Pools, OfEightBitsMayBeLargerThan32Bits) {
  constexpr std::int64_t P = 16, far = (std::int64_t{1} << 32) + 4096, scale_far = (std::int64_t{1} << 32) + 1024;
  const auto map = [](std::size_t size) {
    return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  for (const Type type : bytes)
    for (const std::string& kernel : available_kernels()) {
      Pool near(type, P, 3);
      std::vector<std::int32_t> table{2, 0, 1};
      near.fill(table, 40, 31);
      std::int32_t length = 40;
      Buffer q(Type::f32, {1, 1, Pool::Hq, Pool::D}), o(Type::f32, {1, 1, Pool::Hq, Pool::D});
      Buffer expected(Type::f32, {1, 1, Pool::Hq, Pool::D});
      Generator g(3);
      for (std::int64_t e = 0; e < q.elements(); ++e) q.set(e, g.normal());
      Inputs in;
      in.q = q.tensor(), in.k = near.k.tensor(), in.v = near.v.tensor();
      in.k_scale = near.k_scale.tensor(), in.v_scale = near.v_scale.tensor();
      in.seqused_k = Tensor(&length, Type::i32, {1}), in.block_table = Tensor(table.data(), Type::i32, {1, 3});
      forward(in, {.o = expected.tensor()}, {}, {.kernel = kernel.c_str()});
      std::vector<std::pair<void*, std::size_t>> maps;
      for (Tensor* t : {&in.k, &in.v, &in.k_scale, &in.v_scale}) {
        const std::int64_t step = t->type == Type::f32 ? scale_far : far, page = t->strides[0];
        const std::int64_t size = tessera::size_of(t->type);
        maps.emplace_back(nullptr, static_cast<std::size_t>((2 * step + page) * size));
        maps.back().first = map(maps.back().second);
        ASSERT_NE(maps.back().first, MAP_FAILED);
        for (std::int64_t n = 0; n < 3; ++n)
          std::memcpy(static_cast<char*>(maps.back().first) + n * step * size,
                      static_cast<const char*>(t->data) + n * page * size, static_cast<std::size_t>(page * size));
        t->data = maps.back().first, t->strides[0] = step;
      }
      forward(in, {.o = o.tensor()}, {}, {.threads = 2, .kernel = kernel.c_str()});
      expect_same_bits(expected, o, kernel + " " + cases::name_of(type));
      for (const auto& [memory, size] : maps) munmap(memory, size);
      ++case_count.judged;
    }
}

}  // namespace
}  // namespace tessera::test
