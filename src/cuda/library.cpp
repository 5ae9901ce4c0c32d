// Opening shared libraries at run time; see library.hpp.
#include "cuda/library.hpp"

#include <dlfcn.h>

namespace tessera::cuda {

SharedLibrary::SharedLibrary(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle) {
      opened = path;
      return;
    }
    // The first reason is that of the plain name, which the loader searched for everywhere it knows.
    if (reason.empty())
      if (const char* text = dlerror()) reason = text;
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
