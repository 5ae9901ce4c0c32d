// SPDX-License-Identifier: Apache-2.0
// Which banks of shared memory the 16-byte loads of TensorProduct touch, recorded from the product's own text; beside
// them, what the same load would do with the rows in plain order. See pictures.hpp.
#include <algorithm>

#include "tools/pictures/drawn_tile.hpp"
#include "tools/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

using namespace ladder;

constexpr int warp = 32, banks = 32, phase_lanes = 8;  // a warp's 16-byte load is served eight lanes at a time
constexpr double cell = 17, left = 132, block_height = 24;

using Product64 = Product<drawn_tile>;
using Shared = VectorForwardShared<drawn_tile>;

// Where in its tile each lane's load begins.
struct Load {
  std::string title;
  int pitch;
  std::vector<int> places;  // row * pitch + column
  int row(int lane) const { return places[static_cast<std::size_t>(lane)] / pitch; }
  int column(int lane) const { return places[static_cast<std::size_t>(lane)] % pitch; }
  int bank(int lane) const { return places[static_cast<std::size_t>(lane)] % banks; }
};

template <int rows, int pitch>
void add_place(Load& load, const std::vector<Access>& recorded, const float (&tile)[rows][pitch], bool stores) {
  load.pitch = pitch;
  for (const Access& access : inside(recorded, tile))
    if (access.store == stores) {
      load.places.push_back(int(static_cast<const float*>(access.address) - &tile[0][0]));
      return;
    }
  throw std::runtime_error("shared_banks: " + load.title + " is not read");
}

// The first load of each operand, by every lane of warp 0.
std::vector<Load> recorded_loads() {
  static Shared shared{};
  Load Q{"Q", 0, {}}, P{"P", 0, {}}, K{"Q and K in S = Q K^T, P in O = P V", 0, {}}, V{"V in O = P V", 0, {}};
  for (int lane = 0; lane < warp; ++lane) {
    threadIdx.x = static_cast<unsigned>(lane);
    const Product64 product;
    static float S[Product64::rows][Product64::cols], O[Product64::rows][outs_of<drawn_tile>(drawn_tile.Dv)];
    const float alpha[Product64::rows] = {};
    std::vector<Access> recorded;
    accesses = &recorded;
    product.over_dims<drawn_tile.D, Element::f32, Element::f32>(shared.Q, shared.K[0], S);
    product.over_columns<Element::f32>(S, shared.P, shared.V[0], alpha, O);
    accesses = nullptr;
    add_place(Q, recorded, shared.Q, false), add_place(K, recorded, shared.K[0], false);
    add_place(P, recorded, shared.P, false), add_place(V, recorded, shared.V[0], false);
  }
  for (const Load* row : {&Q, &P})
    if (row->pitch != K.pitch || row->places != K.places)
      throw std::runtime_error("shared_banks: " + row->title + " is not read like K");
  return {K, V};
}

// The load of K if lanes took rows in their own order; and on top of that without the 4 numbers between rows.
std::vector<Load> other_loads(const Load& K) {
  Load plain{"K, if lane 4 g + t took row g", K.pitch, {}}, dense{"... and rows without a gap", K.pitch - 4, {}};
  for (int lane = 0; lane < warp; ++lane) {
    plain.places.push_back(lane / 4 * plain.pitch + 4 * (lane % 4));
    dense.places.push_back(lane / 4 * dense.pitch + 4 * (lane % 4));
  }
  return {plain, dense};
}

// The lanes of a phase in rows, one above the other where they need the same banks.
std::vector<std::vector<int>> layers(const Load& load, int phase) {
  std::vector<std::vector<int>> all;
  for (int lane = phase * phase_lanes; lane < (phase + 1) * phase_lanes; ++lane) {
    const auto meets = [&](const std::vector<int>& layer) {
      return std::any_of(layer.begin(), layer.end(), [&](int other) { return load.bank(other) == load.bank(lane); });
    };
    auto free = std::find_if_not(all.begin(), all.end(), meets);
    if (free == all.end()) free = all.insert(all.end(), std::vector<int>{});
    free->push_back(lane);
  }
  return all;
}

// Draws the first `phases` of a load; returns the height. `clean`: conflicts are an error.
double draw(Sheet& sheet, const Load& load, double y, int phases, bool clean) {
  const char* fills[] = {colour::blue, colour::green};
  sheet.text(24, y, load.title, "start", colour::ink, 13, true);
  double at = y + 10;
  std::size_t worst = 0;
  for (int phase = 0; phase < phases; ++phase) {
    const auto all = layers(load, phase);
    worst = std::max(worst, all.size());
    const double height = double(all.size()) * block_height;
    sheet.rect(left, at, banks * cell, height, colour::empty);
    sheet.text(left - 10, at + height / 2 + 4,
               format("lanes %d-%d", phase * phase_lanes, (phase + 1) * phase_lanes - 1), "end", colour::faint, 11);
    for (std::size_t n = 0; n < all.size(); ++n)
      for (const int lane : all[n]) {
        const double x = left + load.bank(lane) * cell, top = at + double(n) * block_height;
        sheet.rect(x + 1, top + 1, 4 * cell - 2, block_height - 2, n > 0 ? colour::red : fills[lane / 4 % 2]);
        sheet.text(x + 2 * cell, top + 16, format("%d: [%d][%d]", lane, load.row(lane), load.column(lane)), "middle",
                   "#ffffff", 10);
      }
    at += height + 4;
  }
  if (clean && worst != 1) throw std::runtime_error("shared_banks: " + load.title + " has conflicts");
  const double x = left + banks * cell + 16;
  sheet.text(x, y + 26, worst == 1 ? "no conflict:" : format("%zu at a time", worst), "start",
             worst == 1 ? colour::green : colour::red, 12, true);
  sheet.text(x, y + 43, worst == 1 ? "each bank once" : "in one bank", "start",
             worst == 1 ? colour::green : colour::red, 12);
  return at - y;
}

}  // namespace

Sheet shared_banks() {
  check_drawn_tile();
  const std::vector<Load> real = recorded_loads();
  Sheet sheet(left + banks * cell + 150, 580, "Banks of shared memory");
  sheet.text(24, 30, "16-byte loads of one warp from shared memory: lane: [row][column] of the tile, over the 32 banks",
             "start", colour::ink, 14, true);
  for (int bank = 0; bank < banks; bank += 4)
    sheet.text(left + (bank + 2) * cell, 54, format("banks %d-%d", bank, bank + 3), "middle", colour::faint, 10);
  double y = 78;
  for (const Load& load : real) y += draw(sheet, load, y, 4, true) + 22;
  sheet.text(24, y + 4, "What the order of rows and the gap between them are for (first eight lanes)", "start",
             colour::ink, 14, true);
  y += 30;
  for (const Load& load : other_loads(real[0])) y += draw(sheet, load, y, 1, false) + 22;
  return sheet;
}

}  // namespace tessera::pictures
