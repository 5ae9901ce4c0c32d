// SPDX-License-Identifier: Apache-2.0
// Driver and compiler calls that fail, one after another: the n-th call of planning and running a problem fails, for
// every n until none is left. Each failure is a status with a sentence, launches nothing more, keeps the caller's
// context, leaves nothing loaded, and the next try works. Links tessera_cases and the fake libcuda and NVRTC.
// Implements the header's promise of TESSERA_DEVICE_ERROR.
#include "tests/fake/support.hpp"

namespace tessera::test {
namespace {

// Loaded kernels are kept per device: as many devices as tries, so that each one starts from nothing.
constexpr std::size_t many = 2000;
const bool machine_is_large = (fake::machine().gpus.assign(many, fake::hopper), true);

int fresh_device() {
  static int next = 0;
  if (next >= static_cast<int>(many)) throw std::runtime_error("more tries than devices");
  return next++;
}

constexpr FakeProblem problems[] = {{"hopper", FakePass::forward, 64},   {"hopper", FakePass::backward, 128},
                                    {"hopper", FakePass::backward, 256}, {"vector", FakePass::forward, 64},
                                    {"vector", FakePass::backward, 64},  {"warp", FakePass::backward, 64},
                                    {"tiled", FakePass::backward, 64},   {"naive", FakePass::backward, 64}};

// What a try found. Memory of its own comes from a context of the caller's, so that the library retains the primary one
// itself.
struct Tried {
  bool ran = false;
  tessera_status status = TESSERA_OK;
  std::string sentence;
  std::size_t launches = 0, loaded = 0;
};

class Try {
 public:
  explicit Try(const FakeProblem& problem) :
      device(fresh_device()), own(fake::make_context(device)), other(fake::make_context(0)) {
    plain.D = problem.D;
    plain.Nq = plain.Nk = 30'000;  // more tiles than multiprocessors: Hopper's forward pass has two launches then
    const Lent lent(*this);
    call = plain.call(problem.pass, problem.kernel, device);
    call.options.causal = true;
  }

  Tried once() {
    fake::Machine& m = fake::machine();
    Tried t;
    const std::size_t loaded = m.kernels.size();
    m.calls.clear(), m.launches.clear();
    const std::vector<cuda::ContextHandle> before{own, other};  // the current one is of another device
    fake::context_stack() = before;
    try {
      const Plan plan = planned(call);
      {
        const Lent lent(*this);
        workspace.emplace(call, plan);
      }
      run(plan, call);
      t.ran = true;
    } catch (const Error& error) {
      t.status = error.status(), t.sentence = error.what();
    }
    EXPECT_EQ(fake::context_stack(), before) << "another context is current";
    fake::context_stack().clear();
    const Lent lent(*this);
    workspace.reset();
    t.launches = m.launches.size(), t.loaded = m.kernels.size() - loaded;
    return t;
  }

 private:
  // What the test itself asks of the driver neither fails nor counts.
  class Lent {
   public:
    explicit Lent(const Try& of) : fault(std::exchange(fake::machine().fault, {})), calls(fake::machine().calls) {
      fake::context_stack().push_back(of.own);
    }
    ~Lent() {
      fake::context_stack().pop_back();
      fake::machine().fault = fault, fake::machine().calls = calls;
    }

   private:
    fake::Fault fault;
    std::vector<const char*> calls;
  };

