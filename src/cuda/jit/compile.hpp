// SPDX-License-Identifier: Apache-2.0
// Compiles a generated translation unit to a cubin with NVRTC; no GPU is needed. Included by src/cuda/jit, the compile
// gate and `tessera pack`.
#pragma once

#include <string>
#include <vector>

namespace tessera::cuda {

// A translation unit for the compiler: its source text and the architecture, e.g. "sm_90a".
struct Unit {
  std::string text;
  std::string architecture;
};

// Resource usage of the unit's kernel, as reported by ptxas.
struct Resources {
  int registers = 0;
  int spill_bytes = 0;            // stores plus loads
  int stack_bytes = 0;            // local-memory arrays and spills
  int shared_bytes = 0;           // static
  bool serialised_wgmma = false;  // warnings C7510 to C7515: ptxas serialised wgmma, nothing overlaps
};

struct Compiled {
  std::vector<char> cubin;
  std::string ptx;  // only when $TESSERA_DUMP is set
  std::string log;
  Resources resources;
  double seconds = 0;  // CPU time of the compiling thread: independent of the machine's load
};

// Flags that every unit is compiled with; part of the cache key. $TESSERA_LINEINFO (not empty) adds -lineinfo.
const std::vector<std::string>& compile_flags();

// Throws Failure with NVRTC's log, or with the reason why there is no NVRTC. Threads may compile concurrently.
Compiled compile(const Unit& unit);

// Parses the report of ptxas -v. Exposed for its test.
Resources read_resources(const std::string& log);

}  // namespace tessera::cuda
