// SPDX-License-Identifier: Apache-2.0
// Products of few rows with many keys, for decoding: K and V are read in place, their numbers widened in registers
// (decode_numbers.hpp), and the next step's rows are prefetched meanwhile. Included by cpu/isa/*.cpp inside their
// target region.
#pragma once

#if HWY_TARGET == HWY_AVX3
// Of neighbouring 128-bit blocks the sums: first those of `a`, then those of `b`.
HWY_INLINE Vec add_blocks(Vec a, Vec b) {
  return Vec{_mm512_add_ps(_mm512_shuffle_f32x4(a.raw, b.raw, 0x88), _mm512_shuffle_f32x4(a.raw, b.raw, 0xdd))};
}
#endif

// Sums of the lanes of `lanes` vectors, one per lane of the result.
HWY_INLINE Vec sums_of(const Vec (&x)[lanes]) {
  const hn::RepartitionToWide<FloatTag> wide;
  Vec fours[lanes / 4];  // in every 128-bit block, that block's share of four sums
  TESSERA_UNROLL
  for (Int64 n = 0; n < lanes / 4; ++n) {
    const Vec *a = x + 4 * n,
              first = hn::Add(hn::InterleaveLower(FloatTag(), a[0], a[1]), hn::InterleaveUpper(FloatTag(), a[0], a[1]));
    const Vec second =
        hn::Add(hn::InterleaveLower(FloatTag(), a[2], a[3]), hn::InterleaveUpper(FloatTag(), a[2], a[3]));
    const auto low = hn::BitCast(wide, first), high = hn::BitCast(wide, second);
    fours[n] = hn::Add(hn::BitCast(FloatTag(), hn::InterleaveLower(wide, low, high)),
                       hn::BitCast(FloatTag(), hn::InterleaveUpper(wide, low, high)));
  }
#if HWY_TARGET == HWY_AVX3
  return add_blocks(add_blocks(fours[0], fours[1]), add_blocks(fours[2], fours[3]));
#elif HWY_TARGET == HWY_AVX2
  return hn::Add(hn::ConcatLowerLower(FloatTag(), fours[1], fours[0]),
                 hn::ConcatUpperUpper(FloatTag(), fours[1], fours[0]));
#else
  return fours[0];
#endif
}

// The products of a few keys with a few rows of Q, which fill a vector: out[row][key].
template <class T, int rows>
HWY_INLINE void dot_block(const T* const (&keys)[lanes / rows], const float* Q, Int64 Q_stride, Int64 D, float* out) {
  constexpr int count = lanes / rows;
  Vec sums[lanes];
  TESSERA_UNROLL
  for (int n = 0; n < lanes; ++n) sums[n] = hn::Zero(FloatTag());
  constexpr int together = vectors_together<T>;
  constexpr Int64 width = numbers_in_vector<T>;
  Int64 d = 0;
  for (; d + together * width <= D; d += together * width) {
    Vec q[rows][together];
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r) TESSERA_UNROLL
    for (int c = 0; c < together; ++c) q[r][c] = load(Q + r * Q_stride + d * lanes / width + c * lanes);
    // Unrolled whole, or the sums of a single row would lie in memory.
    TESSERA_UNROLL_LANES
    for (int k = 0; k < count; ++k) {
      Vec key[together];
      widen_several(keys[k] + d, key);
      TESSERA_UNROLL
      for (int r = 0; r < rows; ++r) TESSERA_UNROLL
      for (int c = 0; c < together; ++c) sums[r * count + k] = add_product(T(), sums[r * count + k], key[c], q[r][c]);
    }
  }
  if constexpr (!DotNumber<T>) {
    if (d < D) TESSERA_UNROLL
    for (int k = 0; k < count; ++k) {
      const Vec key = widen_vector(keys[k] + d);
      TESSERA_UNROLL
      for (int r = 0; r < rows; ++r)
        sums[r * count + k] = add_product(T(), sums[r * count + k], key, load(Q + r * Q_stride + d));
    }
  }
  store(sums_of(sums), out);
}

using StepTile = KeyTile<decode_step>;

// The keys that a job reads in a step, and where their rows are.
struct StepKeys {
  Range keys;
  StepTile K, V;

  // Without their scales, which are prefetched.
  HWY_INLINE void find_rows(const HeadJob& head, Range range) {
    keys = range;
    K.find_rows(head.k, range), V.find_rows(head.v, range);
    if (head.k.scale_stride != 0) head.k.prefetch_scales(range);
    if (head.v.scale_stride != 0) head.v.prefetch_scales(range);
  }
  HWY_INLINE void load_scales(const HeadJob& head) { K.load_scales(head.k, keys), V.load_scales(head.v, keys); }
  // The same keys of another head.
  HWY_INLINE void find_beside(const StepKeys& other, const HeadJob& head) {
    keys = other.keys;
    K.find_beside(other.K, head.k, keys), V.find_beside(other.V, head.v, keys);
  }
};

