// SPDX-License-Identifier: Apache-2.0
// The forward pass on the matrix unit: forward.hpp's steps as a software pipeline, in which each tile's softmax
// overlaps with the products of its neighbours, O += P V of the tile before and S of the tile after. Included by
// cpu/isa/amx.cpp inside its target region.
//
// At D = 128 a tile of 64 queries and 192 keys takes the unit 384 products of 16 cycles, 6100 cycles, and the vector
// units about as many: 768 vectors of scores at some 16 operations, two a cycle. Without overlap either part would idle
// half of the time. The out-of-order window holds a few hundred instructions, so the two are interleaved finely: a step
// of four products (64 cycles) for every two advances of the softmax (four vectors each).
#pragma once

// Rows of a block of keys, and as many zeros behind them as a product of a tile that begins anywhere may read.
inline constexpr Int64 key_rows = block_k + tile_step;

template <int pieces>
HWY_INLINE Int64 load_key_rows(const KeyRows& source, Range keys, Int64 width, const Halves& out,
                               float* scales = nullptr) {
  KeyBlock block;
  block.find(source, keys);
  for (Int64 r = 0; r < key_rows && block.scaled && scales; ++r) scales[r] = r < keys.size() ? block.scale(r, 0) : 1;
  for (Int64 r = 0; r < keys.size(); ++r) {
    prefetch_behind(block, r, keys.size(), width);
    split_row<pieces>(block, r, width, out, r);
  }
  const Int64 end = lesser(tiled(keys.size()) + tile_step, key_rows);
  for (Int64 r = keys.size(); r < end; ++r) clear_row<pieces>(out, r);
  return end;
}

HWY_INLINE Halves from_row(Halves x, Int64 r) { return {x.at + r * x.stride, x.stride, x.piece}; }
HWY_INLINE Halves from_column(Halves x, Int64 c) { return {x.at + c, x.stride, x.piece}; }

// K as rows and V^T of one block of keys, as they lie in a panel, and their scales, 1 behind the last key. V is
// transposed once for all who read it: 48 squares of 16 x 16 words at D = 128, some 5000 cycles, most of a tile's time.
template <int pieces>
struct PackedKeys {
  Halves K, Vt;
  float *K_scales, *V_scales;

  static constexpr Int64 floats(Int64 D, Int64 Dv) {
    return pieces * key_rows * (tiled(D) + tiled(Dv)) / 2 + 2 * key_rows;
  }
  HWY_INLINE PackedKeys(Int64 D, Int64 Dv, float* panel) {
    Scratch room(panel);
    K = take_halves<pieces>(room, key_rows, tiled(D));
    Vt = take_halves<pieces>(room, tiled(Dv), key_rows);
    K_scales = room.take(key_rows), V_scales = room.take(key_rows);
  }
};

// `memory` is room for the rows of V.
template <int pieces>
HWY_NOINLINE void pack_panel_of(const HeadJob& head, Range keys, float* panel, float* memory) {
  const PackedKeys<pieces> out(head.D, head.Dv, panel);
  Scratch room(memory);
  const Halves V = take_halves<pieces>(room, key_rows, tiled(head.Dv));
  load_key_rows<pieces>(head.k, keys, head.D, out.K, out.K_scales);
  transpose_halves<pieces>(V, load_key_rows<pieces>(head.v, keys, head.Dv, V, out.V_scales), out.Vt);
}

template <int pieces>
struct MatrixForward {
  static constexpr Int64 padded(Int64 width) { return tiled(width); }

  Halves Q;  // rows on their way to Qt
  Pairs Qt, P[2];
  float* S;                   // a second one: one is made while the other is read, and so with P
  float *panels[2], *V_room;  // the task's own panels, where none are shared

  MatrixForward(Int64 D, Int64 Dv, Scratch& s) :
      Q(take_halves<pieces>(s, block_q, tiled(D))),
      Qt(take_pairs<pieces>(s, forward_blocks * tiled(D) / 2, block_q)), P{take_pairs<pieces>(s, block_k / 2, block_q),
                                                                           take_pairs<pieces>(s, block_k / 2, block_q)},
      S(s.take(block_k * block_q)), panels{s.take(PackedKeys<pieces>::floats(D, Dv)),
                                           s.take(PackedKeys<pieces>::floats(D, Dv))},
      V_room(s.take(pieces * key_rows * tiled(Dv) / 2)) {}

  HWY_INLINE void load_queries(const HeadJob& head, const Tile& tile, Int64 n) {
    for (Int64 i = 0; i < tile.ni; ++i) split_row<pieces>(head.q, tile.i0 + i, head.D, Q, i);
    for (Int64 i = tile.ni; i < tile.width; ++i) clear_row<pieces>(Q, i);
    pair_columns<pieces>(Q, tile.width, queries(head, n));
  }
  HWY_INLINE Pairs queries(const HeadJob& head, Int64 n) const {
    return {Qt.row(n * tiled(head.D) / 2), Qt.stride, Qt.piece};
  }
};

// A tile of the task: block n of its queries against keys of a block.
struct Place {
  Tile tile;
  Int64 n, block;
};

// The tiles of a task in the order in which they are computed: block of keys by block of keys.
class Walk {
 public:
  HWY_INLINE Walk(const HeadJob& head, Range blocks) :
      head(head), blocks(blocks),
      seen(visible_keys(head.mask, {blocks.begin * block_q, lesser(blocks.end * block_q, head.nq)})), n(blocks.begin),
      block(seen.begin / block_k) {}

