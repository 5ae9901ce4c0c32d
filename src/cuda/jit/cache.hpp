// Compiled kernels, kept: in memory per process and device, in packs inside the library, and on disk per user. Asked
// for by the GPU backends' plans; the only entry to the JIT at run time. See docs/architecture.md, "Compiling kernels".
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/jit/compile.hpp"
#include "cuda/module.hpp"

namespace tessera::cuda {

// The kernel `symbol` of a unit, loaded on a device: from memory, a pack, the disk, or the compiler, in this order.
// Several threads that ask for the same one wait for one compilation. Never null; it stays valid for the process.
const LoadedKernel* find_kernel(const std::string& unit_text, const char* symbol, int device);

// The same without a GPU to load it on: from a pack, the disk, or the compiler. Exposed for its test.
std::vector<char> find_cubin(const Unit& unit);

// Everything that was read to make a cubin, but for the compiler's version.
std::string unit_key(const Unit& unit);

// The user's cache folder: $TESSERA_CACHE, else $XDG_CACHE_HOME/tessera, else ~/.cache/tessera. Empty: none (the
// variable is set and empty, or there is no home). An unusable folder is not an error; the cache is then skipped.
std::string cache_folder();

// One folder of entries. An entry is written to a temporary file, synced and renamed, so that readers see all of it or
// nothing, and begins with the hash of its content, which is checked on reading.
class DiskCache {
 public:
  explicit DiskCache(std::string folder) : folder(std::move(folder)) {}
  std::optional<std::vector<char>> read(const std::string& key) const;  // a damaged entry counts as missing
  void write(const std::string& key, const std::vector<char>& cubin) const;

 private:
  bool usable(bool create) const;  // it is a folder, ours, and closed to others
  std::string path(const std::string& key) const { return folder + "/" + key + ".cubin"; }
  std::string folder;
};

}  // namespace tessera::cuda
