// SPDX-License-Identifier: Apache-2.0
// What all Vulkan kernels share: memory by addresses, elements of any type as f32, elementary functions, the place of a
// workgroup, the score of a pair. The rules themselves are rules.glsl, made from constexpr text by translate.py.
// Included by every kernel. docs/vulkan.md.
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_control_flow_attributes : require

#ifndef OWN_WORKGROUPS
layout(local_size_x = 64) in;
const int THREADS = 64;
#endif

// --- memory

layout(buffer_reference, scalar, buffer_reference_align = 4) buffer Word { uint word; };
layout(buffer_reference, scalar, buffer_reference_align = 2) writeonly buffer HalfWord { uint16_t bits; };
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer FourWords { uvec4 words; };

uint word_at(uint64_t address) { return Word(address).word; }
float float_at(uint64_t address) { return uintBitsToFloat(word_at(address)); }
void put_float(uint64_t address, float x) { Word(address).word = floatBitsToUint(x); }
int64_t load_int(uint64_t data, int64_t index) { return int64_t(int(word_at(data + uint64_t(index * 4)))); }
uint64_t long_at(uint64_t address) { return uint64_t(word_at(address)) | (uint64_t(word_at(address + 4)) << 32); }
uint low16(uint x) { return x & 0xffffu; }

// Of numbers that are not negative. GPUs divide in 32 bits, in which nearly all fit; drivers make a thousand
// instructions of a division in 64.
int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 31 == 0) return int64_t(uint(a) / uint(b));
  if (a < b) return 0;
  uint64_t rest = 0ul, whole = 0ul;
  [[dont_unroll]] for (int bit = 62; bit >= 0; --bit) {
    rest = (rest << 1) | ((uint64_t(a) >> bit) & 1ul);
    whole <<= 1;
    if (rest >= uint64_t(b)) rest -= uint64_t(b), whole |= 1ul;
  }
  return int64_t(whole);
}
int64_t remainder(int64_t a, int64_t b) { return a - quotient(a, b) * b; }

// --- what math/score_rule.hpp asks for

struct ScoreElement { float distance, bias; };  // of one pair: j - i - shift, and the bias's number
float ScoreElement_distance(ScoreElement e) { return e.distance; }
float ScoreElement_bias(ScoreElement e) { return e.bias; }

// Finite, since fast arithmetic need not know infinities: what is at or below `hidden` is invisible.
const float lowest = -3.0e38, hidden = -2.9e38;
const float blind = 3.0e38;  // in the place of LSE: the row sees no key
const uint minus_infinity_bits = 0xff800000u;
const float log2e = 1.4426950408889634;

// 2^x, relative error 2^-23.5: Vulkan promises little of its own exp2. Below 2^-126 it is 0; NaN stays NaN. The sum with
// 1.5 * 2^23 is rounded to a whole number, and its last bits are the exponent of 2^whole.
float exp2_of(float x) {
  precise float shifted = x + 12583039.0, whole = shifted - 12583039.0;
  const float f = x - whole;
  float r = fma(f, 0.00015453163359779865, 0.0013390863314270973);
  r = fma(f, r, 0.009618083015084267);
  r = fma(f, r, 0.055503569543361664);
  r = fma(f, r, 0.24022650718688965);
  r = fma(f, r, 0.6931471824645996);
  const float y = fma(f, r, 1.0) * uintBitsToFloat(floatBitsToUint(shifted) << 23);
  return x < -126.0 ? 0.0 : y;
}

float Math_set(float x) { return x; }
float Math_multiply(float a, float b) { return a * b; }
float Math_multiply_add(float a, float b, float c) { return fma(a, b, c); }
float Math_negative_multiply_add(float a, float b, float c) { return fma(-a, b, c); }
float Math_abs(float x) { return abs(x); }
float Math_tanh(float x) {
  const float size = abs(x), z = x * x;
  if (size > 10.0) return x < 0.0 ? -1.0 : 1.0;
  if (size > 0.62) {
    const float y = 1.0 - 2.0 / (exp2_of(2.0 * log2e * size) + 1.0);
    return x < 0.0 ? -y : y;
  }
  float r = fma(z, -0.006039273925125599, 0.020956000313162804);
  r = fma(z, r, -0.05384165421128273);
  r = fma(z, r, 0.13332700729370117);
  r = fma(z, r, -0.333333283662796);
  return fma(x, z * r, x);
}

