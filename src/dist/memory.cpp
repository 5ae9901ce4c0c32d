// SPDX-License-Identifier: Apache-2.0
// The host's memory; see memory.hpp.
#include "dist/memory.hpp"

#include <cstring>

namespace tessera::dist {

std::byte* Memory::pack(std::byte* to, const RowView& from, Int64 row, Int64 rows, Range heads) {
  return dist::pack(to, from, row, rows, heads);
}

const std::byte* Memory::unpack(const std::byte* from, const RowView& to, Int64 row, Int64 rows, Range heads) {
  return dist::unpack(from, to, row, rows, heads);
}

void Memory::move(const RowView& from, Int64 row, Int64 rows, Range heads, const RowView& to, Int64 to_row) {
  Bytes packed(static_cast<std::size_t>(packed_bytes(from, rows, heads)));
  dist::pack(packed.data(), from, row, rows, heads);
  dist::unpack(packed.data(), to, to_row, rows, {0, heads.size()});
}

void Memory::clear(const RowView& rows, Int64 row, Int64 count) {
  std::memset(rows.at(row, 0), 0, static_cast<std::size_t>(packed_bytes(rows, count, {0, rows.heads})));
}

void Memory::add(const RowView& to, Int64 row, Int64 count, const float* numbers) {
  auto* sums = reinterpret_cast<float*>(to.at(row, 0));
  for (Int64 i = 0; i < count * to.heads * to.width; ++i) sums[i] += numbers[i];
}

void Memory::plan(const Inputs& in, const Outputs& out, const Options& options, const Execution& execution) const {
  tessera::Plan::forward(in, out, options, execution);
}

void Memory::forward(const Inputs& in, const Outputs& out, const Options& options, const Execution& execution) {
  tessera::forward(in, out, options, execution);
}

void Memory::backward(const Inputs& in, const Saved& saved, const Gradients& gradients, const Options& options,
                      const Execution& execution) {
  tessera::backward(in, saved, gradients, options, execution);
}

}  // namespace tessera::dist