  HWY_INLINE bool next(Place& place) {
    for (; block * block_k < seen.end; ++block, n = blocks.begin)
      while (n < blocks.end) {
        const Range queries = query_range(head, n++), keys = key_range(head, queries, block);
        if (keys.empty()) continue;
        place = {tile_of(queries, keys), n - 1 - blocks.begin, block};
        return true;
      }
    return false;
  }

 private:
  const HeadJob& head;
  Range blocks, seen;
  Int64 n, block;
};

// A task: its memory, and the products of one of its tiles. S and P are double-buffered by turns: what one turn writes,
// the next one reads.
template <int pieces>
struct MatrixTask {
  using Products = MatrixForward<pieces>;

  const HeadJob& head;
  float* panels;
  ForwardScratch<Products> memory;

  HWY_INLINE MatrixTask(const ForwardJob& job, Scratch& room) :
      head(job.head), panels(const_cast<float*>(job.panels)), memory(job.head.D, job.head.Dv, room) {}

  HWY_INLINE Int64 panel_floats() const { return PackedKeys<pieces>::floats(head.D, head.Dv); }
  HWY_INLINE PackedKeys<pieces> keys(const Place& place) const {
    return {head.D, head.Dv, panels ? panels + place.block * panel_floats() : memory.products.panels[place.block % 2]};
  }
  // Packs a tile's keys if there is no shared panel. Double-buffered: two neighbouring blocks have room.
  HWY_INLINE void load(const Place& place) const {
    if (panels) return;
    pack_panel_of<pieces>(head, key_block_range(head, place.block), memory.products.panels[place.block % 2],
                          memory.products.V_room);
  }
  HWY_INLINE typename ForwardScratch<Products>::Block block(Int64 n, int turn) const {
    auto s = memory.block(n, head.Dv);
    if (turn == 1) s.S = memory.products.S;
    return s;
  }
  HWY_INLINE Product<pieces> scores(const Place& place, int turn) const {
    const Int64 first = place.tile.j0 - place.block * block_k;
    return {Result::replace,        Terms::all, from_row(keys(place).K, first), memory.products.queries(head, place.n),
            block(place.n, turn).S, block_q,    tiled(place.tile.nj),           place.tile.width,
            tiled(head.D)};
  }
  // Products of a tile become those of its keys times their scales, and the scores' factor with them: scores of 2^60
  // must not be multiplied by it once more, in the exponent, where the rounding of the maximum would count.
  HWY_INLINE void scale_scores(const Place& place, float* S) const {
    if (!head.k.scales) return;
    const float* scales = keys(place).K_scales + place.tile.j0 - place.block * block_k;
    TESSERA_FOR_TILE(place.tile, j, i) {
      float* at = S + j * block_q + i;
      store(hn::Mul(TESSERA_NAMESPACE::load(at), set(scales[j])), at);
    }
    scale_tile(place.tile, head.score.factor, S);
  }
  HWY_INLINE const float* value_scales(const Place& place) const {
    return head.v.scales ? keys(place).V_scales + place.tile.j0 - place.block * block_k : nullptr;
  }
  HWY_INLINE Product<pieces> values(const Place& place, int turn) const {
    const Int64 first = place.tile.j0 - place.block * block_k;
    return {Result::add,
            Terms::most,
            from_column(keys(place).Vt, first),
            memory.products.P[turn],
            block(place.n, turn).O,
            block_q,
            tiled(head.Dv),
            place.tile.width,
            tiled(place.tile.nj)};
  }
};

template <int pieces>
HWY_NOINLINE void matrix_forward(const ForwardJob& job, Range blocks, float* memory) {
  using Task = MatrixTask<pieces>;
  const HeadJob& head = job.head;
  Scratch room(memory);
  Task task(job, room);
  HeadJob scored = head;  // as the softmax meets it
  if (head.k.scales) scored.score.factor = 1;
  for (Int64 n = 0; n < blocks.size(); ++n) {
    const Tile tile = tile_of(query_range(head, blocks.begin + n), {});
    task.memory.products.load_queries(head, tile, n);
    start_block(job, tile, tiled(head.Dv), task.block(n, 0));
  }
  const Int64 lines = task.panel_floats() / 16 / blocks.size();  // of the next panel, prefetched during each tile

  Walk walk(head, blocks);
  Place place{}, next{};
  Product<pieces> pending;  // O += P V of the tile before
  bool more = walk.next(place);
  if (more) {
    task.load(place);
    task.scores(place, 0).finish();
  }
  for (int turn = 0; more; turn ^= 1, place = next) {
    more = walk.next(next);
    if (more && next.block != place.block && !task.panels) {
      pending.finish();
      task.load(next);
    }
    ProductsBeside<pieces> beside;
    beside.add(pending);
    if (more) beside.add(task.scores(next, turn ^ 1));
    beside.start(softmax_steps(place.tile));
    const Int64 next_panel = (place.block + 1) * block_k < head.nk ? place.block + 1 : place.block;
    if (task.panels) beside.prefetch(task.panels + next_panel * task.panel_floats() + place.n * lines * 16, lines);
    const auto s = task.block(place.n, turn);
    const AsPairs<pieces> kept{task.memory.products.P[turn], task.value_scales(place)};
    task.scale_scores(place, s.S);
    softmax_tile<false>(scored, place.tile, kept, s, beside);
    beside.finish();
    // Only after the overlapped products, which may have added to the same rows of O.
    rescale(place.tile, head.Dv, s.alpha, s.O);
    clear_pairs_behind<pieces>(place.tile, kept.out);
    pending = task.values(place, turn);
  }
  pending.finish();
  for (Int64 n = 0; n < blocks.size(); ++n)
    finish_forward(job, tile_of(query_range(head, blocks.begin + n), {}), task.block(n, 0));
}