  int device;
  cuda::ContextHandle own, other;
  Plain plain;
  FakeCall call;
  std::optional<Workspace> workspace;
};

class FakeFaults : public FakeGpuWith<FakeProblem> {};

struct Failing {
  fake::Status status;
  const char* words;
  bool stays;
};

TEST_P(FakeFaults, EveryDriverCallMayFail) {
  const Tried good = Try(GetParam()).once();
  ASSERT_TRUE(good.ran) << good.sentence;
  ASSERT_GT(good.launches, 0U);
  constexpr int unknown_to_the_driver = 12345;
  for (const Failing& failing : {Failing{fake::out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY", false},
                                 {fake::invalid_value, "CUDA_ERROR_INVALID_VALUE", false},
                                 {fake::not_initialised, "CUDA_ERROR_NOT_INITIALIZED", false},
                                 {fake::launch_failed, "CUDA_ERROR_LAUNCH_FAILED", true},
                                 {unknown_to_the_driver, "unknown error", false}}) {
    int n = 1;
    for (;; ++n) {
      SCOPED_TRACE(testing::Message() << "call " << n << " fails with " << failing.words);
      Try attempt(GetParam());
      fake::machine().fault = {.in = n, .status = failing.status, .stays = failing.stays};
      const Tried bad = attempt.once();
      const fake::Fault fault = std::exchange(fake::machine().fault, {});
      if (!fault.happened) {
        EXPECT_TRUE(bad.ran) << bad.sentence;
        break;
      }
      const std::string failed = fault.call;
      EXPECT_FALSE(bad.ran);
      EXPECT_EQ(bad.status, TESSERA_DEVICE_ERROR);
      EXPECT_NE(bad.sentence.find(failing.words), std::string::npos) << bad.sentence;
      EXPECT_TRUE(bad.sentence.starts_with(failed + " failed: ")) << failed << ": " << bad.sentence;
      // Nothing is launched after a failure. Before a launch that fails there may have been others.
      EXPECT_LT(bad.launches, good.launches);
      if (failed != "cuLaunchKernelEx") {
        EXPECT_EQ(bad.launches, 0U) << bad.sentence;
      }
      const Tried again = attempt.once();
      EXPECT_TRUE(again.ran) << again.sentence;
      EXPECT_EQ(again.launches, good.launches);
      EXPECT_EQ(bad.loaded + again.loaded, good.loaded) << "a kernel was loaded twice";
      if (HasFailure()) return;
    }
    EXPECT_GT(n, 10) << "no call failed";
  }
}

TEST_P(FakeFaults, EveryCompilerCallMayFail) {
  const Tried good = Try(GetParam()).once();
  fake::Compiler& compiler = fake::compiler();
  constexpr int internal_error = 11;
  int failures = 0;
  for (int n = 1;; ++n) {
    SCOPED_TRACE(testing::Message() << "call " << n);
    Try attempt(GetParam());
    compiler = {.calls = {}, .fails_in = n, .status = internal_error};
    const Tried bad = attempt.once();
    const bool happened = compiler.happened;
    const std::string call = happened ? compiler.calls[static_cast<std::size_t>(n - 1)] : "";
    compiler = {};
    if (!happened) break;
    // Without its log a kernel is as good.
    const bool matters = call.find("Log") == std::string::npos;
    EXPECT_EQ(bad.ran, !matters) << call;
    failures += matters;
    if (matters) {
      EXPECT_EQ(bad.status, TESSERA_DEVICE_ERROR) << call;
      EXPECT_NE(bad.sentence.find(call == "nvrtcCreateProgram" ? call : "NVRTC"), std::string::npos) << bad.sentence;
      EXPECT_EQ(bad.launches, 0U);
    }
    if (call == "nvrtcCompileProgram") {
      EXPECT_NE(bad.sentence.find("for sm_90a:\n" + compiler.log), std::string::npos) << bad.sentence;
    }
    const Tried again = attempt.once();
    EXPECT_TRUE(again.ran) << again.sentence;
    EXPECT_EQ(bad.loaded + again.loaded, matters ? good.loaded : good.loaded + again.loaded);
    if (HasFailure()) return;
  }
  EXPECT_GE(failures, 4);
}

INSTANTIATE_TEST_SUITE_P(All, FakeFaults, testing::ValuesIn(problems), testing::PrintToStringParamName());

}  // namespace
}  // namespace tessera::test
