// SPDX-License-Identifier: Apache-2.0
// When the warps of two blocks on one multiprocessor load, wait and compute, from recorded time stamps. See
// pictures.hpp and timeline.hpp.
#include <algorithm>

#include "tools/pictures/pictures.hpp"
#include "tools/pictures/timeline.hpp"

namespace tessera::pictures {
namespace {

constexpr double left = 108, width = 1000, top = 112, row = 26;

struct Look {
  const char *fill, *name, *what;
};
const Look looks[event_count] = {{"#e3b5b5", "wait", "copies and the block's barrier"},
                                 {colour::violet, "load", "sends off the copies of the next tile"},
                                 {colour::blue, "S = Q K^T", ""},
                                 {colour::orange, "softmax", "scores, mask, P, alpha"},
                                 {colour::green, "O = alpha O + P V", ""},
                                 {colour::red, "barrier", "until all warps have read the tile"}};

const Look& look_of(Event event) { return looks[static_cast<std::size_t>(event)]; }

}  // namespace

Sheet sync_timeline(const std::string& path) {
  const Timeline timeline = read_timeline(path);
  const double unit = width / double(timeline.cycles);
  const auto x = [&](std::int64_t cycle) { return left + std::clamp(double(cycle) * unit, 0.0, width); };
  std::size_t rows = 0;
  for (const Timeline::Block& block : timeline.blocks) rows += block.warps.size();
  const double bottom = top + double(rows) * row + double(timeline.blocks.size() - 1) * 16;
  Sheet sheet(left + width + 24, bottom + 152, "The warps of two blocks on one multiprocessor");

  sheet.text(24, 32, "vector_forward on one multiprocessor of " + timeline.gpu, "start", colour::ink, 14, true);
  sheet.text(24, 52,
             format("f32, D = 64, tiles of %d queries x %d keys, %d in shared memory at a time; a few tiles from the "
                    "middle of the run",
                    timeline.tile_queries, timeline.tile_keys, timeline.stages),
             "start", colour::faint, 12);
  const std::int64_t tick = timeline.cycles > 20000 ? 5000 : timeline.cycles > 8000 ? 2000 : 1000;
  for (std::int64_t cycle = 0; cycle <= timeline.cycles; cycle += tick) {
    sheet.line({x(cycle), top - 8}, {x(cycle), bottom + 4}, colour::grid);
    sheet.text(x(cycle), top - 14, format("%lld", static_cast<long long>(cycle)), "middle", colour::faint, 11);
  }
  sheet.text(left - 40, top - 14, "cycles", "end", colour::faint, 11);

  double y = top;
  for (const Timeline::Block& block : timeline.blocks) {
    for (std::size_t number = 0; number < block.warps.size(); ++number) {
      const std::vector<Stamp>& stamps = block.warps[number];
      sheet.text(left - 10, y + 15, format("warp %zu", number), "end", colour::ink, 12);
      for (std::size_t n = 0; n < stamps.size(); ++n) {
        const double begin = x(stamps[n].cycle), end = n + 1 < stamps.size() ? x(stamps[n + 1].cycle) : left + width;
        if (end <= begin) continue;
        sheet.rect(begin, y, end - begin, row - 5, look_of(stamps[n].event).fill);
        if (stamps[n].event == Event::multiply_QK && end - begin > 26)
          sheet.text((begin + end) / 2, y + 15, format("%lld", static_cast<long long>(stamps[n].tile)), "middle",
                     "#ffffff", 10);
      }
      y += row;
    }
    sheet.vertical_text(28, y - double(block.warps.size()) * row / 2,
                        format("block %lld", static_cast<long long>(block.number)), colour::faint);
    y += 16;
  }

  double at = 24, line = bottom + 40;
  for (int event = 0; event < event_count; ++event) {
    const double share = timeline.shares[static_cast<std::size_t>(event)];
    if (share == 0) continue;
    const Look& look = looks[event];
    if (at > width - 120) at = 24, line += 46;
    sheet.rect(at, line - 11, 14, 14, look.fill);
    sheet.text(at + 20, line, format("%s: %.1f %%", look.name, 100 * share), "start", colour::ink, 12, true);
    sheet.text(at + 20, line + 16, look.what, "start", colour::faint, 11);
    at += 280;
  }
  sheet.text(24, bottom + 136,
             "Numbers are tiles. Per cent: of the cycles of all warps of the launch. The stamps themselves slow the "
             "kernel a little.",
             "start", colour::faint, 12);
  return sheet;
}

}  // namespace tessera::pictures
