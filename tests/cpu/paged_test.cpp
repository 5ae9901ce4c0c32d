// SPDX-License-Identifier: Apache-2.0
// Keys and values in pages: the bits of the same call on contiguous ones, for every page size, layout and form of
// table, on any number of threads; entries that are no pages; memory that no key uses.
// Links tessera_cases. Implements docs/algorithm.md, "Paged keys and values".
#include <sys/mman.h>

#include "cases/random.hpp"
#include "tests/support/pages.hpp"

namespace tessera::test {
namespace {

CaseData contiguous(const Case& spec, const std::string& kernel) {
  CaseData data = build(spec);
  forward(data.inputs(), data.outputs(), data.options(), {.kernel = kernel.c_str()});
  return data;
}

// Runs the paged call with the case's other inputs, and compares every bit with the contiguous call's.
void expect_same(const CaseData& expected, const PagedCase& paged, const std::string& kernel, int threads,
                 std::int32_t bits = 0) {
  CaseData data = build(expected.spec);
  std::int32_t status = 4;  // somebody else's bit
  Outputs out = data.outputs();
  out.status = Tensor(&status, Type::i32, {1});
  forward(paged.in, out, data.options(), {.threads = threads, .kernel = kernel.c_str()});
  expect_same_bits(expected.o, data.o, kernel + " o");
  expect_same_bits(expected.lse, data.lse, kernel + " lse");
  EXPECT_EQ(status, 4 | bits);
  EXPECT_TRUE(data.o.margins_intact() && data.lse.margins_intact());
  ++case_count.judged;
}

std::vector<std::int32_t> same_padding(const CaseData& data, std::int64_t places) {
  return std::vector<std::int32_t>(data.sequences.size(), static_cast<std::int32_t>(places));
}

// One batch holds every length; 1 query is decoding, 70 are two blocks of queries.
Case all_lengths(std::int64_t queries, std::int64_t P, Type type) {
  std::vector<std::int32_t> used{0, 1, static_cast<std::int32_t>(P), static_cast<std::int32_t>(P + 1), 255, 256, 257};
  Case spec{.name = "lengths", .B = 7, .Nq = queries, .Nk = std::max<std::int64_t>(257, P + 1), .Hq = 4, .Hk = 2};
  spec.D = 20, spec.Dv = 32, spec.type = type, spec.used_k = used, spec.options.causal = true;
  return spec;
}

class Pages : public testing::TestWithParam<std::int64_t> {};

TEST_P(Pages, EveryLayoutAndTableGivesTheBitsOfContiguousKeys) {
  const std::int64_t P = GetParam();
  const auto kernels = available_kernels();
  std::size_t turn = 0;
  for (const std::int64_t queries : {1, 70})
    for (const Type type : {Type::f32, Type::bf16}) {
      const Case spec = all_lengths(queries, P, type);
      std::vector<CaseData> expected;
      for (const std::string& kernel : kernels) expected.push_back(contiguous(spec, kernel));
      for (const Cache cache : caches)
        for (const Table table : tables)
          for (const std::int64_t places : {std::int64_t{0}, std::int64_t{1}, P - 1, P + 1}) {
            Paging paging{.page_size = P, .cache = cache, .table = table, .seed = ++turn};
            if (places > 0) paging.leftpad = same_padding(expected[0], places);
            SCOPED_TRACE(describe(paging) + ", " + cases::name_of(type) + ", queries " + std::to_string(queries));
            const PagedCase paged(expected[0], paging);
            const std::size_t n = turn % kernels.size();
            expect_same(expected[n], paged, kernels[n], 1 + static_cast<int>(turn % 3));
            if (HasFatalFailure()) return;
          }
    }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Pages, testing::Values(1, 3, 16, 48, 64, 256, 528));

TEST(PagedRandom, ConfigurationsGiveTheBitsOfContiguousKeys) {
  constexpr std::int64_t sizes[] = {1, 2, 5, 16, 17, 64, 100, 192, 193, 1000};
  const auto kernels = available_kernels();
  std::size_t ran = 0;
  for (std::uint64_t seed = 4100; seed < 4300; ++seed) {
    Case spec = random_case(seed);
    if (spec.endless_k > 0) continue;  // of 2^48 keys no page can be filled
    spec.backward = false;
    Generator g(seed);
    Paging paging{.page_size = sizes[g.between(0, 9)],
                  .cache = caches[g.between(0, 4)],
                  .table = tables[g.between(0, 2)],
                  .seed = seed};
    const std::string& kernel = kernels[seed % kernels.size()];
    const CaseData expected = contiguous(spec, kernel);
    if (g.chance(0.4))
      for (std::size_t b = 0; b < expected.sequences.size(); ++b)
        paging.leftpad.push_back(static_cast<std::int32_t>(g.between(0, 2 * paging.page_size + 1)));
    SCOPED_TRACE(describe(spec) + "; " + describe(paging));
    const PagedCase paged(expected, paging);
    for (const int threads : {1, 2, 7}) expect_same(expected, paged, kernel, threads);
    if (HasFatalFailure()) return;
    ++ran;
  }
  EXPECT_GE(ran, 180U);
}

// Keys and values of their own types, with scales that lie in pages too.
TEST(PagedRandom, CachesGiveTheBitsOfContiguousKeys) {
  constexpr std::int64_t sizes[] = {1, 3, 16, 33, 64, 256, 528};
  const auto kernels = available_kernels();
  for (std::uint64_t seed = 700; seed < 840; ++seed) {
    const Case spec = random_cache_case(seed);
    Generator g(seed);
    Paging paging{.page_size = sizes[g.between(0, 6)],
                  .cache = caches[g.between(0, 4)],
                  .table = tables[g.between(0, 2)],
                  .seed = seed};
    const std::string& kernel = kernels[seed % kernels.size()];
    const CaseData expected = contiguous(spec, kernel);
    if (g.chance(0.4))
      for (std::size_t b = 0; b < expected.sequences.size(); ++b)
        paging.leftpad.push_back(static_cast<std::int32_t>(g.between(0, 2 * paging.page_size + 1)));
    SCOPED_TRACE(describe(spec) + "; " + describe(paging));
    const PagedCase paged(expected, paging);
    for (const int threads : {1, 2, 7}) expect_same(expected, paged, kernel, threads);
    if (HasFatalFailure()) return;
  }
}

TEST(PagedAccuracy, AgreesWithFloat64) {
  for (const std::string& kernel : cpu_kernels())
    for (const Type type : {Type::f32, Type::f16, Type::bf16}) {
      Case spec{.name = "mixed", .B = 3, .Nq = 70, .Nk = 500, .Hq = 6, .Hk = 2, .D = 64, .type = type};
      spec.used_q = {1, 70, 8}, spec.used_k = {500, 33, 257}, spec.backward = false;
      spec.options.causal = true, spec.options.softcap = 5, spec.sinks = Sinks::finite;
      CaseData data = build(spec);
      const Expectation expected = expect(data);
      const PagedCase paged(data, {.page_size = 16, .cache = Cache::two_by_page, .leftpad = {3, 0, 40}});
      forward(paged.in, data.outputs(), data.options(), {.kernel = kernel.c_str()});
      const OutputReport o = compare("o", data.o, expected.o), lse = compare_lse(data.lse, expected.lse);
      EXPECT_TRUE(o.ok) << kernel << " " << cases::name_of(type) << ": " << o.detail;
      EXPECT_TRUE(lse.ok) << kernel << " " << cases::name_of(type) << ": " << lse.detail;
      ++case_count.judged;
    }
}

// A used entry outside of the pool: its keys and values are zeros, and the status word says so.
TEST(PagedEntries, OutsideThePoolReadAsZeros) {
  constexpr std::int64_t P = 16;
  for (const std::string& kernel : available_kernels())
    for (const std::int64_t queries : {1, 70})
      for (const Table table : tables)
        for (const bool value : {false, true}) {
          Case spec{.name = "bad", .B = 3, .Nq = queries, .Nk = 300, .Hq = 2, .Hk = 2, .D = 24, .backward = false};
          CaseData data = build(spec);
          PagedCase paged(data, {.page_size = P, .table = table});
          const std::int32_t beyond = static_cast<std::int32_t>(paged.pages);
          const std::int32_t entries[] = {beyond, -1, 1 << 30, std::numeric_limits<std::int32_t>::min()};
          // Of sequence 1, pages 0, 5 and the last; of sequence 2 one: tiles of good and bad pages, and of both.
          const std::pair<std::size_t, std::int64_t> places[] = {{1, 0}, {1, 5 * P}, {1, 299}, {2, 192}};
          for (std::size_t n = 0; n < 4; ++n) {
            const auto [b, j] = places[n];
            paged.entry(b, j, value) = entries[n];
            for (const bool side : {false, true}) {
              if (table == Table::apart && side != value) continue;  // the other side's table is as it was
              Buffer& rows = side ? data.v : data.k;
              for (std::int64_t key = j / P * P; key < std::min<std::int64_t>(300, j / P * P + P); ++key)
                for (std::int64_t e = 0; e < 2 * 24; ++e) rows.set((data.sequences[b].row_k + key) * 2 * 24 + e, 0);
            }
          }
          SCOPED_TRACE(kernel + ", table " + std::to_string(static_cast<int>(table)));
          forward(data.inputs(), data.outputs(), data.options(), {.kernel = kernel.c_str()});
          expect_same(data, paged, kernel, 2, page_outside_pool);
          if (testing::Test::HasFatalFailure()) return;
        }
}

// The first and the last entry in use are, alone, enough for a report; their neighbours, which hold no key, are not.
TEST(PagedReport, CoversTheEntriesInUseAndNoOther) {
  Case spec{.name = "ends", .Nq = 3, .Nk = 40, .Hq = 1, .Hk = 1, .D = 8, .backward = false};
  for (const std::string& kernel : available_kernels())
    for (const std::int64_t key : {-9, 0, 39, 48})
      for (const bool value : {false, true}) {
        CaseData data = build(spec);
        PagedCase paged(data, {.page_size = 8, .table = Table::apart, .leftpad = {11}});
        paged.entry(0, key, value) = 1000;
        std::int32_t status = 0;
        Outputs out = data.outputs();
        out.status = Tensor(&status, Type::i32, {1});
        forward(paged.in, out, data.options(), {.kernel = kernel.c_str()});
        EXPECT_EQ(status, key == 0 || key == 39 ? page_outside_pool : 0) << kernel << ", key " << key;
        ++case_count.judged;
      }
}

// Nobody asks a sequence without queries for keys: its entries are not in use.
TEST(PagedEntries, WithoutQueriesAreNotInUse) {
  Case spec{.name = "unasked", .B = 2, .Nq = 4, .Nk = 40, .Hq = 1, .Hk = 1, .D = 8, .backward = false};
  spec.used_q = {4, 0};
  for (const std::string& kernel : available_kernels()) {
    const CaseData expected = contiguous(spec, kernel);
    PagedCase paged(expected, {.page_size = 8});
    paged.entry(1, 17) = -5;
    expect_same(expected, paged, kernel, 1);
  }
}

// Pages more than 2^32 elements apart, at either end of the pool. Only what is used has memory.
TEST(PagedPools, LargerThan32Bits) {
  Case spec{.name = "far", .Nq = 1, .Nk = 64, .Hq = 2, .Hk = 2, .D = 32, .backward = false};
  const std::int64_t page_stride = (std::int64_t{1} << 33) + 64, used = 16 * 2 * 32;  // elements
  const auto bytes = static_cast<std::size_t>((2 * page_stride + used) * 4);
  for (const std::string& kernel : available_kernels()) {
    const CaseData expected = contiguous(spec, kernel);
    PagedCase paged(expected, {.page_size = 16});
    std::int32_t next = 0;
    for (std::int64_t j = 0; j < 64; j += 16) paged.entry(0, j) = next++ % 3;  // the last key page is page 0 again
    char* pools[2];
    for (const bool value : {false, true}) {
      Tensor& pool = value ? paged.in.v : paged.in.k;
      void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      ASSERT_NE(memory, MAP_FAILED);
      pools[value] = static_cast<char*>(memory);
      for (std::int64_t page = 0; page < 3; ++page) {
        const auto begin = static_cast<std::size_t>(page * page_stride * 4) & ~std::size_t{4095};
        ASSERT_EQ(mprotect(pools[value] + begin, 8192, PROT_READ | PROT_WRITE), 0);
      }
      pool.data = memory, pool.shape[0] = 3, pool.strides[0] = page_stride;
    }
    CaseData dense = build(spec);  // the keys in the order in which the table names them
    for (std::int64_t j = 0; j < 64; ++j)
      for (std::int64_t e = 0; e < 2 * 32; ++e)
        for (const bool value : {false, true}) {
          const Tensor& pool = value ? paged.in.v : paged.in.k;
          const std::int64_t page = j / 16 % 3, place = page * page_stride + j % 16 * 2 * 32 + e;
          const double x = (value ? expected.v : expected.k).get((page * 16 + j % 16) * 2 * 32 + e);
          store_element(pool.data, pool.type, place, x);
          (value ? dense.v : dense.k).set(j * 2 * 32 + e, x);
        }
    forward(dense.inputs(), dense.outputs(), dense.options(), {.kernel = kernel.c_str()});
    expect_same(dense, paged, kernel, 2);
    for (char* pool : pools) munmap(pool, bytes);
  }
}

// One plan, made without data, serves other lengths and other tables; an upper bound of the lengths changes no bit.
TEST(PagedPlans, ServeOtherLengthsAndTables) {
  for (const std::string& kernel : available_kernels())
    for (const std::int64_t bound : {-1, 320, 5000}) {
      Case spec{.name = "steps", .B = 2, .Nq = 1, .Nk = 320, .Hq = 4, .Hk = 2, .D = 32, .backward = false};
      spec.used_k = {320, 320}, spec.options.max_seqlen_k = bound;
      CaseData expected = build(spec), data = build(spec);
      PagedCase first(data, {.page_size = 16, .seed = 1}), second(data, {.page_size = 16, .seed = 2});
      Inputs shapes = first.in;
      for (Tensor* t : {&shapes.q, &shapes.k, &shapes.v, &shapes.block_table, &shapes.seqused_k}) t->data = nullptr;
      const Plan plan = Plan::forward(shapes, data.outputs(), data.options(), {.kernel = kernel.c_str()});
      for (const std::int32_t step : {0, 1, 150, 320})
        for (PagedCase* paged : {&first, &second}) {
          paged->lengths = {320 - step, step};
          expected.used_k.fill({320.0 - step, 1.0 * step});
          forward(expected.inputs(), expected.outputs(), expected.options(), {.kernel = kernel.c_str()});
          plan.run(paged->in, data.outputs(), data.options());
          expect_same_bits(expected.o, data.o, kernel + " o");
          expect_same_bits(expected.lse, data.lse, kernel + " lse");
          ++case_count.judged;
        }
    }
}

}  // namespace
}  // namespace tessera::test
