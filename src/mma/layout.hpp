// SPDX-License-Identifier: Apache-2.0
// Which address a lane gives to ldmatrix, and which chunk of a tile a thread copies: the arithmetic of the `mma`
// kernels' shared memory. Constexpr text for the kernels and for the tests, which follow every element through ldmatrix
// and mma.sync as the PTX ISA describes them and count bank conflicts (tests/mma/mma_test.cpp).
#pragma once

#include "gpu/layout.hpp"

namespace tessera::mma {

using gpu::a_column, gpu::a_row, gpu::b_column, gpu::b_row, gpu::t_column, gpu::t_row;
using gpu::bytes_of_16_rows, gpu::column_turn, gpu::lane_byte, gpu::panel_step;
using gpu::copy_column, gpu::copy_row, gpu::copy_rows_at_once;

// dS of a block of keys, a row each, by so many queries. With fewer queries than a panel has columns, the keys are cut
// into so many parts as fill it side by side: part n has the columns from n * queries on.
constexpr int dS_rows(int keys, int queries) {
  return queries < gpu::panel_columns ? keys * queries / gpu::panel_columns : keys;
}
constexpr int dS_byte(int keys, int queries, int key, int query) {
  const int rows = dS_rows(keys, queries);
  return gpu::tile_byte(rows, key % rows, query + key / rows * queries);
}

}  // namespace tessera::mma