// Rows of the next step, of all the jobs of a task, to be prefetched: a key's rows of every head before the next key's,
// for that is how they lie in [B,N,H,D] and in pages. Hardware prefetchers follow such a stream.
class RowStream {
 public:
  HWY_INLINE void start(const StepTile& tile, Int64 count, const Int64 (&from_first)[decode_jobs], Int64 jobs,
                        Int64 width) {
    rows = &tile, heads = from_first, left = count * jobs, last = jobs - 1, bytes = width * bytes_each(tile.type);
    key = head = 0;
  }
  // One row.
  HWY_INLINE void advance() {
    if (left <= 0) return;
    // Of an entry outside of the pool this is the address of nothing, which does no harm.
    const UInt64 row = __builtin_bit_cast(UInt64, rows->row(key)) + UInt64(heads[head]);
    for (Int64 at = 0; at < bytes; at += 64)
      __builtin_prefetch(__builtin_bit_cast(const char*, row + UInt64(at)), 0, 2);
    --left, head = head == last ? 0 : head + 1, key += head == 0;
  }

 private:
  const StepTile* rows = nullptr;
  const Int64* heads = nullptr;  // bytes from the first job's rows
  Int64 left = 0, last = 0, bytes = 0, key = 0, head = 0;
};

// The first lines of keys in pages, which may lie anywhere, all at once before their rows are prefetched one after
// another: the processor then looks up several of its own pages at a time. One by one between products they cost twice
// as much.
HWY_INLINE void prefetch_first_lines(const StepTile& tile, Int64 count) {
  for (Int64 r = 0; r < count && tile.in_pool; ++r) __builtin_prefetch(tile.row(r), 0, 2);
}

// What is prefetched while a job's keys are read: K's rows meanwhile, and V's while its values are, so that memory is
// busy all the time. The first step of a task was not prefetched by one before: there each job also does it for the
// next.
struct DecodePrefetch {
  RowStream *K = nullptr, *V = nullptr;
  const StepKeys* beside = nullptr;
  Int64 D = 0, Dv = 0;

  HWY_INLINE void prefetch_key(Int64 j) const {
    if (beside && j < beside->keys.size()) prefetch_row(beside->K, j, D);
    if (K) K->advance();
  }
  HWY_INLINE void prefetch_value(Int64 j) const {
    if (beside && j < beside->keys.size()) prefetch_row(beside->V, j, Dv);
    if (V) V->advance();
  }
};

// Row r of keys whose type is T.
template <class T>
HWY_INLINE const T* row_of(const StepTile& tile, Int64 r) {
  return reinterpret_cast<const T*>(tile.row(r));
}
// Rows that were widened into scratch.
HWY_INLINE StepTile in_scratch(const float* rows, Int64 stride) {
  StepTile tile;
  tile.type = Type::f32, tile.scaled = false;
  for (Int64 r = 0; r < decode_step; ++r) tile.rows[r] = reinterpret_cast<const char*>(rows + r * stride);
  return tile;
}

// Rows of numbers, one per key, times the keys' scales of a group of dims.
HWY_INLINE void multiply_by_scales(const StepTile& keys, Int64 group, Int64 count, Int64 rows, const float* numbers,
                                   float* out) {
  for (Int64 j = 0; j < count && keys.scaled; j += lanes)
    for (Int64 row = 0; row < rows; ++row)
      store(hn::Mul(load(numbers + row * block_q + j), load(keys.scales[group] + j)), out + row * block_q + j);
}

// The rows from dim d on.
HWY_INLINE StepTile from_dim(const StepTile& keys, Int64 count, Int64 d) {
  StepTile part;
  part.type = keys.type, part.scaled = false;
  for (Int64 r = 0; r < count; ++r) part.rows[r] = keys.rows[r] + d * bytes_each(keys.type);
  return part;
}

// sums += numbers
HWY_INLINE void add_numbers(const float* numbers, Int64 count, Int64 rows, float* sums) {
  for (Int64 row = 0; row < rows; ++row)
    for (Int64 j = 0; j < count; j += lanes) {
      float* at = sums + row * block_q + j;
      store(hn::Add(load(at), load(numbers + row * block_q + j)), at);
    }
}

// S[row][j] for `count` keys, a few rows at a time.
template <class T, int rows>
HWY_NOINLINE void dot_keys(const StepTile& K, Int64 count, const float* Q, Int64 Q_stride, Int64 D,
                           const DecodePrefetch& next, float* S) {
  constexpr Int64 step = lanes / rows;
  for (Int64 j = 0; j < count; j += step) {
    const T* keys[step];
    // Lanes past the last key read its row again: no load leaves the tensor.
    for (Int64 k = 0; k < step; ++k) {
      keys[k] = row_of<T>(K, lesser(j + k, count - 1));
      next.prefetch_key(j + k);
    }
    // A row of S is padded behind its last key.
    if (rows == 1) {
      dot_block<T, rows>(keys, Q, Q_stride, D, S + j);
      continue;
    }
    HWY_ALIGN float out[lanes];
    dot_block<T, rows>(keys, Q, Q_stride, D, out);
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r) __builtin_memcpy(S + r * block_q + j, out + r * step, step * sizeof(float));
  }
}

