// SPDX-License-Identifier: Apache-2.0
// A problem cut into calls: the bits of one call for cuts at every tile boundary and at random ones, with every option,
// type and kernel; the accuracy of any other cut; what a carried state is where nothing has been seen.
// Links tessera_cases. Implements docs/algorithm.md, "Carried state" and "Parts of a problem".
#include "tests/support/parts.hpp"
#include <limits>

#include "cases/random.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t queries = 64, keys = 192;  // the CPU kernels' tiles

// Keys end inside a tile; rows see from none to all of it.
std::vector<Case> features() {
  const Case base{.name = "plain", .Nq = 140, .Nk = 3 * keys + 50, .Hq = 2, .Hk = 1, .D = 24, .Dv = 20};
  std::vector<Case> cases(8, base);
  cases[1].name = "causal_gqa", cases[1].options.causal = true, cases[1].Hq = 3;
  cases[2].name = "window_sinks", cases[2].sinks = Sinks::finite;
  cases[2].options.window_left = 260, cases[2].options.window_right = 3;
  cases[3].name = "softcap_alibi", cases[3].options.softcap = 3, cases[3].slopes = Slopes::per_head;
  cases[3].options.causal = true, cases[3].options.alignment = Alignment::top_left;  // many keys that nobody sees
  cases[4].name = "bias_mask", cases[4].bias = cases[4].mask = true, cases[4].mask_density = 0.4;
  cases[4].masked_bias = 0.2, cases[4].bias_dims.h = false, cases[4].mask_dims.i = false;
  cases[5].name = "dropout_sinks", cases[5].options.dropout = 0.3, cases[5].options.seed = 5;
  cases[5].sinks = Sinks::some_infinite, cases[5].B = 2, cases[5].options.causal = true;
  cases[6].name = "lengths_gaps", cases[6].B = 3, cases[6].used_q = {140, 0, 70}, cases[6].used_k = {626, 400, 192};
  cases[6].options.causal = true, cases[6].options.alignment = Alignment::top_left, cases[6].style = Style::gaps;
  cases[7].name = "few_queries", cases[7].Nq = 3, cases[7].D = 64, cases[7].options.causal = true;
  for (Case& c : cases) c.options.part_invariant = true, c.backward = false;
  return cases;
}

CaseData whole_of(const Case& spec, const Execution& execution) {
  CaseData data = build(spec);
  forward(data.inputs(), data.outputs(), data.options(), execution);
  return data;
}

// Cut like this, the case has the bits of `whole`.
void expect_same_forward(const CaseData& whole, const std::vector<std::int64_t>& row_cuts,
                         const std::vector<std::int64_t>& key_cuts, const Execution& execution) {
  CaseData data = build(whole.spec);
  for (const Piece& rows : pieces_of(whole.spec.Nq, row_cuts))
    Rows(data, rows).attend(pieces_of(whole.spec.Nk, key_cuts), data.outputs(), execution);
  expect_same_bits(whole.o, data.o, "o");
  expect_same_bits(whole.lse, data.lse, "lse");
  EXPECT_TRUE(data.o.margins_intact() && data.lse.margins_intact());
  ++case_count.judged;
}

TEST(PartsForward, HaveTheBitsOfOneCallAtEveryTileBoundary) {
  for (const std::string& kernel : cpu_kernels())
    for (const Type type : {Type::f32, Type::f16, Type::bf16})
      for (Case spec : features()) {
        spec.type = type;
        SCOPED_TRACE(kernel + " " + describe(spec));
        const Execution one{.threads = 1, .kernel = kernel.c_str()}, three{.threads = 3, .kernel = kernel.c_str()};
        const CaseData whole = whole_of(spec, three);
        for (const std::int64_t at : {keys, 2 * keys, 3 * keys}) expect_same_forward(whole, {}, {at}, one);
        expect_same_forward(whole, {queries, 2 * queries}, {keys, 2 * keys, 3 * keys, spec.Nk}, three);
        if (HasFatalFailure()) return;
      }
}

// Without a name, all parts of a problem get one kernel; and plans tell its tiles.
TEST(PartsForward, AreOfOneKernelIfNoneIsNamed) {
  for (const Type type : {Type::f32, Type::f16, Type::bf16})
    for (Case spec : features()) {
      spec.type = type;
      SCOPED_TRACE(describe(spec));
      const CaseData whole = whole_of(spec, {});
      expect_same_forward(whole, {queries}, {keys, 3 * keys}, {});
      const Plan plan = Plan::forward(whole.inputs(), whole.outputs(), whole.options());
      EXPECT_EQ(plan.query_tile(), queries);
      EXPECT_EQ(plan.key_tile(), keys);
      if (HasFatalFailure()) return;
    }
}

