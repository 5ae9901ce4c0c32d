// SPDX-License-Identifier: Apache-2.0
// Draws docs/pictures/*.svg. Usage: draw_pictures FOLDER, which holds data/timeline.txt (see record_timeline.cpp)
#include <exception>
#include <filesystem>

#include "tools/pictures/pictures.hpp"

int main(int argc, char** argv) {
  using namespace tessera::pictures;
  if (argc != 2) return std::fprintf(stderr, "usage: draw_pictures FOLDER\n"), 2;
  const std::string folder = argv[1];
  try {
    mask_tiles().save(folder + "/mask_tiles.svg");
    online_softmax().save(folder + "/online_softmax.svg");
    backward_groups().save(folder + "/backward_groups.svg");
    score_tile().save(folder + "/score_tile.svg");
    ancestor_b_bug().save(folder + "/ancestor_b.svg");
    pass_flow().save(folder + "/pass_flow.svg");
    thread_blocks().save(folder + "/thread_blocks.svg");
    memory_access().save(folder + "/memory_access.svg");
    shared_banks().save(folder + "/shared_banks.svg");
    butterfly().save(folder + "/butterfly.svg");
    const std::string recording = folder + "/data/timeline.txt";
    if (std::filesystem::exists(recording))
      sync_timeline(recording).save(folder + "/sync_timeline.svg");
    else
      std::fprintf(stderr, "draw_pictures: no sync_timeline: record_timeline makes %s on a GPU\n", recording.c_str());
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "draw_pictures: %s\n", error.what()), 1;
  }
  return 0;
}
