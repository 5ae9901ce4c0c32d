// SPDX-License-Identifier: Apache-2.0
// The state of a block's rows over some keys: m and l of the rows whose columns a thread has, and its share of O. It
// lives in registers; on the stack of a block and for siblings in other blocks it lies in memory, thread by thread. Two
// states become one by decode/tree.hpp, whatever the place. Device code; implements docs/algorithm.md, "Merge".
#pragma once

#include "decode/config.hpp"
#include "decode/tree.hpp"
#include "gpu/kernel/math.cuh"
#include "math/softmax.hpp"

namespace tessera::decode {

struct TreeMath {
  __device__ static float exp2(float x) { return gpu::exp2_of(x); }
  __device__ static float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
};

// O^T in accumulators: dims are rows, rows are columns. Of column tile c a thread has columns 8 c + 2 (lane % 4) and
// the next; of value tile v, dims 64 v + 16 warp + lane / 4 and 8 more. Value e of four: dim e / 2, column e % 2.
template <Config config>
struct State {
  static constexpr int columns = config.rows / 8, values = config.Dv / 64;
  float m[columns][2], l[columns][2];
  float O[values][columns][4];

  __device__ static int column(int c, int e) { return 8 * c + int(threadIdx.x) % 4 * 2 + e; }
  // Of the threads that have the same columns, this one speaks for them.
  __device__ static bool speaks() { return threadIdx.x < 4; }

  __device__ void clear() {
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) m[c][e] = minus_infinity<float>, l[c][e] = 0;
#pragma unroll
    for (int v = 0; v < values; ++v)
#pragma unroll
      for (int c = 0; c < columns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) O[v][c][e] = 0;
  }

  // Which of a value's scales the dims of value tile v have.
  __device__ static constexpr int group_of(int v) { return config.v_groups == 1 ? 0 : v / (group_dims / 64); }

  // All of O, or the dims of one group.
  __device__ void scale(const float (&factor)[columns][2], int group = -1) {
#pragma unroll
    for (int v = 0; v < values; ++v)
#pragma unroll
      for (int c = 0; c < columns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (group < 0 || group_of(v) == group) O[v][c][e] *= factor[c][e % 2];
  }

  // --- memory

  __device__ static float4* part(float* at, int v, int c) {
    return reinterpret_cast<float4*>(at) + (v * columns + c) * threads + threadIdx.x;
  }
  __device__ static float* m_at(float* at) { return at + config.rows * config.Dv; }
  __device__ static float* l_at(float* at) { return m_at(at) + config.rows; }

  __device__ void store(float* at) const {
#pragma unroll
    for (int v = 0; v < values; ++v)
#pragma unroll
      for (int c = 0; c < columns; ++c) *part(at, v, c) = float4{O[v][c][0], O[v][c][1], O[v][c][2], O[v][c][3]};
    if (!speaks()) return;
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) m_at(at)[column(c, e)] = m[c][e], l_at(at)[column(c, e)] = l[c][e];
  }

  // What this thread has stored of O.
  __device__ void load_O(float* at) {
#pragma unroll
    for (int v = 0; v < values; ++v)
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        const float4 x = *part(at, v, c);
        O[v][c][0] = x.x, O[v][c][1] = x.y, O[v][c][2] = x.z, O[v][c][3] = x.w;
      }
  }

  // --- merging

  // Of column 8 c + 2 (lane % 4) + e: the state's own m and l, with those of earlier keys or later ones.
  __device__ Weights merge_row(int c, int e, RowState a, RowState b) {
    const Merged both = merge<TreeMath>(a, b);
    m[c][e] = both.state.m, l[c][e] = both.state.l;
    return both.weights;
  }

  // With the state of earlier keys, which this block has stored.
  __device__ void merge_after(float* earlier) {
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      Weights w[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        w[e] = merge_row(c, e, {m_at(earlier)[column(c, e)], l_at(earlier)[column(c, e)]}, {m[c][e], l[c][e]});
#pragma unroll
      for (int v = 0; v < values; ++v) {
        const float4 x = *part(earlier, v, c);
        const float before[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) O[v][c][e] = merged<TreeMath>(w[e % 2], before[e], O[v][c][e]);
      }
    }
  }

  // With a sink: a key with its own score, in units of log2(e), and no value.
  __device__ void merge_sink(int c, int e, float score) {
    const RowState sink{score, score == minus_infinity<float> ? 0.f : 1.f};
    const Weights w = merge_row(c, e, {m[c][e], l[c][e]}, sink);
#pragma unroll
    for (int v = 0; v < values; ++v)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& o = O[v][c][2 * half + e];
        o = merged<TreeMath>(w, o, 0);
      }
  }
};

// A family: siblings under one node four levels up, by their place in it. Those outside of [first, end) are empty.
template <class At>
struct Family {
  int first, end;
  At at;  // the state of a sibling

  __device__ bool has(int n) const { return first <= n && n < end; }
};

// Merges a family that other blocks have written, in the order of the tree. `weights`: shared memory, two numbers for
// each of the 15 merges and each row, then m and l of the rows. All threads of the block. The result takes the place of
// the first one on its way to registers: a loop over parts needs few of them at a time.
template <Config config, class At>
__device__ void merge_family(State<config>& state, const Family<At>& siblings, float* weights) {
  using Rows = State<config>;
  constexpr int rows = config.rows, columns = Rows::columns, values = Rows::values;
  float* const result = weights + 2 * (family - 1) * rows;
  if (threadIdx.x < rows) {
    const int row = threadIdx.x;
    RowState x[family];
#pragma unroll
    for (int n = 0; n < family; ++n) {
      x[n] = {minus_infinity<float>, 0};
      if (siblings.has(n)) x[n] = {__ldcg(Rows::m_at(siblings.at(n)) + row), __ldcg(Rows::l_at(siblings.at(n)) + row)};
    }
    float* weight = weights + row;
#pragma unroll
    for (int step = 1; step < family; step *= 2)
#pragma unroll
      for (int n = 0; n < family; n += 2 * step, weight += 2 * rows) {
        const Merged both = merge<TreeMath>(x[n], x[n + step]);
        x[n] = both.state;
        weight[0] = both.weights.a, weight[rows] = both.weights.b;
      }
    result[row] = x[0].m, result[rows + row] = x[0].l;
  }
  __syncthreads();
#pragma unroll 1
  for (int v = 0; v < values; ++v)
#pragma unroll 1
    for (int c = 0; c < columns; ++c) {
      float4 x[family];
#pragma unroll
      for (int n = 0; n < family; ++n)
        x[n] = siblings.has(n) ? __ldcg(Rows::part(siblings.at(n), v, c)) : float4{0, 0, 0, 0};
      const float* weight = weights + Rows::column(c, 0);
#pragma unroll
      for (int step = 1; step < family; step *= 2)
#pragma unroll
        for (int n = 0; n < family; n += 2 * step, weight += 2 * rows) {
          const Weights even{weight[0], weight[rows]}, odd{weight[1], weight[rows + 1]};
          const float4 a = x[n], b = x[n + step];
          x[n] = {merged<TreeMath>(even, a.x, b.x), merged<TreeMath>(odd, a.y, b.y), merged<TreeMath>(even, a.z, b.z),
                  merged<TreeMath>(odd, a.w, b.w)};
        }
      *Rows::part(siblings.at(siblings.first), v, c) = x[0];
    }
  state.load_O(siblings.at(siblings.first));
#pragma unroll
  for (int c = 0; c < columns; ++c)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      state.m[c][e] = result[Rows::column(c, e)], state.l[c][e] = result[rows + Rows::column(c, e)];
}

}  // namespace tessera::decode
