// SPDX-License-Identifier: Apache-2.0
// The dispatches around a backward pass, chosen by a constant. Delta: rowsum(dO * O) - dLSE and LSE in units of log2(e),
// an invocation per query row. Clear: gradient rows that no sequence uses become 0. Sinks: dSink, a workgroup per head,
// in a fixed order. Implements docs/algorithm.md, "Backward, tile by tile" and equation (14).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(constant_id = 0) const int WORK = 0;  // 0 delta, 1 clear, 2 sinks
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Parameters { BackwardBlock block; };
layout(push_constant) uniform Push { uint64_t parameters; };
// The block stays in memory, and a number of it is read where it is used: what were read at once would fill registers
// that tiles need.
#define given Parameters(parameters).block
shared float sums[THREADS], rests[THREADS];

void delta() {
  Place place;
  if (!query_place(given.p.x, given.launch.blocks, THREADS, place)) return;
  const int64_t i = place.first + int64_t(gl_LocalInvocationIndex), token = place.s.q_begin + i;
  if (i >= place.s.nq) return;
  const uint lse_bits = word_at(number_of(given.p.lse, place.b, token, place.h));
  float sum = 0.0, lse2 = blind;
  if (lse_bits != minus_infinity_bits) {
    const uint64_t o = row_of(given.p.o, place.b, token, place.h, given.kind.o);
    const uint64_t d_o = row_of(given.p.d_o, place.b, token, place.h, given.kind.d_o);
    float lost = 0.0;
    for (int d = 0; d < given.launch.Dv; d += 4) {
      const vec4 a = quad_at(o, d, given.launch.Dv, given.kind.o), b = quad_at(d_o, d, given.launch.Dv, given.kind.d_o);
      add_compensated(sum, lost, fma(a.x, b.x, fma(a.y, b.y, fma(a.z, b.z, a.w * b.w))));
    }
    if (given.p.d_lse.data != 0ul) sum -= float_at(number_of(given.p.d_lse, place.b, token, place.h));
    lse2 = uintBitsToFloat(lse_bits) * log2e;
  }
  const uint64_t at = uint64_t(place.h * given.p.row_head + place.b * given.p.row_batch + token) * 4ul;
  put_float(given.p.delta + at, sum);
  put_float(given.p.lse2 + at, lse2);
}

// Is a token (of sequence b if padded) a row of some sequence?
bool is_used(Question x, int b, int64_t token, bool keys) {
  if (x.B == 0) return false;
  if (x.cu_seqlens_q.data != 0ul) {  // the last sequence that begins at or before the token
    int end = x.B;
    b = 0;
    while (end - b > 1) {
      const int middle = b + (end - b) / 2;
      int64_t begin;
      if (keys) begin = packed_begin(x.cu_seqlens_k, middle, x.Nk); else begin = packed_begin(x.cu_seqlens_q, middle, x.Nq);
      if (begin <= token) b = middle; else end = middle;
    }
  }
  const DeviceSequence s = sequence_of(x, b);
  const int64_t row = token - (keys ? s.k_begin : s.q_begin);
  return 0 <= row && row < (keys ? s.nk : s.nq);
}

void clear_row(Question x, TokenRef t, int64_t row, bool keys, int width, int kind) {
  const int64_t tokens = keys ? x.Nk : x.Nq;
  const int heads = keys ? x.Hk : x.Hq;
  const int64_t sequences = x.cu_seqlens_q.data != 0ul ? 1 : x.B;
  if (t.data == 0ul || row >= heads * tokens * sequences) return;
  const int64_t place = quotient(row, heads), token = remainder(place, tokens);
  const int b = int(quotient(place, tokens)), h = int(remainder(row, heads));
  if (is_used(x, b, token, keys)) return;
  for (int d = 0; d < width; d += 4) put_quad(row_of(t, b, token, h, kind), d, width, kind, vec4(0));
}

void clear() {
  const int64_t row = block_number() * THREADS + int64_t(gl_LocalInvocationIndex);
  if (block_number() >= given.launch.blocks) return;
  clear_row(given.p.x, given.p.dq, row, false, given.launch.D, given.kind.dq);
  clear_row(given.p.x, given.p.dk, row, true, given.launch.D, given.kind.dk);
  clear_row(given.p.x, given.p.dv, row, true, given.launch.Dv, given.kind.dv);
}

void sinks() {
  const int t = int(gl_LocalInvocationIndex);
  if (block_number() >= given.launch.blocks) return;
  const int h = int(block_number());
  const float sink = float_at(given.p.x.sinks + uint64_t(h * given.p.x.sink_head) * 4ul) * log2e;
  float sum = 0.0, rest = 0.0;
  for (int b = 0; b < given.p.x.B; ++b) {
    const DeviceSequence s = sequence_of(given.p.x, b);
    for (int64_t i = t; i < s.nq; i += THREADS) {
      const uint64_t at = uint64_t(h * given.p.row_head + b * given.p.row_batch + s.q_begin + i) * 4ul;
      const float lse2 = float_at(given.p.lse2 + at);
      if (lse2 < blind && !(sink < hidden))
        add_compensated(sum, rest, -exp2_of(sink - lse2) * float_at(given.p.delta + at));
    }
  }
  sums[t] = sum, rests[t] = rest;
  barrier();
  if (t > 0) return;
  for (int n = 1; n < THREADS; ++n) {
    add_compensated(sum, rest, sums[n]);
    add_compensated(sum, rest, -rests[n]);
  }
  const uint64_t out_ = given.p.dsinks + uint64_t(h * given.p.dsink_head) * 4ul;
  put_float(out_, given.p.accumulate != 0 ? sum + float_at(out_) : sum);
}

void main() {
  if (WORK == 0) delta();
  if (WORK == 1) clear();
  if (WORK == 2) sinks();
}
