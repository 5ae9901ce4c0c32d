// SPDX-License-Identifier: Apache-2.0
// The rules for keys and values in the pages of a cache, each with its sentence. Included by core/check.cpp,
// core/check_run.cpp and core/append.cpp, which apply them beside the others. Each has a row in tests/api/page_rows.hpp
// that expects its text. Implements docs/algorithm.md, "Paged keys and values".
#pragma once

#include "core/kernel.hpp"
#include "core/problem.hpp"

namespace tessera {

bool has_pages(const Inputs& in);  // whether a table is given

// Which tensors go with a table, and which do not.
void check_tables_given(const Inputs& in, const Outputs& out);
// Shapes of the tables, beside q, k, v and lengths that have been checked; sets p.pages and p.Nk.
void check_tables(const Inputs& in, const Outputs& out, Problem& p);

void check_status(const Tensor& status, const Problem& p);  // if given

// Scales, if given, of keys that have the layout of `keys`, k or v: how many dimensions, which say what form it is.
int check_scale(const char* name, const Tensor& scale, const Tensor& keys, const Problem& p);

// Lengths and padding in host memory. Entries of the tables are not checked: one that is no page reads as zeros.
void check_host_pages(const Problem& p, const Inputs& in);

}  // namespace tessera
