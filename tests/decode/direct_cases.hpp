// SPDX-License-Identifier: Apache-2.0
// What blocks of `decode` without a queue are tested on, by number and in clusters. Included by
// tests/decode/units_main.cpp and tests/decode/direct_checks.hpp.
#pragma once

#include "tests/decode/decode_cases.hpp"

namespace tessera::decode {

// Groups of rows of all KV heads, where tiles have 8: a cluster for each.
inline std::int64_t most_clusters(const Problem& problem) {
  return problem.Hk * problem.B * ceil_div(rows_of(problem), 8);
}

// Multiprocessors for each of them, so that clusters of every size find room, and those of a GPU.
inline std::vector<int> cluster_multiprocessors(const Problem& problem) {
  std::vector<int> out{132};
  for (const int few : {1, 2, 3, 6, 11}) out.push_back(few * static_cast<int>(most_clusters(problem)));
  return out;
}

// Tiles of four warps and of eight, of every number of value tiles; sequences without keys, rows that see none, with
// sinks, and more leaves than siblings that are merged at once.
inline std::vector<DecodeCase> direct_cases() {
  DecodeCases c;
  c.add({.name = "Direct", .Nq = 1, .Nk = 256 * 18 + 5, .Hq = 4, .Hk = 2, .D = 128});
  cases::Case blind{.name = "Direct", .B = 4, .Nq = 2, .Nk = 600, .Hq = 3, .Hk = 1, .D = 128};
  blind.used_k = {600, 0, 1, 257};
  c.add(blind);
  blind.options.causal = true, blind.sinks = cases::Sinks::finite;
  c.add(blind);
  c.add({.name = "Direct", .Nq = 1, .Nk = 700, .Hq = 2, .Hk = 1, .D = 192, .Dv = 128, .type = Type::f16});
  c.add({.name = "Direct", .Nq = 1, .Nk = 520, .Hq = 2, .Hk = 1, .D = 256}, "sm_89");
  c.add({.name = "Direct", .Nq = 1, .Nk = 520, .Hq = 2, .Hk = 1, .D = 120, .f32_o = true});
  cases::Case rows = lone_sequence(20, 3, true);
  rows.name = "Direct", rows.B = 2, rows.used_q = {20, 5}, rows.used_k = {1111, 300};
  c.add(rows);
  rows.B = 3, rows.used_q = {11, 0, 20}, rows.used_k = {1111, 300, 0};
  c.add(rows);
  // One query with a diagonal, wherever it lies; keys from a window on, so that the first nodes under a root are absent
  // and two neighbours meet there alone.
  for (const std::int64_t D : {64, 128}) {
    cases::Case spec{.name = "Direct", .Nq = 1, .Nk = 256 * 15 + 5, .Hq = 3, .Hk = 1, .D = D};
    spec.options.causal = true;
    c.add(spec);
    for (const std::int64_t left : {300, 2000, 3400}) spec.options.window_left = left, c.add(spec);
    spec.options.window_right = 3, spec.options.alignment = Alignment::offset, spec.options.diagonal_offset = 1900;
    c.add(spec);
    spec.options = {.causal = true, .alignment = Alignment::top_left}, spec.Nk = 300;
    c.add(spec);
    constexpr std::int64_t far = std::int64_t{1} << 48;
    spec.options = {.causal = true, .row0 = far, .col0 = far};
    c.add(spec);
  }
  c.add({.name = "Direct",
         .Hq = 4,
         .Hk = 2,
         .D = 128,
         .options = {.causal = true, .max_seqlen_q = 2},
         .packed_q = {1, 0, 2},
         .packed_k = {300, 10, 513},
         .front_q = 3,
         .tail_k = 7});
  return c.all;
}

inline std::vector<DecodeCase> direct_cache_cases() {
  DecodeCases c;
  cases::Case bytes{.name = "Direct", .B = 2, .Nq = 2, .Nk = 700, .Hq = 4, .Hk = 2, .D = 128};
  bytes.cached_k = bytes.cached_v = {Type::e4m3, cases::Scales::per_key}, bytes.used_k = {700, 65};
  c.add(bytes);
  cases::Case many = bytes;
  many.B = 1, many.Nq = 1, many.Hk = 1, many.used_k.clear();
  for (const std::int64_t D : {64, 128})
    for (const std::int64_t leaves : {8, 16, 18}) many.D = D, many.Nk = 256 * leaves - 255, c.add(many);
  for (const double size : {1.0, 0x1p60}) {  // of 16 bits, by blocks of many keys: each part has maxima of its own
    cases::Case scaled = bytes;
    scaled.cached_k = {.scales = cases::Scales::per_key},
    scaled.cached_v = {.scales = cases::Scales::per_key, .size = size};
    scaled.D = 64, scaled.Dv = 128, scaled.Nq = 9, scaled.options.causal = true;
    c.add(scaled);
  }
  bytes.cached_k = bytes.cached_v = {.type = Type::i8}, bytes.Dv = 256;
  c.add(bytes);
  cases::Case grouped = grouped_sequence(256);
  grouped.name = "Direct";
  c.add(grouped);
  cases::Case tree = with_rows("Direct", 8, 1, 700);
  tree.D = 128, tree.tree = cases::Tree::random, tree.positions = true;
  c.add(tree);
  cases::Case latent{.name = "Direct", .Nq = 1, .Nk = 530, .Hq = 3, .Hk = 1, .D = 64, .Dv = 512};
  latent.qv = true;
  c.add(latent);
  return c.all;
}

}  // namespace tessera::decode