template <class T>
HWY_INLINE void dot_all(const StepTile& K, Int64 count, const float* Q, Int64 Q_stride, Int64 rows, Int64 D,
                        const DecodePrefetch& next, float* S) {
  if (rows == 1) return dot_keys<T, 1>(K, count, Q, Q_stride, D, next, S);
  if (rows == 2) return dot_keys<T, 2>(K, count, Q, Q_stride, D, next, S);
  for (Int64 r = 0; r < rows; r += 4)
    dot_keys<T, 4>(K, count, Q + r * Q_stride, Q_stride, D, r == 0 ? next : DecodePrefetch{}, S + r * block_q);
}

// O[row][d ...] += sum over the keys of P[row][j] V[j][d ...], for `cols` vectors and a few rows.
template <class T, int rows, int cols>
HWY_INLINE void add_values_block(const StepTile& V, Int64 d, Int64 count, const float* P, const DecodePrefetch& next,
                                 float* O, Int64 O_stride) {
  constexpr int together = value_vectors_together<T>;
  constexpr Int64 keys = keys_together<T>;
  Vec sums[rows][cols];
  TESSERA_UNROLL
  for (int r = 0; r < rows; ++r) TESSERA_UNROLL
  for (int c = 0; c < cols; ++c) sums[r][c] = hn::Zero(FloatTag());
  for (Int64 j = 0; j < count; j += keys) {
    for (Int64 k = 0; k < keys; ++k) next.prefetch_value(j + k);
    // Of two keys, the second may be behind the last one: its weight is 0 then, and the first one's row stands for it.
    const T *row = row_of<T>(V, j) + d, *second = row_of<T>(V, lesser(j + keys, count) - 1) + d;
    Vec weight[rows];
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r) weight[r] = set(P[r * block_q + j / keys]);
    TESSERA_UNROLL
    for (int c = 0; c + together <= cols; c += together) {
      Vec value[together];
      widen_values(row + c * lanes, second + c * lanes, value);
      TESSERA_UNROLL
      for (int r = 0; r < rows; ++r) TESSERA_UNROLL
      for (int n = 0; n < together; ++n) sums[r][c + n] = add_product(T(), sums[r][c + n], value[n], weight[r]);
    }
    if constexpr (cols == 1 && !DotNumber<T>) {
      const Vec value = widen_vector(row);
      TESSERA_UNROLL
      for (int r = 0; r < rows; ++r) sums[r][0] = add_product(T(), sums[r][0], value, weight[r]);
    }
  }
  TESSERA_UNROLL
  for (int r = 0; r < rows; ++r) TESSERA_UNROLL
  for (int c = 0; c < cols; ++c) {
    float* out = O + r * O_stride + c * lanes;
    store(hn::Add(load(out), sums[r][c]), out);
  }
}

template <class T, int rows>
HWY_NOINLINE void add_values_of(const StepTile& V, Int64 count, const float* P, const DecodePrefetch& next, Int64 Dv,
                                float* O, Int64 O_stride) {
  constexpr int cols = rows == 1 ? 8 : lanes < 16 ? 2 : 4;  // as many accumulators as fit the registers
  Int64 d = 0;
  for (; d + cols * lanes <= Dv; d += cols * lanes)
    add_values_block<T, rows, cols>(V, d, count, P, d == 0 ? next : DecodePrefetch{}, O + d, O_stride);
  constexpr int together = value_vectors_together<T>;
  for (; d + together * lanes <= Dv; d += together * lanes)
    add_values_block<T, rows, together>(V, d, count, P, d == 0 ? next : DecodePrefetch{}, O + d, O_stride);
  for (; d < Dv; d += lanes)
    add_values_block<T, rows, 1>(V, d, count, P, d == 0 ? next : DecodePrefetch{}, O + d, O_stride);
}

template <class T>
HWY_INLINE void add_all_values(const StepTile& V, Int64 count, const float* P, Int64 rows, const DecodePrefetch& next,
                               Int64 Dv, float* O, Int64 O_stride) {
  if (rows == 1) return add_values_of<T, 1>(V, count, P, next, Dv, O, O_stride);
  if (rows == 2) return add_values_of<T, 2>(V, count, P, next, Dv, O, O_stride);
  for (Int64 r = 0; r < rows; r += 4)
    add_values_of<T, 4>(V, count, P + r * block_q, r == 0 ? next : DecodePrefetch{}, Dv, O + r * O_stride, O_stride);
}
