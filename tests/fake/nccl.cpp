// SPDX-License-Identifier: Apache-2.0
// A fake libnccl: communicators, groups, sends and receives between threads of a test. Built as a shared library with
// NCCL's name. Non-blocking, as NCCL is: calls answer "in progress" first. See nccl.hpp.
#include "tests/fake/nccl.hpp"

#include <cstdio>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <tuple>

#include "nccl/library.hpp"
#include "tests/fake/inside.hpp"

using namespace tessera;
using nccl::Result;

namespace tessera::nccl {

struct CommTag {
  std::string id;
  int rank, ranks, device;
  bool unseen = true;  // asked about for the first time, the last call is still in progress
  bool alive = true;
};

}  // namespace tessera::nccl

namespace tessera::fake {

NcclState& nccl_state() {
  static NcclState state;
  return state;
}

namespace {

using nccl::Comm;

struct Operation {
  bool send;
  cuda::DevicePointer at;
  std::size_t bytes;
  int peer;
  Comm comm;
  cuda::StreamHandle stream;
};

std::mutex mutex;  // taken after the machine's
std::list<nccl::CommTag> comms;
std::map<std::tuple<std::string, int, int>, std::deque<std::vector<std::byte>>> boxes;  // by id, from, to
std::vector<Operation> waiting;                                                         // receives of ended groups
thread_local int depth = 0;
thread_local std::vector<Operation> group;
int ids = 0;

constexpr Result system_error = 2;

Result enter(const char* name, Comm comm = nullptr) {
  nccl_state().calls.emplace_back(name);
  const char* failing = nccl_state().failing;
  return failing && std::strcmp(failing, name) == 0 && (!comm || comm->rank == 1) ? system_error : nccl::success;
}

// With the machine's lock. Takes what has come; says whether the stream still waits for something.
bool is_busy(cuda::StreamHandle stream) {
  const std::lock_guard lock(mutex);
  bool busy = false;
  std::erase_if(waiting, [&](const Operation& op) {
    if (op.stream != stream) return false;
    auto& box = boxes[{op.comm->id, op.peer, op.comm->rank}];
    if (box.empty() || nccl_state().stuck) return busy = true, false;
    std::size_t at = 0;
    Allocation* memory = allocation_of(op.at, op.bytes, at);
    if (!memory || box.front().size() != op.bytes) {
      nccl_state().complaints.emplace_back("a message does not fit");
    } else {
      memory->content.resize(memory->bytes);
      std::memcpy(memory->content.data() + at, box.front().data(), op.bytes);
    }
    box.pop_front();
    return true;
  });
  return busy;
}

Result add(const char* name, const Operation& op) {
  const std::lock_guard lock(mutex);
  if (depth == 0) nccl_state().complaints.push_back(std::string(name) + " outside of a group");
  if (!op.comm->alive) nccl_state().complaints.push_back(std::string(name) + " on a communicator that is gone");
  group.push_back(op);
  return enter(name, op.comm);
}

Result end(Comm comm, const char* name, int& count) {
  const std::lock_guard lock(mutex);
  if (!comm->alive) nccl_state().complaints.push_back(std::string(name) + " on a communicator that is gone");
  comm->alive = false;
  ++count;
  std::erase_if(waiting, [&](const Operation& op) { return op.comm == comm; });
  return enter(name);
}

}  // namespace

void* make_comm(const char* id, int rank, int ranks, int device) {
  const std::lock_guard outer(machine().mutex);
  const std::lock_guard lock(mutex);
  machine().busy = is_busy;
  comms.push_back({id, rank, ranks, device});
  return &comms.back();
}

}  // namespace tessera::fake

using namespace tessera::fake;

