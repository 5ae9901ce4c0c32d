// SPDX-License-Identifier: Apache-2.0
// The dot product of pairs of bf16 (AVX512_BF16), an instruction that the target region does not have by itself.
// Included by cpu/isa/avx512bf16.cpp inside its target region.
#pragma once

// sum + x_even y_even + x_odd y_odd in every lane
HWY_INLINE Vec add_pairs(Vec sum, __m512i x, __m512i y) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(x), "v"(y));
  return sum;
}
