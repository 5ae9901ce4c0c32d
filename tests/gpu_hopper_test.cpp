// The Hopper forward kernel on a Hopper GPU: tables and random configurations against float64; the same bits 1000
// times, on any stream, in a graph and for a sequence in any company. Links tessera_cases. tests/sm90_machine_test.cpp
// runs the kernel's text without a GPU.
#include <iostream>
#include <map>
#include <numeric>

#include "api/units.hpp"
#include "cases/random.hpp"
#include "cuda/jit/cache.hpp"
#include "sm90/tiles.hpp"
#include "sm90/unit.hpp"
#include "tests/company.hpp"
#include "tests/gpu_support.hpp"
#include "tests/long_rows.hpp"

namespace tessera::test {
namespace {

// --- against float64 -------------------------------------------------------------------------------------------------

constexpr std::size_t parts = 28, configurations = 500;
constexpr std::uint64_t first_seed = 51000;

// The forward pass of a case, in 16 bits.
Case in_16_bits(Case c) {
  c.backward = c.options.accumulate = false;
  if (c.type == Type::f32) c.type = Type::bf16;
  return c;
}

// With addresses, strides and rows that tensor copies take: most random configurations have others.
Case aligned(Case c) {
  constexpr Style styles[] = {Style::contiguous, Style::heads_first, Style::broadcast};
  if (c.style == Style::gaps || c.style == Style::shifted || c.style == Style::mixed) c.style = styles[c.seed % 3];
  c.D = (c.D + 7) / 8 * 8, c.Dv = (c.Dv + 7) / 8 * 8;
  c.name += "_aligned";
  return c;
}

// Numbers that overflow, underflow or cancel in a careless softmax, over several tiles of keys, at every tile.
std::vector<Case> extreme_numbers() {
  std::vector<Case> all;
  for (const Distribution distribution : {Distribution::cold, Distribution::huge, Distribution::outlier})
    for (const api::HeadDims dims : {api::HeadDims{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}})
      for (const Type type : {Type::f16, Type::bf16}) {
        Case c{.name = "extreme", .Nq = 150, .Nk = 700, .Hq = 2, .Hk = 1, .D = dims.D, .Dv = dims.Dv, .type = type};
        c.options.causal = all.size() % 2, c.distribution = distribution, c.seed = all.size() + 1;
        c.backward = false;
        all.push_back(c);
      }
  return all;
}

// The text of the kernel that a case gets; cases of one kernel run in one process, which compiles it once.
std::string unit_of(const Case& c) {
  Problem p = api::plain_problem(Pass::forward, c.type, {c.D, c.dim_v()});
  p.options = c.options, p.options.scale = c.scale(), p.slopes = c.slopes == Slopes::none ? 0 : 1;
  if (c.f32_o) p.o_type = Type::f32;
  if (c.mask) p.mask = Broadcast{Type::u8, {1, 1, 1, 1}};
  if (c.bias) p.bias = Broadcast{c.bias_f32 ? Type::f32 : c.type, {1, 1, 1, 1}};
  const std::optional<sm90::Config> tile = sm90::forward_tile(p);
  return tile ? sm90::forward_unit_text(*tile) : "";
}

// A part of all cases, by the time that they take: most of it goes to compiling, once for each kernel.
std::vector<Case> cases_of_part(std::size_t part) {
  std::vector<Case> all = extreme_numbers();
  for (const Case& c : suite("all")) all.push_back(in_16_bits(c));
  for (const Case& c : random_cases(first_seed, configurations)) all.push_back(aligned(in_16_bits(c)));
  std::multimap<std::string, Case> sorted;
  for (const Case& c : all) sorted.emplace(unit_of(c), c);
  constexpr std::size_t compiling = 8;  // as long as so many cases
  std::vector<std::size_t> times;
  const std::string* unit = nullptr;
  for (const auto& entry : sorted) {
    times.push_back(unit && *unit == entry.first ? 1 : 1 + compiling);
    unit = &entry.first;
  }
  const std::size_t total = std::accumulate(times.begin(), times.end(), std::size_t{0});
  std::vector<Case> chosen;
  std::size_t n = 0, before = 0;
  for (const auto& [text, c] : sorted) {
    if (before * parts / total == part) chosen.push_back(c);
    before += times[n++];
  }
  return chosen;
}

// The refusals of sm90/plan.cpp that a case of these may meet.
bool may_be_refused(const std::string& reason) {
  for (const char* known : {"tensor copies need 16", "this kernel has tiles up to 256", "need a token of each"})
    if (reason.find(known) != std::string::npos) return true;
  return false;
}

bool has_tokens(const Case& c) {
  if (!c.packed()) return c.Nq > 0 && c.Nk > 0;
  const auto any = [](const std::vector<std::int32_t>& lengths, std::int64_t tail) {
    return std::accumulate(lengths.begin(), lengths.end(), tail) > 0;
  };
  return any(c.packed_q, c.tail_q) && any(c.packed_k, c.tail_k);
}

class GpuHopperCases : public HopperWith<std::size_t> {};

TEST_P(GpuHopperCases, AgreeWithFloat64) {
  SuiteReport all;
  for (const Case& spec : cases_of_part(GetParam())) {
    const CaseReport report = run_case(spec, Execution{.device = gpu, .kernel = hopper_kernel});
    expect_ok(report);
    ++(report.skipped ? all.skipped : report.ok ? all.passed : all.failed);
    if (report.skipped) {
      EXPECT_TRUE(may_be_refused(report.messages.front())) << to_text(report);
      EXPECT_FALSE(spec.name.ends_with("_aligned") && has_tokens(spec)) << to_text(report);
    }
    all.cases.push_back(report);
  }
  std::cout << all.passed + all.failed << " cases ran, " << all.skipped << " were refused\n" << worst_table(all);
  EXPECT_GT(all.passed, all.skipped) << "a test in which nearly everything was refused has shown nothing";
}

INSTANTIATE_TEST_SUITE_P(All, GpuHopperCases, testing::Range(std::size_t{0}, parts));

class GpuHopper : public Hopper {};

TEST_F(GpuHopper, IsWhatACallGets) {
  for (const Type type : {Type::f16, Type::bf16}) {
    CaseData data = build({.name = "default", .type = type, .backward = false});
    const Placed placed(data, gpu);
    EXPECT_EQ(Plan::forward(placed.inputs(), placed.outputs(), data.options(), {.device = gpu}).kernel(),
              hopper_kernel);
  }
}

TEST_F(GpuHopper, RowsMayBeLongerThanHeads) {
  LongRows data;
  Placed placed(data.rows, gpu);
  placed.upload();
  const Inputs inputs = data.narrowed(placed.inputs());
  const Outputs outputs = data.narrowed(placed.outputs());
  const Execution execution{.device = gpu, .kernel = hopper_kernel};
  Plan::forward(inputs, outputs, data.rows.options(), execution)
      .run(inputs, outputs, data.rows.options(), execution);  // a grid of a tile per block needs no workspace
  placed.download();
  data.judge();
}

// --- repetitions -----------------------------------------------------------------------------------------------------

constexpr int repetitions = 1000;

// More tiles than multiprocessors, so that which block takes which, and when, varies.
std::vector<Case> repeated() {
  constexpr Type f16 = Type::f16, bf16 = Type::bf16;
  Case everything{.name = "everything", .B = 2, .Nq = 700, .Nk = 600, .Hq = 8, .Hk = 2, .D = 64, .type = f16};
  everything.options = {.softcap = 5, .causal = true, .window_left = 300, .dropout = 0.2, .seed = 9};
  everything.bias = everything.mask = true, everything.bias_dims = {.b = false, .h = false};
  everything.mask_dims = {.b = false, .h = false};
  everything.slopes = Slopes::per_head, everything.sinks = Sinks::finite;
  std::vector<Case> all{
      {.name = "many_heads", .B = 2, .Nq = 1000, .Nk = 1000, .Hq = 32, .Hk = 32, .D = 64, .type = bf16},
      {.name = "causal_gqa", .B = 2, .Nq = 1500, .Nk = 1500, .Hq = 16, .Hk = 4, .D = 128, .type = bf16},
      {.name = "window", .B = 2, .Nq = 1500, .Nk = 1500, .Hq = 16, .Hk = 4, .D = 96, .type = f16},
      {.name = "unequal", .B = 2, .Nq = 700, .Nk = 900, .Hq = 16, .Hk = 16, .D = 192, .Dv = 128, .type = bf16},
      {.name = "wide_causal", .B = 2, .Nq = 900, .Nk = 900, .Hq = 12, .Hk = 12, .D = 256, .type = bf16},
      {.name = "wide_halves", .B = 2, .Nq = 500, .Nk = 700, .Hq = 18, .Hk = 2, .D = 256, .type = f16},
      {.name = "packed", .Hq = 16, .Hk = 2, .D = 128, .type = f16, .packed_q = {900, 0, 33, 129, 1200}},
      {.name = "used_lengths", .B = 3, .Nq = 600, .Nk = 800, .Hq = 16, .Hk = 1, .D = 64, .type = bf16},
      {.name = "dropout", .B = 2, .Nq = 700, .Nk = 700, .Hq = 16, .Hk = 16, .D = 128, .type = bf16},
      everything,
  };
  all[1].options.causal = all[4].options.causal = all[6].options.causal = all[8].options.causal = true;
  all[2].options.window_left = 200, all[2].options.window_right = 30;
  all[6].packed_k = {900, 50, 0, 300, 1200};
  all[7].used_q = {600, 70, 333}, all[7].used_k = {800, 555, 64}, all[7].f32_o = true;
  all[8].options.dropout = 0.1, all[8].options.seed = 7;
  for (Case& c : all) c.backward = false;
  return all;
}

constexpr const char* compare_text = R"(
extern "C" __global__ void compare(const unsigned* a, const unsigned* b, unsigned words, unsigned* different) {
  for (unsigned n = blockIdx.x * blockDim.x + threadIdx.x; n < words; n += gridDim.x * blockDim.x)
    if (a[n] != b[n]) atomicAdd(different, 1u);
})";

// What a tensor on the GPU held when this was made; compared there, so that nothing is copied or waited for.
class Remembered {
 public:
  Remembered(const Buffer& host, const Tensor& device) :
      now(device), bytes(static_cast<std::size_t>(host.elements()) * size_of(host.type())), before(gpu, bytes) {
    before.write(static_cast<const std::byte*>(host.tensor().data), bytes);
    different.fill(std::byte{0});
  }
  void forget() const {
    const auto address = reinterpret_cast<cuda::DevicePointer>(now.data);
    cuda::check(cuda::driver().memset_bytes(address, 0xFF, bytes, nullptr), "cuMemsetD8Async");
  }
  void compare() {
    void *a = now.data, *b = before.data(), *count = different.data();
    auto words = static_cast<unsigned>(bytes / 4);
    void* arguments[] = {&a, &b, &words, &count};
    kernel->launch({.grid = {64}, .block = {256}}, arguments);
  }
  unsigned differences() const {
    unsigned count = 0;
    different.read(reinterpret_cast<std::byte*>(&count), sizeof count);
    return count;
  }