// A random configuration, padded, with one diagonal for all of its sequences.
Case random_part(std::uint64_t seed) {
  Case spec = random_case(seed);
  if (spec.packed()) spec.used_q.clear(), spec.used_k.clear();
  spec.packed_q.clear(), spec.packed_k.clear(), spec.endless_k = 0, spec.no_lse = false;
  spec.front_q = spec.front_k = spec.tail_q = spec.tail_k = 0;
  const bool lengths = !spec.used_q.empty() || !spec.used_k.empty();
  if (lengths && spec.options.alignment == Alignment::bottom_right) spec.options.alignment = Alignment::top_left;
  spec.options.max_seqlen_q = spec.options.max_seqlen_k = -1;
  spec.options.row0 = spec.options.row0 / queries * queries, spec.options.col0 = spec.options.col0 / keys * keys;
  spec.options.part_invariant = true;
  return spec;
}

TEST(PartsForward, RandomConfigurationsHaveTheBitsOfOneCall) {
  const auto kernels = cpu_kernels();
  for (std::uint64_t seed = 6100; seed < 6200; ++seed) {
    Case spec = random_part(seed);
    spec.backward = false;
    SCOPED_TRACE(describe(spec));
    const Execution execution{.threads = 1 + static_cast<int>(seed % 3),
                              .kernel = kernels[seed % kernels.size()].c_str()};
    const CaseData whole = whole_of(spec, execution);
    Generator g(seed);
    for (const double share : {0.3, 0.8})
      expect_same_forward(whole, some_cuts(spec.Nq, queries, share, g), some_cuts(spec.Nk, keys, share, g), execution);
    if (HasFatalFailure()) return;
  }
}

// Gradients of a case by one call: f32, without those that are sums over everything.
CaseData whole_gradients(Case spec, const Execution& execution) {
  spec.backward = spec.f32_grads = true, spec.grads = {.dbias = false, .dsinks = false};
  spec.options.accumulate = false;
  CaseData data = build(spec);
  run(data, execution);
  return data;
}

// Documents of any length, none among them, of which some keys or queries are nobody's.
Case documents(std::uint64_t seed) {
  Case spec{.name = "documents", .Hq = 4, .Hk = 2, .D = 16, .Dv = 8};
  spec.type = seed % 2 ? Type::bf16 : Type::f32;
  spec.packed_q = {150, 0, 1, 64, 230, 0}, spec.packed_k = {150, 0, 1, 400, 230, 7};
  spec.options.causal = seed % 3 != 0, spec.options.alignment = Alignment::top_left;
  if (seed % 4 == 1) spec.options.window_left = 100;
  if (seed % 4 == 2) spec.options.dropout = 0.25, spec.options.seed = seed, spec.options.batch0 = 3;
  if (seed % 4 == 3) spec.slopes = Slopes::per_head, spec.sinks = Sinks::finite;
  spec.options.part_invariant = true;
  return spec;
}

TEST(PartsOfDocuments, HaveTheBitsOfOneCall) {
  const auto kernels = cpu_kernels();
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    const Case spec = documents(seed);
    const std::string& kernel = kernels[seed % kernels.size()];
    SCOPED_TRACE(kernel + " " + describe(spec));
    const Execution execution{.threads = 2, .kernel = kernel.c_str()};
    const CaseData whole = whole_gradients(spec, execution);
    Generator g(seed);
    std::vector<Span> spans;  // in any order, some of them missing
    for (std::size_t b = 0; b < spec.packed_q.size(); ++b)
      for (const Piece& rows : pieces_of(spec.packed_q[b], some_cuts(spec.packed_q[b], queries, 0.7, g)))
        if (g.chance(0.8))
          spans.insert(spans.begin() + g.between(0, static_cast<std::int64_t>(spans.size())), {b, rows});
    Entries entries(whole, spans);
    const std::vector<Piece> ranges = pieces_of(400, some_cuts(400, keys, 0.8, g));
    entries.attend(ranges, execution);
    entries.expect_same_forward();
    if (HasFatalFailure()) return;
    entries.expect_same_backward(ranges, execution);
    if (HasFatalFailure()) return;
  }
}

// Dropout, masks and ALiBi do not ask in which entry a row is: without tiles in mind, but for the positions.
TEST(PartsForward, AnyCutIsAccurateOnEveryKernel) {
  for (const std::string& kernel : available_kernels())
    for (Case spec : features()) {
      spec.options.part_invariant = false;
      SCOPED_TRACE(kernel + " " + describe(spec));
      CaseData data = build(spec);
      const Expectation expected = expect(data);
      for (const Piece& rows : pieces_of(spec.Nq, {1, 70}))
        Rows(data, rows).attend(pieces_of(spec.Nk, {5, 5, 100, 333}), data.outputs(), {.kernel = kernel.c_str()});
      const OutputReport o = compare("o", data.o, expected.o), lse = compare_lse(data.lse, expected.lse);
      EXPECT_TRUE(o.ok) << o.detail;
      EXPECT_TRUE(lse.ok) << lse.detail;
      ++case_count.judged;
    }
}

