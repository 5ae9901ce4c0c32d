// A shared library opened at run time: the CUDA driver and NVRTC are used this way, so that building needs neither, and
// a machine without a GPU runs the rest. Included by src/cuda only.
#pragma once

#include <string>
#include <vector>

namespace tessera::cuda {

// Opened once and never closed: other parts of the process may use the same driver.
class SharedLibrary {
 public:
  // Tries the paths in order. If none opens, `error` says what was tried.
  explicit SharedLibrary(const std::vector<std::string>& paths);

  bool is_open() const { return handle != nullptr; }
  const std::string& path() const { return opened; }
  const std::string& error() const { return reason; }
  void* symbol(const char* name) const;  // null if it has none

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
