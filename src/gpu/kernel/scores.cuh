// SPDX-License-Identifier: Apache-2.0
// From one product q.k to a score, and the dropout factor, with the options that are configured and no others. The
// rule is math/score_rule.hpp, the mask math/mask.hpp, as on the CPU. Device code; implements docs/algorithm.md,
// "Scores" and "Dropout".
#pragma once

#include "gpu/kernel/common.cuh"
#include "gpu/kernel/math.cuh"

namespace tessera::gpu {

// The tiles of `block` rows (or columns) that a range touches. 32 bits: 64-bit counters would cost registers, and tiles
// are too few to need them.
struct TileRange {
  Int32 first, end;
  __device__ TileRange(Range range, int block) :
      first(Int32(range.begin / block)), end(range.empty() ? first : Int32(ceil_div(range.end, block))) {}
  __device__ bool empty() const { return first >= end; }
};

// A tile of scores: where it lies, and how much of it exists.
struct ScoreTile {
  Int64 i0, j0;
  int queries, keys;
  __device__ ScoreTile(const DeviceSequence& s, Int64 i0, int block_queries, Int64 j0, int block_keys) :
      i0(i0), j0(j0), queries(int(clamp(s.nq - i0, 0, block_queries))), keys(int(clamp(s.nk - j0, 0, block_keys))) {}
  __device__ bool exists(int query, int key) const { return query < queries && key < keys; }
};

// The mask in terms of a tile's own rows and columns, whichever of them are the queries: what lies outside the band
// low <= col - row <= high, or does not exist, is invisible.
struct TileBand {
  int rows, cols, low, high;
  bool cuts;  // something is invisible

  __device__ TileBand(const BandMask& mask, const ScoreTile& tile, int block_rows, int block_cols, bool rows_are_keys) {
    const Diagonals seen(mask, tile.i0, tile.j0);
    low = seen.low, high = seen.high;
    rows = tile.queries, cols = tile.keys;
    if (rows_are_keys) {
      const int mirrored = -low;
      low = -high, high = mirrored, rows = tile.keys, cols = tile.queries;
    }
    cuts = rows < block_rows || cols < block_cols || low > 1 - block_rows || high < block_cols - 1;
  }

  // The thread's values of a score tile that are invisible become -inf. Compares with constants only: what a product
  // could prepare once for all tiles would fill its registers.
  template <class Product, int rows_, int cols_>
  __device__ void hide(const Product& product, float (&S)[rows_][cols_]) const {
#pragma unroll
    for (int r = 0; r < rows_; ++r) {
      const int row = product.row(r), col0 = product.col(0);
      const int first = row < rows ? row + low - col0 : 1 << 20;
      const int last = (row + high < cols - 1 ? row + high : cols - 1) - col0;
#pragma unroll
      for (int c = 0; c < cols_; ++c)
        if (Product::col_offset(c) < first || Product::col_offset(c) > last) S[r][c] = minus_infinity<float>;
    }
  }
};

// The operations of math/score_rule.hpp on a GPU.
struct ScoreMath {
  using Number = float;
  __device__ static float set(float x) { return x; }
  __device__ static float multiply(float a, float b) { return a * b; }
  __device__ static float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
  __device__ static float negative_multiply_add(float a, float b, float c) { return fmaf(-a, b, c); }
  __device__ static float abs(float x) { return fabsf(x); }
  __device__ static float tanh(float x) { return tanhf(x); }
};

// What one head's scores depend on besides q and k.
template <ScoreConfig config>
struct ScoreOf {
  static constexpr ScoreOptions options = config.options();
  const Question& x;
  const DeviceSequence& s;
  Int32 b, h;
  float factor, slope;  // of score_numbers; the others are computed again each time, which spares registers
  PhiloxKey stream{};   // of dropout

  __device__ ScoreOf(const Question& x, const DeviceSequence& s, Int32 b, Int32 h) : x(x), s(s), b(b), h(h) {
    const float own_slope = options.alibi ? x.slopes[b * x.slope_batch + h * x.slope_head] : 0;
    const ScoreNumbers<float> numbers = numbers_of(own_slope);
    factor = numbers.factor, slope = numbers.slope;
    if constexpr (options.dropout) stream = x.rng ? dropout_key(UInt64(x.rng[0]), UInt64(x.rng[x.rng_stride])) : x.key;
  }

  // The score of a product before the band. derivative: of the score, for the backward pass, where it is not 1.
  __device__ float operator()(float product, const ScoreTile& tile, int query, int key,
                              float* derivative = nullptr) const {
    using Rule = ScoreRule<ScoreMath>;
    const Pair pair{*this, tile.i0 + query, tile.j0 + key};
    ScoreNumbers<float> numbers = numbers_of(0);
    numbers.factor = factor, numbers.slope = slope;
    const float s_cap = Rule::capped(options, numbers, product * factor, pair, derivative);
    if constexpr (options.bias || options.mask)
      if (!tile.exists(query, key)) return minus_infinity<float>;
    const float S = Rule::placed(options, numbers, s_cap, pair);
    if constexpr (options.mask)
      if (pair.template of<unsigned char>(x.mask) == 0) return minus_infinity<float>;
    return S;
  }

  // The dropout factor: 0, or 1 / (1 - p_drop).
  __device__ float keep(const ScoreTile& tile, int query, int key) const {
    if constexpr (!options.dropout) return 1;
    const Int64 i = tile.i0 + query + x.row0, j = tile.j0 + key + x.col0;
    const Philox4 block = dropout_block(stream, b + x.batch0, h + x.head0, i, j);
    return dropout_value(block, i, j) >= x.dropout_threshold ? x.keep_scale : 0;
  }

 private:
  // What the rule asks about one element.
  struct Pair {
    const ScoreOf& score;
    Int64 i, j;

    __device__ float distance() const { return float(j - i - score.s.shift); }
    __device__ float bias() const {
      if constexpr (options.bias) return to_float(of<typename Stored<config.bias>::Type>(score.x.bias));
      return 0;
    }
    template <class T>
    __device__ T of(const PairRef& t) const {
      return static_cast<const T*>(t.data)[score.b * t.batch + score.h * t.head + i * t.row + j * t.key];
    }
  };

  // In units of log2(e).
  __device__ ScoreNumbers<float> numbers_of(float slope) const {
    return score_numbers(options, x.score_scale, x.parameters, slope, log2e<float>);
  }
};

}  // namespace tessera::gpu
