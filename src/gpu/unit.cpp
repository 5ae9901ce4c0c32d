// SPDX-License-Identifier: Apache-2.0
// Generated units; see unit.hpp.
#include "gpu/unit.hpp"

#include "core/failure.hpp"

namespace tessera::gpu {

std::string spelled(Element element) {
  const char* names[] = {"f32", "f16", "bf16", "none", "e4m3", "i8"};
  return text("tessera::gpu::Element::", names[static_cast<int>(element)]);
}

const char* spelled(bool value) { return value ? "true" : "false"; }

std::string spelled(const ScoreConfig& o) {
  return text("{.softcap = ", spelled(o.softcap), ", .alibi = ", spelled(o.alibi), ", .mask = ", spelled(o.mask),
              ", .dropout = ", spelled(o.dropout), ", .bias = ", spelled(o.bias), "}");
}

std::string spelled(const RowConfig& c) {
  return text("{.threads = ", c.threads, ", .D = ", c.D, ", .Dv = ", c.Dv, ", .o = ", spelled(c.o),
              ", .d_o = ", spelled(c.d_o), ", .dq = ", spelled(c.dq), ", .dk = ", spelled(c.dk),
              ", .dv = ", spelled(c.dv), "}");
}

std::string UnitText::str() const {
  return text(preamble, "#include \"", file, "\"\n", config.empty() ? "" : text("constexpr ", config, ";\n"),
              "extern \"C\" __global__ __launch_bounds__(", launch_bounds, ") void ", kernel_symbol,
              "(const __grid_constant__ ", parameters, " p) { ", function, "(p); }\n");
}

}  // namespace tessera::gpu
