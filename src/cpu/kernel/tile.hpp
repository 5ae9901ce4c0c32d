// SPDX-License-Identifier: Apache-2.0
// Tiles in scratch memory: a tile of scores holds a key per row and a query per lane (the transpose of the paper's S,
// so that a row's maximum and sum need no reduction across lanes), with `block_q` floats from row to row. Loading from
// and storing to the caller's tensors. Included by cpu/isa/*.cpp inside their target region.
#pragma once

// Queries [i0, i0 + ni) against keys [j0, j0 + nj). `width` is ni rounded up to what a product takes.
struct Tile {
  Int64 i0, ni, j0, nj, width;
};

HWY_INLINE Tile tile_of(Range queries, Range keys) {
  const Int64 ni = queries.size();
  return {queries.begin, ni, keys.begin, keys.size(), round_up(ni, width_step)};
}

HWY_INLINE Range query_range(const HeadJob& head, Int64 block) {
  return {block * block_q, lesser((block + 1) * block_q, head.nq)};
}

HWY_INLINE Range key_block_range(const HeadJob& head, Int64 block) {
  return {block * block_k, lesser((block + 1) * block_k, head.nk)};
}

// The keys of a block that some query of the tile sees.
HWY_INLINE Range key_range(const HeadJob& head, Range queries, Int64 block) {
  const Range seen = visible_keys(head.mask, queries);
  return {greater(seen.begin, block * block_k), lesser(seen.end, (block + 1) * block_k)};
}

// A bump allocator over one thread's scratch memory; pieces are aligned to cache lines. Without memory it only counts.
class Scratch {
 public:
  explicit Scratch(float* memory) : base(memory) {}
  float* take(Int64 floats) {
    float* piece = base ? base + used : nullptr;
    used += round_up(floats, 16);
    return piece;
  }
  Int64 bytes() const { return used * Int64(sizeof(float)); }

 private:
  float* base;
  Int64 used = 0;
};

// Bytes that a layout takes of it.
template <class Layout>
HWY_INLINE Int64 bytes_of(const Problem& p) {
  Scratch scratch(nullptr);
  const Layout layout(p.D, p.Dv, scratch);
  (void)layout;
  return scratch.bytes();
}

// Bytes of a number of an input. (core's size_of is not inline: around a call every vector register would be spilled.)
HWY_INLINE Int64 bytes_each(Type type) {
  return type == Type::f32 ? 4 : type == Type::e4m3 || type == Type::i8 ? 1 : 2;
}

