// Single instructions of the PTX ISA that kernels of all families use. Device code.
#pragma once

namespace tessera::gpu {

// 2^x by the special function unit; relative error at most 2^-22.5, below 2^-126 the result is 0.
__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tessera::gpu
