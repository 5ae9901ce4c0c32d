// SPDX-License-Identifier: Apache-2.0
// Tessera's C++20 API: exact attention, forward and backward, over non-owning tensor views.
// Everything here is inline over the C ABI of tessera.h: no C++ type crosses the library's boundary, so a program and
// the library may be built by different compilers and standard libraries. What is computed: docs/algorithm.md.
#pragma once

#include <deque>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tessera.h"
#include "tessera/types.hpp"

namespace tessera {

// The only exception that these functions throw (besides std::bad_alloc). what() names the argument, its value and
// the rule.
class Error : public std::runtime_error {
 public:
  Error(tessera_status status, const std::string& message) : std::runtime_error(message), code(status) {}
  tessera_status status() const noexcept { return code; }

 private:
  tessera_status code;
};

// Conversion of the C++ structs to those of the C ABI. Not part of the API.
namespace detail {

inline void check(tessera_status status) {
  if (status != TESSERA_OK) throw Error(status, tessera_last_error());
}

// A tensor of the C ABI. It must not move: other structs hold pointers to it.
class CTensor {
 public:
  CTensor(const Tensor& t) : given(t.ndim != 0) {
    tessera_tensor_init(&view);
    view.data = t.data;
    view.type = static_cast<std::int32_t>(t.type);
    view.ndim = t.ndim;
    view.device_type = static_cast<std::int32_t>(t.device.type);
    view.device_id = t.device.id;
    for (std::size_t i = 0; i < 4; ++i) view.shape[i] = t.shape[i], view.strides[i] = t.strides[i];
  }
  CTensor(const CTensor&) = delete;
  CTensor& operator=(const CTensor&) = delete;
  operator const tessera_tensor*() const { return given ? &view : nullptr; }