// m ln 2 + ln(l): LSE from a maximum in units of log2(e) and the sum. Its own rounding is all it may lose, so products
// and sums carry their remainders.
float natural_lse(float m, float l) {
  const uint bits = floatBitsToUint(l);
  int exponent = int(bits >> 23) - 127;
  float mantissa = uintBitsToFloat((bits & 0x7fffffu) | 0x3f800000u);
  if (mantissa > 1.4142135) mantissa *= 0.5, exponent += 1;
  const float s = (mantissa - 1.0) / (mantissa + 1.0), z = s * s;
  float r = fma(z, 0.23375794291496277, 0.28549063205718994);
  r = fma(z, r, 0.4000013768672943);
  r = fma(z, r, 0.6666666865348816);
  const float logarithm = fma(s, z * r, 2.0 * s);
  // ln 2 in two parts, of which the first has 12 bits: its products with 12 bits of m are exact, also where fma rounds
  // twice.
  const float ln2 = 0.693115234375, rest = 3.194618494528623e-05, e = float(exponent);
  const float high = uintBitsToFloat(floatBitsToUint(m) & 0xfffff000u);
  precise float a = high * ln2, b = e * ln2, low = (m - high) * ln2 + (m * rest + e * rest);
  precise float sum = a + b, part = sum - a;
  precise float lost = (a - (sum - part)) + (b - part);
  precise float total = sum + logarithm, share = total - sum;
  precise float lost_too = (sum - (total - share)) + (logarithm - share);
  return total + (lost + lost_too + low);
}

#include "rules.glsl"

// --- elements: kinds 0 f32, 1 f16, 2 bf16

uint64_t element_bytes(int kind) { return kind == 0 ? 4ul : 2ul; }

float widened(uint bits, int kind) {
  if (kind == 2) return uintBitsToFloat(bits << 16);
  const uint sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, mantissa = bits & 0x3ffu;
  if (exponent == 0u)  // subnormal: no f32 on the way is
    return uintBitsToFloat(floatBitsToUint(float(mantissa) * 5.9604644775390625e-08) | sign);
  return uintBitsToFloat(sign | (exponent == 31u ? 0x7f800000u : (exponent + 112u) << 23) | (mantissa << 13));
}

// In words of 32 bits: not every device has smaller ones.
uint half_of(uint word, uint64_t address) { return (address & 2ul) != 0ul ? word >> 16 : word & 0xffffu; }
uint half_at(uint64_t address) { return half_of(word_at(address & ~3ul), address); }

// One load for all kinds: drivers for CPUs do both sides of a branch.
float number_at(uint64_t address, int kind) {
  const uint word = word_at(address & ~3ul);
  return kind == 0 ? uintBitsToFloat(word) : widened(half_of(word, address), kind);
}

uint narrowed(float x, int kind) { return kind == 2 ? narrow_BF16(x).bits : narrow_F16(x).bits; }

// The other half of the word may be another invocation's, or nobody's, so 16 bits are written, although words are read.
void put_half(uint64_t address, uint bits) { HalfWord(address).bits = uint16_t(bits); }

void put_number(uint64_t address, int kind, float x) {
  if (kind == 0)
    put_float(address, x);
  else
    put_half(address, narrowed(x, kind));
}

// Elements d to d + 3 of a row of `width`; 0 beyond it.
vec4 quad_at(uint64_t row, int d, int width, int kind) {
  const uint64_t at = row + uint64_t(d) * element_bytes(kind);
  if (d + 3 < width && kind == 0 && (at & 15ul) == 0ul) return uintBitsToFloat(FourWords(at).words);
  if (d + 3 < width && kind != 0 && (at & 3ul) == 0ul) {
    const uint low = word_at(at), high = word_at(at + 4);
    return vec4(widened(low & 0xffffu, kind), widened(low >> 16, kind), widened(high & 0xffffu, kind),
                widened(high >> 16, kind));
  }
  vec4 x = vec4(0);
  const uint64_t bytes = element_bytes(kind);
  if (d < width) x.x = number_at(at, kind);
  if (d + 1 < width) x.y = number_at(at + bytes, kind);
  if (d + 2 < width) x.z = number_at(at + 2 * bytes, kind);
  if (d + 3 < width) x.w = number_at(at + 3 * bytes, kind);
  return x;
}

void put_quad(uint64_t row, int d, int width, int kind, vec4 x) {
  const uint64_t bytes = element_bytes(kind), at = row + uint64_t(d) * bytes;
  if (kind != 0 && (at & 3ul) == 0ul && d + 3 < width) {
    Word(at).word = narrowed(x.x, kind) | (narrowed(x.y, kind) << 16);
    Word(at + 4).word = narrowed(x.z, kind) | (narrowed(x.w, kind) << 16);
    return;
  }
  if (d < width) put_number(at, kind, x.x);
  if (d + 1 < width) put_number(at + bytes, kind, x.y);
  if (d + 2 < width) put_number(at + 2 * bytes, kind, x.z);
  if (d + 3 < width) put_number(at + 3 * bytes, kind, x.w);
}

// Row `token` of head h: the address of its first element.
uint64_t row_of(TokenRef t, int b, int64_t token, int h, int kind) {
  return t.data + uint64_t(b * t.batch + token * t.token + h * t.head) * element_bytes(kind);
}
uint64_t number_of(RowRef r, int b, int64_t row, int h) {
  return r.data + uint64_t(b * r.batch + h * r.head + row * r.row) * 4ul;
}

// --- places

