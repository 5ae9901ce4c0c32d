// SPDX-License-Identifier: Apache-2.0
// Full, partial and empty tiles of three masks, as src/math/mask.hpp classifies them. See pictures.hpp.
#include "cpu/tiles.hpp"
#include "math/mask.hpp"
#include "tools/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

constexpr Int64 rows = 768, keys = 1152;
constexpr double unit = 0.25;  // of a picture's length per query or key

struct Panel {
  std::string title, caption;
  BandMask mask;
};

// The visible part of a partial tile, in cells of 8 x 8 pairs: a cell is drawn if most of it is visible.
void draw_visible(Sheet& sheet, const BandMask& mask, Range queries, Range tile, double x, double y) {
  constexpr Int64 cell = 8;
  for (Int64 i = queries.begin; i < queries.end; i += cell)
    for (Int64 j = tile.begin; j < tile.end; j += cell) {
      if (!mask.visible(i + cell / 2, j + cell / 2)) continue;
      Int64 end = j;
      while (end < tile.end && mask.visible(i + cell / 2, end + cell / 2)) end += cell;
      sheet.rect(x + double(j) * unit, y + double(i) * unit, double(end - j) * unit, double(cell) * unit,
                 colour::light);
      j = end;
    }
}

void draw(Sheet& sheet, const Panel& panel, double x, double y) {
  int count[3] = {};
  const double w = double(keys) * unit, h = double(rows) * unit;
  sheet.text(x + w / 2, y - 30, panel.title, "middle", colour::ink, 14, true);
  sheet.text(x + w / 2, y - 12, panel.caption, "middle", colour::faint, 12);
  for (Int64 i = 0; i < rows; i += cpu::block_q)
    for (Int64 j = 0; j < keys; j += cpu::block_k) {
      const Range queries{i, i + cpu::block_q}, tile{j, j + cpu::block_k};
      const TileClass what = tile_class(panel.mask, queries, tile);
      ++count[static_cast<int>(what)];
      sheet.rect(x + double(j) * unit, y + double(i) * unit, double(cpu::block_k) * unit, double(cpu::block_q) * unit,
                 what == TileClass::full ? colour::blue : colour::empty);
      if (what == TileClass::partial) draw_visible(sheet, panel.mask, queries, tile, x, y);
    }
  for (Int64 i = 0; i <= rows; i += cpu::block_q)
    sheet.line({x, y + double(i) * unit}, {x + w, y + double(i) * unit}, "#ffffff", 1);
  for (Int64 j = 0; j <= keys; j += cpu::block_k)
    sheet.line({x + double(j) * unit, y}, {x + double(j) * unit, y + h}, "#ffffff", 1);
  sheet.text(x + w / 2, y + h + 20, format("%d full, %d partial, %d empty tiles", count[2], count[1], count[0]),
             "middle");
}

}  // namespace

Sheet mask_tiles() {
  const Int64 off = keys - rows;
  const Panel panels[] = {
      {"causal, bottom right", format("off = Nk - Nq = %lld; %lld keys, %lld to a tile", off, keys, cpu::block_k),
       band_mask(rows, keys, true, -1, -1, off, 0, 0)},
      {"causal, top left", "off = 0", band_mask(rows, keys, true, -1, -1, 0, 0, 0)},
      {"window (256, 128), bottom right", format("off = %lld", off),
       band_mask(rows, keys, false, 256, 128, off, 0, 0)}};
  const double w = double(keys) * unit, h = double(rows) * unit, gap = 36, left = 44, top = 64;
  Sheet sheet(left + 3 * w + 2 * gap + 20, top + h + 70, "Full, partial and empty tiles of three masks");
  for (int n = 0; n < 3; ++n) draw(sheet, panels[n], left + n * (w + gap), top);
  sheet.vertical_text(24, top + h / 2, format("%lld queries, %lld to a tile", rows, cpu::block_q), colour::faint);
  const double y = top + h + 48;
  double x = left;
  for (const auto& [fill, words] : {std::pair{colour::blue, "full: every pair visible, no masking"},
                                    {colour::light, "visible pairs of a partial tile"},
                                    {colour::empty, "not visible; empty tiles are never visited"}}) {
    sheet.rect(x, y - 11, 14, 14, fill, colour::grid);
    sheet.text(x + 20, y, words);
    x += 300;
  }
  return sheet;
}

}  // namespace tessera::pictures
