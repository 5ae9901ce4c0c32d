// SPDX-License-Identifier: Apache-2.0
// Products of few rows with many keys, for decoding: K and V are read in place, their numbers widened in registers
// (decode_numbers.hpp), and the next step's rows are prefetched meanwhile (decode_ahead.hpp). Included by cpu/isa/*.cpp
// inside their target region.
#pragma once

#if HWY_TARGET == HWY_AVX3
// Neighbouring 128-bit blocks taken together: first those of `a`, then those of `b`.
template <class Together>
HWY_INLINE Vec blocks_together(Vec a, Vec b) {
  return Together::of(Vec{_mm512_shuffle_f32x4(a.raw, b.raw, 0x88)}, Vec{_mm512_shuffle_f32x4(a.raw, b.raw, 0xdd)});
}
#endif

struct Sum {
  static HWY_INLINE Vec of(Vec a, Vec b) { return hn::Add(a, b); }
};
struct Largest {
  static HWY_INLINE Vec of(Vec a, Vec b) { return hn::Max(a, b); }
};

// The lanes of `lanes` vectors taken together, one vector per lane of the result.
template <class Together>
HWY_INLINE Vec across_lanes(const Vec (&x)[lanes]) {
  const hn::RepartitionToWide<FloatTag> wide;
  Vec fours[lanes / 4];  // in every 128-bit block, that block's share of four results
  TESSERA_UNROLL
  for (Int64 n = 0; n < lanes / 4; ++n) {
    const Vec* a = x + 4 * n;
    const Vec first =
        Together::of(hn::InterleaveLower(FloatTag(), a[0], a[1]), hn::InterleaveUpper(FloatTag(), a[0], a[1]));
    const Vec second =
        Together::of(hn::InterleaveLower(FloatTag(), a[2], a[3]), hn::InterleaveUpper(FloatTag(), a[2], a[3]));
    const auto low = hn::BitCast(wide, first), high = hn::BitCast(wide, second);
    fours[n] = Together::of(hn::BitCast(FloatTag(), hn::InterleaveLower(wide, low, high)),
                            hn::BitCast(FloatTag(), hn::InterleaveUpper(wide, low, high)));
  }
#if HWY_TARGET == HWY_AVX3
  return blocks_together<Together>(blocks_together<Together>(fours[0], fours[1]),
                                   blocks_together<Together>(fours[2], fours[3]));
#elif HWY_TARGET == HWY_AVX2
  return Together::of(hn::ConcatLowerLower(FloatTag(), fours[1], fours[0]),
                      hn::ConcatUpperUpper(FloatTag(), fours[1], fours[0]));
#else
  return fours[0];
#endif
}

// As many lines of the stream as `numbers` of a row, from number d on, take themselves.
template <class T, Int64 numbers>
HWY_INLINE void prefetch_beside(Int64 d, LineStream& next) {
  constexpr Int64 bytes = numbers * Int64(sizeof(T));
  if constexpr (bytes < 64) {
    if (d * Int64(sizeof(T)) % 64 == 0) next.prefetch();
  } else {
    TESSERA_UNROLL
    for (Int64 line = 0; line < bytes; line += 64) next.prefetch();
  }
}

// Lines that will be read soon are prefetched once more, where a row alone has little work: not all of so many
// prefetches arrive in time (pages of one key on Zen 5: 8 % faster; more rows are slower with it, and so are 8 bits).
template <class T, int rows>
inline constexpr bool prefetched_twice = prefetch_locality == 3 && rows == 1 && sizeof(T) > 1;

template <class T, int rows>
HWY_INLINE void prefetch_again(const T* place) {
  if constexpr (prefetched_twice<T, rows>) prefetch_line(__builtin_bit_cast(UInt64, place));
}

// The products of a few keys with a few rows of Q, which fill a vector: out[row][key]. `soon`: keys that are read
// next.
template <class T, int rows>
HWY_INLINE void dot_block(const T* const (&keys)[lanes / rows], const T* const (&soon)[lanes / rows], const float* Q,
                          Int64 Q_stride, Int64 D, LineStream& next, float* out) {
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
      prefetch_beside<T, together * width>(d, next);
      prefetch_again<T, rows>(soon[k] + d);
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
  store(across_lanes<Sum>(sums), out);
}

// Row r of keys whose type is T.
template <class T>
HWY_INLINE const T* row_of(const StepTile& tile, Int64 r) {
  return reinterpret_cast<const T*>(tile.row(r));
}
// Rows of numbers, one per key, times the keys' scales of a group of dims, and a factor.
HWY_INLINE void multiply_by_scales(const StepTile& keys, Int64 group, Int64 count, Int64 rows, float factor,
                                   const float* numbers, float* out) {
  if (!keys.scales && factor == 1 && numbers == out) return;
  for (Int64 j = 0; j < count; j += lanes) {
    const Vec scale = keys.scales ? load(keys.scales + group * decode_step + j) : set(1), last = set(factor);
    for (Int64 row = 0; row < rows; ++row)
      store(hn::Mul(hn::Mul(load(numbers + row * score_stride + j), scale), last), out + row * score_stride + j);
  }
}

// The rows from dim d on, whose scales are those of a group.
HWY_INLINE StepTile from_dim(const StepTile& keys, Int64 d) {
  StepTile part = keys;
  part.offset += d * bytes_each(keys.type);
  return part;
}

