// SPDX-License-Identifier: Apache-2.0
// What the device makes of the rules: a record of 16 integers in, one of 8 out, an invocation each. vulkan_rules_test.cpp
// computes the same with the constexpr text, of which rules.glsl was made. docs/vulkan.md, "One rule in one place".
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(constant_id = 0) const int RULE = 0;
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Task {
  uint64_t inputs, results;
  int64_t count;
};
layout(push_constant) uniform Push { uint64_t parameters; };

int64_t number;
int64_t given(int n) { return int64_t(long_at(Task(parameters).inputs + uint64_t(number * 16 + n) * 8ul)); }
float given_float(int n) { return uintBitsToFloat(uint(given(n))); }
void put(int n, int64_t x) {
  const uint64_t at = Task(parameters).results + uint64_t(number * 8 + n) * 8ul;
  Word(at).word = uint(x);
  Word(at + 4ul).word = uint(x >> 32);
}

void mask_rules() {
  const BandMask mask = band_mask(given(0), given(1), given(2) != 0, given(3), given(4), given(5), given(6), given(7));
  const Range queries = Range(given(8), given(9)), keys = Range(given(10), given(11));
  const Range seen = visible_keys(mask, queries), seeing = visible_queries(mask, keys);
  put(0, mask.low), put(1, mask.high), put(2, seen.begin), put(3, seen.end), put(4, seeing.begin), put(5, seeing.end);
  put(6, int64_t(tile_class(mask, queries, keys)));
  put(7, BandMask_visible(mask, given(8), given(10)) ? 1 : 0);
}

void philox_rules() {
  const PhiloxKey key = dropout_key(uint64_t(given(0)), uint64_t(given(1)));
  const Philox4 block = dropout_block(key, given(2), given(3), given(4), given(5));
  put(0, int64_t(key.word[0])), put(1, int64_t(key.word[1]));
  for (int n = 0; n < 4; ++n) put(2 + n, int64_t(block.word[n]));
  put(6, int64_t(dropout_value(block, given(4), given(5))));
  put(7, 0);
}

void type_rules() {
  put(0, int64_t(narrow_BF16(given_float(0)).bits)), put(1, int64_t(narrow_F16(given_float(0)).bits));
  put(2, int64_t(floatBitsToUint(widened(uint(given(1)), 1)))), put(3, int64_t(floatBitsToUint(widened(uint(given(1)), 2))));
  for (int n = 4; n < 8; ++n) put(n, 0);
}

void place_rules() {
  const LengthRef cu_seqlens = LengthRef(uint64_t(given(4)), 1l);
  const BlockPlace at = place_of(given(0), given(1), int(given(2)), given(3), cu_seqlens);
  const Range rows = packed_rows(cu_seqlens, at.b, given(3));
  put(0, int64_t(at.b)), put(1, at.first), put(2, rows.begin), put(3, rows.end);
  put(4, packed_begin(cu_seqlens, at.b, given(3)));
  put(5, finds_blocks(at.b, given(1), int(given(2)), given(3), cu_seqlens) ? 1 : 0);
  put(6, block_count(true, given(3), given(1), given(2))), put(7, 0);
}

void score_rules() {
  const int on = int(given(0));
  const ScoreOptions options = ScoreOptions((on & 1) != 0, (on & 2) != 0, (on & 4) != 0, false, false);
  const ScoreNumbers numbers =
      score_numbers(options, given_float(1), ScoreParameters(given_float(2)), given_float(3), given_float(4));
  const ScoreElement element = ScoreElement(given_float(5), given_float(6));
  float derivative = 1.0;
  const float s_cap = capped(options, numbers, given_float(7) * numbers.factor, element, derivative);
  put(0, int64_t(floatBitsToUint(placed(options, numbers, s_cap, element))));
  put(1, int64_t(floatBitsToUint(derivative)));
  put(2, int64_t(floatBitsToUint(exp2_of(given_float(8)))));
  put(3, int64_t(floatBitsToUint(natural_lse(given_float(9), given_float(10)))));
  for (int n = 4; n < 8; ++n) put(n, 0);
}

// Places in padded tensors, by division: number, rows, B, N.
void padded_rules() {
  const BlockPlace at = place_of(given(0), given(1), int(given(2)), given(3), LengthRef(0ul, 1l));
  put(0, int64_t(at.b)), put(1, at.first);
  put(2, quotient(given(0), given(3))), put(3, remainder(given(0), given(3)));
  for (int n = 4; n < 8; ++n) put(n, 0);
}

void main() {
  number = block_number() * THREADS + int64_t(gl_LocalInvocationIndex);
  if (number >= Task(parameters).count) return;
  if (RULE == 0) mask_rules();
  if (RULE == 1) philox_rules();
  if (RULE == 2) type_rules();
  if (RULE == 3) place_rules();
  if (RULE == 5) padded_rules();
  if (RULE == 4) score_rules();
}
