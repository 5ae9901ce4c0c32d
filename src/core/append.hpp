// SPDX-License-Identifier: Apache-2.0
// A checked call of append: where in the cache each new token goes, and at which position it is rotated. Included by
// src/api, and by the CPU backend, which does the rest. Every rule throws Failure with a sentence; each has a row in
// tests/api/append_rows.hpp that expects its text. Implements docs/algorithm.md, "Append".
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/types.hpp"

namespace tessera {

// Tokens are numbered as they lie: of [B,n,...] token t of sequence b is b * n + t.
struct NewRows {
  std::int64_t tokens = 0, q_tokens = 0;
  std::vector<char*> k, v;                           // of each token: head 0 of its row in the cache, or null: none
  std::vector<float*> k_scales, v_scales;            // likewise, of scales; empty: there are none
  std::vector<std::int64_t> positions, q_positions;  // with a rotation: of each token, or -1: left as it is
  bool outside_pool = false;                         // a table entry or a slot in use was outside of the pool
};

// Writes nothing. On the CPU, where the numbers of lengths, tables, slots and positions can be read.
NewRows check_append(const AppendArgs& args, const Execution& execution);

}  // namespace tessera
