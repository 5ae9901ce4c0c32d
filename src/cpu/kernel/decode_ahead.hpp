// SPDX-License-Identifier: Apache-2.0
// Where the keys of a step of decoding are, and what is prefetched for later steps meanwhile. Included by cpu/isa/*.cpp
// inside their target region.
#pragma once

// K or V of a step's keys, of a task's first job: in a page, or evenly apart, those of the others lie a constant number
// of bytes further.
struct StepRows {
  const char* rows[decode_step];
  const float* scales[decode_step];  // of the first group of dims, where keys have scales of their own
  bool inside = true;                // false: some entry is outside of the pool

  HWY_INLINE void find(const KeyRows& source, Range keys) {
    const Int64 count = keys.size();
    inside = find_key_rows(source, keys, rows);
    // Rows behind the last key become the last key's: they may be read, and their products are nobody's.
    for (Int64 r = count; r < decode_step && count > 0; ++r) rows[r] = rows[count - 1];
    if (has_scale_per_key(source)) source.find_scale_places(keys, scales);
  }
  static HWY_INLINE bool has_scale_per_key(const KeyRows& source) {
    return source.scales && (source.scale_stride != 0 || (source.table && source.scale_page_stride != 0));
  }
};

struct StepKeys {
  Range keys;
  StepRows K, V;

  HWY_INLINE void find(const HeadJob& head, Range range) {
    keys = range;
    K.find(head.k, range), V.find(head.v, range);
  }
};

// K or V of a step's keys, of one job.
struct StepTile {
  Type type;
  const char* const* rows;
  Int64 offset;         // bytes from `rows` to the job's
  const float* scales;  // [groups][decode_step]; null: none. 1 behind the last key
  Int64 groups;         // of dims with a scale of their own; 1 if there are none

  HWY_INLINE const char* row(Int64 r) const { return rows[r] + offset; }
};

struct TileRoom {
  StepRows own;  // where a table names pages outside of the pool
  float scales[most_scale_groups * decode_step];
};

// `first`: the first job's keys, which `beginning` found; `source`: the job's own.
HWY_INLINE StepTile tile_of_job(const StepRows& first, const KeyRows& beginning, const KeyRows& source, Range keys,
                                TileRoom& room) {
  const Int64 count = keys.size();
  StepTile tile{source.type, first.rows, source.base - beginning.base, nullptr, source.scale_groups};
  if (!first.inside) room.own.find(source, keys), tile.rows = room.own.rows, tile.offset = 0;
  if (!source.scales) return tile;
  tile.scales = room.scales;
  const bool each = StepRows::has_scale_per_key(source);
  const Int64 further = source.scales - beginning.scales;
  for (Int64 g = 0; g < source.scale_groups; ++g) {
    float* out = room.scales + g * decode_step;
    if (each && first.inside)
      for (Int64 r = 0; r < count; ++r) out[r] = first.scales[r][further + g * source.scale_group_stride];
    else if (each)
      source.find_scales(keys, g, out);
    else
      for (Int64 r = 0; r < decode_step; ++r) out[r] = source.scales[g * source.scale_group_stride];
    for (Int64 r = count; r < decode_step; ++r) out[r] = 1;
  }
  return tile;
}

// Into which cache. Zen 5 reads faster if prefetches go to L1, although a step's rows do not fit there
// (docs/experiments.md); kernels that other processors use as well prefetch into L2, as was measured there.
#if defined(TESSERA_DOT_PRODUCTS)
inline constexpr int prefetch_locality = 3;
#else
inline constexpr int prefetch_locality = 2;
#endif
HWY_INLINE void prefetch_line(UInt64 address) {
  __builtin_prefetch(__builtin_bit_cast(const char*, address), 0, prefetch_locality);
}

// Lines of the rows of the next step, of all the jobs of a task, to be prefetched one by one while this step's are
// read: evenly, for a burst of prefetches takes what reading needs, too. A key's rows of every head come before the
// next key's, for that is how they lie in [B,N,H,D] and in pages: hardware prefetchers follow such a stream. The
// processor's own pages are looked up earlier, by prefetches of first lines: a few keys ahead, or, of keys in pages of
// a cache, which may lie anywhere, all at once, for several lookups then overlap.
class LineStream {
 public:
  HWY_INLINE void start(const KeyRows& source, const StepRows& from, Int64 keys, const Int64 (&from_first)[decode_jobs],
                        Int64 jobs, Int64 row_bytes) {
    for (Int64 r = 0; r < keys && source.table; ++r) prefetch_line(__builtin_bit_cast(UInt64, from.rows[r]));
    bool adjacent = true;
    for (Int64 n = 0; n < jobs; ++n) adjacent = adjacent && from_first[n] == n * row_bytes;
    rows = from.rows, heads = from_first, beside = adjacent ? 1 : jobs, bytes = adjacent ? jobs * row_bytes : row_bytes;
    key = head = done = 0, runs = keys * beside, last_touched = source.table ? 0 : keys - keys_ahead;
    if (runs > 0) line = 64, find_run();
  }
  // One line.
  HWY_INLINE void prefetch() {
    prefetch_line(at);
    at += line;
    if (at >= end) next_run();
  }
  // What remains of a part, number `part` of `parts`.
  HWY_INLINE void catch_up(Int64 part, Int64 parts) {
    const Int64 due = runs * (part + 1) / parts;
    while (done < due) prefetch();
  }

 private:
  static constexpr Int64 keys_ahead = 8;

  // Of an entry outside of the pool this is the address of nothing, which does no harm.
  HWY_INLINE void find_run() {
    const UInt64 row = __builtin_bit_cast(UInt64, rows[key]) + UInt64(heads[head]);
    at = row & ~UInt64{63}, end = row + UInt64(bytes);
  }
  HWY_INLINE void next_run() {
    ++done;
    if (++head == beside) {
      head = 0, ++key;
      if (key < last_touched) prefetch_line(__builtin_bit_cast(UInt64, rows[key + keys_ahead]));
    }
    if (done < runs)
      find_run();
    else
      stop();
  }
  // The last line again and again: its prefetch costs next to nothing.
  HWY_INLINE void stop() { at -= line, line = 0, end = ~UInt64{0}; }

  UInt64 at = __builtin_bit_cast(UInt64, &zero_row[0]), end = ~UInt64{0}, line = 0;  // at first there is nothing to do
  const char* const* rows = nullptr;
  const Int64* heads = nullptr;  // bytes from the first job's rows
  Int64 beside = 0, bytes = 0, key = 0, head = 0, done = 0, runs = 0, last_touched = 0;
};

// A job's rows all at once, where no step before has prefetched them.
HWY_INLINE void prefetch_rows(const StepRows& first, Int64 from_first, Int64 count, Int64 bytes) {
  for (Int64 r = 0; r < count; ++r)
    for (Int64 line = 0; line < bytes; line += 64)
      prefetch_line(__builtin_bit_cast(UInt64, first.rows[r]) + UInt64(from_first + line));
}
