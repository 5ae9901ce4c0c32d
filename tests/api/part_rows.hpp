// SPDX-License-Identifier: Apache-2.0
// The rows of check_test.cpp for parts of a problem: the carried state, positions, where it is cut; see check_rows.hpp.
// Included by tests/api/check_test.cpp only. Implements docs/algorithm.md, "Carried state" and "Parts of a problem".
#pragma once

#include "tests/api/check_rows.hpp"

namespace tessera::test {

// The same part from a state, as its second call.
inline void continue_from(Arguments& a, const State& state) { a.in.state = state, a.in.sinks = {}; }

inline void put_on_a_gpu(Arguments& a) {
  for (Tensor* t : {&a.in.q, &a.in.k, &a.in.v, &a.in.seqused_q, &a.in.seqused_k, &a.in.seq_row0, &a.in.seq_col0,
                    &a.in.seq_batch0, &a.out.state.o, &a.out.state.m, &a.out.state.l})
    t->device = gpu;
  a.in.bias = a.in.mask = a.in.slopes = a.in.sinks = {};
  a.execution.kernel = "naive";
}

// clang-format off
inline const Row part_rows[] = {
    // The state
    {"state_incomplete", Entry::part, [](Arguments& a) { a.out.state.m = {}; },
     "outputs.state_m: is missing; a state is state_o, state_m and state_l"},
    {"state_in_incomplete", Entry::part, [](Arguments& a) { continue_from(a, {.o = a.state.o, .m = a.state.m}); },
     "inputs.state_l: is missing; a state is state_o, state_m and state_l"},
    {"state_o_type", Entry::part, [](Arguments& a) { a.out.state.o.type = Type::bf16; },
     "outputs.state_o: has type bf16; must be f32"},
    {"state_o_shape", Entry::part, [](Arguments& a) { a.out.state.o.shape[3] = 5; },
     "outputs.state_o: has shape [2,5,4,5]; must be [batch, tokens, heads, dim] = [2,5,4,6]"},
    {"state_m_type", Entry::part, [](Arguments& a) { continue_from(a, a.state), a.in.state.m.type = Type::f64; },
     "inputs.state_m: has type f64; must be f32"},
    {"state_m_shape", Entry::part, [](Arguments& a) { a.out.state.m.shape[2] = 4; },
     "outputs.state_m: has shape [2,4,4]; must be [batch, heads, queries] = [2,4,5]"},
    {"state_l_type", Entry::part, [](Arguments& a) { a.out.state.l.type = Type::f32; },
     "outputs.state_l: has type f32; must be f64"},
    {"state_elsewhere", Entry::part, [](Arguments& a) { a.out.state.l.device = gpu; },
     "outputs.state_l: is on cuda:3 but the call runs on cpu; all tensors must be there"},
    {"state_dimensions", Entry::part, [](Arguments& a) { a.out.state.o.ndim = 5; },
     "outputs.state_o: has 5 dimensions; tensors have 1 to 4"},
    {"state_beside_o", Entry::part, [](Arguments& a) { a.out.o = a.in.q, a.out.o.shape[3] = 6; },
     "o: is given beside outputs.state_o; a call ends with O or with its state"},
    {"state_beside_lse", Entry::part, [](Arguments& a) { a.out.lse = a.state.m; },
     "lse: is given beside outputs.state_o; the call that ends with O writes it"},
    {"state_and_sinks", Entry::part, [](Arguments& a) { a.in.state = a.state; },
     "sinks: are given beside inputs.state_o; the call that starts without a state counts them"},
    {"state_of_the_backward_pass", Entry::backward, [](Arguments& a) { a.in.state = a.state; },
     "inputs.state_o: is given to the backward pass; only the forward pass carries a state"},
    {"merge_state", Entry::merge, [](Arguments& a) { a.parts[1].state = a.state; },
     "partials[1].state_o: is given; merging takes O and LSE"},
    {"state_over_another", Entry::part,
     [](Arguments& a) { continue_from(a, a.state), a.in.state.l.data = a.state.o.data; },
     "outputs.state_o: shares memory with inputs.state_l; outputs must not overlap inputs or each other"},
    {"state_over_itself_shifted", Entry::part,
     [](Arguments& a) { continue_from(a, a.state), a.in.state.l.data = static_cast<double*>(a.state.l.data) + 1; },
     "outputs.state_l: shares memory with inputs.state_l; outputs must not overlap inputs or each other"},
    {"state_over_its_sum", Entry::part, [](Arguments& a) { a.out.state.m.data = a.state.l.data; },
     "outputs.state_l: shares memory with outputs.state_m; outputs must not overlap inputs or each other"},
    {"state_null", Entry::part, [](Arguments& a) { a.out.state.m.data = nullptr; },
     "outputs.state_m: data is null but its shape is [2,4,5]; null is allowed only without elements"},
    {"state_expanded", Entry::part, [](Arguments& a) { a.out.state.m.strides[1] = 0; },
     "outputs.state_m: elements of shape [2,4,5] with strides [20,0,1] share memory; outputs must not overlap "
     "themselves"},

    // Positions
    {"position_type", Entry::part, [](Arguments& a) { a.in.seq_row0.type = Type::i32; },
     "seq_row0: has type i32; must be i64"},
    {"position_shape", Entry::part, [](Arguments& a) { a.in.seq_col0.shape[0] = 1; },
     "seq_col0: has shape [1]; must be [batch] = [2]"},
    {"position_too_far", Entry::part, [](Arguments& a) { a.positions[1] = (std::int64_t{1} << 48) + 1; },
     "seq_row0: entry 1 is 281474976710657; must be from -2^48 to 2^48"},
    {"sequence_too_far", Entry::part,
     [](Arguments& a) { a.in.seq_row0 = a.in.seq_col0 = {}, a.positions[0] = -(std::int64_t{1} << 48) - 1; },
     "seq_batch0: entry 0 is -281474976710657; must be from -2^48 to 2^48"},

    // Where a problem is cut
    {"cut_inside_a_tile_of_keys", Entry::part,
     [](Arguments& a) { a.in.seq_row0 = {}, a.positions[1] = 200; },
     "col0: sequence 1 begins at key 200; with part_invariant it must be a multiple of 192"},
    {"cut_inside_a_tile_by_options", Entry::forward,
     [](Arguments& a) { a.options.part_invariant = true, a.options.col0 = 64; },
     "col0: sequence 0 begins at key 64; with part_invariant it must be a multiple of 192"},
    {"cut_inside_a_tile_of_queries", Entry::part, [](Arguments& a) { a.options.row0 = 10; },
     "row0: sequence 0 begins at query 202; with part_invariant it must be a multiple of 64"},
    {"segments_before_the_first_query", Entry::part, [](Arguments& a) { a.options.segment_rows = 128; },
     "row0: sequence 1 begins at query -384; with segment_rows it must not be negative"},
    {"negative_segments", Entry::part, [](Arguments& a) { a.options.segment_rows = -64; },
     "segment_rows: is -64; must be 0 (none) or positive"},
    {"segments_alone", Entry::backward, [](Arguments& a) { a.options.segment_rows = 64; },
     "segment_rows: is 64 but part_invariant is not set; it would be ignored"},
    {"segments_and_tiles", Entry::part,
     [](Arguments& a) { a.options.segment_rows = 100, a.execution.kernel = TESSERA_TEST_KERNEL; },
     "no kernel can run this: " TESSERA_TEST_KERNEL ": segment_rows is 100; must be a multiple of 64",
     TESSERA_UNSUPPORTED},
    {"parts_on_the_reference", Entry::part, [](Arguments& a) { a.execution.kernel = "reference"; },
     "no kernel can run this: reference: part_invariant is set; the reference rounds to float64 in an order of its own "
     "in every call",
     TESSERA_UNSUPPORTED},
    {"parts_on_a_gpu", Entry::part, put_on_a_gpu,
     "no kernel can run this: naive: the call is a part (to a state, positions of each sequence, part-invariant); "
     "this kernel takes positions that all sequences share, hopper states in the forward pass, cpu kernels parts of "
     "every kind",
     TESSERA_UNSUPPORTED},

    // Multiprocessors
    {"negative_margin", Entry::forward, [](Arguments& a) { a.execution.sm_margin = -1; },
     "sm_margin: is -1; must be 0 (none) or positive"},
    {"margin_of_a_processor", Entry::forward, [](Arguments& a) { a.execution.sm_margin = 4; },
     "sm_margin: is 4 but q is on cpu; only GPUs have multiprocessors"},
};
// clang-format on

}  // namespace tessera::test
