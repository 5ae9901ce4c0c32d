// SPDX-License-Identifier: Apache-2.0
// A fake libnvrtc; see compiler.hpp. Built as a shared library with NVRTC's name.
#include "tests/fake/compiler.hpp"

#include <cstring>
#include <string>

#include "cuda/jit/nvrtc.hpp"
#include "cuda/read_params.hpp"
#include "decode/config.hpp"
#include "decode/params.hpp"
#include "gpu/append_params.hpp"
#include "gpu/merge_params.hpp"
#include "gpu/params.hpp"
#include "mma/params.hpp"
#include "sm90/one_pass_config.hpp"
#include "sm90/params.hpp"

namespace tessera::fake {

Compiler& compiler() {
  static Compiler only;
  return only;
}

namespace {

constexpr int invalid_input = 3, compilation_failed = 6;  // of nvrtcResult

struct Program {
  std::string text, cubin, log;
};

// Whether this call is the one that fails.
int enter(const char* name) {
  Compiler& c = compiler();
  c.calls.push_back(name);
  if (c.fails_in == 0 || --c.fails_in > 0) return 0;
  c.happened = true;
  return c.status;
}

// What stands behind `before`, up to the first of the characters of `ends`; empty where there is no such thing.
std::string behind(const std::string& text, const std::string& before, const char* ends) {
  const std::size_t at = text.find(before);
  if (at == std::string::npos) return "";
  const std::size_t first = at + before.size();
  return text.substr(first, text.find_first_of(ends, first) - first);
}

// The bytes of a kernel's one parameter; 0: unknown.
std::size_t bytes_of(const std::string& type) {
  if (type == "tessera::gpu::ForwardParams") return sizeof(gpu::ForwardParams);
  if (type == "tessera::gpu::BackwardParams") return sizeof(gpu::BackwardParams);
  if (type == "tessera::gpu::AppendParams") return sizeof(gpu::AppendParams);
  if (type == "tessera::gpu::MergeParams") return sizeof(gpu::MergeParams);
  if (type == "tessera::cuda::ReadParams") return sizeof(cuda::ReadParams);
  if (type == "tessera::mma::ForwardParams") return sizeof(mma::ForwardParams);
  if (type == "tessera::mma::PagedParams") return sizeof(mma::PagedParams);
  if (type == "tessera::mma::BackwardParams") return sizeof(mma::BackwardParams);
  if (type == "tessera::mma::OnePassParams") return sizeof(mma::OnePassParams);
  if (type == "tessera::mma::PrepareParams") return sizeof(mma::PrepareParams);
  if (type == "tessera::mma::FinishParams") return sizeof(mma::FinishParams);
  if (type == "tessera::decode::Params") return sizeof(decode::Params);
  if (type == "tessera::sm90::ForwardParams") return sizeof(sm90::ForwardParams);
  if (type == "tessera::sm90::CarriedParams") return sizeof(sm90::CarriedParams);
  if (type == "tessera::gpu::StateParams") return sizeof(gpu::StateParams);
  if (type == "tessera::sm90::PagedParams") return sizeof(sm90::PagedParams);
  if (type == "tessera::sm90::BackwardParams") return sizeof(sm90::BackwardParams);
  if (type == "tessera::sm90::OnePassParams") return sizeof(sm90::OnePassParams);
  if (type == "tessera::sm90::PrepareParams") return sizeof(sm90::PrepareParams);
  if (type == "tessera::sm90::FinishParams") return sizeof(sm90::FinishParams);
  if (type == "tessera::sm90::RestartParams") return sizeof(sm90::RestartParams);
  return 0;
}

// The first number of __launch_bounds__, which units write as text.
int threads_of(const std::string& unit) {
  const auto number = [&](const char* name) { return std::stoi(behind(unit, name, ",}")); };
  const std::string bound = behind(unit, "__launch_bounds__(", ",)");
  if (bound == "config.threads") return number(".threads = ");
  if (bound == "tessera::sm90::threads_of(config") return 128 * (1 + number(".warpgroups = "));
  const int warps_per_owner = behind(unit, ".paired = ", ",}") == "true" ? 2 : 1;
  if (bound == "tessera::mma::threads_of(config") return 32 * number(".warps = ") * warps_per_owner;
  if (bound == "config.threads(") return 32 * number(".warps = ");
  if (bound == "tessera::sm90::one_pass_threads") return sm90::one_pass_threads;
  return std::stoi(bound);
}

// Empty where the text is not that of a unit. The last lines of one are its configuration, where it has one, and its
// kernel, which takes one parameter and calls one function.
std::string cubin_of(const std::string& unit, const std::string& architecture) {
  const std::size_t kernel_at = unit.rfind("extern \"C\" __global__"), config_at = unit.rfind("constexpr tessera::");
  if (kernel_at == std::string::npos) return "";
  const std::string kernel = unit.substr(kernel_at);
  const std::string symbol = behind(kernel, "void ", "(");
  const std::string parameter = behind(kernel, symbol + "(", ")");  // "const __grid_constant__ tessera::gpu::X p"
  const std::size_t type_at = parameter.find("tessera::"), name_at = parameter.rfind(' ');
  if (type_at == std::string::npos || name_at <= type_at) return "";
  const std::string type = parameter.substr(type_at, name_at - type_at);
  std::string function = behind(kernel, "{ ", "<(");
  function = function.substr(function.rfind(':') + 1);
  if (bytes_of(type) == 0) return "";
  const std::string told = config_at == std::string::npos ? kernel : unit.substr(config_at);
  return std::string(cubin_mark) + "\n" + architecture + "\n" + symbol + "\n" + function + "\n" + type + "\n" +
         std::to_string(bytes_of(type)) + "\n" + std::to_string(threads_of(told)) + "\n" + told;
}

Program& program(cuda::ProgramHandle handle) { return *reinterpret_cast<Program*>(handle); }

}  // namespace
}  // namespace tessera::fake

