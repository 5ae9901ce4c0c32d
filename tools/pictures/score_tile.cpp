// SPDX-License-Identifier: Apache-2.0
// The transposed tile of scores: queries along lanes, keys along rows, and the register block that fills it.
// See pictures.hpp. Sizes are those of cpu/tiles.hpp and, for AVX-512, of cpu/kernel/product.hpp.
#include "cpu/tiles.hpp"
#include "tools/pictures/pictures.hpp"

namespace tessera::pictures {

Sheet score_tile() {
  constexpr Int64 lanes = 16, vectors = 4, block_rows = 6;  // one 512-bit register; the register block
  static_assert(cpu::block_q == lanes * vectors && cpu::block_k % block_rows == 0);
  const double cell = 5, row = 2, depth = 90, top = 160, left = 190;
  const double w = double(cpu::block_q) * cell, h = double(cpu::block_k) * row;
  Sheet sheet(900, top + h + 150, "The transposed tile of scores");

  // Q transposed, above: the operand whose columns fill the lanes.
  sheet.rect(left, top - depth - 26, w, depth, colour::light);
  sheet.text(left + w / 2, top - depth - 4, "Q^T   [D][64]", "middle");
  sheet.text(left + w / 2, top - 40, "times scale * log2(e), loaded once", "middle", colour::ink, 12);
  // K, to the left: rows in place.
  sheet.rect(left - depth - 26, top, depth, h, colour::light);
  sheet.text(left - depth / 2 - 26, top + h / 2, "K   [192][D]", "middle");
  sheet.text(left - depth / 2 - 26, top + h / 2 + 18, "as it lies", "middle", colour::ink, 12);

  // The tile, vector by vector.
  sheet.rect(left, top, w, h, colour::empty);
  for (Int64 n = 0; n <= vectors; ++n)
    sheet.line({left + double(n * lanes) * cell, top}, {left + double(n * lanes) * cell, top + h}, colour::grid);
  for (Int64 j = 0; j <= cpu::block_k; j += block_rows)
    sheet.line({left, top + double(j) * row}, {left + w, top + double(j) * row}, colour::grid, 0.5);
  sheet.text(left + w / 2, top + h / 2 + 40, "S^T   [192 keys][64 queries]", "middle", colour::ink, 14, true);

  // One register block and its operands.
  const double y = top + 10 * double(block_rows) * row, block_height = double(block_rows) * row;
  for (Int64 n = 0; n < vectors; ++n)
    sheet.rect(left + double(n * lanes) * cell + 1, y, double(lanes) * cell - 2, block_height, colour::orange);
  sheet.rect(left - depth - 26, y, depth, block_height, colour::blue);
  const double step = top - depth - 26 + 44;
  sheet.rect(left, step, w, 4, colour::blue);
  sheet.arrow({left - 26, y + block_height / 2}, {left - 3, y + block_height / 2}, colour::blue);
  sheet.arrow({left + w / 2, top - 24}, {left + w / 2, top - 3}, colour::blue);

  // What belongs to a query, below.
  const double below = top + h + 24;
  for (const auto& [n, name] : {std::pair{0, "m"}, {1, "l"}, {2, "alpha"}}) {
    sheet.rect(left, below + n * 24, w, 16, n == 0 ? colour::orange : n == 1 ? colour::blue : colour::light);
    sheet.text(left - 12, below + n * 24 + 13, name, "end", colour::ink, 13);
  }
  // One lane from top to bottom.
  const double lane = left + 21 * cell;
  sheet.rect(lane, top, cell, h, "none", colour::red, 1.5);
  sheet.rect(lane, below, cell, 64, "none", colour::red, 1.5);
  sheet.text(lane + cell / 2, below + 84, "query 21 owns lane 21", "middle", colour::red);

  const double x = left + w + 34;
  const auto say = [&](double at, const std::string& words, const char* fill = colour::ink, bool bold = false) {
    sheet.text(x, at, words, "start", fill, 13, bold);
  };
  say(top - 92, "One step of the product", colour::blue, true);
  say(top - 74, "loads 4 vectors of one row of Q^T and");
  say(top - 56, "broadcasts 6 numbers of K, one per key:");
  say(top - 38, "24 multiply-adds for 10 loads.");
  say(y - 8, "Register block", colour::orange, true);
  say(y + 10, "6 keys x 4 vectors of 16 queries = 24 sums,");
  say(y + 28, "in 24 of the 32 registers. AVX2 and SSE4:");
  say(y + 46, "6 x 2 vectors, in 12 of 16 registers.");
  say(top + h - 110, "A query's maximum and sum", colour::red, true);
  say(top + h - 92, "run down its lane: no reduction across lanes,");
  say(top + h - 74, "no shuffle, and 64 rows of softmax at once.");
  say(below + 13, "one number per lane");
  say(below + 37, "P = 2^(S - m) replaces S in place,");
  say(below + 55, "and is the operand of O^T += V^T P^T.");
  return sheet;
}

}  // namespace tessera::pictures
