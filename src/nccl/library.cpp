// SPDX-License-Identifier: Apache-2.0
// Loads libnccl.so.2 and fills the table of its functions; see library.hpp.
#include "nccl/library.hpp"

#include <vector>

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "core/once.hpp"
#include "cuda/library.hpp"

namespace tessera::nccl {
namespace {

constexpr int oldest = 21400;  // the first with non-blocking communicators

struct Opened {
  Library table{};
  std::string reason;  // empty: it is there
};

Opened open() {
  Opened out;
  const char* file = environment("TESSERA_NCCL");
  const cuda::SharedLibrary found({file && *file ? file : "libnccl.so.2"});
  if (!found.is_open()) {
    out.reason = text("NCCL is missing: libnccl.so.2 could not be opened (", found.error(),
                      "); install it, or set TESSERA_NCCL to its path");
    return out;
  }
  const char* missing =
      cuda::bind(found, {
#define X(name, symbol, parameters) {symbol, reinterpret_cast<void**>(&out.table.name)},
                            TESSERA_NCCL(X)
#undef X
                                {"ncclGetErrorString", reinterpret_cast<void**>(&out.table.get_error_string)},
                            {"ncclGetLastError", reinterpret_cast<void**>(&out.table.get_last_error)}});
  int version = 0;
  if (missing)
    out.reason = text("NCCL is too old: it has no ", missing, "; 2.14 or later is needed");
  else if (const Result result = out.table.get_version(&version); result != success)
    out.reason = text("NCCL does not start: ncclGetVersion says ", out.table.get_error_string(result));
  else if (version < oldest)
    out.reason = text("NCCL is too old: its version is ", version, "; 2.14 or later is needed");
  return out;
}

}  // namespace

const Library& library() {
  static constinit Once<const Opened> opened;
  const Opened& here = opened.get(open);
  if (!here.reason.empty()) throw Failure(TESSERA_DEVICE_ERROR, here.reason);
  return here.table;
}

void check(Result result, const char* call, Comm comm) {
  if (result == success || result == in_progress) return;
  const char *words = library().get_error_string(result), *more = library().get_last_error(comm);
  throw Failure(
      TESSERA_DEVICE_ERROR,
      text(call, " failed: ", words ? words : "unknown error", more && *more ? text(" (", more, ")") : "",
           result == invalid_usage ? "; NCCL cannot share a device between ranks: give each its own, or use MPI" : ""));
}

}  // namespace tessera::nccl
