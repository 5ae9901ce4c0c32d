// SPDX-License-Identifier: Apache-2.0
// The dropout mask as an output of its own, element by element from the definition; docs/algorithm.md, "Dropout".
#include <cstdint>

#include "core/parallel.hpp"
#include "core/sequence.hpp"
#include "cpu/kernels.hpp"
#include "math/philox.hpp"

namespace tessera::cpu {

void dropout_mask(const Tensor& mask, const Tensor& rng, const Options& o, int threads) {
  if (mask.elements() == 0) return;
  const DropoutSeed seed = dropout_seed(o, rng);
  const PhiloxKey key = dropout_key(seed.seed, seed.offset);
  const UInt32 threshold = dropout_threshold(o.dropout);
  const std::int64_t heads = mask.shape[1], rows = mask.shape[2], keys = mask.shape[3];
  parallel_for(mask.shape[0] * heads, threads, [&](std::int64_t index, int) {
    const std::int64_t b = index / heads, h = index % heads;
    auto* out = static_cast<std::uint8_t*>(mask.data) + b * stride(mask, 0) + h * stride(mask, 1);
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < keys; ++j) {
        const std::int64_t row = i + o.row0, col = j + o.col0;
        const Philox4 block = dropout_block(key, b + o.batch0, h + o.head0, row, col);
        out[i * stride(mask, 2) + j * stride(mask, 3)] = dropout_value(block, row, col) >= threshold;
      }
  });
}

}  // namespace tessera::cpu
