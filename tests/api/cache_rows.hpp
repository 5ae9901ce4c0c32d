// The rows of check_test.cpp for keys and values with types of their own and scales, and for qv; see check_rows.hpp.
// Included by tests/api/check_test.cpp only. Implements docs/algorithm.md, "Types and scales of keys and values".
#pragma once

#include "tests/api/check_rows.hpp"

namespace tessera::test {

inline float some_scales[64] = {};

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
    {"scale_dimensions", Entry::forward, [](Arguments& a) { a.in.k_scale = scales({2, 7, 2, 1}); },
     "k_scale: has shape [2,7,2,1], 4 dimensions; expected 3, one per key and head, or fewer"},
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

    // What only a forward pass on the CPU takes
    {"qv_backward", Entry::backward, [](Arguments& a) { a.in.qv = a.saved.d_o; },
     "qv: is given; there is no backward pass through it", TESSERA_UNSUPPORTED},
    {"qv_on_a_gpu", Entry::forward,
     [](Arguments& a) {
       for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.seqused_q, &a.in.seqused_k, &a.out.o, &a.out.lse})
         t->device = gpu;
       a.in.bias = a.in.mask = a.in.slopes = a.in.sinks = {};
       a.in.qv = a.saved.d_o, a.in.qv.device = gpu, a.execution.kernel = "naive";
     },
     "no kernel can run this: naive: qv is given; GPU kernels make scores of q and k alone, cpu kernels take it",
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
     "no kernel can run this: naive: k or v has another type than q, or scales; GPU kernels take neither, cpu kernels "
     "both",
     TESSERA_UNSUPPORTED},
    {"f64_keys", Entry::forward,
     [](Arguments& a) { a.in.k.type = Type::f64, a.execution.kernel = TESSERA_TEST_KERNEL; },
     "no kernel can run this: " TESSERA_TEST_KERNEL ": type is f64; this kernel takes f32, f16 and bf16",
     TESSERA_UNSUPPORTED},
};
// clang-format on

}  // namespace tessera::test
