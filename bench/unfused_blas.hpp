// SPDX-License-Identifier: Apache-2.0
// Unfused attention: two GEMMs of a BLAS library with a softmax between them, and four GEMMs backward. What a program
// without a fused kernel does. OpenBLAS is loaded at run time (dlopen), if it is installed. Included by
// bench/cpu_baselines.cpp.
#pragma once

#include <string>
#include <vector>

#include "bench/baseline.hpp"

namespace tessera::bench {

// OpenBLAS's sgemm; unusable where the library is not installed. OpenBLAS dispatches by processor model and falls back
// to SSE3 on unknown models, which would be unfair: its kernel is therefore selected here by CPU features.
class Blas {
 public:
  Blas();
  explicit operator bool() const { return gemm != nullptr; }
  const std::string& name() const { return description; }

  // C [m,n] = factor * op(A) op(B); ld: leading dimensions; inner: the K dimension.
  void multiply(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t inner, float factor,
                const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c, std::int64_t ldc) const;

 private:
  using Gemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
  Gemm gemm = nullptr;
  std::string description;
};

// f32 only. Heads in parallel, with single-threaded BLAS calls. P of every head is kept for the backward pass.
class Unfused {
 public:
  Unfused(const Blas& blas, const Problem& problem);
  void forward(float* o);
  void backward(const float* o, const float* d_o, float* dq, float* dk, float* dv);  // one KV head for each head

 private:
  const Blas& blas;
  Problem problem;
  std::vector<std::vector<float>> P, dS;  // per head; per thread
};

}  // namespace tessera::bench
