// SPDX-License-Identifier: Apache-2.0
// Where tests with the emulated matrix unit have nothing to test: the rest of the kernel `amx` is AVX-512, so they need
// what the kernel `avx512` needs. Where that one runs, `amx` must run, too. See tests/cpu/amx.cmake.
#include "tests/support/main.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

std::string missing() {
  const CaseData tiny = build({.name = "tiny", .Nq = 1, .Nk = 1, .D = 1});
  try {
    Plan::forward(tiny.inputs(), tiny.outputs(), {}, {.kernel = "avx512"});
    return "";
  } catch (const Error& error) {
    return std::string("the emulated matrix unit needs AVX-512; ") + error.what();
  }
}

const bool told = (reason_to_skip = missing, true);

}  // namespace
}  // namespace tessera::test
