// SPDX-License-Identifier: Apache-2.0
// The launches before, after or instead of a family's own, which have a warp per row or a block per head; see step.hpp.
#include <algorithm>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "gpu/step.hpp"
#include "gpu/unit.hpp"

namespace tessera::gpu {
namespace {

constexpr int row_warps = 4, row_threads = 32 * row_warps;

Step row_step(const char* file, const char* function, const RowConfig& config, std::int64_t blocks,
              const char* parameters = "BackwardParams") {
  const UnitText unit{.file = text("gpu/kernel/", file, ".cuh"),
                      .function = text("tessera::gpu::", function, "<config>"),
                      .parameters = text("tessera::gpu::", parameters),
                      .config = text("tessera::gpu::RowConfig config", spelled(config)),
                      .launch_bounds = "config.threads, 1"};
  return {.name = function, .unit = unit.str(), .blocks = blocks, .threads = config.threads};
}

Element element_or_f32(const std::optional<Type>& type) { return type ? element_of(*type) : Element::f32; }

RowConfig delta_config(const Problem& p) {
  return {
      .threads = row_threads, .Dv = static_cast<int>(p.Dv), .o = element_of(p.o_type), .d_o = element_or_f32(p.d_o)};
}

RowConfig gradient_config(const Problem& p) {
  return {.threads = row_threads,
          .D = static_cast<int>(p.D),
          .Dv = static_cast<int>(p.Dv),
          .dq = element_or_f32(p.dq),
          .dk = element_or_f32(p.dk),
          .dv = element_or_f32(p.dv)};
}

}  // namespace

Steps Steps::refused(std::string reason) {
  Steps steps;
  steps.reason = std::move(reason);
  return steps;
}

void Steps::add(Step step) {
  if (step.blocks > most_blocks && reason.empty())
    reason = text(step.name, " would take ", step.blocks, " blocks; a GPU launches at most ", most_blocks);
  if (step.blocks > 0) list.push_back(std::move(step));
}

void add_passed_states(Steps& steps, const Problem& p) {
  const RowConfig config{
      .threads = row_threads, .Dv = static_cast<int>(p.Dv), .o = p.state_out ? Element::f32 : element_of(p.o_type)};
  Step step = row_step("state", "pass_states", config, query_blocks(p, row_warps), "StateParams");
  const float whole = static_cast<float>(dropout_scale(dropout_threshold(p.options.dropout)));
  step.gives<StateParams>([p, whole](const Given& given) {
    return StateParams{given.forward(), states_of(p, given.call), whole};
  });
  steps.add(std::move(step));
}

Steps mixed_steps(const Problem& p, const cuda::Target& target, const char* name, ManyRows many, AddSteps few_rows_of) {
  if (p.pass != Pass::forward) return Steps::refused("pass is backward; this kernel is for the forward pass");
  if (!p.pages) return Steps::refused(text("k and v are in no pages; ", name, " takes padded and packed ones"));
  if (!p.packed && !p.seqused_q)
    return Steps::refused(text("every sequence has ", p.Nq, " queries; this is for batches of many and of few"));
  if (p.longest_q() * p.heads_per_kv() <= few_rows)
    return Steps::refused(text("no sequence has more than ", few_rows, " rows of queries for each KV head"));
  Steps steps = many(p, target, few_rows / p.heads_per_kv() + 1);
  few_rows_of(steps, p, target);
  return steps;
}

void add_backward_start(Steps& steps, const Problem& p, bool with_delta) {
  if (workspace_bytes(p, steps.accumulators) > most_bytes && steps.reason.empty())
    steps.reason = "the workspace would take more than 2^56 bytes, which no process can have";
  const std::int64_t query_rows = p.dq ? p.Hq * p.Nq : 0, key_rows = p.dk || p.dv ? p.Hk * p.Nk : 0;
  const std::int64_t rows = std::max(query_rows, key_rows) * (p.packed ? 1 : p.B);
  const bool has_unused = p.packed || p.seqused_q || p.seqused_k;
  if (has_unused && !p.options.accumulate)
    steps.add(row_step("clear", "clear", gradient_config(p), ceil_div(rows, row_warps)));
  const std::int64_t sum_bytes = workspace_bytes(p, steps.accumulators) - workspace_bytes(p, {});
  steps.add(row_step("clear", "clear_sums", {.threads = row_threads},
                     rounded_up(sum_bytes, 16 * row_threads) / (16 * row_threads)));
  if (with_delta) steps.add(row_step("delta", "delta", delta_config(p), query_blocks(p, row_warps)));
}

void add_conversion(Steps& steps, const Problem& p) {
  const RowConfig c = gradient_config(p);
  const Accumulators& a = steps.accumulators;
  if (a.dq > 0) steps.add(row_step("convert", "convert_queries", c, query_blocks(p, row_warps)));
  if (a.dk > 0 || a.dv > 0) steps.add(row_step("convert", "convert_keys", c, key_blocks(p, row_warps)));
}

void add_sink_gradient(Steps& steps, const Problem& p) {
  if (p.dsinks) steps.add(row_step("sink_gradient", "sink_gradient", {.threads = 256}, p.Hq));
}

}  // namespace tessera::gpu
