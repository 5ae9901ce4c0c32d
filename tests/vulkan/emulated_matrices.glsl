// SPDX-License-Identifier: Apache-2.0
// The matrices of vk_matrix without an extension: of any shape, with f16 or bf16 operands, on any device. So its kernels
// run in CI, whose driver has no cooperative matrices, and in shapes that no driver on a CPU has. Takes the place of
// src/vulkan/kernel/matrices.glsl where EMULATED_MATRICES is defined. docs/vulkan.md, "vk_matrix".
const int SHARE = M * N / LANES;                  // elements of a sum that an invocation has

// Operands are where they lie in shared memory: the kernels leave them there while they multiply, unless rows are KEPT.
struct LeftMatrix { int at; };
struct RightMatrix { int at; bool columns_down; };
// Element n * LANES + lane is the lane's n-th. Of fixed size, for 8 lanes or more and shapes up to 16 x 16: GLSL does not
// assign arrays whose size is a specialization constant.
struct SumMatrix { float of[32]; };

int element(int n) { return n * LANES + int(gl_SubgroupInvocationID); }
int sum_place(int n) { return element(n) / N * PITCH + element(n) % N; }

#define COLUMNS_DOWN true
#define ROWS_DOWN false
#define UNROLLED [[dont_unroll]]

#define LOAD_LEFT(matrix, at) matrix = LeftMatrix(at)
#define LOAD_RIGHT(matrix, at, order) matrix = RightMatrix(at, order)
#define LOAD_SUM(matrix, at)                   \
  [[dont_unroll]] for (int n_ = 0; n_ < SHARE; ++n_) matrix.of[n_] = uintBitsToFloat(STRIP_WORD((at) + sum_place(n_)))
#define STORE_SUM(matrix, at)                  \
  [[dont_unroll]] for (int n_ = 0; n_ < SHARE; ++n_) STRIP_WORD((at) + sum_place(n_)) = floatBitsToUint(matrix.of[n_])
#define MULTIPLY_ADD(left, right, sum) multiplied(left, right, sum)
#define ZERO_SUM zero_sum()
#define ADDED(a, b) added(a, b)
#define SCALED(a, b) scaled(a, b)

SumMatrix zero_sum() {
  SumMatrix zero;
  [[dont_unroll]] for (int n = 0; n < SHARE; ++n) zero.of[n] = 0.0;
  return zero;
}
SumMatrix added(SumMatrix a, SumMatrix b) {
  [[dont_unroll]] for (int n = 0; n < SHARE; ++n) a.of[n] += b.of[n];
  return a;
}
SumMatrix scaled(SumMatrix a, SumMatrix b) {
  [[dont_unroll]] for (int n = 0; n < SHARE; ++n) a.of[n] *= b.of[n];
  return a;
}
// Two terms at a time, which share words. llvmpipe ends all loops of an invocation after 65535 rounds, which plans count
// for real matrices: this loop's would be most of them, so it is unrolled, and no other is, which would take it minutes.
SumMatrix multiplied(LeftMatrix left, RightMatrix right, SumMatrix sum) {
  [[dont_unroll]] for (int n = 0; n < SHARE; ++n) {
    const int row = element(n) / N, column = element(n) % N;
    float total = sum.of[n];
    [[unroll]] for (int k = 0; k < K; k += 2) {
      const uint a = STRIP_WORD(left.at + row * PITCH + k / 2);
      uint b0, b1;
      if (right.columns_down) {
        b0 = COLUMN_WORD(right.at + column * PITCH + k / 2), b1 = b0 >> 16;
      } else {
        b0 = COLUMN_WORD(right.at + k * PITCH + column / 2), b1 = COLUMN_WORD(right.at + (k + 1) * PITCH + column / 2);
        if ((column & 1) != 0) b0 >>= 16, b1 >>= 16;
      }
      total = fma(widened(a & 0xffffu, OPERANDS), widened(b0 & 0xffffu, OPERANDS), total);
      total = fma(widened(a >> 16, OPERANDS), widened(b1 & 0xffffu, OPERANDS), total);
    }
    sum.of[n] = total;
  }
  return sum;
}
