// SPDX-License-Identifier: Apache-2.0
// What a block of the `decode` kernel copies: its rows of Q, and tiles of K and V and their scales by cp.async, from
// rows that are evenly apart or in pages. What no row of the work item sees, and what the tensors lack, becomes 0, so
// that nothing beyond a sequence enters a product. Device code.
#pragma once

#include "decode/kernel/work.cuh"
#include "decode/layout.hpp"
#include "gpu/kernel/copy.cuh"
#include "gpu/kernel/lanes.cuh"

namespace tessera::decode {

template <Config config>
struct Rows {
  static constexpr Layout layout = layout_of(config);
  static constexpr int R = config.rows, T = config.tile_keys;

  const Params& p;
  unsigned char* const memory;
  const Work& w;

  __device__ Rows(const Params& p, unsigned char* memory) :
      p(p), memory(memory), w(*reinterpret_cast<const Work*>(memory + layout.work)) {}

  template <class Thing>
  __device__ Thing* shared(int offset) const {
    return reinterpret_cast<Thing*>(memory + offset);
  }
  __device__ UInt32 address(int offset) const { return gpu::shared_address(memory) + offset; }

  // --- rows of K and V: where they are, and their copies

  // Where the row of a key begins, of K (side 0) or V: its address, which a copy only adds a constant to, and the place
  // of its scale. The top bit, which is set in no address: nowhere, as no row of the item sees it, or it is in no page;
  // then the others are the tensor's, so that a copy of nothing is asked for at a place that exists.
  static constexpr UInt64 nowhere = UInt64(1) << 63;
  struct Place {
    UInt64 row = nowhere;
    Int64 scale = 0;
  };
  __device__ static bool exists(UInt64 row) { return Int64(row) >= 0; }
  __device__ Place place_of(Int32 key, int side) const {
    const gpu::TokenRef& t = side ? p.call.x.v : p.call.x.k;
    const auto base = reinterpret_cast<UInt64>(t.data);
    if (key < w.begin || key >= w.end) return {base | nowhere};
    const int element_bytes = eight_bits(side ? config.v : config.k) ? 1 : 2;
    Int64 page = w.item.b, place = w.group.k_first + key;
    if constexpr (config.paged) {
      page =
          gpu::page_of(p.pages, side ? p.pages.v : p.pages.k, side ? w.group.v_entry : w.group.k_entry, UInt32(place));
      place = gpu::place_in_page(p.pages, UInt32(place));
      if (page < 0) return {base | nowhere};
    }
    const Int64 element = page * t.batch + place * t.token + w.item.kv * t.head;
    Place out{base + UInt64(element * element_bytes)};
    if constexpr (config.scaled) {
      const gpu::ScaleRef& scale = side ? p.v_scale : p.k_scale;
      if (scale.data) out.scale = scale.at(w.item.b, page, place, w.item.kv) - scale.data;
    }
    return out;
  }
  // A thread finds one row of a tile: of K's, or of V's.
  __device__ Place find_row(Int32 tile) const {
    const int row = threadIdx.x % T, side = threadIdx.x / T;
    return side < 2 ? place_of(tile * T + row, side) : Place{};
  }
  __device__ void keep_row(Int32 tile, Place place) const {
    if (threadIdx.x >= 2 * T) return;
    const int n = tile % config.stages * 2 * T + threadIdx.x;
    shared<UInt64>(layout.places)[n] = place.row;
    if constexpr (config.scaled) shared<Int64>(layout.scale_places)[n] = place.scale;
  }

