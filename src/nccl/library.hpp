// SPDX-License-Identifier: Apache-2.0
// The part of NCCL that Tessera uses: declared here, so that the build needs no NCCL header, and loaded from
// libnccl.so.2 at run time (dlopen). Names, values and layouts follow NCCL's documentation. Included by src/nccl and by
// the fake NCCL of the tests.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "cuda/driver.hpp"

namespace tessera::nccl {

using Result = int;  // ncclResult_t
inline constexpr Result success = 0, invalid_usage = 5, in_progress = 7;
inline constexpr int bytes_type = 1;  // ncclUint8

struct CommTag;
using Comm = CommTag*;

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as 2.14 had it. NCCL reads as much as `size` says, and what `version` did not have takes its default.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};
static_assert(sizeof(Config) == 24);

// One row per function: our name, NCCL's symbol, the parameters. All return a Result.
#define TESSERA_NCCL(X)                                                                                                \
  X(get_version, "ncclGetVersion", (int* version))                                                                     \
  X(get_unique_id, "ncclGetUniqueId", (UniqueId * id))                                                                 \
  X(comm_init, "ncclCommInitRankConfig", (Comm * comm, int ranks, UniqueId id, int rank, Config* config))              \
  X(comm_get_async_error, "ncclCommGetAsyncError", (Comm comm, Result * result))                                       \
  X(comm_abort, "ncclCommAbort", (Comm comm))                                                                          \
  X(comm_destroy, "ncclCommDestroy", (Comm comm))                                                                      \
  X(comm_count, "ncclCommCount", (Comm comm, int* ranks))                                                              \
  X(comm_rank, "ncclCommUserRank", (Comm comm, int* rank))                                                             \
  X(comm_device, "ncclCommCuDevice", (Comm comm, int* device))                                                         \
  X(group_start, "ncclGroupStart", ())                                                                                 \
  X(group_end, "ncclGroupEnd", ())                                                                                     \
  X(send, "ncclSend", (const void* from, std::size_t count, int type, int peer, Comm comm, cuda::StreamHandle stream)) \
  X(receive, "ncclRecv", (void* to, std::size_t count, int type, int peer, Comm comm, cuda::StreamHandle stream))

struct Library {
#define X(name, symbol, parameters) Result(*name) parameters = nullptr;
  TESSERA_NCCL(X)
#undef X
  const char* (*get_error_string)(Result result) = nullptr;
  const char* (*get_last_error)(Comm comm) = nullptr;
};

// Loaded on first use; throws Failure (TESSERA_DEVICE_ERROR) with the reason where there is none.
const Library& library();

// Throws Failure with the call's name and NCCL's words, unless the result is success or in_progress.
void check(Result result, const char* call, Comm comm = nullptr);

}  // namespace tessera::nccl
