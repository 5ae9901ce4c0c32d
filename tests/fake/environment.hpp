// SPDX-License-Identifier: Apache-2.0
// Tests with the fake compiler read nothing of the user's environment: $TESSERA_NVRTC, which `make test` itself sets
// where it has fetched NVRTC, would name the real one. Included by tests/fake; tests.cmake sets variables that must not
// be believed.
#pragma once

#include <cstdlib>

namespace tessera::test {

// Before the library reads them. No cache on disk but that of a test that makes one.
inline const bool environment_is_clean = [] {
  for (const char* name : {"TESSERA_NVRTC", "TESSERA_PACK", "TESSERA_DUMP", "TESSERA_DEVICE_SOURCE", "TESSERA_TILES"})
    unsetenv(name);
  setenv("TESSERA_CACHE", "", 1);
  return true;
}();

}  // namespace tessera::test
