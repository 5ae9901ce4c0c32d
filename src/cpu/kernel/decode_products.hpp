// SPDX-License-Identifier: Apache-2.0
// Products of few rows with many keys, for decoding: K and V are read in place, 16-bit numbers are widened in
// registers, 8-bit ones on their way through scratch, and the next step's rows are prefetched meanwhile. Included by
// cpu/isa/*.cpp inside their target region.
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

// bf16 in rows whose length is a multiple of two vectors. Two vectors at a time are widened by one instruction each if
// the first gets the numbers with even places and the second those with odd ones; rows of Q and O are then kept in that
// order.
struct PairedBF16 {
  UInt16 bits;
};
inline constexpr Int64 pair_width = 2 * lanes;

template <class T>
HWY_INLINE void widen_two(const T* p, Vec (&out)[2]) {
  out[0] = widen_vector(p), out[1] = widen_vector(p + lanes);
}
HWY_INLINE void widen_two(const PairedBF16* p, Vec (&out)[2]) {
  const auto both = hn::BitCast(IntTag(), load(reinterpret_cast<const float*>(p)));
  out[0] = hn::BitCast(FloatTag(), hn::ShiftLeft<16>(both));
  out[1] = hn::BitCast(FloatTag(), hn::And(both, hn::Set(IntTag(), -65536)));
}
// Such rows have no single vector.
HWY_INLINE Vec widen_vector(const PairedBF16*) { return hn::Zero(FloatTag()); }

HWY_INLINE bool is_paired(Type type, Int64 width) { return type == Type::bf16 && width % pair_width == 0; }

// The products of a few keys with a few rows of Q, which fill a vector: out[row][key].
template <class T, int rows>
HWY_INLINE void dot_block(const T* const (&keys)[lanes / rows], const float* Q, Int64 Q_stride, Int64 D, float* out) {
  constexpr int count = lanes / rows;
  Vec sums[lanes];
  TESSERA_UNROLL
  for (int n = 0; n < lanes; ++n) sums[n] = hn::Zero(FloatTag());
  Int64 d = 0;
  for (; d + pair_width <= D; d += pair_width) {
    Vec q[rows][2];
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r) q[r][0] = load(Q + r * Q_stride + d), q[r][1] = load(Q + r * Q_stride + d + lanes);
    TESSERA_UNROLL
    for (int k = 0; k < count; ++k) {
      Vec key[2];
      widen_two(keys[k] + d, key);
      TESSERA_UNROLL
      for (int r = 0; r < rows; ++r) {
        Vec& sum = sums[r * count + k];
        sum = hn::MulAdd(key[1], q[r][1], hn::MulAdd(key[0], q[r][0], sum));
      }
    }
  }
  if (d < D) TESSERA_UNROLL
  for (int k = 0; k < count; ++k) {
    const Vec key = widen_vector(keys[k] + d);
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r)
      sums[r * count + k] = hn::MulAdd(key, load(Q + r * Q_stride + d), sums[r * count + k]);
  }
  store(sums_of(sums), out);
}

using StepTile = KeyTile<decode_step>;

// The keys that a job reads in a step, and where their rows are.
struct StepKeys {
  Range keys;
  StepTile K, V;

  HWY_INLINE void find(const HeadJob& head, Range range) {
    keys = range;
    K.find(head.k, range), V.find(head.v, range);
  }
  // The same keys of another head.
  HWY_INLINE void find_beside(const StepKeys& other, const HeadJob& head) {
    keys = other.keys;
    K.find_beside(other.K, head.k, keys), V.find_beside(other.V, head.v, keys);
  }
};

// Prefetches the rows of K and V that the next step will read; without a step, none. K's while K is read and V's while
// V is, so that memory is busy all the time.
struct DecodePrefetch {
  const StepKeys* next = nullptr;
  Int64 count = 0, D = 0, Dv = 0;

