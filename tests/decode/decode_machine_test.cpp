// SPDX-License-Identifier: Apache-2.0
// The `decode` kernels' own text, run on the host (tests/emulated): the schedule, copies that arrive as late as they
// may, products, masks, softmax, the stack, siblings and epilogue, against float64. Links tessera_cases; its include
// path puts tests/emulated before src.
#include "cases/generator.hpp"
#include "tests/decode/decode_run.hpp"
#include "tests/support/support.hpp"

namespace tessera::decode {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];
}

#include "decode_units.hpp"  // written while this is built

namespace tessera::decode {
namespace {

using cases::Case;

void run(const Call& call, const Run& how) { run_plan(problem_of(call), call, how, decode_units, memory); }

// Keys of later tokens are larger.
void grow(cases::CaseData& data, double growth) {
  const std::int64_t width = data.spec.Hk * data.spec.D;
  for (std::int64_t e = 0; e < data.k.elements(); ++e)
    data.k.set(e, data.k.get(e) * (1 + growth * double(e / width % data.spec.Nk)));
}

void judge(const cases::CaseData& data, const cases::Expectation& expected) {
  for (const cases::OutputReport& report :
       {cases::compare("o", data.o, expected.o), cases::compare_lse(data.lse, expected.lse)})
    EXPECT_TRUE(report.ok || (data.spec.no_lse && report.name == "lse")) << report.name << " " << report.detail;
  for (const cases::Buffer* buffer : data.buffers())
    EXPECT_TRUE(buffer->margins_intact()) << "a margin or gap was written";
}

class DecodeAttend : public testing::TestWithParam<const char*> {};

TEST_P(DecodeAttend, AgreesWithTheReference) {
  int ran = 0;
  for (const DecodeCase& c : decode_cases()) {
    if (c.spec.name != GetParam()) continue;
    SCOPED_TRACE(cases::describe(c.spec) + " on " + c.architecture);
    cases::CaseData data = cases::build(c.spec);
    if (c.growth > 0) grow(data, c.growth);
    const cases::Expectation expected = cases::expect(data);
    run(call_of(data), {.architecture = c.architecture, .multiprocessors = 1 + ran % 3});
    judge(data, expected);
    if (HasFailure()) return;
    ++ran;
  }
  EXPECT_GT(ran, 0) << "there is no such group";
}

INSTANTIATE_TEST_SUITE_P(Groups, DecodeAttend,
                         testing::Values("Lengths", "Rows", "HeadDims", "Causal", "Windows", "Packed", "UsedLengths",
                                         "Layouts", "Options", "ExtremeNumbers", "ManyRows"),
                         [](const auto& info) { return std::string(info.param); });

// Lengths, masks, layouts and distributions at random, on the tiles of the cases: up to 8 rows, or up to 64.
Case random_case(std::uint64_t seed) {
  cases::Generator g(seed);
  Case c{.name = "random", .Hk = g.between(1, 2), .D = 64, .type = Type::bf16, .backward = false, .seed = seed};
  const std::int64_t group = g.between(1, 4), most_queries = g.chance(0.8) ? 8 / group : g.between(33, 64) / group;
  c.Hq = group * c.Hk, c.B = g.between(1, 4);
  c.Nq = g.between(1, most_queries), c.Nk = g.chance(0.2) ? g.between(1, 3) : g.between(1, 900);
  Options& o = c.options;
  o.causal = g.chance(0.5), o.alignment = g.chance(0.7) ? Alignment::bottom_right : Alignment::top_left;
  if (g.chance(0.4)) o.window_left = g.between(0, 600);
  if (g.chance(0.3)) o.window_right = g.between(0, 300);
  if (g.chance(0.3)) o.row0 = g.between(0, 300), o.col0 = g.between(0, 300);
  if (g.chance(0.4)) c.sinks = g.chance(0.5) ? cases::Sinks::finite : cases::Sinks::some_infinite;
  if (g.chance(0.3)) c.style = cases::Style::heads_first;
  if (g.chance(0.3)) c.distribution = g.chance(0.5) ? cases::Distribution::outlier : cases::Distribution::structured;
  const auto any = [&](std::int64_t most) { return static_cast<std::int32_t>(g.between(0, most)); };
  if (g.chance(0.3)) {
    for (std::int64_t b = 0; b < c.B; ++b) c.packed_q.push_back(any(c.Nq)), c.packed_k.push_back(any(c.Nk));
    c.packed_q[0] = static_cast<std::int32_t>(c.Nq), o.max_seqlen_q = c.Nq;
  } else if (g.chance(0.5)) {
    for (std::int64_t b = 0; b < c.B; ++b) c.used_q.push_back(any(c.Nq)), c.used_k.push_back(any(c.Nk));
  }
  return c;
}

TEST(DecodeRandom, AgreesWithTheReference) {
  int ran = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const Case spec = random_case(seed);
    SCOPED_TRACE(cases::describe(spec));
    cases::CaseData data = cases::build(spec);
    const Call call = call_of(data);
    const Problem problem = problem_of(call);
    // Between 9 and 32 rows there is no tile among the cases'.
    if (const std::int64_t rows = rows_of(problem); rows > 8 && rows <= 32) continue;
    const cases::Expectation expected = cases::expect(data);
    run(call, {.multiprocessors = 1 + static_cast<int>(seed % 4), .shuffle = static_cast<std::uint32_t>(seed)});
    judge(data, expected);
    if (HasFailure()) return;
    ++ran;
  }
  EXPECT_GE(ran, 45);
}

}  // namespace
}  // namespace tessera::decode
