// The list of rungs and what they share; see ladder.hpp.
#include "simt/ladder.hpp"

#include <algorithm>

#include "core/failure.hpp"
#include "core/tensor.hpp"

namespace tessera::simt {
namespace {

constexpr Function delta{"simt/kernel/delta.cuh", "delta", "BackwardParams"};
constexpr Function clear{"simt/kernel/clear.cuh", "clear", "BackwardParams"};

constexpr Rung list[] = {{"vector", vector_steps}, {"naive", naive_steps}};

}  // namespace

std::span<const Rung> rungs() { return list; }

void add_backward_start(Steps& steps, const Problem& p) {
  constexpr int warps = 4;
  const Config c = config_of(p, 32 * warps);
  const std::int64_t rows = std::max(p.Hq * p.Nq, p.Hk * p.Nk) * (p.packed ? 1 : p.B);
  const bool has_unused = p.packed || p.seqused_q || p.seqused_k;
  if (has_unused && !p.options.accumulate) steps.add(clear, c, ceil_div(rows, warps));
  steps.add(delta, c, query_blocks(p, warps));
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
