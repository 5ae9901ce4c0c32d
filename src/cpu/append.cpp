// SPDX-License-Identifier: Apache-2.0
// Append: new rows of keys, rotated, and of values go to their places in the cache, and rotated queries to theirs; see
// docs/algorithm.md, "Append". A row is widened, rotated, divided by its scale and narrowed once, in f32, or in f64
// where a type is f64. What needs none of that is copied.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "core/key_rows.hpp"
#include "core/limits.hpp"
#include "core/parallel.hpp"
#include "core/tensor.hpp"
#include "cpu/kernels.hpp"
#include "math/types.hpp"

namespace tessera::cpu {
namespace {

template <class Real>
using Row = std::array<Real, most_dims>;

template <class T>
void widen_all(const void* from, std::int64_t count, float* to) {
  const auto* elements = static_cast<const T*>(from);
  for (std::int64_t d = 0; d < count; ++d) to[d] = widen(elements[d]);
}

template <class T>
void narrow_all(const float* from, std::int64_t count, void* to) {
  auto* elements = static_cast<T*>(to);
  for (std::int64_t d = 0; d < count; ++d) elements[d] = narrow<T>(from[d]);
}

void load(const void* from, Type type, std::int64_t count, float* to) {
  if (type == Type::f16) return widen_all<F16>(from, count, to);
  if (type == Type::bf16) return widen_all<BF16>(from, count, to);
  widen_all<float>(from, count, to);
}

void load(const void* from, Type type, std::int64_t count, double* to) {
  for (std::int64_t d = 0; d < count; ++d) to[d] = load_element(from, type, d);
}

void store(const float* from, std::int64_t count, void* to, Type type) {
  if (type == Type::f16) return narrow_all<F16>(from, count, to);
  if (type == Type::bf16) return narrow_all<BF16>(from, count, to);
  if (type == Type::e4m3) return narrow_all<E4M3>(from, count, to);
  if (type == Type::i8) return narrow_all<Int8>(from, count, to);
  narrow_all<float>(from, count, to);
}

void store(const double* from, std::int64_t count, void* to, Type type) {
  for (std::int64_t d = 0; d < count; ++d) store_element(to, type, d, from[d]);
}

const char* at(const Tensor& t, std::int64_t element) {
  return static_cast<const char*>(t.data) + element * size_of(t.type);
}

// The rotation of a token, which its heads share.
template <class Real>
struct Rotation {
  Row<Real> cos, sin;
  std::int64_t half = 0;  // 0: none
  bool interleaved = false;

  Rotation(const AppendArgs& a, std::int64_t position) : interleaved(a.interleaved) {
    if (position < 0) return;
    half = a.rotary_cos.shape[1];
    load(at(a.rotary_cos, position * stride(a.rotary_cos, 0)), a.rotary_cos.type, half, cos.data());
    load(at(a.rotary_sin, position * stride(a.rotary_sin, 0)), a.rotary_sin.type, half, sin.data());
  }

