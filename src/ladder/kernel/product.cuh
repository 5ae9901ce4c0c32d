// SPDX-License-Identifier: Apache-2.0
// The two matrix products of `vector`, by tensor cores or by FMA: one reduces over dims (S = Q K^T, dP = dO V^T), the
// other over a tile's columns (O = P V, dQ = dS K). Device code; included by the vector kernels.
#pragma once

#include "ladder/kernel/product_fma.cuh"
#include "ladder/kernel/product_tensor.cuh"

namespace tessera::ladder {

template <bool tensor_cores, Config config>
struct ProductOf {
  using Type = FmaProduct<config>;
};
template <Config config>
struct ProductOf<true, config> {
  using Type = TensorProduct<config>;
};

// The interface of a product. A thread has values of `rows` rows, each shared by `lanes` neighbouring lanes:
//   row(r), col(c)          which element of a score tile value [r][c] is; col(c) = col(0) + col_offset(c)
//   out_col(n)              which column of a result (O, dQ, dK, dV) value [r][n] is; fours are neighbours
//   over_dims<D, a, b>      result = A B^T, A and B tiles in shared memory whose elements had types a and b
//   over_columns<b>         result = factor result + P B, P the score tile in the threads' registers
template <Config config>
using Product = typename ProductOf<config.tensor_cores, config>::Type;

// Accumulators of a result that a thread has in each row.
template <Config config>
constexpr int outs_of(int width) {
  return tile_width(config, width) / Product<config>::lanes;
}

// Epilogue of a row: out = row * factor, or out += row * factor if `accumulate`.
template <int width, class Product, int outs, class T>
__device__ inline void store_row(const Product& product, const float (&row)[outs], float factor, bool accumulate,
                                 T* out) {
#pragma unroll
  for (int n = 0; n < outs; ++n) {
    const int d = product.out_col(n);
    if (d < width) from_float(fmaf(row[n], factor, accumulate ? to_float(out[d]) : 0.0f), out[d]);
  }
}

}  // namespace tessera::ladder
