// SPDX-License-Identifier: Apache-2.0
// The rows of check_test.cpp for keys and values with types of their own and scales, for qv, trees and positions; see
// check_rows.hpp. Included by tests/api/check_test.cpp only. Implements docs/algorithm.md, "Types and scales of keys
// and values".
#pragma once

#include "tests/api/check_rows.hpp"

namespace tessera::test {

inline float some_scales[64] = {}, some_rows[2 * 40 * 4 * 6] = {};

inline std::int32_t some_words[256] = {};

inline Tensor words(std::initializer_list<std::int64_t> shape) { return {some_words, Type::i32, shape}; }
inline Tensor scales(std::initializer_list<std::int64_t> shape) { return {some_scales, Type::f32, shape}; }

// clang-format off
inline const Row cache_rows[] = {
    {"scale_type", Entry::forward,
     [](Arguments& a) { a.in.k_scale = scales({1}), a.in.k_scale.type = Type::f16; },
     "k_scale: has type f16; must be f32"},
    {"scale_of_heads", Entry::forward, [](Arguments& a) { a.in.v_scale = scales({4}); },
     "v_scale: has shape [4]; must be [1] or [heads] = [2]"},
    {"scale_of_sequences", Entry::forward, [](Arguments& a) { a.in.k_scale = scales({2, 1}); },
     "k_scale: has shape [2,1]; must be [batch, heads] = [2,2]"},
    {"scale_of_keys", Entry::forward, [](Arguments& a) { a.in.k_scale = scales({2, 6, 2}); },
     "k_scale: has shape [2,6,2]; must be [batch, tokens, heads] = [2,7,2]"},
    {"scale_of_packed_keys", Entry::packed, [](Arguments& a) { a.in.v_scale = scales({7, 1, 2}); },
     "v_scale: has shape [7,1,2]; must be [1, tokens, heads] = [1,7,2]"},
    {"scale_of_pages", Entry::paged, [](Arguments& a) { a.in.k_scale = scales({3, 4, 2}); },
     "k_scale: has shape [3,4,2]; must be [pages, tokens, heads] = [4,3,2]"},
    {"scale_of_dims", Entry::forward, [](Arguments& a) { a.in.k_scale = scales({2, 7, 2, 2}); },
     "k_scale: has shape [2,7,2,2]; must be [batch, tokens, heads, dims / 128] = [2,7,2,1]"},
    {"scale_of_packed_dims", Entry::packed, [](Arguments& a) { a.in.v_scale = scales({1, 7, 2, 3}); },
     "v_scale: has shape [1,7,2,3]; must be [1, tokens, heads, dims / 128] = [1,7,2,1]"},
    {"scale_of_paged_dims", Entry::paged, [](Arguments& a) { a.in.v_scale = scales({4, 3, 1, 1}); },
     "v_scale: has shape [4,3,1,1]; must be [pages, tokens, heads, dims / 128] = [4,3,2,1]"},
    {"scale_elsewhere", Entry::forward,
     [](Arguments& a) { a.in.k_scale = scales({1}), a.in.k_scale.device = gpu; },
     "k_scale: is on cuda:3 but the call runs on cpu; all tensors must be there"},
    {"scale_null", Entry::forward, [](Arguments& a) { a.in.v_scale = scales({2}), a.in.v_scale.data = nullptr; },
     "v_scale: data is null but its shape is [2]; null is allowed only without elements"},
    {"scale_in_the_output", Entry::forward,
     [](Arguments& a) { a.in.k_scale = scales({2}), a.in.k_scale.data = a.out.o.data; },
     "o: shares memory with k_scale; outputs must not overlap inputs or each other"},

    {"qv_shape", Entry::forward, [](Arguments& a) { a.in.qv = a.in.q; },
     "qv: has shape [2,5,4,8]; must be [batch, tokens, heads, dim] = [2,5,4,6]"},
    {"qv_type", Entry::forward, [](Arguments& a) { a.in.qv = a.saved.d_o, a.in.qv.type = Type::bf16; },
     "qv: has type bf16; must be f32"},
    {"qv_in_the_output", Entry::forward, [](Arguments& a) { a.in.qv = a.out.o; },
     "o: shares memory with qv; outputs must not overlap inputs or each other"},

    {"tree_type", Entry::forward, [](Arguments& a) { a.in.tree_mask = scales({2, 5, 1}); },
     "tree_mask: has type f32; must be i32"},
    {"tree_dimensions", Entry::forward, [](Arguments& a) { a.in.tree_mask = words({5, 1}); },
     "tree_mask: has shape [5,1], 2 dimensions; expected 3, [batch, queries, words]"},
    {"tree_shape", Entry::forward, [](Arguments& a) { a.in.tree_mask = words({2, 4, 1}); },
     "tree_mask: has shape [2,4,1]; must be [batch, queries, words] = [2,5,1]"},
    {"packed_tree_shape", Entry::packed, [](Arguments& a) { a.in.tree_mask = words({4, 1}); },
     "tree_mask: has shape [4,1]; must be [tokens, words] = [5,1]"},
    {"tree_without_words", Entry::forward, [](Arguments& a) { a.in.tree_mask = words({2, 5, 0}); },
     "tree_mask: has rows of 0 words; a row has at least 1"},
    {"tree_too_narrow", Entry::forward,
     [](Arguments& a) {
       a.in.q.shape[1] = 40, a.in.q.strides[1] = 0;  // 40 times the same query
       a.out.o = Tensor(some_rows, Type::f32, {2, 40, 4, 6}), a.out.lse = {};
       a.q_lengths = {33, 3}, a.in.bias = a.in.mask = {}, a.in.tree_mask = words({2, 40, 1});
     },
     "tree_mask: has rows of 1 words but sequence 0 has 33 queries; a word holds 32"},
    {"positions_type", Entry::forward, [](Arguments& a) { a.in.positions = scales({2, 5}); },
     "positions: has type f32; must be i32"},
    {"positions_shape", Entry::forward, [](Arguments& a) { a.in.positions = words({5}); },
     "positions: has shape [5]; must be [batch, queries] = [2,5]"},
    {"packed_positions_shape", Entry::packed, [](Arguments& a) { a.in.positions = words({2, 5}); },
     "positions: has shape [2,5]; must be [tokens] = [5]"},

    // What only a forward pass on the CPU takes
    {"tree_backward", Entry::backward, [](Arguments& a) { a.in.tree_mask = words({2, 5, 1}); },
     "tree_mask: is given; there is no backward pass with it", TESSERA_UNSUPPORTED},
    {"tree_on_a_gpu", Entry::forward,
     [](Arguments& a) {
       for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.seqused_q, &a.in.seqused_k, &a.out.o, &a.out.lse})
         t->device = gpu;
       a.in.bias = a.in.mask = a.in.slopes = a.in.sinks = {};
       a.in.positions = words({2, 5}), a.in.positions.device = gpu, a.execution.kernel = "naive";
     },
     "no kernel can run this: naive: a tree mask or positions are given; this kernel takes neither",
     TESSERA_UNSUPPORTED},
    {"qv_backward", Entry::backward, [](Arguments& a) { a.in.qv = a.saved.d_o; },
     "qv: is given; there is no backward pass with it", TESSERA_UNSUPPORTED},
    {"qv_on_a_gpu", Entry::forward,
     [](Arguments& a) {
       for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.seqused_q, &a.in.seqused_k, &a.out.o, &a.out.lse})
         t->device = gpu;
       a.in.bias = a.in.mask = a.in.slopes = a.in.sinks = {};
       a.in.qv = a.saved.d_o, a.in.qv.device = gpu, a.execution.kernel = "naive";
     },
     "no kernel can run this: naive: qv is given; this kernel makes scores of q and k alone",
     TESSERA_UNSUPPORTED},
    {"scaled_backward", Entry::backward, [](Arguments& a) { a.in.v_scale = scales({1}); },
     "v_scale: is given; there is no backward pass through scaled keys", TESSERA_UNSUPPORTED},
    {"k_type_backward", Entry::backward, [](Arguments& a) { a.in.k.type = Type::e4m3; },
     "k: has type e4m3 but q has f32; the backward pass takes one type for q, k and v", TESSERA_UNSUPPORTED},
    {"v_type_backward", Entry::backward, [](Arguments& a) { a.in.v.type = Type::bf16; },
     "v: has type bf16 but q has f32; the backward pass takes one type for q, k and v", TESSERA_UNSUPPORTED},
    {"types_on_a_gpu", Entry::forward,
     [](Arguments& a) {
       for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.seqused_q, &a.in.seqused_k, &a.out.o, &a.out.lse})
         t->device = gpu;
       a.in.bias = a.in.mask = a.in.slopes = a.in.sinks = {};
       a.in.v.type = Type::i8, a.execution.kernel = "naive";
     },
     "no kernel can run this: naive: k or v has another type than q, or scales; this kernel takes neither",
     TESSERA_UNSUPPORTED},
    {"f64_keys", Entry::forward,
     [](Arguments& a) { a.in.k.type = Type::f64, a.execution.kernel = TESSERA_TEST_KERNEL; },
     "no kernel can run this: " TESSERA_TEST_KERNEL ": type is f64; this kernel takes f32, f16 and bf16",
     TESSERA_UNSUPPORTED},
};
// clang-format on

}  // namespace tessera::test
