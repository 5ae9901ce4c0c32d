// SPDX-License-Identifier: Apache-2.0
// How calls behave on a GPU: streams, graphs, several threads, contexts, refusals.
// Links tessera_cases. Implements the contract's promise that a GPU call only enqueues, on the caller's stream and
// device, from any thread, and that a refused call launches nothing.
#include <cstdlib>
#include <filesystem>
#include <latch>
#include <thread>

#include "cuda/jit/cache.hpp"
#include "tests/gpu/support.hpp"
#include "tests/support/company.hpp"

namespace tessera::test {
namespace {

Case plain_case(std::uint64_t seed = 1) {
  return {.name = "plain", .B = 2, .Nq = 200, .Nk = 330, .Hq = 4, .Hk = 2, .D = 64, .seed = seed};
}

Case dropout_case(std::uint64_t seed = 1) {
  Case c = plain_case(seed);
  c.name = "dropout", c.options.causal = true;
  c.options.dropout = 0.3, c.options.seed = 100 + seed, c.rng = true;
  return c;
}

// --- streams and graphs ----------------------------------------------------------------------------------------------

class GpuStreams : public GpuWith<std::string> {};

TEST_P(GpuStreams, AStreamOfTheCallersGivesTheSameBits) {
  CaseData a = build(plain_case()), b = build(plain_case());
  OnGpu on_default(a, GetParam());
  on_default.run();
  on_default.finish();
  const Stream stream;
  OnGpu on_stream(b, GetParam(), stream);
  on_stream.run();
  on_stream.finish();
  expect_same_outputs(a, b);
}

// Copies what a run reads; the memory of `to` stays where it is.
void take_inputs(const CaseData& from, CaseData& to) {
  for (const auto member : {&CaseData::q, &CaseData::k, &CaseData::v, &CaseData::d_o, &CaseData::rng})
    std::ranges::copy((from.*member).bytes(), (to.*member).bytes().begin());
}

class Graph {
 public:
  // In the strictest mode: any call that would synchronise or allocate fails, on this thread and on others.
  template <class Body>
  Graph(cuda::StreamHandle stream, Body enqueue) {
    constexpr int global_mode = 0;
    const cuda::Driver& d = cuda::driver();
    cuda::check(d.stream_begin_capture(stream, global_mode), "cuStreamBeginCapture");
    try {
      enqueue();
    } catch (...) {
      d.stream_end_capture(stream, &graph);
      throw;
    }
    cuda::check(d.stream_end_capture(stream, &graph), "cuStreamEndCapture");
    cuda::check(d.graph_instantiate(&exec, graph, 0), "cuGraphInstantiate");
  }
  ~Graph() {
    if (exec) cuda::driver().graph_exec_destroy(exec);
    if (graph) cuda::driver().graph_destroy(graph);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cuda::StreamHandle stream) const {
    cuda::check(cuda::driver().graph_launch(exec, stream), "cuGraphLaunch");
  }

