// Timelines as JSON; see timeline.hpp.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tools/pictures/timeline.hpp"

namespace tessera::pictures {

using Json = nlohmann::json;

void save(const Timeline& timeline, const std::string& path) {
  Json blocks = Json::array();
  for (const Timeline::Block& block : timeline.blocks) {
    Json warps = Json::array();
    for (const std::vector<Stamp>& stamps : block.warps) {
      Json list = Json::array();
      for (const Stamp& s : stamps) list.push_back(Json::array({static_cast<int>(s.event), s.tile, s.cycle}));
      warps.push_back(list);
    }
    blocks.push_back({{"number", block.number}, {"warps", warps}});
  }
  const Json json{{"gpu", timeline.gpu},
                  {"tile_queries", timeline.tile_queries},
                  {"tile_keys", timeline.tile_keys},
                  {"stages", timeline.stages},
                  {"cycles", timeline.cycles},
                  {"shares", timeline.shares},
                  {"stamps", "event (wait, load, multiply_QK, softmax, multiply_PV, barrier), tile, cycle"},
                  {"blocks", blocks}};
  if (const std::filesystem::path folder = std::filesystem::path(path).parent_path(); !folder.empty())
    std::filesystem::create_directories(folder);
  std::ofstream file(path);
  file << json.dump() << "\n";
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

Timeline read_timeline(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  const Json json = Json::parse(file);
  Timeline out{.gpu = json.at("gpu"),
               .tile_queries = json.at("tile_queries"),
               .tile_keys = json.at("tile_keys"),
               .stages = json.at("stages"),
               .shares = json.at("shares"),
               .blocks = {},
               .cycles = json.at("cycles")};
  for (const Json& block : json.at("blocks")) {
    Timeline::Block& added = out.blocks.emplace_back(Timeline::Block{block.at("number"), {}});
    for (const Json& warp : block.at("warps")) {
      std::vector<Stamp>& stamps = added.warps.emplace_back();
      for (const Json& stamp : warp)
        stamps.push_back({static_cast<Event>(stamp.at(0).get<int>()), stamp.at(1), stamp.at(2)});
    }
  }
  return out;
}

}  // namespace tessera::pictures