  DecodePrefetch() = default;
  HWY_INLINE DecodePrefetch(const StepKeys& next, Int64 D, Int64 Dv) :
      next(&next), count(next.keys.size()), D(D), Dv(Dv) {}
  HWY_INLINE void prefetch_key(Int64 j) const {
    if (j < count) prefetch_row(next->K, j, D);
  }
  HWY_INLINE void prefetch_value(Int64 j) const {
    if (j < count) prefetch_row(next->V, j, Dv);
  }
};

// Row r of keys whose type is T.
template <class T>
HWY_INLINE const T* row_of(const StepTile& tile, Int64 r) {
  return reinterpret_cast<const T*>(tile.row(r));
}
// Rows that were widened into scratch: f32, or f16 at the places of f32.
HWY_INLINE StepTile in_scratch(const float* rows, Int64 stride) {
  StepTile tile;
  tile.type = Type::f32, tile.scaled = false;
  for (Int64 r = 0; r < decode_step; ++r) tile.rows[r] = reinterpret_cast<const char*>(rows + r * stride);
  return tile;
}

// e4m3 becomes f16 by moving its bits, subnormal numbers included, if what f16 says is taken 2^8 times. That is cheaper
// than f32, which normalises every number. Rows whose length is a multiple of a vector go this way; Q takes the factor
// in, and O in the end.
HWY_INLINE bool is_moved(Type type, Int64 width) { return type == Type::e4m3 && width % lanes == 0; }
inline constexpr float moved_factor = 256;

template <class Words>
HWY_INLINE void move_numbers(Words words, const E4M3* from, UInt16* to) {
  const hn::Rebind<int8_t, Words> bytes;
  const auto bits = hn::PromoteTo(words, hn::LoadU(bytes, reinterpret_cast<const int8_t*>(from)));
  const auto largest = hn::Set(words, 0x7f);
  const auto moved = hn::AndNot(hn::Set(words, 0x4000), hn::ShiftLeft<7>(bits));  // the sign is in two bits
  const auto is_nan = hn::Eq(hn::And(bits, largest), largest);
  hn::StoreU(hn::IfThenElse(is_nan, hn::Set(words, 0x7e00), moved), words, reinterpret_cast<int16_t*>(to));
}

HWY_INLINE void move_rows(const StepTile& keys, Int64 count, Int64 width, float* out) {
  const hn::ScalableTag<int16_t> words;
  for (Int64 r = 0; r < count; ++r) {
    const E4M3* from = row_of<E4M3>(keys, r);
    auto* to = reinterpret_cast<UInt16*>(out + r * width);
    Int64 d = 0;
    for (; d + pair_width <= width; d += pair_width) move_numbers(words, from + d, to + d);
    if (d < width) move_numbers(hn::Half<hn::ScalableTag<int16_t>>(), from + d, to + d);
  }
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
  Vec sums[rows][cols];
  TESSERA_UNROLL
  for (int r = 0; r < rows; ++r) TESSERA_UNROLL
  for (int c = 0; c < cols; ++c) sums[r][c] = hn::Zero(FloatTag());
  for (Int64 j = 0; j < count; ++j) {
    next.prefetch_value(j);
    const T* row = row_of<T>(V, j) + d;
    Vec weight[rows];
    TESSERA_UNROLL
    for (int r = 0; r < rows; ++r) weight[r] = set(P[r * block_q + j]);
    TESSERA_UNROLL
    for (int c = 0; c + 2 <= cols; c += 2) {
      Vec value[2];
      widen_two(row + c * lanes, value);
      TESSERA_UNROLL
      for (int r = 0; r < rows; ++r) {
        sums[r][c] = hn::MulAdd(weight[r], value[0], sums[r][c]);
        sums[r][c + 1] = hn::MulAdd(weight[r], value[1], sums[r][c + 1]);
      }
    }
    if (cols == 1) {
      const Vec value = widen_vector(row);
      TESSERA_UNROLL
      for (int r = 0; r < rows; ++r) sums[r][0] = hn::MulAdd(weight[r], value, sums[r][0]);
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
  for (; d + pair_width <= Dv; d += pair_width)
    add_values_block<T, rows, 2>(V, d, count, P, d == 0 ? next : DecodePrefetch{}, O + d, O_stride);
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
