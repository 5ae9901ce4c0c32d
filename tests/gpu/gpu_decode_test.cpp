// SPDX-License-Identifier: Apache-2.0
// The `decode` kernels on a GPU: tables and random configurations with few queries and many against float64; the same
// bits 100 times, in any company, in pages as on contiguous keys, on a stream and in a graph; entries outside of the
// pool. And what calls with pages get besides: `hopper` or `mma` for prompts, `hopper_mixed` or `mma_mixed` for both.
// Links tessera_cases. tests/decode runs the kernels' text without a GPU; between blocks only a GPU can show what
// holds.
#include <cstring>

#include "cases/random.hpp"
#include "sm90/config.hpp"
#include "tests/gpu/support.hpp"
#include "tests/support/pages.hpp"

namespace tessera::test {
namespace {

constexpr const char *decode_kernel = "decode_queue", *direct_kernel = "decode_direct";

class Decode : public Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (!IsSkipped() && cuda::properties(gpu.id).major < 8) GTEST_SKIP() << "no GPU to test: it is older than sm_80";
  }
};

template <class Parameter>
class DecodeWith : public Decode, public testing::WithParamInterface<Parameter> {};

// The same case in 16 bits, without what the kernels refuse: with as few queries as `decode` takes, or with its own,
// which `decode_many` takes if they are more.
Case few_queries(Case c, bool few = true) {
  c.backward = c.options.accumulate = false;
  if (c.type == Type::f32) c.type = Type::bf16;
  c.style = c.style == Style::heads_first ? Style::heads_first : Style::contiguous;
  c.bias = c.mask = c.rng = false, c.options.dropout = 0, c.options.seed = c.options.seed_offset = 0;
  const std::int64_t unit = c.cached_k.plain() && c.cached_v.plain() ? 8 : 16;  // 16 bytes
  const auto aligned = [&](std::int64_t dims) { return std::min<std::int64_t>((dims + unit - 1) / unit * unit, 512); };
  c.Dv = aligned(c.dim_v()), c.D = aligned(c.D);
  if (!few) return c;
  const std::int64_t most = c.Hk > 0 && c.Hq > c.Hk ? std::max<std::int64_t>(1, 64 / (c.Hq / c.Hk)) : 64;
  c.Nq = std::min(c.Nq, most);
  for (auto* lengths : {&c.packed_q, &c.used_q})
    for (auto& length : *lengths) length = std::min(length, static_cast<std::int32_t>(most));
  if (c.packed()) c.options.max_seqlen_q = most;
  return c;
}

constexpr std::size_t parts = 14;
class GpuDecodeCases : public DecodeWith<std::size_t> {};