  // The existing bytes of a chunk of 16 that begins at byte `at` of a row.
  __device__ static int bytes_at(int at, int row_bytes) {
    const int left = row_bytes - at;
    return left < 0 ? 0 : left < 16 ? left : 16;
  }
  // A thread's chunks of a row, one of each panel: of a tile of `rows` rows of `units` columns of 16 bits. `to`: its
  // chunk of the first panel. Of the row, `row_bytes` exist; with all of them, addresses differ by constants.
  template <int rows, int units>
  __device__ void copy_row(UInt32 to, UInt64 row, int row_bytes) const {
    const auto* const from = reinterpret_cast<const unsigned char*>(row & ~nowhere);
    const int first = 2 * gpu::copy_column(threadIdx.x);
#pragma unroll
    for (int panel = 0; panel < units / gpu::panel_columns; ++panel) {
      const int at = first + panel * gpu::panel_row_bytes;
      const int bytes = !exists(row) ? 0 : config.whole ? 16 : bytes_at(at, row_bytes);
      gpu::copy_async<16>(to + panel * rows * gpu::panel_row_bytes, from + (config.whole || bytes > 0 ? at : 0), bytes);
    }
  }
  // Of a tile at `to`: the thread's chunk of the first row that it copies, in the first panel.
  template <int rows>
  __device__ static UInt32 first_chunk(UInt32 to) {
    return to + gpu::tile_byte(rows, gpu::copy_row(threadIdx.x), gpu::copy_column(threadIdx.x));
  }
  template <int dims, Element type>
  __device__ void copy_side(UInt32 to, const UInt64* places, int width) const {
    constexpr int element_bytes = eight_bits(type) ? 1 : 2, rows_at_once = gpu::copy_rows_at_once(config.threads());
    static_assert(rows_at_once % 8 == 0);  // rows that a thread copies have their chunks in the same places
    const UInt32 chunk = first_chunk<T>(to);
#pragma unroll
    for (int r = 0; r < T; r += rows_at_once)
      copy_row<T, units_of(dims, type)>(chunk + r * gpu::panel_row_bytes, places[r + gpu::copy_row(threadIdx.x)],
                                        width * element_bytes);
  }
  // The first of a tile's scales of keys (side 0), or of values, of one group of dims.
  __device__ static int scales_at(int stage, int side, int group) {
    return (stage * (config.k_groups + config.v_groups) + (side ? config.k_groups : 0) + group) * T;
  }
  // A thread's scales of a tile: of a key, or of a value. Those that nobody gave are 1.
  __device__ void copy_scale(int stage) const {
    if (threadIdx.x >= 2 * T) return;
    const int n = stage * 2 * T + threadIdx.x, side = threadIdx.x / T;
    const gpu::ScaleRef& scale = side ? p.v_scale : p.k_scale;
    const bool known = exists(shared<const UInt64>(layout.places)[n]);
    const float* from = scale.data + (known ? shared<const Int64>(layout.scale_places)[n] : 0);
    const Int64 step = known ? side ? p.v_scale_group : p.k_scale_group : 0;
#pragma unroll
    for (int g = 0; g < (config.k_groups > config.v_groups ? config.k_groups : config.v_groups); ++g) {
      if (g >= (side ? config.v_groups : config.k_groups)) break;
      const int to = scales_at(stage, side, g) + threadIdx.x % T;
      if (scale.data)
        gpu::copy_async<4>(address(layout.scales) + 4 * to, from + g * step, known ? 4 : 0);
      else
        shared<float>(layout.scales)[to] = 1;
    }
  }
  // Of a tile whose rows are known: K, with all scales; V.
  __device__ const UInt64* places_of(int stage, int side) const {
    return shared<const UInt64>(layout.places) + (2 * stage + side) * T;
  }
  __device__ void copy_keys(Int32 tile) const {
    const int stage = tile % config.stages;
    copy_side<config.D, config.k>(address(layout.K + stage * layout.k_bytes), places_of(stage, 0), p.D);
    if constexpr (config.scaled) copy_scale(stage);
  }
  __device__ void copy_values(Int32 tile) const {
    const int stage = tile % config.stages;
    copy_side<config.Dv, config.v>(address(layout.V + stage * layout.v_bytes), places_of(stage, 1), p.Dv);
  }

  // --- rows of Q

  struct QueryRow {
    bool exists;
    Int64 query, head;
  };
  __device__ QueryRow query_row(int r) const {
    const bool exists = r < w.group.rows.count;
    const Int32 row = w.group.rows.first + (exists ? r : 0);
    return {exists, w.group.q_begin + row / p.group, Int64(w.item.kv) * p.group + row % p.group};
  }
  __device__ const unsigned char* row_at(const gpu::TokenRef& t, const QueryRow& row) const {
    return reinterpret_cast<const unsigned char*>(gpu::row_of<config.q>(t, w.item.b, row.query, row.head));
  }

