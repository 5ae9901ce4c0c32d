// SPDX-License-Identifier: Apache-2.0
// The tile sizes around which the tables choose their lengths.
// Included by the tables, the random cases and the tests; numbers only.
// They follow src/cpu (64 queries by 192 keys); 128 is the other size in common use.
#pragma once

#include <cstdint>

namespace tessera::cases {

inline constexpr std::int64_t tile_q = 64, tile_k = 192, tile_other = 128;

}  // namespace tessera::cases
