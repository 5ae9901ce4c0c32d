// Attention as two calls of a BLAS library with a softmax between them, and its gradients as four: what a program
// without fused attention does. OpenBLAS is loaded at run time, if it is there. Included by bench/cpu_baselines.cpp.
#pragma once

#include <string>
#include <vector>

#include "bench/baseline.hpp"

namespace tessera::bench {

// OpenBLAS's one function that is needed here; unusable where there is no such library. It recognises processors by
// model and falls back to SSE3 for those that it does not know, so its kernels are chosen by what the processor has.
class Blas {
 public:
  Blas();
  explicit operator bool() const { return gemm != nullptr; }
  const std::string& name() const { return description; }

  // C [m,n] = factor * op(A) op(B), rows `ld` apart; inner is the length of the sums.
  void multiply(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t inner, float factor,
                const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c, std::int64_t ldc) const;

 private:
  using Gemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
  Gemm gemm = nullptr;
  std::string description;
};

// f32 only; a thread per head, the library itself on one. P of every head is kept for the backward pass.
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
