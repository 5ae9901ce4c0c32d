// SPDX-License-Identifier: Apache-2.0
// See cpu/segments.hpp.
#include "cpu/segments.hpp"

#include <bit>

#include "core/limits.hpp"
#include "core/problem.hpp"

namespace tessera::cpu {
namespace {

constexpr Int64 span_keys = key_blocks_beside * block_k;

// Sums that are kept at the same time: a node's right half is summed beside its left one, and there is a left half of
// twice the size, all of it, beside every node on the way but the topmost.
Int64 most_sums(const Problem& p) {
  const Int64 segments = ceil_div(p.longest_q(), p.options.segment_rows) + 1;
  return Int64(std::bit_width(static_cast<UInt64>(segments))) + 1;
}

template <class T>
void put_row(const float* values, Int64 width, char* row) {
  for (Int64 d = 0; d < width; ++d) reinterpret_cast<T*>(row)[d] = narrow<T>(values[d]);
}

// Rows of the caller's dK or dV become, or grow by, the sums.
void put(const float* sums, Int64 width, Range keys, Int64 key0, bool accumulate, const Rows& out) {
  for (Int64 j = keys.begin; out && j < keys.end; ++j, sums += width) {
    char* row = out.row(j - key0);
    if (out.type == Type::f16) put_row<F16>(sums, width, row);
    if (out.type == Type::bf16) put_row<BF16>(sums, width, row);
    if (out.type != Type::f32) continue;
    auto* x = reinterpret_cast<float*>(row);
    for (Int64 d = 0; d < width; ++d) x[d] = accumulate ? x[d] + sums[d] : sums[d];
  }
}

// The tree of one span. Node n of level k stands for the segments from n * 2^k to (n + 1) * 2^k.
class Tree {
 public:
  Tree(const Problem& p, const Isa& isa, const KeySpanJob& span, Int64 row0, float* scratch, float* sums) :
      p(p), isa(isa), span(span), row0(row0), scratch(scratch),
      sums(sums), keys{span.block_begin * block_k, lesser(span.block_end * block_k, span.jobs[0].head.nk)},
      queries(visible_queries(span.jobs[0].head.mask, keys)) {
    if (!queries.empty())
      segments = {(queries.begin + row0) / p.options.segment_rows,
                  ceil_div(queries.end + row0, p.options.segment_rows)};
  }

  void run() const {
    int level = 0;
    while (!segments.empty() && segments.begin >> level != (segments.end - 1) >> level) ++level;
    if (segments.empty() || !add_node(level, segments.begin >> level, 0))
      for (Int64 n = 0; n < floats(); ++n) sums[n] = 0;
    put(dk(0), p.D, keys, span.key0, span.accumulate, span.dk);
    put(dv(0), p.Dv, keys, span.key0, span.accumulate, span.dv);
  }

 private:
  Int64 floats() const { return span_keys * (p.D + p.Dv); }
  float* dk(Int64 slot) const { return sums + slot * floats(); }
  float* dv(Int64 slot) const { return dk(slot) + span_keys * p.D; }

  // Leaves the sum of a node in this slot; false: none of its queries see the keys.
  bool add_node(int level, Int64 n, Int64 slot) const {
    if (n << level >= segments.end || (n + 1) << level <= segments.begin) return false;
    if (level == 0) return add_segment(n, slot);
    if (!add_node(level - 1, 2 * n, slot)) return add_node(level - 1, 2 * n + 1, slot);
    if (!add_node(level - 1, 2 * n + 1, slot + 1)) return true;
    float *left = dk(slot), *right = dk(slot + 1);
    for (Int64 i = 0; i < floats(); ++i) left[i] += right[i];
    return true;
  }

  bool add_segment(Int64 n, Int64 slot) const {
    const Int64 begin = n * p.options.segment_rows - row0;
    KeySpanJob part = span;
    part.queries = {greater(begin, queries.begin), lesser(begin + p.options.segment_rows, queries.end)};
    if (part.queries.empty()) return false;
    const auto rows = [](float* at, Int64 width) {
      return Rows{Type::f32, reinterpret_cast<char*>(at), width * Int64(sizeof(float))};
    };
    part.dk = span.dk ? rows(dk(slot), p.D) : Rows{};
    part.dv = span.dv ? rows(dv(slot), p.Dv) : Rows{};
    part.key0 = keys.begin, part.accumulate = false;
    // What is not asked for, and keys that the last block lacks.
    for (Int64 i = 0; i < floats(); ++i) dk(slot)[i] = 0;
    isa.key_span(part, scratch);
    // -0 becomes 0, so that to add a sum of nothing changes no bit.
    for (Int64 i = 0; i < floats(); ++i) dk(slot)[i] += 0.0f;
    return true;
  }

  const Problem& p;
  const Isa& isa;
  const KeySpanJob& span;
  Int64 row0;
  float *scratch, *sums;
  Range keys, queries, segments{};  // queries: those that see one of the keys
};

}  // namespace

Int64 segment_bytes(const Problem& p) {
  if (p.options.segment_rows == 0 || (!p.dk && !p.dv)) return 0;
  return product({most_sums(p), span_keys, p.D + p.Dv, sizeof(float)});
}

void add_segments(const Problem& p, const Isa& isa, const KeySpanJob& span, Int64 row0, float* scratch, float* sums) {
  Tree(p, isa, span, row0, scratch, sums).run();
}

}  // namespace tessera::cpu