 private:
  cuda::GraphHandle graph = nullptr;
  cuda::GraphExecHandle exec = nullptr;
};

void expect_replays(Case (*make)(std::uint64_t), const std::string& rung) {
  const Stream stream;
  CaseData replayed = build(make(1));
  OnGpu on(replayed, rung, stream);
  const Graph graph(stream, [&] { on.run(); });
  for (std::uint64_t seed : {1, 2, 3}) {
    SCOPED_TRACE("inputs " + std::to_string(seed));
    CaseData direct = build(make(seed));
    take_inputs(direct, replayed);
    for (const auto member : {&CaseData::o, &CaseData::lse, &CaseData::dq, &CaseData::dk, &CaseData::dv})
      (replayed.*member).restore();
    on.upload();
    graph.launch(stream);
    on.finish();
    OnGpu on_default(direct, rung);
    on_default.run();
    on_default.finish();
    expect_same_outputs(direct, replayed);
  }
}

TEST_P(GpuStreams, AGraphIsReplayedWithOtherInputs) { expect_replays(plain_case, GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, GpuStreams, testing::ValuesIn(exact_rungs()));

class GpuGraphs : public Gpu {};

TEST_F(GpuGraphs, ReplaysReadDropoutsSeedAnew) { expect_replays(dropout_case, vector_rung); }

TEST_F(GpuGraphs, CallsWithoutAPlanAreCapturedToo) {
  const Stream stream;
  CaseData captured = build(plain_case()), direct = build(plain_case());
  OnGpu on(captured, vector_rung, stream), on_default(direct, vector_rung);
  const auto call = [&] {
    forward(on.placed.inputs(), on.placed.outputs(), captured.options(), on.execution);
    backward(on.placed.inputs(), on.placed.saved(), on.placed.gradients(), captured.options(), on.execution);
  };
  call();  // this thread now remembers the plans
  wait_for(stream);
  const Graph graph(stream, call);
  on.upload();
  graph.launch(stream);
  on.finish();
  on_default.run();
  on_default.finish();
  expect_same_outputs(direct, captured);
}

// --- threads ---------------------------------------------------------------------------------------------------------

class GpuThreads : public Gpu {};

TEST_F(GpuThreads, TwoStreamsAtOnceGiveWhatTheyGiveAlone) {
  constexpr int rounds = 20;
  Case other = dropout_case(7);
  other.D = 40, other.type = Type::bf16;
  const Case cases[2] = {plain_case(3), other};
  std::vector<CaseData> alone, together;
  for (const Case& spec : cases) {
    alone.push_back(*ran_on(vector_rung, spec));
    together.push_back(build(spec));
  }
  const Stream streams[2];
  OnGpu on[2] = {{together[0], vector_rung, streams[0]}, {together[1], vector_rung, streams[1]}};
  std::latch both(2);
  std::vector<std::thread> threads;
  for (std::size_t n = 0; n < 2; ++n)
    threads.emplace_back([&, n] {
      both.arrive_and_wait();
      try {
        for (int round = 0; round < rounds; ++round) on[n].run();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "thread " << n << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t n = 0; n < 2; ++n) {
    on[n].finish();
    expect_same_outputs(alone[n], together[n]);
  }
}

// A cache folder of this test's own, empty at first.
class FreshCache {
 public:
  FreshCache() : before(cuda::cache_folder()) {
    std::string name = (std::filesystem::temp_directory_path() / "tessera_gpu_XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    folder = name;
    setenv("TESSERA_CACHE", name.c_str(), 1);
  }
  ~FreshCache() {
    setenv("TESSERA_CACHE", before.c_str(), 1);
    std::filesystem::remove_all(folder);
  }
  std::size_t entries() const {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      EXPECT_EQ(entry.path().extension(), ".cubin") << entry.path();  // no temporary file is left
      ++count;
    }
    return count;
  }

 private:
  std::string before;
  std::filesystem::path folder;
};

TEST_F(GpuThreads, SeveralMayAskForTheSameKernelAtOnce) {
  constexpr std::size_t askers = 4;
  const FreshCache cache;
  Case spec = plain_case();
  spec.D = 37, spec.backward = false;  // used nowhere else: no cache has it
  std::vector<CaseData> results;
  for (std::size_t n = 0; n < askers; ++n) results.push_back(build(spec));
  std::vector<std::thread> threads;
  for (std::size_t n = 0; n < askers; ++n)
    threads.emplace_back([&, n] {
      try {
        const cuda::CurrentDevice current(gpu.id);
        const Stream stream;
        OnGpu on(results[n], vector_rung, stream);
        on.run();
        on.finish();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "thread " << n << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(cache.entries(), 1U);
  for (std::size_t n = 1; n < askers; ++n) expect_same_bits(results[0].o, results[n].o, "o");
}

// --- contexts --------------------------------------------------------------------------------------------------------

class GpuContexts : public Gpu {};

cuda::ContextHandle current_context() {
  cuda::ContextHandle context = nullptr;
  cuda::check(cuda::driver().ctx_get_current(&context), "cuCtxGetCurrent");
  return context;
}

TEST_F(GpuContexts, ACallLeavesTheCurrentOneCurrent) {
  const cuda::ContextHandle before = current_context();
  ASSERT_NE(before, nullptr);
  CaseData data = build(plain_case());
  OnGpu on(data, vector_rung);
  on.run();
  EXPECT_EQ(current_context(), before);
  on.finish();
}

TEST_F(GpuContexts, ACallWithNoneCurrentLeavesNone) {
  const CaseData here = *ran_on(vector_rung, plain_case());
  CaseData elsewhere = build(plain_case());
  std::thread([&] {
    EXPECT_EQ(current_context(), nullptr);
    OnGpu on(elsewhere, vector_rung);
    EXPECT_EQ(current_context(), nullptr) << "after planning";
    on.run();
    EXPECT_EQ(current_context(), nullptr) << "after running";
    const cuda::CurrentDevice current(gpu.id);  // to wait, as this test does
    on.finish();
  }).join();
  expect_same_outputs(here, elsewhere);
}

// --- refusals --------------------------------------------------------------------------------------------------------

class GpuRefusals : public Gpu {
 protected:
  // The sentence with which a call is refused; no output may have changed.
  template <class Body>
  std::string refused(Body body) {
    std::string sentence = "no error";
    try {
      body();
    } catch (const Error& error) {
      sentence = error.what();
    }
    wait_for(nullptr);
    on->download();
    for (const Buffer* output : {&data.o, &data.lse, &data.dq, &data.dk, &data.dv})
      for (std::int64_t e = 0; e < output->elements(); ++e)
        if (!output->untouched(e)) {
          ADD_FAILURE() << "an output was written by a call that says: " << sentence;
          return sentence;
        }
    return sentence;
  }
  void SetUp() override {
    Gpu::SetUp();
    if (!IsSkipped()) on.emplace(data, vector_rung);
  }
  void run_backward(const Execution& execution) {
    backward(on->placed.inputs(), on->placed.saved(), on->placed.gradients(), data.options(), execution);
  }
  void run_forward(const Inputs& inputs, const Outputs& outputs, const Execution& execution) {
    forward(inputs, outputs, data.options(), execution);
  }

  CaseData data = build(plain_case());
  std::optional<OnGpu> on;
};

TEST_F(GpuRefusals, WorkspaceNotGiven) {
  Execution execution = on->execution;
  execution.workspace = nullptr, execution.workspace_bytes = 0;
  const std::string sentence = refused([&] { run_backward(execution); });
  EXPECT_TRUE(sentence.starts_with("workspace: is null but this plan needs ")) << sentence;
  EXPECT_TRUE(sentence.ends_with(" bytes on cuda:0; nothing is allocated on a device but by its caller")) << sentence;
}

TEST_F(GpuRefusals, WorkspaceTooSmall) {
  Execution execution = on->execution;
  execution.workspace_bytes = 63;
  const std::string sentence = refused([&] { run_backward(execution); });
  EXPECT_TRUE(sentence.starts_with("workspace_bytes: is 63 but this plan needs ")) << sentence;
}

TEST_F(GpuRefusals, TensorsInTwoPlaces) {
  Inputs inputs = on->placed.inputs();
  inputs.k = data.k.tensor();
  EXPECT_EQ(refused([&] { run_forward(inputs, on->placed.outputs(), on->execution); }),
            "k: is on cpu but the call runs on cuda:0; all tensors must be there");
  EXPECT_EQ(refused([&] { run_forward(on->placed.inputs(), data.outputs(), on->execution); }),
            "o: is on cpu but the call runs on cuda:0; all tensors must be there");
}

TEST_F(GpuRefusals, AGpuThatIsNotThere) {
  const Device far{DeviceType::cuda, 97};
  Inputs inputs = on->placed.inputs();
  Outputs outputs = on->placed.outputs();
  for (Tensor* tensor : {&inputs.q, &inputs.k, &inputs.v, &outputs.o, &outputs.lse}) tensor->device = far;
  Execution execution = on->execution;
  execution.device = far;
  const std::string sentence = refused([&] { run_forward(inputs, outputs, execution); });
  EXPECT_NE(sentence.find("97"), std::string::npos) << sentence;
}

TEST_F(GpuRefusals, KernelsOfTheCpu) {
  Execution execution = on->execution;
  execution.kernel = "reference";
  EXPECT_EQ(refused([&] { run_forward(on->placed.inputs(), on->placed.outputs(), execution); }),
            "no kernel can run this: reference: device is cuda:0; this kernel runs on cpu");
}

}  // namespace
}  // namespace tessera::test
