// SPDX-License-Identifier: Apache-2.0
// From tensors to a checked Problem; see check.hpp.
#include "core/check.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/check_pages.hpp"
#include "core/check_parts.hpp"
#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/overlap.hpp"
#include "core/rules.hpp"
#include "core/tensor.hpp"

namespace tessera {
namespace {

void check_attention_type(const char* name, Type type, bool keys) {
  if (type == Type::e5m2)
    throw Failure(TESSERA_UNSUPPORTED, text(name, ": type e5m2 is reserved; use f32, f16 or bf16"));
  if (is_float(type) || (keys && (type == Type::e4m3 || type == Type::i8))) return;
  if (keys) invalid(name, ": has type ", name_of(type), "; must be f32, f16, bf16, e4m3, i8, or f64 for the reference");
  invalid(name, ": has type ", name_of(type), "; must be f32, f16, bf16, or f64 for the reference");
}

// Layout and sizes of q, k, v.
void check_qkv(const Inputs& in, Problem& p) {
  check_given("q", in.q), check_given("k", in.k), check_given("v", in.v);
  p.device = in.q.device;
  if (p.device.type != DeviceType::cpu && p.device.type != DeviceType::cuda && p.device.type != DeviceType::vulkan)
    invalid("q: is on ", name_of(p.device), "; must be on cpu, cuda or vulkan");
  for (const auto& [name, t] : {std::pair{"q", &in.q}, {"k", &in.k}, {"v", &in.v}}) {
    check_view(name, *t, p.device);
    check_attention_type(name, t->type, t != &in.q);
  }
  p.q_type = in.q.type, p.k_type = in.k.type, p.v_type = in.v.type;

  const bool paged = has_pages(in);
  if (!paged && bool(in.cu_seqlens_q) != bool(in.cu_seqlens_k))
    invalid(in.cu_seqlens_q ? "cu_seqlens_k" : "cu_seqlens_q", ": is missing; packed input needs both cu_seqlens");
  p.packed = bool(in.cu_seqlens_q);
  const bool packed_keys = p.packed && !paged;
  const char* packed_layout = "[tokens, heads, dim] since cu_seqlens are given";
  const char* paged_layout = "[pages, tokens, heads, dim] since there is a page table";
  const char* layout = packed_keys ? packed_layout : paged ? paged_layout : "[batch, tokens, heads, dim]";
  check_ndim("q", in.q, p.packed ? 3 : 4, p.packed ? packed_layout : "[batch, tokens, heads, dim]");
  check_ndim("k", in.k, packed_keys ? 3 : 4, layout), check_ndim("v", in.v, packed_keys ? 3 : 4, layout);
  const int query_dim = p.packed ? 0 : 1, key_dim = packed_keys ? 0 : 1;
  p.B = p.packed ? 0 : dim(in.q, 0);
  p.Nq = dim(in.q, query_dim), p.Hq = dim(in.q, query_dim + 1), p.D = dim(in.q, query_dim + 2);
  p.Nk = dim(in.k, key_dim), p.Hk = dim(in.k, key_dim + 1);
  p.Dv = dim(in.v, key_dim + 2);

  check_head_dim("q", p.D, most_dims), check_head_dim("v", p.Dv, most_value_dims);
  if (dim(in.k, key_dim + 2) != p.D)
    invalid("k: head_dim is ", dim(in.k, key_dim + 2), " but q has ", p.D, "; q and k must agree in head_dim");
  if (!p.packed && !paged && dim(in.k, 0) != p.B)
    invalid("k: batch is ", dim(in.k, 0), " but q has ", p.B, "; q, k and v must agree in batch");
  if (!p.packed && !paged && dim(in.v, 0) != p.B)
    invalid("v: batch is ", dim(in.v, 0), " but q has ", p.B, "; q, k and v must agree in batch");
  if (dim(in.v, key_dim) != p.Nk)
    invalid("v: has ", dim(in.v, key_dim), " tokens but k has ", p.Nk, "; k and v must agree in tokens");
  if (dim(in.v, key_dim + 1) != p.Hk)
    invalid("v: has ", dim(in.v, key_dim + 1), " heads but k has ", p.Hk, "; k and v must agree in heads");
  if (!p.packed) check_count("q", p.B, "sequences", most_sequences);
  check_count("q", p.Nq, "tokens", most_tokens), check_count("k", p.Nk, "tokens", most_tokens);
  check_count("q", p.Hq, "heads", most_heads), check_count("k", p.Hk, "heads", most_heads);
  if (p.Hk == 0 ? p.Hq != 0 : p.Hq % p.Hk != 0)
    invalid("q: has ", p.Hq, " heads but k has ", p.Hk, "; q's must be a multiple of k's");
  check_rows("q", in.q), check_rows("k", in.k), check_rows("v", in.v);
}

void check_lengths(const Inputs& in, Problem& p) {
  if (p.packed) {
    check_ndim("cu_seqlens_q", in.cu_seqlens_q, 1, "[batch + 1]");
    if (dim(in.cu_seqlens_q, 0) < 1) invalid("cu_seqlens_q: has shape [0]; must be [batch + 1]");
    p.B = dim(in.cu_seqlens_q, 0) - 1;
    check_count("cu_seqlens_q", p.B, "sequences", most_sequences);
  }
  for (const auto& [name, t, count] : {std::tuple{"cu_seqlens_q", &in.cu_seqlens_q, p.B + 1},
                                       {"cu_seqlens_k", &in.cu_seqlens_k, p.B + 1},
                                       {"seqused_q", &in.seqused_q, p.B},
                                       {"seqused_k", &in.seqused_k, p.B}}) {
    if (!*t) continue;
    check_view(name, *t, p.device);
    check_type(name, *t, Type::i32);
    check_shape(name, *t, {count}, count == p.B ? "[batch]" : "[batch + 1]");
  }
  p.seqused_q = bool(in.seqused_q), p.seqused_k = bool(in.seqused_k);
}

// bias and mask: each dimension 1 or full. Packed queries, and packed or paged keys, have no full size: the dimension
// need only hold every sequence.
std::optional<Broadcast> check_broadcast(const char* name, const Tensor& t, const Problem& p) {
  if (!t) return {};
  check_view(name, t, p.device);
  check_ndim(name, t, 4, "[batch|1, heads|1, queries|1, keys|1]");
  const char* names[] = {"batch", "heads", "queries", "keys"};
  const std::int64_t full[] = {p.B, p.Hq, p.Nq, p.Nk};
  for (int i = 0; i < 4; ++i) {
    const bool upper_bound = i >= 2 && (p.packed || (p.pages && i == 3));
    if (dim(t, i) == 1 || dim(t, i) == full[i] || upper_bound) continue;
    invalid(name, ": has shape ", shape_text(t), "; its ", names[i], " must be 1 or ", full[i]);
  }
  check_count(name, dim(t, 2), names[2], most_tokens), check_count(name, dim(t, 3), names[3], most_tokens);
  return Broadcast{t.type, t.shape};
}

// Of each query a row of words, and a position.
void check_rows_of_queries(const Inputs& in, Problem& p) {
  if (in.tree_mask) {
    check_view("tree_mask", in.tree_mask, p.device);
    check_type("tree_mask", in.tree_mask, Type::i32);
    const char* layout = p.packed ? "[tokens, words]" : "[batch, queries, words]";
    check_ndim("tree_mask", in.tree_mask, p.packed ? 2 : 3, layout);
    p.tree_words = dim(in.tree_mask, in.tree_mask.ndim - 1);
    if (p.tree_words < 1) invalid("tree_mask: has rows of 0 words; a row has at least 1");
    if (p.packed) check_shape("tree_mask", in.tree_mask, {p.Nq, p.tree_words}, layout);
    if (!p.packed) check_shape("tree_mask", in.tree_mask, {p.B, p.Nq, p.tree_words}, layout);
  }
  if (!in.positions) return;
  check_view("positions", in.positions, p.device);
  check_type("positions", in.positions, Type::i32);
  if (p.packed) check_shape("positions", in.positions, {p.Nq}, "[tokens]");
  if (!p.packed) check_shape("positions", in.positions, {p.B, p.Nq}, "[batch, queries]");
  p.positions = true;
}

void check_extras(const Inputs& in, Problem& p) {
  check_rows_of_queries(in, p);
  p.k_scale = check_scale("k_scale", in.k_scale, in.k, p);
  p.v_scale = check_scale("v_scale", in.v_scale, in.v, p);
  p.bias = check_broadcast("bias", in.bias, p);
  if (p.bias) check_follows("bias", p.bias->type, "q", p.q_type);
  p.mask = check_broadcast("mask", in.mask, p);
  if (p.mask) check_type("mask", in.mask, Type::u8);
  if (in.slopes) {
    check_view("slopes", in.slopes, p.device);
    check_single("slopes", in.slopes, p.q_type);
    if (in.slopes.ndim == 2) check_shape("slopes", in.slopes, {p.B, p.Hq}, "[batch, heads]");
    if (in.slopes.ndim != 2) check_shape("slopes", in.slopes, {p.Hq}, "[heads] or [batch, heads]");
    p.slopes = in.slopes.ndim;
  }
  if (in.sinks) {
    check_view("sinks", in.sinks, p.device);
    check_single("sinks", in.sinks, p.q_type);
    check_shape("sinks", in.sinks, {p.Hq}, "[heads]");
    p.sinks = true;
  }
  if (in.rng) check_view("rng", in.rng, p.device);
  p.rng = bool(in.rng);
}

// Outputs of the forward pass; none of the backward pass.
Problem check_inputs(Pass pass, const Inputs& in, const Outputs& out, const Options& options,
                     const Execution& execution) {
  Problem p{.pass = pass};
  check_tables_given(in, out);
  check_qkv(in, p);
  check_lengths(in, p);
  check_tables(in, out, p);
  check_extras(in, p);
  check_places(in, p);
  check_options(options, in.rng);
  check_execution(execution, p.device);
  p.options = options;
  p.options.seed = p.options.seed_offset = 0;
  if (options.scale == default_scale) p.options.scale = 1.0 / std::sqrt(static_cast<double>(p.D + (in.qv ? p.Dv : 0)));
  return p;
}

void check_lse(const char* name, const Tensor& t, const Problem& p) {
  check_row_numbers(name, t, p);
  check_single(name, t, p.q_type);
}

int common_alignment(std::initializer_list<const Tensor*> tensors) {
  int alignment = 16;
  for (const Tensor* t : tensors)
    if (*t) alignment = std::min(alignment, alignment_of(*t));
  return alignment;
}

bool have_far_strides(std::initializer_list<const Tensor*> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor* t) { return has_far_stride(*t); });
}

}  // namespace

