// SPDX-License-Identifier: Apache-2.0
// Merge: partial results over disjoint key sets become that of the union; docs/algorithm.md, "Merge". In float64, one
// row at a time: it is bound by memory, and the partials' own rounding is all that may show.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.hpp"
#include "core/tensor.hpp"
#include "cpu/kernels.hpp"
#include "math/softmax.hpp"

namespace tessera::cpu {
namespace {

// Addresses of a row in O [B,N,H,D] or [N,H,D], and of its number in LSE [B,H,N] or [H,N].
std::int64_t o_index(const Tensor& o, std::int64_t b, std::int64_t i, std::int64_t h) {
  const int n = o.ndim - 3;  // 1 with a batch dimension, 0 without
  return (n ? b * stride(o, 0) : 0) + i * stride(o, n) + h * stride(o, n + 1);
}

std::int64_t lse_index(const Tensor& lse, std::int64_t b, std::int64_t i, std::int64_t h) {
  const int n = lse.ndim - 2;
  return (n ? b * stride(lse, 0) : 0) + h * stride(lse, n) + i * stride(lse, n + 1);
}

// o: room for a row.
void merge_row(std::span<const Outputs> partials, const Outputs& merged, std::int64_t b, std::int64_t i, std::int64_t h,
               std::span<double> o) {
  const auto partial_lse = [&](const Outputs& part) {
    return load_element(part.lse.data, part.lse.type, lse_index(part.lse, b, i, h));
  };
  const auto exp_of = [](double x) { return std::exp(x); };
  double m = minus_infinity<double>, l = 0;
  for (const Outputs& part : partials)
    if (const double x = partial_lse(part); x > m || x != x) m = x;
  for (const Outputs& part : partials) l += merge_weight(partial_lse(part), m, exp_of);
  const double lse = log_sum_exp(m, l, [](double x) { return std::log(x); });

  const auto width = static_cast<std::int64_t>(o.size());
  std::fill(o.begin(), o.end(), 0.0);
  for (const Outputs& part : partials) {
    const double weight = merge_weight(partial_lse(part), lse, exp_of);
    if (weight == 0) continue;  // a partial that saw nothing may hold anything
    const std::int64_t row = o_index(part.o, b, i, h);
    for (std::int64_t d = 0; d < width; ++d)
      o[static_cast<std::size_t>(d)] += weight * load_element(part.o.data, part.o.type, row + d);
  }
  const std::int64_t row = o_index(merged.o, b, i, h);
  for (std::int64_t d = 0; d < width; ++d)
    store_element(merged.o.data, merged.o.type, row + d, o[static_cast<std::size_t>(d)]);
  if (merged.lse) store_element(merged.lse.data, merged.lse.type, lse_index(merged.lse, b, i, h), lse);
}

}  // namespace

void merge(std::span<const Outputs> partials, const Outputs& merged, int threads) {
  const Tensor& o = merged.o;
  const auto n = static_cast<std::size_t>(o.ndim - 3);
  const std::int64_t batch = n ? o.shape[0] : 1, rows = o.shape[n], heads = o.shape[n + 1];
  const std::int64_t tasks = heads == 0 ? 0 : batch * rows;
  const auto width = static_cast<std::size_t>(o.shape[n + 2]);
  std::vector<double> room(static_cast<std::size_t>(worker_count(tasks, threads)) * width);
  parallel_for(tasks, threads, [&](std::int64_t index, int worker) {
    const std::span<double> row(room.data() + static_cast<std::size_t>(worker) * width, width);
    for (std::int64_t h = 0; h < heads; ++h) merge_row(partials, merged, index / rows, index % rows, h, row);
  });
}

}  // namespace tessera::cpu
