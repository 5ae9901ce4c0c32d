// SPDX-License-Identifier: Apache-2.0
// C (+)= A B on the matrix unit, with operands in pieces of bf16, whole or in small steps between other work: the
// counterpart of product.hpp. Included by cpu/isa/amx.cpp inside its target region.
#pragma once

// Which products of pieces are summed: those above the last piece's rounding, or, for scores of f16, all four, so that
// they are exact.
enum class Terms { most, all };

using Session = TileSession;  // configures the thread's tiles

// 32 x 32 numbers of C stay in tiles 0 to 3. One turn multiplies a piece of A (tiles 4 and 5) with one of B (6 and 7)
// over a depth of 32. Turns follow each other so that one operand stays where it is: two loads for four products.
template <int left, int right, bool load_left, bool load_right>
HWY_INLINE void turn(const Halves& a, const Pairs& b, Int64 k) {
  if (load_left) tile_load<4>(a.row(0, left) + k, a.stride * 2);
  if (load_right) tile_load<6>(b.row(k / 2, right), b.stride * 4);
  tile_dot<0, 4, 6>();
  if (load_right) tile_load<7>(b.row(k / 2, right) + 16, b.stride * 4);
  tile_dot<1, 4, 7>();
  if (load_left) tile_load<5>(a.row(16, left) + k, a.stride * 2);
  tile_dot<2, 5, 6>();
  tile_dot<3, 5, 7>();
}

// Three pieces take two sweeps over the depth: what is small first, so that it is not lost beside the rest.
template <int pieces>
inline constexpr Int64 sweeps = pieces == 3 ? 2 : 1;

template <int pieces>
HWY_INLINE void turns(const Halves& a, const Pairs& b, Int64 k, Int64 sweep, Terms terms) {
  if constexpr (pieces == 1) turn<0, 0, true, true>(a, b, k);
  if constexpr (pieces == 2) {
    if (terms == Terms::all) {
      turn<1, 1, true, true>(a, b, k);
      turn<0, 1, true, false>(a, b, k);
    } else {
      turn<0, 1, true, true>(a, b, k);
    }
    turn<0, 0, false, true>(a, b, k);
    turn<1, 0, true, false>(a, b, k);
  }
  if constexpr (pieces == 3) {
    if (sweep == 1) return turn<0, 0, true, true>(a, b, k);
    turn<0, 2, true, true>(a, b, k);
    turn<0, 1, false, true>(a, b, k);
    turn<1, 1, true, false>(a, b, k);
    turn<1, 0, false, true>(a, b, k);
    turn<2, 0, true, false>(a, b, k);
  }
}

// C [rows x width] (+)= A [rows x depth] B [depth x width], all three multiples of tile_step, in steps of one depth of
// tiles. Between two steps anything may happen that leaves the tiles alone.
template <int pieces>
class Product {
 public:
  Product() = default;
  HWY_INLINE Product(Result result, Terms terms, const Halves& a, const Pairs& b, float* c, Int64 ldc, Int64 rows,
                     Int64 width, Int64 depth) :
      result(result),
      terms(terms), a(a), b(b), c(c), ldc(ldc), rows(rows), width(width), depth(depth) {}

  HWY_INLINE Int64 steps() const { return rows / tile_step * (width / tile_step) * sweeps<pieces> * (depth / 32); }

  // False: there was nothing left to do.
  HWY_INLINE bool step() {
    if (n >= width || rows == 0) return false;
    float* out = c + m * ldc + n;
    if (k == 0 && sweep == 0) begin(out);
    turns<pieces>({a.row(m), a.stride, a.piece}, {b.at + n, b.stride, b.piece}, k, sweep, terms);
    k += 32;
    if (k < depth) return true;
    k = 0;
    if (++sweep < sweeps<pieces>) return true;
    sweep = 0;
    end(out);
    m += tile_step;
    if (m >= rows) m = 0, n += tile_step;
    return true;
  }

  HWY_INLINE void finish() {
    while (step()) {
    }
  }

 private:
  HWY_INLINE void begin(const float* out) const {
    if (result == Result::add) {
      tile_load<0>(out, ldc * 4), tile_load<1>(out + 16, ldc * 4);
      tile_load<2>(out + 16 * ldc, ldc * 4), tile_load<3>(out + 16 * ldc + 16, ldc * 4);
    } else {
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    }
  }
  HWY_INLINE void end(float* out) const {
    tile_store<0>(out, ldc * 4), tile_store<1>(out + 16, ldc * 4);
    tile_store<2>(out + 16 * ldc, ldc * 4), tile_store<3>(out + 16 * ldc + 16, ldc * 4);
  }

  Result result = Result::replace;
  Terms terms = Terms::most;
  Halves a{};
  Pairs b{};
  float* c = nullptr;
  Int64 ldc = 0, rows = 0, width = 0, depth = 0;
  Int64 m = 0, n = 0, k = 0, sweep = 0;  // where the next step is
};

// Products that overlap with vector work, spread evenly over its calls of advance(), one product after the other.
// Prefetching rides on the same calls.
template <int pieces>
class ProductsBeside {
 public:
  static constexpr int most = 5;

  HWY_INLINE void add(const Product<pieces>& product) {
    list[count++] = product;
    work += product.steps();
  }
  HWY_INLINE void start(Int64 advances) { slots = greater(advances, 1); }
  // A contiguous piece, a cache line per advance(): cheaper than a queue of rows.
  HWY_INLINE void prefetch(const float* begin, Int64 lines) { ahead = begin, ahead_end = begin + lines * 16; }
  HWY_INLINE void prefetch(PrefetchQueue& what) { queue = &what; }

  HWY_INLINE void advance() {
    if (ahead < ahead_end) __builtin_prefetch(ahead, 0, 2), ahead += 16;
    if (queue) queue->advance();
    for (owed += work; owed >= slots; owed -= slots) step();
  }
  HWY_INLINE void finish() {
    while (step()) {
    }
  }

 private:
  HWY_INLINE bool step() {
    for (; at < count; ++at)
      if (list[at].step()) return true;
    return false;
  }

  Product<pieces> list[most];
  int count = 0, at = 0;
  Int64 work = 0, slots = 1, owed = 0;
  const float *ahead = nullptr, *ahead_end = nullptr;
  PrefetchQueue* queue = nullptr;
};
