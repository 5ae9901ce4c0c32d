// SPDX-License-Identifier: Apache-2.0
// A problem cut into calls on a Hopper GPU: the bits of one call for cuts at every tile boundary, accuracy for any
// other. Links tessera_cases. Implements docs/algorithm.md, "Carried state" and "Parts of a problem".
// tests/sm90/sm90_parts_test.cpp runs the kernel's text without a GPU.
#include "tests/support/parts.hpp"

#include "tests/gpu/support.hpp"

namespace tessera::test {
namespace {

// Keys end inside a tile; rows see from none to all of it.
std::vector<Case> features() {
  const Case base{
      .name = "plain", .Nq = 300, .Nk = 1000, .Hq = 4, .Hk = 2, .D = 128, .type = Type::bf16, .backward = false};
  std::vector<Case> cases(8, base);
  cases[1].name = "causal", cases[1].options.causal = true, cases[1].Nq = 1000;
  cases[2].name = "narrow_f16", cases[2].D = 64, cases[2].type = Type::f16;
  cases[3].name = "window_sinks", cases[3].D = 64, cases[3].Nq = 1000, cases[3].sinks = Sinks::finite;
  cases[3].options.window_left = 260, cases[3].options.window_right = 3;
  cases[4].name = "wide", cases[4].D = 256;
  cases[5].name = "wide_f16", cases[5].D = 192, cases[5].type = Type::f16, cases[5].f32_o = true;
  cases[6].name = "softcap_mask", cases[6].options.softcap = 3, cases[6].mask = true, cases[6].mask_density = 0.1;
  cases[7].name = "dropout_sinks", cases[7].options.dropout = 0.3, cases[7].options.seed = 5, cases[7].B = 2;
  cases[7].sinks = Sinks::some_infinite, cases[7].options.causal = true;
  return cases;
}

// A case on the GPU, with a state for all of its rows.
class Parts {
 public:
  explicit Parts(CaseData& data) : data(data), placed(data, gpu) {
    const Case& c = data.spec;
    const std::int64_t rows = c.B * c.Hq * c.Nq;
    for (const std::int64_t bytes : {rows * c.dim_v() * 4, rows * 4, rows * 8}) {
      memory.push_back(std::make_unique<DeviceMemory>(gpu, static_cast<std::size_t>(bytes)));
      memory.back()->fill(std::byte{0xFF});
    }
    state = {{memory[0]->data(), Type::f32, {c.B, c.Nq, c.Hq, c.dim_v()}, gpu},
             {memory[1]->data(), Type::f32, {c.B, c.Hq, c.Nq}, gpu},
             {memory[2]->data(), Type::f64, {c.B, c.Hq, c.Nq}, gpu}};
    placed.upload();
  }

  // The case cut like this. Row and key tiles of the plan come back.
  Piece run(const std::vector<std::int64_t>& row_cuts, const std::vector<std::int64_t>& key_cuts) {
    Piece tiles;
    for (const Piece& rows : pieces_of(data.spec.Nq, row_cuts)) {
      const State own{slice(state.o, 1, rows), slice(state.m, 2, rows), slice(state.l, 2, rows)};
      const std::vector<Piece> pieces = pieces_of(data.spec.Nk, key_cuts);
      for (std::size_t n = 0; n < pieces.size(); ++n) {
        const Piece keys = pieces[n];
        Inputs in = placed.inputs();
        in.q = slice(in.q, 1, rows), in.k = slice(in.k, 1, keys), in.v = slice(in.v, 1, keys);
        in.mask = slice(slice(in.mask, 2, rows), 3, keys);
        if (n > 0) in.state = own, in.sinks = {};
        Outputs out{.state = own};
        if (n + 1 == pieces.size())
          out = {.o = slice(placed.outputs().o, 1, rows), .lse = slice(placed.outputs().lse, 2, rows)};
        Options options = data.options();
        options.diagonal_offset = data.sequences[0].off, options.alignment = Alignment::offset;
        options.row0 += rows.begin, options.col0 += keys.begin;
        Execution execution{.device = gpu, .kernel = hopper_kernel};
        const Plan plan = Plan::forward(in, out, options, execution);
        const DeviceMemory workspace(gpu, plan.workspace_size());
        execution.workspace = workspace.data(), execution.workspace_bytes = workspace.size();
        plan.run(in, out, options, execution);
        wait_for(nullptr);
        tiles = {plan.query_tile(), plan.key_tile()};
      }
    }
    placed.download();
    return tiles;
  }

 private:
  CaseData& data;
  Placed placed;
  std::vector<std::unique_ptr<DeviceMemory>> memory;
  State state;
};

class GpuParts : public Hopper {};

TEST_F(GpuParts, HaveTheBitsOfOneCallAtEveryTileBoundary) {
  for (Case spec : features()) {
    spec.options.part_invariant = true;
    SCOPED_TRACE(describe(spec));
    CaseData whole = build(spec);
    const Piece tiles = Parts(whole).run({}, {});
    const Expectation expected = expect(whole);
    EXPECT_TRUE(compare("o", whole.o, expected.o).ok && compare_lse(whole.lse, expected.lse).ok);
    std::vector<std::vector<std::int64_t>> cuts(1);
    for (std::int64_t at = tiles.end; at < spec.Nk; at += tiles.end) cuts.push_back({at}), cuts[0].push_back(at);
    cuts[0].push_back(spec.Nk);  // the last call has no keys, and finishes
    for (const std::vector<std::int64_t>& keys : cuts) {
      CaseData data = build(spec);
      Parts(data).run({tiles.begin}, keys);
      expect_same_bits(whole.o, data.o, "o");
      expect_same_bits(whole.lse, data.lse, "lse");
      ++case_count.judged;
    }
    if (HasFailure()) return;
  }
}

TEST_F(GpuParts, AnyCutIsAccurate) {
  for (const Case& spec : features()) {
    SCOPED_TRACE(describe(spec));
    CaseData data = build(spec);
    const Expectation expected = expect(data);
    Parts(data).run({70}, {8, 8, 104, 336});
    EXPECT_TRUE(compare("o", data.o, expected.o).ok && compare_lse(data.lse, expected.lse).ok);
    EXPECT_TRUE(data.o.margins_intact() && data.lse.margins_intact());
    ++case_count.judged;
  }
}

}  // namespace
}  // namespace tessera::test
