// SPDX-License-Identifier: Apache-2.0
// A case cut into parts: ranges of its queries and keys, each a call of its own that knows its place. Included by the
// tests of parts. Implements docs/algorithm.md, "Parts of a problem".
#pragma once

#include <algorithm>
#include <vector>

#include "cases/generator.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {

struct Piece {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

// [0, length) cut at these places.
inline std::vector<Piece> pieces_of(std::int64_t length, const std::vector<std::int64_t>& cuts) {
  std::vector<Piece> out;
  std::int64_t begin = 0;
  for (const std::int64_t cut : cuts) out.push_back({begin, std::min(cut, length)}), begin = out.back().end;
  out.push_back({begin, length});
  return out;
}

// The multiples of a tile inside (0, length), each with this probability.
inline std::vector<std::int64_t> some_cuts(std::int64_t length, std::int64_t tile, double share, Generator& g) {
  std::vector<std::int64_t> cuts;
  for (std::int64_t at = tile; at < length; at += tile)
    if (g.chance(share)) cuts.push_back(at);
  return cuts;
}

// Elements [begin, end) of a dimension; a dimension of size 1 that stands for all stays as it is.
inline Tensor slice(Tensor t, int dimension, Piece piece) {
  const auto d = static_cast<std::size_t>(dimension);
  if (!t || t.shape[d] == 1) return t;
  t.data =
      static_cast<std::byte*>(t.data) + piece.begin * t.strides[d] * static_cast<std::int64_t>(cases::size_of(t.type));
  t.shape[d] = piece.size();
  return t;
}

// The rows of a padded case that one rank would own, and the state that it keeps.
class Rows {
 public:
  Rows(const CaseData& whole, Piece rows) : data(whole), rows(rows) {
    const Case& c = whole.spec;
    state_o = Buffer(Type::f32, {c.B, rows.size(), c.Hq, c.dim_v()});
    state_m = Buffer(Type::f32, {c.B, c.Hq, rows.size()});
    state_l = Buffer(Type::f64, {c.B, c.Hq, rows.size()});
    for (const auto& s : whole.sequences) {
      off = s.off;
      used_q.push_back(static_cast<std::int32_t>(std::clamp<std::int64_t>(s.Nq - rows.begin, 0, rows.size())));
      used_k.push_back(0);
    }
  }
  Rows(const Rows&) = delete;

  State state() const { return {state_o.tensor(), state_m.tensor(), state_l.tensor()}; }
  bool margins_intact() const {
    return state_o.margins_intact() && state_m.margins_intact() && state_l.margins_intact();
  }

  Options options(Piece keys) const {
    Options o = data.options();
    // Of all sequences the same, or the case has another alignment: see parts_test.cpp.
    if (o.alignment == Alignment::bottom_right) o.alignment = Alignment::offset, o.diagonal_offset = off;
    o.row0 += rows.begin, o.col0 += keys.begin;
    return o;
  }

  Inputs inputs(Piece keys) {
    Inputs in = data.inputs();
    in.q = slice(in.q, 1, rows), in.k = slice(in.k, 1, keys), in.v = slice(in.v, 1, keys);
    in.bias = slice(slice(in.bias, 2, rows), 3, keys), in.mask = slice(slice(in.mask, 2, rows), 3, keys);
    const auto B = static_cast<std::int64_t>(used_q.size());
    for (std::size_t b = 0; b < used_k.size(); ++b)
      used_k[b] =
          static_cast<std::int32_t>(std::clamp<std::int64_t>(data.sequences[b].Nk - keys.begin, 0, keys.size()));
    if (in.seqused_q) in.seqused_q = Tensor(used_q.data(), Type::i32, {B});
    if (in.seqused_k) in.seqused_k = Tensor(used_k.data(), Type::i32, {B});
    return in;
  }

  // Forward over the pieces of keys, ascending, the state carried and the last one finishing.
  void attend(const std::vector<Piece>& pieces, const Outputs& whole, const Execution& execution) {
    attend_by(pieces, whole, [&](const Inputs& in, const Outputs& out, const Options& options) {
      forward(in, out, options, execution);
    });
  }
  template <class Forward>
  void attend_by(const std::vector<Piece>& pieces, const Outputs& whole, Forward forward) {
    for (std::size_t n = 0; n < pieces.size(); ++n) {
      Inputs in = inputs(pieces[n]);
      if (n > 0) in.state = state(), in.sinks = {};
      Outputs out{.state = state()};
      if (n + 1 == pieces.size()) out = {.o = slice(whole.o, 1, rows), .lse = slice(whole.lse, 2, rows)};
      forward(in, out, options(pieces[n]));
    }
    EXPECT_TRUE(margins_intact());
  }

