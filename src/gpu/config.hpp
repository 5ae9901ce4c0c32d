// SPDX-License-Identifier: Apache-2.0
// What the compiler must know to specialise the kernels that all families share, and the part of it that every family's
// own configuration contains. Structural values, written into generated units. Shared by host and device code.
#pragma once

#include "math/score.hpp"

namespace tessera::gpu {

enum class Element { f32, f16, bf16, none, e4m3, i8 };  // the last two: of caches only

enum class Side { queries, keys };  // what the rows of a backward kernel are

// The options of scores that change a kernel's code, as math/score.hpp has them, with the bias's type. What is off
// costs nothing.
struct ScoreConfig {
  bool softcap = false, alibi = false, mask = false, dropout = false;
  Element bias = Element::none;

  static constexpr ScoreConfig of(const ScoreOptions& o, Element bias) {
    return {.softcap = o.softcap, .alibi = o.alibi, .mask = o.mask, .dropout = o.dropout, .bias = bias};
  }
  constexpr ScoreOptions options() const {
    return {.softcap = softcap, .alibi = alibi, .bias = bias != Element::none, .mask = mask, .dropout = dropout};
  }
  constexpr bool need_derivative() const { return options().need_derivative(); }
  constexpr int count() const { return softcap + alibi + mask + dropout + (bias != Element::none); }
  constexpr bool any() const { return count() > 0; }
  constexpr bool operator==(const ScoreConfig&) const = default;
};

// The kernels before and after a backward pass (delta, clear, convert, sink_gradient), which have a warp per row or a
// block per head. They read some types and dims and nothing else: one compiled kernel serves every option.
struct RowConfig {
  int threads = 128;
  int D = 64, Dv = 64;
  Element o = Element::f32, d_o = Element::f32;
  Element dq = Element::f32, dk = Element::f32, dv = Element::f32;

  constexpr bool operator==(const RowConfig&) const = default;
};

// One of two types.
template <bool first, class A, class B>
struct Chosen {
  using Type = A;
};
template <class A, class B>
struct Chosen<false, A, B> {
  using Type = B;
};

constexpr int padded_to_4(int width) { return int(round_up(width, 4)); }

}  // namespace tessera::gpu
