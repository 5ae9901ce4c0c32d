// SPDX-License-Identifier: Apache-2.0
// The state behind the fake NVRTC (tests/fake/compiler.cpp), which tests read and steer. A "cubin" is text that says of
// the unit's kernel what the fake driver must know: nothing is compiled.
// Included by tests/fake/.
#pragma once

#include <string>
#include <vector>

namespace tessera::fake {

inline constexpr char cubin_mark[] = "FAKE CUBIN";

struct Compiler {
  std::vector<const char*> calls;
  // The n-th call from now fails with this status (0: none does).
  int fails_in = 0, status = 0;
  bool happened = false;
  // What the log says of a unit that does not compile.
  std::string log = "unit.cu(1): error: the fake compiler was told to fail";
};

Compiler& compiler();

}  // namespace tessera::fake
