// SPDX-License-Identifier: Apache-2.0
// From products to scores, tile by tile: the rule, the mask, and the dropout factors, each a pass of its own over the
// tile that is skipped when it has nothing to do. Scores come out in units of log2(e), so that exp2 finishes them.
// Implements docs/algorithm.md, "Scores"; included by cpu/isa/*.cpp inside their target region.
#pragma once

// For every vector of a tile: its row j and its first lane i.
#define TESSERA_FOR_TILE(tile, j, i)    \
  for (Int64 j = 0; j < (tile).nj; ++j) \
    for (Int64 i = 0; i < (tile).width; i += lanes)

// The operations of math/score_rule.hpp on a few vectors at a time: the rule asks for its options once for all of them,
// and independent vectors hide the latency of tanh.
template <int count>
struct VectorMath {
  struct Number {
    Vec of[count];
  };
  HWY_INLINE static Number set(float x) {
    Number out;
    TESSERA_UNROLL
    for (int n = 0; n < count; ++n) out.of[n] = hn::Set(FloatTag(), x);
    return out;
  }
  HWY_INLINE static Number multiply(Number a, const Number& b) {
    TESSERA_UNROLL
    for (int n = 0; n < count; ++n) a.of[n] = hn::Mul(a.of[n], b.of[n]);
    return a;
  }
  HWY_INLINE static Number multiply_add(Number a, const Number& b, const Number& c) {
    TESSERA_UNROLL
    for (int n = 0; n < count; ++n) a.of[n] = hn::MulAdd(a.of[n], b.of[n], c.of[n]);
    return a;
  }
  HWY_INLINE static Number negative_multiply_add(Number a, const Number& b, const Number& c) {
    TESSERA_UNROLL
    for (int n = 0; n < count; ++n) a.of[n] = hn::NegMulAdd(a.of[n], b.of[n], c.of[n]);
    return a;
  }
  HWY_INLINE static Number tanh(Number x) {
    TESSERA_UNROLL
    for (int n = 0; n < count; ++n) x.of[n] = hn::Tanh(FloatTag(), x.of[n]);
    return x;
  }
  HWY_INLINE static Number abs(Number x) {
    TESSERA_UNROLL
    for (int n = 0; n < count; ++n) x.of[n] = hn::Abs(x.of[n]);
    return x;
  }
};

// Queries of a tile at one key, for the rule: `first` is the distance of the first lane. `places`, if given, are those
// of the lanes relative to the first one; else they are neighbours.
template <int count>
struct TileElement {
  using Number = typename VectorMath<count>::Number;
  Int64 first;
  const float* places;
  HWY_INLINE Number distance() const {
    Number out;
    if (places) {
      TESSERA_UNROLL
      for (int n = 0; n < count; ++n)
        out.of[n] = hn::Sub(hn::Set(FloatTag(), static_cast<float>(first)), load(places + n * lanes));
      return out;
    }
    TESSERA_UNROLL
    for (int n = 0; n < count; ++n) out.of[n] = hn::Sub(set(static_cast<float>(first - n * lanes)), iota(0));
    return out;
  }
  HWY_INLINE Number bias() const { return VectorMath<count>::set(0); }  // comes by a pass of its own
};

// `count` vectors of S, the rule's arguments, become scores. `derivative`, if given, becomes theirs.
template <int count>
HWY_INLINE void apply_rule_to(const ScoreOptions& options, const ScoreNumbers<float>& numbers, Int64 first,
                              const float* places, float* S, float* derivative) {
  typename VectorMath<count>::Number argument, slope = VectorMath<count>::set(1);
  TESSERA_UNROLL
  for (int n = 0; n < count; ++n) argument.of[n] = load(S + n * lanes);
  const auto scores =
      ScoreRule<VectorMath<count>>::score(options, numbers, argument, TileElement<count>{first, places}, &slope);
  TESSERA_UNROLL
  for (int n = 0; n < count; ++n) store(scores.of[n], S + n * lanes);
  if (!derivative) return;
  TESSERA_UNROLL
  for (int n = 0; n < count; ++n) store(slope.of[n], derivative + n * lanes);
}

