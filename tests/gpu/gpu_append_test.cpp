// SPDX-License-Identifier: Apache-2.0
// Append and merge on a GPU: the trials of the CPU's tests, with the CPU's bits; rows that have no place; append and
// attention over it in one graph, and step after step in a stream. Links tessera_cases. tests/decode runs the kernels'
// text without a GPU.
#include <map>

#include "tests/gpu/support.hpp"
#include "tests/support/new_tokens.hpp"

namespace tessera::test {
namespace {

// Tensors that lie in host memory, and the same bytes on the GPU: views that share memory share it there too.
class Mirror {
 public:
  void add(const Tensor& t) {
    if (!t || t.elements() == 0) return;
    std::int64_t low = 0, high = 1;
    for (std::size_t d = 0; d < static_cast<std::size_t>(t.ndim); ++d)
      (t.strides[d] < 0 ? low : high) += t.shape[d] == 1 ? 0 : (t.shape[d] - 1) * t.strides[d];
    const std::int64_t bytes = tessera::size_of(t.type);
    std::byte* begin = static_cast<std::byte*>(t.data) + low * bytes;
    std::byte* end = static_cast<std::byte*>(t.data) + high * bytes;
    for (auto range = ranges.begin(); range != ranges.end();)
      if (range->first < end && begin < range->second)
        begin = std::min(begin, range->first), end = std::max(end, range->second), range = ranges.erase(range);
      else
        ++range;
    ranges[begin] = end;
  }
  void upload() {
    for (const auto& [begin, end] : ranges) {
      auto& copy = copies[begin];
      if (!copy) copy = std::make_unique<DeviceMemory>(gpu, static_cast<std::size_t>(end - begin));
      copy->write(begin, static_cast<std::size_t>(end - begin));
    }
  }
  void download() const {
    for (const auto& [begin, end] : ranges) copies.at(begin)->read(begin, static_cast<std::size_t>(end - begin));
  }
  Tensor operator()(Tensor t) const {
    if (!t) return t;
    t.device = gpu;
    const auto* data = static_cast<std::byte*>(t.data);
    for (const auto& [begin, end] : ranges)
      if (begin <= data && data < end) t.data = static_cast<std::byte*>(copies.at(begin)->data()) + (data - begin);
    return t;
  }

