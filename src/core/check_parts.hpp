// SPDX-License-Identifier: Apache-2.0
// The rules for parts of a problem: the carried state, positions of each sequence, and where a problem may be cut. Each
// has its sentence, and a row in tests/api/part_rows.hpp that expects it. Included by core/check.cpp,
// core/check_run.cpp and src/api. Implements docs/algorithm.md, "Carried state" and "Parts of a problem".
#pragma once

#include "core/kernel.hpp"
#include "core/problem.hpp"

namespace tessera {

// Shapes and types of seq_row0, seq_col0 and seq_batch0.
void check_places(const Inputs& in, Problem& p);
// The states that a forward pass starts from and ends with, beside inputs that have been checked.
void check_states(const Inputs& in, const Outputs& out, Problem& p);

// Positions in host memory.
void check_host_places(const Problem& p, const Inputs& in);
// A part that promises the whole's bits begins at multiples of the plan's tiles, if there is anything in it.
void check_cuts(const Problem& p, const Call& call, const CutTiles& tiles);

}  // namespace tessera
