// SPDX-License-Identifier: Apache-2.0
// Which thread block of `vector` owns which part of the score matrix, in which order they start, which tiles they skip
// and which they mask: a causal problem, asked of the planner and of the kernels' own functions. See pictures.hpp.
#include <algorithm>

#include "tools/pictures/device_code.hpp"
#include "tools/pictures/pictures.hpp"
#include "tools/pictures/plans.hpp"

namespace tessera::pictures {
namespace {

using namespace ladder;

constexpr double unit = 0.3;  // of a picture's length per query or key
constexpr double top = 96;

// What one block does, as the kernels work it out.
struct Block {
  unsigned number;  // blockIdx.x
  Int32 head;
  Range rows;  // queries, or keys
  struct Tile {
    Range columns;
    bool masked;
  };
  std::vector<Tile> tiles;

  long masked() const {
    return std::count_if(tiles.begin(), tiles.end(), [](const Tile& tile) { return tile.masked; });
  }
};

std::vector<Block> blocks_of(const Step& step, const Question& x, bool owns_queries) {
  const int block_rows = setting_of(step, "block_rows"), block_cols = setting_of(step, "block_cols");
  std::vector<Block> all;
  gridDim.x = static_cast<unsigned>(step.blocks);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    QueryPlace place;
    const bool used = owns_queries ? query_place(x, block_rows, place) : key_place(x, block_rows, place);
    if (!used) continue;
    const DeviceSequence& s = place.s;
    const Range rows{place.first, lesser(place.first + block_rows, owns_queries ? s.nq : s.nk)};
    Block block{blockIdx.x, place.h, rows, {}};
    const Range seen = owns_queries ? visible_keys(s.mask, rows) : visible_queries(s.mask, rows);
    for (Int64 n = seen.begin / block_cols; !seen.empty() && n < ceil_div(seen.end, block_cols); ++n) {
      const Range columns{n * block_cols, (n + 1) * block_cols};
      const ScoreTile tile(s, owns_queries ? rows.begin : columns.begin, owns_queries ? block_rows : block_cols,
                           owns_queries ? columns.begin : rows.begin, owns_queries ? block_cols : block_rows);
      block.tiles.push_back({columns, TileBand(s.mask, tile, block_rows, block_cols, !owns_queries).cuts});
    }
    all.push_back(block);
  }
  return all;
}

// The visible part of a masked tile, in strips of a few queries.
void draw_visible(Sheet& sheet, const BandMask& mask, Range queries, Range keys, double left) {
  constexpr Int64 strip = 8;
  for (Int64 i = queries.begin; i < queries.end; i += strip) {
    const Range seen = visible_keys(mask, {i + strip / 2, i + strip / 2 + 1});
    const Int64 begin = std::max(seen.begin, keys.begin), end = std::min(seen.end, keys.end);
    if (begin < end)
      sheet.rect(left + double(begin) * unit, top + double(i) * unit, double(end - begin) * unit, double(strip) * unit,
                 colour::light);
  }
}

// The matrix of one head.
void draw_matrix(Sheet& sheet, const Problem& p, const Step& step, const std::vector<Block>& blocks, bool owns_queries,
                 double left) {
  const double side = double(p.Nq) * unit;
  const BandMask mask = sequence_of(question_of(p), 0).mask;
  sheet.rect(left, top, side, side, colour::empty);
  int full = 0, masked = 0;
  for (const Block& block : blocks) {
    if (block.head != 0) continue;
    for (const Block::Tile& tile : block.tiles) {
      const Range queries = owns_queries ? block.rows : tile.columns, keys = owns_queries ? tile.columns : block.rows;
      ++(tile.masked ? masked : full);
      if (tile.masked) draw_visible(sheet, mask, queries, keys, left);
      sheet.rect(left + double(keys.begin) * unit, top + double(queries.begin) * unit, double(keys.size()) * unit,
                 double(queries.size()) * unit, tile.masked ? "none" : colour::blue,
                 tile.masked ? colour::orange : "#ffffff");
    }
  }
  // The blocks' borders and numbers: the darker, the earlier.
  for (const Block& block : blocks) {
    if (block.head != 0) continue;
    const double from = double(block.rows.begin) * unit, size = double(block.rows.size()) * unit;
    const char* fill = block.number < gridDim.x / 3       ? colour::violet
                       : block.number < gridDim.x * 2 / 3 ? "#a08bc2"
                                                          : "#cdc2df";
    const std::string number = format("%u", block.number);
    if (owns_queries) {
      sheet.line({left, top + from}, {left + side, top + from}, colour::ink, 1.2);
      sheet.rect(left - 30, top + from + 1, 26, size - 2, fill);
      sheet.text(left - 17, top + from + size / 2 + 4, number, "middle",
                 block.number < gridDim.x * 2 / 3 ? "#ffffff" : colour::ink, 12, true);
    } else {
      sheet.line({left + from, top}, {left + from, top + side}, colour::ink, 1.2);
      sheet.rect(left + from + 1, top - 24, size - 2, 20, fill);
      sheet.text(left + from + size / 2, top - 10, number, "middle",
                 block.number < gridDim.x * 2 / 3 ? "#ffffff" : colour::ink, 10, true);
    }
  }
  sheet.rect(left, top, side, side, "none", colour::ink, 1.2);
  const int block_rows = setting_of(step, "block_rows"), block_cols = setting_of(step, "block_cols");
  const Int64 tiles = ceil_div(p.Nq, block_rows) * ceil_div(p.Nk, block_cols);
  const double x = left + side / 2;
  sheet.text(x, top - 64, step.name, "middle", colour::ink, 14, true);
  sheet.text(x, top - 46,
             owns_queries ? format("a block owns %d queries, %d keys pass at a time", block_rows, block_cols)
                          : format("a block owns %d keys, %d queries pass at a time", block_rows, block_cols),
             "middle", colour::faint, 12);
  sheet.text(x, top + side + 20, format("%lld keys", p.Nk), "middle", colour::faint, 12);
  sheet.text(x, top + side + 42, format("%d full, %d masked, %lld skipped tiles", full, masked, tiles - full - masked),
             "middle");
  sheet.text(x, top + side + 60,
             owns_queries ? "the last queries, which see the most keys, start first"
                          : "the first keys, which the most queries see, start first",
             "middle", colour::violet, 12);
}

// How much the blocks of both heads have to do, in the order of their launch.
void draw_work(Sheet& sheet, const std::vector<Block>& blocks, double left, double width, double height) {
  const double step = width / double(blocks.size());
  std::size_t most = 1;
  for (const Block& block : blocks) most = std::max(most, block.tiles.size());
  const double tile = height / double(most);
  sheet.text(left + width / 2, top - 64, "vector_forward: tiles of each block", "middle", colour::ink, 14, true);
  sheet.text(left + width / 2, top - 46, "in the order of launch, both heads", "middle", colour::faint, 12);
  for (std::size_t n = 0; n < blocks.size(); ++n) {
    const Block& block = blocks[n];
    const double x = left + double(n) * step, masked = double(block.masked()) * tile;
    const double all = double(block.tiles.size()) * tile;
    sheet.rect(x + 1, top + height - all, step - 2, all - masked, colour::blue);
    sheet.rect(x + 1, top + height - masked, step - 2, masked, colour::light, colour::orange);
    sheet.text(x + step / 2, top + height - all - 5, format("%zu", block.tiles.size()), "middle", colour::ink, 10);
    sheet.text(x + step / 2, top + height + 14, format("%u", block.number), "middle", colour::violet, 10, true);
    sheet.text(x + step / 2, top + height + 28, format("h%d", block.head), "middle", colour::faint, 10);
  }
}

}  // namespace