// The rule, but for the bias.
HWY_NOINLINE void apply_rule(const HeadJob& head, const Tile& tile, float* S, float* derivative) {
  // Copies: stores to S might change the head's own.
  ScoreOptions options = head.options;
  options.bias = false;
  const ScoreNumbers<float> numbers = head.score;
  constexpr Int64 together = block_cols * lanes;
  const Int64 corner = head.rows.place(tile.i0);
  HWY_ALIGN float room[block_q] = {};
  const float* places = head.rows.positions ? room : nullptr;
  for (Int64 i = 0; i < tile.ni && head.rows.positions; ++i)
    room[i] = static_cast<float>(head.rows.place(tile.i0 + i) - corner);
  for (Int64 j = 0; j < tile.nj; ++j) {
    const Int64 at = j * block_q, first = tile.j0 + j - corner;
    float *row = S + at, *slopes = derivative && options.need_derivative() ? derivative + at : nullptr;
    Int64 i = 0;
    for (; i + together <= tile.width; i += together)
      apply_rule_to<block_cols>(options, numbers, places ? first : first - i, places ? places + i : nullptr, row + i,
                                slopes ? slopes + i : nullptr);
    for (; i < tile.width; i += lanes)
      apply_rule_to<1>(options, numbers, places ? first : first - i, places ? places + i : nullptr, row + i,
                       slopes ? slopes + i : nullptr);
  }
}

// One number, for the rule's last step.
struct ScalarMath {
  using Number = float;
  HWY_INLINE static float set(float x) { return x; }
  HWY_INLINE static float multiply_add(float a, float b, float c) { return c + a * b; }
  HWY_INLINE static float negative_multiply_add(float a, float b, float c) { return c - a * b; }
  HWY_INLINE static float abs(float x) { return __builtin_fabsf(x); }
};
struct BiasElement {
  float value;
  HWY_INLINE float distance() const { return 0; }
  HWY_INLINE float bias() const { return value; }
};

// The rule's bias, along the rows of its tensor, which are far apart.
template <class T>
HWY_INLINE void add_bias(const HeadJob& head, const Tile& tile, float* S) {
  const T* base = reinterpret_cast<const T*>(head.bias.base);
  const ScoreNumbers<float> numbers = head.score;
  for (Int64 i = 0; i < tile.ni; ++i)
    for (Int64 j = 0; j < tile.nj; ++j) {
      float& s = S[j * block_q + i];
      const BiasElement element{widen(base[head.bias.index(0, tile.i0 + i, tile.j0 + j)])};
      s = ScoreRule<ScalarMath>::placed({.bias = true}, numbers, s, element);
    }
}

HWY_NOINLINE void apply_bias(const HeadJob& head, const Tile& tile, float* S) {
  if (head.bias.type == Type::f32) add_bias<float>(head, tile, S);
  if (head.bias.type == Type::f16) add_bias<F16>(head, tile, S);
  if (head.bias.type == Type::bf16) add_bias<BF16>(head, tile, S);
}

// S = -inf where j - i lies outside the band.
HWY_NOINLINE void apply_band(const HeadJob& head, const Tile& tile, float* S) {
  // Relative to the tile's corner everything fits 16 bits, so f32 holds it exactly.
  const Int64 corner = tile.j0 - tile.i0, far = 4 * block_k;
  const Vec low = set(static_cast<float>(clamp(head.mask.low - corner, -far, far)));
  const Vec high = set(static_cast<float>(clamp(head.mask.high - corner, -far, far)));
  TESSERA_FOR_TILE(tile, j, i) {
    const Vec distance = hn::Sub(set(static_cast<float>(j - i)), iota(0));
    const auto visible = hn::And(hn::Ge(distance, low), hn::Le(distance, high));
    float* at = S + j * block_q + i;
    store(hn::IfThenElse(visible, load(at), set(-infinity)), at);
  }
}

// S = -inf where the rows, which the band is around, see nothing.
HWY_NOINLINE void apply_rows(const HeadJob& head, const Tile& tile, float* S) {
  for (Int64 i = 0; i < tile.ni; ++i)
    for (Int64 j = 0; j < tile.nj; ++j)
      if (!head.rows.visible(tile.i0 + i, tile.j0 + j)) S[j * block_q + i] = -infinity;
}

