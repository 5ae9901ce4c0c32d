// SPDX-License-Identifier: Apache-2.0
// The dispatches of the rungs; see plan.hpp.
#include "vulkan/plan.hpp"

#include <algorithm>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/tensor.hpp"
#include "gpu/arguments.hpp"
#include "vulkan/layout_check.hpp"
#include "vulkan/params.hpp"
#include "vulkan/spirv.hpp"

namespace tessera::vulkan {
namespace {

constexpr std::int64_t tile = 32, chunk = 64, threads = 64, most_dims = 256;
constexpr std::int64_t most_blocks = 0x7fffffff;
constexpr double most_rounds = 60000;  // of loops, where a driver ends them at 65535

enum RowWork { delta = 0, clear_unused = 1, sink_gradient = 2 };
enum NaiveWork { naive_forward = 0, naive_queries = 1, naive_keys = 2 };

constexpr Shader all_shaders[] = {{"forward", forward_spv},
                                  {"backward", backward_spv},
                                  {"bias_gradient", bias_gradient_spv},
                                  {"rows", rows_spv},
                                  {"naive", naive_spv},
                                  {"matrix_forward_f16", matrix_forward_f16_spv, true},
                                  {"matrix_forward_bf16", matrix_forward_bf16_spv, true},
                                  {"matrix_backward_f16", matrix_backward_f16_spv, true},
                                  {"matrix_backward_bf16", matrix_backward_bf16_spv, true}};
const Shader* shader(std::string_view name) { return std::ranges::find(all_shaders, name, &Shader::name); }

const TileShape* taken_tile = nullptr;

// Chunks of 64 dims that sums are kept of: 1, 2 or 4, so that there are few pipelines.
std::int32_t chunks(std::int64_t dims) { return dims <= chunk ? 1 : dims <= 2 * chunk ? 2 : 4; }

// Rounds of the loops over one tile: loads and products. Loops over an invocation's own numbers are unrolled.
double product_rounds(std::int64_t dims) { return static_cast<double>(ceil_div(dims, chunk)) * 42; }
double sum_rounds(std::int64_t dims) { return static_cast<double>(ceil_div(dims, chunk)) * 45; }
double dropout_rounds(const Problem& p) { return p.options.dropout > 0 ? 170 : 0; }
double tiles_of(std::int64_t length) { return static_cast<double>(ceil_div(length, tile)) + 1; }

void add(Steps& steps, Step step) {
  if (step.blocks > most_blocks && steps.reason.empty())
    steps.reason =
        text(step.name, " would take ", step.blocks, " workgroups; the Vulkan kernels take at most 2^31 - 1");
  if (step.blocks > 0) steps.list.push_back(std::move(step));
}

// What no Vulkan kernel takes.
std::string common_refusal(const Problem& p) {
  if (p.pages) return "k and v are paged; this kernel takes padded and packed ones";
  if (const std::string part = part_text(p); !part.empty())
    return text("the call is a part (", part, "); Vulkan kernels take positions that all sequences share, cpu kernels ",
                "parts of every kind");
  if (!has_plain_keys(p))
    return "k or v has another type than q, or scales; Vulkan kernels take neither, cpu kernels both";
  if (p.qv) return "qv is given; Vulkan kernels make scores of q and k alone, cpu kernels take it";
  if (p.tree_words > 0 || p.positions)
    return "a tree mask or positions are given; Vulkan kernels take neither, cpu kernels both";
  if (p.q_type == Type::f64) return "the type is f64; Vulkan kernels take f32, f16 and bf16";
  if (p.D > most_dims || p.Dv > most_dims)
    return text("head_dim is ", p.D, " and ", p.Dv, "; Vulkan kernels take up to ", most_dims);
  return "";
}

// What every backward pass begins with: rows that no sequence uses become 0, delta and LSE are prepared.
void add_start(Steps& steps, const Problem& p) {
  const std::int64_t query_rows = p.dq ? p.Hq * p.Nq : 0, key_rows = p.dk || p.dv ? p.Hk * p.Nk : 0;
  const std::int64_t rows = std::max(query_rows, key_rows) * (p.packed ? 1 : p.B);
  if ((p.packed || p.seqused_q || p.seqused_k) && !p.options.accumulate)
    add(steps, {"clear", shader("rows"), {clear_unused}, ceil_div(rows, threads), 300});
  add(steps, {"delta", shader("rows"), {delta}, gpu::query_blocks(p, threads), 200});
}

void add_end(Steps& steps, const Problem& p) {
  if (p.dbias) {
    const auto& shape = p.bias->shape;
    const double others = (shape[0] == 1 ? static_cast<double>(p.B) : 1) *
                          (shape[1] == 1 ? static_cast<double>(p.Hq) : 1) *
                          (shape[2] == 1 ? tiles_of(p.longest_q()) : 1) * (shape[3] == 1 ? tiles_of(p.longest_k()) : 1);
    add(steps, {"bias_gradient",
                shader("bias_gradient"),
                {},
                product({shape[0], shape[1], ceil_div(shape[2], tile), ceil_div(shape[3], tile)}),
                others * (product_rounds(p.D) + product_rounds(p.Dv) + dropout_rounds(p) + 40) + 1100});
  }
  const auto rows = static_cast<double>(p.packed ? p.Nq : p.B * p.Nq);
  if (p.dsinks)
    add(steps, {"sink_gradient",
                shader("rows"),
                {sink_gradient},
                p.Hq,
                rows / static_cast<double>(threads) + 10 * static_cast<double>(p.B) + 100});
}

// --- vk_matrix

// Rows of a subgroup, and subgroups of a workgroup; as in kernel/matrix.glsl and the kernels of vk_matrix.
constexpr std::int64_t strip = 16, subgroups = 8, matrix_rows = strip * subgroups;
const MatrixStandIn* stood_in = nullptr;

std::string matrix_refusal(const Problem& p, const MatrixFacts& facts) {
  if (std::string common = common_refusal(p); !common.empty()) return common;
  if (p.q_type == Type::f32) return "the type is f32; vk_matrix takes f16 and bf16, vk_tiled all three";
  if (p.pass == Pass::backward && p.d_o != p.q_type)
    return text("dO is ", name_of(*p.d_o), " and Q is ", name_of(p.q_type), "; this kernel takes both in one type");
  const std::string& missing = p.q_type == Type::f16 ? facts.f16.missing : facts.bf16.missing;
  return stood_in || missing.empty() ? "" : text("the device cannot: ", missing, "; vk_tiled needs none of it");
}

// What of a device's matrices a problem uses.
struct MatrixUse {
  MatrixUse(const Problem& p, const MatrixFacts& facts) : p(p), lanes(facts.lanes), lockstep(facts.lockstep) {
    const bool f16 = p.q_type == Type::f16;
    operands = f16 ? 1 : 2;
    shape = f16 ? facts.f16.shape : facts.bf16.shape;
    forward = shader(f16 ? "matrix_forward_f16" : "matrix_forward_bf16");
    backward = shader(f16 ? "matrix_backward_f16" : "matrix_backward_bf16");
    if (stood_in) shape = stood_in->shape, forward = &stood_in->forward, backward = &stood_in->backward;
  }

