// SPDX-License-Identifier: Apache-2.0
// Key groups of the backward pass and their images of dQ, for a causal problem. See pictures.hpp.
#include "cpu/tiles.hpp"
#include "math/mask.hpp"
#include "tools/pictures/pictures.hpp"

namespace tessera::pictures {

using namespace cpu;

Sheet backward_groups() {
  constexpr Int64 N = 1536;
  const BandMask mask = band_mask(N, N, true, -1, -1, 0, 0, 0);
  const Int64 groups = key_groups(N);
  const char* fills[] = {colour::blue, colour::green, colour::orange, colour::violet};
  const double unit = 0.22, left = 84, top = 74, side = double(N) * unit, row_height = double(block_q) * unit;
  Sheet sheet(980, top + side + 100, "Key groups of the backward pass and their images of dQ");

  // The matrix of tiles, coloured by the group that computes them.
  sheet.text(left + side / 2, top - 40, "tiles of S, P, dP, dS", "middle", colour::ink, 14, true);
  for (Int64 g = 0; g < groups; ++g) {
    const Int64 first = group_begin(N, groups, g), last = group_begin(N, groups, g + 1);
    const double x = left + double(first * block_k) * unit, w = double((last - first) * block_k) * unit;
    sheet.text(x + w / 2, top - 12, format("group %lld", g), "middle", fills[g], 13, true);
    for (Int64 k = first; k < last; ++k)
      for (Int64 q = 0; q < query_blocks(N); ++q) {
        const Range queries{q * block_q, (q + 1) * block_q}, keys{k * block_k, (k + 1) * block_k};
        const bool empty = tile_class(mask, queries, keys) == TileClass::empty;
        sheet.rect(left + double(keys.begin) * unit, top + double(q) * row_height, double(block_k) * unit, row_height,
                   empty ? colour::empty : fills[g], "#ffffff");
      }
    // dK and dV below, one owner each.
    sheet.rect(x + 1, top + side + 14, w - 2, 22, fills[g]);
    sheet.text(x + w / 2, top + side + 30, "dK, dV", "middle", "#ffffff", 12);
  }
  sheet.vertical_text(left - 24, top + side / 2, format("%lld queries, %lld to a block", N, block_q), colour::faint);
  sheet.text(left + side / 2, top + side + 58,
             format("%lld keys, %lld to a block; a group takes its blocks in order,", N, block_k), "middle",
             colour::faint);
  sheet.text(left + side / 2, top + side + 76, "and for each block the queries that see it", "middle", colour::faint);

  // The images of dQ: a column of query blocks per group.
  const double images = left + side + 84, image = 56, gap = 22;
  sheet.text(images + (double(groups) * (image + gap) - gap) / 2, top - 40, "images of dQ", "middle", colour::ink, 14,
             true);
  for (Int64 g = 0; g < groups; ++g) {
    const Range keys{group_begin(N, groups, g) * block_k, group_begin(N, groups, g + 1) * block_k};
    const Range seen = visible_queries(mask, keys);
    const double x = images + double(g) * (image + gap);
    sheet.text(x + image / 2, top - 12, format("of group %lld", g), "middle", fills[g], 12, true);
    for (Int64 q = 0; q < query_blocks(N); ++q) {
      const bool written = q * block_q < seen.end && (q + 1) * block_q > seen.begin;
      sheet.rect(x, top + double(q) * row_height, image, row_height, written ? fills[g] : colour::empty, "#ffffff");
    }
    if (g + 1 < groups) sheet.text(x + image + gap / 2, top + side / 2, "+", "middle", colour::ink, 16, true);
  }
  const double sum = images + double(groups) * (image + gap) + 20;
  sheet.arrow({sum - 34, top + side / 2 - 5}, {sum - 8, top + side / 2 - 5}, colour::ink);
  sheet.rect(sum, top, image, side, colour::ink);
  sheet.text(sum + image / 2, top - 12, "dQ", "middle", colour::ink, 13, true);
  sheet.text(images, top + side + 30, "A group's tasks add to a block of its image in turn. The last step adds",
             "start", colour::faint);
  sheet.text(images, top + side + 48, "a block's images in the order of the groups, multiplies by", "start",
             colour::faint);
  sheet.text(images, top + side + 66, "the scale and rounds once. Grey: never written or read.", "start",
             colour::faint);
  return sheet;
}

}  // namespace tessera::pictures
