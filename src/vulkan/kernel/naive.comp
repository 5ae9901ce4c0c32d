// SPDX-License-Identifier: Apache-2.0
// vk_naive, the rung to begin reading with: a workgroup has one row and takes 64 others at a time. First an invocation
// has one of those, and computes its score; then it has four dims, and adds all 64 to them. Every operand comes from
// memory. Forward, dQ (a query each), dK and dV (a key each). Implements docs/algorithm.md; docs/vulkan.md, "Rungs".
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(constant_id = 0) const int WORK = 0;  // 0 forward, 1 dQ, 2 dK and dV
const int OWN = 4;                           // dims of an invocation: t, t + 64, t + 128, t + 192
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Forward { ForwardBlock block; };
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Backward { BackwardBlock block; };
layout(push_constant) uniform Push { uint64_t parameters; };

float dot_of(uint64_t a, int a_kind, uint64_t b, int b_kind, int width) {
  float sum = 0.0;
  for (int d = 0; d < width; d += 4) {
    const vec4 x = quad_at(a, d, width, a_kind), y = quad_at(b, d, width, b_kind);
    sum = fma(x.x, y.x, sum), sum = fma(x.y, y.y, sum), sum = fma(x.z, y.z, sum), sum = fma(x.w, y.w, sum);
  }
  return sum;
}

shared float weights[THREADS], gradients[THREADS];  // of the 64 pairs: scores, then P; dS

int invocation() { return int(gl_LocalInvocationIndex); }
int own_dim(int n) { return invocation() + n * THREADS; }

// An invocation's dims of a sum over many rows, and what rounding took from them: without tiles the sum is one long
// chain, and equal terms, of a broadcast V, all round the same way.
struct Sums { float of[OWN], lost[OWN]; };
const Sums nothing = Sums(float[OWN](0.0, 0.0, 0.0, 0.0), float[OWN](0.0, 0.0, 0.0, 0.0));

void add_row(inout Sums sums, float factor, uint64_t row, int kind, int width) {
  [[unroll]] for (int n = 0; n < OWN; ++n)
    if (own_dim(n) < width)
      add_compensated(sums.of[n], sums.lost[n],
                      factor * number_at(row + uint64_t(own_dim(n)) * element_bytes(kind), kind));
}

void store_row(uint64_t row, int kind, int width, Sums sums, float factor, bool accumulate) {
  [[unroll]] for (int n = 0; n < OWN; ++n) {
    if (own_dim(n) >= width) continue;
    const uint64_t at = row + uint64_t(own_dim(n)) * element_bytes(kind);
    put_number(at, kind, accumulate ? sums.of[n] * factor + number_at(at, kind) : sums.of[n] * factor);
  }
}

void forward() {
  const ForwardBlock given = Forward(parameters).block;
  const Question x = given.p.x;
  const int D = given.launch.D, Dv = given.launch.Dv;
  Place place;
  if (!query_place(x, given.launch.blocks, 1, place)) return;
  const DeviceSequence s = place.s;
  const int64_t i = place.first, token = s.q_begin + i;
  const int t = invocation();
  const HeadScores head = head_scores(x, given.launch, place.b, place.h, given.kind.bias);
  const uint64_t q = row_of(x.q, place.b, token, place.h, given.kind.q);

  Sums o = nothing;
  float m = lowest, l = 0.0, lost = 0.0, unused = 0.0;
  const Range keys = visible_keys(s.mask, Range(i, i + 1));
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += THREADS) {
    const int64_t j = j0 + t;
    const int count = int(lesser(keys.end - j0, THREADS));
    float S = lowest;
    if (t < count) {
      const uint64_t k = row_of(x.k, place.b, s.k_begin + j, place.kv, given.kind.q);
      S = score_of(x, s, head, dot_of(q, given.kind.q, k, given.kind.q, D), i, j, unused);
    }
    barrier();  // everybody is done with the 64 before
    weights[t] = S;
    barrier();
    float top = m;
    for (int n = 0; n < count; ++n) top = max(top, weights[n]);
    const float alpha = exp2_of(m - top), P = S <= hidden ? 0.0 : exp2_of(S - top);
    [[unroll]] for (int n = 0; n < OWN; ++n) o.of[n] *= alpha, o.lost[n] *= alpha;
    l *= alpha, lost *= alpha, m = top;
    barrier();
    weights[t] = P;
    gradients[t] = P == 0.0 ? 0.0 : P * keep_of(x, head, i, j);
    barrier();
    for (int n = 0; n < count; ++n) {
      add_compensated(l, lost, weights[n]);
      if (weights[n] != 0.0)
        add_row(o, gradients[n], row_of(x.v, place.b, s.k_begin + j0 + n, place.kv, given.kind.q), given.kind.q, Dv);
    }
  }
  const float inverse = finished(x, place.h, m, l);
  store_row(row_of(given.p.o, place.b, token, place.h, given.kind.o), given.kind.o, Dv, o, inverse, false);
  if (given.p.lse.data != 0ul && t == 0)
    put_lse(number_of(given.p.lse, place.b, token, place.h), m, l);
}

// P times the dropout factor, and dS, of query i and key j of sequence s.
struct Pair { float P, dS; };

