// SPDX-License-Identifier: Apache-2.0
// The text of `tessera info` and tessera_info(): one fact about this machine per line, after a name of at most 10
// letters.
#include "api/attention.hpp"
#include "api/kernels.hpp"
#include "core/failure.hpp"
#include "core/parallel.hpp"
#include "core/processor.hpp"
#include "cpu/kernels.hpp"
#include "cuda/device.hpp"
#include "cuda/jit/cache.hpp"
#include "cuda/jit/nvrtc.hpp"
#include "cuda/jit/pack.hpp"
#include "vulkan/backend.hpp"

namespace tessera::api {
namespace {

std::string gpu_text() {
  const std::string& missing = cuda::find_driver().reason;
  if (!missing.empty()) return "none: " + missing;
  std::string out;
  for (int i = 0; i < cuda::device_count(); ++i) {
    const cuda::Properties& p = cuda::properties(i);
    out += text(i ? "; " : "", "cuda:", i, " ", p.name, ", ", p.architecture(), ", ", p.multiprocessors, " SMs");
  }
  return out;
}

std::string nvrtc_text() {
  const cuda::NvrtcOrReason& found = cuda::find_nvrtc();
  if (!found.nvrtc) return "none: " + found.reason;
  return text(found.nvrtc->major, ".", found.nvrtc->minor, " from ", found.nvrtc->path,
              "; any GPU kernel can be compiled here, and `make gate` can run");
}

std::string cache_text() {
  const std::string folder = cuda::cache_folder();
  return folder.empty()
             ? "none: TESSERA_CACHE is empty, there is no home folder, or this program has more rights than its user"
             : folder;
}

// A failure (a damaged $TESSERA_PACK, a broken driver) replaces its own line and does not hide the other facts.
template <class Fact>
std::string fact_or_failure(const Fact& fact) {
  try {
    return fact();
  } catch (const Failure& failure) {
    return failure.what();
  }
}

}  // namespace

std::string kernel_names() {
  std::string names;
  for (const Kernel* kernel : kernels()) names += text(names.empty() ? "" : ", ", kernel->name());
  return names;
}

std::string info() {
  return text("processor  ", processor(), "\nisa        ", cpu::instruction_sets(), "\nthreads    ", resolve_threads(0),
              "\nkernels    ", kernel_names(), "\nGPU        ", fact_or_failure(gpu_text), "\nNVRTC      ",
              nvrtc_text(), "\npacked     ", fact_or_failure(cuda::packs_summary), "\ncache      ", cache_text(),
              "\nVulkan     ", fact_or_failure(vulkan::devices_text), "\n");
}

}  // namespace tessera::api
