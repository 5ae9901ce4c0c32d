// SPDX-License-Identifier: Apache-2.0
// Where a rank's rows lie, and how they get into messages and into calls of the library. This is the host's memory; a
// device's derives from it (src/api/cuda_memory.cpp) and does everything in the order of its stream. Included by the
// executor. Implements docs/scale_out.md, "Tensors of a rank".
#pragma once

#include <cstddef>
#include <memory>

#include "dist/rows.hpp"
#include "tessera/tessera.hpp"

namespace tessera::dist {

class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  virtual Device device() const { return {}; }
  bool is_host() const { return device().type == DeviceType::cpu; }

  // Rows that belong to the executor, all zeros.
  virtual Rows rows(Type type, Int64 count, Int64 heads, Int64 width) { return {type, count, heads, width}; }

  // Rows and heads to a message in the host's memory, [rows][heads][width], where they are after wait(); and back. Both
  // return the end of what they used.
  virtual std::byte* pack(std::byte* to, const RowView& from, Int64 row, Int64 rows, Range heads);
  virtual const std::byte* unpack(const std::byte* from, const RowView& to, Int64 row, Int64 rows, Range heads);
  virtual void wait() {}
  // Inside this memory: to rows from `to_row` on, heads from 0 on.
  virtual void move(const RowView& from, Int64 row, Int64 rows, Range heads, const RowView& to, Int64 to_row);

  // Of the executor's own rows, with all of their heads.
  virtual void clear(const RowView& rows, Int64 row, Int64 count);
  virtual void add(const RowView& to, Int64 row, Int64 count, const float* numbers);  // f32; numbers on the host

  // Whether the library takes such a call, without making it. Throws the reason.
  virtual void plan(const Inputs& in, const Outputs& out, const Options& options, const Execution& execution) const;
  virtual void forward(const Inputs& in, const Outputs& out, const Options& options, const Execution& execution);
  virtual void backward(const Inputs& in, const Saved& saved, const Gradients& gradients, const Options& options,
                        const Execution& execution);
};

}  // namespace tessera::dist
