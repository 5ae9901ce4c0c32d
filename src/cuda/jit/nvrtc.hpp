// SPDX-License-Identifier: Apache-2.0
// The part of NVRTC, NVIDIA's run-time compiler, that Tessera uses, loaded at run time like the driver. NVRTC needs no
// GPU. Included by src/cuda/jit.
#pragma once

#include <cstddef>
#include <string>

namespace tessera::cuda {

struct ProgramHandleTag;
using ProgramHandle = ProgramHandleTag*;

#define TESSERA_NVRTC(X)                                                                                           \
  X(version, "nvrtcVersion", (int* major, int* minor))                                                             \
  X(create_program, "nvrtcCreateProgram",                                                                          \
    (ProgramHandle * program, const char* text, const char* name, int headers, const char* const* header_texts,    \
     const char* const* header_names))                                                                             \
  X(destroy_program, "nvrtcDestroyProgram", (ProgramHandle * program))                                             \
  X(compile_program, "nvrtcCompileProgram", (ProgramHandle program, int options, const char* const* option_texts)) \
  X(get_log_size, "nvrtcGetProgramLogSize", (ProgramHandle program, std::size_t * bytes))                          \
  X(get_log, "nvrtcGetProgramLog", (ProgramHandle program, char* log))                                             \
  X(get_cubin_size, "nvrtcGetCUBINSize", (ProgramHandle program, std::size_t * bytes))                             \
  X(get_cubin, "nvrtcGetCUBIN", (ProgramHandle program, char* cubin))                                              \
  X(get_ptx_size, "nvrtcGetPTXSize", (ProgramHandle program, std::size_t * bytes))                                 \
  X(get_ptx, "nvrtcGetPTX", (ProgramHandle program, char* ptx))

struct Nvrtc {
#define X(name, symbol, parameters) int(*name) parameters = nullptr;
  TESSERA_NVRTC(X)
#undef X
  int major = 0, minor = 0;
  std::string path;
};

// NVRTC, opened on first use, or the reason why there is none.
struct NvrtcOrReason {
  const Nvrtc* nvrtc;
  std::string reason;
};
const NvrtcOrReason& find_nvrtc();

}  // namespace tessera::cuda
