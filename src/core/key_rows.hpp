// SPDX-License-Identifier: Apache-2.0
// Where the keys of one KV head of one sequence lie: evenly apart in K or V, or in the pages of a cache; and their
// scales. The only place that knows how a key's number becomes an address. Made by core/sequence.cpp, read by the
// reference and the CPU kernels; functions are part of their callers, since these are compiled for several instruction
// sets. Implements docs/algorithm.md, "Paged keys and values" and "Types and scales of keys and values".
#pragma once

#include "math/mask.hpp"
#include "math/types.hpp"
#include "tessera/types.hpp"

namespace tessera {

// What an entry outside of the pool stands for: as many zeros as the longest row of any type has bytes.
extern const char zero_row[];

// Dims of a row that share a scale where rows have several.
inline constexpr Int64 scale_width = 128;

// K or V. Whoever asks for a row asks for one below the sequence's length: table entries behind it are never read.
struct KeyRows {
  Type type = Type::f32;
  const char* base = nullptr;  // of key 0, or of the pool's page 0
  Int64 stride = 0;            // bytes from key to key; in a page, if there are pages

  // Pages. Key j is number (j + leftpad) % page_size of the page that entry (j + leftpad) / page_size names.
  const Int32* table = nullptr;  // null: no pages
  Int64 table_stride = 0;
  Int64 pages = 0, page_size = 0, page_stride = 0;  // page_stride: bytes from page to page
  Int64 leftpad = 0;

  // What the numbers of a key are multiplied by. Strides count floats, and are 0 where one scale serves all keys.
  const float* scales = nullptr;  // of key 0, or of the pool's page 0; null: 1
  Int64 scale_stride = 0, scale_page_stride = 0;
  Int64 scale_groups = 1, scale_group_stride = 0;  // of scale_width dims each; one: a scale for all dims of a row

  TESSERA_ALWAYS_INLINE const char* row(Int64 j) const {
    if (!table) return base + j * stride;
    const Int64 place = j + leftpad;
    const char* page = page_at(place / page_size);
    return page ? page + place % page_size * stride : zero_row;
  }

  // Of paged keys: rows[r] is the row of the range's r-th. One division for all, however small the pages are. False:
  // some are zeros.
  TESSERA_ALWAYS_INLINE bool find(Range keys, const char** rows) const {
    const Int64 count = keys.size();
    Int64 number = (keys.begin + leftpad) / page_size, at = (keys.begin + leftpad) % page_size;
    bool inside = true;
    for (Int64 r = 0; r < count; at = 0) {
      const char* page = page_at(number++);
      inside = inside && page;
      for (; at < page_size && r < count; ++at, ++r) rows[r] = page ? page + at * stride : zero_row;
    }
    return inside;
  }

  // Of dim d of key j.
  TESSERA_ALWAYS_INLINE float scale(Int64 j, Int64 d) const {
    const float* place = scale_place(j);
    return place ? place[d / scale_width * scale_group_stride] : 1;
  }

  // Where the scale of key j, or its first one, lies; null: there is none, or its entry is outside of the pool.
  TESSERA_ALWAYS_INLINE const float* scale_place(Int64 j) const {
    if (!scales || !table) return scales ? scales + j * scale_stride : nullptr;
    const Int64 place = j + leftpad, page = table[place / page_size * table_stride];
    return is_page(page) ? scales + page * scale_page_stride + place % page_size * scale_stride : nullptr;
  }

  // As find(): out[r] is the scale of the range's r-th key, for one group of dims. There are scales.
  TESSERA_ALWAYS_INLINE void find_scales(Range keys, Int64 group, float* out) const {
    const Int64 count = keys.size();
    const float* first = scales + group * scale_group_stride;
    if (!table) {
      for (Int64 r = 0; r < count; ++r) out[r] = first[(keys.begin + r) * scale_stride];
      return;
    }
    Int64 number = (keys.begin + leftpad) / page_size, at = (keys.begin + leftpad) % page_size;
    for (Int64 r = 0; r < count;) {
      const Int64 page = table[number++ * table_stride];
      // Of zeros, which an entry outside of the pool stands for, the scale is 1.
      for (; at < page_size && r < count; ++at, ++r)
        out[r] = is_page(page) ? first[page * scale_page_stride + at * scale_stride] : 1;
      at = 0;
    }
  }

  // places[r]: where the scale of the range's r-th key lies, of the first group. There are scales, one for each key.
  // They are prefetched. Of a key outside of the pool nothing is said.
  TESSERA_ALWAYS_INLINE void find_scale_places(Range keys, const float** places) const {
    const Int64 count = keys.size();
    if (!table) {
      for (Int64 r = 0; r < count; ++r) places[r] = scales + (keys.begin + r) * scale_stride;
    } else {
      Int64 number = (keys.begin + leftpad) / page_size, at = (keys.begin + leftpad) % page_size;
      for (Int64 r = 0; r < count; at = 0) {
        const Int64 page = table[number++ * table_stride];
        const float* first = is_page(page) ? scales + page * scale_page_stride : scales;
        for (; at < page_size && r < count; ++at, ++r) places[r] = first + at * scale_stride;
      }
    }
    for (Int64 r = 0; r < count; ++r) __builtin_prefetch(places[r], 0, 2);
  }

  TESSERA_ALWAYS_INLINE bool is_page(Int64 page) const { return page >= 0 && page < pages; }

  // Null: the entry is outside of the pool.
  TESSERA_ALWAYS_INLINE const char* page_at(Int64 number) const {
    const Int64 page = table[number * table_stride];
    return is_page(page) ? base + page * page_stride : nullptr;
  }
};

}  // namespace tessera