  // The row operands stay in registers where they and the sums take up to 20 KiB of a subgroup, 160 registers each
  // of 32.
  bool keeps_rows(bool sums_v, bool sums_qk) const {
    const bool is_forward = p.pass == Pass::forward;
    const std::int64_t D = chunks(p.D) * chunk, Dv = chunks(p.Dv) * chunk;
    const std::int64_t rows = is_forward || !sums_qk ? D : D + Dv;
    const std::int64_t sums = is_forward ? Dv : (sums_v ? Dv : 0) + (sums_qk ? D : 0);
    return strip * (2 * rows + 4 * sums) <= 20480;
  }

  Constants constants(bool keys, bool sums_v, bool sums_qk) const {
    const bool kept = !stood_in && keeps_rows(sums_v, sums_qk);
    return {chunks(p.Dv), chunks(p.D), keys,     static_cast<std::int32_t>(subgroups) * lanes,
            shape.m,      shape.n,     shape.k,  kept,
            sums_v,       sums_qk,     lockstep, operands};
  }

  // Of loops over one tile: loads, and an invocation's own scores, each several times.
  double score_rounds() const {
    const double own = static_cast<double>(strip * tile) / lanes;
    const double loads = static_cast<double>(chunks(p.D) + chunks(p.Dv)) * 2 * (64.0 / lanes + 128.0 / lanes + 2);
    return 4 * own + loads + (p.options.dropout > 0 ? 11 * own : 0) + 60;
  }

