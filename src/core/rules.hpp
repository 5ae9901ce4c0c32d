// SPDX-License-Identifier: Apache-2.0
// The rules for a single tensor, the options and the execution, each with its sentence. Included by core/check.cpp,
// core/check_run.cpp, core/check_pages.cpp, core/check_parts.cpp and core/append.cpp, which apply them. Every rule
// throws Failure; each has a row in tests/api/check_rows.hpp that expects its text.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/problem.hpp"
#include "tessera/types.hpp"

namespace tessera {

using Shape = std::initializer_list<std::int64_t>;

inline std::int64_t dim(const Tensor& t, int i) { return t.shape[static_cast<std::size_t>(i)]; }

void check_given(const char* name, const Tensor& t);
void check_view(const char* name, const Tensor& t, Device device);  // holds for every tensor, whatever its part
void check_ndim(const char* name, const Tensor& t, int ndim, const char* layout);
void check_shape(const char* name, const Tensor& t, Shape expected, const char* meaning);
void check_rows(const char* name, const Tensor& t);  // the last dimension has stride 1
// One row of `width` per query (or key) and head, in the layout of q, k, v; one number per query and head.
void check_token_tensor(const char* name, const Tensor& t, const Problem& p, bool keys, std::int64_t width);
void check_row_numbers(const char* name, const Tensor& t, const Problem& p);
void check_type(const char* name, const Tensor& t, Type expected);
void check_follows(const char* name, Type type, const char* leader, Type leader_type);  // the leader's type, or f32
void check_single(const char* name, const Tensor& t, Type q_type);                      // f32; f64 beside f64 inputs
void check_head_dim(const char* name, std::int64_t dims, std::int64_t most);
void check_count(const char* name, std::int64_t count, const char* what, std::int64_t most);
void check_data(const char* name, const Tensor& t);  // there, and aligned to its elements

// Of host memory: offsets (i32 [n + 1]) of n parts of so many tokens or pages, and a length's upper bound, -1 for none.
void check_host_offsets(const char* name, const Tensor& offsets, std::int64_t n, std::int64_t count, const char* what);
void check_host_bound(const char* name, std::int64_t bound, std::int64_t sequence, std::int64_t length);

void check_options(const Options& options, const Tensor& rng);
void check_positions(const Options& options);
void check_dropout(const Options& options, const Tensor& rng);
void check_execution(const Execution& execution, Device device);
void check_cpu(const char* name, const Tensor& t, const Execution& execution);  // of calls that only the CPU answers
void check_cpu_or_cuda(const char* name, const Tensor& t, const Execution& execution);  // append and merge

}  // namespace tessera
