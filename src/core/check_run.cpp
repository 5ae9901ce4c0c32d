// SPDX-License-Identifier: Apache-2.0
// What only a run needs to check, and the two calls that have no plan: merge and the dropout mask; see check.hpp.
#include <algorithm>
#include <array>
#include <string>

#include "core/check.hpp"
#include "core/check_pages.hpp"
#include "core/check_parts.hpp"
#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/overlap.hpp"
#include "core/rules.hpp"
#include "core/sequence.hpp"
#include "core/tensor.hpp"

namespace tessera {

namespace {

// Lengths of the sequences of one side (q or k), in host memory.
void check_host_lengths(const char* cu_name, const Tensor& cu, const char* used_name, const Tensor& used,
                        const char* hint_name, std::int64_t hint, const Problem& p, std::int64_t tokens) {
  if (cu) check_host_offsets(cu_name, cu, p.B, tokens, "tokens");
  for (std::int64_t b = 0; b < p.B && (cu || used); ++b) {
    const std::int64_t length = cu ? entry(cu, b + 1) - entry(cu, b) : tokens;
    if (cu) check_host_bound(hint_name, hint, b, length);
    if (used && (entry(used, b) < 0 || entry(used, b) > length))
      invalid(used_name, ": entry ", b, " is ", entry(used, b), "; must be from 0 to the sequence's length ", length);
  }
}

// Bias and mask of packed queries and of packed or paged keys are indexed inside each sequence: they must reach the
// longest.
void check_host_broadcast(const char* name, const Tensor& t, const Call& call, const Problem& p) {
  if (!t || !(p.packed || p.pages)) return;
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = lengths_of(p, call, b);
    const std::int64_t nq = s.q_capacity, nk = s.k_capacity;
    if ((dim(t, 2) != 1 && dim(t, 2) < nq) || (dim(t, 3) != 1 && dim(t, 3) < nk))
      invalid(name, ": has shape ", shape_text(t), " but sequence ", b, " has ", nq, " queries and ", nk,
              " keys; its last two dimensions must be 1 or at least every length");
  }
}

// A row of the tree has a bit for every query of its sequence.
void check_host_tree(const Call& call, const Problem& p) {
  for (std::int64_t b = 0; b < p.B && p.tree_words > 0; ++b)
    if (const std::int64_t nq = lengths_of(p, call, b).nq; nq > product({32, p.tree_words}))
      invalid("tree_mask: has rows of ", p.tree_words, " words but sequence ", b, " has ", nq,
              " queries; a word holds 32");
}

struct Named {
  const char* name;
  const Tensor* tensor;  // perhaps not given
  Reach reach;

  Named(const char* name, const Tensor* tensor) : name(name), tensor(tensor), reach(reach_of(*tensor)) {}
};

// All tensors of a call, by what it does to them.
struct Tensors {
  std::array<Named, 32> read;
  std::array<Named, 11> written;