// The case on ranks that each hold a node of the tree over segments, with its keys in pieces.
void expect_same_backward(const CaseData& whole, const std::vector<std::int64_t>& key_cuts, Generator& g,
                          const Execution& execution) {
  const Case& spec = whole.spec;
  CaseData data = build(spec);
  forward(data.inputs(), data.outputs(), data.options(), execution);
  data.dq.fill(std::vector<double>(static_cast<std::size_t>(data.dq.elements()), 0.0));
  const std::int64_t S = spec.options.segment_rows, row0 = spec.options.row0;
  const Piece segments{row0 / S, (row0 + spec.Nq + S - 1) / S};
  int level = 0;
  while (segments.begin >> level != (segments.end - 1) >> level) ++level;
  std::vector<Node> nodes;
  add_nodes(level, segments.begin >> level, segments, g, nodes);
  std::vector<Buffer> dk, dv;
  for (const Node& node : nodes) {
    dk.push_back(filled(Type::f32, {spec.B, spec.Nk, spec.Hk, spec.D}, 0));
    dv.push_back(filled(Type::f32, {spec.B, spec.Nk, spec.Hk, spec.dim_v()}, 0));
    const Piece rows{std::max<std::int64_t>(0, (node.number << node.level) * S - row0),
                     std::min(spec.Nq, ((node.number + 1) << node.level) * S - row0)};
    Rows(data, rows).differentiate(pieces_of(spec.Nk, key_cuts), dk.back(), dv.back(), execution);
  }
  expect_same_bits(whole.dq, data.dq, "dq");
  const auto expect_sum = [&](const Buffer& expected, const std::vector<Buffer>& parts, const char* name) {
    const std::vector<float> sum = fold(level, segments.begin >> level, nodes, parts);
    Buffer folded = filled(Type::f32, {spec.B, spec.Nk, spec.Hk, expected.size(3)}, 0);
    folded.fill({sum.begin(), sum.end()});
    expect_same_bits(expected, folded, name);
  };
  expect_sum(whole.dk, dk, "dk");
  expect_sum(whole.dv, dv, "dv");
  EXPECT_TRUE(data.dq.margins_intact());
  ++case_count.judged;
}

TEST(PartsBackward, HaveTheBitsOfOneCallAtEveryTileBoundary) {
  std::uint64_t seed = 0;
  for (const std::string& kernel : cpu_kernels())
    for (const Type type : {Type::f32, Type::f16, Type::bf16})
      for (Case spec : features()) {
        spec.type = type, spec.options.segment_rows = ++seed % 2 ? queries : 2 * queries;
        spec.options.row0 = static_cast<std::int64_t>(seed % 3) * queries;
        SCOPED_TRACE(kernel + " " + describe(spec));
        const Execution one{.threads = 1, .kernel = kernel.c_str()}, three{.threads = 3, .kernel = kernel.c_str()};
        const CaseData whole = whole_gradients(spec, three);
        Generator g(seed);
        expect_same_backward(whole, {keys, 2 * keys, 3 * keys, spec.Nk}, g, one);
        expect_same_backward(whole, {static_cast<std::int64_t>(1 + seed % 3) * keys}, g, three);
        if (HasFatalFailure()) return;
      }
}

TEST(PartsBackward, RandomConfigurationsHaveTheBitsOfOneCall) {
  const auto kernels = cpu_kernels();
  for (std::uint64_t seed = 6300; seed < 6360; ++seed) {
    Case spec = random_part(seed);
    Generator g(seed);
    spec.options.segment_rows = queries << g.between(0, 2);
    spec.options.row0 = g.between(0, 9) * queries;
    SCOPED_TRACE(describe(spec));
    const Execution execution{.threads = 1 + static_cast<int>(seed % 3),
                              .kernel = kernels[seed % kernels.size()].c_str()};
    expect_same_backward(whole_gradients(spec, execution), some_cuts(spec.Nk, keys, 0.6, g), g, execution);
    if (HasFatalFailure()) return;
  }
}

// The options that decide about bits cost no accuracy: 16-bit gradients, accumulation, every gradient.
TEST(PartsBackward, IsAccurate) {
  const auto kernels = cpu_kernels();
  std::vector<Execution> executions;
  for (const std::string& kernel : kernels) executions.push_back({.threads = 2, .kernel = kernel.c_str()});
  for (const Type type : {Type::f32, Type::f16, Type::bf16})
    for (Case spec : features()) {
      spec.type = type, spec.backward = true, spec.options.accumulate = spec.name == "causal_gqa";
      spec.f32_grads = spec.options.accumulate;
      if (spec.name != "plain") spec.options.segment_rows = queries;
      for (const CaseReport& report : run_case(spec, executions)) expect_ok(report);
    }
}

