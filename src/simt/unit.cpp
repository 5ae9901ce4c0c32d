// Generated units; see unit.hpp.
#include "simt/unit.hpp"

#include "core/failure.hpp"

namespace tessera::simt {

namespace {

std::string name_of(Element element) {
  const char* names[] = {"f32", "f16", "bf16", "none"};
  return text("tessera::simt::Element::", names[static_cast<int>(element)]);
}
const char* name_of(bool value) { return value ? "true" : "false"; }

std::string config_text(const Config& c) {
  return text("{.threads = ", c.threads, ", .D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", name_of(c.element),
              ", .o = ", name_of(c.o), ", .d_o = ", name_of(c.d_o), ", .dq = ", name_of(c.dq),
              ", .dk = ", name_of(c.dk), ", .dv = ", name_of(c.dv), ", .dbias = ", name_of(c.dbias),
              ", .block_rows = ", c.block_rows, ", .block_cols = ", c.block_cols,
              ", .rows_per_thread = ", c.rows_per_thread, ", .stages = ", c.stages,
              ", .blocks_per_sm = ", c.blocks_per_sm, ", .tensor_cores = ", name_of(c.tensor_cores),
              ", .wide_loads = ", name_of(c.wide_loads), ", .own_delta = ", name_of(c.own_delta),
              ", .softcap = ", name_of(c.softcap), ", .alibi = ", name_of(c.alibi), ", .mask = ", name_of(c.mask),
              ", .dropout = ", name_of(c.dropout), ", .bias = ", name_of(c.bias), "}");
}

}  // namespace

std::string unit_text(const Function& function, const Config& c) {
  return text("#include \"", function.file, "\"\nconstexpr tessera::simt::Config config", config_text(c),
              ";\nextern \"C\" __global__ __launch_bounds__(config.threads, config.blocks_per_sm) void ", kernel_symbol,
              "(const __grid_constant__ tessera::simt::", function.parameters, " p) { tessera::simt::", function.name,
              "<config>(p); }\n");
}

}  // namespace tessera::simt
