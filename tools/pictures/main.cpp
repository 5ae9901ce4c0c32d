// Draws docs/pictures/*.svg. Usage: draw_pictures FOLDER
#include <exception>

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
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "draw_pictures: %s\n", error.what()), 1;
  }
  return 0;
}