  __device__ void copy_Q() const {
    if constexpr (config.q != config.element || eight_bits(config.k) || (config.qv && eight_bits(config.v)))
      return convert_Q();
    constexpr int rows_at_once = gpu::copy_rows_at_once(config.threads());
    for (int r = gpu::copy_row(threadIdx.x); r < R; r += rows_at_once) {
      const QueryRow row = query_row(r);
      const auto copy = [&]<int dims>(int to, const gpu::TokenRef& t, int width) {
        const UInt64 from = reinterpret_cast<UInt64>(row_at(t, row)) | (row.exists ? 0 : nowhere);
        copy_row<R, dims>(first_chunk<R>(address(to)) + (r - gpu::copy_row(threadIdx.x)) * gpu::panel_row_bytes, from,
                          2 * width);
      };
      copy.template operator()<config.D>(layout.Q, p.call.x.q, p.D);
      if constexpr (config.qv) copy.template operator()<config.Dv>(layout.Qv, p.qv, p.Dv);
    }
  }

  // Beside 8-bit keys, products are those of f16, and Q's terms lie in the order of a key's bytes. A row of bf16 is
  // divided by a power of two so that its largest number just fits: what f16 then lacks is 2^-39 of that or less.
  __device__ static void load_eight(const unsigned char* from, int column, int width, float (&x)[8]) {
    if (column + 8 <= width) {  // rows are aligned to 16 bytes
      const uint4 chunk = *reinterpret_cast<const uint4*>(from + 2 * column);
      const UInt32 pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] = gpu::unpacked<config.q>(pairs[n / 2] >> n % 2 * 16 & 0xffffu);
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n)
        x[n] = column + n < width ? gpu::unpacked<config.q>(reinterpret_cast<const UInt16*>(from)[column + n]) : 0;
    }
  }
  template <int dims>
  __device__ static float largest_of(const unsigned char* from, int width) {
    float top = 0;
#pragma unroll 1
    for (int first = 0; first < dims; first += gpu::panel_columns) {
      float x[8];
      load_eight(from, first + gpu::copy_column(threadIdx.x), width, x);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float size = fabsf(x[n]);
        if (size > top && size <= __builtin_bit_cast(float, 0x7f7fffffu)) top = size;
      }
    }
    return top;
  }
  template <int dims, Element keys>
  __device__ void convert_row(UInt32 to, int r, const unsigned char* from, bool exists, int width, float factor) const {
#pragma unroll 1
    for (int first = 0; first < dims; first += gpu::panel_columns) {
      const int column = first + gpu::copy_column(threadIdx.x);
      float x[8];
      load_eight(from, column, exists ? width : 0, x);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        const int slot = eight_bits(keys) ? column / 16 * 16 + slot_of(column % 16 + n) : column + n;
        gpu::store_pair(to + gpu::tile_byte(R, r, slot), gpu::packed<config.element>(x[n] * factor, x[n + 1] * factor));
      }
    }
  }
  __device__ void convert_Q() const {
#pragma unroll 1
    for (int r = gpu::copy_row(threadIdx.x); r < R; r += gpu::copy_rows_at_once(config.threads())) {
      const QueryRow row = query_row(r);
      float factor = 1;
      if constexpr (config.q != config.element) {
        float top = largest_of<config.D>(row_at(p.call.x.q, row), p.D);
        if constexpr (config.qv) top = fmaxf(top, largest_of<config.Dv>(row_at(p.qv, row), p.Dv));
        top = gpu::max_over_lanes<8>(top);
        int exponent = 0;
        if (top > 0) frexpf(top, &exponent);
        exponent = exponent - 15 < -100 ? -100 : exponent - 15;  // beyond, scores are 0 in f32
        factor = ldexpf(1, -exponent);
        if (row.exists && threadIdx.x % 8 == 0) shared<Column>(layout.columns)[r].factor = ldexpf(1, exponent);
      }
      convert_row<config.D, config.k>(address(layout.Q), r, row_at(p.call.x.q, row), row.exists, p.D, factor);
      if constexpr (config.qv)
        convert_row<config.Dv, config.v>(address(layout.Qv), r, row_at(p.qv, row), row.exists, p.Dv, factor);
    }
  }
};

}  // namespace tessera::decode