  void turn(Real* x) const {
    const std::int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
    for (std::int64_t d = 0; d < half; ++d) {
      const auto n = static_cast<std::size_t>(d);
      Real &first = x[d * step], &second = x[d * step + apart];
      const Real a = first, b = second;
      first = a * cos[n] - b * sin[n];
      second = a * sin[n] + b * cos[n];
    }
  }
};

// The scales of a row: the caller's, or computed and stored. Each is that of `width` dims.
struct RowScale {
  float* place = nullptr;  // null: none
  std::int64_t width = most_dims, stride = 0;
  bool computed = false;
};

// The scales of a row of the tensor `scales`, the first of which is at `place`.
RowScale row_scale(const Tensor& scales, float* place) {
  if (!place) return {};
  if (scales.ndim < 4) return {.place = place, .computed = scales.ndim == 3};
  return {.place = place, .width = scale_width, .stride = stride(scales, 3), .computed = true};
}

// The largest number of the row over the largest of the type, so that the row just fits; NaN and infinities aside.
template <class Real>
float fitting_scale(const Real* row, std::int64_t width, Type type) {
  Real largest = 0;
  for (std::int64_t d = 0; d < width; ++d) {
    const Real size = row[d] < 0 ? -row[d] : row[d];
    if (size > largest && size <= std::numeric_limits<Real>::max()) largest = size;
  }
  return static_cast<float>(largest / (type == Type::i8 ? 127 : 448));
}

// What has a scale of 0 means 0, whatever is stored; NaN stays.
template <class Real>
void divide(Real* row, std::int64_t width, float scale) {
  for (std::int64_t d = 0; d < width; ++d) row[d] = scale == 0 ? row[d] * 0 : row[d] / static_cast<Real>(scale);
}

template <class Real>
void move_row(const char* from, Type type, char* to, Type to_type, std::int64_t width, const Rotation<Real>& rotation,
              RowScale scale) {
  Row<Real> row;
  // Rows of one type, without a scale, are copied behind the dims that are rotated.
  const bool copied = type == to_type && !scale.place;
  const std::int64_t converted = copied ? 2 * rotation.half : width;
  load(from, type, converted, row.data());
  rotation.turn(row.data());
  for (std::int64_t d = 0; d < width && scale.place; d += scale.width, scale.place += scale.stride) {
    const std::int64_t dims = std::min(scale.width, width - d);
    if (scale.computed) *scale.place = fitting_scale(row.data() + d, dims, to_type);
    divide(row.data() + d, dims, *scale.place);
  }
  if (copied) {
    const std::int64_t begin = converted * size_of(type);
    std::memmove(to + begin, from + begin, static_cast<std::size_t>(width * size_of(type) - begin));
  }
  store(row.data(), converted, to, to_type);
}

// The first element of a token: of [T,H,D], or of [B,n,H,D] in which token t of sequence b is number b * n + t.
std::int64_t token_offset(const Tensor& t, std::int64_t token) {
  if (t.ndim == 3) return token * stride(t, 0);
  return token / t.shape[1] * stride(t, 0) + token % t.shape[1] * stride(t, 1);
}

// All heads of one token. scale: head 0's, of the tensor `scales`.
template <class Real>
void move_heads(const Tensor& from, std::int64_t token, char* to, const Tensor& like, const Rotation<Real>& rotation,
                const Tensor& scales = {}, float* scale = nullptr) {
  const int head_dim = from.ndim - 2;
  const std::int64_t heads = from.shape[static_cast<std::size_t>(head_dim)];
  const std::int64_t width = from.shape[static_cast<std::size_t>(head_dim + 1)];
  const std::int64_t step = stride(like, like.ndim - 2) * size_of(like.type), first = token_offset(from, token);
  const std::int64_t scale_step = scale ? stride(scales, scales.ndim < 3 ? scales.ndim - 1 : 2) : 0;
  for (std::int64_t h = 0; h < heads; ++h)
    move_row(at(from, first + h * stride(from, head_dim)), from.type, to + h * step, like.type, width, rotation,
             row_scale(scales, scale ? scale + h * scale_step : nullptr));
}

template <class Real>
void move_token(const AppendArgs& a, const NewRows& rows, std::int64_t token) {
  const auto n = static_cast<std::size_t>(token);
  if (token < rows.tokens) {
    const Rotation<Real> rotation(a, rows.positions.empty() ? -1 : rows.positions[n]), none(a, -1);
    const auto scale = [&](const std::vector<float*>& places) { return places.empty() ? nullptr : places[n]; };
    if (rows.k[n]) move_heads(a.k_new, token, rows.k[n], a.k, rotation, a.k_scale, scale(rows.k_scales));
    if (rows.v[n]) move_heads(a.v_new, token, rows.v[n], a.v, none, a.v_scale, scale(rows.v_scales));
  }
  if (token < rows.q_tokens && rows.q_positions[n] >= 0) {
    char* to = static_cast<char*>(a.q_out.data) + token_offset(a.q_out, token) * size_of(a.q_out.type);
    move_heads(a.q, token, to, a.q_out, Rotation<Real>(a, rows.q_positions[n]));
  }
}

}  // namespace

void append(const AppendArgs& a, const NewRows& rows, int threads) {
  const auto wide = [](const Tensor& t) { return t && t.type == Type::f64; };
  const bool f64 = wide(a.k_new) || wide(a.v_new) || wide(a.k) || wide(a.v) || wide(a.q) || wide(a.rotary_cos);
  // A token of some heads is little work: a task has several.
  constexpr std::int64_t task_tokens = 8;
  const std::int64_t tokens = std::max(rows.tokens, rows.q_tokens);
  parallel_for(ceil_div(tokens, task_tokens), threads, [&](std::int64_t task, int) {
    for (std::int64_t token = task * task_tokens; token < std::min(tokens, (task + 1) * task_tokens); ++token)
      f64 ? move_token<double>(a, rows, token) : move_token<float>(a, rows, token);
  });
  if (a.status && rows.outside_pool)
    __atomic_fetch_or(static_cast<std::int32_t*>(a.status.data), page_outside_pool, __ATOMIC_RELAXED);
}

}  // namespace tessera::cpu
