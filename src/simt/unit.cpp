// Generated units; see unit.hpp.
#include "simt/unit.hpp"

#include "core/failure.hpp"

namespace tessera::simt {

std::string spelled(Element element) {
  const char* names[] = {"f32", "f16", "bf16", "none"};
  return text("tessera::simt::Element::", names[static_cast<int>(element)]);
}
const char* spelled(bool value) { return value ? "true" : "false"; }

namespace {

std::string config_text(const Config& c) {
  return text("{.threads = ", c.threads, ", .D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element),
              ", .o = ", spelled(c.o), ", .d_o = ", spelled(c.d_o), ", .dq = ", spelled(c.dq),
              ", .dk = ", spelled(c.dk), ", .dv = ", spelled(c.dv), ", .dbias = ", spelled(c.dbias),
              ", .block_rows = ", c.block_rows, ", .block_cols = ", c.block_cols,
              ", .rows_per_thread = ", c.rows_per_thread, ", .stages = ", c.stages,
              ", .blocks_per_sm = ", c.blocks_per_sm, ", .tensor_cores = ", spelled(c.tensor_cores),
              ", .wide_loads = ", spelled(c.wide_loads), ", .own_delta = ", spelled(c.own_delta),
              ", .softcap = ", spelled(c.softcap), ", .alibi = ", spelled(c.alibi), ", .mask = ", spelled(c.mask),
              ", .dropout = ", spelled(c.dropout), ", .bias = ", spelled(c.bias), "}");
}

}  // namespace

std::string unit_text(const Function& function, const Config& c) {
  return text("#include \"", function.file, "\"\nconstexpr tessera::simt::Config config", config_text(c),
              ";\nextern \"C\" __global__ __launch_bounds__(config.threads, config.blocks_per_sm) void ", kernel_symbol,
              "(const __grid_constant__ tessera::simt::", function.parameters, " p) { tessera::simt::", function.name,
              "<config>(p); }\n");
}

}  // namespace tessera::simt
