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
// variable is set and empty, there is no home, or the environment is not to be trusted; see core/environment.hpp). An
// unusable folder is not an error; the cache is then skipped.
std::string cache_folder();

// One folder of entries, used only if it is ours and closed to others. An entry is written to a temporary file, synced
// and renamed, so that readers see all of it or nothing, and begins with the hash of its content, which is checked on
// reading. Nothing here throws but std::bad_alloc: an entry that cannot be written is compiled again next time.
class DiskCache {
 public:
  explicit DiskCache(std::string folder) : path(std::move(folder)) {}
  // An entry that is damaged, somebody else's, or no regular file at all counts as missing.
  std::optional<std::vector<char>> read(const std::string& key) const;
  // Also removes what writers left that were killed an hour ago or earlier.
  void write(const std::string& key, const std::vector<char>& cubin) const;

 private:
  std::string path;
};

}  // namespace tessera::cuda
