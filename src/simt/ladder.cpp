// The list of rungs and what they share; see ladder.hpp.
#include "simt/ladder.hpp"

#include <algorithm>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/tensor.hpp"

namespace tessera::simt {
namespace {

constexpr Function delta{"simt/kernel/delta.cuh", "delta", "BackwardParams"};
constexpr Function clear{"simt/kernel/clear.cuh", "clear", "BackwardParams"};
constexpr Function clear_sums{"simt/kernel/clear.cuh", "clear_sums", "BackwardParams"};
constexpr Function sink_gradient{"simt/kernel/sink_gradient.cuh", "sink_gradient", "BackwardParams"};
constexpr Function convert_queries{"simt/kernel/convert.cuh", "convert_queries", "BackwardParams"};
constexpr Function convert_keys{"simt/kernel/convert.cuh", "convert_keys", "BackwardParams"};

// The kernels that come before and after a rung's own have a warp per row. They read some types and dims and nothing
// else: with the rest left at its defaults, one compiled kernel serves every option.
constexpr int row_warps = 4, row_threads = 32 * row_warps;

Config delta_config(const Problem& p) {
  const Config c = config_of(p, row_threads);
  return {.threads = row_threads, .Dv = c.Dv, .o = c.o, .d_o = c.d_o};
}

Config gradient_config(const Problem& p) {
  const Config c = config_of(p, row_threads);
  return {.threads = row_threads, .D = c.D, .Dv = c.Dv, .dq = c.dq, .dk = c.dk, .dv = c.dv};
}

constexpr Rung list[] = {{"vector", vector_steps},
                         {"vector_fma", vector_fma_steps},
                         {"warp", warp_steps},
                         {"tiled", tiled_steps},
                         {"naive", naive_steps}};

}  // namespace

std::span<const Rung> rungs() { return list; }

void Steps::add(const Function& function, const Config& config, std::int64_t blocks, int shared_bytes) {
  if (blocks > most_blocks && reason.empty())
    reason = text(function.name, " would take ", blocks, " blocks; a GPU launches at most ", most_blocks);
  if (blocks > 0) list.push_back({function, config, blocks, shared_bytes});
}

void add_backward_start(Steps& steps, const Problem& p, bool with_delta) {
  if (workspace_bytes(p, steps.accumulators) > most_bytes && steps.reason.empty())
    steps.reason = "the workspace would take more than 2^56 bytes, which no process can have";
  const std::int64_t query_rows = p.dq ? p.Hq * p.Nq : 0, key_rows = p.dk || p.dv ? p.Hk * p.Nk : 0;
  const std::int64_t rows = std::max(query_rows, key_rows) * (p.packed ? 1 : p.B);
  const bool has_unused = p.packed || p.seqused_q || p.seqused_k;
  if (has_unused && !p.options.accumulate) steps.add(clear, gradient_config(p), ceil_div(rows, row_warps));
  const std::int64_t sum_bytes = workspace_bytes(p, steps.accumulators) - workspace_bytes(p, {});
  steps.add(clear_sums, {.threads = row_threads}, rounded_up(sum_bytes, 16 * row_threads) / (16 * row_threads));
  if (with_delta) steps.add(delta, delta_config(p), query_blocks(p, row_warps));
}

void add_conversion(Steps& steps, const Problem& p) {
  const Config c = gradient_config(p);
  const Accumulators& a = steps.accumulators;
  if (a.dq > 0) steps.add(convert_queries, c, query_blocks(p, row_warps));
  if (a.dk > 0 || a.dv > 0) steps.add(convert_keys, c, key_blocks(p, row_warps));
}

void add_sink_gradient(Steps& steps, const Problem& p) {
  if (p.dsinks) steps.add(sink_gradient, {.threads = 256}, p.Hq);
}

std::string common_refusal(const Problem& p) {
  if (p.device.type != DeviceType::cuda)
    return text("device is ", tessera::name_of(p.device), "; this kernel runs on cuda");
  if (p.q_type == Type::f64) return "type is f64; this kernel takes f32, f16 and bf16";
  return "";
}

std::string early_refusal(const Problem& p) {
  const Options& o = p.options;
  if (p.mask) return "a mask tensor is given; this rung takes causal and window only";
  if (p.bias) return "a bias is given; this rung takes none";
  if (p.slopes) return "ALiBi slopes are given; this rung takes none";
  if (p.sinks) return "sinks are given; this rung takes none";
  if (o.softcap > 0) return text("softcap is ", o.softcap, "; this rung takes none");
  if (o.dropout > 0) return text("dropout is ", o.dropout, "; this rung takes none");
  if (o.accumulate) return "accumulate is set; this rung only writes";
  return "";
}

}  // namespace tessera::simt
