// SPDX-License-Identifier: Apache-2.0
// The butterfly reduction, step by step: maximum and sum of one real row of scores over the eight lanes that share it
// in `tiled`, exchanged by the kernels' own functions. See pictures.hpp.
#include <algorithm>

#include "cases/ancestor_b.hpp"
#include "tools/pictures/device_code.hpp"
#include "tools/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

constexpr int count = 8, keys = 32;  // lanes of a row, and keys of a tile: ladder/rungs/tiled.cpp
constexpr std::int64_t row = 0;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// What the lanes hold before the first exchange and after each.
using Values = std::vector<std::vector<float>>;

// As many threads of the host as lanes call the kernels' function together.
template <class Reduce>
Values exchange(const std::vector<float>& own, Reduce reduce) {
  Lanes all(count);
  std::vector<float> results(own.size());
  {
    std::vector<std::jthread> threads;
    for (int lane = 0; lane < count; ++lane)
      threads.emplace_back([&, lane] {
        threadIdx.x = static_cast<unsigned>(lane), lanes = &all;
        float x[1] = {own[at(lane)]};
        reduce(x);
        results[at(lane)] = x[0];
      });
  }
  for (const float result : results)
    if (std::bit_cast<unsigned>(result) != std::bit_cast<unsigned>(results[0]))
      throw std::runtime_error("butterfly: the lanes do not end with the same bits");
  all.offered.push_back(results);
  return all.offered;
}

// Scores of the first tile of ancestor B's problem, in units of log2(e), as the kernels have them.
std::vector<float> scores() {
  const cases::AncestorB b = cases::ancestor_b();
  constexpr std::int64_t D = cases::AncestorB::D;
  std::vector<float> S(keys);
  for (std::int64_t j = 0; j < keys; ++j)
    for (std::int64_t d = 0; d < D; ++d)
      S[at(j)] += b.Q[at(row * D + d)] / std::sqrt(float(D)) * log2e<float> * b.K[at(j * D + d)];
  return S;
}

constexpr double left = 170, step_width = 92, level = 74;

double lane_x(int lane) { return left + lane * step_width; }

// One reduction: a row of boxes per level, and the exchanges between them.
void draw(Sheet& sheet, double top, const Values& values, const char* what, const char* fill) {
  for (std::size_t s = 0; s < values.size(); ++s) {
    const double y = top + double(s) * level;
    const int distance = count >> s;  // of the exchange that led here
    if (s > 0)
      for (int lane = 0; lane < count; ++lane) {
        const double from = y - level + 26;
        sheet.line({lane_x(lane ^ distance) + 36, from}, {lane_x(lane) + 36, y - 1},
                   lane & distance ? colour::orange : colour::green, 1.3);
        sheet.line({lane_x(lane) + 36, from}, {lane_x(lane) + 36, y - 1}, colour::grid, 1.3);
      }
    for (int lane = 0; lane < count; ++lane) {
      const bool last = s + 1 == values.size();
      sheet.rect(lane_x(lane), y, 72, 26, last ? fill : "#ffffff", fill, 1.2);
      sheet.text(lane_x(lane) + 36, y + 17, format("%.5f", double(values[s][at(lane)])), "middle",
                 last ? "#ffffff" : colour::ink, 12, last);
    }
    const std::string words = s == 0 ? std::string("own ") + what : format("xor %d", distance);
    sheet.text(left - 16, y + 12, words, "end", colour::ink, 13, true);
    sheet.text(left - 16, y + 27,
               s == 0                   ? format("of %d keys", keys / count)
               : s + 1 == values.size() ? "all lanes alike"
                                        : format("groups of %d", 1 << s),
               "end", colour::faint, 11);
  }
}

}  // namespace

Sheet butterfly() {
  const std::vector<float> S = scores();
  std::vector<float> tops(count, minus_infinity<float>), sums(count, 0.0f);
  for (int j = 0; j < keys; ++j) tops[at(j % count)] = std::max(tops[at(j % count)], S[at(j)]);
  const Values max = exchange(tops, [](float(&x)[1]) { gpu::max_over_lanes<count>(x); });
  for (int j = 0; j < keys; ++j) sums[at(j % count)] += std::exp2(S[at(j)] - max.back()[0]);
  const Values sum = exchange(sums, [](float(&x)[1]) { gpu::sum_over_lanes<count>(x); });
  if (max.back()[0] != *std::max_element(S.begin(), S.end()))
    throw std::runtime_error("butterfly: this is not the maximum");

  const double first = 92, second = first + double(max.size()) * level + 26;
  Sheet sheet(lane_x(count) + 20, second + double(sum.size()) * level + 28, "The butterfly reduction");
  sheet.text(24, 32, "Row 0 of ancestor B's problem, its first tile of 32 keys, in the eight lanes that share it",
             "start", colour::ink, 14, true);
  sheet.text(24, 52, "Lane n has keys n, n + 8, n + 16, n + 24. Scores are in units of log2(e).", "start",
             colour::faint, 12);
  for (int lane = 0; lane < count; ++lane)
    sheet.text(lane_x(lane) + 36, first - 12, format("lane %d", lane), "middle", colour::faint, 12);
  draw(sheet, first, max, "maximum", colour::blue);
  sheet.text(24, second - 20, format("then P = 2^(S - %.5f), and the sum of each lane's P:", double(max.back()[0])),
             "start", colour::ink, 14, true);
  draw(sheet, second, sum, "sum", colour::violet);
  sheet.text(24, second + double(sum.size()) * level - 14,
             format("Three exchanges instead of seven additions one after another. Lanes n and n xor d add the same "
                    "two numbers: the same bits, %.5f.",
                    double(sum.back()[0])),
             "start", colour::ink, 12);
  sheet.text(
      24, second + double(sum.size()) * level + 6,
      "`vector` reduces over 4 lanes (tensor cores) or 16 (FMA), `warp` and `delta` over all 32, in the same way.",
      "start", colour::faint, 12);
  return sheet;
}

}  // namespace tessera::pictures