// Without segments the queries of a key are summed in one call, and cuts of the keys change nothing.
TEST(PartsBackward, KeysMayBeCutWithoutSegments) {
  for (const std::string& kernel : cpu_kernels())
    for (const Case& spec : features()) {
      SCOPED_TRACE(kernel + " " + describe(spec));
      const Execution execution{.threads = 2, .kernel = kernel.c_str()};
      const CaseData whole = whole_gradients(spec, execution);
      CaseData data = build(whole.spec);
      forward(data.inputs(), data.outputs(), data.options(), execution);
      for (Buffer* x : {&data.dq, &data.dk, &data.dv})
        x->fill(std::vector<double>(static_cast<std::size_t>(x->elements()), 0.0));
      Rows(data, {0, spec.Nq}).differentiate(pieces_of(spec.Nk, {keys, 3 * keys}), data.dk, data.dv, execution);
      expect_same_bits(whole.dq, data.dq, "dq");
      for (std::int64_t e = 0; e < data.dk.elements(); ++e) ASSERT_EQ(whole.dk.get(e), data.dk.get(e));
      for (std::int64_t e = 0; e < data.dv.elements(); ++e) ASSERT_EQ(whole.dv.get(e), data.dv.get(e));
      ++case_count.judged;
    }
}

// One kernel's state, finished by another.
TEST(PartsState, AnyKernelContinuesAnyOther) {
  Case spec = features()[5];
  spec.options.part_invariant = false;
  CaseData data = build(spec);
  const Expectation expected = expect(data);
  const auto kernels = available_kernels();
  for (const std::string& first : kernels)
    for (const std::string& second : kernels) {
      Rows rows(data, {0, spec.Nq});
      const Piece early{0, 250}, late{250, spec.Nk};
      forward(rows.inputs(early), {.state = rows.state()}, rows.options(early), {.kernel = first.c_str()});
      Inputs in = rows.inputs(late);
      in.state = rows.state(), in.sinks = {};
      forward(in, data.outputs(), rows.options(late), {.kernel = second.c_str()});
      const OutputReport o = compare("o", data.o, expected.o), lse = compare_lse(data.lse, expected.lse);
      EXPECT_TRUE(o.ok) << first << ", " << second << ": " << o.detail;
      EXPECT_TRUE(lse.ok) << first << ", " << second << ": " << lse.detail;
      ++case_count.judged;
    }
}

// To start from the empty state is to start from none; a call that shows no key changes nothing; a state may be written
// where it lies or elsewhere.
TEST(PartsState, TheEmptySetIsAnIdentity) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (const std::string& kernel : cpu_kernels())
    for (Case spec : features()) {
      if (spec.sinks != Sinks::none) continue;
      const Execution execution{.kernel = kernel.c_str()};
      SCOPED_TRACE(kernel + " " + spec.name);
      const CaseData whole = whole_of(spec, execution);
      CaseData data = build(spec);
      Rows empty(data, {0, spec.Nq}), some(data, {0, spec.Nq}), same(data, {0, spec.Nq});
      const Piece all{0, spec.Nk}, none{0, 0};
      Inputs nothing = same.inputs(none);
      forward(nothing, {.state = empty.state()}, empty.options(none), execution);
      for (std::int64_t e = 0; spec.used_q.empty() && e < empty.state_m.elements(); ++e) {
        EXPECT_EQ(empty.state_m.get(e), -infinity);
        EXPECT_EQ(empty.state_l.get(e), 0);
      }
      Inputs in = empty.inputs(all);
      in.state = empty.state();
      forward(in, data.outputs(), empty.options(all), execution);
      expect_same_bits(whole.o, data.o, "from the empty state, o");
      expect_same_bits(whole.lse, data.lse, "from the empty state, lse");

      forward(some.inputs(all), {.state = some.state()}, some.options(all), execution);
      nothing.state = some.state();
      forward(nothing, {.state = same.state()}, some.options(none), execution);
      expect_same_bits(some.state_o, same.state_o, "state_o");
      expect_same_bits(some.state_m, same.state_m, "state_m");
      expect_same_bits(some.state_l, same.state_l, "state_l");
      nothing.state = same.state();
      forward(nothing, {.state = same.state()}, some.options(none), execution);  // in place
      expect_same_bits(some.state_o, same.state_o, "state_o in place");
      data.o.restore(), data.lse.restore();
      forward(nothing, data.outputs(), some.options(none), execution);
      expect_same_bits(whole.o, data.o, "finished without keys, o");
      expect_same_bits(whole.lse, data.lse, "finished without keys, lse");
      ++case_count.judged;
      if (HasFatalFailure()) return;
    }
}

}  // namespace
}  // namespace tessera::test