Problem check_forward(const Inputs& in, const Outputs& out, const Options& options, const Execution& execution) {
  Problem p = check_inputs(Pass::forward, in, out, options, execution);
  if (in.qv) {
    check_token_tensor("qv", in.qv, p, false, p.Dv);
    check_type("qv", in.qv, p.q_type);
    p.qv = true;
  }
  check_states(in, out, p);
  if (!p.state_out) {
    check_given("o", out.o);
    check_token_tensor("o", out.o, p, false, p.Dv);
    check_follows("o", out.o.type, "q", p.q_type);
    check_writable("o", out.o);
    p.o_type = out.o.type;
  }
  if (out.lse) {
    check_lse("lse", out.lse, p);
    check_writable("lse", out.lse);
    p.lse = true;
  }
  p.alignment = common_alignment({&in.q, &in.k, &in.v, &in.qv});
  p.far_strides = have_far_strides({&in.q, &in.k, &in.v});
  return p;
}

Problem check_backward(const Inputs& in, const Saved& saved, const Gradients& g, const Options& options,
                       const Execution& execution) {
  if (in.state) invalid("inputs.state_o: is given to the backward pass; only the forward pass carries a state");
  if (has_pages(in)) throw Failure(TESSERA_UNSUPPORTED, "k: is paged; there is no backward pass through a page table");
  for (const auto& [name, t] : {std::pair{"qv", &in.qv}, {"tree_mask", &in.tree_mask}, {"positions", &in.positions}})
    if (*t) throw Failure(TESSERA_UNSUPPORTED, text(name, ": is given; there is no backward pass with it"));
  for (const auto& [name, scale] : {std::pair{"k_scale", &in.k_scale}, {"v_scale", &in.v_scale}})
    if (*scale)
      throw Failure(TESSERA_UNSUPPORTED, text(name, ": is given; there is no backward pass through scaled keys"));
  Problem p = check_inputs(Pass::backward, in, {}, options, execution);
  for (const auto& [name, t] : {std::pair{"k", &in.k}, {"v", &in.v}})
    if (t->type != p.q_type)
      throw Failure(TESSERA_UNSUPPORTED, text(name, ": has type ", name_of(t->type), " but q has ", name_of(p.q_type),
                                              "; the backward pass takes one type for q, k and v"));
  check_given("o", saved.o), check_given("lse", saved.lse), check_given("d_o", saved.d_o);
  check_token_tensor("o", saved.o, p, false, p.Dv);
  check_follows("o", saved.o.type, "q", p.q_type);
  check_token_tensor("d_o", saved.d_o, p, false, p.Dv);
  check_follows("d_o", saved.d_o.type, "q", p.q_type);
  check_lse("lse", saved.lse, p);
  if (saved.d_lse) check_lse("d_lse", saved.d_lse, p);
  p.o_type = saved.o.type, p.d_o = saved.d_o.type, p.lse = true, p.d_lse = bool(saved.d_lse);

  const auto gradient = [&](const char* name, const Tensor& t, const char* leader, Type type) -> std::optional<Type> {
    if (!t) return {};
    check_follows(name, t.type, leader, type);
    check_writable(name, t);
    if (options.accumulate && t.type != Type::f32 && t.type != Type::f64)
      invalid(name, ": has type ", name_of(t.type), " while accumulate is set; accumulating needs f32");
    return t.type;
  };
  if (g.dq) check_token_tensor("dq", g.dq, p, false, p.D);
  if (g.dk) check_token_tensor("dk", g.dk, p, true, p.D);
  if (g.dv) check_token_tensor("dv", g.dv, p, true, p.Dv);
  p.dq = gradient("dq", g.dq, "q", p.q_type);
  p.dk = gradient("dk", g.dk, "k", p.k_type);
  p.dv = gradient("dv", g.dv, "v", p.v_type);
  if (g.dbias) {
    if (!p.bias) invalid("dbias: is given but bias is not; there is nothing to differentiate");
    check_view("dbias", g.dbias, p.device);
    const auto& s = p.bias->shape;
    check_shape("dbias", g.dbias, {s[0], s[1], s[2], s[3]}, "bias's shape");
    p.dbias = gradient("dbias", g.dbias, "bias", p.bias->type);
  }
  if (g.dsinks) {
    if (!p.sinks) invalid("dsinks: is given but sinks is not; there is nothing to differentiate");
    check_view("dsinks", g.dsinks, p.device);
    check_shape("dsinks", g.dsinks, {p.Hq}, "[heads]");
    p.dsinks = gradient("dsinks", g.dsinks, "sinks", in.sinks.type);
  }
  p.alignment = common_alignment({&in.q, &in.k, &in.v, &saved.o, &saved.d_o});
  p.far_strides = have_far_strides({&in.q, &in.k, &in.v, &saved.d_o});
  return p;
}

}  // namespace tessera
