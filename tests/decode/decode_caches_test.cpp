// SPDX-License-Identifier: Apache-2.0
// Caches on the emulated machine, bit by bit: forms of scales that say the same, a scale of 1 and none, pages of 8-bit
// keys, NaN among them, chains and positions in line against `causal`; lengths that are cut and reported. Links
// tessera_cases; its include path puts tests/emulated before src.
#include "tests/decode/direct_checks.hpp"
#include "tests/support/pages.hpp"

namespace tessera::decode {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];
}

#include "decode_cache_units.hpp"  // written while this is built

namespace tessera::decode {
namespace {

using cases::Buffer, cases::Case, cases::CaseData;

void run(const Call& call, const Run& how = {}) { run_plan(problem_of(call), call, how, decode_units, memory); }

CaseData attended(const Case& spec) {
  CaseData data = cases::build(spec);
  run(call_of(data));
  return data;
}

void expect_same(const CaseData& a, const CaseData& b) {
  test::expect_same_bits(a.o, b.o, "o"), test::expect_same_bits(a.lse, b.lse, "lse");
}

Case eight_bits() {
  Case spec{.name = "bytes", .B = 2, .Nq = 2, .Nk = 300, .Hq = 4, .Hk = 2, .D = 64, .type = Type::bf16};
  spec.backward = false, spec.used_k = {300, 65};
  spec.cached_k.type = spec.cached_v.type = Type::e4m3;
  return spec;
}

TEST(DecodeDirect, BitsAreThoseOfAQueue) { check_direct(direct_cache_cases(), decode_units, memory); }

class DecodeCaches : public testing::TestWithParam<const char*> {};

TEST_P(DecodeCaches, AgreeWithTheReference) {
  int ran = 0;
  for (const DecodeCase& c : decode_cache_cases()) {
    if (c.spec.name != GetParam()) continue;
    SCOPED_TRACE(cases::describe(c.spec) + " on " + c.architecture);
    const CaseData data = cases::build(c.spec);
    const cases::Expectation expected = cases::expect(data);
    run(call_of(data), {.architecture = c.architecture, .multiprocessors = 1 + ran % 3});
    for (const cases::OutputReport& report :
         {cases::compare("o", data.o, expected.o), cases::compare_lse(data.lse, expected.lse)})
      EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
    for (const Buffer* buffer : data.buffers()) EXPECT_TRUE(buffer->margins_intact());
    if (HasFailure()) return;
    ++ran;
  }
  EXPECT_GT(ran, 0) << "there is no such group";
}

INSTANTIATE_TEST_SUITE_P(Groups, DecodeCaches,
                         testing::Values("Scales", "Groups", "EightBits", "Trees", "Qv", "ManyRows"),
                         [](const auto& info) { return std::string(info.param); });

TEST(DecodeScales, FormsThatSayTheSameGiveTheSameBits) {
  const Case spec = eight_bits();
  const CaseData first = cases::build(spec), data = cases::build(spec);
  Buffer heads = test::of(Type::f32, {2}, {0.03, -0.007}), all(Type::f32, {2, 300, 2});
  for (std::int64_t e = 0; e < all.elements(); ++e) all.set(e, heads.get(e % 2));
  Tensor sequences = heads.tensor(), keys = heads.tensor();
  sequences.ndim = 2, sequences.shape = {2, 2, 0, 0}, sequences.strides = {0, 1, 0, 0};
  keys.ndim = 3, keys.shape = {2, 300, 2, 0}, keys.strides = {0, 0, 1, 0};
  Call call = call_of(first);
  call.inputs.k_scale = call.inputs.v_scale = heads.tensor();
  run(call);
  for (const Tensor& form : {sequences, keys, all.tensor()}) {
    Call other = call_of(data);
    other.inputs.k_scale = other.inputs.v_scale = form;
    run(other);
    expect_same(first, data);
  }
}

TEST(DecodeScales, OfOneIsNone) {
  Case spec = eight_bits();
  spec.cached_k = spec.cached_v = {};
  const CaseData plain = attended(spec), scaled = cases::build(spec);
  const Buffer one = test::of(Type::f32, {1}, {1});
  Call call = call_of(scaled);
  call.inputs.k_scale = call.inputs.v_scale = one.tensor();
  run(call);
  expect_same(plain, scaled);
}

TEST(DecodeScales, NaNReachesTheRowsThatSeeIt) {
  Case spec = eight_bits();
  spec.cached_k.scales = spec.cached_v.scales = cases::Scales::per_key;
  CaseData data = cases::build(spec);
  data.v.set(299 * 2 * 64 + 5, NAN);  // of the last key of sequence 0, head 0
  run(call_of(data));
  for (std::int64_t query = 0; query < 4; ++query)  // of both sequences
    for (std::int64_t h = 0; h < 4; ++h)
      for (std::int64_t d = 0; d < 64; ++d) {
        const double x = data.o.get((query * 4 + h) * 64 + d);
        EXPECT_EQ(x != x, query < 2 && h < 2 && d == 5) << query << " " << h << " " << d;
      }
}

// However different the scales of the others are.
TEST(DecodeScales, OfAGroupConcernNoOtherDims) {
  const Case spec = grouped_sequence(256);
  CaseData whole = cases::build(spec);
  const CaseData one_by_one = cases::build(grouped_sequence(128));
  for (std::int64_t key = 0; key < spec.Nk; ++key)
    for (const auto& [group, factor] : {std::pair{0, 0x1p-50}, {1, 0x1p50}})
      whole.v_scale.set(2 * key + group, whole.v_scale.get(2 * key + group) * factor);
  run(call_of(whole));
  for (std::int64_t group = 0; group < 2; ++group) {
    Call call = call_of(one_by_one);
    call.inputs = whole.inputs();
    call.inputs.v.data = static_cast<std::byte*>(call.inputs.v.data) + 128 * group, call.inputs.v.shape[3] = 128;
    call.inputs.v_scale.data = static_cast<float*>(call.inputs.v_scale.data) + group;
    call.inputs.v_scale.shape[3] = 1;
    run(call);
    for (std::int64_t e = 0; e < one_by_one.o.elements(); ++e)
      ASSERT_EQ(one_by_one.o.get(e), whole.o.get(e / 128 * 256 + 128 * group + e % 128)) << "group " << group;
    test::expect_same_bits(whole.lse, one_by_one.lse, "lse");
    ASSERT_NE(one_by_one.o.get(0), 0);
  }
}

TEST(DecodeScales, OfGroupsLieInPages) {
  const Case spec = grouped_sequence(256);
  const CaseData expected = attended(spec), data = cases::build(spec);
  const test::PagedCase paged(expected, {.page_size = 16, .leftpad = {5}});
  Call call = call_of(data);
  call.inputs = paged.in;
  run(call);
  expect_same(expected, data);
}

TEST(DecodePages, OfBytesHaveTheBitsOfContiguousKeys) {
  const Case spec = lone_sequence_of_bytes();
  const CaseData expected = attended(spec);
  std::uint64_t seed = 0;
  for (const std::int64_t P : {1, 3, 16, 64})
    for (const test::Table table : test::tables) {
      test::Paging paging{.page_size = P, .cache = test::caches[seed % 5], .table = table, .seed = ++seed};
      if (seed % 2) paging.leftpad = {static_cast<std::int32_t>(seed)};
      SCOPED_TRACE(test::describe(paging));
      const CaseData data = cases::build(spec);
      const test::PagedCase paged(expected, paging);
      Call call = call_of(data);
      call.inputs = paged.in;
      run(call, {.multiprocessors = static_cast<int>(1 + seed % 3)});
      expect_same(expected, data);
      if (HasFailure()) return;
    }
}

TEST(DecodeTrees, AChainHasTheBitsOfCausal) {
  for (const std::int64_t Nk : {300, 5}) {
    Case spec = with_rows("chain", 8, 1, Nk);
    spec.type = Type::bf16, spec.backward = false, spec.options.causal = true;
    const CaseData causal = attended(spec);
    spec.tree = cases::Tree::chain;
    expect_same(causal, attended(spec));
    spec.positions = true;
    expect_same(causal, attended(spec));
  }
}

// Lengths that the plan has no room for are cut, and the word says so; others leave it as it is.
TEST(DecodeStatus, ReportsWhatIsCut) {
  Case spec = lone_sequence(1, 3, false);
  spec.B = 2, spec.Nk = 1111;
  const CaseData expected = attended(spec);
  struct Row {
    std::int32_t length, leftpad, bound;
    bool cut;
  };
  for (const Row row : {Row{1111, 0, -1, false},
                        {1152, 0, -1, false},
                        {1153, 0, -1, true},
                        {-1, 0, -1, true},
                        {1111, 7, 1104, false},
                        {1111, 6, 1104, true},
                        {1111, -1, -1, true},
                        {10, 11, -1, true}}) {
    SCOPED_TRACE(row.length);
    const CaseData data = cases::build(spec);
    test::PagedCase paged(expected, {.page_size = 16, .leftpad = {0, 0}});
    Call call = call_of(data);
    call.inputs = paged.in, call.options.max_seqlen_k = row.bound;
    std::int32_t status = 4;
    call.outputs.status = Tensor(&status, Type::i32, {1});
    const Problem problem = problem_of(call);
    ASSERT_EQ(problem.Nk, 1152);  // 72 pages, of which keys fill less than 70
    paged.lengths[1] = row.length, paged.leftpad[1] = row.leftpad;
    if (row.bound >= 0) paged.lengths[0] = row.bound;
    if (row.length > 1111) {  // what the last page holds beyond the keys
      for (std::int32_t& entry : paged.table)
        if (entry < 0 || entry >= paged.pages) entry = 0;
    }
    run_plan(problem, call, {}, decode_units, memory);
    EXPECT_EQ(status, 4 | (row.cut ? beyond_bounds : 0));
    for (const Buffer* buffer : data.buffers()) EXPECT_TRUE(buffer->margins_intact());
    if (row.bound >= 0) continue;
    for (std::int64_t e = 0; e < 3 * 64; ++e) ASSERT_EQ(data.o.get(e), expected.o.get(e)) << "of the other sequence";
  }
}

}  // namespace
}  // namespace tessera::decode
