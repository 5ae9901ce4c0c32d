// SPDX-License-Identifier: Apache-2.0
// Whether tests that compile GPU kernels can run. Without NVRTC they are skipped, visibly; where $TESSERA_REQUIRE_NVRTC
// is set, as in continuous integration, they fail instead. Included by tests.
#pragma once

#include <cstdlib>
#include <string>

#include "cuda/jit/nvrtc.hpp"

namespace tessera::test {

inline std::string nvrtc_missing() { return cuda::find_nvrtc().reason; }  // empty: it is here

inline bool nvrtc_required() {
  const char* value = std::getenv("TESSERA_REQUIRE_NVRTC");
  return value && *value;
}

}  // namespace tessera::test

// For GoogleTest.
#define REQUIRE_NVRTC()                                                                            \
  if (const std::string reason = tessera::test::nvrtc_missing(); !reason.empty()) {                \
    if (tessera::test::nvrtc_required()) FAIL() << "TESSERA_REQUIRE_NVRTC is set, but " << reason; \
    GTEST_SKIP() << reason;                                                                        \
  }
