// SPDX-License-Identifier: Apache-2.0
// See bench/row_by_row.hpp. K and V are read in place, without packing; 16-bit elements are widened in registers.
#include "bench/row_by_row.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false positive in the compiler's intrinsics header
#endif
#define TESSERA_BENCH_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")))
#endif

namespace tessera::bench {

#if defined(__x86_64__)
namespace {

template <Type type>
TESSERA_BENCH_TARGET inline __m512 wide(const void* row, std::int64_t d) {
  if (type == Type::f32) return _mm512_loadu_ps(static_cast<const float*>(row) + d);
  const auto* half = reinterpret_cast<const __m256i*>(static_cast<const std::uint16_t*>(row) + d);
  if (type == Type::f16) return _mm512_cvtph_ps(_mm256_loadu_si256(half));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(half)), 16));
}

// q . k with two independent accumulators, which hide FMA latency; an odd last vector goes to the first.
template <Type type>
TESSERA_BENCH_TARGET inline float dot(const float* q, const void* k, std::int64_t dim) {
  __m512 even = _mm512_setzero_ps(), odd = even;
  std::int64_t d = 0;
  for (; d + 32 <= dim; d += 32) {
    even = _mm512_fmadd_ps(_mm512_loadu_ps(q + d), wide<type>(k, d), even);
    odd = _mm512_fmadd_ps(_mm512_loadu_ps(q + d + 16), wide<type>(k, d + 16), odd);
  }
  if (d < dim) even = _mm512_fmadd_ps(_mm512_loadu_ps(q + d), wide<type>(k, d), even);
  return _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
}

template <Type type>
TESSERA_BENCH_TARGET void one_row(const Problem& p, std::int64_t query, std::int64_t head, float* o) {
  const std::int64_t size = type == Type::f32 ? 4 : 2, row = p.kv_heads * p.dim * size;
  const std::int64_t kv = head / (p.heads / p.kv_heads);
  const char *k = static_cast<const char*>(p.k) + kv * p.dim * size,
             *v = static_cast<const char*>(p.v) + kv * p.dim * size;
  const char* from = static_cast<const char*>(p.q) + (query * p.heads + head) * p.dim * size;
  float q[512], sums[512] = {};
  for (std::int64_t d = 0; d < p.dim; d += 16)
    _mm512_storeu_ps(q + d, _mm512_mul_ps(wide<type>(from, d), _mm512_set1_ps(p.scale())));
  float most = -std::numeric_limits<float>::infinity(), sum = 0;
  for (std::int64_t j = 0; j < p.visible(query); ++j) {
    const float score = dot<type>(q, k + j * row, p.dim);
    if (score > most) {
      const float factor = std::exp(most - score);
      for (std::int64_t d = 0; d < p.dim; d += 16)
        _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), _mm512_set1_ps(factor)));
      sum *= factor, most = score;
    }
    const float weight = std::exp(score - most);
    for (std::int64_t d = 0; d < p.dim; d += 16)
      _mm512_storeu_ps(sums + d,
                       _mm512_fmadd_ps(_mm512_set1_ps(weight), wide<type>(v + j * row, d), _mm512_loadu_ps(sums + d)));
    sum += weight;
  }
  for (std::int64_t d = 0; d < p.dim; ++d) o[(query * p.heads + head) * p.dim + d] = sums[d] / sum;
}

}  // namespace

bool row_by_row_usable() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// A task is sixteen rows of one head.
void row_by_row(const Problem& p, float* o) {
  const std::int64_t groups = (p.queries + 15) / 16;
  parallel(groups * p.heads, p.threads, [&](std::int64_t index, int) {
    const std::int64_t head = index / groups, begin = index % groups * 16;
    for (std::int64_t query = begin; query < std::min(begin + 16, p.queries); ++query) {
      if (p.type == Type::f32) one_row<Type::f32>(p, query, head, o);
      if (p.type == Type::f16) one_row<Type::f16>(p, query, head, o);
      if (p.type == Type::bf16) one_row<Type::bf16>(p, query, head, o);
    }
  });
}

#else

bool row_by_row_usable() { return false; }
void row_by_row(const Problem&, float*) {}

#endif

}  // namespace tessera::bench
