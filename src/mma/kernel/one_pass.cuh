// SPDX-License-Identifier: Apache-2.0
// The `mma` backward kernel that makes dQ, dK and dV in one pass over the scores. A block owns keys and sums their dK
// and dV in registers, while the queries of every head of the group stream past by cp.async. What it adds to dQ goes to
// f32 sums in memory, from which mma/kernel/finish.cuh makes dQ. S, P, dP and dS are the transposed ones: rows are
// keys. Device code; implements docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "gpu/kernel/accumulator.cuh"
#include "gpu/kernel/barrier.cuh"
#include "mma/kernel/one_pass_work.cuh"
#include "mma/ptx/reduce.cuh"
#include "mma/tile/copy.cuh"
#include "mma/tile/product.cuh"

namespace tessera::mma {

// What a warp makes of its keys' scores: all, or one half of a pair's work.
enum class Part { all, P, dS };

template <OnePassConfig config, Part part>
struct OnePass {
  static constexpr int R = config.row_tiles, queries = config.block_queries, keys = keys_of(config);
  static constexpr bool plain_loads = config.copy_bytes == 2;  // instead of cp.async; they need registers
  static constexpr bool makes_P = part != Part::dS, makes_dS = part != Part::P;
  static constexpr OnePassLayout layout = layout_of(config);
  using Place = OnePassWork::Place;
  using Scores = float[R][queries / 2];
  using Packed = UInt32[R][queries / 16][4];  // an operand of the next product

  const OnePassParams& p;
  OnePassWork& w;
  unsigned char* const shared;  // memory of the block, and its address
  const UInt32 memory = shared_address(shared);
  const int lane = threadIdx.x % 32;
  // The same in all lanes, which the compiler is told by the shuffle.
  const int owner = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32 % config.warps, 0);
  const int first_row = owner * 16 * R;  // of its keys
  // What this lane gives to ldmatrix: of its warp's keys, of queries as operands of products along rows and over rows.
  const int own_byte = first_row * gpu::panel_row_bytes + lane_byte(a_row(lane), a_column(lane));
  const int along_byte = lane_byte(b_row(lane), b_column(lane)), over_byte = lane_byte(t_row(lane), t_column(lane));
  float dK[R][makes_dS ? config.D / 2 : 1] = {}, dV[R][makes_P ? config.Dv / 2 : 1] = {};

  __device__ OnePass(const OnePassParams& p, OnePassWork& w, unsigned char* shared) : p(p), w(w), shared(shared) {}

  // --- copies

