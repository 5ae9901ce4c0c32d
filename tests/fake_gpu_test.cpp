// Every case of the tables, and random ones, planned and run on GPUs that are not there: grids, blocks, shared memory,
// tensor maps, pointers in bounds, workspace, contexts, streams.
// Links tessera_cases and the fake libcuda and NVRTC. Implements docs/architecture.md, "One call on a GPU".
#include <map>

#include "cases/random.hpp"
#include "tests/fake_support.hpp"

namespace tessera::test {
namespace {

// What the library promises of a call, whatever the kernel. False: the kernel refuses it. `launches`: how many there
// were.
bool keeps_promises(FakeCall call, std::size_t shift, std::size_t& launches) {
  fake::Machine& m = fake::machine();
  const auto stack = fake::context_stack();
  m.forget();
  std::optional<Plan> plan;
  try {
    plan.emplace(planned(call));
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), TESSERA_UNSUPPORTED) << error.what();
    EXPECT_TRUE(m.launches.empty());
    return false;
  }
  EXPECT_TRUE(only_plans(m.calls));
  EXPECT_EQ(fake::context_stack(), stack) << "after planning";
  const Workspace workspace(call, *plan, shift);

  m.forget();
  run(*plan, call);
  EXPECT_TRUE(only_enqueues(m.calls));
  EXPECT_EQ(fake::context_stack(), stack) << "after the run";
  EXPECT_EQ(joined(m.complaints), "");
  Addressed addressed(call);
  for (const fake::Launch& launch : m.launches) {
    EXPECT_EQ(launch.device, call.execution.device.id) << launch.kernel->function;
    EXPECT_EQ(launch.stream, call.execution.stream) << launch.kernel->function;
    addressed.check(launch);
  }
  EXPECT_EQ(joined(addressed.faults()), "");
  // What is asked for is used: all but the room for alignment, and what fills up the last part.
  if (plan->workspace_size() > 0 && !m.launches.empty()) {
    EXPECT_GT(addressed.workspace_end() + 64 + 16, call.workspace().end) << "the workspace is larger than its use";
  }
  launches = m.launches.size();
  return true;
}

// GPUs take turns, so that every kernel meets every one of them; `hopper` has one only.
int device_for(const std::string& kernel, std::size_t turn) {
  const fake::Machine& m = fake::machine();
  return kernel == "hopper" ? m.device_of(9, 0) : static_cast<int>(turn % m.gpus.size());
}

struct Count {
  int ran = 0, launched = 0;
};

void expect_promises(const std::vector<Case>& cases, std::map<std::string, Count>& counts) {
  std::size_t turn = 0;
  for (const Case& spec : cases) {
    CaseData data = build(spec);
    for (const std::string& kernel : gpu_kernels) {
      const int device = device_for(kernel, turn++);
      // `tiled` adds in whatever order; `hopper` has a kernel for it too.
      data.spec.options.deterministic = kernel != "tiled" && (kernel != "hopper" || turn % 4 < 2);
      SCOPED_TRACE(kernel + " on cuda:" + std::to_string(device) + ": " + describe(spec));
      const OnFake on(data, device);
      for (const FakePass pass : {FakePass::forward, FakePass::backward}) {
        if (pass == FakePass::backward && !spec.backward) continue;
        std::size_t launches = 0;
        constexpr std::size_t shifts[] = {0, 1, 8, 63};
        if (!keeps_promises(on.call(pass, kernel.c_str()), shifts[turn % std::size(shifts)], launches)) continue;
        Count& count = counts[kernel + (pass == FakePass::forward ? " forward" : " backward")];
        ++count.ran, count.launched += launches > 0;
      }
      if (testing::Test::HasFailure()) return;  // one is enough to read
    }
  }
}

void expect_all_ran(const std::map<std::string, Count>& counts, int fewest) {
  for (const std::string& kernel : gpu_kernels)
    for (const char* pass : {" forward", " backward"}) {
      const auto found = counts.find(kernel + pass);
      const Count count = found == counts.end() ? Count{} : found->second;
      EXPECT_GE(count.launched, fewest) << kernel << pass;
      std::cout << kernel << pass << ": " << count.ran << " cases, " << count.launched << " with launches\n";
    }
}

class FakeTables : public FakeGpuWith<const char*> {};

TEST_P(FakeTables, LaunchesAreLegalAndInBounds) {
  std::map<std::string, Count> counts;
  expect_promises(suite(GetParam()), counts);
  expect_all_ran(counts, 1);
}

INSTANTIATE_TEST_SUITE_P(All, FakeTables, testing::Values("regular", "features", "corner"));

