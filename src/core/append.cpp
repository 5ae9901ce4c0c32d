// SPDX-License-Identifier: Apache-2.0
// The rules for append, and the places of its tokens; see append.hpp.
#include "core/append.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check_pages.hpp"
#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/overlap.hpp"
#include "core/rules.hpp"
#include "core/sequence.hpp"
#include "core/tensor.hpp"

namespace tessera {
namespace {

bool has_eight_bits(const Tensor& t) { return t.type == Type::e4m3 || t.type == Type::i8; }

void check_number(const char* name, const Tensor& t, bool cache = false) {
  if (is_float(t.type) || (cache && has_eight_bits(t))) return;
  if (cache) invalid(name, ": has type ", name_of(t.type), "; must be f64, f32, f16, bf16, e4m3 or i8");
  invalid(name, ": has type ", name_of(t.type), "; must be f64, f32, f16 or bf16");
}

// What says where the tokens go, and what does not go with it.
void check_places_given(const Appending& c) {
  const AppendArgs& a = c.a;
  if (a.slots) {
    for (const auto& [name, t] : {std::pair{"cu_seqlens_new", &a.cu_seqlens_new},
                                  {"seqused_k", &a.seqused_k},
                                  {"block_table", &a.block_table},
                                  {"v_block_table", &a.v_block_table},
                                  {"page_indptr", &a.page_indptr},
                                  {"page_indices", &a.page_indices}})
      if (*t) invalid("slots: is given with ", name, "; slots alone say where tokens go");
    return;
  }
  check_given("seqused_k", a.seqused_k);
  check_tables_given(c.call.inputs, c.call.outputs);
}

// The cache and the new tokens: types, shapes.
void check_tokens(Appending& c) {
  const AppendArgs& a = c.a;
  Problem& p = c.p;
  for (const auto& [name, t] : {std::pair{"k_new", &a.k_new}, {"v_new", &a.v_new}, {"k", &a.k}, {"v", &a.v}}) {
    check_view(name, *t, p.device);
    check_number(name, *t, t == &a.k || t == &a.v);
  }
  const bool paged = a.slots || has_pages(c.call.inputs);
  const char* layout = paged ? "[pages, tokens, heads, dim]" : "[batch, tokens, heads, dim]";
  check_ndim("k", a.k, 4, layout), check_ndim("v", a.v, 4, layout);
  p.Nk = dim(a.k, 1), p.Hk = dim(a.k, 2), p.D = dim(a.k, 3), p.Dv = dim(a.v, 3);
  check_head_dim("k", p.D, most_dims), check_head_dim("v", p.Dv, most_value_dims);
  check_shape("v", a.v, {a.v_block_table ? dim(a.v, 0) : dim(a.k, 0), p.Nk, p.Hk, p.Dv},
              "[k's, k's tokens, k's heads, dim]");

  c.packed = a.cu_seqlens_new || (a.slots && a.k_new.ndim == 3);
  check_ndim("k_new", a.k_new, c.packed ? 3 : 4,
             c.packed ? "[tokens, heads, dim] since cu_seqlens_new or slots are given" : "[batch, tokens, heads, dim]");
  c.n = dim(a.k_new, c.packed ? 0 : 1);
  p.B = c.packed ? 0 : dim(a.k_new, 0);
  for (const auto& [name, t, width] : {std::tuple{"k_new", &a.k_new, p.D}, {"v_new", &a.v_new, p.Dv}}) {
    if (c.packed) check_shape(name, *t, {c.n, p.Hk, width}, "[tokens, the cache's heads and dim]");
    if (!c.packed) check_shape(name, *t, {p.B, c.n, p.Hk, width}, "[batch, tokens, the cache's heads and dim]");
  }
  check_count("k_new", p.B, "sequences", most_sequences), check_count("k_new", c.n, "tokens", most_tokens);
  check_count("k", p.Nk, "tokens", most_tokens), check_count("k", p.Hk, "heads", most_heads);
  for (const auto& [name, t] : {std::pair{"k_new", &a.k_new}, {"v_new", &a.v_new}, {"k", &a.k}, {"v", &a.v}})
    check_rows(name, *t);
}

// One number for each token: the first dimensions of `like`.
void check_numbers(const char* name, const Tensor& t, const char* like_name, const Tensor& like, bool packed) {
  check_view(name, t, like.device);
  const std::string meaning = text(packed ? "[tokens] of " : "[batch, tokens] of ", like_name);
  if (packed) check_shape(name, t, {dim(like, 0)}, meaning.c_str());
  if (!packed) check_shape(name, t, {dim(like, 0), dim(like, 1)}, meaning.c_str());
}

void check_places(Appending& c) {
  const AppendArgs& a = c.a;
  Problem& p = c.p;
  if (a.slots) {
    check_numbers("slots", a.slots, "k_new", a.k_new, c.packed);
    if (a.slots.type != Type::i32 && a.slots.type != Type::i64)
      invalid("slots: has type ", name_of(a.slots.type), "; must be i32 or i64");
    p.pages = Pages{.count = dim(a.k, 0), .v_count = dim(a.v, 0), .size = dim(a.k, 1)};
    return check_status(a.status, p);
  }
  if (c.packed) {
    check_view("cu_seqlens_new", a.cu_seqlens_new, p.device);
    check_type("cu_seqlens_new", a.cu_seqlens_new, Type::i32);
    check_ndim("cu_seqlens_new", a.cu_seqlens_new, 1, "[batch + 1]");
    if (dim(a.cu_seqlens_new, 0) < 1) invalid("cu_seqlens_new: has shape [0]; must be [batch + 1]");
    p.B = dim(a.cu_seqlens_new, 0) - 1;
    check_count("cu_seqlens_new", p.B, "sequences", most_sequences);
  }
  check_view("seqused_k", a.seqused_k, p.device);
  check_type("seqused_k", a.seqused_k, Type::i32);
  check_shape("seqused_k", a.seqused_k, {p.B}, "[batch]");
  check_tables(c.call.inputs, c.call.outputs, p);
  if (!p.pages && dim(a.k, 0) != p.B)
    invalid("k: has ", dim(a.k, 0), " sequences but there are new tokens of ", p.B,
            "; without a page table or slots they must agree");
}

void check_scales(const Appending& c) {
  for (const auto& [name, scale, cache_name, cache] :
       {std::tuple{"k_scale", &c.a.k_scale, "k", &c.a.k}, {"v_scale", &c.a.v_scale, "v", &c.a.v}}) {
    if (check_scale(name, *scale, *cache, c.p) >= 3 && !has_eight_bits(*cache))
      invalid(name, ": has shape ", shape_text(*scale), ", one for each token, but ", cache_name, " has type ",
              name_of(cache->type), "; those are computed for e4m3 and i8");
    if (scale->ndim == 2 && c.a.slots && c.packed)
      invalid(name, ": has shape ", shape_text(*scale), ", one for each sequence, but packed slots say of no sequence");
  }
}

void check_rotation(const Appending& c) {
  const AppendArgs& a = c.a;
  const Problem& p = c.p;
  if (bool(a.rotary_cos) != bool(a.rotary_sin))
    invalid(a.rotary_cos ? "rotary_sin" : "rotary_cos", ": is missing; rotary_cos and rotary_sin go together");
  if (!a.rotary_cos) {
    for (const auto& [name, t] : {std::pair{"positions", &a.positions}, {"q", &a.q}, {"q_out", &a.q_out}})
      if (*t) invalid(name, ": is given but rotary_cos is not; there is no rotation");
    return;
  }
  check_view("rotary_cos", a.rotary_cos, p.device), check_view("rotary_sin", a.rotary_sin, p.device);
  check_ndim("rotary_cos", a.rotary_cos, 2, "[positions, half of the rotated dims]");
  const std::int64_t half = dim(a.rotary_cos, 1);
  if (half < 1 || half > p.D / 2)
    invalid("rotary_cos: has shape ", shape_text(a.rotary_cos),
            "; its second size is half of the rotated dims, from 1 to ", p.D / 2, " since k has ", p.D);
  check_shape("rotary_sin", a.rotary_sin, {dim(a.rotary_cos, 0), half}, "rotary_cos's shape");
  for (const auto& [name, t] : {std::pair{"rotary_cos", &a.rotary_cos}, {"rotary_sin", &a.rotary_sin}}) {
    check_follows(name, t->type, "k_new", a.k_new.type);
    check_rows(name, *t);
  }
  if (a.slots && !a.positions) invalid("positions: is missing; slots say nothing of a token's position");
  if (!a.positions) return;
  check_numbers("positions", a.positions, "k_new", a.k_new, c.packed);
  check_type("positions", a.positions, Type::i32);
}

void check_queries(const Appending& c) {
  const AppendArgs& a = c.a;
  if (bool(a.q) != bool(a.q_out)) invalid(a.q ? "q_out" : "q", ": is missing; q and q_out go together");
  if (!a.q && a.q_positions) invalid("q_positions: is given but q is not; there are no queries to rotate");
  if (!a.q) return;
  check_view("q", a.q, c.p.device), check_view("q_out", a.q_out, c.p.device);
  check_number("q", a.q);
  check_ndim("q", a.q, c.packed ? 3 : 4, c.packed ? "[tokens, heads, dim] like k_new" : "[batch, tokens, heads, dim]");
  const std::int64_t tokens = c.packed ? c.n : dim(a.q, 1), heads = dim(a.q, c.packed ? 1 : 2), D = c.p.D;
  if (c.packed) check_shape("q", a.q, {tokens, heads, D}, "[k_new's tokens, heads, k's dim]");
  if (!c.packed) check_shape("q", a.q, {dim(a.k_new, 0), tokens, heads, D}, "[k_new's batch, tokens, heads, k's dim]");
  if (c.packed) check_shape("q_out", a.q_out, {tokens, heads, D}, "q's shape");
  if (!c.packed) check_shape("q_out", a.q_out, {dim(a.k_new, 0), tokens, heads, D}, "q's shape");
  check_follows("q_out", a.q_out.type, "q", a.q.type);
  check_count("q", tokens, "tokens", most_tokens), check_count("q", heads, "heads", most_heads);
  check_rows("q", a.q), check_rows("q_out", a.q_out);
  if (!a.q_positions && a.positions && tokens != c.n)
    invalid("q: has ", tokens, " tokens but k_new has ", c.n,
            "; q_positions is needed where positions are k_new's alone");
  if (!a.q_positions) return;
  check_numbers("q_positions", a.q_positions, "q", a.q, c.packed);
  check_type("q_positions", a.q_positions, Type::i32);
}

void check_memory(const AppendArgs& a) {
  using Named = std::pair<const char*, const Tensor*>;
  const auto computed = [](const Tensor& scale) { return scale.ndim >= 3; };
  static const Tensor none;
  const std::array<Named, 16> read{{{"k_new", &a.k_new},
                                    {"v_new", &a.v_new},
                                    {"cu_seqlens_new", &a.cu_seqlens_new},
                                    {"seqused_k", &a.seqused_k},
                                    {"block_table", &a.block_table},
                                    {"v_block_table", &a.v_block_table},
                                    {"page_indptr", &a.page_indptr},
                                    {"page_indices", &a.page_indices},
                                    {"slots", &a.slots},
                                    {"rotary_cos", &a.rotary_cos},
                                    {"rotary_sin", &a.rotary_sin},
                                    {"positions", &a.positions},
                                    {"q", &a.q},
                                    {"q_positions", &a.q_positions},
                                    {"k_scale", computed(a.k_scale) ? &none : &a.k_scale},
                                    {"v_scale", computed(a.v_scale) ? &none : &a.v_scale}}};
  const std::array<Named, 6> written{{{"k", &a.k},
                                      {"v", &a.v},
                                      {"q_out", &a.q_out},
                                      {"status", &a.status},
                                      {"k_scale", computed(a.k_scale) ? &a.k_scale : &none},
                                      {"v_scale", computed(a.v_scale) ? &a.v_scale : &none}}};
  for (const auto& [name, t] : read) check_data(name, *t);
  for (auto output = written.begin(); output != written.end(); ++output) {
    const auto& [name, t] = *output;
    check_data(name, *t);
    if (*t) check_writable(name, *t);
    for (const auto& [other_name, other] : read)
      if (!(other == &a.q && same_view(*t, *other))) check_apart(name, *t, other_name, *other);
    for (auto other = written.begin(); other != output; ++other) check_apart(name, *t, other->first, *other->second);
  }
}

// Of i32 or i64 numbers, one for each token.
std::int64_t number(const Tensor& t, std::int64_t token) {
  std::int64_t at = token * stride(t, 0);
  if (t.ndim == 2) at = token / t.shape[1] * stride(t, 0) + token % t.shape[1] * stride(t, 1);
  return t.type == Type::i64 ? static_cast<const std::int64_t*>(t.data)[at]
                             : static_cast<const std::int32_t*>(t.data)[at];
}

// The scale of a token of sequence b whose place in the cache is known: head 0's.
float* scale_of(const Tensor& scale, std::int64_t b, std::int64_t page, std::int64_t place) {
  std::int64_t at = 0;
  if (scale.ndim == 2) at = b * stride(scale, 0);
  if (scale.ndim >= 3) at = page * stride(scale, 0) + place * stride(scale, 1);
  return static_cast<float*>(scale.data) + at;
}

void find_slots(const Appending& c, NewRows& rows) {
  const AppendArgs& a = c.a;
  const std::int64_t size = dim(a.k, 1), slots = product({dim(a.k, 0), size});
  for (std::int64_t token = 0; token < rows.tokens; ++token) {
    const std::int64_t slot = number(a.slots, token);
    if (slot < 0) continue;
    if (slot >= slots) {
      rows.outside_pool = true;
      continue;
    }
    const auto n = static_cast<std::size_t>(token);
    for (const auto& [cache, out] : {std::pair{&a.k, &rows.k}, {&a.v, &rows.v}}) {
      const std::int64_t at = slot / size * stride(*cache, 0) + slot % size * stride(*cache, 1);
      (*out)[n] = static_cast<char*>(cache->data) + at * size_of(cache->type);
    }
    const std::int64_t b = c.packed ? 0 : token / c.n;
    if (a.k_scale) rows.k_scales[n] = scale_of(a.k_scale, b, slot / size, slot % size);
    if (a.v_scale) rows.v_scales[n] = scale_of(a.v_scale, b, slot / size, slot % size);
  }
}

// The new tokens of one sequence: the first, how many, and the place in the cache of the first.
struct NewTokens {
  std::int64_t first, count, place;
};

NewTokens tokens_of(const Appending& c, std::int64_t b) {
  const std::int64_t first = c.packed ? entry(c.a.cu_seqlens_new, b) : b * c.n;
  const std::int64_t count = c.packed ? entry(c.a.cu_seqlens_new, b + 1) - first : c.n;
  return {first, count, entry(c.a.seqused_k, b) - count};
}

void check_lengths(const Appending& c) {
  const Problem& p = c.p;
  if (c.packed) check_host_offsets("cu_seqlens_new", c.a.cu_seqlens_new, p.B, c.n, "tokens");
  if (p.pages) check_host_pages(p, c.call.inputs);
  for (std::int64_t b = 0; b < p.B; ++b) {
    const std::int64_t length = entry(c.a.seqused_k, b);
    if (!p.pages && length > p.Nk)
      invalid("seqused_k: entry ", b, " is ", length, "; must be from 0 to ", p.Nk, ", the tokens of k");
    if (const NewTokens tokens = tokens_of(c, b); tokens.place < 0)
      invalid("seqused_k: entry ", b, " is ", length, " but the sequence has ", tokens.count,
              " new tokens; it must count them");
  }
}

void find_places(const Appending& c, NewRows& rows) {
  for (std::int64_t b = 0; b < c.p.B; ++b) {
    const NewTokens tokens = tokens_of(c, b);
    const Sequence s{.b = b};
    for (const auto& [keys, out, scales] : {std::tuple{keys_of(c.p, c.call, s, 0), &rows.k, &rows.k_scales},
                                            {values_of(c.p, c.call, s, 0), &rows.v, &rows.v_scales}})
      for (std::int64_t t = 0; t < tokens.count; ++t) {
        const auto n = static_cast<std::size_t>(tokens.first + t);
        const char* row = keys.row(tokens.place + t);
        if (row == zero_row)
          rows.outside_pool = true;
        else
          (*out)[n] = const_cast<char*>(row);
        if (!scales->empty()) (*scales)[n] = const_cast<float*>(keys.scale_place(tokens.place + t));
      }
  }
}

// Two tokens in one row would be a race.
void check_distinct(const char* name, const std::vector<char*>& rows) {
  std::vector<std::pair<const char*, std::int64_t>> sorted;
  for (std::size_t token = 0; token < rows.size(); ++token)
    if (rows[token]) sorted.emplace_back(rows[token], token);
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t n = 1; n < sorted.size(); ++n)
    if (sorted[n - 1].first == sorted[n].first)
      invalid(name, ": tokens ", sorted[n - 1].second, " and ", sorted[n].second,
              " both go to one row of the cache; each needs a row of its own");
}

// Tokens of no sequence, and keys that go nowhere, have none.
void find_positions(const Appending& c, NewRows& rows) {
  const AppendArgs& a = c.a;
  const std::int64_t count = dim(a.rotary_cos, 0);
  const auto find = [&](bool query, std::int64_t first, std::int64_t n, std::int64_t place) {
    const bool own = query && a.q_positions;
    const Tensor& given = own ? a.q_positions : a.positions;
    for (std::int64_t token = first; token < first + n; ++token, ++place) {
      const auto at = static_cast<std::size_t>(token);
      if (!query && !rows.k[at]) continue;
      const std::int64_t position = given ? number(given, token) : place;
      if (given && (position < 0 || position >= count))
        invalid(own ? "q_positions" : "positions", ": is ", position, " for token ", token, "; must be from 0 to ",
                count - 1, ", the rows of rotary_cos");
      if (position >= count)
        invalid("rotary_cos: has ", count, " positions but token ", token, query ? " of q" : "", " is at ", position);
      (query ? rows.q_positions : rows.positions)[at] = position;
    }
  };
  rows.positions.assign(static_cast<std::size_t>(rows.tokens), -1);
  rows.q_positions.assign(static_cast<std::size_t>(rows.q_tokens), -1);
  if (a.slots) {
    find(false, 0, rows.tokens, 0);
    return find(true, 0, rows.q_tokens, 0);
  }
  for (std::int64_t b = 0; b < c.p.B; ++b) {
    const NewTokens tokens = tokens_of(c, b);
    find(false, tokens.first, tokens.count, tokens.place);
    const std::int64_t queries = c.packed ? tokens.count : a.q ? dim(a.q, 1) : 0;
    if (a.q) find(true, c.packed ? tokens.first : b * queries, queries, tokens.place);
  }
}

}  // namespace

