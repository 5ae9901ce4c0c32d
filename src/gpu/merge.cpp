// SPDX-License-Identifier: Apache-2.0
// Merge on a GPU: from a checked call to the kernel's parameters and its launch; see merge.hpp.
#include "gpu/merge.hpp"

#include <algorithm>

#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "gpu/arguments.hpp"
#include "gpu/launch.hpp"
#include "gpu/unit.hpp"

namespace tessera::gpu {
namespace {

MergePart part_of(const Outputs& out) {
  const int n = out.o.ndim - 3;  // 1 with a batch dimension, 0 without
  MergePart part{};
  part.o = {out.o.data, n ? stride(out.o, 0) : 0, stride(out.o, n), stride(out.o, n + 1)};
  part.type = element_of(out.o.type);
  if (out.lse)
    part.lse = {static_cast<float*>(out.lse.data), n ? stride(out.lse, 0) : 0, stride(out.lse, n),
                stride(out.lse, n + 1)};
  return part;
}

}  // namespace

std::string merge_refusal(std::span<const Outputs> partials, const Outputs& merged) {
  if (partials.size() > most_parts)
    return text("n: is ", partials.size(), "; on GPUs merge takes at most ", most_parts, " partial results");
  const auto wide = [](const Outputs& out) {
    return out.o.type == Type::f64 || (out.lse && out.lse.type == Type::f64);
  };
  for (std::size_t n = 0; n < partials.size(); ++n)
    if (wide(partials[n])) return text("partials[", n, "]: has type f64; on GPUs merge takes f32, f16 and bf16");
  if (wide(merged)) return "merged: has type f64; on GPUs merge takes f32, f16 and bf16";
  return "";
}

MergeParams merge_params(std::span<const Outputs> partials, const Outputs& merged) {
  MergeParams out{};
  for (std::size_t n = 0; n < partials.size(); ++n) out.parts[n] = part_of(partials[n]);
  out.merged = part_of(merged);
  const auto n = static_cast<std::size_t>(merged.o.ndim - 3);
  out.count = static_cast<Int32>(partials.size());
  out.B = static_cast<Int32>(n ? merged.o.shape[0] : 1), out.tokens = merged.o.shape[n];
  out.H = static_cast<Int32>(merged.o.shape[n + 1]), out.width = static_cast<Int32>(merged.o.shape[n + 2]);
  return out;
}

std::string merge_unit_text() {
  return UnitText{.file = "gpu/kernel/merge.cuh",
                  .function = "tessera::gpu::merge",
                  .parameters = "tessera::gpu::MergeParams",
                  .config = "",
                  .launch_bounds = text(merge_threads)}
      .str();
}

std::int64_t merge_blocks(const MergeParams& p) {
  constexpr std::int64_t enough = 1 << 16;  // blocks take more rows where there are more
  return std::min<std::int64_t>(ceil_div(p.rows(), merge_threads / 32), enough);
}

void merge(std::span<const Outputs> partials, const Outputs& merged, const Execution& execution) {
  if (const std::string reason = merge_refusal(partials, merged); !reason.empty())
    throw Failure(TESSERA_UNSUPPORTED, reason);
  const MergeParams params = merge_params(partials, merged);
  static constinit LaunchSite site;
  site.launch(merge_unit_text, merged.o.device.id, execution.stream, merge_blocks(params), merge_threads, params);
}

}  // namespace tessera::gpu