  template <int rows, int width>
  __device__ void copy(UInt32 to, const gpu::TokenRef& t, Int64 token, Int32 head, int valid, int dims) const {
    const auto* from = gpu::row_of<config.element>(t, w.b, token, head);
    TileCopy<config, rows, width>(to, &from->bits, t.token, valid, dims).issue_all();
  }
  __device__ void copy_keys() const {
    const gpu::Question& x = p.call.x;
    const Int64 token = w.row_begin + w.first;
    copy<keys, config.D>(memory + layout.K, x.k, token, w.row_head, w.rows - w.first, p.D);
    copy<keys, config.Dv>(memory + layout.V, x.v, token, w.row_head, w.rows - w.first, p.Dv);
  }
  // Where a thread's next chunks of Q and dO, and its number, come from. It is kept in shared memory, from which it
  // takes few instructions to have it again; registers are all in use.
  struct Source {
    const UInt16 *Q, *dO;
    Int64 number;  // of a query's LSE and delta
  };
  static_assert(sizeof(Source) == source_bytes);
  __device__ Source& source() const {
    return reinterpret_cast<Source*>(shared + layout.sources)[recomputed(threadIdx.x)];
  }
  // Of tile n, the last, of a head; those before it follow.
  __device__ void find_sources(Place at) const {
    const Int64 token = w.column_begin + Int64(at.n) * queries;
    const int thread = recomputed(threadIdx.x);
    const auto first_chunk = [&](const gpu::TokenRef& t) {
      return TileCopy<config, queries, 64>::chunk_of(&gpu::row_of<config.element>(t, w.b, token, at.head)->bits,
                                                     t.token, thread);
    };
    source() = {first_chunk(p.call.x.q), first_chunk(p.call.d_o),
                at.head * p.call.row_head + w.b * p.call.row_batch + token + thread};
  }
  // Plain loads chunk after chunk: all at once would be in registers at once.
  template <class Copy>
  __device__ static void issue(Copy copy) {
#pragma unroll plain_loads ? 1 : Copy::parts
    for (int n = 0; n < Copy::parts; ++n) copy.issue(n);
  }
  __device__ void copy_Q(Place at, int stage) const {
    Source& from = source();
    const int valid = w.columns - at.n * queries, column = recomputed(threadIdx.x);
    issue(TileCopy<config, queries, config.D>(Q(stage), from.Q, p.Q.advance, valid, p.D, column));
    from.Q -= p.Q.back;
    if (column >= queries) return;
    copy_number<config>(numbers(stage) + 4 * column, p.call.lse2 + from.number, column < valid);
    copy_number<config>(numbers(stage) + 4 * (queries + column), p.call.delta + from.number, column < valid);
    from.number -= queries;
  }
  __device__ void copy_dO(Place at, int stage) const {
    Source& from = source();
    const int valid = w.columns - at.n * queries;
    issue(TileCopy<config, queries, config.Dv>(dO(stage), from.dO, p.dO.advance, valid, p.Dv, recomputed(threadIdx.x)));
    from.dO -= p.dO.back;
  }
  // Finds the tile after that in work, and prefetches what has a stage to go to.
  __device__ void begin_next(int now, int stage) const {
    const Place at = w.places[now], next = w.after(at);
    if (threadIdx.x == 0) w.places[1 - now] = next;
    if (w.exists(next)) {
      if (next.head != at.head) find_sources(next);
      if constexpr (config.q_stages == 2) copy_Q(next, 1 - stage);
      if constexpr (config.o_stages == 2) copy_dO(next, 1 - stage);
    }
    commit_copies();
  }
  __device__ UInt32 numbers(int stage) const { return memory + layout.numbers + stage * layout.numbers_bytes; }
  static constexpr int o_stage(int stage) { return config.o_stages == 2 ? stage : 0; }
  __device__ UInt32 Q(int stage) const { return memory + layout.Q + stage * layout.Q_bytes; }
  __device__ UInt32 dO(int stage) const { return memory + layout.dO + o_stage(stage) * layout.dO_bytes; }

  // Queries that see nothing have P = 0 but may hold NaN, and 0 NaN is NaN: their rows become 0. Their LSE is +inf
  // here, which the thread that has copied it looks at.
  __device__ bool copied_a_blind_query(int stage) const {
    return threadIdx.x < queries && load_number(numbers(stage) + 4 * threadIdx.x) == -minus_infinity<float>;
  }
  template <int width>
  __device__ void clear_blind_queries(UInt32 tile, int stage) const {
    constexpr int chunks = width / gpu::chunk_columns;
#pragma unroll 1
    for (int n = recomputed(threadIdx.x); n < queries * chunks; n += threads_of(config))
      if (load_number(numbers(stage) + n / chunks * 4) == -minus_infinity<float>)
        store_chunk(tile + gpu::tile_byte(queries, n / chunks, n % chunks * gpu::chunk_columns), {0, 0, 0, 0});
  }

  // --- scores

