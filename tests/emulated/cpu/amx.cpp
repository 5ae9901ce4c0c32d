// SPDX-License-Identifier: Apache-2.0
// Takes the place of src/cpu/amx.cpp in the tests with an emulated matrix unit, which every processor has.
// See tests/cpu/amx.cmake.
#include "cpu/amx.hpp"

namespace tessera::cpu {

bool amx_usable() { return true; }

}  // namespace tessera::cpu
