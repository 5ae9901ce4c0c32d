// SPDX-License-Identifier: Apache-2.0
// Unfused attention over OpenBLAS; see bench/unfused_blas.hpp.
#include "bench/unfused_blas.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>

namespace tessera::bench {
namespace {

// GCC vectors of 16 floats: with a scalar softmax, the softmax would dominate.
#if defined(__x86_64__)
#define TESSERA_BENCH_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TESSERA_BENCH_CLONES
#endif

// exp of a number <= 0: range reduction to 2^n times a polynomial, accurate to f32 (Cephes' coefficients). Branch-free,
// so that loops auto-vectorise.
[[gnu::always_inline]] inline float exponential(float x) {
  constexpr float magic = 12582912.0f;
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + magic, n = shifted - magic;
  const float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f, p = p * f + 8.3334519073e-3f, p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f, p = p * f + 5.0000001201e-1f, p = p * f * f + f + 1.0f;
  return __builtin_bit_cast(float, __builtin_bit_cast(int, p) + (__builtin_bit_cast(int, shifted) << 23));
}

// Softmax of a row, in place; keys from `visible` on get 0. Sixteen lanes of partial maxima and sums.
TESSERA_BENCH_CLONES void softmax(float* row, std::int64_t count, std::int64_t visible) {
  float most[16], sums[16] = {};
  std::fill(most, most + 16, row[0]);
  const std::int64_t whole = visible / 16 * 16;
  for (std::int64_t j = 0; j < whole; j += 16)
    for (int n = 0; n < 16; ++n) most[n] = row[j + n] > most[n] ? row[j + n] : most[n];
  for (std::int64_t j = whole; j < visible; ++j) most[0] = std::max(most[0], row[j]);
  const float top = *std::max_element(most, most + 16);
  for (std::int64_t j = 0; j < whole; j += 16)
    for (int n = 0; n < 16; ++n) sums[n] += row[j + n] = exponential(row[j + n] - top);
  for (std::int64_t j = whole; j < visible; ++j) sums[0] += row[j] = exponential(row[j] - top);
  float sum = 0;
  for (const float part : sums) sum += part;
  for (std::int64_t j = 0; j < visible; ++j) row[j] *= 1 / sum;
  std::fill(row + visible, row + count, 0.0f);
}

// dS = P (dP - delta), in place over dP.
TESSERA_BENCH_CLONES void score_gradients(const float* P, float delta, std::int64_t count, float* dP) {
  for (std::int64_t j = 0; j < count; ++j) dP[j] = P[j] * (dP[j] - delta);
}

const char* core_for_this_processor() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return "SkylakeX";
  if (__builtin_cpu_supports("avx2")) return "Haswell";
#endif
  return nullptr;
}

}  // namespace

Blas::Blas() {
  const char* core = core_for_this_processor();
  if (core) setenv("OPENBLAS_CORETYPE", core, 0);
  void* library = nullptr;
  for (const char* name : {"libopenblas.so.0", "libopenblas.so"})
    if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) return;
  const auto set_threads = reinterpret_cast<void (*)(int)>(dlsym(library, "openblas_set_num_threads"));
  if (set_threads) set_threads(1);
  gemm = reinterpret_cast<Gemm>(dlsym(library, "cblas_sgemm"));
  const auto core_name = reinterpret_cast<const char* (*)()>(dlsym(library, "openblas_get_corename"));
  description = "OpenBLAS";
  if (core_name) description += std::string(", ") + core_name();
}

void Blas::multiply(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t inner,
                    float factor, const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c,
                    std::int64_t ldc) const {
  constexpr int row_major = 101, as_it_is = 111, transposed = 112;
  gemm(row_major, transpose_a ? transposed : as_it_is, transpose_b ? transposed : as_it_is, int(m), int(n), int(inner),
       factor, a, int(lda), b, int(ldb), 0.0f, c, int(ldc));
}

Unfused::Unfused(const Blas& blas, const Problem& problem) : blas(blas), problem(problem) {
  P.resize(static_cast<std::size_t>(problem.heads));
  dS.resize(static_cast<std::size_t>(problem.threads));
}

void Unfused::forward(float* o) {
  const Problem& p = problem;
  const std::int64_t row = p.heads * p.dim, kv_row = p.kv_heads * p.dim;
  parallel(p.heads, p.threads, [&](std::int64_t h, int) {
    std::vector<float>& scores = P[static_cast<std::size_t>(h)];
    scores.resize(static_cast<std::size_t>(p.queries * p.keys));
    const std::int64_t kv = h / (p.heads / p.kv_heads) * p.dim;
    const float *q = static_cast<const float*>(p.q) + h * p.dim, *k = static_cast<const float*>(p.k) + kv;
    const float* v = static_cast<const float*>(p.v) + kv;
    blas.multiply(false, true, p.queries, p.keys, p.dim, p.scale(), q, row, k, kv_row, scores.data(), p.keys);
    for (std::int64_t i = 0; i < p.queries; ++i) softmax(scores.data() + i * p.keys, p.keys, p.visible(i));
    blas.multiply(false, false, p.queries, p.dim, p.keys, 1, scores.data(), p.keys, v, kv_row, o + h * p.dim, row);
  });
}

void Unfused::backward(const float* o, const float* d_o, float* dq, float* dk, float* dv) {
  const Problem& p = problem;
  const std::int64_t row = p.heads * p.dim;
  parallel(p.heads, p.threads, [&](std::int64_t h, int thread) {
    const float* probabilities = P[static_cast<std::size_t>(h)].data();
    std::vector<float>& gradients = dS[static_cast<std::size_t>(thread)];
    gradients.resize(static_cast<std::size_t>(p.queries * p.keys));
    const std::int64_t at = h * p.dim;
    const float *q = static_cast<const float*>(p.q) + at, *k = static_cast<const float*>(p.k) + at;
    const float* v = static_cast<const float*>(p.v) + at;
    float* ds = gradients.data();
    blas.multiply(true, false, p.keys, p.dim, p.queries, 1, probabilities, p.keys, d_o + at, row, dv + at, row);
    blas.multiply(false, true, p.queries, p.keys, p.dim, 1, d_o + at, row, v, row, ds, p.keys);
    for (std::int64_t i = 0; i < p.queries; ++i) {
      float delta = 0;
      for (std::int64_t d = 0; d < p.dim; ++d) delta += o[i * row + at + d] * d_o[i * row + at + d];
      score_gradients(probabilities + i * p.keys, delta, p.keys, ds + i * p.keys);
    }
    blas.multiply(false, false, p.queries, p.dim, p.keys, p.scale(), ds, p.keys, k, row, dq + at, row);
    blas.multiply(true, false, p.keys, p.dim, p.queries, p.scale(), ds, p.keys, q, row, dk + at, row);
  });
}

}  // namespace tessera::bench
