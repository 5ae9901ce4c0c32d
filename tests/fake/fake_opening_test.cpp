// SPDX-License-Identifier: Apache-2.0
// A process's first call on a GPU: drivers that do not start, are too old, have no GPU, or fail at any call until the
// first plan; compilers that are missing. Each try is a child process, since what was found stays for the process.
// Links tessera_cases and the fake libcuda and NVRTC. Implements docs/gpu_kernels.md, "Without a GPU, without NVRTC".
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "tests/fake/support.hpp"

namespace tessera::test {
namespace {

// What `body` returns in a child process. This process itself never asks for a GPU.
std::string in_child(const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = std::string("threw ") + error.what();
    }
    const ssize_t written = write(ends[1], text.data(), text.size());
    _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  char part[4096];
  for (ssize_t count; (count = read(ends[0], part, sizeof(part))) > 0;)
    text.append(part, static_cast<std::size_t>(count));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? text : text + " (the child ended with status " + std::to_string(status) + ")";
}

// Plans without any memory of the caller's. Empty: it worked; else the status and its sentence.
std::string planned_on(int device, const char* kernel = nullptr) {
  const Tensor t{nullptr, Type::bf16, {1, 128, 2, 64}, {DeviceType::cuda, device}};
  try {
    Plan::forward({.q = t, .k = t, .v = t}, {.o = t, .lse = {}}, {}, {.kernel = kernel});
    return "";
  } catch (const Error& error) {
    return std::to_string(error.status()) + " " + error.what();
  }
}

const std::string unsupported = std::to_string(TESSERA_UNSUPPORTED) + " no kernel can run this: decode_direct, ";
const std::string device_error = std::to_string(TESSERA_DEVICE_ERROR) + " ";

void expect_begins(const std::string& text, const std::string& words) {
  EXPECT_TRUE(text.starts_with(words)) << text << "\nshould begin with\n" << words;
}

// All kernels for GPUs are refused for the same reason, which is said once.
bool refused_once(const std::string& text, const std::string& reason) {
  const std::size_t at = text.find(": " + reason);
  return text.starts_with(unsupported) && at != std::string::npos && text.find(reason) == text.rfind(reason);
}

void expect_refused_once(const std::string& text, const std::string& reason) {
  EXPECT_TRUE(refused_once(text, reason)) << text << "\nshould give once the reason\n" << reason;
}

class FakeOpening : public FakeGpu {};

TEST_F(FakeOpening, WorksWithoutAFault) {
  EXPECT_EQ(in_child([] { return planned_on(0) + planned_on(4, "hopper"); }), "");
}

TEST_F(FakeOpening, ADriverThatIsTooOldIsRefused) {
  const std::string said = in_child([] {
    fake::machine().version = 11080;
    return planned_on(0);
  });
  expect_refused_once(said, "the NVIDIA driver is too old: it is for CUDA 11.8; CUDA 12 or later is needed");
}

TEST_F(FakeOpening, AMachineWithoutGpusIsRefused) {
  const std::string said = in_child([] {
    fake::machine().gpus.clear();
    return planned_on(0);
  });
  expect_refused_once(said, "the NVIDIA driver does not start: cuInit says words of the fake driver");
}

TEST_F(FakeOpening, ADeviceThatIsNotThereIsRefused) {
  expect_begins(in_child([] { return planned_on(7); }),
                std::to_string(TESSERA_INVALID_ARGUMENT) + " device: is cuda:7 but this machine has 7 GPUs");
}

TEST_F(FakeOpening, EveryCallMayFail) {
  int n = 1, refused = 0;
  for (;; ++n) {
    SCOPED_TRACE(testing::Message() << "call " << n);
    const std::string said = in_child([&] {
      fake::machine().fault = {.in = n, .status = fake::out_of_memory};
      const std::string first = planned_on(4);
      if (!fake::machine().fault.happened) return std::string("none failed: ") + first;
      const std::string call = fake::machine().fault.call;
      const std::string second = planned_on(4);
      const bool starts = call != "cuInit" && call != "cuDriverGetVersion" && call != "cuDeviceGetCount";
      // What does not start stays so; what fails later works the next time.
      if (!fake::context_stack().empty()) return std::string("a context is left");
      if (starts && first.starts_with(device_error + call + " failed: CUDA_ERROR_OUT_OF_MEMORY") && second.empty())
        return std::string("failed");
      if (!starts && second == first &&
          refused_once(first, "the NVIDIA driver does not start: " + call + " says words of the fake"))
        return std::string("refused");
      return call + ": " + first + "; then " + second;
    });
    refused += said == "refused";
    if (said == "none failed: ") break;
    EXPECT_TRUE(said == "failed" || said == "refused") << said;
    if (HasFailure()) return;
  }
  EXPECT_EQ(refused, 3);
  EXPECT_GT(n, 50);  // seven devices are asked for seven facts each
}

TEST_F(FakeOpening, InfoSaysWhatIsMissing) {
  const std::string said = in_child([] {
    fake::machine().version = 11080;
    return std::string(tessera_info());
  });
  EXPECT_NE(said.find("GPU        none: the NVIDIA driver is too old"), std::string::npos) << said;
  // Any of its calls may fail: then it says so, and the other facts as ever.
  for (int n = 1;; ++n) {
    const std::string with_fault = in_child([&] {
      fake::machine().fault = {.in = n, .status = fake::out_of_memory};
      const std::string lines = tessera_info();
      return fake::machine().fault.happened ? lines : "none failed";
    });
    if (with_fault == "none failed") {
      EXPECT_GT(n, 50);
      return;
    }
    EXPECT_NE(with_fault.find("words of the fake driver"), std::string::npos) << n << ": " << with_fault;
    EXPECT_NE(with_fault.find("\nNVRTC      13.0 from libnvrtc.so.13"), std::string::npos) << n << ": " << with_fault;
  }
}

// The driver does not work there, and another thread may have held a lock.
TEST_F(FakeOpening, AForkedChildIsToldWhyItHasNoGpu) {
  const std::string said = in_child([] {
    const std::string started = planned_on(0);
    return started + in_child([] { return planned_on(0); });
  });
  expect_refused_once(said,
                      "this process was forked after the NVIDIA driver had been started, which then does "
                      "not work in it; start a new process instead");
}

// --- the compiler

TEST_F(FakeOpening, WithoutNvrtcTheSentenceSaysWhereItWasLookedFor) {
  const std::string said = in_child([] {
    setenv("TESSERA_NVRTC", "/nonexistent/libnvrtc.so", 1);
    return planned_on(0);
  });
  expect_begins(said, device_error + "NVRTC is missing: no libnvrtc.so.13 or .12 was found (/nonexistent/libnvrtc.so");
  EXPECT_NE(said.find("Without it only packed kernels run, and this one is not among them"), std::string::npos) << said;
}

TEST_F(FakeOpening, ALibraryThatIsNotNvrtcIsRefused) {
  const std::string said = in_child([] {
    setenv("TESSERA_NVRTC", "libcuda.so.1", 1);
    return planned_on(0);
  });
  expect_begins(said, device_error + "NVRTC at libcuda.so.1 is too old: it has no nvrtcVersion");
}

TEST_F(FakeOpening, NvrtcWithoutAVersionIsRefused) {
  const std::string said = in_child([] {
    fake::compiler() = {.calls = {}, .fails_in = 1, .status = 1};
    return planned_on(0);
  });
  expect_begins(said, device_error + "NVRTC at libnvrtc.so.13 does not say its version");
}

}  // namespace
}  // namespace tessera::test
