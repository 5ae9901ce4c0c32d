// SPDX-License-Identifier: Apache-2.0
// A checked call of append, and, on the CPU, where in the cache each new token goes and at which position it is
// rotated. Included by src/api, and by the backends, which do the rest. Every rule throws Failure with a sentence; each
// has a row in tests/api/append_rows.hpp that expects its text. Implements docs/algorithm.md, "Append".
#pragma once

#include <cstdint>
#include <vector>

#include "core/kernel.hpp"
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

// The call, and as much of an attention call over its cache as the rules for tables and the places of keys need.
struct Appending {
  const AppendArgs& a;
  Problem p;  // of the cache; p.B is 0 with packed tokens and slots
  Call call;
  bool packed = false;                    // the new tokens have no batch dimension
  std::int64_t n = 0;                     // new tokens: of each sequence, or, packed, of all
  std::int64_t tokens = 0, q_tokens = 0;  // of all sequences
};

// Types, shapes and memory, on any device: no number of lengths, tables, slots or positions is read.
Appending check_append(const AppendArgs& args, const Execution& execution);

// Writes nothing. On the CPU, where those numbers can be read.
NewRows find_rows(const Appending& call);

}  // namespace tessera
