// SPDX-License-Identifier: Apache-2.0
// Which of the known units the gate compiles: few that differ, instead of all that there are. See gate.hpp.
#include <algorithm>
#include <map>
#include <queue>
#include <set>
#include <unordered_set>

#include "core/failure.hpp"
#include "tests/gate/gate.hpp"

namespace tessera::gate {
namespace {

using Combination = std::uint64_t;  // of up to three settings, by their numbers
constexpr int number_bits = 16;

bool is_option(const std::string& setting) {
  return setting.ends_with("= true") || setting.ends_with("= false") || setting.starts_with("bias = ");
}

bool is_off(const std::string& setting) {
  return setting.ends_with("= false") || setting == "bias = tessera::gpu::Element::none";
}

// Kernels that calls get only by name. The quick set holds their options and types, but not every tile and GPU.
bool only_by_name(const std::string& kernel) {
  return kernel.starts_with("naive") || kernel.starts_with("tiled") || kernel.starts_with("warp") ||
         kernel.starts_with("decode") || kernel.starts_with("mma");
}
// Kernels of which any three settings meet: once, only three together spilled.
bool in_threes(const std::string& kernel) { return kernel.starts_with("decode"); }
bool is_tile_or_gpu(const std::string& setting) {
  return !is_option(setting) && setting.find("::Element::") == std::string::npos;
}

// Numbers combinations of settings. Settings are numbered from 1.
class Combinations {
 public:
  explicit Combinations(Depth depth) : depth(depth) {}

  // Those that meet in a unit.
  std::vector<Combination> of(const cuda::NamedUnit& unit) {
    std::vector<std::string> settings = settings_of(unit.unit);
    if (depth == Depth::quick && only_by_name(unit.kernel)) std::erase_if(settings, is_tile_or_gpu);
    std::vector<Combination> out{0};  // so that a kernel without settings has something to cover
    for (auto a = settings.begin(); a != settings.end(); ++a) {
      out.push_back(number(*a));
      for (auto b = a + 1; b != settings.end(); ++b)
        if (depth == Depth::full)
          add_with_third(settings, a, b, in_threes(unit.kernel), out);
        else if (is_option(*a) && is_option(*b))
          out.push_back(number(on_or_off(*a)) << number_bits | number(on_or_off(*b)));
    }
    return out;
  }

 private:
  using Place = std::vector<std::string>::const_iterator;
  void add_with_third(const std::vector<std::string>& settings, Place a, Place b, bool any,
                      std::vector<Combination>& out) {
    const Combination pair = number(*a) << number_bits | number(*b);
    out.push_back(pair);
    for (Place c = b + 1; c != settings.end(); ++c)
      if (any || is_option(*a) + is_option(*b) + is_option(*c) >= 2) out.push_back(pair << number_bits | number(*c));
  }

  // A bias is on in any type.
  static std::string on_or_off(const std::string& option) {
    return option.substr(0, option.find(' ')) + (is_off(option) ? " off" : " on");
  }
  Combination number(const std::string& setting) { return numbers.emplace(setting, numbers.size() + 1).first->second; }

  Depth depth;
  std::map<std::string, Combination> numbers;
};

// Each time the unit that adds most, until none adds anything. What a unit adds only shrinks, so one that still adds as
// much as when it was last counted, and that was the most, is the next.
std::vector<const GateUnit*> cover(const std::vector<const GateUnit*>& units, Depth depth) {
  Combinations combinations(depth);
  std::vector<std::vector<Combination>> held;
  std::priority_queue<std::pair<std::size_t, std::ptrdiff_t>> queue;
  for (const GateUnit* unit : units) {
    held.push_back(combinations.of(unit->named));
    queue.push({held.back().size(), -std::ssize(held)});
  }
  std::vector<const GateUnit*> chosen;
  std::unordered_set<Combination> covered;
  while (!queue.empty()) {
    const auto [counted, place] = queue.top();
    queue.pop();
    const auto index = static_cast<std::size_t>(-place - 1);
    std::vector<Combination>& left = held[index];
    std::erase_if(left, [&](Combination c) { return covered.contains(c); });
    if (left.size() == counted) {
      chosen.push_back(units[index]);
      covered.insert(left.begin(), left.end());
    } else if (!left.empty()) {
      queue.push({left.size(), place});
    }
  }
  return chosen;
}

}  // namespace

std::vector<std::string> settings_of(const cuda::Unit& unit) {
  std::vector<std::string> out{"GPU = " + unit.architecture};
  const std::string begin = " config{";
  const std::size_t at = unit.text.find(begin);
  if (at == std::string::npos) return out;
  std::string list = unit.text.substr(at + begin.size(), unit.text.find(';', at) - at - begin.size());
  if (const std::size_t options = list.find(".options = {"); options != std::string::npos) list.erase(options, 12);
  std::erase(list, '}');
  int on = 0;
  for (std::size_t dot = 0, end; dot < list.size(); dot = end + 2) {  // ".D = 64, .Dv = 64"
    end = std::min(list.find(", ", dot), list.size());
    out.push_back(list.substr(dot + 1, end - dot - 1));
    on += is_option(out.back()) && !is_off(out.back());
  }
  out.push_back(text("options = ", on));
  return out;
}

UnitSet chosen_units(UnitSet set, Depth depth) {
  std::map<std::string, std::vector<const GateUnit*>> kernels;
  for (const GateUnit& unit : set.units) kernels[unit.named.kernel].push_back(&unit);
  std::vector<GateUnit> chosen;
  for (const auto& [kernel, units] : kernels)
    for (const GateUnit* unit : cover(units, depth)) chosen.push_back(*unit);
  set.known = set.units.size();
  set.units = std::move(chosen);
  return set;
}

}  // namespace tessera::gate
