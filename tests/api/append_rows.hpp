// SPDX-License-Identifier: Apache-2.0
// The table of append_check_test.cpp: one row per rule for the arguments of append. A valid call, one mutation, and the
// exact sentence that must come back. tests/tree_test.py compares the sentences here with those in src/.
// Included by tests/api/append_check_test.cpp only. Implements docs/algorithm.md, "Append".
#pragma once

#include <ostream>
#include <vector>

#include "tests/support/support.hpp"

namespace tessera::test {

// How a call says where its tokens go.
enum class Form { table, packed, piece, slots, packed_slots };

struct AppendArguments {
  AppendArgs args;
  Execution execution;
  std::vector<std::int32_t> offsets{1, 3, 6}, lengths{7, 5}, indptr{0, 3, 5}, positions{0, 1, 2, 3, 4, 5};
  std::vector<std::int64_t> slots{15, 0, -1, 3, 8, 7};
  Tensor page_indptr, page_indices;  // the same pages as block_table
};

struct AppendRow {
  const char* name;
  Form form;
  void (*spoil)(AppendArguments&);
  const char* sentence;
  tessera_status status = TESSERA_INVALID_ARGUMENT;
};
inline std::ostream& operator<<(std::ostream& out, const AppendRow& row) { return out << row.name; }

// clang-format off
inline const AppendRow append_rows[] = {
    // What must be given, and what goes with what
    {"k_new_missing", Form::table, [](AppendArguments& c) { c.args.k_new = {}; }, "k_new: is missing; it is required"},
    {"v_missing", Form::table, [](AppendArguments& c) { c.args.v = {}; }, "v: is missing; it is required"},
    {"on_a_gpu", Form::table, [](AppendArguments& c) { c.args.k.device = {DeviceType::cuda, 3}; },
     "k_new: is on cpu but the call runs on cuda:3; all tensors must be there"},
    {"on_a_gpu_of_another_kind", Form::table, [](AppendArguments& c) { c.args.k.device = {DeviceType::vulkan, 0}; },
     "k: is on vulkan:0; this call runs on cpu and cuda tensors", TESSERA_UNSUPPORTED},
    {"elsewhere", Form::table, [](AppendArguments& c) { c.args.v_new.device = {DeviceType::cuda, 3}; },
     "v_new: is on cuda:3 but the call runs on cpu; all tensors must be there"},
    {"threads", Form::table, [](AppendArguments& c) { c.execution.threads = -1; },
     "threads: is -1; must be 0 (all) or positive"},
    {"slots_and_table", Form::slots, [](AppendArguments& c) { c.args.page_indices = c.page_indices; },
     "slots: is given with page_indices; slots alone say where tokens go"},
    {"slots_and_lengths", Form::slots, [](AppendArguments& c) { c.args.seqused_k = c.page_indptr; },
     "slots: is given with seqused_k; slots alone say where tokens go"},
    {"lengths_missing", Form::piece, [](AppendArguments& c) { c.args.seqused_k = {}; },
     "seqused_k: is missing; it is required"},
    {"status_of_a_piece", Form::piece, [](AppendArguments& c) { c.args.status = c.page_indptr; },
     "status: is given but there is no page table; it is for paged keys"},
    {"two_tables", Form::table, [](AppendArguments& c) { c.args.page_indptr = c.page_indptr; },
     "page_indptr: is given with block_table; use one or the other"},
    {"sin_missing", Form::table, [](AppendArguments& c) { c.args.rotary_sin = {}; },
     "rotary_sin: is missing; rotary_cos and rotary_sin go together"},
    {"cos_missing", Form::table, [](AppendArguments& c) { c.args.rotary_cos = {}; },
     "rotary_cos: is missing; rotary_cos and rotary_sin go together"},
    {"positions_alone", Form::slots, [](AppendArguments& c) { c.args.rotary_cos = c.args.rotary_sin = {}; },
     "positions: is given but rotary_cos is not; there is no rotation"},
    {"q_alone", Form::table, [](AppendArguments& c) { c.args.rotary_cos = c.args.rotary_sin = {}; },
     "q: is given but rotary_cos is not; there is no rotation"},
    {"q_out_missing", Form::table, [](AppendArguments& c) { c.args.q_out = {}; },
     "q_out: is missing; q and q_out go together"},
    {"q_missing", Form::table, [](AppendArguments& c) { c.args.q = {}; }, "q: is missing; q and q_out go together"},
    {"q_positions_alone", Form::slots,
     [](AppendArguments& c) { c.args.q = c.args.q_out = {}, c.args.q_positions = c.args.positions; },
     "q_positions: is given but q is not; there are no queries to rotate"},
    {"positions_missing", Form::slots, [](AppendArguments& c) { c.args.positions = {}; },
     "positions: is missing; slots say nothing of a token's position"},

    // Types
    {"k_new_type", Form::table, [](AppendArguments& c) { c.args.k_new.type = Type::i32; },
     "k_new: has type i32; must be f64, f32, f16 or bf16"},
    {"cache_type", Form::table, [](AppendArguments& c) { c.args.k.type = Type::u8; },
     "k: has type u8; must be f64, f32, f16, bf16, e4m3 or i8"},
    {"eight_bits_of_tokens", Form::table, [](AppendArguments& c) { c.args.v_new.type = Type::e4m3; },
     "v_new: has type e4m3; must be f64, f32, f16 or bf16"},
    {"computed_scales", Form::table, [](AppendArguments& c) { c.args.k_scale = Tensor(nullptr, Type::f32, {4, 4, 2}); },
     "k_scale: has shape [4,4,2], one for each token, but k has type f32; those are computed for e4m3 and i8"},
    {"computed_scales_of_dims", Form::table,
     [](AppendArguments& c) { c.args.v_scale = Tensor(nullptr, Type::f32, {4, 4, 2, 1}); },
     "v_scale: has shape [4,4,2,1], one for each token, but v has type f32; those are computed for e4m3 and i8"},
    {"scales_of_slots", Form::packed_slots,
     [](AppendArguments& c) { c.args.v_scale = Tensor(nullptr, Type::f32, {0, 2}); },
     "v_scale: has shape [0,2], one for each sequence, but packed slots say of no sequence"},
    {"scales_of_heads", Form::piece, [](AppendArguments& c) { c.args.v_scale = Tensor(nullptr, Type::f32, {3}); },
     "v_scale: has shape [3]; must be [1] or [heads] = [2]"},
    {"scales_null", Form::table, [](AppendArguments& c) { c.args.k_scale = Tensor(nullptr, Type::f32, {2}); },
     "k_scale: data is null but its shape is [2]; null is allowed only without elements"},
    {"scales_in_the_cache", Form::table,
     [](AppendArguments& c) { c.args.k_scale = Tensor(c.args.k.data, Type::f32, {2}); },
     "k: shares memory with k_scale; outputs must not overlap inputs or each other"},
    {"q_type", Form::table, [](AppendArguments& c) { c.args.q.type = Type::u8; },
     "q: has type u8; must be f64, f32, f16 or bf16"},
    {"q_out_type", Form::table, [](AppendArguments& c) { c.args.q_out.type = Type::bf16; },
     "q_out: has type bf16; must be f32 like q, or f32"},
    {"cos_type", Form::table, [](AppendArguments& c) { c.args.rotary_cos.type = Type::f16; },
     "rotary_cos: has type f16; must be f32 like k_new, or f32"},
    {"lengths_type", Form::table, [](AppendArguments& c) { c.args.seqused_k.type = Type::u8; },
     "seqused_k: has type u8; must be i32"},
    {"offsets_type", Form::packed, [](AppendArguments& c) { c.args.cu_seqlens_new.type = Type::u8; },
     "cu_seqlens_new: has type u8; must be i32"},
    {"slots_type", Form::slots, [](AppendArguments& c) { c.args.slots.type = Type::f64; },
     "slots: has type f64; must be i32 or i64"},
    {"positions_type", Form::slots, [](AppendArguments& c) { c.args.positions.type = Type::f32; },
     "positions: has type f32; must be i32"},

    // Shapes
    {"cache_dimensions", Form::table, [](AppendArguments& c) { c.args.k.ndim = 3; },
     "k: has shape [4,4,2], 3 dimensions; expected 4, [pages, tokens, heads, dim]"},
    {"piece_dimensions", Form::piece, [](AppendArguments& c) { c.args.v.ndim = 3; },
     "v: has shape [2,8,2], 3 dimensions; expected 4, [batch, tokens, heads, dim]"},
    {"v_tokens", Form::table, [](AppendArguments& c) { c.args.v.shape[1] = 3; },
     "v: has shape [4,3,2,6]; must be [k's, k's tokens, k's heads, dim] = [4,4,2,6]"},
    {"k_new_dimensions", Form::packed, [](AppendArguments& c) { c.args.k_new.ndim = 4; },
     "k_new: has shape [6,2,8,0], 4 dimensions; expected 3, [tokens, heads, dim] since cu_seqlens_new or slots are "
     "given"},
    {"k_new_packed", Form::table, [](AppendArguments& c) { c.args.k_new.ndim = 3; },
     "k_new: has shape [2,3,2], 3 dimensions; expected 4, [batch, tokens, heads, dim]"},
    {"k_new_dim", Form::table, [](AppendArguments& c) { c.args.k_new.shape[3] = 7; },
     "k_new: has shape [2,3,2,7]; must be [batch, tokens, the cache's heads and dim] = [2,3,2,8]"},
    {"v_new_tokens", Form::packed, [](AppendArguments& c) { c.args.v_new.shape[0] = 5; },
     "v_new: has shape [5,2,6]; must be [tokens, the cache's heads and dim] = [6,2,6]"},
    {"slots_shape", Form::slots, [](AppendArguments& c) { c.args.slots.shape[1] = 2; },
     "slots: has shape [2,2]; must be [batch, tokens] of k_new = [2,3]"},
    {"packed_slots_shape", Form::packed_slots, [](AppendArguments& c) { c.args.slots.shape[0] = 5; },
     "slots: has shape [5]; must be [tokens] of k_new = [6]"},
    {"slots_status", Form::slots, [](AppendArguments& c) { c.args.status.shape[0] = 2; },
     "status: has shape [2]; must be one word = [1]"},
    {"no_offsets", Form::packed, [](AppendArguments& c) { c.args.cu_seqlens_new.shape[0] = 0; },
     "cu_seqlens_new: has shape [0]; must be [batch + 1]"},
    {"lengths_shape", Form::table, [](AppendArguments& c) { c.args.seqused_k.shape[0] = 1; },
     "seqused_k: has shape [1]; must be [batch] = [2]"},
    {"piece_batch", Form::piece, [](AppendArguments& c) { c.args.k.shape[0] = c.args.v.shape[0] = 1; },
     "k: has 1 sequences but there are new tokens of 2; without a page table or slots they must agree"},
    {"cos_dimensions", Form::table, [](AppendArguments& c) { c.args.rotary_cos.ndim = 1; },
     "rotary_cos: has shape [8], 1 dimensions; expected 2, [positions, half of the rotated dims]"},
    {"cos_dims", Form::table, [](AppendArguments& c) { c.args.rotary_cos.shape[1] = 5; },
     "rotary_cos: has shape [8,5]; its second size is half of the rotated dims, from 1 to 4 since k has 8"},
    {"no_cos_dims", Form::table, [](AppendArguments& c) { c.args.rotary_cos.shape[1] = 0; },
     "rotary_cos: has shape [8,0]; its second size is half of the rotated dims, from 1 to 4 since k has 8"},
    {"sin_shape", Form::table, [](AppendArguments& c) { c.args.rotary_sin.shape[1] = 2; },
     "rotary_sin: has shape [8,2]; must be rotary_cos's shape = [8,3]"},
    {"sin_stride", Form::table, [](AppendArguments& c) { c.args.rotary_sin.strides[1] = 2; },
     "rotary_sin: last dimension has stride 2; it must be 1"},
    {"q_dimensions", Form::packed, [](AppendArguments& c) { c.args.q.ndim = 4; },
     "q: has shape [6,4,8,0], 4 dimensions; expected 3, [tokens, heads, dim] like k_new"},
    {"q_shape", Form::table, [](AppendArguments& c) { c.args.q.shape[3] = 7; },
     "q: has shape [2,3,4,7]; must be [k_new's batch, tokens, heads, k's dim] = [2,3,4,8]"},
    {"packed_q_shape", Form::packed, [](AppendArguments& c) { c.args.q.shape[0] = 5; },
     "q: has shape [5,4,8]; must be [k_new's tokens, heads, k's dim] = [6,4,8]"},
    {"q_out_shape", Form::table, [](AppendArguments& c) { c.args.q_out.shape[1] = 2; },
     "q_out: has shape [2,2,4,8]; must be q's shape = [2,3,4,8]"},
    {"fewer_queries", Form::slots, [](AppendArguments& c) { c.args.q.shape[1] = c.args.q_out.shape[1] = 2; },
     "q: has 2 tokens but k_new has 3; q_positions is needed where positions are k_new's alone"},

    // Memory
    {"cache_null", Form::table, [](AppendArguments& c) { c.args.k.data = nullptr; },
     "k: data is null but its shape is [4,4,2,8]; null is allowed only without elements"},
    {"cache_in_one_place", Form::table, [](AppendArguments& c) { c.args.v.strides[0] = 0; },
     "v: elements of shape [4,4,2,6] with strides [0,12,6,1] share memory; outputs must not overlap themselves"},
    {"caches_overlap", Form::table, [](AppendArguments& c) { c.args.v.data = c.args.k.data; },
     "v: shares memory with k; outputs must not overlap inputs or each other"},
    {"cache_of_itself", Form::table, [](AppendArguments& c) { c.args.k_new.data = c.args.k.data; },
     "k: shares memory with k_new; outputs must not overlap inputs or each other"},
    {"q_out_beside_q", Form::table,
     [](AppendArguments& c) { c.args.q_out.data = static_cast<float*>(c.args.q.data) + 1; },
     "q_out: shares memory with q; outputs must not overlap inputs or each other"},

    // Numbers
    {"offsets_decrease", Form::packed, [](AppendArguments& c) { c.offsets[1] = 0; },
     "cu_seqlens_new: entry 1 is 0 after 1; entries must not decrease"},
    {"lengths_beyond_the_table", Form::table, [](AppendArguments& c) { c.lengths[1] = 13; },
     "seqused_k: entry 1 is 13; must be from 0 to 12, what its 3 table entries hold"},
    {"lengths_beyond_the_piece", Form::piece, [](AppendArguments& c) { c.lengths[1] = 9; },
     "seqused_k: entry 1 is 9; must be from 0 to 8, the tokens of k"},
    {"lengths_without_the_new", Form::table, [](AppendArguments& c) { c.lengths[1] = 2; },
     "seqused_k: entry 1 is 2 but the sequence has 3 new tokens; it must count them"},
    {"two_in_a_slot", Form::slots, [](AppendArguments& c) { c.slots[4] = 15; },
     "slots: tokens 0 and 4 both go to one row of the cache; each needs a row of its own"},
    {"two_in_a_place", Form::table,
     [](AppendArguments& c) { static_cast<std::int32_t*>(c.args.block_table.data)[3] = 2, c.lengths[0] = 3; },
     "block_table: tokens 2 and 3 both go to one row of the cache; each needs a row of its own"},
    {"two_in_a_listed_place", Form::table,
     [](AppendArguments& c) {
       static_cast<std::int32_t*>(c.page_indices.data)[3] = 2, c.lengths[0] = 3;
       c.args.block_table = {}, c.args.page_indptr = c.page_indptr, c.args.page_indices = c.page_indices;
     },
     "page_indices: tokens 2 and 3 both go to one row of the cache; each needs a row of its own"},
    {"two_values_in_a_place", Form::table,
     [](AppendArguments& c) {
       c.args.v_block_table = Tensor(c.page_indices.data, Type::i32, {2, 3}), c.args.v_block_table.strides[0] = 0;
       c.lengths[0] = 5;
     },
     "v_block_table: tokens 2 and 5 both go to one row of the cache; each needs a row of its own"},
    {"few_positions", Form::table,
     [](AppendArguments& c) { c.args.rotary_cos.shape[0] = c.args.rotary_sin.shape[0] = 6; },
     "rotary_cos: has 6 positions but token 2 is at 6"},
    {"few_positions_for_q", Form::table,
     [](AppendArguments& c) {
       c.args.k_new.shape[1] = c.args.v_new.shape[1] = 1;
       c.lengths = {7, 8};
     },
     "rotary_cos: has 8 positions but token 2 of q is at 8"},
    {"position_beyond", Form::slots, [](AppendArguments& c) { c.positions[4] = 8; },
     "positions: is 8 for token 4; must be from 0 to 7, the rows of rotary_cos"},
    {"position_negative", Form::slots, [](AppendArguments& c) { c.positions[0] = -1; },
     "positions: is -1 for token 0; must be from 0 to 7, the rows of rotary_cos"},
    {"q_position_beyond", Form::slots,
     [](AppendArguments& c) {
       static std::int32_t beyond[] = {0, 1, 2, 3, 4, 100};
       c.args.q_positions = Tensor(beyond, Type::i32, {2, 3});
     },
     "q_positions: is 100 for token 5; must be from 0 to 7, the rows of rotary_cos"},
};
// clang-format on

}  // namespace tessera::test
