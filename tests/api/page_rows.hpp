// SPDX-License-Identifier: Apache-2.0
// The rows of check_test.cpp for keys and values in pages; see check_rows.hpp.
// Included by tests/api/check_test.cpp only. Implements docs/algorithm.md, "Paged keys and values".
#pragma once

#include "tests/api/check_rows.hpp"

namespace tessera::test {

// Table form of the same call.
inline void use_indptr(Arguments& a) {
  a.in.block_table = {}, a.in.page_indptr = a.page_indptr, a.in.page_indices = a.page_indices;
}

// clang-format off
inline const Row page_rows[] = {
    // What goes with a table
    {"v_table_alone", Entry::forward, [](Arguments& a) { a.in.v_block_table = a.page_indices; },
     "v_block_table: is given but block_table is not; v has a table of its own only beside k's"},
    {"leftpad_alone", Entry::forward, [](Arguments& a) { a.in.leftpad_k = a.in.seqused_k; },
     "leftpad_k: is given but there is no page table; it is for paged keys"},
    {"status_alone", Entry::paged, [](Arguments& a) { a.in.block_table = a.in.leftpad_k = {}; },
     "status: is given but there is no page table; it is for paged keys"},
    {"two_tables", Entry::paged, [](Arguments& a) { a.in.page_indices = a.page_indices; },
     "page_indices: is given with block_table; use one or the other"},
    {"indptr_and_table", Entry::paged, [](Arguments& a) { a.in.page_indptr = a.page_indptr; },
     "page_indptr: is given with block_table; use one or the other"},
    {"indices_missing", Entry::paged, [](Arguments& a) { use_indptr(a), a.in.page_indices = {}; },
     "page_indices: is missing; page_indptr and page_indices go together"},
    {"indptr_missing", Entry::paged, [](Arguments& a) { use_indptr(a), a.in.page_indptr = {}; },
     "page_indptr: is missing; page_indptr and page_indices go together"},
    {"paged_cu_seqlens_k", Entry::paged, [](Arguments& a) { a.in.cu_seqlens_k = a.page_indptr; },
     "cu_seqlens_k: is given with a page table; seqused_k holds the lengths of paged keys"},
    {"paged_lengths_missing", Entry::paged, [](Arguments& a) { a.in.seqused_k = {}; },
     "seqused_k: is missing; it holds the lengths of paged keys"},
    {"paged_backward", Entry::backward, [](Arguments& a) { a.in.block_table = a.page_indices; },
     "k: is paged; there is no backward pass through a page table", TESSERA_UNSUPPORTED},
    {"paged_on_a_gpu", Entry::paged,
     [](Arguments& a) {
       for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.seqused_q, &a.in.seqused_k, &a.in.block_table,
                         &a.in.leftpad_k, &a.out.o, &a.out.lse, &a.out.status})
         t->device = gpu;
       a.in.bias = a.in.mask = a.in.slopes = a.in.sinks = {};
       a.execution.kernel = "naive";
     },
     "no kernel can run this: naive: k and v are paged; this kernel takes padded and packed ones", TESSERA_UNSUPPORTED},
    {"merge_status", Entry::merge, [](Arguments& a) { a.parts[1].status = a.rng; },
     "partials[1].status: is given; merging reports nothing"},

    // Shapes
    {"paged_k_dimensions", Entry::paged, [](Arguments& a) { a.in.k.ndim = 3; },
     "k: has shape [4,3,2], 3 dimensions; expected 4, [pages, tokens, heads, dim] since there is a page table"},
    {"paged_k_head_dim", Entry::paged, [](Arguments& a) { a.in.k.shape[3] = 7; },
     "k: head_dim is 7 but q has 8; q and k must agree in head_dim"},
    {"empty_pages", Entry::paged, [](Arguments& a) { a.in.k.shape[1] = a.in.v.shape[1] = 0; },
     "k: has pages of 0 tokens; a page holds at least 1"},
    {"paged_v_tokens", Entry::paged, [](Arguments& a) { a.in.v.shape[1] = 2; },
     "v: has 2 tokens but k has 3; k and v must agree in tokens"},
    {"pools_disagree", Entry::paged, [](Arguments& a) { a.in.v.shape[0] = 3; },
     "v: has 3 pages but k has 4; they must agree unless v has a table of its own"},
    {"table_type", Entry::paged, [](Arguments& a) { a.in.block_table.type = Type::i64; },
     "block_table: has type i64; must be i32"},
    {"table_dimensions", Entry::paged, [](Arguments& a) { a.in.block_table.ndim = 1; },
     "block_table: has shape [2], 1 dimensions; expected 2, [batch, entries]"},
    {"table_batch", Entry::paged, [](Arguments& a) { a.in.block_table.shape[0] = 3; },
     "block_table: has shape [3,3]; must be [batch, entries] = [2,3]"},
    {"table_elsewhere", Entry::paged, [](Arguments& a) { a.in.block_table.device = gpu; },
     "block_table: is on cuda:3 but the call runs on cpu; all tensors must be there"},
    {"v_table_shape", Entry::paged,
     [](Arguments& a) { a.in.v_block_table = a.in.block_table, a.in.v_block_table.shape[1] = 2; },
     "v_block_table: has shape [2,2]; must be block_table's shape = [2,3]"},
    {"indptr_shape", Entry::paged, [](Arguments& a) { use_indptr(a), a.in.page_indptr.shape[0] = 2; },
     "page_indptr: has shape [2]; must be [batch + 1] = [3]"},
    {"indices_dimensions", Entry::paged,
     [](Arguments& a) { use_indptr(a), a.in.page_indices = a.in.q, a.in.page_indices.type = Type::i32; },
     "page_indices: has shape [2,5,4,8], 4 dimensions; expected 1, [pages in use]"},
    {"most_paged_keys", Entry::paged,
     [](Arguments& a) { a.in.block_table.shape[1] = std::int64_t{1} << 47, a.in.block_table.strides = {0, 0, 0, 0}; },
     "block_table: has 422212465065984 tokens; at most 281474976710656 are allowed"},
    {"leftpad_shape", Entry::paged, [](Arguments& a) { a.in.leftpad_k.shape[0] = 1; },
     "leftpad_k: has shape [1]; must be [batch] = [2]"},
    {"status_shape", Entry::paged, [](Arguments& a) { a.out.status.shape[0] = 2; },
     "status: has shape [2]; must be one word = [1]"},

    // What only a run needs
    {"paged_length_too_long", Entry::paged, [](Arguments& a) { a.k_lengths[1] = 10; },
     "seqused_k: entry 1 is 10; must be from 0 to 9, what its 3 table entries hold"},
    {"paged_length_negative", Entry::paged, [](Arguments& a) { a.k_lengths[0] = -1; },
     "seqused_k: entry 0 is -1; must be from 0 to 9, what its 3 table entries hold"},
    {"listed_length_too_long", Entry::paged, [](Arguments& a) { use_indptr(a), a.k_lengths[1] = 7; },
     "seqused_k: entry 1 is 7; must be from 0 to 6, what its 2 table entries hold"},
    {"indptr_negative", Entry::paged, [](Arguments& a) { use_indptr(a), a.indptr[0] = -1; },
     "page_indptr: entry 0 is -1; must not be negative"},
    {"indptr_decreases", Entry::paged, [](Arguments& a) { use_indptr(a), a.indptr[2] = 2; },
     "page_indptr: entry 2 is 2 after 3; entries must not decrease"},
    {"indptr_too_far", Entry::paged, [](Arguments& a) { use_indptr(a), a.indptr[2] = 6; },
     "page_indptr: entry 2 is 6 but there are only 5 pages"},
    {"leftpad_too_long", Entry::paged, [](Arguments& a) { a.leftpad[1] = 5; },
     "leftpad_k: entry 1 is 5; must be from 0 to the sequence's length 4"},
    {"leftpad_negative", Entry::paged, [](Arguments& a) { a.leftpad[0] = -2; },
     "leftpad_k: entry 0 is -2; must be from 0 to the sequence's length 7"},
    {"paged_max_seqlen", Entry::paged, [](Arguments& a) { a.options.max_seqlen_k = 5; },
     "max_seqlen_k: is 5 but sequence 0 has length 6; it must be an upper bound"},
    {"paged_mask_too_small", Entry::paged, [](Arguments& a) { a.in.mask.shape[3] = 5; },
     "mask: has shape [2,4,5,5] but sequence 0 has 5 queries and 6 keys; its last two dimensions must be 1 or at "
     "least every length"},
    {"status_in_the_table", Entry::paged, [](Arguments& a) { a.out.status.data = a.in.block_table.data; },
     "status: shares memory with block_table; outputs must not overlap inputs or each other"},
    {"table_null", Entry::paged, [](Arguments& a) { a.in.block_table.data = nullptr; },
     "block_table: data is null but its shape is [2,3]; null is allowed only without elements"},
};
// clang-format on

}  // namespace tessera::test
