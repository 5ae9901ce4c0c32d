// SPDX-License-Identifier: Apache-2.0
// The dispatches of the rungs; see plan.hpp.
#include "vulkan/plan.hpp"

#include <algorithm>
#include <cstdio>

#include "core/environment.hpp"
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

// Kernels of GPUs are made for what a problem is known to have: operands that are read ahead, and no options. That of
// processors, which are slow to compile, is one for all.
struct TileUse {
  TileUse(const Problem& p, const TileShape& shape) : t(shape) {
    const ScoreOptions on = p.score_options();
    options = t == small_tile || on.softcap || on.alibi || on.bias || on.mask || on.dropout;
    const bool f32 = p.q_type == Type::f32 && (p.pass == Pass::forward || p.d_o == Type::f32);
    // An invocation's products of 8 x 8 read fewer quads than those of 8 x 4.
    if (t.own == 8 && t.column_threads == 16 && p.D > chunk && p.Dv > chunk) values = 2;
    plain = t != small_tile && f32 && p.D % 4 == 0 && p.Dv % 4 == 0 && p.alignment == 16;
  }
  Constants constants(std::int32_t v_chunks, std::int32_t qk_chunks, bool keys) const {
    return {(v_chunks + values - 1) / values,
            (qk_chunks + values - 1) / values,
            keys,
            t.threads(),
            t.row_threads,
            t.column_threads,
            t.own,
            t.depth,
            t.patch,
            t.quads(),
            plain,
            options,
            values * TileShape::chunk};
  }
  TileShape t;
  bool options, plain;
  std::int32_t values = 1;  // chunks that sums are made of at a time
};

// What every backward pass begins with: rows that no sequence uses become 0, delta and LSE are prepared.
void add_start(Steps& steps, const Problem& p) {
  const std::int64_t query_rows = p.dq ? p.Hq * p.Nq : 0, key_rows = p.dk || p.dv ? p.Hk * p.Nk : 0;
  const std::int64_t rows = std::max(query_rows, key_rows) * (p.packed ? 1 : p.B);
  if ((p.packed || p.seqused_q || p.seqused_k) && !p.options.accumulate)
    add(steps, {"clear", shader("rows"), {clear_unused}, ceil_div(rows, threads), 300});
  add(steps, {"delta", shader("rows"), {delta}, gpu::query_blocks(p, threads), 200});
}

