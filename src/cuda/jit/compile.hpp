// From a generated unit of text to a cubin, by NVRTC; no GPU is needed. Included by src/cuda/jit, the compile gate and
// `tessera pack`.
#pragma once

#include <string>
#include <vector>

namespace tessera::cuda {

// What is asked of the compiler: the unit's text and the architecture, e.g. "sm_90a".
struct Unit {
  std::string text;
  std::string architecture;
};

// What ptxas says of the unit's kernel.
struct Resources {
  int registers = 0;
  int spill_bytes = 0;            // stores plus loads
  int stack_bytes = 0;            // local-memory arrays and spills
  int shared_bytes = 0;           // static
  bool serialised_wgmma = false;  // C7510 to C7515: the tensor cores wait for each other
};

struct Compiled {
  std::vector<char> cubin;
  std::string ptx;  // only when $TESSERA_DUMP is set
  std::string log;
  Resources resources;
  double seconds = 0;  // of the processor, by the compiling thread: a busy machine does not change them
};

// Flags that every unit is compiled with; part of the cache key. $TESSERA_LINEINFO (not empty) adds -lineinfo.
const std::vector<std::string>& compile_flags();

// Throws Failure with NVRTC's log, or with the reason why there is no NVRTC. Threads compile side by side.
Compiled compile(const Unit& unit);

// Reads ptxas's report. Exposed for its test.
Resources read_resources(const std::string& log);

}  // namespace tessera::cuda
