// SPDX-License-Identifier: Apache-2.0
// Messages over NCCL; see transport.hpp. Nothing here waits for another rank: a group is begun, NCCL is asked whether
// it is enqueued, the stream whether it has run, and then what came is copied to the host. One stream, one group at a
// time: what NCCL needs to make progress.
#include "nccl/transport.hpp"

#include <chrono>
#include <sstream>
#include <thread>
#include <vector>

#include "core/failure.hpp"
#include "cuda/device.hpp"

namespace tessera::nccl {
namespace {

using Clock = std::chrono::steady_clock;
constexpr cuda::Status not_ready = 600;  // CUDA_ERROR_NOT_READY
constexpr std::size_t alignment = 256;

class NcclTransport : public Transport {
 public:
  NcclTransport(Comm comm, bool owned, int rank, int ranks, int device) :
      comm(comm), owned(owned), me(rank), size(ranks), device(device) {
    const cuda::CurrentDevice current(device);
    constexpr unsigned non_blocking = 1;  // of the legacy stream
    cuda::check(cuda::driver().stream_create(&stream, non_blocking), "cuStreamCreate");
  }

  ~NcclTransport() override {
    try {
      const cuda::CurrentDevice current(device);
      if (owned && !aborted) library().comm_destroy(comm);
      if (staging) cuda::driver().mem_free(staging);
      cuda::driver().stream_destroy(stream);
    } catch (...) {  // the device is gone, and everything on it
    }
  }

  int rank() const override { return me; }
  int ranks() const override { return size; }

  void start(std::span<const tessera_message> messages) override {
    const cuda::CurrentDevice current(device);
    group.assign(messages.begin(), messages.end());
    places.clear();
    std::size_t bytes = 0;
    for (const tessera_message& m : group)
      places.push_back(bytes), bytes += (m.bytes + alignment - 1) / alignment * alignment;
    reserve(bytes);
    for (std::size_t i = 0; i < group.size(); ++i)
      if (group[i].send)
        cuda::check(cuda::driver().memcpy_to_device(staging + places[i], group[i].data, group[i].bytes, stream),
                    "cuMemcpyHtoDAsync");
    // All of a group make progress together, or two ranks that send to each other could wait for ever. Once begun it
    // has to be ended, whatever happens in between.
    check(library().group_start(), "ncclGroupStart", comm);
    Result result = success;
    const char* call = "ncclGroupEnd";
    for (std::size_t i = 0; i < group.size() && (result == success || result == in_progress); ++i) {
      void* at = reinterpret_cast<void*>(staging + places[i]);
      const tessera_message& m = group[i];
      call = m.send ? "ncclSend" : "ncclRecv";
      result = m.send ? library().send(at, m.bytes, bytes_type, m.peer, comm, stream)
                      : library().receive(at, m.bytes, bytes_type, m.peer, comm, stream);
    }
    const Result end = library().group_end();
    check(result, call, comm);
    check(end, "ncclGroupEnd", comm);
    under_way = true;
  }

  void test(std::span<std::uint8_t> done) override {
    if (!under_way) return;
    const cuda::CurrentDevice current(device);
    Result state = success;
    check(library().comm_get_async_error(comm, &state), "ncclCommGetAsyncError", comm);
    check(state, "a message over NCCL", comm);
    if (state == in_progress) return;
    const cuda::Status status = cuda::driver().stream_query(stream);
    if (status == not_ready) return;
    cuda::check(status, "cuStreamQuery");
    // The stream has run, so copies to pageable memory, for which the driver waits, wait for nobody.
    for (std::size_t i = 0; i < group.size(); ++i)
      if (!group[i].send)
        cuda::check(cuda::driver().memcpy_to_host(group[i].data, staging + places[i], group[i].bytes, stream),
                    "cuMemcpyDtoHAsync");
    cuda::check(cuda::driver().stream_synchronize(stream), "cuStreamSynchronize");
    for (std::uint8_t& one : done) one = 1;
    under_way = false;
  }

  // NCCL has no way to tell the others why; an abort is what their own calls may report.
  void fail(const char*) noexcept override {
    if (aborted) return;
    aborted = true;
    try {
      const cuda::CurrentDevice current(device);
      library().comm_abort(comm);
    } catch (...) {
    }
  }

 private:
  // The group before is complete: nobody uses the old memory.
  void reserve(std::size_t bytes) {
    if (bytes <= room) return;
    if (staging) cuda::check(cuda::driver().mem_free(staging), "cuMemFree");
    staging = 0, room = 0;
    cuda::check(cuda::driver().mem_alloc(&staging, bytes), "cuMemAlloc");
    room = bytes;
  }

  Comm comm;
  bool owned, aborted = false;
  int me, size, device;
  cuda::StreamHandle stream = nullptr;
  cuda::DevicePointer staging = 0;
  std::size_t room = 0;
  std::vector<tessera_message> group;
  std::vector<std::size_t> places;  // of the messages in the staging memory
  bool under_way = false;
};

// Until all ranks have come.
void wait_for_all(Comm comm, double timeout) {
  const std::chrono::duration<double> limit(timeout);  // perhaps longer than the clock counts
  const auto begin = Clock::now();
  for (Result state = in_progress; state == in_progress;) {
    check(library().comm_get_async_error(comm, &state), "ncclCommGetAsyncError", comm);
    check(state, "ncclCommInitRankConfig", comm);
    if (state == in_progress && Clock::now() - begin > limit)
      throw Failure(TESSERA_COMMUNICATION_ERROR,
                    text("no answer within ", timeout, " s from all ranks of the NCCL communicator"));
    if (state == in_progress) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace

std::unique_ptr<Transport> transport_of(const UniqueId& id, int rank, int ranks, int device, double timeout) {
  const Library& nccl = library();
  const cuda::CurrentDevice current(device);
  Config config;
  Comm comm = nullptr;
  check(nccl.comm_init(&comm, ranks, id, rank, &config), "ncclCommInitRankConfig");
  try {
    wait_for_all(comm, timeout);
    return std::make_unique<NcclTransport>(comm, true, rank, ranks, device);
  } catch (...) {
    nccl.comm_abort(comm);
    throw;
  }
}

std::unique_ptr<Transport> transport_over(Comm comm) {
  const Library& nccl = library();
  int rank = 0, ranks = 0, device = 0;
  check(nccl.comm_count(comm, &ranks), "ncclCommCount", comm);
  check(nccl.comm_rank(comm, &rank), "ncclCommUserRank", comm);
  check(nccl.comm_device(comm, &device), "ncclCommCuDevice", comm);
  return std::make_unique<NcclTransport>(comm, false, rank, ranks, device);
}

}  // namespace tessera::nccl
