// SPDX-License-Identifier: Apache-2.0
// Compiling units with NVRTC; see compile.hpp.
#include "cuda/jit/compile.hpp"

#include <ctime>
#include <regex>

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "core/once.hpp"
#include "cuda/jit/nvrtc.hpp"
#include "cuda/jit/source.hpp"

namespace tessera::cuda {
namespace {

std::string program_log(const Nvrtc& nvrtc, ProgramHandle program) {
  std::size_t bytes = 0;
  nvrtc.get_log_size(program, &bytes);
  std::string log(bytes, '\0');
  if (bytes > 0) nvrtc.get_log(program, log.data());
  while (!log.empty() && log.back() == '\0') log.pop_back();
  return log;
}

int sum_of(const std::string& log, const char* pattern) {
  const std::regex expression(pattern);
  int sum = 0;
  for (std::sregex_iterator match(log.begin(), log.end(), expression), end; match != end; ++match)
    sum += std::stoi((*match)[1]);
  return sum;
}

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

const std::vector<std::string>& compile_flags() {
  // -default-device: src/math, shared with the host, carries no __device__ annotations. --fmad=false: the compiler
  // would contract a product and a sum to an FMA in one specialisation of a kernel and not in another, and bits would
  // depend on alignment; device code calls fmaf() where it wants one. ptxas -v: registers and spills, for the compile
  // gate. -lineinfo, for profilers, makes cubins three times as large: only on demand.
  static constinit Once<const std::vector<std::string>> flags;
  return flags.get([] {
    std::vector<std::string> list{"-std=c++20", "-default-device", "--ptxas-options=-v", "--fmad=false"};
    if (const char* wanted = environment("TESSERA_LINEINFO"); wanted && *wanted) list.emplace_back("-lineinfo");
    return list;
  });
}

Resources read_resources(const std::string& log) {
  Resources r;
  r.registers = sum_of(log, "Used ([0-9]+) registers");
  r.stack_bytes = sum_of(log, "([0-9]+) bytes stack frame");
  r.spill_bytes = sum_of(log, "([0-9]+) bytes spill stores") + sum_of(log, "([0-9]+) bytes spill loads");
  r.shared_bytes = sum_of(log, "([0-9]+) bytes smem");
  r.serialised_wgmma = std::regex_search(log, std::regex("C751[0-5]"));
  return r;
}

Compiled compile(const Unit& unit) {
  const NvrtcOrReason& found = find_nvrtc();
  if (!found.nvrtc) throw Failure(TESSERA_DEVICE_ERROR, found.reason);
  const Nvrtc& nvrtc = *found.nvrtc;
  const double start = thread_seconds();

  std::vector<const char*> names, texts, options;
  for (const SourceFile* file : sources_read_by(unit.text))
    names.push_back(file->name.c_str()), texts.push_back(file->text.c_str());
  const std::string architecture = "--gpu-architecture=" + unit.architecture;
  options.push_back(architecture.c_str());
  for (const std::string& flag : compile_flags()) options.push_back(flag.c_str());

  ProgramHandle program = nullptr;
  if (nvrtc.create_program(&program, unit.text.c_str(), "unit.cu", static_cast<int>(names.size()), texts.data(),
                           names.data()) != 0)
    throw Failure(TESSERA_DEVICE_ERROR, "nvrtcCreateProgram failed");
  const struct Guard {
    const Nvrtc& nvrtc;
    ProgramHandle& program;
    ~Guard() { nvrtc.destroy_program(&program); }
  } guard{nvrtc, program};

  const int status = nvrtc.compile_program(program, static_cast<int>(options.size()), options.data());
  Compiled out;
  out.log = program_log(nvrtc, program);
  if (status != 0)
    throw Failure(TESSERA_DEVICE_ERROR, text("NVRTC cannot compile this unit for ", unit.architecture, ":\n", out.log));
  std::size_t bytes = 0;
  if (nvrtc.get_cubin_size(program, &bytes) != 0 || bytes == 0)
    throw Failure(TESSERA_DEVICE_ERROR, text("NVRTC gave no cubin for ", unit.architecture, ":\n", out.log));
  out.cubin.resize(bytes);
  if (nvrtc.get_cubin(program, out.cubin.data()) != 0)
    throw Failure(TESSERA_DEVICE_ERROR, text("NVRTC did not hand over its cubin for ", unit.architecture));
  if (environment("TESSERA_DUMP") && nvrtc.get_ptx_size(program, &bytes) == 0) {
    out.ptx.resize(bytes);
    nvrtc.get_ptx(program, out.ptx.data());
    if (!out.ptx.empty()) out.ptx.pop_back();  // the terminator
  }
  out.resources = read_resources(out.log);
  out.seconds = thread_seconds() - start;
  return out;
}

}  // namespace tessera::cuda
