// SPDX-License-Identifier: Apache-2.0
// The pictures of docs/pictures, each drawn from what the library or its own text computes, or from a recorded run.
// Included by tools/pictures/*.cpp only. `cmake --build build --target pictures` redraws them all.
#pragma once

#include "tools/pictures/svg.hpp"

namespace tessera::pictures {

Sheet mask_tiles();       // docs/algorithm.md, "Mask"
Sheet online_softmax();   // docs/algorithm.md, "Online softmax"
Sheet backward_groups();  // docs/algorithm.md, "Backward, tile by tile"
Sheet score_tile();       // docs/cpu_kernels.md
Sheet ancestor_b_bug();   // docs/numerics.md, "A forgotten factor"

// docs/gpu_kernels.md
Sheet pass_flow();
Sheet thread_blocks();
Sheet memory_access();
Sheet shared_banks();
Sheet butterfly();
Sheet sync_timeline(const std::string& path);  // from the file that record_timeline wrote on a GPU

}  // namespace tessera::pictures