  __device__ void multiply_S(Scores& S, UInt32 Q) const {
    constexpr int steps = config.D / 16;
    const UInt32 K = memory + layout.K + own_byte;
    if constexpr (config.halves_S) {
      Scores rest;
      multiply_along_rows<config, keys, 0, steps / 2>(S, K, Q);
      multiply_along_rows<config, keys, steps / 2, steps>(rest, K, Q);
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int n = 0; n < queries / 2; ++n) S[r][n] += rest[r][n];
    } else {
      multiply_along_rows<config, keys, 0, steps>(S, K, Q);
    }
  }

  // Scores that the mask or the ends of the sequence leave out become -inf. Rows of absent keys are 0, but exp2(0 -
  // LSE) may be inf, and they count in dQ.
  __device__ void mask(Scores& S, Int32 n) const {
    const Int32 query = n * queries, present = w.rows - w.first - first_row;
    if (query >= first_row + 16 * R - 1 + w.low && query + queries - 1 <= first_row + w.high &&
        query + queries <= w.columns && 16 * R <= present)
      return;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Int32 distance = first_row + 16 * r - query;
      gpu::hide<queries>(S[r], lane, w.low + distance, w.high + distance, w.columns - query);
#pragma unroll
      for (int e = 0; e < queries / 2; ++e)
        if (16 * r + gpu::accumulator_row(lane, e) >= present) S[r][e] = minus_infinity<float>;
    }
  }

  // P, in the place of S.
  __device__ void exponentiate(Scores& S, int stage) const {
#pragma unroll
    for (int c = 0; c < queries / 8; ++c) {
      float lse2[2];
      load_two(numbers(stage) + 4 * gpu::accumulator_column(lane, 4 * c), lse2);
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e) S[r][4 * c + e] = gpu::exp2_of(fmaf(S[r][4 * c + e], p.factor, -lse2[e % 2]));
    }
  }

  __device__ static void pack(const Scores& S, Packed& to) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int e = 0; e < queries / 2; e += 2)
        to[r][e / 8][e / 2 % 4] = gpu::packed<config.element>(S[r][e], S[r][e + 1]);
  }

  // P of four values of a lane, from one warp of a pair to the same lane of the other.
  __device__ UInt32 exchanged() const { return memory + layout.P + (owner * 32 + lane) * 16; }
  static constexpr int exchanged_step(int r, int c) { return (r * (queries / 8) + c) * config.warps * 32 * 16; }
  __device__ int pair_name() const { return 1 + recomputed(owner); }
  __device__ void hand_over(const Scores& P) const {
    const UInt32 to = exchanged();
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int c = 0; c < queries / 8; ++c) store_four(to + exchanged_step(r, c), &P[r][4 * c]);
    arrive_at_pair(pair_name());
  }

  // dS = P (dP - delta), in the place of P. In a pair P comes from the other warp, and dS takes dP's place.
  __device__ void differentiate(Scores& P, const Scores& dP, int stage) const {
    if constexpr (config.paired) wait_for_pair(pair_name());
    const UInt32 from = exchanged();
#pragma unroll
    for (int c = 0; c < queries / 8; ++c) {
      float delta[2];
      load_two(numbers(stage) + 4 * (queries + gpu::accumulator_column(lane, 4 * c)), delta);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float four[4];
        if constexpr (config.paired) load_four(from + exchanged_step(r, c), four);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = P[r][4 * c + e];
          x = (config.paired ? four[e] : x) * (dP[r][4 * c + e] - delta[e % 2]);
        }
      }
    }
  }

  // Where this lane's first value of dS lies; 8 queries further changes bits of the chunk.
  __device__ UInt32 own_dS() const {
    const int at = recomputed(lane);
    return memory + layout.dS +
           dS_byte(keys, queries, first_row + gpu::accumulator_row(at, 0), gpu::accumulator_column(at, 0));
  }
  template <class Pairs>
  __device__ void store_dS(Pairs pairs) const {
    const UInt32 first = own_dS();
#pragma unroll
    for (int c = 0; c < queries / 8; ++c) {
      const UInt32 to = turned(first, c * gpu::chunk_bytes);
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int e = 0; e < 2; ++e) store_pair(to + (2 * r + e) * 8 * gpu::panel_row_bytes, pairs(r, 2 * c + e));
    }
  }

  // The tile's share of dK and dV, and dS in shared memory for everybody.
  __device__ void add_scores(Int32 n, int stage) {
    const Int32 query = n * queries;
    if (query + queries - 1 < first_row + w.low || query > first_row + 16 * R - 1 + w.high) {  // sees nothing
      if constexpr (makes_dS) store_dS([](int, int) { return 0u; });
      return;
    }
    Scores S;
    Packed operand;
    if constexpr (makes_P) {
      multiply_S(S, Q(stage) + along_byte);
      mask(S, n);
      exponentiate(S, stage);
      if constexpr (config.paired) hand_over(S);
      pack(S, operand);
      multiply_over_rows<config>(dV, operand, dO(plain_loads ? recomputed(stage) : stage) + over_byte);
    }
    if constexpr (makes_dS) {
      Scores dP;
      multiply_along_rows<config, keys, 0, config.Dv / 16>(dP, memory + layout.V + own_byte, dO(stage) + along_byte);
      differentiate(S, dP, stage);
      pack(S, operand);
      store_dS([&](int r, int n) { return operand[r][n / 4][n % 4]; });
      multiply_over_rows<config>(dK, operand, Q(stage) + over_byte);
    }
  }

  // --- dQ

  static constexpr int turn_tiles = config.turn_tiles;
  static_assert(turn_tiles >= 1 && turn_tiles <= most_turn_tiles);
  using Turn = OnePassWork::Turn;

  __device__ UInt32* count_of(Int32 tile) const { return p.memory.counts + tile; }

  // By one warp for all of its block, at the first of turn_tiles neighbours, of which its lanes have one each: the
  // turns at the neighbours before are over, and whose are these? What the other warps have added lies behind a
  // barrier, and what they are going to add follows one, so a single fence speaks for all of them. Where two warps
  // share keys it is one that makes P: such a one has time left at the barrier, which the others reach later.
  __device__ void pass_turns_on(Place at) const {
    if constexpr (!makes_P) return;
    const int own = recomputed(threadIdx.x);
    const bool first_of_head = at.n == w.end - 1;
    if (own >= turn_tiles || (!first_of_head && at.n % turn_tiles != turn_tiles - 1)) return;
    const Int32 n = at.n / turn_tiles * turn_tiles + own;
    UInt32 seen = ~UInt32(0);
    if (!first_of_head || at.head != w.head) {  // else nothing has been added, and there is no fence
      if (has_tile(n)) seen = look_at_count(count_of(w.tile_number(p.memory, {at.head, n})));
      fence_counts();
      if (first_of_head)
        count_last_of(at.head - 1, own);
      else
        count_tile({at.head, n + turn_tiles});
    }
    const UInt32 turn = turn_at<config>(w, n);
    w.turns[own] = turn == 0 ? Turn::stores : turn == seen ? Turn::adds : Turn::waits;
  }
  // The last ones, behind a barrier after all additions.
  __device__ void pass_last_turns_on() const {
    const int own = threadIdx.x;
    if (!makes_P || own >= turn_tiles || w.begin >= w.end) return;
    fence_counts();
    count_last_of(w.head + w.heads - 1, own);
  }
  __device__ bool has_tile(Int32 n) const { return turn_tiles == 1 || (n >= w.begin && n < w.end); }
  __device__ void count_tile(Place at) const {
    if (has_tile(at.n)) count_behind_fence(count_of(w.tile_number(p.memory, at)));
  }
  __device__ void count_last_of(Int32 head, int own) const {
    count_tile({head, w.begin / turn_tiles * turn_tiles + own});
  }

  // This warp's part of dQ = dS^T K, over all keys of the block, to the sums. In order: when all blocks of earlier keys
  // have added to it; the first of them only stores.
  __device__ void add_dQ(Place at) const {
    constexpr QuerySums sums = sums_of(config);
    float dQ[QuerySums::row_tiles][sums.columns() / 2];
    const int own = recomputed(lane), warp = (config.ordered ? recomputed(threadIdx.x) : int(threadIdx.x)) / 32;
    const int row = sums.first_row(warp), column = sums.first_column(warp);
    multiply_turned<config, keys, dS_rows(keys, queries), queries>(
        dQ, memory + layout.dS + dS_byte(keys, queries, b_row(own), b_column(own) + row),
        memory + layout.K + gpu::tile_byte(keys, t_row(own), t_column(own) + column));
    const Int32 tile = w.tile_number(p.memory, at);
    bool stores = false;
    if constexpr (config.ordered) {
      const Turn turn = w.turns[at.n % turn_tiles];
      if (turn == Turn::waits) {
        if (lane == 0) wait_for_count(count_of(tile), turn_at<config>(w, at.n));
        __syncwarp();
      }
      stores = turn == Turn::stores;
    }
    float* to = p.memory.sums + (Int64(tile) * sums.tile_numbers() + warp * sums.part_numbers());
    const auto put = [&](auto one) {
#pragma unroll
      for (int r = 0; r < QuerySums::row_tiles; ++r)
#pragma unroll
        for (int n = 0; n < sums.columns() / 2; n += 4) one(to + 32 * (r * (sums.columns() / 2) + n), &dQ[r][n]);
    };
    if (stores)
      put([&](float* at, const float* x) { store_sums(at, lane, x); });
    else
      put([&](float* at, const float* x) { add_sums(at, lane, x); });
  }

  // --- the loop over tiles of queries, of all heads of the group

  // Warps that make P and warps that make dS meet, each at a place of its own.
  __device__ static void sync_block() { gpu::sync_threads(0, threads_of(config)); }

  __device__ void sum() {
    if (w.begin >= w.end) return;
    copy_keys();
    find_sources(w.places[0]);
    copy_Q(w.places[0], 0);
    copy_dO(w.places[0], 0);
    commit_copies();
    int now = 0;  // which of the two places is in work
#pragma unroll 1
    do {
      const int stage = config.q_stages == 2 ? now : 0;
      wait_copies<0>();
      // This tile has arrived, and all warps are done with the one before.
      if (gpu::sync_threads_or(0, threads_of(config), copied_a_blind_query(stage))) {
        clear_blind_queries<config.D>(Q(stage), stage);
        clear_blind_queries<config.Dv>(dO(stage), stage);
        sync_block();
      }
      begin_next(now, stage);
      add_scores(w.places[now].n, stage);
      if constexpr (config.ordered) pass_turns_on(w.places[now]);
      sync_block();  // dS of all keys is here
      if (const Place next = w.places[1 - now]; config.q_stages * config.o_stages < 4 && w.exists(next)) {
        if constexpr (config.q_stages == 1) copy_Q(next, 0);
        if constexpr (config.o_stages == 1) copy_dO(next, 0);
      }
      commit_copies();
      add_dQ(w.places[recomputed(now)]);
      now ^= 1;
    } while (w.exists(w.places[recomputed(now)]));
    if constexpr (config.ordered) sync_block();  // all additions of the block
  }

  template <Element element, int values>
  __device__ void write(float (&sums)[R][values], const gpu::TokenRef& to, int count, float factor) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Int32 j = w.first + first_row + 16 * r + gpu::accumulator_row(lane, 2 * e);
        auto* row = gpu::row_of<element>(to, w.b, w.row_begin + j, w.row_head);