Appending check_append(const AppendArgs& a, const Execution& execution) {
  check_given("k_new", a.k_new), check_given("v_new", a.v_new), check_given("k", a.k), check_given("v", a.v);
  check_cpu_or_cuda("k", a.k, execution);
  Appending c{.a = a, .p = {.device = a.k.device}, .call = {}};
  Inputs& in = c.call.inputs;
  in.k = a.k, in.v = a.v, in.seqused_k = a.seqused_k, in.block_table = a.block_table;
  in.v_block_table = a.v_block_table, in.page_indptr = a.page_indptr, in.page_indices = a.page_indices;
  in.k_scale = a.k_scale, in.v_scale = a.v_scale;
  c.call.outputs.status = a.status;
  check_places_given(c);
  check_tokens(c);
  check_places(c);
  check_scales(c);
  check_rotation(c);
  check_queries(c);
  check_memory(a);
  c.tokens = c.packed ? c.n : product({dim(a.k_new, 0), c.n});
  c.q_tokens = !a.q ? 0 : c.packed ? c.n : product({dim(a.q, 0), dim(a.q, 1)});
  return c;
}

NewRows find_rows(const Appending& c) {
  const AppendArgs& a = c.a;
  if (!a.slots) check_lengths(c);
  NewRows rows;
  rows.tokens = c.tokens, rows.q_tokens = c.q_tokens;
  rows.k.resize(static_cast<std::size_t>(rows.tokens)), rows.v.resize(static_cast<std::size_t>(rows.tokens));
  if (a.k_scale) rows.k_scales.resize(rows.k.size());
  if (a.v_scale) rows.v_scales.resize(rows.v.size());
  if (a.slots)
    find_slots(c, rows);
  else
    find_places(c, rows);
  if (c.p.pages) check_distinct(a.slots ? "slots" : a.block_table ? "block_table" : "page_indices", rows.k);
  if (a.v_block_table) check_distinct("v_block_table", rows.v);
  if (a.rotary_cos) find_positions(c, rows);
  return rows;
}

}  // namespace tessera