// Prefetches row i into the L2 cache. Rows often lie apart (those of other heads are between them), where hardware
// prefetchers do not follow. A row that does not exist does no harm.
template <class Source>
HWY_INLINE void prefetch_row(const Source& source, Int64 i, Int64 width) {
  const char* row = source.row(i);
  const Int64 bytes = width * bytes_each(source.type);
  for (Int64 at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
}
inline constexpr Int64 prefetch_distance = 24;  // rows; far enough to hide the latency of memory

// Rows to be prefetched a cache line at a time.
class PrefetchRows {
 public:
  PrefetchRows() = default;
  PrefetchRows(const Rows& rows, Range range, Int64 width) :
      PrefetchRows(rows.row(range.begin), rows.stride, range, width * bytes_each(rows.type)) {}
  // The keys must outlive this.
  PrefetchRows(const KeyRows& keys, Range range, Int64 width) :
      PrefetchRows(keys.row(range.begin), keys.stride, range, width * bytes_each(keys.type)) {
    if (keys.table) paged = &keys, key = range.begin;
  }

  // False: there was none left.
  HWY_INLINE bool prefetch_line() {
    if (left <= 0) return false;
    __builtin_prefetch(row + at, 0, 2);
    at += 64;
    if (at < bytes) return true;
    at = 0;
    if (--left > 0) row = paged ? paged->row(++key) : row + stride;
    return true;
  }

 private:
  PrefetchRows(const char* row, Int64 stride, Range range, Int64 bytes) :
      row(row), stride(stride), bytes(bytes), left(range.size()) {}

  const char* row = nullptr;
  Int64 stride = 0, bytes = 0, left = 0, at = 0;
  const KeyRows* paged = nullptr;  // where the next row is, if not a stride further
  Int64 key = 0;
};

// Software prefetching that overlaps with computation: what the next tile will read, a few cache lines between two
// steps of this one, so that memory is busy while the vector units are.
struct PrefetchQueue {
  int lines = 0;  // per step
  PrefetchRows rows[3] = {};
  int now = 0;

  HWY_INLINE void advance() {
    for (int n = 0; n < lines; ++n)
      if (!rows[now].prefetch_line() && ++now == 3) lines = now = 0;
  }
};

// Rows of K or V as f32, a row every `stride` floats.
struct Panel {
  const float* rows;
  Int64 stride;
  HWY_INLINE const float* at(Int64 row) const { return rows + row * stride; }
};

using KeyBlock = KeyTile<block_k>;

// Row r of a block of keys is about to be read: prefetches one behind it.
HWY_INLINE void prefetch_behind(const KeyBlock& block, Int64 r, Int64 count, Int64 width) {
  if (r + prefetch_distance < count) prefetch_row(block, r + prefetch_distance, width);
}

// Bytes from row to row where they lie evenly apart, as in K and V themselves and inside a page.
HWY_INLINE Int64 address_of(const KeyBlock& block, Int64 r) { return reinterpret_cast<Int64>(block.row(r)); }
HWY_INLINE bool evenly_apart(const KeyBlock& block, Int64 count, Int64& stride) {
  stride = count > 1 ? address_of(block, 1) - address_of(block, 0) : 0;
  bool even = true;
  for (Int64 r = 2; r < count; ++r) even = even && address_of(block, r) == address_of(block, 0) + r * stride;
  return even;
}

// Keys of a block: in place if they are f32, without scales and evenly apart, else widened into `buffer`, times their
// scales. `reused`: they are read often enough to be packed; far apart, as in [B,N,H,D], rows share few sets of a cache
// and evict each other.
HWY_INLINE Panel load_panel(const KeyRows& source, Range range, Int64 width, bool reused, float* buffer) {
  KeyBlock block;
  block.find(source, range);
  Int64 stride = 0;
  if (block.type == Type::f32 && !block.scaled && evenly_apart(block, range.size(), stride)) {
    const Int64 floats = stride / Int64(sizeof(float));
    if (!reused || floats == width) return {reinterpret_cast<const float*>(block.row(0)), floats};
  }
  for (Int64 r = 0; r < range.size(); ++r) {
    prefetch_behind(block, r, range.size(), width);
    if (block.groups == 1) widen_row(block, r, width, block.scale(r, 0), buffer + r * width);
    for (Int64 g = 0, d = 0; g < block.groups && block.groups > 1; ++g, d += scale_width)
      widen_numbers(block.type, block.row(r) + d * bytes_each(block.type), lesser(scale_width, width - d),
                    block.scale(r, g), buffer + r * width + d);
  }
  return {buffer, width};
}

// Rows of Rows or of keys, widened, with zeros behind `width` up to whole vectors.
template <class Source>
HWY_INLINE void load_rows(const Source& source, Int64 i0, Int64 ni, Int64 width, float* out) {
  const Int64 padded = round_up(width, lanes);
  for (Int64 i = 0; i < ni; ++i) {
    float* row = out + i * padded;
    widen_row(source, i0 + i, width, 1.0f, row);
    for (Int64 d = width; d < padded; ++d) row[d] = 0;
  }
}

// out[d][i] = source[i0 + i][d] * factor for a tile of queries; lanes beyond the last query are 0.
HWY_INLINE void load_transposed(const Rows& source, const Tile& tile, Int64 width, float factor, float* out) {
#if HWY_TARGET == HWY_AVX3
  constexpr Int64 together = 16;  // rows, and columns of a square
#else
  constexpr Int64 together = 1;
#endif
  HWY_ALIGN float rows[together * 576];
  const Int64 padded = round_up(width, together);
  for (Int64 i = 0; i < tile.width; i += together) {
    for (Int64 n = 0; n < together; ++n) {
      if (i + n < tile.ni) widen_row(source, tile.i0 + i + n, width, factor, rows + n * padded);
      for (Int64 d = i + n < tile.ni ? width : 0; d < padded; ++d) rows[n * padded + d] = 0;
    }
    Int64 d = 0;
#if HWY_TARGET == HWY_AVX3
    for (; d + together <= width; d += together) {
      __m512i square[together];
      for (Int64 n = 0; n < together; ++n) square[n] = _mm512_loadu_si512(rows + n * padded + d);
      transpose_words(square, reinterpret_cast<UInt32*>(out + d * block_q + i), block_q);
    }
#endif
    for (; d < width; ++d)
      for (Int64 n = 0; n < together; ++n) out[d * block_q + i + n] = rows[n * padded + d];
  }
}

// The inverse: row i0 + i of the output becomes (or grows by) factor[i] * in[.][i].
HWY_INLINE void store_transposed(const float* in, const Tile& tile, Int64 width, const float* factor, bool accumulate,
                                 const Rows& out) {
#if HWY_TARGET == HWY_AVX3
  HWY_ALIGN float rows[16 * 576];
  const Int64 padded = round_up(width, 16);
  for (Int64 i = 0; i < tile.ni; i += 16) {
    Int64 d = 0;
    for (; d + 16 <= width; d += 16) {
      __m512i square[16];
      for (Int64 n = 0; n < 16; ++n)
        square[n] = _mm512_castps_si512(hn::Mul(load(in + (d + n) * block_q + i), load(factor + i)).raw);
      transpose_words(square, reinterpret_cast<UInt32*>(rows + d), padded);
    }
    for (; d < width; ++d)
      for (Int64 n = 0; n < 16; ++n) rows[n * padded + d] = in[d * block_q + i + n] * factor[i + n];
    for (Int64 n = 0; n < lesser(16, tile.ni - i); ++n)
      narrow_row(out, tile.i0 + i + n, width, accumulate, rows + n * padded);
  }
#else
  HWY_ALIGN float row[576];
  for (Int64 i = 0; i < tile.ni; ++i) {
    for (Int64 d = 0; d < width; ++d) row[d] = in[d * block_q + i] * factor[i];
    narrow_row(out, tile.i0 + i, width, accumulate, row);
  }
#endif
}

// Does query i of the tile see no key at all? Such rows have no part in any gradient.
HWY_INLINE bool blind(const BackwardJob& job, const Tile& tile, Int64 i) { return job.lse2[tile.i0 + i] == infinity; }

HWY_INLINE void fill(float* p, Int64 count, float value) {
  for (Int64 n = 0; n < count; ++n) p[n] = value;
}