 private:
  tessera_tensor view;
  bool given;
};

struct CInputs {
  CTensor q, k, v, bias, mask, slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, rng;
  CTensor block_table, v_block_table, page_indptr, page_indices, leftpad_k;
  CTensor state_o, state_m, state_l, seq_row0, seq_col0, seq_batch0;
  CTensor k_scale, v_scale, qv, tree_mask, positions;
  tessera_inputs view;
  CInputs(const Inputs& in) :
      q(in.q), k(in.k), v(in.v), bias(in.bias), mask(in.mask), slopes(in.slopes), sinks(in.sinks),
      cu_seqlens_q(in.cu_seqlens_q), cu_seqlens_k(in.cu_seqlens_k), seqused_q(in.seqused_q), seqused_k(in.seqused_k),
      rng(in.rng), block_table(in.block_table), v_block_table(in.v_block_table), page_indptr(in.page_indptr),
      page_indices(in.page_indices), leftpad_k(in.leftpad_k), state_o(in.state.o), state_m(in.state.m),
      state_l(in.state.l), seq_row0(in.seq_row0), seq_col0(in.seq_col0), seq_batch0(in.seq_batch0), k_scale(in.k_scale),
      v_scale(in.v_scale), qv(in.qv), tree_mask(in.tree_mask), positions(in.positions) {
    tessera_inputs_init(&view);
    view.q = q, view.k = k, view.v = v;
    view.bias = bias, view.mask = mask, view.slopes = slopes, view.sinks = sinks;
    view.cu_seqlens_q = cu_seqlens_q, view.cu_seqlens_k = cu_seqlens_k;
    view.seqused_q = seqused_q, view.seqused_k = seqused_k, view.rng = rng;
    view.block_table = block_table, view.v_block_table = v_block_table;
    view.page_indptr = page_indptr, view.page_indices = page_indices, view.leftpad_k = leftpad_k;
    view.state_o = state_o, view.state_m = state_m, view.state_l = state_l;
    view.seq_row0 = seq_row0, view.seq_col0 = seq_col0, view.seq_batch0 = seq_batch0;
    view.k_scale = k_scale, view.v_scale = v_scale, view.qv = qv;
    view.tree_mask = tree_mask, view.positions = positions;
  }
};

struct COutputs {
  CTensor o, lse, status, state_o, state_m, state_l;
  tessera_outputs view;
  COutputs(const Outputs& out) :
      o(out.o), lse(out.lse), status(out.status), state_o(out.state.o), state_m(out.state.m), state_l(out.state.l) {
    tessera_outputs_init(&view);
    view.o = o, view.lse = lse, view.status = status;
    view.state_o = state_o, view.state_m = state_m, view.state_l = state_l;
  }
};

struct CAppendArgs {
  CTensor k_new, v_new, k, v, cu_seqlens_new, seqused_k, block_table, v_block_table, page_indptr, page_indices, slots;
  CTensor rotary_cos, rotary_sin, positions, q, q_out, q_positions, status, k_scale, v_scale;
  tessera_append_args view;
  CAppendArgs(const AppendArgs& a) :
      k_new(a.k_new), v_new(a.v_new), k(a.k), v(a.v), cu_seqlens_new(a.cu_seqlens_new), seqused_k(a.seqused_k),
      block_table(a.block_table), v_block_table(a.v_block_table), page_indptr(a.page_indptr),
      page_indices(a.page_indices), slots(a.slots), rotary_cos(a.rotary_cos), rotary_sin(a.rotary_sin),
      positions(a.positions), q(a.q), q_out(a.q_out), q_positions(a.q_positions), status(a.status), k_scale(a.k_scale),
      v_scale(a.v_scale) {
    tessera_append_args_init(&view);
    view.k_new = k_new, view.v_new = v_new, view.k = k, view.v = v;
    view.cu_seqlens_new = cu_seqlens_new, view.seqused_k = seqused_k;
    view.block_table = block_table, view.v_block_table = v_block_table;
    view.page_indptr = page_indptr, view.page_indices = page_indices, view.slots = slots;
    view.rotary_cos = rotary_cos, view.rotary_sin = rotary_sin, view.positions = positions;
    view.q = q, view.q_out = q_out, view.q_positions = q_positions, view.status = status;
    view.interleaved = a.interleaved;
    view.k_scale = k_scale, view.v_scale = v_scale;
  }
};

struct CSaved {
  CTensor o, lse, d_o, d_lse;
  tessera_saved view;
  CSaved(const Saved& s) : o(s.o), lse(s.lse), d_o(s.d_o), d_lse(s.d_lse) {
    tessera_saved_init(&view);
    view.o = o, view.lse = lse, view.d_o = d_o, view.d_lse = d_lse;
  }
};

struct CGradients {
  CTensor dq, dk, dv, dbias, dsinks;
  tessera_gradients view;
  CGradients(const Gradients& g) : dq(g.dq), dk(g.dk), dv(g.dv), dbias(g.dbias), dsinks(g.dsinks) {
    tessera_gradients_init(&view);
    view.dq = dq, view.dk = dk, view.dv = dv, view.dbias = dbias, view.dsinks = dsinks;
  }
};

inline tessera_options to_c(const Options& o) {
  tessera_options c;
  tessera_options_init(&c);
  c.scale = o.scale, c.softcap = o.softcap;
  c.causal = o.causal, c.alignment = static_cast<std::int32_t>(o.alignment), c.diagonal_offset = o.diagonal_offset;
  c.window_left = o.window_left, c.window_right = o.window_right;
  c.dropout = o.dropout, c.seed = o.seed, c.seed_offset = o.seed_offset;
  c.row0 = o.row0, c.col0 = o.col0, c.head0 = o.head0, c.batch0 = o.batch0;
  c.max_seqlen_q = o.max_seqlen_q, c.max_seqlen_k = o.max_seqlen_k;
  c.accumulate = o.accumulate, c.deterministic = o.deterministic;
  c.part_invariant = o.part_invariant, c.segment_rows = o.segment_rows;
  return c;
}

inline tessera_execution to_c(const Execution& e) {
  tessera_execution c;
  tessera_execution_init(&c);
  c.device_type = static_cast<std::int32_t>(e.device.type), c.device_id = e.device.id;
  c.stream = e.stream, c.threads = e.threads;
  c.workspace = e.workspace, c.workspace_bytes = e.workspace_bytes, c.kernel = e.kernel, c.sm_margin = e.sm_margin;
  return c;
}

}  // namespace detail

// The forward pass: writes O and LSE, or a carried state. What is computed: docs/algorithm.md, "Softmax and output". On
// a CUDA device this and every pass is enqueued on execution's stream; its workspace must be as large as a plan says.
inline void forward(const Inputs& inputs, const Outputs& outputs, const Options& options = {},
                    const Execution& execution = {}) {
  const detail::CInputs in(inputs);
  const detail::COutputs out(outputs);
  const auto o = detail::to_c(options);
  const auto e = detail::to_c(execution);
  detail::check(tessera_forward(&in.view, &out.view, &o, &e));
}

// The backward pass: writes the gradients that are given, from the inputs and options of the forward pass, its results
// and the gradient that arrives at them. What is computed: docs/algorithm.md, "Backward".
inline void backward(const Inputs& inputs, const Saved& saved, const Gradients& gradients, const Options& options = {},
                     const Execution& execution = {}) {
  const detail::CInputs in(inputs);
  const detail::CSaved s(saved);
  const detail::CGradients g(gradients);
  const auto o = detail::to_c(options);
  const auto e = detail::to_c(execution);
  detail::check(tessera_backward(&in.view, &s.view, &g.view, &o, &e));
}

// Rotates new keys, converts new keys and values to the cache's types and stores them; rotates queries, if given.
inline void append(const AppendArgs& args, const Execution& execution = {}) {
  const detail::CAppendArgs a(args);
  const auto e = detail::to_c(execution);
  detail::check(tessera_append(&a.view, &e));
}

// Merges partial results over disjoint key sets (split-KV, ring attention), in index order.
inline void merge(const std::vector<Outputs>& partials, const Outputs& merged, const Execution& execution = {}) {
  std::deque<detail::COutputs> parts;  // in which they do not move
  std::vector<tessera_outputs> views;
  for (const Outputs& partial : partials) views.push_back(parts.emplace_back(partial).view);
  const detail::COutputs out(merged);
  const auto e = detail::to_c(execution);
  detail::check(tessera_merge(views.data(), static_cast<std::int64_t>(views.size()), &out.view, &e));
}

// The mask that forward and backward use: u8 [B,Hq,Nq,Nk], 1 = kept.
inline void dropout_mask(const Tensor& mask, const Options& options, const Tensor& rng = {},
                         const Execution& execution = {}) {
  const detail::CTensor m(mask), r(rng);
  const auto o = detail::to_c(options);
  const auto e = detail::to_c(execution);
  detail::check(tessera_dropout_mask(m, r, &o, &e));
}

// The dispatch decision for one problem (kernel, tiles, workspace), made once and run many times.
class Plan {
 public:
  static Plan forward(const Inputs& inputs, const Outputs& outputs, const Options& options = {},
                      const Execution& execution = {}) {
    const detail::CInputs in(inputs);
    const detail::COutputs out(outputs);
    const auto o = detail::to_c(options);
    const auto e = detail::to_c(execution);
    Plan plan;
    detail::check(tessera_plan_forward(&in.view, &out.view, &o, &e, &plan.handle));
    return plan;
  }
  static Plan backward(const Inputs& inputs, const Saved& saved, const Gradients& gradients,
                       const Options& options = {}, const Execution& execution = {}) {
    const detail::CInputs in(inputs);
    const detail::CSaved s(saved);
    const detail::CGradients g(gradients);
    const auto o = detail::to_c(options);
    const auto e = detail::to_c(execution);
    Plan plan;
    detail::check(tessera_plan_backward(&in.view, &s.view, &g.view, &o, &e, &plan.handle));
    return plan;
  }

