// The pictures of docs/pictures, each drawn from what the library or its own headers compute.
// Included by tools/pictures/*.cpp only. `cmake --build build --target pictures` redraws them all.
#pragma once

#include "tools/pictures/svg.hpp"

namespace tessera::pictures {

Sheet mask_tiles();       // docs/algorithm.md, "Mask"
Sheet online_softmax();   // docs/algorithm.md, "Online softmax"
Sheet backward_groups();  // docs/algorithm.md, "Backward, tile by tile"
Sheet score_tile();       // docs/architecture.md, "CPU kernels"
Sheet ancestor_b_bug();   // docs/numerics.md, "The story of ancestor B's O"

}  // namespace tessera::pictures