Sheet thread_blocks() {
  const Problem forward = drawn_problem(Pass::forward), backward = drawn_problem(Pass::backward);
  const Step queries = step_of(steps_of("vector", forward), "vector_forward");
  const Step keys = step_of(steps_of("vector", backward), "vector_backward_keys");
  const double side = double(forward.Nq) * unit, left = 74, gap = 56, work = 290;
  Sheet sheet(left + 2 * side + work + 2 * gap + 24, top + side + 116, "Thread blocks over the score matrix");
  sheet.vertical_text(left - 44, top + side / 2, format("%lld queries, causal", forward.Nq), colour::faint);

  const std::vector<Block> by_queries = blocks_of(queries, question_of(forward), true);
  draw_matrix(sheet, forward, queries, by_queries, true, left);
  draw_work(sheet, by_queries, left + 2 * (side + gap), work, side);
  draw_matrix(sheet, backward, keys, blocks_of(keys, question_of(backward), false), false, left + side + gap);

  const double y = top + side + 94;
  double x = left - 30;
  const auto key = [&](const char* fill, const char* stroke, const std::string& words, double width) {
    sheet.rect(x, y - 11, 14, 14, fill, stroke);
    sheet.text(x + 20, y, words, "start", colour::ink, 12);
    x += width;
  };
  key(colour::violet, "none", "blockIdx of head 0; head 1 has the numbers between", 372);
  key(colour::blue, "none", "full tile: no masking", 186);
  key(colour::light, colour::orange, "edge tile: masked element by element", 290);
  key(colour::empty, colour::grid, "skipped: never loaded", 0);
  return sheet;
}

}  // namespace tessera::pictures
