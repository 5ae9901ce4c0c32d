// SPDX-License-Identifier: Apache-2.0
// The keys and values of a case in the pages of a cache: every layout that engines use, tables in every form, pages in
// any order, NaN wherever no key lies. Included by the tests of paged keys.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "cases/generator.hpp"
#include "core/tensor.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {

enum class Cache {
  tokens_first,  // NHD: [pages, page_size, Hk, D], one for K and one for V
  heads_first,   // HND: [pages, Hk, page_size, D]
  two_halves,    // [2, pages, page_size, Hk, D]
  two_by_page,   // [pages, 2, page_size, Hk, D]
  slices         // [pages, page_size, Hk, D + Dv]
};
enum class Table { block, indptr, apart };  // apart: one for K and one for V

inline constexpr Cache caches[] = {Cache::tokens_first, Cache::heads_first, Cache::two_halves, Cache::two_by_page,
                                   Cache::slices};
inline constexpr Table tables[] = {Table::block, Table::indptr, Table::apart};

struct Paging {
  std::int64_t page_size = 16;
  Cache cache = Cache::tokens_first;
  Table table = Table::block;
  std::vector<std::int32_t> leftpad{};  // of each sequence; empty: none
  std::uint64_t seed = 1;
};

inline std::string describe(const Paging& paging) {
  std::string out = "pages of " + std::to_string(paging.page_size) + ", cache " +
                    std::to_string(static_cast<int>(paging.cache)) + ", table " +
                    std::to_string(static_cast<int>(paging.table)) + ", left padding";
  for (const std::int32_t n : paging.leftpad) out += " " + std::to_string(n);
  return out;
}

// A case's inputs with K and V in pages. Table entries that hold no key are no pages, and their bits say "not read".
struct PagedCase {
  static constexpr std::int32_t never_read = std::numeric_limits<std::int32_t>::min() + 12345;

  Inputs in;
  std::int64_t pages = 0, entries = 0;
  std::vector<std::int32_t> table, v_table, indptr, lengths, leftpad;
  std::vector<std::byte> memory;
  std::vector<float> k_scales, v_scales;  // of every place of the pool, if every key has its own

  PagedCase(const CaseData& data, const Paging& paging) : in(data.inputs()), leftpad(paging.leftpad) {
    const std::int64_t P = paging.page_size;
    std::vector<std::int64_t> first, used;  // entries of each sequence: the first with a key, and as many as have one
    for (std::size_t b = 0; b < data.sequences.size(); ++b) {
      const std::int64_t pad = leftpad.empty() ? 0 : leftpad[b], length = pad + data.sequences[b].Nk;
      lengths.push_back(static_cast<std::int32_t>(length));
      first.push_back(pad / P), used.push_back(length == pad ? 0 : (length + P - 1) / P - pad / P);
      entries = std::max(entries, (length + P - 1) / P);
    }
    entries += 2;  // more than any sequence uses
    const std::int64_t in_use = std::accumulate(used.begin(), used.end(), std::int64_t{0});
    pages = in_use + 3;
    place_memory(data, paging);
    fill_tables(paging, first, used);
    place_scales(data.spec.cached_k, data.spec.Hk, k_scales, in.k_scale, in.k);
    place_scales(data.spec.cached_v, data.spec.Hk, v_scales, in.v_scale, in.v);
    for (std::size_t b = 0; b < data.sequences.size(); ++b) fill_pages(data, paging, b);
  }

  PagedCase(const PagedCase&) = delete;

  // The entry that holds key j of sequence b, in K's table or V's.
  std::int32_t& entry(std::size_t b, std::int64_t j, bool value = false) {
    auto& list = value && in.v_block_table ? v_table : table;
    const std::int64_t number = (j + (leftpad.empty() ? 0 : leftpad[b])) / in.k.shape[1];
    const std::int64_t begin = indptr.empty() ? static_cast<std::int64_t>(b) * entries : indptr[b];
    return list[static_cast<std::size_t>(begin + number)];
  }

 private:
  void place_memory(const CaseData& data, const Paging& paging) {
    const std::int64_t P = paging.page_size, H = data.spec.Hk, D = data.spec.D, Dv = data.spec.dim_v();
    const std::int64_t widest = std::max(D, Dv), bytes = tessera::size_of(data.k.type());
    const std::int64_t v_bytes = tessera::size_of(data.v.type());
    std::array<std::int64_t, 4> k{}, v{};
    std::int64_t v_begin = 0, total = 0;
    const bool alike = bytes == v_bytes;  // else there is no memory that K and V share evenly
    switch (alike || paging.cache == Cache::heads_first ? paging.cache : Cache::tokens_first) {
      case Cache::tokens_first:
        k = {P * H * D, H * D, D, 1}, v = {P * H * Dv, H * Dv, Dv, 1};
        v_begin = pages * k[0], total = v_begin + pages * v[0];
        break;
      case Cache::heads_first:
        k = {P * H * D, D, P * D, 1}, v = {P * H * Dv, Dv, P * Dv, 1};
        v_begin = pages * k[0], total = v_begin + pages * v[0];
        break;
      case Cache::two_halves:
        k = v = {P * H * widest, H * widest, widest, 1};
        v_begin = pages * k[0], total = 2 * v_begin;
        break;
      case Cache::two_by_page:
        k = v = {2 * P * H * widest, H * widest, widest, 1};
        v_begin = k[0] / 2, total = pages * k[0];
        break;
      case Cache::slices:
        k = v = {P * H * (D + Dv), H * (D + Dv), D + Dv, 1};
        v_begin = D, total = pages * k[0];
        break;
    }
    memory.assign(static_cast<std::size_t>(total * std::max(bytes, v_bytes) + 8), std::byte{0xFF});  // NaN in floats
    const std::int64_t v_at = alike ? v_begin * bytes : (v_begin * bytes + 7) / 8 * 8;
    in.k = Tensor(memory.data(), data.k.type(), {pages, P, H, D});
    in.v = Tensor(memory.data() + v_at, data.v.type(), {pages, P, H, Dv});
    in.k.strides = k, in.v.strides = v;
  }

