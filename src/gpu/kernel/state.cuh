// SPDX-License-Identifier: Apache-2.0
// States of rows between the calls of a forward pass: what a row begins with, and rows that no key of a call changes,
// which go on as they are or are finished. Device code; implements docs/algorithm.md, "Carried state".
#pragma once

#include "gpu/kernel/common.cuh"
#include "gpu/state.hpp"

namespace tessera::gpu {

// Of a row, without its o.
struct RowState {
  float m;
  double l;
};

__device__ inline double* sum_of(const StateRef& s, Int64 b, Int64 row, Int64 h) {
  return s.l + b * s.l_batch + h * s.l_head + row * s.l_row;
}

// What a row begins with: the state that it is given, its sink, which is a key with its own score and no value, or
// nothing.
__device__ inline RowState first_state(const Question& x, const StateRef& in, Int64 b, Int64 row, Int64 h) {
  if (in.o.data) return {*number_of(in.m, b, row, h), *sum_of(in, b, row, h)};
  const float sink = x.sinks ? x.sinks[h * x.sink_head] : minus_infinity<float>;
  return sink == minus_infinity<float> ? RowState{sink, 0} : RowState{sink * log2e<float>, 1};
}

__device__ inline void write_state(const StateRef& out, Int64 b, Int64 row, Int64 h, const RowState& state) {
  *number_of(out.m, b, row, h) = state.m;
  *sum_of(out, b, row, h) = state.l;
}

// What O is multiplied by in the end, for a row with sum l. A row that sees no key has none, and O = 0.
__device__ inline float finish_factor(float whole, float l) { return l == 0 ? 0 : whole / l; }

// A row that no key of the call changes, by the lanes of one warp.
template <Element element>
__device__ void pass_state(const ForwardParams& p, const States& states, float whole, Int64 b, Int64 row, Int64 h,
                           int Dv) {
  const int lane = threadIdx.x % 32;
  const RowState state = first_state(p.x, states.in, b, row, h);
  const float* from = states.in.o.data ? row_of<Element::f32>(states.in.o, b, row, h) : nullptr;
  if (states.out.o.data) {
    float* to = row_of<Element::f32>(states.out.o, b, row, h);
    for (int d = lane; d < Dv; d += 32) to[d] = from ? from[d] : 0;
    if (lane == 0) write_state(states.out, b, row, h, state);
    return;
  }
  const float l = float(state.l), factor = finish_factor(whole, l);
  auto* to = row_of<element>(p.o, b, row, h);
  for (int d = lane; d < Dv; d += 32) from_float(from ? from[d] * factor : 0, to[d]);
  if (lane == 0 && p.lse.data) *number_of(p.lse, b, row, h) = natural_lse_by_mantissa(state.m, l);
}

// All rows, in a call without keys: a warp each.
template <RowConfig config>
__device__ void pass_states(const StateParams& p) {
  QueryPlace place;
  if (!query_place(p.x, config.threads / 32, place)) return;
  const Int64 i = place.first + threadIdx.x / 32;
  if (i < place.s.nq) pass_state<config.o>(p, p.states, p.whole, place.b, place.s.q_begin + i, place.h, config.Dv);
}

}  // namespace tessera::gpu