 private:
  std::map<std::byte*, std::byte*> ranges;
  std::map<std::byte*, std::unique_ptr<DeviceMemory>> copies;
};

void append_on_gpu(const AppendArgs& a) {
  Mirror mirror;
  AppendArgs on_gpu = a;
  Tensor* const all[] = {&on_gpu.k_new,
                         &on_gpu.v_new,
                         &on_gpu.k,
                         &on_gpu.v,
                         &on_gpu.seqused_k,
                         &on_gpu.block_table,
                         &on_gpu.page_indptr,
                         &on_gpu.page_indices,
                         &on_gpu.slots,
                         &on_gpu.rotary_cos,
                         &on_gpu.rotary_sin,
                         &on_gpu.positions,
                         &on_gpu.q,
                         &on_gpu.q_out,
                         &on_gpu.q_positions,
                         &on_gpu.status,
                         &on_gpu.k_scale,
                         &on_gpu.v_scale,
                         &on_gpu.cu_seqlens_new,
                         &on_gpu.v_block_table};
  for (const Tensor* t : all) mirror.add(*t);
  mirror.upload();
  for (Tensor* t : all) *t = mirror(*t);
  append(on_gpu, {.device = gpu});
  wait_for(nullptr);
  mirror.download();
}

void expect_cpus_bits(const Trial& trial) {
  SCOPED_TRACE(describe(trial));
  Prepared on_cpu(trial), on_gpu(trial);
  append(on_cpu.a, {.threads = 1});
  append_on_gpu(on_gpu.a);
  expect_same_bits(on_cpu.k, on_gpu.k, "k");
  if (on_cpu.v) expect_same_bits(on_cpu.v, on_gpu.v, "v");
  if (on_cpu.q_out) expect_same_bits(on_cpu.q_out, on_gpu.q_out, "q_out");
  if (on_cpu.k_scale) expect_same_bits(on_cpu.k_scale, on_gpu.k_scale, "k_scale");
  if (on_cpu.v_scale) expect_same_bits(on_cpu.v_scale, on_gpu.v_scale, "v_scale");
  EXPECT_EQ(on_cpu.status, on_gpu.status);
  ++case_count.judged;
}

class GpuAppend : public Gpu {};

TEST_F(GpuAppend, RandomTrialsHaveTheCpusBits) {
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    expect_cpus_bits(random_trial(seed));
    if (HasFailure()) return;
  }
}

TEST_F(GpuAppend, EveryTypeAndScale) {
  std::uint64_t seed = 0;
  for (const Where where : wheres)
    for (const Type to : {Type::f32, Type::f16, Type::bf16, Type::e4m3, Type::i8})
      for (const Scaled scaled : {Scaled::no, Scaled::all, Scaled::by_head, Scaled::by_sequence, Scaled::by_token}) {
        const bool eight = to == Type::e4m3 || to == Type::i8;
        if (scaled == Scaled::by_token && !eight) continue;
        Trial t{.where = where, .interleaved = ++seed % 2 == 0, .D = 128, .Dv = 64, .rotated = 64, .queries = 3};
        t.from = seed % 3 ? Type::bf16 : Type::f32, t.to = to, t.v_to = to, t.scaled = scaled, t.seed = seed;
        t.cache = Cache::heads_first;
        expect_cpus_bits(t);
        if (HasFailure()) return;
      }
}

TEST_F(GpuAppend, RowsWithoutAPlaceAreLeftOut) {
  Trial t{.rotated = 4, .queries = 3};
  Prepared p(t);
  p.lengths[1] = 1000;
  append_on_gpu(p.a);
  EXPECT_EQ(p.status, 4 | beyond_bounds);
  EXPECT_TRUE(p.k.margins_intact() && p.v.margins_intact());
}

// A cache in pages, and decoding steps over it as engines make them: append, then attention.
struct Serving {
  static constexpr std::int64_t B = 3, Hq = 8, Hk = 2, D = 64, P = 16, pages = 64, entries = 16;
  Generator g{11};
  Buffer k{Type::bf16, {pages, P, Hk, D}}, v{Type::bf16, {pages, P, Hk, D}}, q{Type::bf16, {B, 1, Hq, D}};
  Buffer k_new{Type::bf16, {B, 1, Hk, D}}, v_new{Type::bf16, {B, 1, Hk, D}}, rotated_q{Type::bf16, {B, 1, Hq, D}};
  Buffer cos{Type::f32, {256, D / 2}}, sin{Type::f32, {256, D / 2}}, o;  // o: of every step
  std::vector<std::int32_t> table, lengths{1, 100, 200};

  explicit Serving(std::int64_t steps) : o(Type::bf16, {steps * B, 1, Hq, D}) {
    for (Buffer* b : {&k, &v, &q, &k_new, &v_new, &cos, &sin}) fill_normal(*b, g);
    for (std::int64_t n = 0; n < B * entries; ++n) table.push_back(static_cast<std::int32_t>(n * 5 % pages));
  }
  Tensor used() { return {lengths.data(), Type::i32, {B}}; }
  Tensor blocks() { return {table.data(), Type::i32, {B, entries}}; }
  void upload(Mirror& mirror) {
    for (const Buffer* b : {&k, &v, &q, &k_new, &v_new, &o, &cos, &sin, &rotated_q}) mirror.add(b->tensor());
    mirror.add(used()), mirror.add(blocks());
    mirror.upload();
  }
  // Of what lies in `on`.
  Inputs inputs(const Mirror& on) {
    Inputs in{.q = on(rotated_q.tensor()), .k = on(k.tensor()), .v = on(v.tensor())};
    in.seqused_k = on(used()), in.block_table = on(blocks());
    return in;
  }
  Outputs outputs(const Mirror& on, std::int64_t step = 0) const {
    Tensor part = o.tensor();
    part.data = static_cast<std::byte*>(part.data) + step * B * part.strides[0] * 2, part.shape[0] = B;
    return {.o = on(part)};
  }
  Plan plan(const Mirror& on, const Execution& execution) {
    return Plan::forward(inputs(on), outputs(on), {}, execution);
  }
  void run(const Mirror& on, const Plan& plan, const Execution& execution, std::int64_t step = 0) {
    const Inputs in = inputs(on);
    AppendArgs a{.k_new = on(k_new.tensor()), .v_new = on(v_new.tensor()), .k = in.k, .v = in.v};
    a.seqused_k = in.seqused_k, a.block_table = in.block_table, a.rotary_cos = on(cos.tensor());
    a.rotary_sin = on(sin.tensor()), a.q = on(q.tensor()), a.q_out = in.q;
    append(a, execution);
    plan.run(in, outputs(on, step), {}, execution);
  }
};

// The kernels for few rows over a cache; the second reads it before the launch before it has ended.
class GpuServing : public GpuAppend, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    GpuAppend::SetUp();
    if (!IsSkipped() && cuda::properties(gpu.id).major < 8) GTEST_SKIP() << "no GPU to test: it is older than sm_80";
  }
};

