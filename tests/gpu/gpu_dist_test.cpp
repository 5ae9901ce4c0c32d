// SPDX-License-Identifier: Apache-2.0
// Virtual ranks: threads that share one Hopper GPU, with their rows in its memory. O and LSE have the bits of one call,
// gradients the same bits on any number of ranks, and all obey the rule for float64. Links tessera_cases.
// Implements docs/scale_out.md, "Rows on a GPU".
#include <thread>

#include "tessera/dist.hpp"
#include "tests/gpu/support.hpp"

namespace tessera::test {
namespace {

// Rows of a padded tensor [1,N,H,D], or [1,H,N], that a rank owns: views, as its span is one.
Tensor rows_of(const Tensor& t, tessera_span span) {
  const bool numbers = t.ndim == 3;
  const std::int64_t n = span.end - span.begin, row = t.strides[numbers ? 2 : 1];
  std::byte* data = static_cast<std::byte*>(t.data) + span.begin * row * static_cast<std::int64_t>(size_of(t.type));
  if (!numbers) {
    Tensor out(data, t.type, {n, t.shape[2], t.shape[3]}, t.device);
    out.strides = {row, t.strides[2], t.strides[3]};
    return out;
  }
  Tensor out(data, t.type, {t.shape[1], n}, t.device);
  out.strides = {t.strides[1], row};
  return out;
}

class GpuDist : public Hopper {};

// Both passes of a case on `ranks` threads.
void run_ranks(CaseData& data, int ranks, Scheme scheme, std::int64_t segment) {
  const Case& c = data.spec;
  Placed placed(data, gpu);
  placed.upload();
  const Partition partition({.lengths = {c.Nq},
                             .ranks = ranks,
                             .kind = PartitionKind::contiguous,
                             .align = segment > 0 ? segment : 384});
  const std::vector<Communicator> communicators = Communicator::threads(ranks);
  std::vector<std::string> said(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      const auto own = static_cast<std::size_t>(r);
      try {
        const cuda::CurrentDevice current(gpu.id);
        const Stream stream;
        const auto spans = partition.spans(r);
        const tessera_span span = spans.empty() ? tessera_span{} : spans[0];
        const auto mine = [&](const Tensor& t) { return rows_of(t, span); };
        DistPlan plan(communicators[own], partition,
                      {.query_heads = c.Hq,
                       .key_heads = c.Hk,
                       .head_dim = c.D,
                       .value_dim = c.dim_v(),
                       .type = c.type,
                       .scheme = scheme,
                       .segment = segment,
                       .timeout = 120},
                      data.options(), {.device = gpu, .stream = static_cast<cuda::StreamHandle>(stream)});
        Inputs in;
        in.q = mine(placed.inputs().q), in.k = mine(placed.inputs().k), in.v = mine(placed.inputs().v);
        const Outputs out{.o = mine(placed.outputs().o), .lse = mine(placed.outputs().lse)};
        const Saved all = placed.saved();
        const Gradients g = placed.gradients();
        plan.forward(in, out);
        plan.backward(in, {out.o, out.lse, mine(all.d_o), {}}, {mine(g.dq), mine(g.dk), mine(g.dv), {}, {}});
        wait_for(stream);
      } catch (const std::exception& error) {
        said[own] = error.what();
      }
    });
  for (std::thread& t : threads) t.join();
  for (const std::string& sentence : said) ASSERT_EQ(sentence, "");
  placed.download();
}

TEST_F(GpuDist, VirtualRanksHaveTheBitsOfOneCall) {
  for (const bool causal : {true, false}) {
    Case spec{.name = "ranks", .Nq = 3072, .Nk = 3072, .Hq = 4, .Hk = 2, .D = 128, .type = Type::bf16};
    spec.options.causal = causal;
    CaseData one = build(spec), first = build(spec);
    {
      CaseData& call = one;
      call.spec.backward = false, call.spec.options.part_invariant = true;
      OnGpu on(call, hopper_kernel);
      on.forward();
      on.finish();
    }
    run_ranks(first, 1, Scheme::gather, 384);
    for (const int ranks : {2, 4, 8}) {
      SCOPED_TRACE(ranks);
      CaseData data = build(spec);
      run_ranks(data, ranks, Scheme::gather, 384);
      expect_same_bits(one.o, data.o, "o");
      expect_same_bits(one.lse, data.lse, "lse");
      expect_same_bits(first.dq, data.dq, "dq");
      expect_same_bits(first.dk, data.dk, "dk");
      expect_same_bits(first.dv, data.dv, "dv");
      ++case_count.judged;
    }
  }
}

TEST_F(GpuDist, EverySchemeIsAccurate) {
  Case spec{.name = "ranks", .Nq = 1000, .Nk = 1000, .Hq = 4, .Hk = 2, .D = 64, .type = Type::bf16};
  spec.options.causal = true;
  for (const Scheme scheme : {Scheme::ring, Scheme::gather})
    for (const int ranks : {1, 3}) {
      CaseData data = build(spec);
      const Expectation expected = expect(data);
      run_ranks(data, ranks, scheme, 0);
      EXPECT_TRUE(compare("o", data.o, expected.o).ok && compare_lse(data.lse, expected.lse).ok);
      EXPECT_TRUE(compare("dq", data.dq, expected.dq).ok && compare("dk", data.dk, expected.dk).ok &&
                  compare("dv", data.dv, expected.dv).ok);
      for (const Buffer* buffer : data.buffers()) EXPECT_TRUE(buffer->margins_intact());
      ++case_count.judged;
    }
}

}  // namespace
}  // namespace tessera::test
