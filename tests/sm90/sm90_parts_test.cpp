// SPDX-License-Identifier: Apache-2.0
// A problem cut into calls of the Hopper forward kernel, whose own text runs on the host (tests/emulated): the bits of
// one call for cuts at every tile boundary and at random ones, against float64, whatever the state passes through.
// Links tessera_cases; its include path puts tests/emulated before src. docs/algorithm.md, "Carried state".
#include "tests/emulated/hopper.hpp"

#include "hopper_part_tiles.hpp"  // written while this is built
#include "tests/emulated/part_cases.hpp"
#include "tests/support/parts.hpp"

namespace tessera::sm90 {
namespace {

using cases::CaseData;
using emulated::EmulatedCase;
using test::Piece;
using test::pieces_of;

template <int Dv, Element o>
void pass(const gpu::StateParams& p, std::int64_t blocks) {
  emulated::Machine::here().run(static_cast<int>(blocks), 128, 128,
                                [&] { gpu::pass_states<gpu::RowConfig{.threads = 128, .Dv = Dv, .o = o}>(p); });
}

// A call without keys, as gpu/row_steps.cpp launches it.
void run_without_keys(const Inputs& in, const Outputs& out, const Options& options) {
  Call call{};
  call.inputs = in, call.outputs = out, call.options = options;
  const Problem p = check_forward(in, out, options, {});
  const auto whole = static_cast<float>(dropout_scale(dropout_threshold(options.dropout)));
  const gpu::StateParams params{gpu::forward_params(p, call, options.scale), gpu::states_of(p, call), whole};
  const std::int64_t blocks = gpu::query_blocks(p, 4);
  const bool f32 = p.state_out || p.o_type == Type::f32;
  if (p.Dv == 64 && p.q_type == Type::f16)
    return f32 ? pass<64, Element::f32>(params, blocks) : pass<64, Element::f16>(params, blocks);
  if (p.Dv == 64) return f32 ? pass<64, Element::f32>(params, blocks) : pass<64, Element::bf16>(params, blocks);
  if (p.Dv == 128) return f32 ? pass<128, Element::f32>(params, blocks) : pass<128, Element::bf16>(params, blocks);
  f32 ? pass<256, Element::f32>(params, blocks) : pass<256, Element::bf16>(params, blocks);
}

void run(const Inputs& in, const Outputs& out, const Options& options) {
  if (in.k.shape[1] == 0) return run_without_keys(in, out, options);
  run_emulated<HOPPER_PART_TILES>(in, out, options, 0);
}

// Keys of later tokens are larger: scores jump from tile to tile.
CaseData build(const EmulatedCase& c) {
  CaseData data = cases::build(c.spec);
  const std::int64_t width = c.spec.Hk * c.spec.D;
  for (std::int64_t e = 0; c.growth > 0 && e < data.k.elements(); ++e)
    data.k.set(e, data.k.get(e) * (1 + c.growth * double(e / width % c.spec.Nk)));
  return data;
}

CutTiles tiles_of(const CaseData& data) {
  const Problem p = check_forward(data.inputs(), data.outputs(), data.options(), {});
  const Config c = plan_forward(p, cuda::target_named("sm_90a")).config;
  return {rows_of(c), c.block_keys};
}

void expect_same(const CaseData& whole, const EmulatedCase& c, const std::vector<std::int64_t>& row_cuts,
                 const std::vector<std::int64_t>& key_cuts) {
  CaseData data = build(c);
  for (const Piece& rows : pieces_of(c.spec.Nq, row_cuts))
    test::Rows(data, rows).attend_by(pieces_of(c.spec.Nk, key_cuts), data.outputs(), run);
  test::expect_same_bits(whole.o, data.o, "o");
  test::expect_same_bits(whole.lse, data.lse, "lse");
  EXPECT_TRUE(data.o.margins_intact() && data.lse.margins_intact());
}

// Cut at every tile boundary alone, at all of them, also those of queries, and at some.
void expect_bits_of_one_call(const EmulatedCase& c) {
  CaseData whole = build(c);
  run(whole.inputs(), whole.outputs(), whole.options());
  judge(whole, cases::expect(whole), true);
  const CutTiles tiles = tiles_of(whole);
  std::vector<std::int64_t> every;
  for (std::int64_t at = tiles.keys; at < c.spec.Nk; at += tiles.keys) {
    every.push_back(at);
    expect_same(whole, c, {}, {at});
  }
  ASSERT_FALSE(every.empty()) << "nothing is cut";
  every.push_back(c.spec.Nk);  // the last call has no keys, and finishes
  expect_same(whole, c, {tiles.queries}, every);
  cases::Generator g(c.spec.seed);
  expect_same(whole, c, test::some_cuts(c.spec.Nq, tiles.queries, 0.5, g),
              test::some_cuts(c.spec.Nk, tiles.keys, 0.5, g));
}

TEST(HopperParts, HaveTheBitsOfOneCall) {
  for (const EmulatedCase& c : emulated::part_cases()) {
    SCOPED_TRACE(cases::describe(c.spec));
    expect_bits_of_one_call(c);
    if (HasFailure()) return;
  }
}

// Any cut gives an accurate result, and so does a state that passes through the CPU's kernels.
TEST(HopperParts, ContinueAnyState) {
  for (EmulatedCase c : emulated::part_cases()) {
    if (c.spec.name != "growing" && c.spec.name != "dropout_sinks") continue;
    SCOPED_TRACE(c.spec.name);
    CaseData data = build(c);
    const cases::Expectation expected = cases::expect(data);
    for (const int first : {0, 1}) {
      int calls = first;
      test::Rows(data, {0, c.spec.Nq})
          .attend_by(pieces_of(c.spec.Nk, {5, 5, 77}), data.outputs(),
                     [&](const Inputs& in, const Outputs& out, Options options) {
                       options.part_invariant = false;
                       if (++calls % 2)
                         forward(in, out, options);
                       else
                         run(in, out, options);
                     });
      judge(data, expected, true);
      data.o.restore(), data.lse.restore();
    }
  }
}

// Rows of a warp whose scores jump from tile to tile need new maxima; that must not change a bit of their neighbours.
TEST(HopperParts, NeighboursDecideNothing) {
  EmulatedCase c = emulated::part_cases()[0];
  ASSERT_EQ(c.spec.name, "plain");
  c.spec.Nq = 16, c.growth = 0.002;
  const Piece rows{0, 8};
  const std::int64_t width = c.spec.Hq * c.spec.D;
  CaseData whole = build(c), some = build(c);
  for (std::int64_t e = rows.end * width; e < c.spec.Nq * width; ++e) whole.q.set(e, whole.q.get(e) * 8);
  run(whole.inputs(), whole.outputs(), whole.options());
  test::Rows(some, rows).attend_by({{0, c.spec.Nk}}, some.outputs(), run);
  for (std::int64_t e = 0; e < rows.end * width; ++e) ASSERT_EQ(whole.o.get(e), some.o.get(e)) << e;
}

}  // namespace
}  // namespace tessera::sm90