class FakeRandom : public FakeGpu {};

TEST_F(FakeRandom, LaunchesAreLegalAndInBounds) {
  std::map<std::string, Count> counts;
  std::vector<Case> cases = random_cases(16'000, 200);
  // The early rungs and Hopper's one-pass backward take few of those: the same again without options, in three types.
  for (std::size_t n = 0; n < 100; ++n) {
    Case c = cases[n];
    c.mask = c.bias = c.rng = false, c.slopes = Slopes::none, c.sinks = Sinks::none;
    c.options.softcap = c.options.dropout = 0, c.options.accumulate = false, c.options.deterministic = n % 2 == 0;
    c.options.scale = default_scale, c.f32_grads = c.f32_do = false, c.grads = {};
    c.type = n % 3 == 0 ? Type::f32 : n % 3 == 1 ? Type::f16 : Type::bf16;
    if (c.type != Type::f32) c.style = Style::contiguous, c.D = (c.D + 7) / 8 * 8, c.Dv = (c.Dv + 7) / 8 * 8;
    c.name += "_plain";
    cases.push_back(c);
  }
  expect_promises(cases, counts);
  expect_all_ran(counts, 20);
}

// --- calls that are no cases

// Sizes of 0 in every place: nothing is launched where there is nothing to write, else legal grids.
TEST_F(FakeGpu, EmptyTensorsLaunchNothingOrLegalGrids) {
  int planned = 0;
  for (const std::string& kernel : gpu_kernels)
    for (const FakePass pass : {FakePass::forward, FakePass::backward})
      for (const std::int64_t B : {0, 2})
        for (const std::int64_t H : {0, 2})
          for (const std::int64_t Nq : {0, 1, 130})
            for (const std::int64_t Nk : {0, 1, 130}) {
              if (kernel == "hopper" && H == 0) continue;
              Plain plain;
              plain.B = B, plain.Hq = plain.Hk = H, plain.Nq = Nq, plain.Nk = Nk;
              std::size_t launches = 0;
              SCOPED_TRACE(testing::Message() << kernel << " B=" << B << " H=" << H << " Nq=" << Nq << " Nk=" << Nk);
              if (!keeps_promises(plain.call(pass, kernel.c_str(), device_for(kernel, 0)), 0, launches)) continue;
              ++planned;
              const bool nothing_to_write = B == 0 || H == 0 || (Nq == 0 && (pass == FakePass::forward || Nk == 0));
              if (!nothing_to_write) {
                EXPECT_GT(launches, 0U);
              }
            }
  EXPECT_GT(planned, 5 * 2 * 36);  // `hopper` refuses most of them
}

// A caller's own context on the device is kept, and its streams are those of the launches; a context of another device
// gives way to the primary one, and comes back.
TEST_F(FakeGpu, TheCallersContextAndStreamAreUsed) {
  const int device = fake::machine().device_of(9, 0);
  for (const std::string& kernel : gpu_kernels)
    for (const FakePass pass : {FakePass::forward, FakePass::backward}) {
      Plain plain;
      FakeCall call = plain.call(pass, kernel.c_str(), device);
      const cuda::ContextHandle own = fake::make_context(device), other = fake::make_context(0);
      for (const cuda::ContextHandle current : {own, other}) {
        fake::context_stack() = {other, current};
        cuda::StreamHandle stream = nullptr;
        if (current == own) {
          ASSERT_EQ(cuda::driver().stream_create(&stream, 1), fake::success);
        }
        call.execution.stream = stream;
        std::size_t launches = 0;
        EXPECT_TRUE(keeps_promises(call, 0, launches));
        EXPECT_GT(launches, 0U);
        for (const fake::Launch& launch : fake::machine().launches)
          EXPECT_EQ(launch.context, current == own ? own : fake::primary_context(device)) << launch.kernel->function;
      }
      fake::context_stack().clear();
    }
}

// One byte less than the plan asks for is refused before anything is launched, and so is none at all.
TEST_F(FakeGpu, TooSmallAWorkspaceIsRefused) {
  Plain plain;
  FakeCall call = plain.call(FakePass::backward, "vector", 0);
  const Plan plan = planned(call);
  const Workspace workspace(call, plan);
  --call.execution.workspace_bytes;
  fake::machine().forget();
  EXPECT_THROW(run(plan, call), Error);
  call.execution.workspace = nullptr;
  EXPECT_THROW(run(plan, call), Error);
  EXPECT_TRUE(fake::machine().launches.empty());
}

}  // namespace
}  // namespace tessera::test