#pragma unroll
        for (int n = 2 * e; n < values; n += 4)
#pragma unroll
          for (int d = 0; d < 2; ++d) sums[r][n + d] *= factor;
        if constexpr (element == Element::f32)  // no other type accumulates
          if (p.call.accumulate) gpu::add_row<2 * values>(sums[r], e, lane, row, count, j < w.rows);
        gpu::store_row<element, 2 * values>(sums[r], e, lane, row, count, j < w.rows);
      }
  }
  __device__ void run() {
    sum();
    if constexpr (makes_dS) write<config.dK>(dK, p.call.dk, p.D, p.call.x.scale);
    if constexpr (makes_P) write<config.dV>(dV, p.call.dv, p.Dv, 1);
    if constexpr (config.ordered) pass_last_turns_on();
  }
};

template <OnePassConfig config>
__device__ void one_pass(const OnePassParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& work = *reinterpret_cast<OnePassWork*>(memory + layout_of(config).work);
  // Works are taken in their order, whatever the order of the blocks: who waits for a turn waits for a work that
  // somebody is at.
  if (threadIdx.x == 0)
    describe_one_pass<config>(p.call.x, p.blocks_per_head, p.section, Int32(atomicAdd(p.memory.taken, 1u)), work);
  __syncthreads();
  if (work.first >= work.rows) return;
  if constexpr (!config.paired)
    OnePass<config, Part::all>(p, work, memory).run();
  else if (__shfl_sync(0xffffffffu, int(threadIdx.x) / (32 * config.warps), 0) == 0)
    OnePass<config, Part::P>(p, work, memory).run();
  else
    OnePass<config, Part::dS>(p, work, memory).run();
}

}  // namespace tessera::mma