TEST_P(GpuDecodeCases, AgreeWithFloat64) {
  std::vector<Case> cases = suite("all");
  for (const Case& c : random_cases(71'000, 400)) cases.push_back(c);
  for (const Case& c : suite("caches")) cases.push_back(c);
  std::size_t ran = 0;
  for (std::size_t n = GetParam(); n < cases.size(); n += parts)
    for (const bool few : {true, false}) {
      const CaseReport report = run_case(few_queries(cases[n], few), Execution{.device = gpu, .kernel = decode_kernel});
      expect_ok(report);
      ran += !report.skipped;
    }
  EXPECT_GT(ran, 0U) << "a test in which everything was refused has shown nothing";
}

INSTANTIATE_TEST_SUITE_P(All, GpuDecodeCases, testing::Range(std::size_t{0}, parts));

// Keys enough for many blocks, so that the order in which they finish varies.
std::vector<Case> long_ones() {
  std::vector<Case> all{
      {.name = "one_token", .B = 1, .Nq = 1, .Nk = 8192, .Hq = 32, .Hk = 8, .D = 128},
      {.name = "ragged", .B = 5, .Nq = 1, .Nk = 20000, .Hq = 8, .Hk = 2, .D = 128},
      {.name = "draft", .B = 3, .Nq = 8, .Nk = 5001, .Hq = 16, .Hk = 2, .D = 64, .options = {.causal = true}},
      {.name = "window", .B = 2, .Nq = 1, .Nk = 70000, .Hq = 4, .Hk = 1, .D = 64, .options = {.causal = true}},
      {.name = "wide", .B = 2, .Nq = 2, .Nk = 3000, .Hq = 8, .Hk = 4, .D = 256, .type = Type::f16}};
  all[1].used_k = {20000, 1, 0, 257, 12345};
  all[3].options.window_left = 30000;
  for (Case& c : all) {
    if (c.type == Type::f32) c.type = Type::bf16;
    c.backward = false;
  }
  return all;
}

class GpuDecodeRepetitions : public DecodeWith<std::size_t> {};

TEST_P(GpuDecodeRepetitions, GiveTheSameBits) {
  const Case spec = long_ones()[GetParam()];
  CaseData first = build(spec), again = build(spec);
  OnGpu on_first(first, decode_kernel), on_again(again, decode_kernel);
  on_first.forward(), on_first.finish();
  for (int run = 0; run < 100; ++run) {
    on_again.upload();  // results of the run before become NaN again
    on_again.forward(), on_again.finish();
    expect_same_bits(first.o, again.o, "o"), expect_same_bits(first.lse, again.lse, "lse");
    if (HasFatalFailure()) return;
    again.o.restore(), again.lse.restore();
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuDecodeRepetitions, testing::Range(std::size_t{0}, std::size_t{5}));

// The case's results; nothing where the kernel refuses it.
std::optional<CaseData> taken_by(const char* kernel, const Case& spec) {
  CaseData data = build(spec);
  try {
    OnGpu on(data, kernel);
    on.forward(), on.finish();
  } catch (const Error& error) {
    if (error.status() != TESSERA_UNSUPPORTED) throw;
    return {};
  }
  return data;
}

// Blocks that begin before the schedule ends, and find their work items themselves. In parts: kernels are many.
class GpuDecodeDirect : public DecodeWith<std::size_t> {};

TEST_P(GpuDecodeDirect, HasTheBitsOfAQueue) {
  std::vector<Case> cases = long_ones();
  const std::size_t long_cases = cases.size();
  for (const Case& c : suite("caches")) cases.push_back(few_queries(c));
  for (const Case& c : random_cases(72'000, 100)) cases.push_back(few_queries(c));
  std::size_t ran = 0;
  for (std::size_t n = GetParam(); n < cases.size(); n += parts) {
    SCOPED_TRACE(cases::describe(cases[n]));
    const std::optional<CaseData> queued = taken_by(decode_kernel, cases[n]);
    for (int run = 0; run < (n < long_cases ? 20 : 1); ++run) {
      const std::optional<CaseData> direct = taken_by(direct_kernel, cases[n]);
      if (!direct) break;  // of types that neither takes, or of too many tiles of rows
      ASSERT_TRUE(queued);
      expect_same_bits(queued->o, direct->o, "o"), expect_same_bits(queued->lse, direct->lse, "lse");
      if (HasFailure()) return;
      ++ran;
    }
  }
  EXPECT_GT(ran, 10U);
}

INSTANTIATE_TEST_SUITE_P(All, GpuDecodeDirect, testing::Range(std::size_t{0}, parts));

// A sequence alone, and as one of 64 of all lengths: cut at other levels, with other tiles of rows.
TEST_F(Decode, ASequenceHasTheSameBitsAloneAndInABatch) {
  Case lone{.name = "lone", .Nq = 1, .Nk = 9000, .Hq = 8, .Hk = 2, .D = 128, .type = Type::bf16, .backward = false};
  CaseData alone = build(lone);
  OnGpu on(alone, decode_kernel);
  on.forward(), on.finish();
  for (const std::int64_t longest : {1, 4, 16}) {
    Case spec = lone;
    spec.B = 64, spec.Nq = longest, spec.seed = 7;
    for (std::int32_t b = 0; b < 64; ++b) {
      spec.used_q.push_back(b == 40 ? 1 : static_cast<std::int32_t>(longest));
      spec.used_k.push_back(b == 40 ? 9000 : (b * 977) % 9000);
    }
    CaseData company = build(spec);
    const auto copy = [](const Buffer& from, Buffer& to, std::int64_t row, std::int64_t rows, std::int64_t width) {
      for (std::int64_t e = 0; e < rows * width; ++e) to.set(row * width + e, from.get(e));
    };
    const auto& s = company.sequences[40];
    copy(alone.q, company.q, s.row_q, 1, 8 * 128);
    copy(alone.k, company.k, s.row_k, 9000, 2 * 128), copy(alone.v, company.v, s.row_k, 9000, 2 * 128);
    OnGpu among(company, decode_kernel);
    among.forward(), among.finish();
    for (std::int64_t e = 0; e < 8 * 128; ++e)
      ASSERT_EQ(company.o.get(s.row_q * 8 * 128 + e), alone.o.get(e)) << "longest " << longest << " element " << e;
  }
}

// With a queue, and without one where the GPU has multiprocessors enough for the sequences of these tests.
std::vector<const char*> queued_and_direct() {
  constexpr int enough = 24;
  if (cuda::properties(gpu.id).multiprocessors < enough) return {decode_kernel};
  return {decode_kernel, direct_kernel};
}

// A captured call follows the lengths: replayed with new ones, it has the bits of a call that was made for them.
void expect_graph_follows_lengths(const char* kernel) {
  Case spec{.name = "graph", .B = 6, .Nq = 1, .Nk = 6000, .Hq = 8, .Hk = 2, .D = 128, .type = Type::bf16};
  spec.backward = false, spec.used_k = {6000, 6000, 6000, 6000, 6000, 6000};
  const Stream stream;
  CaseData replayed = build(spec);
  OnGpu in_graph(replayed, kernel, stream);
  const cuda::Driver& d = cuda::driver();
  cuda::GraphHandle graph = nullptr;
  cuda::GraphExecHandle exec = nullptr;
  cuda::check(d.stream_begin_capture(stream, 0), "cuStreamBeginCapture");
  in_graph.forward();
  cuda::check(d.stream_end_capture(stream, &graph), "cuStreamEndCapture");
  cuda::check(d.graph_instantiate(&exec, graph, 0), "cuGraphInstantiate");
  for (std::int64_t round = 0; round < 20; ++round) {
    CaseData eager = build(spec);
    for (std::int64_t b = 0; b < 6; ++b)
      for (CaseData* data : {&eager, &replayed})
        data->used_k.set(b, double(round == 3 ? 0 : (round * 613 + b * 1999) % 6001));
    OnGpu on(eager, decode_kernel);
    on.forward(), on.finish();
    replayed.o.restore(), replayed.lse.restore();
    in_graph.upload();
    cuda::check(d.graph_launch(exec, stream), "cuGraphLaunch");
    in_graph.finish();
    expect_same_bits(eager.o, replayed.o, "o"), expect_same_bits(eager.lse, replayed.lse, "lse");
    if (testing::Test::HasFatalFailure()) break;
  }
  d.graph_exec_destroy(exec);
  d.graph_destroy(graph);
}

TEST_F(Decode, AGraphFollowsTheLengths) {
  for (const char* kernel : queued_and_direct()) {
    SCOPED_TRACE(kernel);
    expect_graph_follows_lengths(kernel);
  }
}

// --- pages: tensors of a paged case on the GPU

class PagedOnGpu {
 public:
  PagedOnGpu(CaseData& data, const PagedCase& paged, const char* kernel = decode_kernel) :
      data(data), placed(data, gpu), in(placed.inputs()), execution{.device = gpu, .kernel = kernel} {
    place(in.k, paged.in.k, paged.memory.data(), paged.memory.size());
    const auto offset = static_cast<std::byte*>(paged.in.v.data) - paged.memory.data();
    in.v = paged.in.v, in.v.data = static_cast<std::byte*>(in.k.data) + offset, in.v.device = gpu;
    in.cu_seqlens_k = {};
    place(in.seqused_k, paged.in.seqused_k), place(in.leftpad_k, paged.in.leftpad_k);
    place(in.block_table, paged.in.block_table), place(in.v_block_table, paged.in.v_block_table);
    place(in.page_indptr, paged.in.page_indptr), place(in.page_indices, paged.in.page_indices);
    place(in.k_scale, paged.in.k_scale), place(in.v_scale, paged.in.v_scale);
    out = placed.outputs();
    place(out.status, Tensor(&status, Type::i32, {1}));
    placed.upload();
  }
  // Lays the pages, K and V of each side by side, so many elements apart, in memory of which nothing else is written.
  void spread(const PagedCase& paged, std::int64_t distance) {
    const auto page = static_cast<std::size_t>(in.k.strides[0]) * 2, step = static_cast<std::size_t>(distance) * 2;
    const auto count = static_cast<std::size_t>(paged.pages);
    const auto& far = *held.insert(held.begin(), std::make_unique<DeviceMemory>(gpu, (count - 1) * step + page));
    for (std::size_t n = 0; n < count; ++n) far->write(paged.memory.data() + n * page, page, n * step);
    const auto v_at = static_cast<std::byte*>(in.v.data) - static_cast<std::byte*>(in.k.data);
    in.k.data = far->data(), in.v.data = static_cast<std::byte*>(far->data()) + v_at;
    in.k.strides[0] = in.v.strides[0] = distance;
  }
  // Returns the status word, which was 4.
  std::int32_t run() {
    const Plan plan = Plan::forward(in, out, data.options(), execution);
    DeviceMemory workspace(gpu, plan.workspace_size());
    workspace.fill(std::byte{0xFF});
    execution.workspace = workspace.data(), execution.workspace_bytes = plan.workspace_size();
    plan.run(in, out, data.options(), execution);
    wait_for(nullptr);
    placed.download();
    held.back()->read(reinterpret_cast<std::byte*>(&status), sizeof(status));
    return status;
  }

 private:
  void place(Tensor& to, const Tensor& from, const std::byte* bytes = nullptr, std::size_t count = 0) {
    to = from;
    if (!from) return;
    if (!bytes) bytes = static_cast<const std::byte*>(from.data), count = static_cast<std::size_t>(from.elements()) * 4;
    held.push_back(std::make_unique<DeviceMemory>(gpu, count));
    held.back()->write(bytes, count);
    to.data = held.back()->data(), to.device = gpu;
  }

  CaseData& data;
  Placed placed;
  Inputs in;
  Outputs out;
  std::int32_t status = 4;
  Execution execution;
  std::vector<std::unique_ptr<DeviceMemory>> held;
};

class GpuDecodePages : public DecodeWith<std::int64_t> {};

TEST_P(GpuDecodePages, HaveTheBitsOfContiguousKeys) {
  const std::int64_t P = GetParam();
  Case spec{.name = "paged", .B = 5, .Nq = 2, .Nk = 8193, .Hq = 8, .Hk = 2, .D = 64, .type = Type::bf16};
  spec.backward = false, spec.options.causal = true, spec.used_k = {0, 1, 257, 4000, 8193};
  CaseData expected = build(spec);
  OnGpu on(expected, decode_kernel);
  on.forward(), on.finish();
  std::size_t turn = 0;
  for (const Cache cache : caches)
    for (const Table table : tables) {
      Paging paging{.page_size = P, .cache = cache, .table = table, .seed = ++turn};
      if (turn % 2) paging.leftpad = {0, 3, 1, static_cast<std::int32_t>(P), 40};
      SCOPED_TRACE(describe(paging));
      const PagedCase paged(expected, paging);
      for (const char* kernel : queued_and_direct()) {
        CaseData data = build(spec);
        PagedOnGpu on_pages(data, paged, kernel);
        EXPECT_EQ(on_pages.run(), 4) << kernel;
        expect_same_bits(expected.o, data.o, kernel), expect_same_bits(expected.lse, data.lse, kernel);
        if (HasFatalFailure()) return;
      }
    }
}

TEST_P(GpuDecodePages, OfBytesHaveTheBitsOfContiguousKeys) {
  for (const Type type : {Type::e4m3, Type::i8}) {
    Case spec{.name = "bytes", .B = 3, .Nq = 2, .Nk = 3000, .Hq = 8, .Hk = 2, .D = 128, .type = Type::bf16};
    spec.backward = false, spec.options.causal = true, spec.used_k = {1, 2049, 3000};
    spec.cached_k = spec.cached_v = {type, cases::Scales::per_key};
    CaseData expected = build(spec);
    OnGpu on(expected, decode_kernel);
    on.forward(), on.finish();
    for (const Table table : tables) {
      CaseData data = build(spec);
      const PagedCase paged(expected, {.page_size = GetParam(), .cache = Cache::heads_first, .table = table});
      PagedOnGpu on_pages(data, paged);
      EXPECT_EQ(on_pages.run(), 4);
      expect_same_bits(expected.o, data.o, "o"), expect_same_bits(expected.lse, data.lse, "lse");
      if (HasFatalFailure()) return;
    }
  }
}

// Families that take prompts over pages of so many keys, the one that is chosen without asking first.
std::vector<std::string> prefill_families(std::int64_t page_size) {
  if (cuda::properties(gpu.id).major == 9 && page_size >= sm90::least_page_size) return {"hopper", "mma"};
  return {"mma"};
}

// A chunk of a prompt behind keys that are cached. Left padding puts pieces of pages at any row of a tile.
void expect_prompts_as_contiguous(const std::string& family, bool chosen, std::int64_t page_size) {
  for (const std::int64_t D : {64, 128, 256}) {
    Case spec{.name = "prompt", .B = 4, .Nq = 300, .Nk = 3000, .Hq = 8, .Hk = 2, .D = D, .type = Type::bf16};
    spec.backward = false, spec.options.causal = true, spec.used_k = {0, 299, 2049, 3000};
    CaseData expected = build(spec);
    const cases::Expectation exact = cases::expect(expected);
    OnGpu on(expected, family);
    on.forward(), on.finish();
    const cases::OutputReport report = cases::compare("o", expected.o, exact.o);
    EXPECT_TRUE(report.ok) << report.detail;
    for (const Table table : tables) {
      CaseData data = build(spec);
      const PagedCase paged(expected, {.page_size = page_size, .table = table, .leftpad = {0, 3, 1, 40}});
      PagedOnGpu on_pages(data, paged, chosen ? nullptr : family.c_str());
      EXPECT_EQ(on_pages.run(), 4);
      expect_same_bits(expected.o, data.o, "o"), expect_same_bits(expected.lse, data.lse, "lse");
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST_P(GpuDecodePages, OfPromptsHaveTheBitsOfContiguousKeys) {
  bool chosen = true;
  for (const std::string& family : prefill_families(GetParam())) {
    SCOPED_TRACE(family);
    expect_prompts_as_contiguous(family, chosen, GetParam());
    if (HasFailure()) return;
    chosen = false;
  }
}

// Prompts and decoding sequences in one call. Page sizes change no bit.
void expect_mixed_batches_agree(const std::string& family, std::int64_t page_size) {
  Case spec{.name = "mixed", .Hq = 8, .Hk = 2, .D = 128, .type = Type::bf16};
  spec.packed_q = {1, 300, 16, 0, 17, 1, 2}, spec.packed_k = {4097, 300, 1000, 9, 65, 1, 8193};
  spec.backward = false, spec.options.causal = true, spec.options.max_seqlen_q = 300;
  CaseData data = build(spec), again = build(spec);
  const cases::Expectation exact = cases::expect(data);
  const PagedCase paged(data, {.page_size = page_size}), other(data, {.page_size = 32, .table = Table::indptr});
  const std::string mixed = family + "_mixed";
  PagedOnGpu on_pages(data, paged, mixed.c_str()), on_others(again, other, mixed.c_str());
  EXPECT_EQ(on_pages.run(), 4);
  EXPECT_EQ(on_others.run(), 4);
  for (const cases::OutputReport& report :
       {cases::compare("o", data.o, exact.o), cases::compare_lse(data.lse, exact.lse)})
    EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
  expect_same_bits(data.o, again.o, "o"), expect_same_bits(data.lse, again.lse, "lse");
}

TEST_P(GpuDecodePages, OfMixedBatchesAgreeWithFloat64) {
  for (const std::string& family : prefill_families(GetParam())) {
    SCOPED_TRACE(family);
    expect_mixed_batches_agree(family, GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, GpuDecodePages, testing::Values(1, 3, 16, 48, 64, 256, 528));

// Pages so far apart that 32 bits do not count their elements: few queries, and chunks of prompts.
TEST_F(Decode, PoolsLargerThan32Bits) {
  constexpr std::int64_t P = 64, distance = (std::int64_t{1} << 30) + 64, near = 4;  // near: the last page within 2^32
  std::vector<std::pair<std::string, std::int64_t>> all;
  for (const char* kernel : queued_and_direct()) all.emplace_back(kernel, 1);
  for (const std::string& family : prefill_families(P)) all.emplace_back(family, 70);
  for (const auto& [kernel, queries] : all) {
    Case spec{.name = "far", .Nq = queries, .Nk = 300, .Hq = 4, .Hk = 2, .D = 64, .type = Type::bf16};
    spec.backward = false, spec.options.causal = true;
    CaseData expected = build(spec), data = build(spec);
    OnGpu on(expected, queries == 1 ? decode_kernel : kernel);
    on.forward(), on.finish();
    PagedCase paged(expected, {.page_size = P, .cache = Cache::two_by_page});
    ASSERT_GT(*std::max_element(paged.table.begin(), paged.table.end()), near);
    PagedOnGpu on_pages(data, paged, kernel.c_str());
    try {
      on_pages.spread(paged, distance);
    } catch (const std::exception& error) {
      GTEST_SKIP() << "no GPU to test: it has no room for such a pool: " << error.what();
    }
    EXPECT_EQ(on_pages.run(), 4) << kernel;
    expect_same_bits(expected.o, data.o, kernel), expect_same_bits(expected.lse, data.lse, kernel);
  }
}

TEST_F(Decode, LengthsThatAreCutAreReported) {
  Case spec{.name = "cut", .B = 2, .Nq = 1, .Nk = 300, .Hq = 4, .Hk = 1, .D = 64, .type = Type::bf16};
  spec.backward = false;
  CaseData data = build(spec), again = build(spec);
  PagedCase good(data, {.page_size = 16}), cut(data, {.page_size = 16});
  for (std::int32_t& entry : cut.table) entry = std::clamp<std::int32_t>(entry, 0, 1);
  cut.lengths[1] = 1 << 30;
  PagedOnGpu on_good(data, good), on_cut(again, cut);
  EXPECT_EQ(on_good.run(), 4);
  EXPECT_EQ(on_cut.run(), 4 | beyond_bounds);
}

TEST_F(Decode, EntriesOutsideThePoolAreReported) {
  Case spec{.name = "bad", .B = 2, .Nq = 1, .Nk = 300, .Hq = 4, .Hk = 1, .D = 64, .type = Type::bf16};
  spec.backward = false;
  for (const std::int32_t bad : {-1, 1 << 30}) {
    CaseData data = build(spec), again = build(spec);
    PagedCase good(data, {.page_size = 16}), paged(data, {.page_size = 16});
    paged.entry(1, 100) = bad;
    PagedOnGpu on_good(data, good), on_bad(again, paged);
    EXPECT_EQ(on_good.run(), 4);
    EXPECT_EQ(on_bad.run(), 4 | page_outside_pool);
    for (std::int64_t e = 0; e < 4 * 64; ++e) ASSERT_EQ(again.o.get(e), data.o.get(e)) << "of the other sequence";
  }
}

}  // namespace
}  // namespace tessera::test