  const Problem& p;
  std::int32_t lanes;
  bool lockstep;
  std::int32_t operands;  // their kind
  MatrixShape shape;
  const Shader *forward, *backward;
};

}  // namespace

std::span<const Shader> shaders() { return all_shaders; }

void stand_in_for_matrices(const MatrixStandIn* stand_in) { stood_in = stand_in; }

Steps plan_matrix(const Problem& p, const MatrixFacts& facts) {
  Steps steps;
  steps.reason = matrix_refusal(p, facts);
  if (!steps.reason.empty()) return steps;
  const MatrixUse use(p, facts);
  steps.note = text("matrices of ", use.shape.m, "x", use.shape.n, "x", use.shape.k, ", subgroups of ", facts.lanes);
  const double scores = use.score_rounds();
  if (p.pass == Pass::forward) {
    add(steps, {"forward", use.forward, use.constants(false, false, true), gpu::query_blocks(p, matrix_rows),
                tiles_of(p.longest_k()) * scores});
    return steps;
  }
  add_start(steps, p);
  if (p.dq)
    add(steps, {"backward of queries", use.backward, use.constants(false, false, true),
                gpu::query_blocks(p, matrix_rows), tiles_of(p.longest_k()) * scores});
  const double queries = tiles_of(p.longest_q()) * static_cast<double>(p.heads_per_kv());
  const auto keys = [&](const char* name, bool v, bool k) {
    add(steps, {name, use.backward, use.constants(true, v, k), gpu::key_blocks(p, matrix_rows), queries * scores});
  };
  const bool together = std::max(p.D, p.Dv) <= 2 * chunk;  // as for vk_tiled
  if ((p.dk || p.dv) && together) keys("backward of keys", p.dv.has_value(), p.dk.has_value());
  if (p.dv && !together) keys("backward of keys: dV", true, false);
  if (p.dk && !together) keys("backward of keys: dK", false, true);
  add_end(steps, p);
  return steps;
}

void take_tile(const TileShape* shape) { taken_tile = shape; }

Steps plan_tiled(const Problem& p, const MatrixFacts& facts) {
  Steps steps;
  steps.reason = common_refusal(p);
  if (!steps.reason.empty()) return steps;
  const double scores = product_rounds(p.D) + dropout_rounds(p) + 40;
  if (p.pass == Pass::forward) {
    const TileShape shape = taken_tile ? *taken_tile : facts.wide ? wide_tile : small_tile;
    const std::int32_t rows = shape.own * shape.row_threads;
    add(steps, {"forward",
                shader("forward"),
                {chunks(p.Dv), 0, 0, shape.row_threads * shape.column_threads, shape.row_threads, shape.column_threads,
                 shape.own, shape.depth},
                gpu::query_blocks(p, rows),
                tiles_of(p.longest_k()) * (scores + sum_rounds(p.Dv))});
    return steps;
  }
  add_start(steps, p);
  const double pairs = scores + product_rounds(p.Dv);
  if (p.dq)
    add(steps, {"backward of queries",
                shader("backward"),
                {0, chunks(p.D), 0},
                gpu::query_blocks(p, tile),
                tiles_of(p.longest_k()) * (pairs + sum_rounds(p.D))});
  const double queries = tiles_of(p.longest_q()) * static_cast<double>(p.heads_per_kv());
  const auto keys = [&](const char* name, std::int32_t v, std::int32_t k) {
    add(steps, {name,
                shader("backward"),
                {v, k, 1},
                gpu::key_blocks(p, tile),
                queries * (pairs + sum_rounds(p.D) + sum_rounds(p.Dv))});
  };
  // Sums of dK and of dV do not fit into the registers together beyond 128 dims.
  const std::int64_t widest = std::max(p.D, p.Dv);
  if ((p.dk || p.dv) && widest <= 2 * chunk) keys("backward of keys", chunks(widest), chunks(widest));
  if (p.dv && widest > 2 * chunk) keys("backward of keys: dV", chunks(p.Dv), 0);
  if (p.dk && widest > 2 * chunk) keys("backward of keys: dK", 0, chunks(p.D));
  add_end(steps, p);
  return steps;
}

Steps plan_naive(const Problem& p, const MatrixFacts&) {
  Steps steps;
  steps.reason = common_refusal(p);
  if (!steps.reason.empty()) return steps;
  // Rounds for the 64 rows that are taken at a time: products by one invocation, then all of them by each.
  const double rows = static_cast<double>(p.D + p.Dv) / 4 + 2 * threads + dropout_rounds(p) / 8;
  const auto rounds = [&](std::int64_t length) { return static_cast<double>(ceil_div(length, threads)) * rows; };
  if (p.pass == Pass::forward) {
    add(steps, {"naive forward", shader("naive"), {naive_forward}, gpu::query_blocks(p, 1), rounds(p.longest_k())});
    return steps;
  }
  add_start(steps, p);
  if (p.dq)
    add(steps, {"naive backward of queries",
                shader("naive"),
                {naive_queries},
                gpu::query_blocks(p, 1),
                rounds(p.longest_k())});
  if (p.dk || p.dv)
    add(steps, {"naive backward of keys",
                shader("naive"),
                {naive_keys},
                gpu::key_blocks(p, 1),
                rounds(p.longest_q()) * static_cast<double>(p.heads_per_kv())});
  add_end(steps, p);
  return steps;
}

std::string refusal(const Steps& steps, const Facts& facts) {
  if (!facts.ends_long_loops) return "";
  for (const Step& step : steps.list)
    if (step.rounds > most_rounds)
      return text(step.name, " may take ", static_cast<std::int64_t>(step.rounds), " rounds of loops; ", facts.name,
                  " ends them all, and says nothing, after 65535. Shorter sequences work");
  return "";
}

}  // namespace tessera::vulkan
