// Generated units; see unit.hpp.
#include "simt/unit.hpp"

#include "core/failure.hpp"

namespace tessera::simt {

static std::string name_of(Element element) {
  const char* names[] = {"f32", "f16", "bf16"};
  return text("tessera::simt::Element::", names[static_cast<int>(element)]);
}

std::string unit_text(const Function& function, const Config& c) {
  return text("#include \"", function.file, "\"\nconstexpr tessera::simt::Config config{.threads = ", c.threads,
              ", .D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", name_of(c.element), ", .o = ", name_of(c.o),
              ", .d_o = ", name_of(c.d_o), ", .dq = ", name_of(c.dq), ", .dk = ", name_of(c.dk),
              ", .dv = ", name_of(c.dv), "};\nextern \"C\" __global__ __launch_bounds__(config.threads) void ",
              kernel_symbol, "(const __grid_constant__ tessera::simt::", function.parameters,
              " p) { tessera::simt::", function.name, "<config>(p); }\n");
}

}  // namespace tessera::simt