  // Backward over the pieces of keys, ascending: dQ of these rows goes on in the case's own dQ, and dK and dV, of all
  // keys, are those of these rows alone.
  void differentiate(const std::vector<Piece>& pieces, const Buffer& dk, const Buffer& dv, const Execution& execution) {
    const Saved all = data.saved();
    const Saved saved{.o = slice(all.o, 1, rows),
                      .lse = slice(all.lse, 2, rows),
                      .d_o = slice(all.d_o, 1, rows),
                      .d_lse = slice(all.d_lse, 2, rows)};
    for (const Piece& keys : pieces) {
      Options o = options(keys);
      o.accumulate = true;
      backward(inputs(keys), saved,
               {.dq = slice(data.dq.tensor(), 1, rows),
                .dk = slice(dk.tensor(), 1, keys),
                .dv = slice(dv.tensor(), 1, keys)},
               o, execution);
    }
  }

  const CaseData& data;
  const Piece rows;
  Buffer state_o, state_m, state_l;

 private:
  std::vector<std::int32_t> used_q, used_k;
  std::int64_t off = 0;
};

// Ranks that hold nodes of the tree over segments: nodes of random levels that cover the rows [row0, row0 + length).
struct Node {
  int level = 0;
  std::int64_t number = 0;
};
inline void add_nodes(int level, std::int64_t number, Piece segments, Generator& g, std::vector<Node>& out) {
  if (number << level >= segments.end || (number + 1) << level <= segments.begin) return;
  if (level == 0 || g.chance(0.3)) return out.push_back({level, number});
  for (const std::int64_t half : {0, 1}) add_nodes(level - 1, 2 * number + half, segments, g, out);
}

// Sums of nodes, each with a gradient of its own, up to the root; one that has none is left out.
inline std::vector<float> fold(int level, std::int64_t number, const std::vector<Node>& nodes,
                               const std::vector<Buffer>& sums) {
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    if (nodes[n].level != level || nodes[n].number != number) continue;
    const auto values = sums[n].values();
    return {values.begin(), values.end()};
  }
  if (level == 0) return {};
  std::vector<float> left = fold(level - 1, 2 * number, nodes, sums);
  const std::vector<float> right = fold(level - 1, 2 * number + 1, nodes, sums);
  if (left.empty()) return right;
  for (std::size_t e = 0; e < right.size(); ++e) left[e] += right[e];
  return left;
}

// Rows of one document of a packed case.
struct Span {
  std::size_t document = 0;
  Piece rows{};
};

// Spans of a packed case's documents as entries of packed calls, with the keys of their documents beside each.
class Entries {
 public:
  Entries(const CaseData& whole, const std::vector<Span>& spans) : whole(whole), spans(spans) {
    const Case& c = whole.spec;
    for (const Span& span : spans) {
      row0.push_back(span.rows.begin), number.push_back(static_cast<std::int64_t>(span.document));
      cu_q.push_back(cu_q.back() + static_cast<std::int32_t>(span.rows.size()));
    }
    const std::int64_t tokens = cu_q.back();
    q = Buffer(c.type, {tokens, c.Hq, c.D}), o = Buffer(c.type, {tokens, c.Hq, c.Dv});
    lse = Buffer(Type::f32, {c.Hq, tokens});
    state_o = Buffer(Type::f32, {tokens, c.Hq, c.Dv});
    state_m = Buffer(Type::f32, {c.Hq, tokens}), state_l = Buffer(Type::f64, {c.Hq, tokens});
    for (std::size_t n = 0; n < spans.size(); ++n) copy(whole.q, first_row(n), spans[n].rows.size(), q, cu_q[n]);
  }

  // Forward over the ranges of keys, ascending.
  void attend(const std::vector<Piece>& ranges, const Execution& execution) {
    const State state{state_o.tensor(), state_m.tensor(), state_l.tensor()};
    for (std::size_t step = 0; step < ranges.size(); ++step) {
      Inputs in = inputs(ranges[step]);
      if (step > 0) in.state = state, in.sinks = {};
      Outputs out{.state = state};
      if (step + 1 == ranges.size()) out = {.o = o.tensor(), .lse = lse.tensor()};
      forward(in, out, whole.options(), execution);
    }
  }

  void expect_same_forward() const {
    const Case& c = whole.spec;
    const auto bits = o.bits(), whole_bits = whole.o.bits(), lse_bits = lse.bits(), whole_lse = whole.lse.bits();
    const auto width = c.Hq * c.Dv;
    for (std::size_t n = 0; n < spans.size(); ++n) {
      const auto& s = whole.sequences[spans[n].document];
      for (std::int64_t i = 0; i < spans[n].rows.size(); ++i) {
        const std::int64_t here = cu_q[n] + i, there = spans[n].rows.begin + i;
        for (std::int64_t e = 0; e < width; ++e)
          ASSERT_EQ(bits[static_cast<std::size_t>(here * width + e)],
                    whole_bits[static_cast<std::size_t>((s.row_q + there) * width + e)]);
        for (std::int64_t h = 0; h < c.Hq; ++h)
          ASSERT_EQ(lse_bits[static_cast<std::size_t>(h * cu_q.back() + here)],
                    whole_lse[static_cast<std::size_t>(s.lse_first + h * s.lse_head + there)]);
      }
    }
    EXPECT_TRUE(o.margins_intact() && lse.margins_intact() && state_o.margins_intact());
    ++case_count.judged;
  }