// A step as engines capture it. Replayed with new lengths and tokens, it has the bits of eager calls.
TEST_P(GpuServing, AppendAndAttendInOneGraph) {
  Serving s(1);
  Mirror captured, eager;
  s.upload(captured), s.upload(eager);
  const Stream stream;
  Execution execution{.device = gpu, .stream = static_cast<cuda::StreamHandle>(stream), .kernel = GetParam()};
  const Plan plan = s.plan(captured, execution);
  DeviceMemory memory(gpu, plan.workspace_size()), other_memory(gpu, plan.workspace_size());
  execution.workspace = memory.data(), execution.workspace_bytes = plan.workspace_size();
  s.run(captured, plan, execution);  // compiles and loads
  const cuda::Driver& d = cuda::driver();
  cuda::GraphHandle graph = nullptr;
  cuda::GraphExecHandle exec = nullptr;
  cuda::check(d.stream_begin_capture(stream, 0), "cuStreamBeginCapture");
  s.run(captured, plan, execution);
  cuda::check(d.stream_end_capture(stream, &graph), "cuStreamEndCapture");
  cuda::check(d.graph_instantiate(&exec, graph, 0), "cuGraphInstantiate");
  execution.workspace = other_memory.data();
  for (int round = 0; round < 20; ++round) {
    for (std::size_t b = 0; b < 3; ++b) s.lengths[b] = static_cast<std::int32_t>(1 + (round * 37 + int(b) * 91) % 255);
    for (Buffer* b : {&s.k_new, &s.v_new, &s.q}) fill_normal(*b, s.g);
    captured.upload(), eager.upload();
    cuda::check(d.graph_launch(exec, stream), "cuGraphLaunch");
    s.run(eager, plan, execution);
    wait_for(stream);
    eager.download();
    const std::vector<double> expected = s.o.values(), expected_k = s.k.values();
    captured.download();
    EXPECT_EQ(s.o.values(), expected) << "round " << round;
    EXPECT_EQ(s.k.values(), expected_k) << "round " << round;
    if (HasFailure()) break;
  }
  d.graph_exec_destroy(exec);
  d.graph_destroy(graph);
}

