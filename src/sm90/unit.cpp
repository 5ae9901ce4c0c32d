// Generated units; see unit.hpp.
#include "sm90/unit.hpp"

#include <cstdlib>
#include <set>

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "gpu/unit.hpp"

namespace tessera::sm90 {
namespace {

using gpu::spelled;
using gpu::UnitText;

// "f(0), f(1), ..., f(count - 1)"
template <class Function>
std::string list(int count, Function f) {
  std::string out;
  for (int n = 0; n < count; ++n) out += text(n ? ", " : "", f(n));
  return out;
}

// One form of the instruction as a member function. `a`, `b`: operands; `inputs`: the constraints of all inputs,
// numbered from the last result on; `accumulate`: "0", "1", or the input that says whether the result is added to;
// `result`: the constraint of its registers.
std::string wgmma_function(const char* name, const char* type, int n, const char* parameters, const std::string& a,
                           const std::string& b, const std::string& accumulate, const char* inputs,
                           const char* transposed, const char* result = "+f") {
  const int registers = n / 2;
  const std::string results = list(registers, [](int i) { return text("%", i); });
  const std::string outputs = list(registers, [&](int i) { return text("\"", result, "\"(d[", i, "])"); });
  return text("  __device__ static void ", name, "(float (&d)[", registers, "], ", parameters,
              ") {\n    asm volatile(\"{ .reg .pred p; setp.ne.b32 p, ", accumulate,
              ", 0; wgmma.mma_async.sync.aligned.m64n", n, "k16.f32.", type, ".", type, " {", results, "}, ", a, ", ",
              b, ", p, 1, 1, ", transposed, "; }\"\n      : ", outputs, "\n      : ", inputs, ");\n  }\n");
}

// Wgmma<n>; see sm90/ptx/wgmma.cuh. A result that is not added to need not have a value before, and then takes no
// registers until it is set. Not so where S comes in halves: there the compiler would find it new ones every time, and
// spill.
std::string wgmma_text(int n, Element element, bool halves_S) {
  const char* result = halves_S ? "+f" : "=f";
  const char* type = element == Element::bf16 ? "bf16" : "f16";
  const auto input = [&](int i) { return text("%", n / 2 + i); };
  const char *tiles = "Operand a, Operand b", *tile_inputs = "\"l\"(a.bits), \"l\"(b.bits)";
  return text(
      "namespace tessera::sm90 {\ntemplate <>\nstruct Wgmma<", n, "> {\n",
      wgmma_function("set", type, n, tiles, input(0), input(1), "0", tile_inputs, "0, 0", result),
      wgmma_function("add", type, n, tiles, input(0), input(1), "1", tile_inputs, "0, 0"),
      wgmma_function("add", type, n, "const UInt32* a, Operand b, bool accumulate", text("{", list(4, input), "}"),
                     input(4), input(5),
                     "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"l\"(b.bits), \"r\"(int(accumulate))", "1"),
      wgmma_function("set_over_rows", type, n, tiles, input(0), input(1), "0", tile_inputs, "0, 1", result),
      wgmma_function("add_over_rows", type, n, tiles, input(0), input(1), "1", tile_inputs, "0, 1"), "};\n}\n");
}

// What every unit begins with: the shapes of its products.
std::string beginning(const std::set<int>& shapes, Element element, bool halves_S = false) {
  std::string out;
  // For development: waits end with a message, not never.
  if (const char* tries = environment("TESSERA_BOUNDED_WAITS"))
    out += text("#define TESSERA_BOUNDED_WAITS ", std::strtoul(tries, nullptr, 10), "\n");
  out += "#include \"sm90/ptx/wgmma.cuh\"\n";
  for (const int n : shapes) out += wgmma_text(n, element, halves_S);
  return out;
}

// "tessera::sm90::Config config{...}"
std::string config_text(const Config& c) {
  return text("tessera::sm90::Config config{.D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element),
              ", .o = ", spelled(c.o), ", .warpgroups = ", c.warpgroups, ", .block_keys = ", c.block_keys,
              ", .stages = ", c.stages, ", .q_stages = ", c.q_stages, ", .p_buffers = ", c.p_buffers,
              ", .stages_O = ", spelled(c.stages_O), ", .halves_S = ", spelled(c.halves_S),
              ", .general = ", spelled(c.general), ", .options = ", spelled(c.options), "}");
}
std::string config_text(const BackwardConfig& c) {
  return text("tessera::sm90::BackwardConfig config{.side = tessera::gpu::Side::", owns_queries(c) ? "queries" : "keys",
              ", .D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element), ", .dX = ", spelled(c.dX),
              ", .dY = ", spelled(c.dY), ", .warpgroups = ", c.warpgroups, ", .block_columns = ", c.block_columns,
              ", .stages = ", c.stages, ", .y_stages = ", c.y_stages, ", .drains = ", spelled(c.drains),
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
                  .parameters = "tessera::sm90::ForwardParams",
                  .config = config_text(c),
                  .launch_bounds = one_block,
                  .preamble = beginning({c.block_keys, c.Dv}, c.element, c.halves_S)}
      .str();
}

std::string backward_unit_text(const BackwardConfig& c) {
  return UnitText{.file = "sm90/kernel/backward.cuh",
                  .function = "tessera::sm90::backward<config>",
                  .parameters = "tessera::sm90::BackwardParams",
                  .config = config_text(c),
                  .launch_bounds = one_block,
                  .preamble = beginning({c.block_columns, c.D, c.Dv}, c.element, c.halves_S)}
      .str();
}

std::string one_pass_unit_text(const OnePassConfig& c) {
  return UnitText{.file = "sm90/kernel/one_pass.cuh",
                  .function = "tessera::sm90::one_pass<config>",
                  .parameters = "tessera::sm90::OnePassParams",
                  .config = config_text(c),
                  .launch_bounds = "tessera::sm90::one_pass_threads, 1",
                  .preamble = beginning({c.block_queries, c.D, c.Dv, 64}, c.element)}
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