// S = -inf where the caller's mask is 0.
HWY_NOINLINE void apply_mask_tensor(const HeadJob& head, const Tile& tile, float* S) {
  for (Int64 i = 0; i < tile.ni; ++i)
    for (Int64 j = 0; j < tile.nj; ++j)
      if (head.visible.base[head.visible.index(0, tile.i0 + i, tile.j0 + j)] == 0) S[j * block_q + i] = -infinity;
}

// X *= factor
HWY_NOINLINE void scale_tile(const Tile& tile, float factor, float* X) {
  TESSERA_FOR_TILE(tile, j, i) {
    float* at = X + j * block_q + i;
    store(hn::Mul(load(at), set(factor)), at);
  }
}

// Whether every query of a tile sees every key of it, but for a mask tensor.
HWY_INLINE bool is_whole(const HeadJob& head, Range queries, Range keys) {
  return tile_class(head.mask, queries, keys) == TileClass::full && (!head.rows || head.rows.sees_all(queries, keys));
}

// S: products of K with q, or (`scaled`) with q times the scores' factor. Becomes scores, but for the factor that is
// returned, which is positive, and 1 if they are scaled or any option looked at them. `derivative` is written only if
// the options need one.
template <bool scaled>
HWY_INLINE float finish_scores(const HeadJob& head, const Tile& tile, float* S, float* derivative) {
  const Range queries{tile.i0, tile.i0 + tile.ni}, keys{tile.j0, tile.j0 + tile.nj};
  const bool whole = is_whole(head, queries, keys);
  const ScoreOptions& options = head.options;
  const float factor = head.score.factor;
  if (whole && !options.change_scores() && !options.mask && (scaled || factor > 0)) return scaled ? 1.0f : factor;
  if (!scaled) scale_tile(tile, factor, S);
  if (options.change_products()) apply_rule(head, tile, S, derivative);
  if (options.bias) apply_bias(head, tile, S);
  if (!whole) apply_band(head, tile, S);
  if (!whole && head.rows) apply_rows(head, tile, S);
  if (options.mask) apply_mask_tensor(head, tile, S);
  return 1.0f;
}

// Z = z / (1 - p_drop) for every element of the tile, 0 in lanes without a query. One Philox block serves two queries
// and four keys.
HWY_NOINLINE void dropout_factors(const HeadJob& head, const Tile& tile, float* Z) {
  const Int64 row_begin = tile.i0 + head.row0, row_end = row_begin + tile.ni;
  const Int64 col_begin = tile.j0 + head.col0, col_end = col_begin + tile.nj;
  for (Int64 j = 0; j < tile.nj; ++j) fill(Z + j * block_q + tile.ni, tile.width - tile.ni, 0);
  // Blocks start at even rows, and at columns 16 a + 2 c with c < 4; the other columns belong to the same blocks.
  for (Int64 row = row_begin & ~Int64(1); row < row_end; row += 2)
    for (Int64 start = col_begin & ~Int64(15); start < col_end; start += 16)
      for (Int64 col = start; col < start + 8; col += 2) {
        const Philox4 block = dropout_block(head.key, head.b0, head.h0, row, col);
        for (Int64 i = row; i < row + 2; ++i)
          for (Int64 n = 0; n < 4; ++n) {
            const Int64 j = col + (n & 1) + 8 * (n >> 1);
            if (i < row_begin || i >= row_end || j < col_begin || j >= col_end) continue;
            const bool kept = dropout_value(block, i, j) >= head.threshold;
            Z[(j - col_begin) * block_q + (i - row_begin)] = kept ? head.keep_scale : 0.0f;
          }
      }
}

// P = 0 where Z is. The forward pass multiplies by 1 / (1 - p_drop) only in the end: its largest P of a row is 1, and
// rounded to a matrix unit's type, the scale times 1 would be wrong by the same amount in every row.
HWY_INLINE void drop(const Tile& tile, const float* Z, float* P) {
  TESSERA_FOR_TILE(tile, j, i) {
    const Int64 at = j * block_q + i;
    store(hn::IfThenZeroElse(hn::Eq(load(Z + at), hn::Zero(FloatTag())), load(P + at)), P + at);
  }
}

// X *= Z
HWY_INLINE void multiply_tile(const Tile& tile, const float* Z, float* X) {
  TESSERA_FOR_TILE(tile, j, i) {
    const Int64 at = j * block_q + i;
    store(hn::Mul(load(X + at), load(Z + at)), X + at);
  }
}