// sums += numbers
HWY_INLINE void add_numbers(const float* numbers, Int64 count, Int64 rows, float* sums) {
  for (Int64 row = 0; row < rows; ++row)
    for (Int64 j = 0; j < count; j += lanes) {
      float* at = sums + row * score_stride + j;
      store(hn::Add(load(at), load(numbers + row * score_stride + j)), at);
    }
}

// S[row][j] for `count` keys, a few rows at a time.
template <class T, int rows>
HWY_NOINLINE void dot_keys(const StepTile& K, Int64 count, const float* Q, Int64 Q_stride, Int64 D, LineStream* ahead,
                           float* S) {
  constexpr Int64 step = lanes / rows;
  LineStream next = ahead ? *ahead : LineStream();
  for (Int64 j = 0; j < count; j += step) {
    // Lanes past the last key read its row again: no load leaves the tensor.
    const T *keys[step], *soon[step];
    TESSERA_UNROLL_LANES
    for (Int64 k = 0; k < step; ++k)
      keys[k] = row_of<T>(K, j + k), soon[k] = row_of<T>(K, (j + k + step) % decode_step);
    // A row of S is padded behind its last key.
    if (rows == 1) {
      dot_block<T, rows>(keys, soon, Q, Q_stride, D, next, S + j);
      continue;
    }
    HWY_ALIGN float out[lanes];
    dot_block<T, rows>(keys, soon, Q, Q_stride, D, next, out);
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r) __builtin_memcpy(S + r * score_stride + j, out + r * step, step * sizeof(float));
  }
  if (ahead) *ahead = next;
}

template <class T>
HWY_INLINE void dot_all(const StepTile& K, Int64 count, const float* Q, Int64 Q_stride, Int64 rows, Int64 D,
                        LineStream* ahead, float* S) {
  if (rows == 1) return dot_keys<T, 1>(K, count, Q, Q_stride, D, ahead, S);
  if (rows == 2) return dot_keys<T, 2>(K, count, Q, Q_stride, D, ahead, S);
  for (Int64 r = 0; r < rows; r += 4)
    dot_keys<T, 4>(K, count, Q + r * Q_stride, Q_stride, D, r == 0 ? ahead : nullptr, S + r * score_stride);
}

// O[row][d ...] += sum over the keys of P[row][j] V[j][d ...], for `cols` vectors and a few rows.
template <class T, int rows, int cols>
HWY_INLINE void add_values_block(const StepTile& V, Int64 d, Int64 count, const float* P, LineStream& next, float* O,
                                 Int64 O_stride) {
  constexpr int together = value_vectors_together<T>;
  constexpr Int64 keys = keys_together<T>;
  Vec sums[rows][cols];
  TESSERA_UNROLL
  for (int r = 0; r < rows; ++r) TESSERA_UNROLL
  for (int c = 0; c < cols; ++c) sums[r][c] = hn::Zero(FloatTag());
  for (Int64 j = 0; j < count; j += keys) {
    // Of two keys, the second may be behind the last one: its weight is 0 then, and the first one's row stands for it.
    const T *row = row_of<T>(V, j) + d, *second = row_of<T>(V, j + keys - 1) + d;
    Vec weight[rows];
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r) weight[r] = set(P[r * score_stride + j / keys]);
    TESSERA_UNROLL
    for (int c = 0; c + together <= cols; c += together) {
      Vec value[together];
      prefetch_beside<T, keys * together * lanes>(d + c * lanes, next);
      TESSERA_UNROLL
      for (Int64 k = 0; k < keys; ++k) prefetch_again<T, rows>(row_of<T>(V, (j + k + 8) % decode_step) + d + c * lanes);
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
HWY_NOINLINE void add_values_of(const StepTile& V, Int64 count, const float* P, LineStream* ahead, Int64 Dv, float* O,
                                Int64 O_stride) {
  constexpr int cols = rows == 1 ? 8 : lanes < 16 ? 2 : 4;  // as many accumulators as fit the registers
  LineStream next = ahead ? *ahead : LineStream();
  Int64 d = 0;
  for (; d + cols * lanes <= Dv; d += cols * lanes)
    add_values_block<T, rows, cols>(V, d, count, P, next, O + d, O_stride);
  constexpr int together = value_vectors_together<T>;
  for (; d + together * lanes <= Dv; d += together * lanes)
    add_values_block<T, rows, together>(V, d, count, P, next, O + d, O_stride);
  for (; d < Dv; d += lanes) add_values_block<T, rows, 1>(V, d, count, P, next, O + d, O_stride);
  if (ahead) *ahead = next;
}

template <class T>
HWY_INLINE void add_all_values(const StepTile& V, Int64 count, const float* P, Int64 rows, LineStream* ahead, Int64 Dv,
                               float* O, Int64 O_stride) {
  if (rows == 1) return add_values_of<T, 1>(V, count, P, ahead, Dv, O, O_stride);
  if (rows == 2) return add_values_of<T, 2>(V, count, P, ahead, Dv, O, O_stride);
  for (Int64 r = 0; r < rows; r += 4)
    add_values_of<T, 4>(V, count, P + r * score_stride, r == 0 ? ahead : nullptr, Dv, O + r * O_stride, O_stride);
}