using namespace tessera;
using fake::program;
using Handle = cuda::ProgramHandle;

#define ENTER(name) \
  if (const int status = fake::enter(name)) return status

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  ENTER("nvrtcVersion");
  *major = 13, *minor = 0;
  return 0;
}

int nvrtcCreateProgram(Handle* handle, const char* text, const char*, int headers, const char* const* texts,
                       const char* const* names) {
  ENTER("nvrtcCreateProgram");
  for (int n = 0; n < headers; ++n)
    if (!texts[n] || !names[n]) return fake::invalid_input;
  *handle = reinterpret_cast<Handle>(new fake::Program{text, "", ""});
  return 0;
}

int nvrtcDestroyProgram(Handle* handle) {
  delete &program(*handle);
  *handle = nullptr;
  return 0;
}

int nvrtcCompileProgram(Handle handle, int count, const char* const* options) {
  fake::Program& p = program(handle);
  if (const int status = fake::enter("nvrtcCompileProgram")) {
    p.log = fake::compiler().log;
    return status;
  }
  static const std::string option = "--gpu-architecture=";
  std::string architecture;
  for (int n = 0; n < count; ++n)
    if (std::string(options[n]).starts_with(option)) architecture = options[n] + option.size();
  p.cubin = fake::cubin_of(p.text, architecture);
  if (!p.cubin.empty() && !architecture.empty()) return 0;
  p.log = "the fake compiler does not understand this unit:\n" + p.text;
  return fake::compilation_failed;
}

int nvrtcGetProgramLogSize(Handle handle, std::size_t* bytes) {
  ENTER("nvrtcGetProgramLogSize");
  *bytes = program(handle).log.size() + 1;
  return 0;
}

int nvrtcGetProgramLog(Handle handle, char* log) {
  ENTER("nvrtcGetProgramLog");
  std::strcpy(log, program(handle).log.c_str());
  return 0;
}

int nvrtcGetCUBINSize(Handle handle, std::size_t* bytes) {
  ENTER("nvrtcGetCUBINSize");
  *bytes = program(handle).cubin.size() + 1;
  return 0;
}

int nvrtcGetCUBIN(Handle handle, char* cubin) {
  ENTER("nvrtcGetCUBIN");
  std::strcpy(cubin, program(handle).cubin.c_str());
  return 0;
}

int nvrtcGetPTXSize(Handle, std::size_t* bytes) {
  ENTER("nvrtcGetPTXSize");
  *bytes = 1;
  return 0;
}

int nvrtcGetPTX(Handle, char* ptx) {
  ENTER("nvrtcGetPTX");
  *ptx = '\0';
  return 0;
}

}  // extern "C"
