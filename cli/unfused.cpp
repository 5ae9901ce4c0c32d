// SPDX-License-Identifier: Apache-2.0
// Implements cli/unfused.hpp: two matrix products and a softmax a head forward, four products backward.
// Formulas: docs/algorithm.md, sections forward and backward, without tiles.
#include "cli/unfused.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/isa.hpp"
#include "core/parallel.hpp"

namespace tessera::cli {
namespace {

constexpr std::int64_t row_padding = 16;  // against conflict misses: power-of-two rows map to the same cache sets

// A matrix operand: element (i, k) is at data[i * rows + k * columns].
struct Operand {
  const float* data;
  std::int64_t rows, columns;
};

// C [m, n] = factor * A [m, inner] * B [inner, n], with unit stride in the rows of B and C. Register blocking: tiles of
// 4 x (2 or 4) vectors. Cache blocking: `inner` is split, so that a block of B stays in cache.
template <int W, int columns>
TESSERA_INLINE void multiply(std::int64_t m, std::int64_t n, std::int64_t inner, float factor, Operand A,
                             const float* B, std::int64_t ldb, float* C, std::int64_t ldc) {
  using V = typename Vector<W>::type;
  constexpr std::int64_t rows = 4, block = 256;
  for (std::int64_t k0 = 0; k0 < inner; k0 += block) {
    const std::int64_t k1 = std::min(inner, k0 + block);
    for (std::int64_t j = 0; j < n; j += columns * W)
      for (std::int64_t i = 0; i < m; i += rows) {
        V sum[rows][columns] = {};
        for (std::int64_t k = k0; k < k1; ++k) {
          const float* a = A.data + i * A.rows + k * A.columns;
          for (int c = 0; c < columns; ++c) {
            const V b = *reinterpret_cast<const V*>(B + k * ldb + j + c * W);
            for (int r = 0; r < rows; ++r) sum[r][c] += a[r * A.rows] * b;
          }
        }
        for (int r = 0; r < rows; ++r)
          for (int c = 0; c < columns; ++c) {
            V* out = reinterpret_cast<V*>(C + (i + r) * ldc + j + c * W);
            *out = k0 == 0 ? sum[r][c] * factor : *out + sum[r][c] * factor;
          }
      }
  }
}

// exp of W numbers <= 0: range reduction to 2^n times a polynomial, accurate to f32 (Cephes' coefficients).
template <int W>
TESSERA_INLINE void exponential(typename Vector<W>::type& x) {
  using V = typename Vector<W>::type;
  using I = typename Vector<W>::ints;
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low mantissa bits
  const V lowest = V{} - 87.0f;
  x = x < lowest ? lowest : x;
  const V shifted = x * 1.44269504f + magic;
  const V n = shifted - magic;
  const V f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = V{} + 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  x = (V)((I)p + ((I)shifted << 23));
}

// Softmax of one row, S to P in place; keys from `visible` on get 0.
template <int W>
TESSERA_INLINE void softmax(float* row, std::int64_t n, std::int64_t visible) {
  using V = typename Vector<W>::type;
  const std::int64_t whole = (visible + W - 1) / W * W;
  for (std::int64_t j = visible; j < n; ++j) row[j] = -std::numeric_limits<float>::infinity();
  V most = V{} - std::numeric_limits<float>::infinity();
  for (std::int64_t j = 0; j < whole; j += W) {
    const V s = *reinterpret_cast<const V*>(row + j);
    most = s > most ? s : most;
  }
  float m = most[0];
  for (int w = 1; w < W; ++w) m = std::max(m, most[w]);
  V sums = {};
  for (std::int64_t j = 0; j < whole; j += W) {
    V s = *reinterpret_cast<const V*>(row + j) - m;
    exponential<W>(s);
    *reinterpret_cast<V*>(row + j) = s;
    for (std::int64_t e = std::max<std::int64_t>(0, visible - j); e < W; ++e) row[j + e] = 0;
    sums += *reinterpret_cast<const V*>(row + j);
  }
  float sum = 0;
  for (int w = 0; w < W; ++w) sum += sums[w];
  for (std::int64_t j = 0; j < visible; ++j) row[j] *= 1 / sum;
  for (std::int64_t j = whole; j < n; ++j) row[j] = 0;
}

// One head's slices of the tensors and its scratch memory.
struct Head {
  std::int64_t N, D, ld, row;  // ld: from token to token in the tensors; row: from row to row in P and dS
  bool causal;
  float scale;
  const float *q, *k, *v, *o, *d_o;
  float *out, *dq, *dk, *dv;
  float *P, *dS, *transposed;
};

TESSERA_INLINE void transpose(const Head& h, const float* from) {
  for (std::int64_t i = 0; i < h.N; ++i)
    for (std::int64_t d = 0; d < h.D; ++d) h.transposed[d * h.N + i] = from[i * h.ld + d];
}

template <int W, int columns>
TESSERA_INLINE void head_forward(const Head& h) {
  transpose(h, h.k);
  multiply<W, columns>(h.N, h.N, h.D, h.scale, {h.q, h.ld, 1}, h.transposed, h.N, h.P, h.row);
  for (std::int64_t i = 0; i < h.N; ++i) softmax<W>(h.P + i * h.row, h.N, h.causal ? i + 1 : h.N);
  multiply<W, columns>(h.N, h.D, h.N, 1, {h.P, h.row, 1}, h.v, h.ld, h.out, h.ld);
}

template <int W, int columns>
TESSERA_INLINE void head_backward(const Head& h) {
  multiply<W, columns>(h.N, h.D, h.N, 1, {h.P, 1, h.row}, h.d_o, h.ld, h.dv, h.ld);  // dV = P^T dO
  transpose(h, h.v);
  multiply<W, columns>(h.N, h.N, h.D, 1, {h.d_o, h.ld, 1}, h.transposed, h.N, h.dS, h.row);  // dP = dO V^T
  for (std::int64_t i = 0; i < h.N; ++i) {
    float delta = 0;
    for (std::int64_t d = 0; d < h.D; ++d) delta += h.d_o[i * h.ld + d] * h.o[i * h.ld + d];
    const float* p = h.P + i * h.row;
    float* ds = h.dS + i * h.row;
    for (std::int64_t j = 0; j < h.N; ++j) ds[j] = p[j] * (ds[j] - delta);
  }
  multiply<W, columns>(h.N, h.D, h.N, h.scale, {h.dS, h.row, 1}, h.k, h.ld, h.dq, h.ld);  // dQ = dS K
  multiply<W, columns>(h.N, h.D, h.N, h.scale, {h.dS, 1, h.row}, h.q, h.ld, h.dk, h.ld);  // dK = dS^T Q
}

TESSERA_TARGET_AVX512 void forward_avx512(const Head& h) { head_forward<16, 4>(h); }
TESSERA_TARGET_AVX512 void backward_avx512(const Head& h) { head_backward<16, 4>(h); }
TESSERA_TARGET_AVX2 void forward_avx2(const Head& h) { head_forward<8, 2>(h); }
TESSERA_TARGET_AVX2 void backward_avx2(const Head& h) { head_backward<8, 2>(h); }
void forward_baseline(const Head& h) { head_forward<4, 2>(h); }
void backward_baseline(const Head& h) { head_backward<4, 2>(h); }

void run_forward(const Head& h) {
  const Isa isa = best_isa();
  (isa == Isa::avx512 ? forward_avx512 : isa == Isa::avx2 ? forward_avx2 : forward_baseline)(h);
}

void run_backward(const Head& h) {
  const Isa isa = best_isa();
  (isa == Isa::avx512 ? backward_avx512 : isa == Isa::avx2 ? backward_avx2 : backward_baseline)(h);
}

std::size_t bytes_of(const std::vector<std::vector<float>>& buffers) {
  std::size_t bytes = 0;
  for (const auto& buffer : buffers) bytes += buffer.size() * sizeof(float);
  return bytes;
}

Head slices(const UnfusedProblem& p, std::int64_t h) {
  Head head{};
  head.N = p.tokens, head.D = p.dim, head.ld = p.heads * p.dim, head.row = p.tokens + row_padding;
  head.causal = p.causal, head.scale = 1 / std::sqrt(static_cast<float>(p.dim));
  head.q = p.q + h * p.dim, head.k = p.k + h * p.dim, head.v = p.v + h * p.dim;
  return head;
}

}  // namespace

Unfused::Unfused(const UnfusedProblem& problem) :
    problem(problem), threads(static_cast<int>(std::min<std::int64_t>(problem.threads, problem.heads))) {}

void Unfused::forward(float* o) {
  const auto matrix = static_cast<std::size_t>(problem.tokens * (problem.tokens + row_padding));
  P.resize(static_cast<std::size_t>(problem.heads));
  transposed.resize(static_cast<std::size_t>(threads));
  for (auto& buffer : P) buffer.resize(matrix);
  for (auto& buffer : transposed) buffer.resize(static_cast<std::size_t>(problem.tokens * problem.dim));
  parallel_for(problem.heads, threads, [&](std::int64_t h, int worker) {
    Head head = slices(problem, h);
    head.out = o + h * problem.dim;
    head.P = P[static_cast<std::size_t>(h)].data();
    head.transposed = transposed[static_cast<std::size_t>(worker)].data();
    run_forward(head);
  });
}

void Unfused::backward(const float* d_o, const float* o, float* dq, float* dk, float* dv) {
  dS.resize(static_cast<std::size_t>(threads));
  for (auto& buffer : dS) buffer.resize(P.front().size());
  parallel_for(problem.heads, threads, [&](std::int64_t h, int worker) {
    const std::int64_t at = h * problem.dim;
    Head head = slices(problem, h);
    head.o = o + at, head.d_o = d_o + at, head.dq = dq + at, head.dk = dk + at, head.dv = dv + at;
    head.P = P[static_cast<std::size_t>(h)].data();
    head.dS = dS[static_cast<std::size_t>(worker)].data();
    head.transposed = transposed[static_cast<std::size_t>(worker)].data();
    run_backward(head);
  });
}

std::size_t Unfused::forward_bytes() const { return bytes_of(P) + bytes_of(transposed); }
std::size_t Unfused::backward_bytes() const { return forward_bytes() + bytes_of(dS); }

std::size_t Unfused::total_bytes(const UnfusedProblem& p) {
  const std::int64_t threads = std::min<std::int64_t>(p.threads, p.heads);
  return sizeof(float) * static_cast<std::size_t>((p.heads + threads) * p.tokens * (p.tokens + row_padding) +
                                                  threads * p.tokens * p.dim);
}

}  // namespace tessera::cli