  // NaN where no key lies.
  void place_scales(const Cached& cached, std::int64_t heads, std::vector<float>& room, Tensor& view,
                    const Tensor& pool) const {
    if (cached.scales != Scales::per_key && cached.scales != Scales::per_group) return;
    const std::int64_t groups = cached.scales == Scales::per_group ? (pool.shape[3] + 127) / 128 : 1;
    room.assign(static_cast<std::size_t>(pages * pool.shape[1] * heads * groups),
                std::numeric_limits<float>::quiet_NaN());
    view = Tensor(room.data(), Type::f32, {pages, pool.shape[1], heads, groups});
    view.ndim = cached.scales == Scales::per_group ? 4 : 3;
  }

  // Entries of a sequence whose pages are listed: those that its length needs.
  std::int64_t listed(std::size_t b, std::int64_t page_size) const { return (lengths[b] + page_size - 1) / page_size; }

  void fill_tables(const Paging& paging, const std::vector<std::int64_t>& first,
                   const std::vector<std::int64_t>& used) {
    const auto B = static_cast<std::int64_t>(used.size());
    Generator g(paging.seed);
    const auto make = [&] {
      std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
      std::iota(order.begin(), order.end(), 0);
      for (std::size_t n = order.size(); n > 1; --n)
        std::swap(order[n - 1], order[static_cast<std::size_t>(g.between(0, static_cast<std::int64_t>(n) - 1))]);
      std::vector<std::int32_t> out;
      std::size_t next = 0;
      for (std::size_t b = 0; b < used.size(); ++b) {
        const std::int64_t width = paging.table == Table::indptr ? listed(b, paging.page_size) : entries;
        for (std::int64_t n = 0; n < width; ++n)
          out.push_back(n >= first[b] && n < first[b] + used[b] ? order[next++] : never_read);
      }
      return out;
    };
    table = make();
    in.cu_seqlens_k = {};
    in.seqused_k = Tensor(lengths.data(), Type::i32, {B});
    if (!leftpad.empty()) in.leftpad_k = Tensor(leftpad.data(), Type::i32, {B});
    if (paging.table == Table::indptr) {
      indptr.push_back(0);
      for (std::size_t b = 0; b < used.size(); ++b)
        indptr.push_back(indptr.back() + static_cast<std::int32_t>(listed(b, paging.page_size)));
      in.page_indptr = Tensor(indptr.data(), Type::i32, {B + 1});
      in.page_indices = Tensor(table.data(), Type::i32, {static_cast<std::int64_t>(table.size())});
      return;
    }
    in.block_table = Tensor(table.data(), Type::i32, {B, entries});
    if (paging.table != Table::apart) return;
    v_table = make();
    in.v_block_table = Tensor(v_table.data(), Type::i32, {B, entries});
  }

  void fill_pages(const CaseData& data, const Paging& paging, std::size_t b) {
    const auto& s = data.sequences[b];
    for (std::int64_t j = 0; j < s.Nk; ++j) {
      const std::int64_t at = (j + (leftpad.empty() ? 0 : leftpad[b])) % paging.page_size;
      for (const bool value : {false, true}) {
        const Tensor& pool = value ? in.v : in.k;
        const Buffer& from = value ? data.v : data.k;
        const Tensor& scale = value ? in.v_scale : in.k_scale;
        const Buffer& scale_from = value ? data.v_scale : data.k_scale;
        const std::int64_t width = pool.shape[3];
        for (std::int64_t h = 0; h < data.spec.Hk; ++h) {
          const std::int64_t groups = scale.ndim == 4 ? scale.shape[3] : 1;
          for (std::int64_t g = 0; g < groups && scale.ndim >= 3; ++g)
            store_element(scale.data, scale.type,
                          ((entry(b, j, value) * pool.shape[1] + at) * data.spec.Hk + h) * groups + g,
                          scale_from.get(((s.row_k + j) * data.spec.Hk + h) * groups + g));
          for (std::int64_t d = 0; d < width; ++d)
            store_element(pool.data, pool.type,
                          entry(b, j, value) * pool.strides[0] + at * pool.strides[1] + h * pool.strides[2] + d,
                          from.get(((s.row_k + j) * data.spec.Hk + h) * width + d));
        }
      }
    }
  }
};

}  // namespace tessera::test
