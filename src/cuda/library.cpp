// SPDX-License-Identifier: Apache-2.0
// Opening shared libraries at run time; see library.hpp.
#include "cuda/library.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <cstring>
#include <new>

namespace tessera::cuda {

SharedLibrary::SharedLibrary(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    errno = 0;
    handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle) {
      opened = path;
      return;
    }
    const char* text = dlerror();
    // Out of memory is transient: callers cache `reason`, so it must not claim that the library is missing.
    if (errno == ENOMEM || !text || std::strstr(text, "out of memory")) throw std::bad_alloc();
    // Keep the first error: it is of the plain name, for which the dynamic loader tried its whole search path.
    if (reason.empty()) reason = text;
  }
}

void* SharedLibrary::symbol(const char* name) const { return handle ? dlsym(handle, name) : nullptr; }

const char* bind(const SharedLibrary& library, const std::vector<Binding>& bindings) {
  for (const Binding& b : bindings) {
    *b.pointer = library.symbol(b.name);
    if (!*b.pointer) return b.name;
  }
  return nullptr;
}

}  // namespace tessera::cuda
