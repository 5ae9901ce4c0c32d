// SPDX-License-Identifier: Apache-2.0
// The table of check_test.cpp: one row per rule for the caller's arguments. A valid call, one mutation, the status and
// the exact sentence that must come back. tests/tree_test.py compares the sentences here with those in src/.
// Included by tests/api/check_test.cpp, page_rows.hpp, part_rows.hpp and cache_rows.hpp. Implements the contract's "No
// surprises" (docs/algorithm.md).
#pragma once

#include <limits>
#include <ostream>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::test {

#if defined(__x86_64__)
#define TESSERA_TEST_KERNEL "sse4"
#else
#define TESSERA_TEST_KERNEL "neon"
#endif

// The views of a call, free to be spoiled.
struct Arguments {
  Inputs in;
  Outputs out;
  Saved saved;
  Gradients grads;
  Options options;
  Execution execution;
  std::vector<Outputs> parts;                      // of a merge
  Tensor dropout_mask, rng;                        // of dropout_mask
  std::vector<std::int32_t> q_lengths, k_lengths;  // contents of cu_seqlens (packed) or seqused (padded, paged)
  Tensor page_indptr, page_indices;                // the same pages as in.block_table
  std::vector<std::int32_t> indptr, leftpad;       // contents of page_indptr, in.leftpad_k
  State state;                                     // that a part of a problem starts from and ends with
  Tensor places;                                   // i64 [batch]
  std::vector<std::int64_t> positions;             // contents of in.seq_row0, seq_col0 and seq_batch0
};

enum class Entry { forward, backward, packed, packed_backward, paged, part, merge, dropout_mask, plan_forward };

struct Row {
  const char* name;
  Entry entry;
  void (*spoil)(Arguments&);
  const char* sentence;
  tessera_status status = TESSERA_INVALID_ARGUMENT;
};
inline std::ostream& operator<<(std::ostream& out, const Row& row) { return out << row.name; }

inline constexpr Device gpu{DeviceType::cuda, 3};
inline constexpr double nan = std::numeric_limits<double>::quiet_NaN();
alignas(64) inline std::byte fake_memory[64];  // for tensors that are never read
inline constexpr auto huge = std::int64_t{1} << 45, most_stride = std::numeric_limits<std::int64_t>::max();

// One row of memory that says to be as many tokens as q, k and v may have, and more.
inline Tensor tokens_without_memory(std::int64_t tokens) {
  Tensor t(fake_memory, Type::f32, {1, tokens, 1, 1});
  t.strides = {0, 0, 0, 1};
  return t;
}

