// SPDX-License-Identifier: Apache-2.0
// The state of a block's rows over some keys: m and l of the rows whose columns a thread has, and its share of O. It
// lives in registers; on the stack of a block and for siblings in other blocks it lies in memory, thread by thread. Two
// states become one by decode/tree.hpp, whatever the place. Device code; implements docs/algorithm.md, "Merge".
#pragma once

#include "decode/config.hpp"
#include "decode/tree.hpp"
#include "gpu/kernel/cluster.cuh"
#include "gpu/kernel/copy.cuh"
#include "gpu/kernel/math.cuh"
#include "math/softmax.hpp"

namespace tessera::decode {

struct TreeMath {
  __device__ static float exp2(float x) { return gpu::exp2_of(x); }
  __device__ static float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
};

// O^T in accumulators: dims are rows, rows are columns. Of column tile c a thread has columns 8 c + 2 (lane % 4) and
// the next; of value tile v, dims n v + 16 warp + lane / 4 and 8 more, where n are config.dims_at_once(). Value e of
// four: dim e / 2, column e % 2.
template <Config config>
struct State {
  static constexpr int columns = config.rows / 8, values = config.Dv / config.dims_at_once();
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
  __device__ static constexpr int group_of(int v) {
    return config.v_groups == 1 ? 0 : v * config.dims_at_once() / group_dims;
  }

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
    return reinterpret_cast<float4*>(at) + (v * columns + c) * config.threads() + threadIdx.x;
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