  // Backward over the ranges of keys, ascending, after attend: dQ of every span is the whole's, and so are dK and dV of
  // documents whose queries are all in one span.
  void expect_same_backward(const std::vector<Piece>& ranges, const Execution& execution) {
    const Case& c = whole.spec;
    const std::int64_t tokens = cu_q.back();
    Buffer d_o(whole.d_o.type(), {tokens, c.Hq, c.Dv}), dq = filled(Type::f32, {tokens, c.Hq, c.D}, 0);
    for (std::size_t n = 0; n < spans.size(); ++n) copy(whole.d_o, first_row(n), spans[n].rows.size(), d_o, cu_q[n]);
    Options options = whole.options();
    options.accumulate = true;
    for (const Piece& range : ranges) {
      const Inputs in = inputs(range);
      const Buffer dk = filled(Type::f32, {cu_k.back(), c.Hk, c.D}, 0);
      const Buffer dv = filled(Type::f32, {cu_k.back(), c.Hk, c.Dv}, 0);
      backward(in, {.o = o.tensor(), .lse = lse.tensor(), .d_o = d_o.tensor()},
               {.dq = dq.tensor(), .dk = dk.tensor(), .dv = dv.tensor()}, options, execution);
      for (std::size_t n = 0; n < spans.size(); ++n) {
        const auto& s = whole.sequences[spans[n].document];
        if (spans[n].rows.size() < s.Nq) continue;
        const std::int64_t first = s.row_k + std::min(range.begin, s.Nk), count = cu_k[n + 1] - cu_k[n];
        expect_same_rows(dk, cu_k[n], whole.dk, first, count);
        expect_same_rows(dv, cu_k[n], whole.dv, first, count);
      }
    }
    for (std::size_t n = 0; n < spans.size(); ++n)
      expect_same_rows(dq, cu_q[n], whole.dq, first_row(n), spans[n].rows.size());
    ++case_count.judged;
  }

 private:
  std::int64_t first_row(std::size_t n) const { return whole.sequences[spans[n].document].row_q + spans[n].rows.begin; }
  static void expect_same_rows(const Buffer& a, std::int64_t at, const Buffer& b, std::int64_t first,
                               std::int64_t rows) {
    const std::int64_t width = a.size(1) * a.size(2);
    for (std::int64_t e = 0; e < rows * width; ++e) ASSERT_EQ(a.get(at * width + e), b.get(first * width + e));
  }
  static void copy(const Buffer& from, std::int64_t first, std::int64_t rows, Buffer& to, std::int64_t at) {
    const std::int64_t width = from.size(1) * from.size(2);
    for (std::int64_t e = 0; e < rows * width; ++e) to.set(at * width + e, from.get(first * width + e));
  }

  // Keys of the range, where an entry's document has them.
  Inputs inputs(Piece range) {
    const Case& c = whole.spec;
    const auto B = static_cast<std::int64_t>(spans.size());
    cu_k.assign(1, 0), col0.assign(spans.size(), range.begin);
    std::vector<Piece> parts;
    for (const Span& span : spans) {
      const std::int64_t length = whole.sequences[span.document].Nk;
      parts.push_back({std::min(range.begin, length), std::min(range.end, length)});
      cu_k.push_back(cu_k.back() + static_cast<std::int32_t>(parts.back().size()));
    }
    k = Buffer(c.type, {cu_k.back(), c.Hk, c.D}), v = Buffer(c.type, {cu_k.back(), c.Hk, c.Dv});
    for (std::size_t n = 0; n < spans.size(); ++n) {
      const std::int64_t first = whole.sequences[spans[n].document].row_k + parts[n].begin;
      copy(whole.k, first, parts[n].size(), k, cu_k[n]), copy(whole.v, first, parts[n].size(), v, cu_k[n]);
    }
    Inputs in = whole.inputs();
    in.q = q.tensor(), in.k = k.tensor(), in.v = v.tensor();
    in.cu_seqlens_q = Tensor(cu_q.data(), Type::i32, {B + 1});
    in.cu_seqlens_k = Tensor(cu_k.data(), Type::i32, {B + 1});
    in.seq_row0 = Tensor(row0.data(), Type::i64, {B}), in.seq_col0 = Tensor(col0.data(), Type::i64, {B});
    in.seq_batch0 = Tensor(number.data(), Type::i64, {B});
    return in;
  }

  const CaseData& whole;
  std::vector<Span> spans;
  std::vector<std::int32_t> cu_q{0}, cu_k;
  std::vector<std::int64_t> row0, col0, number;
  Buffer q, k, v, o, lse, state_o, state_m, state_l;
};

}  // namespace tessera::test
