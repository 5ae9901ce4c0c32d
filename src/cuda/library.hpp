// SPDX-License-Identifier: Apache-2.0
// A shared library loaded at run time (dlopen). The CUDA driver and NVRTC are loaded this way: the build needs neither,
// and a machine without a GPU runs the CPU kernels. Included by src/cuda only.
#pragma once

#include <string>
#include <vector>

namespace tessera::cuda {

// Loaded once and never unloaded: other parts of the process may use the same driver.
class SharedLibrary {
 public:
  // Tries the paths in order. If none opens, `error` says what was tried.
  explicit SharedLibrary(const std::vector<std::string>& paths);

  bool is_open() const { return handle != nullptr; }
  const std::string& path() const { return opened; }
  const std::string& error() const { return reason; }
  void* symbol(const char* name) const;  // null if there is none

 private:
  void* handle = nullptr;
  std::string opened, reason;
};

// Fills a table of function pointers. Returns the first name that is missing, or null.
struct Binding {
  const char* name;
  void** pointer;
};
const char* bind(const SharedLibrary& library, const std::vector<Binding>& bindings);

}  // namespace tessera::cuda