 private:
  Tensor now;
  std::size_t bytes;
  DeviceMemory before, different{gpu, sizeof(unsigned)};
  const cuda::LoadedKernel* kernel = cuda::find_kernel(compare_text, "compare", gpu.id);
};

class GpuHopperRepetitions : public HopperWith<std::size_t> {};

TEST_P(GpuHopperRepetitions, GiveTheSameBits) {
  const Case spec = repeated()[GetParam()];
  SCOPED_TRACE(describe(spec));
  CaseData data = build(spec);
  OnGpu on(data, hopper_kernel);
  on.forward();
  on.finish();
  Remembered o(data.o, on.placed.outputs().o), lse(data.lse, on.placed.outputs().lse);
  for (int run = 0; run < repetitions; ++run) {
    o.forget(), lse.forget();
    on.forward();
    o.compare(), lse.compare();
  }
  EXPECT_EQ(o.differences(), 0U);
  EXPECT_EQ(lse.differences(), 0U);
  o.forget(), o.compare();
  EXPECT_GT(o.differences(), 0U) << "the comparison does not notice";
}

INSTANTIATE_TEST_SUITE_P(All, GpuHopperRepetitions, testing::Range(std::size_t{0}, repeated().size()));

// --- streams, graphs -------------------------------------------------------------------------------------------------

// Tiles are taken from a count in the workspace, which a kernel before this one sets to 0 while this one starts.
TEST_F(GpuHopper, GivesTheSameBitsOnAStreamAndInAGraph) {
  const Case spec = repeated()[1];
  CaseData direct = build(spec), streamed = build(spec), replayed = build(spec);
  OnGpu on_default(direct, hopper_kernel);
  on_default.forward();
  on_default.finish();
  const Stream stream;
  OnGpu on_stream(streamed, hopper_kernel, stream), in_graph(replayed, hopper_kernel, stream);
  on_stream.forward();
  on_stream.finish();
  expect_same_outputs(direct, streamed);

  const cuda::Driver& d = cuda::driver();
  constexpr int global_mode = 0;  // the strictest: nothing may synchronise or allocate
  cuda::GraphHandle graph = nullptr;
  cuda::GraphExecHandle exec = nullptr;
  cuda::check(d.stream_begin_capture(stream, global_mode), "cuStreamBeginCapture");
  in_graph.forward();
  cuda::check(d.stream_end_capture(stream, &graph), "cuStreamEndCapture");
  cuda::check(d.graph_instantiate(&exec, graph, 0), "cuGraphInstantiate");
  for (int replay = 0; replay < 3; ++replay) {
    in_graph.upload();  // results become NaN again
    cuda::check(d.graph_launch(exec, stream), "cuGraphLaunch");
    in_graph.finish();
    expect_same_outputs(direct, replayed);
    replayed.o.restore(), replayed.lse.restore();
  }
  d.graph_exec_destroy(exec);
  d.graph_destroy(graph);
}

// --- company ---------------------------------------------------------------------------------------------------------

// Lengths around the tiles of queries and of keys, and every option, with heads of one size.
std::vector<Case> lone_sequences(std::int64_t D, Type type) {
  std::vector<Case> all = mixes();
  for (const std::int64_t Nq : {1, 64, 65, 129, 300}) {
    const bool causal = Nq % 2;
    Case c{.name = "length", .Nq = Nq, .Nk = causal ? Nq + 40 : 520 - Nq, .Hq = 4, .Hk = 2};
    c.name += std::to_string(Nq), c.options.causal = causal;
    all.push_back(c);
  }
  for (Case& c : all) c.D = D, c.Dv = 0, c.type = type, c.backward = false;
  return all;
}

class GpuHopperCompany : public HopperWith<std::tuple<std::int64_t, Type>> {};

TEST_P(GpuHopperCompany, ASequenceHasTheSameBitsAloneInABatchAndPacked) {
  const auto& [D, type] = GetParam();
  for (const Case& spec : lone_sequences(D, type)) {
    SCOPED_TRACE(spec.name);
    Case lone = spec;
    lone.options.batch0 = place;  // dropout counts sequences: the lone one keeps its number
    const std::optional<CaseData> alone = ran_on(hopper_kernel, lone);
    ASSERT_TRUE(alone) << "was refused";
    for (const Company& other : companies(spec)) {
      SCOPED_TRACE(other.name);
      CaseData company = build(other.spec);
      take_place(*alone, company);
      OnGpu on(company, hopper_kernel);
      on.run();
      on.finish();
      expect_same_sequence(*alone, company);
      if (HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuHopperCompany,
                         testing::Combine(testing::Values(64, 128, 256), testing::Values(Type::f16, Type::bf16)));

}  // namespace
}  // namespace tessera::test
