// SPDX-License-Identifier: Apache-2.0
// Same bits on the GPU: 100 times in a row, for a sequence in any company, and of dropout as on the CPU.
// Links tessera_cases. Implements docs/numerics.md, "Deterministic, batch-invariant", and docs/algorithm.md, "Dropout".
#include <cmath>
#include <cstring>
#include <tuple>

#include "tests/gpu/support.hpp"
#include "tests/support/company.hpp"

namespace tessera::test {
namespace {

// --- repetitions -----------------------------------------------------------------------------------------------------

constexpr int repetitions = 100;

// Many blocks at once, so that their order varies; options that change the kernels' paths.
std::vector<Case> repeated() {
  return {
      {.name = "many_heads", .B = 2, .Nq = 512, .Nk = 512, .Hq = 16, .Hk = 16, .D = 64},
      {.name = "causal_gqa", .B = 3, .Nq = 300, .Nk = 700, .Hq = 8, .Hk = 2, .D = 128, .options = {.causal = true}},
      {.name = "one_query", .B = 4, .Nq = 1, .Nk = 4000, .Hq = 8, .Hk = 1, .D = 64},
      {.name = "one_key_block", .B = 1, .Nq = 5000, .Nk = 40, .Hq = 2, .Hk = 2, .D = 32, .type = Type::f16},
      {.name = "packed",
       .Hq = 4,
       .Hk = 2,
       .D = 80,
       .type = Type::bf16,
       .options = {.window_left = 200, .window_right = 30},
       .packed_q = {400, 0, 33, 129, 700},
       .packed_k = {400, 50, 0, 300, 700}},
  };
}

Case everything_at_once() {
  Case c = find_case("everything_packed_f32");
  c.packed_q = {300, 0, 17, 400}, c.packed_k = {300, 30, 0, 500};
  c.options.accumulate = false;  // the buffers would grow from run to run
  return c;
}

class GpuRepetitions : public GpuWith<std::string> {};

void expect_same_bytes(const Buffer& a, const Buffer& b, const char* name, int run) {
  ASSERT_EQ(a.bytes().size(), b.bytes().size());
  if (!a || std::memcmp(a.bytes().data(), b.bytes().data(), a.bytes().size()) == 0) return;
  ADD_FAILURE() << name << " of run " << run << " differs";
  expect_same_bits(a, b, name);
}

TEST_P(GpuRepetitions, GiveTheSameBits) {
  const std::string& rung = GetParam();
  std::vector<Case> cases = repeated();
  if (is_general(rung)) cases.push_back(everything_at_once());
  for (Case& spec : cases) {
    SCOPED_TRACE(spec.name);
    spec.backward = rung != "tiled";  // its sums are atomic: their order is free
    CaseData first = build(spec), again = build(spec);
    OnGpu on_first(first, rung), on_again(again, rung);
    on_first.run();
    on_first.finish();
    for (int run = 0; run < repetitions; ++run) {
      on_again.upload();  // results of the run before become NaN again
      on_again.run();
      on_again.finish();
      for (const auto& [name, member] : {std::pair{"o", &CaseData::o},
                                         {"lse", &CaseData::lse},
                                         {"dq", &CaseData::dq},
                                         {"dk", &CaseData::dk},
                                         {"dv", &CaseData::dv},
                                         {"dbias", &CaseData::dbias},
                                         {"dsinks", &CaseData::dsinks}}) {
        expect_same_bytes(first.*member, again.*member, name, run);
        (again.*member).restore();
      }
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuRepetitions, testing::ValuesIn(all_rungs()));

// --- company ---------------------------------------------------------------------------------------------------------

// Lengths around the tiles of every rung, with heads of one size: few kernels to compile.
std::vector<Case> lengths() {
  std::vector<Case> all;
  for (std::int64_t Nq : {1, 17, 63, 64, 65, 129, 300})
    for (bool causal : {false, true}) {
      const std::int64_t Nk = causal ? Nq + 40 : 520 - Nq;
      Case c{.name = "length", .Nq = Nq, .Nk = Nk, .Hq = 4, .Hk = 2, .D = 64};
      c.name += std::to_string(Nq) + (causal ? "_causal" : ""), c.options.causal = causal;
      all.push_back(c);
    }
  return all;
}

class GpuCompany : public GpuWith<std::tuple<std::string, Type>> {};

TEST_P(GpuCompany, ASequenceHasTheSameBitsAloneInABatchAndPacked) {
  const auto& [rung, type] = GetParam();
  std::size_t ran = 0;
  std::vector<Case> cases = mixes();
  for (const Case& c : lengths()) cases.push_back(c);
  for (Case& spec : cases) {
    SCOPED_TRACE(spec.name);
    spec.type = type;
    Case lone = spec;
    lone.options.batch0 = place;  // dropout counts sequences: the lone one keeps its number
    const std::optional<CaseData> alone = ran_on(rung, lone);
    if (!alone) continue;
    for (const Company& other : companies(spec)) {
      SCOPED_TRACE(other.name);
      CaseData company = build(other.spec);
      take_place(*alone, company);
      OnGpu on(company, rung);
      on.run();
      on.finish();
      expect_same_sequence(*alone, company);
      if (HasFatalFailure()) return;
      ++ran;
    }
  }
  EXPECT_GE(ran, 4 * 14U) << "too much was refused";
}

INSTANTIATE_TEST_SUITE_P(All, GpuCompany,
                         testing::Combine(testing::ValuesIn(exact_rungs()),
                                          testing::Values(Type::f32, Type::f16, Type::bf16)));

// --- dropout ---------------------------------------------------------------------------------------------------------

struct Dropping {
  double p;
  std::uint64_t seed, offset;
  std::int64_t row0 = 0, col0 = 0, head0 = 0, batch0 = 0;
  bool rng = false;  // seed and offset in the GPU's memory
};

constexpr Dropping droppings[] = {
    {.p = 0.1, .seed = 0, .offset = 0},
    {.p = 0.5, .seed = 0x123456789ABCD, .offset = 77},
    {.p = 0.9, .seed = 5, .offset = 0x1234567890123, .row0 = 33, .col0 = 101, .head0 = 5, .batch0 = 9},
    {.p = 0.25, .seed = 42, .offset = 1, .rng = true},
    {.p = 0.75, .seed = 0xFEDCBA987654, .offset = 3, .row0 = 4099, .col0 = 7, .head0 = 1, .batch0 = 2, .rng = true},
    {.p = 0.5, .seed = 9, .offset = 9, .row0 = (std::int64_t{1} << 33) - 50, .col0 = (std::int64_t{1} << 31) - 81},
};

constexpr std::int64_t sequences = 2, heads = 2, queries = 96, keys = 160;

Case dropout_case(const Dropping& drop, Type type) {
  Case c{.name = "dropout", .B = sequences, .Nq = queries, .Nk = keys, .Hq = heads, .Hk = heads};
  c.type = type, c.rng = drop.rng;
  c.options.dropout = drop.p, c.options.seed = drop.seed, c.options.seed_offset = drop.offset;
  c.options.row0 = drop.row0, c.options.col0 = drop.col0, c.options.head0 = drop.head0;
  c.options.batch0 = drop.batch0;
  return c;
}

// What the library's own mask says, element (b,h,i,j) after element.
std::vector<bool> mask_of_the_cpu(const Dropping& drop) {
  Buffer mask(Type::u8, {sequences, heads, queries, keys});
  dropout_mask(mask.tensor(), dropout_case(drop, Type::f32).options);
  std::vector<bool> kept;
  for (std::int64_t e = 0; e < mask.elements(); ++e) kept.push_back(mask.get(e) != 0);
  return kept;
}

// One element of a [B,N,H,D] tensor.
std::int64_t element(const Buffer& t, std::int64_t b, std::int64_t n, std::int64_t h, std::int64_t d) {
  return ((b * t.size(1) + n) * t.size(2) + h) * t.size(3) + d;
}

// Fills a [B,N,H,D] tensor by a function of row and column.
template <class Value>
void fill_rows(Buffer& t, Value value) {
  for (std::int64_t e = 0; e < t.elements(); ++e) t.set(e, value(e / t.size(3) / t.size(2) % t.size(1), e % t.size(3)));
}

// Calls check(b, h, i, j, kept) for every element of the scores, until one fails.
template <class Check>
void each_score(const std::vector<bool>& kept, Check check) {
  std::size_t e = 0;
  for (std::int64_t b = 0; b < sequences; ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = 0; i < queries; ++i)
        for (std::int64_t j = 0; j < keys; ++j) {
          check(b, h, i, j, kept[e++]);
          if (testing::Test::HasFatalFailure()) return;
        }
}

class GpuDropout : public GpuWith<std::tuple<Dropping, Type>> {};

// All scores are 0 and row j of V is the unit vector j: element j of a row of O is 0 exactly where the mask drops it.
TEST_P(GpuDropout, ForwardDropsWhatTheCpuDrops) {
  const auto& [drop, type] = GetParam();
  Case spec = dropout_case(drop, type);
  spec.D = 64, spec.Dv = keys, spec.backward = false;
  CaseData data = build(spec);
  fill_rows(data.q, [](auto, auto) { return 0; });
  fill_rows(data.v, [](std::int64_t j, std::int64_t d) { return j == d; });
  OnGpu on(data, vector_rung);
  on.run();
  on.finish();
  const std::vector<bool> kept = mask_of_the_cpu(drop);
  each_score(kept, [&](auto b, auto h, auto i, auto j, bool keeps) {
    ASSERT_EQ(data.o.get(element(data.o, b, i, h, j)) != 0, keeps) << b << "," << h << "," << i << "," << j;
  });
}

// q_i and k_j are unit vectors of different axes, so that all scores are 0; dO_i is the unit vector i, rows of V are 1,
// and O is given as 0. Then ds_ij = p z / (1 - t/65536), and all three gradients show z element by element.
TEST_P(GpuDropout, BackwardDropsWhatTheCpuDrops) {
  const auto& [drop, type] = GetParam();
  Case spec = dropout_case(drop, type);
  spec.D = queries + keys, spec.Dv = queries;
  CaseData data = build(spec);
  fill_rows(data.q, [](std::int64_t i, std::int64_t d) { return d == i; });
  fill_rows(data.k, [](std::int64_t j, std::int64_t d) { return d == queries + j; });
  fill_rows(data.v, [](auto, auto) { return 1; });
  fill_rows(data.d_o, [](std::int64_t i, std::int64_t d) { return d == i; });
  fill_rows(data.o, [](auto, auto) { return 0; });
  for (std::int64_t e = 0; e < data.lse.elements(); ++e) data.lse.set(e, std::log(double(keys)));
  OnGpu on(data, vector_rung);
  on.backward();
  on.finish();
  const std::vector<bool> kept = mask_of_the_cpu(drop);
  each_score(kept, [&](auto b, auto h, auto i, auto j, bool keeps) {
    const auto where = [&](const char* name) {
      return std::string(name) + ": " + std::to_string(b) + "," + std::to_string(h) + "," + std::to_string(i) + "," +
             std::to_string(j);
    };
    ASSERT_EQ(data.dv.get(element(data.dv, b, j, h, i)) != 0, keeps) << where("dv");
    ASSERT_EQ(data.dk.get(element(data.dk, b, j, h, i)) != 0, keeps) << where("dk");
    ASSERT_EQ(data.dq.get(element(data.dq, b, i, h, queries + j)) != 0, keeps) << where("dq");
  });
}

INSTANTIATE_TEST_SUITE_P(All, GpuDropout,
                         testing::Combine(testing::ValuesIn(droppings), testing::Values(Type::f32, Type::bf16)));

}  // namespace
}  // namespace tessera::test
