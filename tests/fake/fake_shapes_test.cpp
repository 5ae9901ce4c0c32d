// SPDX-License-Identifier: Apache-2.0
// Calls that are no cases of the tables, on GPUs that are not there: nothing to compute, as much as a grid can hold,
// strides that are far or negative, the caller's own contexts and streams, workspaces that are too small.
// Links tessera_cases and the fake libcuda and NVRTC. Implements docs/architecture.md, "One call on a GPU".
#include "tests/fake/support.hpp"

namespace tessera::test {
namespace {

// Sizes of 0 in every place: nothing is launched where there is nothing to write, else legal grids.
TEST_F(FakeGpu, EmptyTensorsLaunchNothingOrLegalGrids) {
  int planned = 0;
  for (const std::string& kernel : gpu_kernels)
    for (const FakePass pass : {FakePass::forward, FakePass::backward})
      for (const std::int64_t B : {0, 2})
        for (const std::int64_t H : {0, 2})
          for (const std::int64_t Nq : {0, 1, 130})
            for (const std::int64_t Nk : {0, 1, 130}) {
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

// --- sizes and strides

// True: there is a plan, and it keeps its promises. False: the call is refused by a sentence, before anything is
// launched.
bool runs_or_is_refused(const FakeCall& call) {
  try {
    planned(call);
  } catch (const Error& error) {
    EXPECT_TRUE(error.status() == TESSERA_UNSUPPORTED || error.status() == TESSERA_INVALID_ARGUMENT) << error.what();
    return false;
  }
  std::size_t launches = 0;
  return keeps_promises(call, 0, launches) && launches > 0;
}

// As many sequences of one token as a grid has blocks at most run on `vector`; with a head more than that, or a
// sequence, a grid would have to wrap.
TEST_F(FakeGpu, GridsHoldWhatTheyCanAndNoMore) {
  constexpr std::int64_t most = 2147483647;
  for (const std::string& kernel : gpu_kernels)
    for (const FakePass pass : {FakePass::forward, FakePass::backward}) {
      const auto runs = [&](std::int64_t B, std::int64_t H) {
        SCOPED_TRACE(testing::Message() << kernel << " B=" << B << " H=" << H);
        Plain plain;
        plain.B = B, plain.Hq = plain.Hk = H, plain.Nq = plain.Nk = 1, plain.D = 8;
        return runs_or_is_refused(plain.call(pass, kernel.c_str(), device_for(kernel, 1)));
      };
      const bool general = kernel == "vector" || kernel == "vector_fma";
      EXPECT_TRUE(runs(most, 1) || !general) << kernel;
      EXPECT_TRUE(runs(65536, 16) || kernel == "hopper");
      EXPECT_FALSE(runs(most, 2));
      EXPECT_FALSE(runs(most + 1, 1));
    }
}

// The tensors of a call.
std::vector<Tensor*> tensors_of(FakeCall& c) {
  std::vector<Tensor*> all{&c.in.q, &c.in.k, &c.in.v};
  if (c.pass == FakePass::forward) all.push_back(&c.out.o);
  if (c.pass == FakePass::backward)
    all.insert(all.end(), {&c.saved.o, &c.saved.d_o, &c.grads.dq, &c.grads.dk, &c.grads.dv});
  return all;
}

// Tokens in reverse order, for one tensor after the other; and tokens 2^40 bytes apart, which tensor maps cannot say.
TEST_F(FakeGpu, StridesMayBeNegativeOrFar) {
  for (const std::string& kernel : gpu_kernels)
    for (const FakePass pass : {FakePass::forward, FakePass::backward})
      for (std::size_t n = 0; n < (pass == FakePass::forward ? 4 : 8); ++n)
        for (const bool far : {false, true}) {
          SCOPED_TRACE(testing::Message() << kernel << (far ? " far" : " reversed") << " tensor " << n);
          Plain plain;
          plain.B = 1, plain.Nq = plain.Nk = 3;
          const int device = device_for(kernel, n);
          FakeCall call = plain.call(pass, kernel.c_str(), device);
          Tensor& t = *tensors_of(call)[n];
          constexpr std::int64_t far_stride = std::int64_t{1} << 39;
          const DeviceMemory memory(call.execution.device, far ? 2 * far_stride * 2 + 4096 : 65536);
          t.data = memory.data();
          if (far) t.strides[1] = far_stride;
          if (!far) t.data = static_cast<std::byte*>(t.data) + 2 * t.strides[1] * 2, t.strides[1] *= -1;
          if (runs_or_is_refused(call)) continue;
          EXPECT_EQ(kernel, "hopper");
          call.execution.kernel = nullptr;  // then another one takes it
          EXPECT_TRUE(runs_or_is_refused(call));
        }
}

// Both of Hopper's backward forms are kernels with names. The family's name takes the better one that can.
TEST_F(FakeGpu, HoppersBackwardFormsHaveNames) {
  const int device = fake::machine().device_of(9, 0);
  const auto launched = [&](const char* kernel, std::int64_t D) {
    Plain plain;
    plain.D = D;
    FakeCall call = plain.call(FakePass::backward, kernel, device);
    const Plan plan = planned(call);
    const Workspace workspace(call, plan, 0);
    fake::machine().forget();
    run(plan, call);
    std::string names;
    for (const fake::Launch& launch : fake::machine().launches) names += launch.kernel->function + " ";
    return names;
  };
  EXPECT_EQ(launched("hopper_one_pass", 64), "prepare one_pass finish ");
  EXPECT_EQ(launched("hopper_two_pass", 64), "delta backward backward ");
  EXPECT_EQ(launched("hopper", 64), launched("hopper_one_pass", 64));
  EXPECT_EQ(launched("hopper", 256), launched("hopper_two_pass", 256));

  Plain plain;
  plain.D = 256;
  const std::string told = planned(plain.call(FakePass::backward, "hopper", device)).describe();
  EXPECT_NE(told.find("kernel         hopper_two_pass\n"), std::string::npos) << told;
  EXPECT_NE(told.find("not hopper_one_pass refused: D is 256 and Dv is 256; one pass has tiles up to 128\n"),
            std::string::npos)
      << told;
  EXPECT_NE(told.find("not hopper     refused: pass is backward; this kernel is for the forward pass\n"),
            std::string::npos)
      << told;
  try {
    planned(plain.call(FakePass::backward, "hopper_one_pass", device));
    FAIL() << "D = 256 has no one-pass form";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("hopper_one_pass: D is 256"), std::string::npos) << error.what();
  }
}

// Until it has passed its tests on a GPU, `mma` is what a call gets by name only, and a plan says so.
TEST_F(FakeGpu, MmaIsForThoseWhoAskForIt) {
  for (const int device : {fake::machine().device_of(8, 0), fake::machine().device_of(9, 0)}) {
    Plain plain;
    const std::string forced = planned(plain.call(FakePass::forward, "mma", device)).describe();
    EXPECT_NE(forced.find("kernel         mma\n"), std::string::npos) << forced;
    EXPECT_NE(forced.find("mma_forward: "), std::string::npos) << forced;
    FakeCall call = plain.call(FakePass::forward, "mma", device);
    call.execution.kernel = nullptr;
    const std::string chosen = planned(call).describe();
    EXPECT_NE(chosen.find("not mma        refused: this kernel has not passed all of its tests on a GPU yet; a call "
                          "gets it if it asks for it by name\n"),
              std::string::npos)
        << chosen;
  }
}

// Persistent kernels leave as many multiprocessors free as the caller asks for; the others, and a margin that leaves
// none, are refused. Parts of a problem are refused by all.
TEST_F(FakeGpu, AMarginOfMultiprocessorsStaysFree) {
  const int device = fake::machine().device_of(9, 0);
  for (const FakePass pass : {FakePass::forward, FakePass::backward})
    for (const int margin : {0, 1, 4, 131}) {
      Plain plain;
      plain.B = 4, plain.Nq = plain.Nk = 4096, plain.Hq = plain.Hk = 8, plain.D = 128;
      FakeCall call = plain.call(pass, pass == FakePass::forward ? "hopper" : "hopper_one_pass", device);
      call.execution.sm_margin = margin;
      std::size_t launches = 0;
      ASSERT_TRUE(keeps_promises(call, 0, launches));
      const auto is_main = [](const fake::Launch& launch) {
        return launch.kernel->function.find("forward") != std::string::npos ||
               launch.kernel->function.find("one_pass") != std::string::npos;
      };
      const auto& list = fake::machine().launches;
      const auto main = std::find_if(list.begin(), list.end(), is_main);
      ASSERT_NE(main, list.end());
      EXPECT_EQ(main->grid[0], static_cast<unsigned>(fake::hopper.multiprocessors - margin)) << main->kernel->function;
    }
  const auto refused = [&](const char* kernel, const auto& change) {
    Plain plain;
    FakeCall call = plain.call(FakePass::forward, kernel, device);
    change(call);
    try {
      planned(call);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), TESSERA_UNSUPPORTED);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(refused("vector", [](FakeCall& c) { c.execution.sm_margin = 2; }),
            "no kernel can run this: vector: sm_margin is 2; this kernel is not persistent and takes every "
            "multiprocessor");
  EXPECT_NE(refused("hopper", [](FakeCall& c) { c.execution.sm_margin = 132; })
                .find(": sm_margin is 132; this GPU has 132 multiprocessors"),
            std::string::npos);
  EXPECT_EQ(refused("vector", [](FakeCall& c) { c.options.part_invariant = true; }),
            "no kernel can run this: vector: the call is a part (part-invariant); this kernel takes positions that all "
            "sequences share, hopper states in the forward pass, cpu kernels parts of every kind");
}

// A carried forward pass on `hopper`: from a state or not, to a state or to O, and without keys.
TEST_F(FakeGpu, StatesAreInBounds) {
  const int device = fake::machine().device_of(9, 0);
  int ran = 0;
  for (const std::int64_t D : {64, 128, 256})
    for (const std::int64_t Nk : {0, 130, 4096})
      for (const bool from : {false, true})
        for (const bool to : {false, true}) {
          Plain plain;
          plain.D = D, plain.Nk = Nk, plain.Nq = 8192;
          FakeCall call = plain.call(FakePass::forward, "hopper", device);
          call.options.causal = true, call.options.part_invariant = ran % 2 == 0;
          call.options.row0 = 3 * 192, call.options.col0 = 384;
          if (D > 64) call.options.row0 = 128;
          if (from) call.in.state = plain.state();
          if (to) call.out = {.state = plain.state()};
          if (!from && !to) call.options.part_invariant = true;
          std::size_t launches = 0;
          ASSERT_TRUE(keeps_promises(call, 0, launches));
          EXPECT_EQ(launches, Nk == 0 ? 1u : 2u);  // causal: tiles are counted
          ++ran;
        }
  EXPECT_EQ(ran, 36);
}

// Plans tell the tiles; a cut elsewhere is refused, and so is what only the CPU takes.
TEST_F(FakeGpu, PartsAreCutAtTiles) {
  const int device = fake::machine().device_of(9, 0);
  const auto attempt = [&](FakePass pass, const char* kernel, const auto& change) {
    Plain plain;
    plain.D = 128;
    FakeCall call = plain.call(pass, kernel, device);
    call.options.part_invariant = true;
    change(call);
    try {
      const Plan plan = planned(call);
      EXPECT_EQ(plan.query_tile(), 128);
      EXPECT_EQ(plan.key_tile(), 128);
      run(plan, call);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const auto forward = FakePass::forward;
  EXPECT_EQ(attempt(forward, "hopper", [](FakeCall& c) { c.options.row0 = 128, c.options.col0 = -256; }), "no error");
  EXPECT_EQ(attempt(forward, "hopper", [](FakeCall& c) { c.options.row0 = 64; }),
            "row0: is 64; with part_invariant it must be a multiple of 128");
  EXPECT_EQ(attempt(forward, "hopper", [](FakeCall& c) { c.options.col0 = 192; }),
            "col0: is 192; with part_invariant it must be a multiple of 128");
  EXPECT_EQ(attempt(FakePass::backward, "hopper_two_pass", [](FakeCall&) {}),
            "no kernel can run this: hopper_two_pass: the call is a part (part-invariant); this kernel takes positions "
            "that all sequences share, hopper states in the forward pass, cpu kernels parts of every kind");
  EXPECT_TRUE(fake::machine().launches.size() > 0);
}

}  // namespace
}  // namespace tessera::test
