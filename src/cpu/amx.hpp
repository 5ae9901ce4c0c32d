// SPDX-License-Identifier: Apache-2.0
// Whether this process may use the processor's matrix unit (AMX).
// Included by cpu/isa.cpp.
#pragma once

namespace tessera::cpu {

// The processor has AMX with bf16 and AVX-512 with bf16, and the system has granted the tiles to this process. Asks
// them each time.
bool amx_usable();

}  // namespace tessera::cpu
