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

// Hash of all names and texts: part of every cache key.
const std::string& device_sources_hash();

}  // namespace tessera::cuda
