// SPDX-License-Identifier: Apache-2.0
// Sources of device code: files embedded in the library by the build, under the path with which device code includes
// them. Included by src/cuda/jit. cmake/embed.cmake writes the table.
#pragma once

#include <string>
#include <vector>

namespace tessera::cuda {

struct SourceFile {
  std::string name;  // "math/mask.hpp", "ladder/kernel/vector_forward.cuh"
  std::string text;
};

// The embedded files. For development, $TESSERA_DEVICE_SOURCE names a src folder from which they are read instead.
const std::vector<SourceFile>& device_sources();

// The transitive includes of a unit: exactly the files that NVRTC gets. The cache key hashes these files only, so that
// editing one kernel does not invalidate the cache entries of others.
std::vector<const SourceFile*> sources_read_by(const std::string& unit_text);

}  // namespace tessera::cuda