void add_end(Steps& steps, const Problem& p, const TileShape& shape) {
  if (p.dbias) {
    const auto& bias = p.bias->shape;
    const double others = (bias[0] == 1 ? static_cast<double>(p.B) : 1) *
                          (bias[1] == 1 ? static_cast<double>(p.Hq) : 1) *
                          (bias[2] == 1 ? tiles_of(p.longest_q()) : 1) * (bias[3] == 1 ? tiles_of(p.longest_k()) : 1);
    add(steps, {"bias_gradient", shader("bias_gradient"), TileUse(p, shape).constants(0, 0, false),
                product({bias[0], bias[1], ceil_div(bias[2], shape.rows()), ceil_div(bias[3], shape.columns())}),
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
constexpr std::int32_t wide_matrix_bytes = 38 * 1024;  // of shared memory: what tiles of 64 columns take
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
  MatrixUse(const Problem& p, const MatrixFacts& facts) :
      p(p), lanes(facts.lanes), shared_bytes(facts.shared_bytes), lockstep(facts.lockstep) {
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

  // Tiles of 64 columns, not 32: where shared memory has room for them, registers for an invocation's scores beside
  // sums, and a workgroup an invocation for each column.
  bool is_wide() const {
    const std::int64_t most = p.pass == Pass::forward ? 2 * chunk : chunk;
    return shared_bytes >= wide_matrix_bytes && lanes * subgroups >= 64 && std::max(p.D, p.Dv) <= most;
  }

  Constants constants(bool keys, bool sums_v, bool sums_qk) const {
    const bool kept = !stood_in && keeps_rows(sums_v, sums_qk);
    return {chunks(p.Dv), chunks(p.D), keys,     static_cast<std::int32_t>(subgroups) * lanes,
            shape.m,      shape.n,     shape.k,  kept,
            sums_v,       sums_qk,     lockstep, operands,
            is_wide()};
  }

  // Of loops over one tile: loads, and an invocation's own scores, each several times.
  double score_rounds() const {
    const double own = static_cast<double>(strip * tile) / lanes;
    const double loads = static_cast<double>(chunks(p.D) + chunks(p.Dv)) * 2 * (64.0 / lanes + 128.0 / lanes + 2);
    return 4 * own + loads + (p.options.dropout > 0 ? 11 * own : 0) + 60;
  }

  const Problem& p;
  std::int32_t lanes, shared_bytes;
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
  const bool together = std::max(p.D, p.Dv) <= 2 * chunk;  // the sums of more do not fit into registers
  if ((p.dk || p.dv) && together) keys("backward of keys", p.dv.has_value(), p.dk.has_value());
  if (p.dv && !together) keys("backward of keys: dV", true, false);
  if (p.dk && !together) keys("backward of keys: dK", false, true);
  add_end(steps, p, tile_for(p, facts).shape);
  return steps;
}

TileChoice tile_for(const Problem& p, const MatrixFacts& facts) {
  const auto fits = [&](const TileShape& t) {
    return t.threads() <= facts.invocations && t.shared_bytes() <= facts.shared_bytes;
  };
  const char* wanted = environment("TESSERA_VULKAN_TILE");
  if (wanted) {
    TileShape t{};
    int end = 0;
    const bool read = std::sscanf(wanted, "%dx%dx%dx%dx%d%n", &t.row_threads, &t.column_threads, &t.own, &t.depth,
                                  &t.patch, &end) == 5 &&
                      wanted[end] == 0;
    const auto one_of = [](std::int32_t x, std::int32_t a, std::int32_t b) { return x == a || x == b; };
    if (!read || !one_of(t.row_threads, 8, 16) || !one_of(t.column_threads, 8, 16) || !one_of(t.own, 4, 8) ||
        !one_of(t.depth, 32, 64) || !one_of(t.patch, 8, t.column_threads) || t.rows() < t.columns())
      return {small_tile,
              text("TESSERA_VULKAN_TILE is '", wanted, "'; must be five numbers, as 16x16x4x32x8: 8 or 16 invocations ",
                   "along rows and along columns, 4 or 8 rows of each, 32 or 64 dims, 8 or all columns of a patch; no ",
                   "fewer rows than columns")};
    if (!fits(t))
      return {small_tile, text("TESSERA_VULKAN_TILE is '", wanted, "', which takes ", t.threads(), " invocations and ",
                               t.shared_bytes(), " bytes of shared memory; the device has ", facts.invocations, " and ",
                               facts.shared_bytes)};
    return {t, ""};
  }
  // Sums of more dims and eight rows are too many even there.
  if (facts.many_registers && std::max(p.D, p.Dv) <= 2 * chunk && fits(tall_tile)) return {tall_tile, ""};
  return {facts.gpu && fits(wide_tile) ? wide_tile : small_tile, ""};
}

Steps plan_tiled(const Problem& p, const MatrixFacts& facts) {
  Steps steps;
  const auto [shape, reason] = tile_for(p, facts);
  steps.reason = common_refusal(p);
  if (steps.reason.empty()) steps.reason = reason;
  if (!steps.reason.empty()) return steps;
  steps.note = text("tiles of ", shape.rows(), " x ", shape.columns(), ", ", shape.threads(), " invocations");
  const TileUse use(p, shape);
  const double scores = product_rounds(p.D) + dropout_rounds(p) + 40;
  if (p.pass == Pass::forward) {
    add(steps, {"forward", shader("forward"), use.constants(chunks(p.Dv), 0, false), gpu::query_blocks(p, shape.rows()),
                tiles_of(p.longest_k()) * (scores + sum_rounds(p.Dv))});
    return steps;
  }
  add_start(steps, p);
  const double pairs = scores + product_rounds(p.Dv);
  if (p.dq)
    add(steps, {"backward of queries", shader("backward"), use.constants(0, chunks(p.D), false),
                gpu::query_blocks(p, shape.rows()), tiles_of(p.longest_k()) * (pairs + sum_rounds(p.D))});
  const double queries = tiles_of(p.longest_q()) * static_cast<double>(p.heads_per_kv());
  const auto keys = [&](const char* name, std::int32_t v, std::int32_t k) {
    add(steps, {name, shader("backward"), use.constants(v, k, true), gpu::key_blocks(p, shape.rows()),
                queries * (pairs + sum_rounds(p.D) + sum_rounds(p.Dv))});
  };
  // Where sums of dK and of dV, beside S and dP, do not fit into an invocation's registers, they are made apart. With
  // operands that are read ahead and with addresses 96 of them are about all that NVIDIA's 255 registers hold; the
  // smallest tile reads nothing ahead.
  const std::int32_t widest = chunks(std::max(p.D, p.Dv)), scores_each = 4 * shape.own;
  const std::int32_t sums = 2 * widest * TileShape::chunk * shape.own / shape.column_threads;
  const bool together = sums + 2 * scores_each <= (shape == small_tile ? 160 : 96);
  if ((p.dk || p.dv) && together) keys("backward of keys", p.dv ? widest : 0, p.dk ? widest : 0);
  if (p.dv && !together) keys("backward of keys: dV", chunks(p.Dv), 0);
  if (p.dk && !together) keys("backward of keys: dK", 0, chunks(p.D));
  add_end(steps, p, shape);
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
  add_end(steps, p, small_tile);
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
