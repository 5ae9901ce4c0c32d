// SPDX-License-Identifier: Apache-2.0
// `tessera plan`: which kernel, which tiles and how much workspace a problem would get, and why others were refused.
// Planning reads shapes and types only, so no memory is allocated for the tensors.
#include <cstdio>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cli/array.hpp"
#include "cli/command.hpp"
#include "cli/failure.hpp"
#include "cli/flags.hpp"
#include "cli/options.hpp"
#include "cli/report.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cli {
namespace {

constexpr std::int64_t not_given = std::numeric_limits<std::int64_t>::min();

struct Arguments {
  std::vector<std::int64_t> q_shape, k_shape;
  std::int64_t batch = 1, nq = 2048, nk = not_given, heads = 8, kv_heads = not_given, dim = 64, dim_v = not_given;
  std::string type = "f32", kv_type, pass = "both", json;
  std::vector<std::string> with;
  bool f32_out = false, part_invariant = false;
  std::int64_t segment_rows = 0;
  int sm_margin = 0;
  AttentionFlags attention;
  ExecutionFlags execution;

  bool has(const char* name) const { return std::find(with.begin(), with.end(), name) != with.end(); }
};

// Both shapes in full: what is not given follows the queries. The library says which sizes do not go together.
void complete(Arguments& a) {
  const auto given_or = [](std::int64_t given, std::int64_t other) { return given == not_given ? other : given; };
  if (a.q_shape.empty()) a.q_shape = {a.batch, a.nq, a.heads, a.dim};
  const std::vector<std::int64_t>& q = a.q_shape;
  if (a.k_shape.empty()) a.k_shape = {q[0], given_or(a.nk, q[1]), given_or(a.kv_heads, q[2]), q[3]};
  a.dim_v = given_or(a.dim_v, q[3]);
}

// A number that a shape says too would have no effect.
void require_one_source(const CLI::App& command) {
  using Flags = std::vector<const char*>;
  for (const auto& [shape, numbers] :
       {std::pair<const char*, Flags>{"--q-shape", {"--batch", "--nq", "--heads", "--dim"}},
        std::pair<const char*, Flags>{"--k-shape", {"--nk", "--kv-heads"}}})
    for (const char* number : numbers)
      if (is_given(command, shape) && is_given(command, number))
        throw Failure(std::string(number) + ": is given beside " + shape + ", which says it too; give one of them.");
}

struct Question {
  Inputs inputs;
  Outputs outputs;
  Saved saved;
  Gradients gradients;
};

Question question(const Arguments& a) {
  const Type type = type_named(a.type), wide = type == Type::f64 ? Type::f64 : Type::f32;
  const Type out = a.f32_out ? Type::f32 : type;
  const Device device = a.execution.execution().device;
  const std::int64_t batch = a.q_shape[0], nq = a.q_shape[1], heads = a.q_shape[2];
  const std::int64_t nk = a.k_shape[1], kv_heads = a.k_shape[2];
  Question x;
  x.inputs.q = Tensor(nullptr, type, {batch, nq, heads, a.q_shape[3]}, device);
  const Type kv_type = a.kv_type.empty() ? type : type_named(a.kv_type);
  x.inputs.k = Tensor(nullptr, kv_type, {a.k_shape[0], nk, kv_heads, a.k_shape[3]}, device);
  x.inputs.v = Tensor(nullptr, kv_type, {a.k_shape[0], nk, kv_heads, a.dim_v}, device);
  if (a.has("scales")) x.inputs.k_scale = x.inputs.v_scale = Tensor(nullptr, Type::f32, {batch, kv_heads}, device);
  if (a.has("qv")) x.inputs.qv = Tensor(nullptr, type, {batch, nq, heads, a.dim_v}, device);
  if (a.has("tree")) x.inputs.tree_mask = Tensor(nullptr, Type::i32, {batch, nq, nq / 32 + 1}, device);
  if (a.has("positions")) x.inputs.positions = Tensor(nullptr, Type::i32, {batch, nq}, device);
  if (a.has("bias")) x.inputs.bias = Tensor(nullptr, type, {batch, heads, nq, nk}, device);
  if (a.has("mask")) x.inputs.mask = Tensor(nullptr, Type::u8, {batch, heads, nq, nk}, device);
  if (a.has("slopes")) x.inputs.slopes = Tensor(nullptr, wide, {heads}, device);
  if (a.has("sinks")) x.inputs.sinks = Tensor(nullptr, wide, {heads}, device);
  x.outputs.o = Tensor(nullptr, out, {batch, nq, heads, a.dim_v}, device);
  x.outputs.lse = Tensor(nullptr, wide, {batch, heads, nq}, device);
  const State state{.o = Tensor(nullptr, Type::f32, {batch, nq, heads, a.dim_v}, device),
                    .m = Tensor(nullptr, Type::f32, {batch, heads, nq}, device),
                    .l = Tensor(nullptr, Type::f64, {batch, heads, nq}, device)};
  if (a.has("state_in")) x.inputs.state = state;
  x.saved.o = x.outputs.o, x.saved.lse = x.outputs.lse;
  x.saved.d_o = Tensor(nullptr, type, {batch, nq, heads, a.dim_v}, device);
  if (a.has("dlse")) x.saved.d_lse = x.outputs.lse;
  x.gradients.dq = x.inputs.q, x.gradients.dk = x.inputs.k, x.gradients.dv = x.inputs.v;
  x.gradients.dbias = x.inputs.bias, x.gradients.dsinks = x.inputs.sinks;
  if (a.has("state_out")) x.outputs = {.state = state};
  for (Tensor* t : {&x.gradients.dq, &x.gradients.dk, &x.gradients.dv, &x.gradients.dbias})
    if (a.f32_out && *t) t->type = Type::f32;
  return x;
}

Json to_json(const Plan& plan) {
  return {{"kernel", plan.kernel()}, {"workspace_bytes", plan.workspace_size()}, {"text", plan.describe()}};
}

void print(const char* pass, const Plan& plan) {
  const std::string text = plan.describe();
  std::printf("%s\n", pass);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::printf("  %s\n", text.substr(at, end - at).c_str());
    at = end + 1;
  }
}

