// SPDX-License-Identifier: Apache-2.0
// Rows in a GPU's memory; see cuda_memory.hpp. Messages are in the host's: rows are copied there and waited for before
// they leave, and copied back in the order of the stream, without a wait: the driver has read pageable memory when such
// a copy returns.
#include "api/cuda_memory.hpp"

#include <algorithm>
#include <map>
#include <vector>

#include "core/limits.hpp"
#include "cuda/device.hpp"

namespace tessera::api {
namespace {

using dist::Rows;
using dist::RowView;

cuda::DevicePointer address(const std::byte* at) { return reinterpret_cast<cuda::DevicePointer>(at); }

// Blocks that nobody uses any more, for whoever needs as much next: in the order of one stream.
class Pool {
 public:
  explicit Pool(int device) : device(device) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    try {
      const cuda::CurrentDevice current(device);
      for (const auto& [bytes, block] : unused) cuda::driver().mem_free(block);
    } catch (...) {  // the device is gone, and everything on it
    }
  }

  cuda::DevicePointer take(std::size_t bytes) {
    if (const auto found = unused.find(bytes); found != unused.end()) {
      const cuda::DevicePointer block = found->second;
      unused.erase(found);
      return block;
    }
    cuda::DevicePointer block = 0;
    cuda::check(cuda::driver().mem_alloc(&block, bytes), "cuMemAlloc");
    return block;
  }
  void give_back(std::size_t bytes, cuda::DevicePointer block) { unused.emplace(bytes, block); }

 private:
  int device;
  std::multimap<std::size_t, cuda::DevicePointer> unused;
};

// One end of a copy: `pitch` bytes from row to row.
struct End {
  std::byte* at;
  Int64 pitch;
  bool on_host;
};

class CudaMemory : public dist::Memory {
 public:
  CudaMemory(Device where, void* stream) :
      where(where), stream(static_cast<cuda::StreamHandle>(stream)), pool(std::make_shared<Pool>(where.id)) {}

  Device device() const override { return where; }

  Rows rows(Type type, Int64 count, Int64 heads, Int64 width) override {
    const auto bytes = static_cast<std::size_t>(count * heads * width * dist::element_bytes(type));
    std::shared_ptr<std::byte> memory = block(bytes);
    Rows out(where, std::move(memory), type, count, heads, width);
    clear(out.view, 0, count);
    return out;
  }

  std::byte* pack(std::byte* to, const RowView& from, Int64 row, Int64 rows, Range heads) override {
    copy_heads(from, row, rows, heads, [&](std::byte* at, Int64 pitch, Int64 packed, Int64 packed_pitch, Int64 width) {
      copy({to + packed, packed_pitch, true}, {at, pitch, false}, width, rows);
    });
    pending = true;
    return to + dist::packed_bytes(from, rows, heads);
  }

  const std::byte* unpack(const std::byte* from, const RowView& to, Int64 row, Int64 rows, Range heads) override {
    copy_heads(to, row, rows, heads, [&](std::byte* at, Int64 pitch, Int64 packed, Int64 packed_pitch, Int64 width) {
      copy({at, pitch, false}, {const_cast<std::byte*>(from) + packed, packed_pitch, true}, width, rows);
    });
    return from + dist::packed_bytes(to, rows, heads);
  }

  void move(const RowView& from, Int64 row, Int64 rows, Range heads, const RowView& to, Int64 to_row) override {
    const Int64 element = dist::element_bytes(from.type);
    for (Int64 h = heads.begin; h < heads.end; ++h)
      copy({to.at(to_row, h - heads.begin), to.row_stride * element, false},
           {from.at(row, h), from.row_stride * element, false}, from.width * element, rows);
  }

  // Copies to pageable memory: the driver need not have made them before.
  void wait() override {
    if (!pending) return;
    const cuda::CurrentDevice current(where.id);
    cuda::check(cuda::driver().stream_synchronize(stream), "cuStreamSynchronize");
    pending = false;
  }

  void clear(const RowView& rows, Int64 row, Int64 count) override {
    const Int64 bytes = dist::packed_bytes(rows, count, {0, rows.heads});
    if (bytes == 0) return;
    const cuda::CurrentDevice current(where.id);
    cuda::check(cuda::driver().memset_bytes(address(rows.at(row, 0)), 0, static_cast<std::size_t>(bytes), stream),
                "cuMemsetD8Async");
  }