int64_t block_number() {
  return int64_t(gl_WorkGroupID.x) + int64_t(gl_WorkGroupID.y) * int64_t(gl_NumWorkGroups.x);
}

// The rows of a workgroup. Heads are numbered fastest, so that heads of a group share K and V in the cache.
struct Place {
  int b, h, kv;
  int64_t first;
  DeviceSequence s;
};

// Queries: the last rows first, which see the most keys when causal. False: this workgroup has none.
bool query_place(Question x, int64_t blocks, int64_t rows, out Place place) {
  const int64_t number = blocks - 1 - block_number();
  if (number < 0) return false;
  place.h = int(remainder(number, x.Hq));
  place.kv = place.h / (x.Hq / x.Hk);
  const BlockPlace at = place_of(quotient(number, x.Hq), rows, x.B, x.Nq, x.cu_seqlens_q);
  place.b = at.b, place.first = at.first;
  place.s = sequence_of(x, at.b);
  return place.first < place.s.nq;
}

bool key_place(Question x, int64_t blocks, int64_t rows, out Place place) {
  const int64_t number = block_number();
  if (number >= blocks) return false;
  place.kv = int(remainder(number, x.Hk));
  place.h = place.kv * (x.Hq / x.Hk);
  const BlockPlace at = place_of(quotient(number, x.Hk), rows, x.B, x.Nk, x.cu_seqlens_k);
  place.b = at.b, place.first = at.first;
  place.s = sequence_of(x, at.b);
  return place.first < place.s.nk;
}

// --- scores

// What one head's scores depend on besides q and k.
struct HeadScores {
  ScoreOptions options;
  ScoreNumbers numbers;
  PhiloxKey stream;  // of dropout
  int b, h, bias_kind;
};

HeadScores head_scores(Question x, Launch launch, int b, int h, int bias_kind) {
  HeadScores head;
  head.options = ScoreOptions(launch.softcap != 0, launch.alibi != 0, launch.bias != 0, launch.mask != 0,
                              launch.dropout != 0);
  float slope = 0.0;
  if (head.options.alibi) slope = float_at(x.slopes + uint64_t(b * x.slope_batch + h * x.slope_head) * 4ul);
  head.numbers = score_numbers(head.options, x.score_scale, x.parameters, slope, log2e);
  head.stream = x.key;
  if (head.options.dropout && x.rng != 0ul)
    head.stream = dropout_key(long_at(x.rng), long_at(x.rng + uint64_t(x.rng_stride * 8)));
  head.b = b, head.h = h, head.bias_kind = bias_kind;
  return head;
}

int64_t pair_index(PairRef t, int b, int h, int64_t i, int64_t j) {
  return b * t.batch + h * t.head + i * t.row + j * t.key;
}

// The score of a pair that exists and lies in the band. The derivative is written where it is not 1.
float score_of(Question x, DeviceSequence s, HeadScores head, float product, int64_t i, int64_t j,
               inout float derivative) {
  ScoreElement element = ScoreElement(0.0, 0.0);
  if (head.options.alibi) element.distance = float(j - i - s.shift);
  if (head.options.bias)
    element.bias = number_at(x.bias.data + uint64_t(pair_index(x.bias, head.b, head.h, i, j)) *
                                               element_bytes(head.bias_kind), head.bias_kind);
  const float s_cap = capped(head.options, head.numbers, product * head.numbers.factor, element, derivative);
  const float S = placed(head.options, head.numbers, s_cap, element);
  if (head.options.mask) {
    const uint64_t at = x.mask.data + uint64_t(pair_index(x.mask, head.b, head.h, i, j));
    if (((word_at(at & ~3ul) >> (uint(at & 3ul) * 8u)) & 0xffu) == 0u) return lowest;
  }
  return S < lowest ? lowest : S;
}

// The dropout factor: 0, or 1 / (1 - p_drop).
float keep_of(Question x, HeadScores head, int64_t i, int64_t j) {
  if (!head.options.dropout) return 1.0;
  const int64_t row = i + x.row0, column = j + x.col0;
  const Philox4 block = dropout_block(head.stream, head.b + x.batch0, head.h + x.head0, row, column);
  return dropout_value(block, row, column) >= x.dropout_threshold ? x.keep_scale : 0.0;
}

// --- the end of a row of online softmax

// The factor that makes O of a row's sums: maximum and sum take in the head's sink, if there is one.
float finished(Question x, int h, inout float m, inout float l) {
  float rescale = 1.0;
  if (x.sinks != 0ul) {
    const float sink = float_at(x.sinks + uint64_t(h * x.sink_head) * 4ul) * log2e;
    if (!(sink < hidden)) {
      const float top = max(m, sink);
      rescale = exp2_of(m - top);
      l = l * rescale + exp2_of(sink - top);
      m = top;
    }
  }
  return l == 0.0 ? 0.0 : rescale / l;
}

void put_lse(uint64_t address, float m, float l) {
  Word(address).word = l == 0.0 ? minus_infinity_bits : floatBitsToUint(natural_lse(m, l));
}
