// The device text: files that were embedded into the library when it was built, by the path with which other device
// text includes them. Included by src/cuda/jit. cmake/embed.cmake writes the table.
#pragma once

#include <string>
#include <vector>

namespace tessera::cuda {

struct SourceFile {
  std::string name;  // "math/mask.hpp", "simt/kernel/vector_forward.cuh"
  std::string text;
};

// The embedded files, or, for development, those of the tree that $TESSERA_DEVICE_SOURCE names (its src folder).
const std::vector<SourceFile>& device_sources();

// The files that a unit includes, and those that they include: all that the compiler reads of the tree, and all that it
// is given. Part of every cache key, so that editing one kernel does not make the others' entries stale.
std::vector<const SourceFile*> sources_read_by(const std::string& unit_text);

}  // namespace tessera::cuda