  // On the host: there and back.
  void add(const RowView& to, Int64 row, Int64 count, const float* numbers) override {
    Rows sums(Type::f32, count, to.heads, to.width);
    pack(sums.view.data, to, row, count, {0, to.heads});
    wait();
    Memory::add(sums.view, 0, count, numbers);
    unpack(sums.view.data, to, row, count, {0, to.heads});
  }

  void forward(const Inputs& in, const Outputs& out, const Options& options, const Execution& execution) override {
    Execution e = on_stream(execution);
    const tessera::Plan plan = tessera::Plan::forward(in, out, options, e);
    find_workspace(e, plan);
    plan.run(in, out, options, e);
  }

  void backward(const Inputs& in, const Saved& saved, const Gradients& gradients, const Options& options,
                const Execution& execution) override {
    Execution e = on_stream(execution);
    const tessera::Plan plan = tessera::Plan::backward(in, saved, gradients, options, e);
    find_workspace(e, plan);
    plan.run(in, saved, gradients, options, e);
  }

 private:
  std::shared_ptr<std::byte> block(std::size_t bytes) {
    const std::size_t room = std::max<std::size_t>(bytes, 1);
    const cuda::CurrentDevice current(where.id);
    const cuda::DevicePointer taken = pool->take(room);
    return {reinterpret_cast<std::byte*>(taken),
            [kept = pool, room](std::byte* at) { kept->give_back(room, address(at)); }};
  }

  Execution on_stream(Execution e) const {
    e.device = where, e.stream = stream;
    return e;
  }

  void find_workspace(Execution& e, const tessera::Plan& plan) {
    if (plan.workspace_size() > room) workspace = block(plan.workspace_size()), room = plan.workspace_size();
    e.workspace = workspace.get(), e.workspace_bytes = room;
  }

  // copy_rows(first row, its pitch, its place among packed rows, their pitch, bytes) for every head; once for all of
  // them where they lie side by side.
  template <class CopyRows>
  static void copy_heads(const RowView& view, Int64 row, Int64 rows, Range heads, CopyRows copy_rows) {
    if (rows == 0) return;
    const Int64 element = dist::element_bytes(view.type), width = view.width * element;
    const bool adjacent = view.head_stride == view.width || heads.size() == 1;
    const Int64 together = adjacent ? heads.size() : 1;
    for (Int64 h = heads.begin; h < heads.end; h += together)
      copy_rows(view.at(row, h), view.row_stride * element, (h - heads.begin) * width, heads.size() * width,
                together * width);
  }

  // `rows` rows of `bytes` bytes. The driver wants rows apart; where they are not, as in an expanded tensor, one by
  // one.
  void copy(const End& to, const End& from, Int64 bytes, Int64 rows) {
    if (rows == 0 || bytes == 0) return;
    const cuda::CurrentDevice current(where.id);
    const bool apart = to.pitch >= bytes && from.pitch >= bytes && std::max(to.pitch, from.pitch) < furthest_pitch;
    for (Int64 row = 0; row < rows; row += apart ? rows : 1) {
      cuda::Copy2D c{};
      const auto end = [&](const End& e, unsigned& type, cuda::DevicePointer& device, std::size_t& pitch) {
        type = e.on_host ? cuda::Copy2D::host : cuda::Copy2D::device;
        pitch = static_cast<std::size_t>(apart ? e.pitch : bytes);
        device = e.on_host ? 0 : address(e.at + row * e.pitch);
      };
      end(from, c.from_type, c.from_device, c.from_pitch), end(to, c.to_type, c.to_device, c.to_pitch);
      if (from.on_host) c.from_host = from.at + row * from.pitch;
      if (to.on_host) c.to_host = to.at + row * to.pitch;
      c.width = static_cast<std::size_t>(bytes), c.height = static_cast<std::size_t>(apart ? rows : 1);
      cuda::check(cuda::driver().memcpy_rows(&c, stream), "cuMemcpy2DAsync");
    }
  }

  static constexpr Int64 furthest_pitch = Int64(1) << 31;  // below it: what every GPU takes

  Device where;
  cuda::StreamHandle stream;
  std::shared_ptr<Pool> pool;
  std::shared_ptr<std::byte> workspace;
  std::size_t room = 0;
  bool pending = false;  // copies to the host
};

}  // namespace

std::shared_ptr<dist::Memory> cuda_memory(Device device, void* stream) {
  return std::make_shared<CudaMemory>(device, stream);
}

}  // namespace tessera::api
