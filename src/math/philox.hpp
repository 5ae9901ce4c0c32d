// SPDX-License-Identifier: Apache-2.0
// Dropout's random bits: Philox 4x32-10 (Salmon et al., 2011) and the map from an element (b,h,i,j) to 16 of them.
// Shared by every backend as constexpr text. Implements docs/algorithm.md, "Dropout": the mask is a function of the
// element alone, so it is the same on every backend, tile size and layout, forward and backward.
#pragma once

#include "math/types.hpp"

namespace tessera {

struct Philox4 {
  UInt32 word[4];
};
struct PhiloxKey {
  UInt32 word[2];
};

TESSERA_ALWAYS_INLINE Philox4 philox(Philox4 counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const UInt64 a = UInt64(0xD2511F53u) * counter.word[0];
    const UInt64 b = UInt64(0xCD9E8D57u) * counter.word[2];
    counter = {{UInt32(b >> 32) ^ counter.word[1] ^ key.word[0], UInt32(b),
                UInt32(a >> 32) ^ counter.word[3] ^ key.word[1], UInt32(a)}};
    key = {{key.word[0] + 0x9E3779B9u, key.word[1] + 0xBB67AE85u}};
  }
  return counter;
}

// The stream's key: two words of Philox over the caller's offset, keyed by the caller's seed.
constexpr PhiloxKey dropout_key(UInt64 seed, UInt64 offset) {
  const Philox4 block = philox({{UInt32(offset), UInt32(offset >> 32), 0, 0}}, {{UInt32(seed), UInt32(seed >> 32)}});
  return {{block.word[0], block.word[1]}};
}

// One call serves the 8 elements (i, j) that share i>>1, j>>4 and (j>>1)&3.
TESSERA_ALWAYS_INLINE Philox4 dropout_block(PhiloxKey key, Int64 b, Int64 h, Int64 i, Int64 j) {
  return philox({{UInt32((j >> 4) * 4 + ((j >> 1) & 3)), UInt32(i >> 1), UInt32(h), UInt32(b)}}, key);
}

// Of the block's 128 bits, the 16 of element (i, j).
TESSERA_ALWAYS_INLINE UInt32 dropout_value(const Philox4& block, Int64 i, Int64 j) {
  // No index into the words: a GPU cannot index registers, so the array would go to local memory.
  const UInt32 even_row = (j >> 3) & 1 ? block.word[1] : block.word[0];
  const UInt32 odd_row = (j >> 3) & 1 ? block.word[3] : block.word[2];
  return ((i & 1 ? odd_row : even_row) >> (16 * (j & 1))) & 0xffffu;
}

// t = round(65536 p): elements whose value is below t are dropped.
constexpr UInt32 dropout_threshold(double p) { return UInt32(65536.0 * p + 0.5); }
// Kept elements are scaled by 1 / (1 - t/65536), the true keep rate.
constexpr double dropout_scale(UInt32 threshold) { return 65536.0 / (65536.0 - double(threshold)); }

}  // namespace tessera