  Plan(Plan&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  Plan& operator=(Plan&& other) noexcept {
    std::swap(handle, other.handle);
    return *this;
  }
  ~Plan() { tessera_plan_destroy(handle); }

  std::size_t workspace_size() const { return tessera_plan_workspace_size(handle); }
  std::string kernel() const { return tessera_plan_kernel(handle); }
  // A problem keeps its bits when it is cut into calls at multiples of these (Options::part_invariant); 0: no promise.
  std::int64_t key_tile() const { return tessera_plan_key_tile(handle); }
  std::int64_t query_tile() const { return tessera_plan_query_tile(handle); }
  std::string describe() const { return tessera_plan_describe(handle); }

  void run(const Inputs& inputs, const Outputs& outputs, const Options& options = {},
           const Execution& execution = {}) const {
    const detail::CInputs in(inputs);
    const detail::COutputs out(outputs);
    const auto o = detail::to_c(options);
    const auto e = detail::to_c(execution);
    detail::check(tessera_plan_run_forward(handle, &in.view, &out.view, &o, &e));
  }
  void run(const Inputs& inputs, const Saved& saved, const Gradients& gradients, const Options& options = {},
           const Execution& execution = {}) const {
    const detail::CInputs in(inputs);
    const detail::CSaved s(saved);
    const detail::CGradients g(gradients);
    const auto o = detail::to_c(options);
    const auto e = detail::to_c(execution);
    detail::check(tessera_plan_run_backward(handle, &in.view, &s.view, &g.view, &o, &e));
  }

 private:
  Plan() = default;
  tessera_plan* handle = nullptr;
};

// major * 10000 + minor * 100 + patch of the library that is running.
inline int version() { return tessera_version(); }
// A few lines for people: processor, instruction sets, kernels, GPUs.
inline std::string info() {
  const std::string text = tessera_info();
  if (text.empty()) throw Error(TESSERA_OUT_OF_MEMORY, tessera_last_error());
  return text;
}

}  // namespace tessera