// Lengths, keys and queries are written just before each step, in the stream alone, lengths by a copy between places of
// the GPU, for which no driver stops: a step that read them too early, or from a cache that has those of the step
// before, would have other bits than one that the host waits for.
TEST_P(GpuServing, StepsThatNobodyWaitsForHaveTheSameBits) {
  constexpr std::int64_t steps = 100;
  Serving s(steps);
  Mirror waited, unwaited;
  s.upload(waited), s.upload(unwaited);
  const Stream stream;
  std::vector<std::int32_t> lengths;  // of every step
  for (std::int64_t n = 0; n < steps * Serving::B; ++n)
    lengths.push_back(static_cast<std::int32_t>(20 + n / Serving::B + 60 * (n % Serving::B)));
  constexpr std::size_t row = Serving::B * sizeof(std::int32_t);
  DeviceMemory all_lengths(gpu, steps * row);
  all_lengths.write(reinterpret_cast<const std::byte*>(lengths.data()), steps * row);
  const auto run_steps = [&](const Mirror& on, const char* kernel, bool waits) {
    Execution execution{.device = gpu, .stream = static_cast<cuda::StreamHandle>(stream), .kernel = kernel};
    const Plan plan = s.plan(on, execution);
    DeviceMemory workspace(gpu, plan.workspace_size());
    workspace.fill(std::byte{0xFF});
    execution.workspace = workspace.data(), execution.workspace_bytes = plan.workspace_size();
    constexpr std::size_t pitch = 512;  // of one row, so it means nothing; but drivers may want such multiples
    cuda::Copy2D copy{.from_type = cuda::Copy2D::device, .from_pitch = pitch, .to_type = cuda::Copy2D::device};
    copy.from_device = reinterpret_cast<cuda::DevicePointer>(all_lengths.data());
    copy.to_device = reinterpret_cast<cuda::DevicePointer>(on(s.used()).data);
    copy.to_pitch = pitch, copy.width = row, copy.height = 1;
    for (std::int64_t step = 0; step < steps; ++step, copy.from_device += row) {
      cuda::check(cuda::driver().memcpy_rows(&copy, stream), "cuMemcpy2DAsync");
      s.run(on, plan, execution, step);
      if (waits) wait_for(stream);
    }
    wait_for(stream);
  };
  run_steps(waited, "decode_queue", true);
  run_steps(unwaited, GetParam(), false);
  waited.download();
  const std::vector<double> expected = s.o.values(), expected_k = s.k.values();
  unwaited.download();
  const std::vector<double> o = s.o.values();
  const auto width = static_cast<std::ptrdiff_t>(Serving::B * Serving::Hq * Serving::D);
  for (std::ptrdiff_t step = 0; step < steps; ++step)
    ASSERT_TRUE(std::equal(o.begin() + step * width, o.begin() + (step + 1) * width, expected.begin() + step * width))
        << "step " << step;
  EXPECT_FALSE(std::equal(o.begin(), o.begin() + width, o.begin() + width)) << "two steps are one";
  EXPECT_EQ(s.k.values(), expected_k);
}

INSTANTIATE_TEST_SUITE_P(All, GpuServing, testing::Values("decode_queue", "decode_direct"));

// In float64 on both; exp and log may differ in its last place, which f32 seldom shows.
TEST_F(GpuAppend, MergeAgreesWithTheCpus) {
  Generator g(3);
  const Shape shape{2, 7, 3, 80}, of_lse{2, 3, 7};
  std::vector<Buffer> o, lse;
  for (int n = 0; n < 5; ++n) {
    o.emplace_back(n % 2 ? Type::f32 : Type::bf16, shape), lse.emplace_back(Type::f32, of_lse);
    fill_normal(o.back(), g);
    for (std::int64_t e = 0; e < lse.back().elements(); ++e)
      lse.back().set(e, g.chance(0.3) ? -std::numeric_limits<double>::infinity() : 5 * g.normal());
  }
  std::vector<Outputs> parts, on_gpu;
  for (std::size_t n = 0; n < o.size(); ++n) parts.push_back({.o = o[n].tensor(), .lse = lse[n].tensor()});
  const Buffer cpu_o(Type::f32, shape), cpu_lse(Type::f32, of_lse), gpu_o(Type::f32, shape), gpu_lse(Type::f32, of_lse);
  merge(parts, {.o = cpu_o.tensor(), .lse = cpu_lse.tensor()});
  Mirror mirror;
  for (const Outputs& part : parts) mirror.add(part.o), mirror.add(part.lse);
  mirror.add(gpu_o.tensor()), mirror.add(gpu_lse.tensor());
  mirror.upload();
  for (const Outputs& part : parts) on_gpu.push_back({.o = mirror(part.o), .lse = mirror(part.lse)});
  merge(on_gpu, {.o = mirror(gpu_o.tensor()), .lse = mirror(gpu_lse.tensor())}, {.device = gpu});
  wait_for(nullptr);
  mirror.download();
  for (std::int64_t e = 0; e < cpu_o.elements(); ++e)
    ASSERT_NEAR(cpu_o.get(e), gpu_o.get(e), 1.01 * spacing(Type::f32, cpu_o.get(e))) << e;
  for (std::int64_t e = 0; e < cpu_lse.elements(); ++e)
    if (cpu_lse.get(e) != gpu_lse.get(e)) {
      ASSERT_NEAR(cpu_lse.get(e), gpu_lse.get(e), 1.01 * spacing(Type::f32, cpu_lse.get(e))) << e;
    }
}

}  // namespace
}  // namespace tessera::test
