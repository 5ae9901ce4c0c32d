// Tiles of rows from global to shared memory, as f32: 16 bytes at a time where rows are aligned, asynchronously
// (cp.async) where no conversion is needed. Device text; included by the kernels that work on tiles.
#pragma once

#include "simt/kernel/common.cuh"

namespace tessera::simt {

// PTX ISA, "cp.async": copies 16 bytes in the background; `bytes` = 0 writes zeros instead.
__device__ inline void copy_async(float* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((UInt32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(bytes));
#else
  const float4 zero = {0, 0, 0, 0};
  *reinterpret_cast<float4*>(to) = bytes ? *static_cast<const float4*>(from) : zero;
#endif
}

// PTX ISA, "cp.async.commit_group" and "cp.async.wait_group".
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
template <int pending>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending));
#endif
}

// Eight 16-bit elements, loaded as 16 bytes.
template <class T>
struct alignas(16) Eight {
  T x[8];
};

// to[r][d] = row (first + r), element d, for r < rows and d < width; 0 beyond `valid` rows and beyond D.
template <Config config, Element element, int width, int D, int rows, int stride>
__device__ inline void load_tile(float (&to)[rows][stride], const TokenRef& t, Int32 b, Int64 first, Int64 valid,
                                 Int32 h) {
  using T = typename Stored<element>::Type;
  const T* base = row_of<element>(t, b, first, h);
  if constexpr (config.wide_loads && element == Element::f32 && D % 4 == 0) {
    for (int n = threadIdx.x; n < rows * (width / 4); n += config.threads) {
      const int r = n / (width / 4), d = n % (width / 4) * 4;
      const bool inside = r < valid && d < D;
      copy_async(&to[r][d], inside ? base + r * t.token + d : base, inside ? 16 : 0);
    }
  } else if constexpr (config.wide_loads && element != Element::f32 && D % 8 == 0) {
    for (int n = threadIdx.x; n < rows * (width / 8); n += config.threads) {
      const int r = n / (width / 8), d = n % (width / 8) * 8;
      Eight<T> values{};
      if (r < valid && d < D) values = *reinterpret_cast<const Eight<T>*>(base + r * t.token + d);
#pragma unroll
      for (int e = 0; e < 8; ++e) to[r][d + e] = to_float(values.x[e]);
    }
  } else {
    for (int n = threadIdx.x; n < rows * width; n += config.threads) {
      const int r = n / width, d = n % width;
      to[r][d] = r < valid && d < D ? to_float(base[r * t.token + d]) : 0.0f;
    }
  }
}

__device__ inline float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ inline float dot4(float4 a, float4 b, float sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

// Over the 16 lanes that share a row, by butterfly exchange: every lane ends with the same bits.
__device__ inline float row_max(float x) {
#pragma unroll
  for (int distance = lanes_per_row / 2; distance > 0; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}
__device__ inline float row_sum(float x) {
#pragma unroll
  for (int distance = lanes_per_row / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

}  // namespace tessera::simt