extern "C" {

Result ncclGetVersion(int* version) {
  *version = 22703;
  return nccl::success;
}

const char* ncclGetErrorString(Result result) {
  return result == nccl::invalid_usage ? "invalid usage"
         : result == 6                 ? "remote process exited"
                                       : "unhandled system error";
}

const char* ncclGetLastError(nccl::Comm) { return ""; }

Result ncclGetUniqueId(nccl::UniqueId* id) {
  const std::lock_guard lock(mutex);
  std::memset(id->bytes, 0, sizeof(id->bytes));
  std::snprintf(id->bytes, sizeof(id->bytes), "fake id %d", ++ids);
  return enter("ncclGetUniqueId");
}

Result ncclCommInitRankConfig(nccl::Comm* comm, int ranks, nccl::UniqueId id, int rank, nccl::Config* config) {
  const std::lock_guard outer(machine().mutex);
  const std::lock_guard lock(mutex);
  machine().busy = is_busy;
  if (config->size != 24 || config->magic != 0xcafebeef || config->version != 21400 || config->blocking != 0)
    nccl_state().complaints.emplace_back("ncclConfig_t is not as it should be");
  if (context_stack().empty()) nccl_state().complaints.emplace_back("ncclCommInitRankConfig without a device");
  const int device = context_stack().empty() ? 0 : device_of(context_stack().back());
  for (const nccl::CommTag& other : comms)
    if (other.id == id.bytes && other.device == device) return nccl::invalid_usage;
  comms.push_back({id.bytes, rank, ranks, device});
  *comm = &comms.back();
  ++nccl_state().made;
  const Result result = enter("ncclCommInitRankConfig", *comm);
  return result == nccl::success ? nccl::in_progress : result;
}

Result ncclCommGetAsyncError(nccl::Comm comm, Result* result) {
  const std::lock_guard lock(mutex);
  int there = 0;
  for (const nccl::CommTag& other : comms) there += other.id == comm->id;
  *result = comm->unseen || there < comm->ranks ? nccl::in_progress : nccl::success;
  if (comm->rank == 1 && nccl_state().async_error) *result = nccl_state().async_error;
  comm->unseen = false;
  return enter("ncclCommGetAsyncError", comm);
}

Result ncclCommAbort(nccl::Comm comm) { return end(comm, "ncclCommAbort", nccl_state().aborted); }
Result ncclCommDestroy(nccl::Comm comm) { return end(comm, "ncclCommDestroy", nccl_state().destroyed); }

Result ncclCommCount(nccl::Comm comm, int* ranks) {
  *ranks = comm->ranks;
  return nccl::success;
}
Result ncclCommUserRank(nccl::Comm comm, int* rank) {
  *rank = comm->rank;
  return nccl::success;
}
Result ncclCommCuDevice(nccl::Comm comm, int* device) {
  *device = comm->device;
  return nccl::success;
}

Result ncclGroupStart() {
  const std::lock_guard lock(mutex);
  if (depth++ > 0) nccl_state().complaints.emplace_back("a group in a group");
  return enter("ncclGroupStart");
}

Result ncclSend(const void* from, std::size_t bytes, int type, int peer, nccl::Comm comm, cuda::StreamHandle stream) {
  if (type != 1) nccl_state().complaints.emplace_back("ncclSend: not of bytes");
  return add("ncclSend", {true, reinterpret_cast<cuda::DevicePointer>(from), bytes, peer, comm, stream});
}

Result ncclRecv(void* to, std::size_t bytes, int type, int peer, nccl::Comm comm, cuda::StreamHandle stream) {
  if (type != 1) nccl_state().complaints.emplace_back("ncclRecv: not of bytes");
  return add("ncclRecv", {false, reinterpret_cast<cuda::DevicePointer>(to), bytes, peer, comm, stream});
}

Result ncclGroupEnd() {
  const std::lock_guard outer(machine().mutex);
  const std::lock_guard lock(mutex);
  if (--depth != 0) nccl_state().complaints.emplace_back("ncclGroupEnd: not the end of a group");
  nccl::Comm comm = group.empty() ? nullptr : group[0].comm;
  for (const Operation& op : group) {
    op.comm->unseen = true;
    std::size_t at = 0;
    const Allocation* memory = allocation_of(op.at, op.bytes, at);
    if (!memory) nccl_state().complaints.emplace_back("a message outside of device memory");
    if (memory && op.send)
      boxes[{op.comm->id, op.comm->rank, op.peer}].emplace_back(
          memory->content.begin() + static_cast<std::ptrdiff_t>(at),
          memory->content.begin() + static_cast<std::ptrdiff_t>(at + op.bytes));
    if (memory && !op.send) waiting.push_back(op);
  }
  group.clear();
  const Result result = enter("ncclGroupEnd", comm);
  return result == nccl::success ? nccl::in_progress : result;
}

}  // extern "C"
