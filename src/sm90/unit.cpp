// Generated units; see unit.hpp.
#include "sm90/unit.hpp"

#include "core/failure.hpp"
#include "simt/unit.hpp"

namespace tessera::sm90 {
namespace {

// "f(0), f(1), ..., f(count - 1)"
template <class Function>
std::string list(int count, Function f) {
  std::string out;
  for (int n = 0; n < count; ++n) out += text(n ? ", " : "", f(n));
  return out;
}

// One form of the instruction as a member function. `a` and `inputs`: the first operand and the constraints of all
// inputs, numbered from `registers`.
std::string wgmma_function(const char* name, const char* type, int n, bool accumulate, const char* parameters,
                           const std::string& a, const std::string& b, const char* inputs, const char* transposed) {
  const int registers = n / 2;
  const std::string results = list(registers, [](int i) { return text("%", i); });
  const std::string outputs = list(registers, [](int i) { return text("\"+f\"(d[", i, "])"); });
  return text("  __device__ static void ", name, "(float (&d)[", registers, "], ", parameters,
              ") {\n    asm volatile(\"{ ", ".reg .pred p; setp.", accumulate ? "eq" : "ne",
              ".b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n", n, "k16.f32.", type, ".", type, " {", results, "}, ",
              a, ", ", b, ", p, 1, 1, ", transposed, "; }\"\n      : ", outputs, "\n      : ", inputs, ");\n  }\n");
}

// Wgmma<n>; see sm90/ptx/wgmma.cuh.
std::string wgmma_text(int n, Element element) {
  const char* type = element == Element::bf16 ? "bf16" : "f16";
  const int r = n / 2;
  const std::string first = text("%", r), second = text("%", r + 1);
  const std::string fragment = text("{", list(4, [r](int i) { return text("%", r + i); }), "}");
  const char *tiles = "Operand a, Operand b", *tile_inputs = "\"l\"(a.bits), \"l\"(b.bits)";
  return text("namespace tessera::sm90 {\ntemplate <>\nstruct Wgmma<", n, "> {\n",
              wgmma_function("set", type, n, false, tiles, first, second, tile_inputs, "0, 0"),
              wgmma_function("add", type, n, true, tiles, first, second, tile_inputs, "0, 0"),
              wgmma_function("add", type, n, true, "const UInt32* a, Operand b", fragment, text("%", r + 4),
                             "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b.bits)", "1"),
              "};\n}\n");
}

}  // namespace

std::string forward_unit_text(const Config& c) {
  std::string out = text("#include \"sm90/ptx/wgmma.cuh\"\n", wgmma_text(c.block_keys, c.element));
  if (c.Dv != c.block_keys) out += wgmma_text(c.Dv, c.element);
  out += text("#include \"sm90/kernel/forward.cuh\"\nconstexpr tessera::sm90::Config config{.D = ", c.D,
              ", .Dv = ", c.Dv, ", .element = tessera::simt::Element::", c.element == Element::bf16 ? "bf16" : "f16",
              ", .warpgroups = ", c.warpgroups, ", .block_keys = ", c.block_keys, ", .stages = ", c.stages,
              ", .O_in_Q = ", c.O_in_Q ? "true" : "false",
              "};\nextern \"C\" __global__ __launch_bounds__(tessera::sm90::threads_of(config), 1) void ",
              simt::kernel_symbol,
              "(const __grid_constant__ tessera::sm90::ForwardParams p) { tessera::sm90::forward<config>(p); }\n");
  return out;
}

}  // namespace tessera::sm90
