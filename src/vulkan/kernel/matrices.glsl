// SPDX-License-Identifier: Apache-2.0
// Cooperative matrices as the kernels of vk_matrix use them: 16-bit operands, f32 sums, one subgroup. The spelling is
// that of GL_NV_cooperative_matrix, which every glslang since 2019 compiles; src/vulkan/matrices.py then makes SPIR-V of
// VK_KHR_cooperative_matrix from it, for f16 and for bf16. Included by matrix.glsl. docs/vulkan.md, "vk_matrix";
// tests/vulkan/emulated_matrices.glsl computes the same without the extension.
#extension GL_KHR_memory_scope_semantics : require
#extension GL_NV_cooperative_matrix : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#pragma use_vulkan_memory_model

#define LeftMatrix fcoopmatNV<16, gl_ScopeSubgroup, M, K>
#define RightMatrix fcoopmatNV<16, gl_ScopeSubgroup, K, N>
#define SumMatrix fcoopmatNV<32, gl_ScopeSubgroup, M, N>

// `at` is a place in `strips` or, for what is on the right, in `columns`, in words, a multiple of four. Of those,
// COLUMNS_DOWN says that a matrix's columns are rows of memory; its rows are else.
#define COLUMNS_DOWN true
#define ROWS_DOWN false
#define LOAD_LEFT(matrix, at) coopMatLoadNV(matrix, strips, (at) >> 2, PITCH / 4, false)
#define LOAD_RIGHT(matrix, at, order) coopMatLoadNV(matrix, columns, (at) >> 2, PITCH / 4, order)
#define LOAD_SUM(matrix, at) coopMatLoadNV(matrix, strips, (at) >> 2, PITCH / 4, false)
#define STORE_SUM(matrix, at) coopMatStoreNV(matrix, strips, (at) >> 2, PITCH / 4, false)
#define MULTIPLY_ADD(left, right, sum) coopMatMulAddNV(left, right, sum)
#define ZERO_SUM SumMatrix(0.0)
#define ADDED(a, b) ((a) + (b))
// Element by element. This GLSL has no such product: matrices.py makes one of the division, and no kernel divides
// matrices.
#define SCALED(a, b) ((a) / (b))
#define UNROLLED [[unroll]]  // matrices live in registers, which have no index