  explicit Tensors(const Call& c) :
      read{{{"q", &c.inputs.q},
            {"k", &c.inputs.k},
            {"v", &c.inputs.v},
            {"bias", &c.inputs.bias},
            {"mask", &c.inputs.mask},
            {"slopes", &c.inputs.slopes},
            {"sinks", &c.inputs.sinks},
            {"cu_seqlens_q", &c.inputs.cu_seqlens_q},
            {"cu_seqlens_k", &c.inputs.cu_seqlens_k},
            {"seqused_q", &c.inputs.seqused_q},
            {"seqused_k", &c.inputs.seqused_k},
            {"rng", &c.inputs.rng},
            {"block_table", &c.inputs.block_table},
            {"v_block_table", &c.inputs.v_block_table},
            {"page_indptr", &c.inputs.page_indptr},
            {"page_indices", &c.inputs.page_indices},
            {"leftpad_k", &c.inputs.leftpad_k},
            {"inputs.state_o", &c.inputs.state.o},
            {"inputs.state_m", &c.inputs.state.m},
            {"inputs.state_l", &c.inputs.state.l},
            {"seq_row0", &c.inputs.seq_row0},
            {"seq_col0", &c.inputs.seq_col0},
            {"seq_batch0", &c.inputs.seq_batch0},
            {"k_scale", &c.inputs.k_scale},
            {"v_scale", &c.inputs.v_scale},
            {"qv", &c.inputs.qv},
            {"tree_mask", &c.inputs.tree_mask},
            {"positions", &c.inputs.positions},
            {"o", &c.saved.o},
            {"lse", &c.saved.lse},
            {"d_o", &c.saved.d_o},
            {"d_lse", &c.saved.d_lse}}},
      written{{{"o", &c.outputs.o},
               {"lse", &c.outputs.lse},
               {"status", &c.outputs.status},
               {"outputs.state_o", &c.outputs.state.o},
               {"outputs.state_m", &c.outputs.state.m},
               {"outputs.state_l", &c.outputs.state.l},
               {"dq", &c.gradients.dq},
               {"dk", &c.gradients.dk},
               {"dv", &c.gradients.dv},
               {"dbias", &c.gradients.dbias},
               {"dsinks", &c.gradients.dsinks}}} {}
};

// A state may be replaced where it lies: a row of it is read before it is written, and by nobody else.
bool in_place(const Call& c, const Named& output, const Named& input) {
  const State &from = c.inputs.state, &to = c.outputs.state;
  const bool same_member = (output.tensor == &to.o && input.tensor == &from.o) ||
                           (output.tensor == &to.m && input.tensor == &from.m) ||
                           (output.tensor == &to.l && input.tensor == &from.l);
  return same_member && same_view(*output.tensor, *input.tensor);
}

void check_apart(const Named& output, const Named& other) {
  if (touch(output.reach, other.reach)) tessera::check_apart(output.name, *output.tensor, other.name, *other.tensor);
}

}  // namespace

void check_run(const Problem& p, const Call& call) {
  const Inputs& in = call.inputs;
  const Tensors all(call);
  for (const Named& t : all.read) check_data(t.name, *t.tensor);
  for (const Named& t : all.written) check_data(t.name, *t.tensor);
  for (auto output = all.written.begin(); output != all.written.end(); ++output) {
    if (!*output->tensor) continue;
    for (const Named& input : all.read)
      if (!in_place(call, *output, input)) check_apart(*output, input);
    for (auto other = all.written.begin(); other != output; ++other) check_apart(*output, *other);
  }
  if (p.device.type != DeviceType::cpu) return;
  check_host_places(p, in);
  check_host_lengths("cu_seqlens_q", in.cu_seqlens_q, "seqused_q", in.seqused_q, "max_seqlen_q", p.options.max_seqlen_q,
                     p, p.Nq);
  if (p.pages)
    check_host_pages(p, in);
  else
    check_host_lengths("cu_seqlens_k", in.cu_seqlens_k, "seqused_k", in.seqused_k, "max_seqlen_k",
                       p.options.max_seqlen_k, p, p.Nk);
  check_host_broadcast("bias", in.bias, call, p);
  check_host_broadcast("mask", in.mask, call, p);
  check_host_tree(call, p);
}

void check_workspace(const Call& call, std::size_t bytes) {
  const Tensor workspace(call.execution.workspace, Type::u8, {static_cast<std::int64_t>(bytes)}, call.inputs.q.device);
  const Tensors all(call);
  const auto check = [&](const Named& tensor) {
    if (overlap(workspace, *tensor.tensor))
      invalid("workspace: shares memory with ", tensor.name, "; it must lie apart from every tensor of the call");
  };
  std::for_each(all.read.begin(), all.read.end(), check);
  std::for_each(all.written.begin(), all.written.end(), check);
}

