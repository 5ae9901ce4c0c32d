// SPDX-License-Identifier: Apache-2.0
// Timelines as text, a fact a line; see timeline.hpp.
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "tools/pictures/timeline.hpp"

namespace tessera::pictures {

void save(const Timeline& timeline, const std::string& path) {
  if (const std::filesystem::path folder = std::filesystem::path(path).parent_path(); !folder.empty())
    std::filesystem::create_directories(folder);
  std::ofstream file(path);
  file.precision(std::numeric_limits<double>::max_digits10);
  file << "# Written by record_timeline. A warp: event (wait, load, multiply_QK, softmax, multiply_PV, barrier), tile, "
          "cycle, and so on.\n";
  file << "gpu " << timeline.gpu << "\ntile_queries " << timeline.tile_queries << "\ntile_keys " << timeline.tile_keys
       << "\nstages " << timeline.stages << "\ncycles " << timeline.cycles << "\nshares";
  for (const double share : timeline.shares) file << " " << share;
  file << "\n";
  for (const Timeline::Block& block : timeline.blocks) {
    file << "block " << block.number << "\n";
    for (const std::vector<Stamp>& stamps : block.warps) {
      file << "warp";
      for (const Stamp& s : stamps) file << "  " << static_cast<int>(s.event) << " " << s.tile << " " << s.cycle;
      file << "\n";
    }
  }
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

Timeline read_timeline(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  Timeline out;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string fact;
    words >> fact >> std::ws;
    if (fact == "#") continue;
    if (fact == "gpu") {
      std::getline(words, out.gpu);
    } else if (fact == "shares") {
      for (double share; words >> share;) out.shares.push_back(share);
    } else if (fact == "block") {
      words >> out.blocks.emplace_back().number;
    } else if (fact == "warp" && !out.blocks.empty()) {
      std::vector<Stamp>& stamps = out.blocks.back().warps.emplace_back();
      int event = 0;
      for (Stamp s{}; words >> event >> s.tile >> s.cycle; stamps.push_back(s)) s.event = static_cast<Event>(event);
    } else if (fact == "tile_queries") {
      words >> out.tile_queries;
    } else if (fact == "tile_keys") {
      words >> out.tile_keys;
    } else if (fact == "stages") {
      words >> out.stages;
    } else if (fact == "cycles") {
      words >> out.cycles;
    }
    if (!words.eof()) throw std::runtime_error(path + ": not a line of a timeline: " + line);
  }
  if (out.blocks.empty() || out.shares.size() != event_count) throw std::runtime_error(path + ": is cut off");
  return out;
}

}  // namespace tessera::pictures