  __device__ void keep(int v, int c, const float4& x) {
    O[v][c][0] = x.x, O[v][c][1] = x.y, O[v][c][2] = x.z, O[v][c][3] = x.w;
  }
  // What this thread has stored of O.
  __device__ void load_O(float* at) {
#pragma unroll
    for (int v = 0; v < values; ++v)
#pragma unroll
      for (int c = 0; c < columns; ++c) keep(v, c, *part(at, v, c));
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

// Siblings whose states one block merges, by their place under the node `levels` higher. Those outside of [first, end)
// are not there; they stand for a neighbour in loads, which then need no branch: what is not there weighs nothing.
struct Siblings {
  int first, end;
  __device__ bool has(int n) const { return first <= n && n < end; }
  __device__ int there(int n) const { return n < first ? first : n < end ? n : end - 1; }
};

// A family: siblings under one node four levels up, whose states lie in global memory. Offsets of 32 bits: they are
// kept, and registers are few.
template <Config config, class SlotOf>
struct Family : Siblings {
  static constexpr int size = family;
  float* states;
  SlotOf slot_of;  // the place of a sibling's state

  __device__ float* at(int n) const { return states + slot_of(this->there(n)) * state_floats(config.rows, config.Dv); }
  __device__ float4 part(int n, int v, int c) const { return __ldcg(State<config>::part(at(n), v, c)); }
  __device__ RowState row(int n, int row) const {
    return {__ldcg(State<config>::m_at(at(n)) + row), __ldcg(State<config>::l_at(at(n)) + row)};
  }
  __device__ float* room() const { return at(this->first); }  // for what has been merged
};

// The blocks of a cluster, whose states lie at the same place of each one's shared memory. The first one merges.
template <Config config>
struct Neighbours : Siblings {
  static constexpr int size = config.cluster;
  float* own;

  __device__ UInt32 rank(int n) const { return this->there(n) - this->first; }
  __device__ float4 part(int n, int v, int c) const {
    return gpu::load_four_from_block(rank(n), gpu::shared_address(State<config>::part(own, v, c)));
  }
  __device__ RowState row(int n, int row) const {
    return {gpu::load_from_block(rank(n), gpu::shared_address(State<config>::m_at(own) + row)),
            gpu::load_from_block(rank(n), gpu::shared_address(State<config>::l_at(own) + row))};
  }
  __device__ float* room() const { return own; }
};

// Merges siblings that other blocks have written, in the order of the tree. `weights`: shared memory, two numbers for
// each of the merges and each row, then m and l of the rows. All threads of the block. The states are far away, so that
// many are asked for at once: where registers allow it, all of both parts of a thread. Else half of them, and the
// result takes the place of a state on its way to registers.
template <Config config, class Group>
__device__ void merge_siblings(State<config>& state, const Group& siblings, float* weights) {
  using Rows = State<config>;
  constexpr int family = Group::size;
  constexpr int rows = config.rows, columns = Rows::columns, values = Rows::values, parts = values * columns;
  constexpr int registers = 65536 / (config.threads() * config.blocks_per_sm), of_part = 4 * family;
  constexpr bool all_at_once = parts <= 2 && parts * of_part + 60 <= registers;
  constexpr int at_once = all_at_once ? family : family / 2;
  float* const result = weights + 2 * (family - 1) * rows;
  // Where the weights of the merge of nodes n and n + step begin.
  const auto weights_of = [&](int n, int step) {
    return weights + 2 * rows * (family - family / step + n / (2 * step));
  };
  const auto merge_two = [&](float4& a, const float4& b, const float* weight) {
    const Weights even{weight[0], weight[rows]}, odd{weight[1], weight[rows + 1]};
    a = {merged<TreeMath>(even, a.x, b.x), merged<TreeMath>(odd, a.y, b.y), merged<TreeMath>(even, a.z, b.z),
         merged<TreeMath>(odd, a.w, b.w)};
  };
  using Nodes = float4[at_once];
  const auto load = [&](Nodes& x, int first, int v, int c) {
#pragma unroll
    for (int n = 0; n < at_once; ++n) x[n] = siblings.part(first + n, v, c);
  };
  // The merges of a part under a node: into x[0].
  const auto merge_nodes = [&](Nodes& x, int first, int c) {
#pragma unroll
    for (int step = 1; step < at_once; step *= 2)
#pragma unroll
      for (int n = 0; n < at_once; n += 2 * step)
        merge_two(x[n], x[n + step], weights_of(first + n, step) + Rows::column(c, 0));
  };
  Nodes all[all_at_once ? parts : 1];
  if constexpr (all_at_once)
#pragma unroll
    for (int n = 0; n < parts; ++n) load(all[n], 0, n / columns, n % columns);
  // Of a row, a lane has a sibling.
  const int n = threadIdx.x % family;
#pragma unroll 1
  for (int first = 0; first < rows; first += config.threads() / family) {
    const int row = first + threadIdx.x / family;  // whole warps come to the shuffles
    RowState x{minus_infinity<float>, 0};
    if (row < rows && siblings.has(n)) x = siblings.row(n, row);
#pragma unroll
    for (int step = 1; step < family; step *= 2) {
      const RowState later{__shfl_xor_sync(0xffffffffu, x.m, step), __shfl_xor_sync(0xffffffffu, x.l, step)};
      const Merged both = merge<TreeMath>(x, later);
      x = both.state;  // of the first lane of each 2 * step
      if (row >= rows || n % (2 * step) > 0) continue;
      float* const weight = weights_of(n, step) + row;
      weight[0] = both.weights.a, weight[rows] = both.weights.b;
    }
    if (row < rows && n == 0) result[row] = x.m, result[rows + row] = x.l;
  }
  __syncthreads();
  if constexpr (all_at_once) {
#pragma unroll
    for (int n = 0; n < parts; ++n) {
      merge_nodes(all[n], 0, n % columns);
      state.keep(n / columns, n % columns, all[n][0]);
    }
  } else {
#pragma unroll 1
    for (int v = 0; v < values; ++v)
#pragma unroll 1
      for (int c = 0; c < columns; ++c) {
        Nodes left, right;
        load(left, 0, v, c), merge_nodes(left, 0, c);
        load(right, at_once, v, c), merge_nodes(right, at_once, c);
        merge_two(left[0], right[0], weights_of(0, at_once) + Rows::column(c, 0));
        *Rows::part(siblings.room(), v, c) = left[0];
      }
    state.load_O(siblings.room());
  }
#pragma unroll
  for (int c = 0; c < columns; ++c)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      state.m[c][e] = result[Rows::column(c, e)], state.l[c][e] = result[rows + Rows::column(c, e)];
}

}  // namespace tessera::decode
