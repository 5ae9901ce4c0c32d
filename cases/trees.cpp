// SPDX-License-Identifier: Apache-2.0
// Trees of draft tokens and positions: their bits and numbers. Part of tessera_cases; see case.hpp. Implements
// docs/algorithm.md, "Mask", as data.
#include <algorithm>

#include "cases/case.hpp"
#include "cases/generator.hpp"

namespace tessera::cases {

namespace {

// The query that a query follows; -1: none, it follows the keys before the tree.
std::int64_t parent_of(Tree tree, std::int64_t i, Generator& random) {
  if (tree == Tree::chain) return i - 1;
  if (tree == Tree::star) return i == 0 ? -1 : 0;
  return random.between(-1, i - 1);
}

Buffer rows_of(const CaseData& data, std::int64_t words) {
  const Case& c = data.spec;
  Shape shape = c.packed() ? Shape{c.tokens_q()} : Shape{c.B, c.Nq};
  if (words > 0) shape.push_back(words);
  const Layout layout =
      c.style == Style::contiguous ? Layout{} : Layout{.gap = 2, .step = 3, .shift = 1, .nonsense = true};
  return {Type::i32, shape, layout};
}

}  // namespace

void build_trees(CaseData& data) {
  const Case& c = data.spec;
  std::int64_t longest = 0;
  for (const Sequence& s : data.sequences) longest = std::max(longest, s.Nq);
  const std::int64_t words = longest / 32 + 1;  // often a word more than any row needs, whose bits are set
  if (c.tree != Tree::none) data.tree_mask = rows_of(data, words);
  if (c.positions) data.positions = rows_of(data, 0);
  if (c.tree == Tree::none && !c.positions) return;
  Generator random(c.seed, 50);
  for (const Sequence& s : data.sequences) {
    std::vector<std::vector<bool>> sees(static_cast<std::size_t>(s.Nq));
    std::vector<std::int64_t> depth(sees.size());
    for (std::int64_t i = 0; i < s.Nq; ++i) {
      const auto n = static_cast<std::size_t>(i);
      const std::int64_t parent = parent_of(c.tree, i, random);
      sees[n].assign(sees.size(), false);
      if (parent >= 0) sees[n] = sees[static_cast<std::size_t>(parent)];
      depth[n] = parent >= 0 ? depth[static_cast<std::size_t>(parent)] + 1 : 0;
      sees[n][n] = c.tree != Tree::blind || i % 3 != 1;  // blind: some do not even see themselves
      if (c.positions) data.positions.set(s.row_q + i, static_cast<double>(s.Nk - s.Nq + depth[n]));
      for (std::int64_t w = 0; w < words && c.tree != Tree::none; ++w) {
        std::uint32_t word = 0;
        for (std::int64_t t = w * 32; t < w * 32 + 32; ++t)
          if (t >= s.Nq || sees[n][static_cast<std::size_t>(t)]) word |= 1U << (t % 32);
        data.tree_mask.set((s.row_q + i) * words + w, static_cast<std::int32_t>(word));
      }
    }
  }
}

}  // namespace tessera::cases
