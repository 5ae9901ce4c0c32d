// SPDX-License-Identifier: Apache-2.0
// Generated units; see unit.hpp.
#include "sm90/unit.hpp"

#include <cstdlib>

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "gpu/unit.hpp"

namespace tessera::sm90 {
namespace {

using gpu::spelled;
using gpu::UnitText;

// What a unit begins with, for development: waits end with a message, not never.
std::string preamble() {
  const char* tries = environment("TESSERA_BOUNDED_WAITS");
  return tries ? text("#define TESSERA_BOUNDED_WAITS ", std::strtoul(tries, nullptr, 10), "\n") : "";
}

// "tessera::sm90::Config config{...}"
std::string config_text(const Config& c) {
  return text("tessera::sm90::Config config{.D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element),
              ", .o = ", spelled(c.o), ", .warpgroups = ", c.warpgroups, ", .block_keys = ", c.block_keys,
              ", .stages = ", c.stages, ", .q_stages = ", c.q_stages, ", .p_buffers = ", c.p_buffers,
              ", .paged = ", spelled(c.paged), ", .stages_O = ", spelled(c.stages_O),
              ", .carried = ", spelled(c.carried), ", .halves_S = ", spelled(c.halves_S),
              ", .general = ", spelled(c.general), ", .options = ", spelled(c.options), "}");
}
std::string config_text(const BackwardConfig& c) {
  return text("tessera::sm90::BackwardConfig config{.side = tessera::gpu::Side::", owns_queries(c) ? "queries" : "keys",
              ", .D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element), ", .dQK = ", spelled(c.dQK),
              ", .dV = ", spelled(c.dV), ", .warpgroups = ", c.warpgroups, ", .block_columns = ", c.block_columns,
              ", .stages = ", c.stages, ", .vo_stages = ", c.vo_stages, ", .drains = ", spelled(c.drains),
              ", .paired = ", spelled(c.paired), ", .halves_S = ", spelled(c.halves_S),
              ", .general = ", spelled(c.general), ", .options = ", spelled(c.options), "}");
}
std::string config_text(const OnePassConfig& c) {
  return text("tessera::sm90::OnePassConfig config{.D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element),
              ", .dK = ", spelled(c.dK), ", .dV = ", spelled(c.dV), ", .block_queries = ", c.block_queries,
              ", .stages = ", c.stages, ", .ordered = ", spelled(c.ordered), "}");
}

constexpr const char* one_block = "tessera::sm90::threads_of(config), 1";  // on a multiprocessor: it takes all of it

}  // namespace

std::string forward_unit_text(const Config& c) {
  return UnitText{.file = "sm90/kernel/forward.cuh",
                  .function = "tessera::sm90::forward<config>",
                  .parameters = c.paged     ? "tessera::sm90::PagedParams"
                                : c.carried ? "tessera::sm90::CarriedParams"
                                            : "tessera::sm90::ForwardParams",
                  .config = config_text(c),
                  .launch_bounds = one_block,
                  .preamble = preamble()}
      .str();
}

std::string backward_unit_text(const BackwardConfig& c) {
  return UnitText{.file = "sm90/kernel/backward.cuh",
                  .function = "tessera::sm90::backward<config>",
                  .parameters = "tessera::sm90::BackwardParams",
                  .config = config_text(c),
                  .launch_bounds = one_block,
                  .preamble = preamble()}
      .str();
}

std::string one_pass_unit_text(const OnePassConfig& c) {
  return UnitText{.file = "sm90/kernel/one_pass.cuh",
                  .function = "tessera::sm90::one_pass<config>",
                  .parameters = "tessera::sm90::OnePassParams",
                  .config = config_text(c),
                  .launch_bounds = "tessera::sm90::one_pass_threads, 1",
                  .preamble = preamble()}
      .str();
}

std::string prepare_unit_text(const OnePassConfig& c, Element o, int lanes) {
  return UnitText{.file = "sm90/kernel/prepare.cuh",
                  .function = text("tessera::sm90::prepare<config, ", spelled(o), ", ", lanes, ">"),
                  .parameters = "tessera::sm90::PrepareParams",
                  .config = config_text(c),
                  .launch_bounds = text(prepare_threads)}
      .str();
}

std::string finish_unit_text(const OnePassConfig& c, Element dQ) {
  return UnitText{.file = "sm90/kernel/finish.cuh",
                  .function = text("tessera::sm90::finish<config, ", spelled(dQ), ">"),
                  .parameters = "tessera::sm90::FinishParams",
                  .config = config_text(c),
                  .launch_bounds = text(128 * parts_of(c))}
      .str();
}

std::string restart_unit_text() {
  return UnitText{.file = "sm90/kernel/restart.cuh",
                  .function = "tessera::sm90::restart",
                  .parameters = "tessera::sm90::RestartParams",
                  .config = "",
                  .launch_bounds = "1"}
      .str();
}

}  // namespace tessera::sm90