Pair pair_of(BackwardBlock given, DeviceSequence s, HeadScores head, int kv, int64_t i, int64_t j) {
  const BackwardParams p = given.p;
  const uint64_t at = uint64_t(head.h * p.row_head + head.b * p.row_batch + s.q_begin + i) * 4ul;
  const float lse2 = float_at(p.lse2 + at);
  if (lse2 >= blind) return Pair(0.0, 0.0);
  const uint64_t q = row_of(p.x.q, head.b, s.q_begin + i, head.h, given.kind.q);
  const uint64_t k = row_of(p.x.k, head.b, s.k_begin + j, kv, given.kind.q);
  float derivative = 1.0;
  const float S = score_of(p.x, s, head, dot_of(q, given.kind.q, k, given.kind.q, given.launch.D), i, j, derivative);
  if (S <= hidden) return Pair(0.0, 0.0);
  const uint64_t d_o = row_of(p.d_o, head.b, s.q_begin + i, head.h, given.kind.d_o);
  const uint64_t v = row_of(p.x.v, head.b, s.k_begin + j, kv, given.kind.q);
  const float dP = dot_of(d_o, given.kind.d_o, v, given.kind.q, given.launch.Dv);
  const float P = exp2_of(S - lse2), keep = keep_of(p.x, head, i, j);
  float dS = P * (keep * dP - float_at(p.delta + at));
  if (ScoreOptions_need_derivative(head.options)) dS *= derivative;
  return Pair(P * keep, dS);
}

// The same of 64 pairs, one by each invocation, into shared memory.
void share_pairs(bool exists, BackwardBlock given, DeviceSequence s, HeadScores head, int kv, int64_t i, int64_t j) {
  Pair pair = Pair(0.0, 0.0);
  if (exists) pair = pair_of(given, s, head, kv, i, j);
  barrier();  // everybody is done with the 64 before
  weights[invocation()] = pair.P, gradients[invocation()] = pair.dS;
  barrier();
}

void query_gradient() {
  const BackwardBlock given = Backward(parameters).block;
  const BackwardParams p = given.p;
  Place place;
  if (!query_place(p.x, given.launch.blocks, 1, place)) return;
  const DeviceSequence s = place.s;
  const int64_t i = place.first;
  const HeadScores head = head_scores(p.x, given.launch, place.b, place.h, given.kind.bias);
  Sums dq = nothing;
  const Range keys = visible_keys(s.mask, Range(i, i + 1));
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += THREADS) {
    const int count = int(lesser(keys.end - j0, THREADS));
    share_pairs(invocation() < count, given, s, head, place.kv, i, j0 + invocation());
    for (int n = 0; n < count; ++n)
      if (gradients[n] != 0.0)
        add_row(dq, gradients[n], row_of(p.x.k, place.b, s.k_begin + j0 + n, place.kv, given.kind.q), given.kind.q,
                given.launch.D);
  }
  store_row(row_of(p.dq, place.b, s.q_begin + i, place.h, given.kind.dq), given.kind.dq, given.launch.D, dq, p.x.scale,
            p.accumulate != 0);
}

void key_gradients() {
  const BackwardBlock given = Backward(parameters).block;
  const BackwardParams p = given.p;
  Place place;
  if (!key_place(p.x, given.launch.blocks, 1, place)) return;
  const DeviceSequence s = place.s;
  const int64_t j = place.first, token = s.k_begin + j;
  Sums dk = nothing, dv = nothing;
  const Range queries = visible_queries(s.mask, Range(j, j + 1));
  for (int h = place.h; h < place.h + p.x.Hq / p.x.Hk; ++h) {
    const HeadScores head = head_scores(p.x, given.launch, place.b, h, given.kind.bias);
    for (int64_t i0 = queries.begin; i0 < queries.end; i0 += THREADS) {
      const int count = int(lesser(queries.end - i0, THREADS));
      share_pairs(invocation() < count, given, s, head, place.kv, i0 + invocation(), j);
      for (int n = 0; n < count; ++n) {
        if (weights[n] == 0.0 && gradients[n] == 0.0) continue;
        const uint64_t q = row_of(p.x.q, place.b, s.q_begin + i0 + n, h, given.kind.q);
        const uint64_t d_o = row_of(p.d_o, place.b, s.q_begin + i0 + n, h, given.kind.d_o);
        if (p.dk.data != 0ul) add_row(dk, gradients[n], q, given.kind.q, given.launch.D);
        if (p.dv.data != 0ul) add_row(dv, weights[n], d_o, given.kind.d_o, given.launch.Dv);
      }
    }
  }
  const bool accumulate = p.accumulate != 0;
  if (p.dk.data != 0ul)
    store_row(row_of(p.dk, place.b, token, place.kv, given.kind.dk), given.kind.dk, given.launch.D, dk, p.x.scale,
              accumulate);
  if (p.dv.data != 0ul)
    store_row(row_of(p.dv, place.b, token, place.kv, given.kind.dv), given.kind.dv, given.launch.Dv, dv, 1.0, accumulate);
}

void main() {
  if (WORK == 0) forward();
  if (WORK == 1) query_gradient();
  if (WORK == 2) key_gradients();
}