int plan(const CLI::App& command, Arguments& a) {
  require_one_source(command);
  complete(a);
  const Question x = question(a);
  Options options = a.attention.options();
  options.part_invariant = a.part_invariant, options.segment_rows = a.segment_rows;
  Execution execution = a.execution.execution();
  execution.sm_margin = a.sm_margin;
  Inputs differentiated = x.inputs;
  differentiated.state = {};
  std::vector<std::pair<const char*, Plan>> plans;
  if (a.pass != "backward") plans.emplace_back("forward", Plan::forward(x.inputs, x.outputs, options, execution));
  if (a.pass != "forward")
    plans.emplace_back("backward", Plan::backward(differentiated, x.saved, x.gradients, options, execution));
  for (const auto& [pass, plan] : plans) print(pass, plan);
  if (a.json.empty()) return 0;

  Json json;
  for (const auto& [pass, plan] : plans) json[pass] = to_json(plan);
  save_json(a.json, json);
  return 0;
}

}  // namespace

Action add_plan(CLI::App& program) {
  auto arguments = std::make_shared<Arguments>();
  Arguments& a = *arguments;
  CLI::App& command = add_command(program, "plan", "Which kernel, tiles and workspace a problem would get, and why",
                                  "Examples:\n"
                                  "  tessera plan --nq 2048 --heads 32 --kv-heads 8 --dim 128 --type bf16 --causal\n"
                                  "  tessera plan --q-shape 1,2048,8,64 --pass backward --with bias,sinks --threads 4");
  const FlagStyle number{.value = "N", .group = "Shape"}, four{.value = "B,N,H,D", .group = "Shape", .count = 4};
  add_flag(command, "--batch", "Sequences (default: 1)", a.batch, number);
  add_flag(command, "--nq", "Queries (default: 2048)", a.nq, number);
  add_flag(command, "--nk", "Keys (default: as many as queries)", a.nk, number);
  add_flag(command, "--heads", "Query heads (default: 8)", a.heads, number);
  add_flag(command, "--kv-heads", "Key and value heads (default: as many as query heads)", a.kv_heads, number);
  add_flag(command, "--dim", "Head dimension of Q and K (default: 64)", a.dim, number);
  add_flag(command, "--dim-v", "Head dimension of V (default: as Q and K)", a.dim_v, number);
  add_flag(command, "--q-shape", "Queries as four numbers", a.q_shape, four);
  add_flag(command, "--k-shape", "Keys as four numbers (default: as the queries)", a.k_shape, four);
  add_type_flag(command, a.type, "f32, f16, bf16 or f64: type of Q, K, V, O (default: f32)");
  add_flag(command, "--kv-type", "f32, f16, bf16, e4m3 or i8: type of K and V (default: as Q)", a.kv_type,
           {.value = "TYPE", .choices = {"f32", "f16", "bf16", "e4m3", "i8"}});
  add_flag(command, "--pass", "forward, backward or both (the default)", a.pass,
           {.value = "NAME", .choices = {"forward", "backward", "both"}});
  const std::vector<std::string> optional{"bias",      "mask",   "slopes", "sinks", "dlse",     "state_in",
                                          "state_out", "scales", "qv",     "tree",  "positions"};
  add_flag(command, "--with",
           "Optional tensors: bias,mask,slopes,sinks,dlse,state_in,state_out, forward scales,qv,tree,positions", a.with,
           {.value = "LIST", .choices = optional});
  add_flag(command, "--part-invariant", "The bits do not depend on how the problem is cut into calls",
           a.part_invariant);
  add_flag(command, "--segment-rows", "dK and dV as a tree over segments of so many queries", a.segment_rows,
           {.value = "N"});
  add_flag(command, "--sm-margin", "Multiprocessors that persistent kernels leave free", a.sm_margin, {.value = "N"});
  add_flag(command, "--f32-out", "O and the gradients are f32", a.f32_out);
  add_json_flag(command, a.json);
  a.attention.add_to(command);
  a.execution.add_to(command);
  return [&command, arguments] { return plan(command, *arguments); };
}

}  // namespace tessera::cli
