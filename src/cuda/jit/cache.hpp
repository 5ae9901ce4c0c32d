// SPDX-License-Identifier: Apache-2.0
// The JIT's caches of compiled kernels: in memory per process and device, ahead-of-time cubins in packs, and a disk
// cache per user. Included by the GPU backends' plans; the only entry to the JIT at run time. See docs/architecture.md,
// "Compiling kernels".
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/jit/compile.hpp"
#include "cuda/module.hpp"

namespace tessera::cuda {

// The kernel `symbol` of a unit, loaded on a device: from memory, a pack, the disk cache, or NVRTC, in this order.
// Threads that ask for the same kernel wait for one compilation. Never null; valid until the process ends.
const LoadedKernel* find_kernel(const std::string& unit_text, const char* symbol, int device);

// The same without loading, so that no GPU is needed: from a pack, the disk cache, or NVRTC. Exposed for its test.
std::vector<char> find_cubin(const Unit& unit);

// Cache key: a hash of the unit, the architecture, every source that it includes and the flags. The compiler's version
// is not part of it, so that packs serve machines with another one.
std::string unit_key(const Unit& unit);

// The user's cache folder: $TESSERA_CACHE, else $XDG_CACHE_HOME/tessera, else ~/.cache/tessera. Empty: none (the
// variable is set and empty, there is no home, or the environment is not to be trusted; see core/environment.hpp). An
// unusable folder is not an error; the cache is then skipped.
std::string cache_folder();

// One folder of entries, used only if its owner is this user and nobody else has access. Writes are atomic: an entry is
// written to a temporary file, synced and renamed. It begins with a checksum of its content, which is checked on
// reading. Nothing here throws but std::bad_alloc: an entry that cannot be written is compiled again next time.
class DiskCache {
 public:
  // Entries are called by their key and the ending.
  explicit DiskCache(std::string folder, const char* ending = ".cubin") : path(std::move(folder)), ending(ending) {}
  // An entry that is damaged, owned by somebody else, or not a regular file is a cache miss.
  std::optional<std::vector<char>> read(const std::string& key) const;
  // Also removes temporary files, an hour old or older, of writers that were killed.
  void write(const std::string& key, const std::vector<char>& cubin) const;

 private:
  std::string path;
  const char* ending;
};

}  // namespace tessera::cuda
