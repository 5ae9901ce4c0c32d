// Same bits: for any number of threads, run after run, and for a sequence alone, padded in a batch, packed among
// others. Links tessera_cases. Implements docs/numerics.md, "Deterministic, batch-invariant".
#include "cases/random.hpp"
#include "tests/support.hpp"

namespace tessera::test {
namespace {

// Gradients included; cases with partial tiles both ways.
std::vector<Case> mixes() {
  return {
      {.name = "plain", .Nq = 130, .Nk = 400, .Hq = 4, .Hk = 2, .D = 40},
      {.name = "causal_gqa", .Nq = 140, .Nk = 400, .Hq = 6, .Hk = 2, .D = 32, .options = {.causal = true}},
      {.name = "window_softcap",
       .Nq = 300,
       .Nk = 210,
       .Hq = 2,
       .Hk = 1,
       .D = 24,
       .Dv = 56,
       .options = {.softcap = 3, .window_left = 100, .window_right = 40},
       .dlse = true},
      {.name = "bias_mask_dropout",
       .Nq = 129,
       .Nk = 385,
       .Hq = 2,
       .Hk = 2,
       .D = 16,
       .options = {.causal = true, .dropout = 0.3, .seed = 5},
       .bias = true,
       .bias_f32 = true,
       .mask = true},
      {.name = "alibi_sinks",
       .Nq = 66,
       .Nk = 194,
       .Hq = 4,
       .Hk = 1,
       .D = 72,
       .slopes = Slopes::per_head,
       .sinks = Sinks::finite,
       .dlse = true,
       .f32_o = true,
       .f32_grads = true},
      {.name = "one_query", .Nq = 1, .Nk = 500, .Hq = 8, .Hk = 2, .D = 64},
  };
}

template <class Body>
void in_each_type_and_kernel(Body body) {
  for (const std::string& kernel : available_kernels())
    for (Type type : {Type::f32, Type::f16, Type::bf16})
      for (Case spec : mixes()) {
        if (kernel == "reference" && type != Type::f32) continue;  // slow, and of one text for all types
        spec.type = type;
        SCOPED_TRACE(kernel + " " + name_of(type) + " " + spec.name);
        body(spec, kernel);
        if (testing::Test::HasFatalFailure()) return;
      }
}

void expect_same_outputs(const CaseData& a, const CaseData& b) {
  expect_same_bits(a.o, b.o, "o");
  expect_same_bits(a.lse, b.lse, "lse");
  expect_same_bits(a.dq, b.dq, "dq");
  expect_same_bits(a.dk, b.dk, "dk");
  expect_same_bits(a.dv, b.dv, "dv");
  expect_same_bits(a.dbias, b.dbias, "dbias");
  expect_same_bits(a.dsinks, b.dsinks, "dsinks");
}

CaseData ran(const Case& spec, const std::string& kernel, int threads) {
  CaseData data = build(spec);
  run(data, {.threads = threads, .kernel = kernel.c_str()});
  return data;
}

TEST(Threads, OneTwoAndSevenGiveTheSameBits) {
  in_each_type_and_kernel([](Case spec, const std::string& kernel) {
    spec.B = 2;
    const CaseData one = ran(spec, kernel, 1);
    for (int threads : {2, 7}) expect_same_outputs(one, ran(spec, kernel, threads));
  });
}

TEST(Threads, RandomConfigurationsGiveTheSameBits) {
  const auto kernels = available_kernels();
  for (std::uint64_t seed = 900; seed < 940; ++seed) {
    const Case spec = random_case(seed);
    SCOPED_TRACE(describe(spec));
    const std::string& kernel = kernels[seed % kernels.size()];
    const CaseData one = ran(spec, kernel, 1);
    for (int threads : {2, 7}) expect_same_outputs(one, ran(spec, kernel, threads));
  }
}

TEST(Runs, TwoRunsGiveTheSameBits) {
  in_each_type_and_kernel([](const Case& spec, const std::string& kernel) {
    expect_same_outputs(ran(spec, kernel, 0), ran(spec, kernel, 0));
  });
}

// --- one sequence in different company ------------------------------------------------------------------------------

constexpr std::size_t neighbours = 7, place = 3;

struct Company {
  const char* name;
  Case spec;
};

std::vector<Company> companies(const Case& alone) {
  const auto Nq = static_cast<std::int32_t>(alone.Nq), Nk = static_cast<std::int32_t>(alone.Nk);
  const std::vector<std::int32_t> lengths_q = {5, Nq + 40, 0, Nq, 64, 1, 2 * Nq};
  const std::vector<std::int32_t> lengths_k = {200, Nk, 30, Nk, 0, Nk + 9, 17};
  Case equal = alone, padded = alone, packed = alone, hinted = alone;
  equal.B = neighbours;
  padded.B = neighbours, padded.Nq = 2 * Nq + 64, padded.Nk = std::max(Nk + 9, 200);
  padded.used_q = lengths_q, padded.used_k = lengths_k;
  packed.packed_q = lengths_q, packed.packed_k = lengths_k;
  hinted = packed, hinted.tail_q = 70, hinted.tail_k = 3, hinted.style = Style::heads_first;
  hinted.options.max_seqlen_q = 2 * Nq + 1000, hinted.options.max_seqlen_k = Nk + 1000;
  return {{"equal lengths", equal}, {"padded", padded}, {"packed", packed}, {"packed, hints, other strides", hinted}};
}

// Calls visit(element of the lone sequence, element in company) for each element of a Q-like tensor.
template <class Visit>
void each_row_element(std::int64_t row_a, std::int64_t row_b, std::int64_t rows, std::int64_t width, Visit visit) {
  for (std::int64_t e = 0; e < rows * width; ++e) visit(row_a * width + e, row_b * width + e);
}
template <class Visit>
void each_lse_element(const CaseData& a, const CaseData& b, Visit visit) {
  const Sequence &s = a.sequences[0], &t = b.sequences[place];
  for (std::int64_t h = 0; h < a.spec.Hq; ++h)
    for (std::int64_t i = 0; i < s.Nq; ++i) visit(s.lse_first + h * s.lse_head + i, t.lse_first + h * t.lse_head + i);
}
template <class Visit>
void each_score_element(const Buffer& a, const Buffer& b, Visit visit) {
  const std::int64_t Mq = a.size(2), Mk = a.size(3), H = a.size(1);
  for (std::int64_t e = 0; e < a.elements(); ++e) {
    const std::int64_t j = e % Mk, i = e / Mk % Mq, h = e / Mk / Mq;
    visit(e, ((static_cast<std::int64_t>(place) * H + h) * b.size(2) + i) * b.size(3) + j);
  }
}

void take_place(const CaseData& alone, CaseData& company) {
  const Sequence &s = alone.sequences[0], &t = company.sequences[place];
  const Case& c = alone.spec;
  const auto copy = [](const Buffer& from, Buffer& to) {
    return [&from, &to](std::int64_t a, std::int64_t b) { to.set(b, from.get(a)); };
  };
  each_row_element(s.row_q, t.row_q, s.Nq, c.Hq * c.D, copy(alone.q, company.q));
  each_row_element(s.row_k, t.row_k, s.Nk, c.Hk * c.D, copy(alone.k, company.k));
  each_row_element(s.row_k, t.row_k, s.Nk, c.Hk * c.dim_v(), copy(alone.v, company.v));
  each_row_element(s.row_q, t.row_q, s.Nq, c.Hq * c.dim_v(), copy(alone.d_o, company.d_o));
  if (alone.d_lse) each_lse_element(alone, company, copy(alone.d_lse, company.d_lse));
  if (alone.bias) each_score_element(alone.bias, company.bias, copy(alone.bias, company.bias));
  if (alone.mask) each_score_element(alone.mask, company.mask, copy(alone.mask, company.mask));
}

void expect_same_sequence(const CaseData& alone, const CaseData& company) {
  const Sequence &s = alone.sequences[0], &t = company.sequences[place];
  const Case& c = alone.spec;
  const auto same = [](const char* name, const Buffer& x, const Buffer& y) {
    return [name, &x, a = x.bits(), b = y.bits()](std::int64_t m, std::int64_t n) {
      ASSERT_EQ(a[static_cast<std::size_t>(m)], b[static_cast<std::size_t>(n)]) << name << x.index(m);
    };
  };
  each_row_element(s.row_q, t.row_q, s.Nq, c.Hq * c.dim_v(), same("o", alone.o, company.o));
  each_lse_element(alone, company, same("lse", alone.lse, company.lse));
  each_row_element(s.row_q, t.row_q, s.Nq, c.Hq * c.D, same("dq", alone.dq, company.dq));
  each_row_element(s.row_k, t.row_k, s.Nk, c.Hk * c.D, same("dk", alone.dk, company.dk));
  each_row_element(s.row_k, t.row_k, s.Nk, c.Hk * c.dim_v(), same("dv", alone.dv, company.dv));
  if (alone.dbias) each_score_element(alone.dbias, company.dbias, same("dbias", alone.dbias, company.dbias));
}

TEST(Batch, ASequenceHasTheSameBitsAloneInABatchAndPacked) {
  in_each_type_and_kernel([](const Case& spec, const std::string& kernel) {
    Case lone = spec;
    lone.options.batch0 = place;  // dropout counts sequences: the lone one keeps its number
    const CaseData alone = ran(lone, kernel, 2);
    for (const Company& other : companies(spec)) {
      SCOPED_TRACE(other.name);
      CaseData company = build(other.spec);
      take_place(alone, company);
      run(company, {.threads = 2, .kernel = kernel.c_str()});
      expect_same_sequence(alone, company);
    }
  });
}

TEST(Hints, MaximumLengthsNeverChangeABit) {
  for (const std::string& kernel : available_kernels()) {
    Case spec = find_case("everything_packed_f32");
    const CaseData none = ran(spec, kernel, 0);
    for (std::int64_t beyond : {0, 1, 5000}) {
      spec.options.max_seqlen_q = 130 + beyond, spec.options.max_seqlen_k = 194 + beyond;
      expect_same_outputs(none, ran(spec, kernel, 0));
    }
  }
}

}  // namespace
}  // namespace tessera::test