// clang-format off
inline const Row rows[] = {
    // The C ABI and the view of one tensor
    {"q_missing", Entry::forward, [](Arguments& a) { a.in.q = {}; }, "q: is missing; it is required"},
    {"v_missing", Entry::backward, [](Arguments& a) { a.in.v = {}; }, "v: is missing; it is required"},
    {"o_missing", Entry::forward, [](Arguments& a) { a.out.o = {}; }, "o: is missing; it is required"},
    {"lse_missing", Entry::backward, [](Arguments& a) { a.saved.lse = {}; }, "lse: is missing; it is required"},
    {"d_o_missing", Entry::backward, [](Arguments& a) { a.saved.d_o = {}; }, "d_o: is missing; it is required"},
    {"five_dimensions", Entry::forward, [](Arguments& a) { a.in.k.ndim = 5; },
     "k: has 5 dimensions; tensors have 1 to 4"},
    {"unknown_type", Entry::forward, [](Arguments& a) { a.in.q.type = static_cast<Type>(77); },
     "q: type code 77 is not one of tessera_type"},
    {"negative_size", Entry::forward, [](Arguments& a) { a.in.v.shape[1] = -7; },
     "v: has shape [2,-7,2,6]; sizes must not be negative"},
    {"too_many_elements", Entry::forward, [](Arguments& a) { a.in.bias.shape = {huge, huge, 5, 7}; },
     "bias: has shape [35184372088832,35184372088832,5,7]; its element count must fit 64 bits"},
    {"another_device", Entry::forward, [](Arguments& a) { a.in.mask.device = gpu; },
     "mask: is on cuda:3 but the call runs on cpu; all tensors must be there"},
    {"device_of_a_gradient", Entry::backward, [](Arguments& a) { a.grads.dsinks.device = gpu; },
     "dsinks: is on cuda:3 but the call runs on cpu; all tensors must be there"},
    {"q_on_any", Entry::forward, [](Arguments& a) { a.in.q.device.type = DeviceType::any; },
     "q: is on any; must be on cpu, cuda or vulkan"},
    {"q_on_nothing_known", Entry::forward, [](Arguments& a) { a.in.q.device.type = static_cast<DeviceType>(9); },
     "q: is on device type 9; must be on cpu, cuda or vulkan"},

    // Types
    {"reserved_type", Entry::forward, [](Arguments& a) { a.in.k.type = Type::e5m2; },
     "k: type e5m2 is reserved; use f32, f16 or bf16", TESSERA_UNSUPPORTED},
    {"q_in_8_bits", Entry::forward, [](Arguments& a) { a.in.q.type = Type::e4m3; },
     "q: has type e4m3; must be f32, f16, bf16, or f64 for the reference"},
    {"integer_v", Entry::forward, [](Arguments& a) { a.in.v.type = Type::i32; },
     "v: has type i32; must be f32, f16, bf16, e4m3, i8, or f64 for the reference"},
    {"o_type", Entry::forward, [](Arguments& a) { a.out.o.type = Type::f16; },
     "o: has type f16; must be f32 like q, or f32"},
    {"d_o_type", Entry::backward, [](Arguments& a) { a.saved.d_o.type = Type::f64; },
     "d_o: has type f64; must be f32 like q, or f32"},
    {"bias_type", Entry::forward, [](Arguments& a) { a.in.bias.type = Type::bf16; },
     "bias: has type bf16; must be f32 like q, or f32"},
    {"dk_type", Entry::backward, [](Arguments& a) { a.grads.dk.type = Type::bf16; },
     "dk: has type bf16; must be f32 like k, or f32"},
    {"mask_type", Entry::forward, [](Arguments& a) { a.in.mask.type = Type::i32; },
     "mask: has type i32; must be u8"},
    {"lse_type", Entry::forward, [](Arguments& a) { a.out.lse.type = Type::f64; }, "lse: has type f64; must be f32"},
    {"slopes_type", Entry::forward, [](Arguments& a) { a.in.slopes.type = Type::f16; },
     "slopes: has type f16; must be f32"},
    {"sinks_type_beside_f64", Entry::forward,
     [](Arguments& a) {
       for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.bias, &a.in.slopes}) t->type = Type::f64;
       a.in.sinks.type = Type::f16;
     },
     "sinks: has type f16; must be f32 or f64"},
    {"cu_seqlens_type", Entry::packed, [](Arguments& a) { a.in.cu_seqlens_k.type = Type::i64; },
     "cu_seqlens_k: has type i64; must be i32"},
    {"accumulate_in_16_bits", Entry::backward,
     [](Arguments& a) {
       for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.grads.dv}) t->type = Type::f16;
       a.grads.dq = a.grads.dk = {};
       a.options.accumulate = true;
     },
     "dv: has type f16 while accumulate is set; accumulating needs f32"},

    // Shapes
    {"q_dimensions", Entry::forward, [](Arguments& a) { a.in.q.ndim = 3; },
     "q: has shape [2,5,4], 3 dimensions; expected 4, [batch, tokens, heads, dim]"},
    {"packed_dimensions", Entry::packed, [](Arguments& a) { a.in.v.ndim = 2; },
     "v: has shape [7,2], 2 dimensions; expected 3, [tokens, heads, dim] since cu_seqlens are given"},
    {"q_head_dim", Entry::forward, [](Arguments& a) { a.in.q.shape[3] = 577; },
     "q: head_dim is 577; must be from 1 to 576"},
    {"q_head_dim_zero", Entry::forward, [](Arguments& a) { a.in.q.shape[3] = 0; },
     "q: head_dim is 0; must be from 1 to 576"},
    {"v_head_dim", Entry::forward, [](Arguments& a) { a.in.v.shape[3] = 513; },
     "v: head_dim is 513; must be from 1 to 512"},
    {"k_head_dim", Entry::forward, [](Arguments& a) { a.in.k.shape[3] = 9; },
     "k: head_dim is 9 but q has 8; q and k must agree in head_dim"},
    {"k_batch", Entry::forward, [](Arguments& a) { a.in.k.shape[0] = 3; },
     "k: batch is 3 but q has 2; q, k and v must agree in batch"},
    {"v_batch", Entry::forward, [](Arguments& a) { a.in.v.shape[0] = 1; },
     "v: batch is 1 but q has 2; q, k and v must agree in batch"},
    {"v_tokens", Entry::forward, [](Arguments& a) { a.in.v.shape[1] = 8; },
     "v: has 8 tokens but k has 7; k and v must agree in tokens"},
    {"v_heads", Entry::packed, [](Arguments& a) { a.in.v.shape[1] = 4; },
     "v: has 4 heads but k has 2; k and v must agree in heads"},
    {"heads_not_a_multiple", Entry::forward, [](Arguments& a) { a.in.q.shape[2] = 5; },
     "q: has 5 heads but k has 2; q's must be a multiple of k's"},
    {"heads_without_keys", Entry::forward, [](Arguments& a) { a.in.k.shape[2] = a.in.v.shape[2] = 0; },
     "q: has 4 heads but k has 0; q's must be a multiple of k's"},
    {"o_shape", Entry::forward, [](Arguments& a) { a.out.o.shape[3] = 8; },
     "o: has shape [2,5,4,8]; must be [batch, tokens, heads, dim] = [2,5,4,6]"},
    {"packed_o_shape", Entry::packed, [](Arguments& a) { a.out.o.shape[0] = 4; },
     "o: has shape [4,4,6]; must be [tokens, heads, dim] = [5,4,6]"},
    {"lse_shape", Entry::backward, [](Arguments& a) { a.saved.lse.shape = {2, 5, 4, 0}; },
     "lse: has shape [2,5,4]; must be [batch, heads, queries] = [2,4,5]"},
    {"packed_lse_shape", Entry::packed, [](Arguments& a) { a.out.lse.shape[0] = 2; },
     "lse: has shape [2,5]; must be [heads, tokens] = [4,5]"},
    {"d_lse_shape", Entry::backward, [](Arguments& a) { a.saved.d_lse.shape[2] = 6; },
     "d_lse: has shape [2,4,6]; must be [batch, heads, queries] = [2,4,5]"},
    {"dk_shape", Entry::packed_backward, [](Arguments& a) { a.grads.dk.shape[1] = 4; },
     "dk: has shape [7,4,8]; must be [tokens, heads, dim] = [7,2,8]"},
    {"bias_dimensions", Entry::forward, [](Arguments& a) { a.in.bias.ndim = 2; },
     "bias: has shape [2,4], 2 dimensions; expected 4, [batch|1, heads|1, queries|1, keys|1]"},
    {"bias_shape", Entry::forward, [](Arguments& a) { a.in.bias.shape[1] = 2; },
     "bias: has shape [2,2,5,7]; its heads must be 1 or 4"},
    {"mask_shape", Entry::forward, [](Arguments& a) { a.in.mask.shape[3] = 8; },
     "mask: has shape [2,4,5,8]; its keys must be 1 or 7"},
    {"slopes_shape", Entry::forward, [](Arguments& a) { a.in.slopes.shape[0] = 2; },
     "slopes: has shape [2]; must be [heads] or [batch, heads] = [4]"},
    {"slopes_shape_2", Entry::forward, [](Arguments& a) { a.in.slopes.ndim = 2, a.in.slopes.shape = {4, 2, 0, 0}; },
     "slopes: has shape [4,2]; must be [batch, heads] = [2,4]"},
    {"sinks_shape", Entry::forward, [](Arguments& a) { a.in.sinks.shape[0] = 2; },
     "sinks: has shape [2]; must be [heads] = [4]"},
    {"seqused_shape", Entry::forward, [](Arguments& a) { a.in.seqused_k.shape[0] = 3; },
     "seqused_k: has shape [3]; must be [batch] = [2]"},
    {"cu_seqlens_missing", Entry::packed, [](Arguments& a) { a.in.cu_seqlens_k = {}; },
     "cu_seqlens_k: is missing; packed input needs both cu_seqlens"},
    {"cu_seqlens_q_missing", Entry::packed, [](Arguments& a) { a.in.cu_seqlens_q = {}; },
     "cu_seqlens_q: is missing; packed input needs both cu_seqlens"},
    {"cu_seqlens_dimensions", Entry::packed, [](Arguments& a) { a.in.cu_seqlens_q.ndim = 2; },
     "cu_seqlens_q: has shape [3,0], 2 dimensions; expected 1, [batch + 1]"},
    {"cu_seqlens_empty", Entry::packed, [](Arguments& a) { a.in.cu_seqlens_q.shape[0] = 0; },
     "cu_seqlens_q: has shape [0]; must be [batch + 1]"},
    {"cu_seqlens_disagree", Entry::packed, [](Arguments& a) { a.in.cu_seqlens_k.shape[0] = 4; },
     "cu_seqlens_k: has shape [4]; must be [batch + 1] = [3]"},
    {"dbias_shape", Entry::backward, [](Arguments& a) { a.grads.dbias.shape[0] = 1; },
     "dbias: has shape [1,4,5,7]; must be bias's shape = [2,4,5,7]"},
    {"dbias_without_bias", Entry::backward, [](Arguments& a) { a.in.bias = {}; },
     "dbias: is given but bias is not; there is nothing to differentiate"},
    {"dsinks_shape", Entry::backward, [](Arguments& a) { a.grads.dsinks.shape[0] = 1; },
     "dsinks: has shape [1]; must be [heads] = [4]"},
    {"dsinks_without_sinks", Entry::backward, [](Arguments& a) { a.in.sinks = {}; },
     "dsinks: is given but sinks is not; there is nothing to differentiate"},
    {"rng_shape", Entry::forward, [](Arguments& a) { a.in.rng = a.rng, a.in.rng.shape[0] = 3; },
     "rng: has shape [3]; must be [seed, offset] = [2]"},
    {"rng_type", Entry::forward, [](Arguments& a) { a.in.rng = a.rng, a.in.rng.type = Type::f64; },
     "rng: has type f64; must be i64"},

    // Strides
    {"last_stride", Entry::forward, [](Arguments& a) { a.in.k.strides[3] = 2; },
     "k: last dimension has stride 2; it must be 1"},
    {"last_stride_of_d_o", Entry::backward, [](Arguments& a) { a.saved.d_o.strides[3] = 0; },
     "d_o: last dimension has stride 0; it must be 1"},
    {"overlapping_o", Entry::forward, [](Arguments& a) { a.out.o.strides[1] = 0; },
     "o: elements of shape [2,5,4,6] with strides [120,0,6,1] share memory; outputs must not overlap themselves"},
    {"overlapping_o_by_one_element", Entry::forward, [](Arguments& a) { a.out.o.strides[1] = 23; },
     "o: elements of shape [2,5,4,6] with strides [120,23,6,1] share memory; outputs must not overlap themselves"},
    {"overlapping_lse", Entry::forward, [](Arguments& a) { a.out.lse.strides[2] = 0; },
     "lse: elements of shape [2,4,5] with strides [20,5,0] share memory; outputs must not overlap themselves"},
    {"overlapping_dbias", Entry::backward, [](Arguments& a) { a.grads.dbias.strides[0] = 0; },
     "dbias: elements of shape [2,4,5,7] with strides [0,35,7,1] share memory; outputs must not overlap themselves"},

    // Aliasing
    {"o_in_v", Entry::forward, [](Arguments& a) { a.out.o.data = a.in.v.data; },
     "o: shares memory with v; outputs must not overlap inputs or each other"},
    {"o_begins_in_lengths", Entry::packed,
     [](Arguments& a) { a.q_lengths.resize(200), a.out.o.data = a.q_lengths.data() + 2; },
     "o: shares memory with cu_seqlens_q; outputs must not overlap inputs or each other"},
    {"lse_in_o", Entry::forward, [](Arguments& a) { a.out.lse.data = a.out.o.data; },
     "lse: shares memory with o; outputs must not overlap inputs or each other"},
    {"dq_is_q", Entry::backward, [](Arguments& a) { a.grads.dq.data = a.in.q.data; },
     "dq: shares memory with q; outputs must not overlap inputs or each other"},
    {"dv_in_d_o", Entry::packed_backward, [](Arguments& a) { a.grads.dv.data = a.saved.d_o.data; },
     "dv: shares memory with d_o; outputs must not overlap inputs or each other"},
    {"dsinks_in_lse", Entry::backward, [](Arguments& a) { a.grads.dsinks.data = a.saved.lse.data; },
     "dsinks: shares memory with lse; outputs must not overlap inputs or each other"},
    {"dk_in_dq", Entry::backward, [](Arguments& a) { a.grads.dk.data = a.grads.dq.data; },
     "dk: shares memory with dq; outputs must not overlap inputs or each other"},
    {"workspace_in_q", Entry::backward,
     [](Arguments& a) { a.execution.workspace = a.in.q.data, a.execution.workspace_bytes = huge; },
     "workspace: shares memory with q; it must lie apart from every tensor of the call"},
    {"workspace_in_dv", Entry::backward,
     [](Arguments& a) {
       static std::byte room[1 << 22];
       a.grads.dv.data = a.execution.workspace = room, a.execution.workspace_bytes = sizeof room;
       a.execution.threads = 1, a.execution.kernel = TESSERA_TEST_KERNEL;
     },
     "workspace: shares memory with dv; it must lie apart from every tensor of the call"},
    {"merge_into_a_neighbour", Entry::merge,
     [](Arguments& a) { a.out.o.data = static_cast<float*>(a.parts[1].o.data) + 6; },
     "merged.o: shares memory with partials[1].o; outputs must not overlap inputs or each other"},
    {"merge_lse_in_o", Entry::merge, [](Arguments& a) { a.out.lse.data = a.out.o.data; },
     "merged.lse: shares memory with merged.o; outputs must not overlap inputs or each other"},
    {"merge_lse_in_a_part", Entry::merge, [](Arguments& a) { a.out.lse.data = a.parts[0].o.data; },
     "merged.lse: shares memory with partials[0].o; outputs must not overlap inputs or each other"},
    {"mask_in_rng", Entry::dropout_mask, [](Arguments& a) { a.dropout_mask.data = a.rng.data; },
     "mask: shares memory with rng; outputs must not overlap inputs or each other"},

    {"stride_beyond_memory", Entry::forward, [](Arguments& a) { a.in.k.strides[1] = std::int64_t{1} << 53; },
     "k: has shape [2,7,2,8] and strides [112,9007199254740992,8,1]; its elements must lie within 2^56 bytes"},
    {"strides_add_up_beyond_memory", Entry::backward,
     [](Arguments& a) { a.saved.lse.strides = {std::int64_t{1} << 53, std::int64_t{1} << 52, -1, 0}; },
     "lse: has shape [2,4,5] and strides [9007199254740992,4503599627370496,-1]; its elements must lie within 2^56 "
     "bytes"},
    {"stride_of_the_smallest_integer", Entry::forward,
     [](Arguments& a) { a.in.slopes.strides[0] = std::numeric_limits<std::int64_t>::min(); },
     "slopes: has shape [4] and strides [-9223372036854775808]; its elements must lie within 2^56 bytes"},
    {"stride_of_the_mask", Entry::dropout_mask, [](Arguments& a) { a.dropout_mask.strides[0] = -most_stride; },
     "mask: has shape [2,4,5,7] and strides [-9223372036854775807,35,7,1]; its elements must lie within 2^56 bytes"},
    {"stride_of_a_partial", Entry::merge, [](Arguments& a) { a.parts[1].o.strides[2] = most_stride; },
     "partials[1].o: has shape [2,5,4,6] and strides [120,24,9223372036854775807,1]; its elements must lie within "
     "2^56 bytes"},

    // Limits
    {"most_queries", Entry::backward,
     [](Arguments& a) {
       a.in = {}, a.in.q = tokens_without_memory((1LL << 48) + 1), a.in.k = a.in.v = tokens_without_memory(1);
     },
     "q: has 281474976710657 tokens; at most 281474976710656 are allowed"},
    {"most_keys", Entry::forward,
     [](Arguments& a) {
       a.in = {}, a.in.q = tokens_without_memory(1), a.in.k = a.in.v = tokens_without_memory((1LL << 48) + 1);
     },
     "k: has 281474976710657 tokens; at most 281474976710656 are allowed"},
    {"most_sequences", Entry::forward,
     [](Arguments& a) { a.in.q.shape[0] = a.in.k.shape[0] = a.in.v.shape[0] = 1LL << 31; },
     "q: has 2147483648 sequences; at most 2147483647 are allowed"},
    {"most_packed_sequences", Entry::packed,
     [](Arguments& a) { a.in.cu_seqlens_q.shape[0] = a.in.cu_seqlens_k.shape[0] = (1LL << 31) + 1; },
     "cu_seqlens_q: has 2147483648 sequences; at most 2147483647 are allowed"},
    {"most_heads", Entry::forward, [](Arguments& a) { a.in.q.shape[2] = 1LL << 31; },
     "q: has 2147483648 heads; at most 2147483647 are allowed"},
    {"most_key_heads", Entry::forward,
     [](Arguments& a) { a.in.q.shape[2] = 0, a.in.k.shape[2] = a.in.v.shape[2] = 1LL << 31; },
     "k: has 2147483648 heads; at most 2147483647 are allowed"},
    {"most_keys_of_a_packed_mask", Entry::packed,
     [](Arguments& a) { a.in.mask.shape[3] = (1LL << 48) + 1, a.in.mask.strides[3] = 0; },
     "mask: has 281474976710657 keys; at most 281474976710656 are allowed"},
    {"furthest_row", Entry::forward, [](Arguments& a) { a.options.row0 = (1LL << 48) + 1; },
     "row0: is 281474976710657; must be from -2^48 to 2^48"},
    {"furthest_column", Entry::backward, [](Arguments& a) { a.options.col0 = -(1LL << 48) - 1; },
     "col0: is -281474976710657; must be from -2^48 to 2^48"},
    {"furthest_head", Entry::forward, [](Arguments& a) { a.options.head0 = 1LL << 62; },
     "head0: is 4611686018427387904; must be from -2^48 to 2^48"},
    {"furthest_batch", Entry::packed,
     [](Arguments& a) { a.options.batch0 = std::numeric_limits<std::int64_t>::min(); },
     "batch0: is -9223372036854775808; must be from -2^48 to 2^48"},
    {"furthest_diagonal", Entry::forward,
     [](Arguments& a) { a.options.alignment = Alignment::offset, a.options.diagonal_offset = most_stride; },
     "diagonal_offset: is 9223372036854775807; must be from -2^48 to 2^48"},
    {"furthest_row_of_the_mask", Entry::dropout_mask, [](Arguments& a) { a.options.row0 = most_stride; },
     "row0: is 9223372036854775807; must be from -2^48 to 2^48"},
    {"workspace_beyond_addresses", Entry::backward,
     [](Arguments& a) {
       Tensor rows = tokens_without_memory(1LL << 48);
       rows.shape[2] = 1 << 10;
       a.in = {}, a.grads = {}, a.saved.d_lse = {};
       a.in.q = a.saved.o = a.saved.d_o = rows, a.in.k = a.in.v = a.grads.dk = tokens_without_memory(1);
       a.saved.lse = Tensor(fake_memory, Type::f32, {1, 1 << 10, 1LL << 48});
       a.saved.lse.strides = {0, 0, 0, 0};
       a.execution.threads = 1, a.execution.kernel = TESSERA_TEST_KERNEL;
     },
     "workspace: more than 2^56 bytes are needed, and no process can have them", TESSERA_OUT_OF_MEMORY},

    // Options and execution
    {"scale", Entry::forward, [](Arguments& a) { a.options.scale = nan; },
     "scale: is nan; must be a finite number of size 1e18 at most"},
    {"softcap", Entry::backward, [](Arguments& a) { a.options.softcap = -2; },
     "softcap: is -2; must be 0 (none) or a positive number from 1e-18 to 1e18"},
    {"alignment", Entry::forward, [](Arguments& a) { a.options.alignment = static_cast<Alignment>(3); },
     "alignment: is 3; must be 0 (bottom right), 1 (top left) or 2 (offset)"},
    {"diagonal_offset", Entry::forward, [](Arguments& a) { a.options.diagonal_offset = 4; },
     "diagonal_offset: is 4 but alignment is not offset; it would be ignored"},
    {"window_left", Entry::forward, [](Arguments& a) { a.options.window_left = -2; },
     "window_left: is -2; must be -1 (no bound) or at least 0"},
    {"window_right", Entry::forward, [](Arguments& a) { a.options.window_right = -9; },
     "window_right: is -9; must be -1 (no bound) or at least 0"},
    {"max_seqlen", Entry::packed, [](Arguments& a) { a.options.max_seqlen_k = -2; },
     "max_seqlen_k: is -2; must be -1 (no bound) or at least 0"},
    {"dropout", Entry::forward, [](Arguments& a) { a.options.dropout = 1; }, "dropout: is 1; must be in [0, 1)"},
    {"dropout_nan", Entry::forward, [](Arguments& a) { a.options.dropout = nan; },
     "dropout: is nan; must be in [0, 1)"},
    {"dropout_everything", Entry::forward, [](Arguments& a) { a.options.dropout = 0.999995; },
     "dropout: is 0.999995; rounded to 1/65536 it drops everything; use a smaller one"},
    {"two_seeds", Entry::forward, [](Arguments& a) { a.in.rng = a.rng, a.options.seed = 5; },
     "seed: is 5 with offset 0 while rng is given; use one or the other"},
    {"threads", Entry::forward, [](Arguments& a) { a.execution.threads = -1; },
     "threads: is -1; must be 0 (all) or positive"},
    {"device", Entry::forward, [](Arguments& a) { a.execution.device = gpu; },
     "device: is cuda:3 but q is on cpu; they must agree"},
    {"kernel", Entry::forward, [](Arguments& a) { a.execution.kernel = "fast"; },
     "kernel: is 'fast'; must be one of KERNELS"},
    {"kernel_refuses", Entry::forward,
     [](Arguments& a) {
       for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.out.o}) t->type = Type::f64;
       a.execution.kernel = TESSERA_TEST_KERNEL;
     },
     "no kernel can run this: " TESSERA_TEST_KERNEL ": type is f64; this kernel takes f32, f16 and bf16",
     TESSERA_UNSUPPORTED},

    // What only a run needs
    {"null_data", Entry::forward, [](Arguments& a) { a.in.q.data = nullptr; },
     "q: data is null but its shape is [2,5,4,8]; null is allowed only without elements"},
    {"null_gradient", Entry::backward, [](Arguments& a) { a.grads.dv.data = nullptr; },
     "dv: data is null but its shape is [2,7,2,6]; null is allowed only without elements"},
    {"misaligned", Entry::forward, [](Arguments& a) { a.in.v.data = static_cast<std::byte*>(a.in.v.data) + 2; },
     "v: data is not aligned to its elements of 4 bytes"},
    {"seqused_negative", Entry::forward, [](Arguments& a) { a.q_lengths[1] = -1; },
     "seqused_q: entry 1 is -1; must be from 0 to the sequence's length 5"},
    {"seqused_too_long", Entry::backward, [](Arguments& a) { a.k_lengths[0] = 8; },
     "seqused_k: entry 0 is 8; must be from 0 to the sequence's length 7"},
    {"cu_seqlens_negative", Entry::packed, [](Arguments& a) { a.q_lengths[0] = -1; },
     "cu_seqlens_q: entry 0 is -1; must not be negative"},
    {"cu_seqlens_decrease", Entry::packed_backward, [](Arguments& a) { a.k_lengths = {0, 5, 4}; },
     "cu_seqlens_k: entry 2 is 4 after 5; entries must not decrease"},
    {"cu_seqlens_too_far", Entry::packed, [](Arguments& a) { a.k_lengths[2] = 8; },
     "cu_seqlens_k: entry 2 is 8 but there are only 7 tokens"},
    {"max_seqlen_too_small", Entry::packed, [](Arguments& a) { a.options.max_seqlen_q = 2; },
     "max_seqlen_q: is 2 but sequence 1 has length 3; it must be an upper bound"},
    {"packed_bias_too_small", Entry::packed, [](Arguments& a) { a.in.bias.shape[3] = 3; },
     "bias: has shape [2,4,5,3] but sequence 0 has 2 queries and 4 keys; its last two dimensions must be 1 or at "
     "least every length"},
    {"workspace_bytes", Entry::plan_forward,
     [](Arguments& a) { a.execution.workspace = fake_memory, a.execution.workspace_bytes = 64; },
     "workspace_bytes: is 64 but this plan needs WORKSPACE"},
    {"workspace_beyond_memory", Entry::backward,
     [](Arguments& a) {
       const Tensor row(fake_memory, Type::f32, {1, huge, 1, 64}), key(fake_memory, Type::f32, {1, 1, 1, 64});
       a.in = {}, a.grads = {}, a.saved.d_lse = {};
       a.in.q = a.saved.o = a.saved.d_o = a.grads.dq = row, a.in.k = a.in.v = key;
       a.grads.dq.data = reinterpret_cast<void*>(std::uintptr_t{1} << 60);
       a.saved.lse = Tensor(fake_memory, Type::f32, {1, 1, huge});
       a.execution.threads = 1, a.execution.kernel = TESSERA_TEST_KERNEL;
     },
     "workspace: WORKSPACE bytes could not be allocated", TESSERA_OUT_OF_MEMORY},

    // Plans
    {"plan_alignment", Entry::plan_forward,
     [](Arguments& a) { a.in.q.data = static_cast<std::byte*>(a.in.q.data) + 4; },
     "plan: was made for pointers and strides aligned to 8 bytes but these are aligned to 4; plan with the tensors "
     "that are run"},
    {"plan_problem", Entry::plan_forward,
     [](Arguments& a) { a.in.bias = a.in.mask = a.in.slopes = a.in.sinks = a.in.seqused_q = a.in.seqused_k = {}; },
     "plan: was made for forward, cpu, f32, B=2 Nq=5 Nk=7 Hq=4 Hk=2 D=8 Dv=6, scale 0.353553, bottom right, mask u8 "
     "[2,4,5,7], used lengths, ALiBi, bias f32 [2,4,5,7], sinks, O f32, LSE, aligned to 8 bytes but the call asks "
     "for forward, cpu, f32, B=2 Nq=5 Nk=7 Hq=4 Hk=2 D=8 Dv=6, scale 0.353553, O f32, LSE, aligned to 8 bytes"},

    // Merge and the dropout mask
    {"merge_nothing", Entry::merge, [](Arguments& a) { a.parts.clear(); },
     "n: is 0; merging needs at least one partial result"},
    {"merge_into_nothing", Entry::merge, [](Arguments& a) { a.out.o = {}; }, "merged.o: is missing; it is required"},
    {"merge_without_lse", Entry::merge, [](Arguments& a) { a.parts[1].lse = {}; },
     "partials[1].lse: is missing; it is required"},
    {"merge_elsewhere", Entry::merge, [](Arguments& a) { a.out.o.device = gpu; },
     "merged.lse: is on cpu but the call runs on cuda:3; all tensors must be there"},
    {"merge_part_elsewhere", Entry::merge, [](Arguments& a) { a.parts[0].o.device = gpu; },
     "partials[0].o: is on cuda:3 but the call runs on cpu; all tensors must be there"},
    {"merge_type", Entry::merge, [](Arguments& a) { a.parts[1].o.type = Type::i32; },
     "partials[1].o: has type i32; must be f64, f32, f16 or bf16"},
    {"merge_lse_type", Entry::merge, [](Arguments& a) { a.parts[1].lse.type = Type::i32; },
     "partials[1].lse: has type i32; must be f32"},
    {"merge_dimensions", Entry::merge, [](Arguments& a) { a.out.o.ndim = 2; },
     "merged.o: has shape [2,5]; must be [batch, tokens, heads, dim] or [tokens, heads, dim]"},
    {"merge_shape", Entry::merge, [](Arguments& a) { a.parts[0].o.shape[3] = 5; },
     "partials[0].o: has shape [2,5,4,5] but the merged o has [2,5,4,6]; all must agree"},
    {"merge_no_dims", Entry::merge, [](Arguments& a) { a.out.o.shape[3] = 0; },
     "merged.o: head_dim is 0; must be from 1 to 512"},
    {"merge_sequences", Entry::merge, [](Arguments& a) { a.out.o.shape = {std::int64_t{1} << 31, 0, 4, 6}; },
     "merged.o: has 2147483648 sequences; at most 2147483647 are allowed"},
    {"merge_tokens", Entry::merge, [](Arguments& a) { a.out.o.shape = {0, (std::int64_t{1} << 48) + 1, 4, 6}; },
     "merged.o: has 281474976710657 tokens; at most 281474976710656 are allowed"},
    {"merge_heads", Entry::merge, [](Arguments& a) { a.out.o.shape = {0, 5, std::int64_t{1} << 31, 6}; },
     "merged.o: has 2147483648 heads; at most 2147483647 are allowed"},
    {"merge_lse_shape", Entry::merge, [](Arguments& a) { a.out.lse.shape[1] = 3; },
     "merged.lse: has shape [2,3,5]; must be [batch, heads, queries] = [2,4,5]"},
    {"merge_overlap", Entry::merge, [](Arguments& a) { a.out.lse.strides[0] = 0; },
     "merged.lse: elements of shape [2,4,5] with strides [0,5,1] share memory; outputs must not overlap themselves"},
    {"merge_null", Entry::merge, [](Arguments& a) { a.parts[1].o.data = nullptr; },
     "partials[1].o: data is null but its shape is [2,5,4,6]; null is allowed only without elements"},
    {"mask_missing", Entry::dropout_mask, [](Arguments& a) { a.dropout_mask = {}; },
     "mask: is missing; it is required"},
    {"mask_elsewhere", Entry::dropout_mask, [](Arguments& a) { a.dropout_mask.device = gpu; },
     "mask: is on cuda:3; this call runs on cpu tensors only", TESSERA_UNSUPPORTED},
    {"mask_dimensions", Entry::dropout_mask, [](Arguments& a) { a.dropout_mask.ndim = 3; },
     "mask: has shape [2,4,5], 3 dimensions; expected 4, [batch, heads, queries, keys]"},
    {"mask_of_floats", Entry::dropout_mask, [](Arguments& a) { a.dropout_mask.type = Type::f32; },
     "mask: has type f32; must be u8"},
    {"mask_threads", Entry::dropout_mask, [](Arguments& a) { a.execution.threads = -4; },
     "threads: is -4; must be 0 (all) or positive"},
    {"mask_dropout", Entry::dropout_mask, [](Arguments& a) { a.options.dropout = -0.5; },
     "dropout: is -0.5; must be in [0, 1)"},
    {"mask_rng_null", Entry::dropout_mask, [](Arguments& a) { a.rng.data = nullptr; },
     "rng: data is null but its shape is [2]; null is allowed only without elements"},
};
// clang-format on

}  // namespace tessera::test