namespace {

// The merged result's lse is optional, a partial's is not.
void check_partial(const std::string& name, const Outputs& part, const Tensor& like, bool lse_required) {
  const std::string o = name + "o", lse = name + "lse";
  check_given(o.c_str(), part.o);
  if (part.status) invalid(name, "status: is given; merging reports nothing");
  if (part.state) invalid(name, "state_o: is given; merging takes O and LSE");
  check_view(o.c_str(), part.o, like.device);
  if (!is_float(part.o.type)) invalid(o, ": has type ", name_of(part.o.type), "; must be f64, f32, f16 or bf16");
  if (part.o.ndim != 3 && part.o.ndim != 4)
    invalid(o, ": has shape ", shape_text(part.o), "; must be [batch, tokens, heads, dim] or [tokens, heads, dim]");
  if (part.o.ndim != like.ndim || part.o.shape != like.shape)
    invalid(o, ": has shape ", shape_text(part.o), " but the merged o has ", shape_text(like), "; all must agree");
  const int token_dim = like.ndim - 3;
  check_head_dim(o.c_str(), dim(part.o, token_dim + 2), most_value_dims);
  if (like.ndim == 4) check_count(o.c_str(), dim(part.o, 0), "sequences", most_sequences);
  check_count(o.c_str(), dim(part.o, token_dim), "tokens", most_tokens);
  check_count(o.c_str(), dim(part.o, token_dim + 1), "heads", most_heads);
  check_rows(o.c_str(), part.o);
  check_data(o.c_str(), part.o);
  if (lse_required) check_given(lse.c_str(), part.lse);
  if (!part.lse) return;
  check_view(lse.c_str(), part.lse, like.device);
  check_single(lse.c_str(), part.lse, part.o.type);
  if (like.ndim == 4)
    check_shape(lse.c_str(), part.lse, {dim(like, 0), dim(like, 2), dim(like, 1)}, "[batch, heads, queries]");
  if (like.ndim == 3) check_shape(lse.c_str(), part.lse, {dim(like, 1), dim(like, 0)}, "[heads, tokens]");
  check_data(lse.c_str(), part.lse);
}

}  // namespace

void check_merge(std::span<const Outputs> partials, const Outputs& merged, const Execution& execution) {
  if (partials.empty()) invalid("n: is 0; merging needs at least one partial result");
  check_given("merged.o", merged.o);
  check_cpu_or_cuda("merged.o", merged.o, execution);
  check_partial("merged.", merged, merged.o, false);
  check_writable("merged.o", merged.o);
  if (merged.lse) check_writable("merged.lse", merged.lse);
  if (merged.lse) check_apart("merged.lse", merged.lse, "merged.o", merged.o);
  for (std::size_t i = 0; i < partials.size(); ++i) {
    const std::string name = text("partials[", i, "]."), o = name + "o", lse = name + "lse";
    check_partial(name, partials[i], merged.o, true);
    // A row is read in every partial before it is written: a result may replace a partial, element by element.
    if (!same_view(merged.o, partials[i].o)) check_apart("merged.o", merged.o, o.c_str(), partials[i].o);
    if (!same_view(merged.lse, partials[i].lse)) check_apart("merged.lse", merged.lse, lse.c_str(), partials[i].lse);
    check_apart("merged.o", merged.o, lse.c_str(), partials[i].lse);
    check_apart("merged.lse", merged.lse, o.c_str(), partials[i].o);
  }
}

void check_dropout_mask(const Tensor& mask, const Tensor& rng, const Options& options, const Execution& execution) {
  check_given("mask", mask);
  check_cpu("mask", mask, execution);
  check_view("mask", mask, mask.device);
  check_ndim("mask", mask, 4, "[batch, heads, queries, keys]");
  check_type("mask", mask, Type::u8);
  check_writable("mask", mask);
  check_data("mask", mask);
  if (rng) {
    check_view("rng", rng, mask.device);
    check_data("rng", rng);
    check_apart("mask", mask, "rng", rng);
  }
  check_dropout(options, rng);
  check_positions(options);
}

}  // namespace tessera
