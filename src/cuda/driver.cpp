// SPDX-License-Identifier: Apache-2.0
// Loads libcuda.so.1 and fills the table of its functions; see driver.hpp.
#include "cuda/driver.hpp"

#include "core/failure.hpp"
#include "core/fork.hpp"
#include "core/once.hpp"
#include "cuda/library.hpp"

namespace tessera::cuda {
namespace {

// cuLibraryLoadData and its family came with CUDA 12.
constexpr int oldest_driver = 12000;

DriverOrReason open_driver(Driver& table) {
  const SharedLibrary library({"libcuda.so.1"});
  if (!library.is_open())
    return {nullptr, text("the NVIDIA driver is missing: libcuda.so.1 could not be opened (", library.error(), ")")};
  const char* missing = bind(library, {
#define X(name, symbol, parameters) {symbol, reinterpret_cast<void**>(&table.name)},
                                          TESSERA_CUDA_DRIVER(X)
#undef X
                                      });
  if (missing)
    return {nullptr, text("the NVIDIA driver is too old: it has no ", missing, "; CUDA 12 or later is needed")};
  const auto does_not_start = [&table](const char* call, Status status) -> DriverOrReason {
    const char* words = nullptr;
    table.get_error_string(status, &words);
    return {nullptr, text("the NVIDIA driver does not start: ", call, " says ", words ? words : "nothing")};
  };
  int version = 0, devices = 0;
  if (const Status status = table.init(0); status != 0) return does_not_start("cuInit", status);
  if (const Status status = table.driver_get_version(&version); status != 0)
    return does_not_start("cuDriverGetVersion", status);
  if (version < oldest_driver)
    return {nullptr, text("the NVIDIA driver is too old: it is for CUDA ", version / 1000, ".", version % 1000 / 10,
                          "; CUDA 12 or later is needed")};
  if (const Status status = table.device_get_count(&devices); status != 0)
    return does_not_start("cuDeviceGetCount", status);
  if (devices == 0) return {nullptr, "the NVIDIA driver is there, but there is no GPU"};
  return {&table, "", devices};
}

// CUDA does not support fork(): in a child that was forked after cuInit the driver does not work, and mutexes of ours
// may be locked forever.
struct Opened {
  Driver table{};
  DriverOrReason found = open_driver(table);
  DriverOrReason lost{nullptr,
                      "this process was forked after the NVIDIA driver had been started, which then does not work in "
                      "it; start a new process instead (in Python: the start method \"spawn\")"};
  unsigned forks = fork_count();
};

}  // namespace

const DriverOrReason& find_driver() {
  static constinit Once<const Opened> opened;
  const Opened& here = opened.get([] { return Opened(); });
  return here.found.driver && here.forks != fork_count() ? here.lost : here.found;
}

const Driver& driver() {
  const DriverOrReason& found = find_driver();
  if (!found.driver) throw Failure(TESSERA_DEVICE_ERROR, found.reason);
  return *found.driver;
}

void check(Status status, const char* call) {
  if (status == 0) return;
  const char *name = nullptr, *words = nullptr;
  driver().get_error_name(status, &name);
  driver().get_error_string(status, &words);
  throw Failure(TESSERA_DEVICE_ERROR,
                text(call, " failed: ", name ? name : "unknown error", " (", words ? words : "no description", ")"));
}

}  // namespace tessera::cuda
