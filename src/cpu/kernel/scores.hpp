// From products to scores, tile by tile: the rule, the mask, and the dropout factors, each a pass of its own over the
// tile that is skipped when it has nothing to do. Scores come out in units of log2(e), so that exp2 finishes them.
// Implements docs/algorithm.md, "Scores"; included by cpu/isa/*.cpp inside their target region.
#pragma once

// For every vector of a tile: its row j and its first lane i.
#define TESSERA_FOR_TILE(tile, j, i)    \
  for (Int64 j = 0; j < (tile).nj; ++j) \
    for (Int64 i = 0; i < (tile).width; i += lanes)

// The operations of math/score_rule.hpp.
struct VectorMath {
  using Number = Vec;
  HWY_INLINE static Vec set(float x) { return hn::Set(FloatTag(), x); }
  HWY_INLINE static Vec multiply(Vec a, Vec b) { return hn::Mul(a, b); }
  HWY_INLINE static Vec multiply_add(Vec a, Vec b, Vec c) { return hn::MulAdd(a, b, c); }
  HWY_INLINE static Vec negative_multiply_add(Vec a, Vec b, Vec c) { return hn::NegMulAdd(a, b, c); }
  HWY_INLINE static Vec tanh(Vec x) { return hn::Tanh(FloatTag(), x); }
  HWY_INLINE static Vec abs(Vec x) { return hn::Abs(x); }
};

// Lanes whose bias is read at a time, a cache line of S.
inline constexpr Int64 strip = 16;

// A vector of a tile, for the rule: `first` is the distance of its first lane, `biases` where its bias lies.
struct TileElement {
  float first;
  const float* biases;
  HWY_INLINE Vec distance() const { return hn::Sub(set(first), iota(0)); }
  HWY_INLINE Vec bias() const { return load(biases); }
};

// out[j][i]: the bias of a strip of queries that begins at lane i0, along its rows, which are far apart; 0 for lanes
// without a query.
template <class T>
HWY_INLINE void load_bias_of(const PairNumbers& bias, const Tile& tile, Int64 i0, float* out) {
  const T* base = reinterpret_cast<const T*>(bias.base);
  for (Int64 i = 0; i < strip; ++i) {
    const bool exists = i0 + i < tile.ni;
    for (Int64 j = 0; j < tile.nj; ++j)
      out[j * strip + i] = exists ? widen(base[bias.index(0, tile.i0 + i0 + i, tile.j0 + j)]) : 0.0f;
  }
}

HWY_INLINE void load_bias(const PairNumbers& bias, const Tile& tile, Int64 i0, float* out) {
  if (bias.type == Type::f32) load_bias_of<float>(bias, tile, i0, out);
  if (bias.type == Type::f16) load_bias_of<F16>(bias, tile, i0, out);
  if (bias.type == Type::bf16) load_bias_of<BF16>(bias, tile, i0, out);
}

// S holds the rule's arguments, and becomes scores. `derivative`, if given, becomes theirs if there is one.
HWY_NOINLINE void apply_rule(const HeadJob& head, const Tile& tile, float* S, float* derivative) {
  // Copies: stores to S might change the head's own.
  const ScoreOptions options = head.options;
  const ScoreNumbers<float> numbers = head.score;
  const bool derives = derivative && options.need_derivative();
  HWY_ALIGN float biases[block_k * strip];
  for (Int64 i0 = 0; i0 < tile.width; i0 += strip) {
    if (options.bias) load_bias(head.bias, tile, i0, biases);
    for (Int64 j = 0; j < tile.nj; ++j)
      for (Int64 i = i0; i < lesser(i0 + strip, tile.width); i += lanes) {
        const Int64 at = j * block_q + i;
        const TileElement element{static_cast<float>(tile.j0 + j - tile.i0 - i - head.shift),
                                  biases + j * strip + i - i0};
        Vec slope = set(1.0f);
        store(ScoreRule<VectorMath>::score(options, numbers, load(S + at), element, &slope), S + at);
        if (derives) store(slope, derivative + at);
      }
  }
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

// S: products of K with q, or (`scaled`) with q times the scores' factor. Becomes scores, but for the factor that is
// returned, which is positive, and 1 if they are scaled or any option looked at them. `derivative` is written only if
// the options need one.
template <bool scaled>
HWY_INLINE float finish_scores(const HeadJob& head, const Tile& tile, float* S, float* derivative) {
  const Range queries{tile.i0, tile.i0 + tile.ni}, keys{tile.j0, tile.j0 + tile.nj};
  const bool whole = tile_class(head.mask, queries, keys) == TileClass::full;
  const ScoreOptions& options = head.options;
  const float factor = head.score.factor;
  if (whole && !options.change_scores() && !options.mask && (scaled || factor > 0)) return scaled ? 1.0f : factor;
  if (!scaled) scale_tile(tile, factor, S);
  if (options.change_scores()) apply_rule(head, tile, S, derivative);
  if (!whole) apply_band(head, tile, S);
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
