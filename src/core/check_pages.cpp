// SPDX-License-Identifier: Apache-2.0
// Rules for paged keys and values; see check_pages.hpp.
#include "core/check_pages.hpp"

#include "core/failure.hpp"
#include "core/key_rows.hpp"
#include "core/limits.hpp"
#include "core/rules.hpp"
#include "core/tensor.hpp"

namespace tessera {

bool has_pages(const Inputs& in) { return in.block_table || in.page_indptr || in.page_indices; }

void check_tables_given(const Inputs& in, const Outputs& out) {
  if (in.v_block_table && !in.block_table)
    invalid("v_block_table: is given but block_table is not; v has a table of its own only beside k's");
  if (!has_pages(in)) {
    for (const auto& [name, t] : {std::pair{"leftpad_k", &in.leftpad_k}, {"status", &out.status}})
      if (*t) invalid(name, ": is given but there is no page table; it is for paged keys");
    return;
  }
  if (in.block_table && (in.page_indptr || in.page_indices))
    invalid(in.page_indptr ? "page_indptr" : "page_indices", ": is given with block_table; use one or the other");
  if (!in.block_table && !(in.page_indptr && in.page_indices))
    invalid(in.page_indptr ? "page_indices" : "page_indptr", ": is missing; page_indptr and page_indices go together");
  if (in.cu_seqlens_k) invalid("cu_seqlens_k: is given with a page table; seqused_k holds the lengths of paged keys");
  if (!in.seqused_k) invalid("seqused_k: is missing; it holds the lengths of paged keys");
}

static void check_table(const char* name, const Tensor& t, const Problem& p) {
  check_view(name, t, p.device);
  check_type(name, t, Type::i32);
}

void check_status(const Tensor& status, const Problem& p) {
  if (!status) return;
  check_table("status", status, p);
  check_shape("status", status, {1}, "one word");
}

void check_tables(const Inputs& in, const Outputs& out, Problem& p) {
  if (!has_pages(in)) return;
  Pages pages{.count = dim(in.k, 0),
              .v_count = dim(in.v, 0),
              .size = dim(in.k, 1),
              .indptr = bool(in.page_indptr),
              .v_table = bool(in.v_block_table),
              .leftpad = bool(in.leftpad_k),
              .status = bool(out.status)};
  if (pages.size == 0) invalid("k: has pages of 0 tokens; a page holds at least 1");
  if (!pages.v_table && pages.v_count != pages.count)
    invalid("v: has ", pages.v_count, " pages but k has ", pages.count,
            "; they must agree unless v has a table of its own");
  if (pages.indptr) {
    check_table("page_indptr", in.page_indptr, p), check_table("page_indices", in.page_indices, p);
    check_shape("page_indptr", in.page_indptr, {p.B + 1}, "[batch + 1]");
    check_ndim("page_indices", in.page_indices, 1, "[pages in use]");
    pages.entries = dim(in.page_indices, 0);
  } else {
    check_table("block_table", in.block_table, p);
    check_ndim("block_table", in.block_table, 2, "[batch, entries]");
    pages.entries = dim(in.block_table, 1);
    check_shape("block_table", in.block_table, {p.B, pages.entries}, "[batch, entries]");
  }
  if (pages.v_table) {
    check_table("v_block_table", in.v_block_table, p);
    check_shape("v_block_table", in.v_block_table, {p.B, pages.entries}, "block_table's shape");
  }
  p.Nk = product({pages.entries, pages.size});
  check_count(pages.indptr ? "page_indices" : "block_table", p.Nk, "tokens", most_tokens);
  if (pages.leftpad) {
    check_table("leftpad_k", in.leftpad_k, p);
    check_shape("leftpad_k", in.leftpad_k, {p.B}, "[batch]");
  }
  check_status(out.status, p);
  p.pages = pages;
}

int check_scale(const char* name, const Tensor& t, const Tensor& keys, const Problem& p) {
  if (!t) return 0;
  check_view(name, t, p.device);
  check_type(name, t, Type::f32);
  const bool packed = keys.ndim == 3;
  const std::int64_t groups = ceil_div(dim(keys, keys.ndim - 1), scale_width);
  if (t.ndim == 1 && dim(t, 0) != 1) check_shape(name, t, {p.Hk}, "[1] or [heads]");
  if (t.ndim == 2) check_shape(name, t, {p.B, p.Hk}, "[batch, heads]");
  if (t.ndim == 3 && packed) check_shape(name, t, {1, dim(keys, 0), p.Hk}, "[1, tokens, heads]");
  if (t.ndim == 3 && !packed)
    check_shape(name, t, {dim(keys, 0), dim(keys, 1), p.Hk},
                p.pages ? "[pages, tokens, heads]" : "[batch, tokens, heads]");
  if (t.ndim == 4 && packed) check_shape(name, t, {1, dim(keys, 0), p.Hk, groups}, "[1, tokens, heads, dims / 128]");
  if (t.ndim == 4 && !packed)
    check_shape(name, t, {dim(keys, 0), dim(keys, 1), p.Hk, groups},
                p.pages ? "[pages, tokens, heads, dims / 128]" : "[batch, tokens, heads, dims / 128]");
  return t.ndim;
}

void check_host_pages(const Problem& p, const Inputs& in) {
  if (p.pages->indptr) check_host_offsets("page_indptr", in.page_indptr, p.B, p.pages->entries, "pages");
  for (std::int64_t b = 0; b < p.B; ++b) {
    const std::int64_t entries =
        p.pages->indptr ? entry(in.page_indptr, b + 1) - entry(in.page_indptr, b) : p.pages->entries;
    const std::int64_t length = entry(in.seqused_k, b), most = entries * p.pages->size;
    if (length < 0 || length > most)
      invalid("seqused_k: entry ", b, " is ", length, "; must be from 0 to ", most, ", what its ", entries,
              " table entries hold");
    const std::int64_t leftpad = in.leftpad_k ? entry(in.leftpad_k, b) : 0;
    if (leftpad < 0 || leftpad > length)
      invalid("leftpad_k: entry ", b, " is ", leftpad, "; must be from 0 to the sequence's length ", length);
    check_host_bound("max_seqlen_k", p.options.max_seqlen_k, b, length - leftpad);
  }
}

}  // namespace tessera
