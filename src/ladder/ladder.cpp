// SPDX-License-Identifier: Apache-2.0
// The list of rungs and what they share; see ladder.hpp.
#include "ladder/ladder.hpp"

#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "gpu/unit.hpp"

namespace tessera::ladder {
namespace {

Algorithm rung(const char* name, Steps (*steps)(const Problem&, const cuda::Target&)) {
  return {name, name, [steps](const Problem& p, const cuda::Target& target) {
            if (p.q_type == Type::f64) return Steps::refused("type is f64; this kernel takes f32, f16 and bf16");
            return steps(p, target);
          }};
}

std::string spelled(const Config& c) {
  using gpu::spelled;
  return text("{.threads = ", c.threads, ", .D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element),
              ", .o = ", spelled(c.o), ", .d_o = ", spelled(c.d_o), ", .dq = ", spelled(c.dq),
              ", .dk = ", spelled(c.dk), ", .dv = ", spelled(c.dv), ", .dbias = ", spelled(c.dbias),
              ", .block_rows = ", c.block_rows, ", .block_cols = ", c.block_cols,
              ", .rows_per_thread = ", c.rows_per_thread, ", .stages = ", c.stages,
              ", .blocks_per_sm = ", c.blocks_per_sm, ", .tensor_cores = ", spelled(c.tensor_cores),
              ", .wide_loads = ", spelled(c.wide_loads), ", .own_delta = ", spelled(c.own_delta),
              ", .options = ", spelled(c.options), "}");
}

}  // namespace

std::vector<Algorithm> algorithms() {
  return {rung("vector", vector_steps), rung("vector_fma", vector_fma_steps), rung("warp", warp_steps),
          rung("tiled", tiled_steps), rung("naive", naive_steps)};
}

Config config_of(const Problem& p, int threads) {
  Config c{.threads = threads, .D = static_cast<int>(p.D), .Dv = static_cast<int>(p.Dv)};
  c.element = element_of(p.q_type);
  c.o = element_of(p.o_type);
  if (p.d_o) c.d_o = element_of(*p.d_o);
  if (p.dq) c.dq = element_of(*p.dq);
  if (p.dk) c.dk = element_of(*p.dk);
  if (p.dv) c.dv = element_of(*p.dv);
  if (p.dbias) c.dbias = element_of(*p.dbias);
  c.wide_loads = p.alignment == 16;
  c.options = score_config(p);
  return c;
}

Step step(const Function& function, const Config& c, std::int64_t blocks, int shared_bytes) {
  const UnitText unit{.file = text("ladder/kernel/", function.file, ".cuh"),
                      .function = text("tessera::ladder::", function.name, "<config>"),
                      .parameters = text("tessera::gpu::", function.parameters),
                      .config = text("tessera::ladder::Config config", spelled(c)),
                      .launch_bounds = "config.threads, config.blocks_per_sm"};
  return {
      .name = function.name, .unit = unit.str(), .blocks = blocks, .threads = c.threads, .shared_bytes = shared_bytes};
}

std::string early_refusal(const Problem& p) {
  if (p.mask) return "a mask tensor is given; this rung takes causal and window only";
  if (p.sinks) return "sinks are given; this rung takes none";
  if (const std::string option = score_option_text(p); !option.empty()) return option + "; this rung takes none";
  if (p.options.accumulate) return "accumulate is set; this rung only writes";
  return "";
}

}  // namespace tessera::ladder
