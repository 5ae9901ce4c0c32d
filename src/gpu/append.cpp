// SPDX-License-Identifier: Apache-2.0
// Append on a GPU: from a checked call to the kernel's parameters and its launch; see append.hpp.
#include "gpu/append.hpp"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/tensor.hpp"
#include "cuda/device.hpp"
#include "gpu/arguments.hpp"
#include "gpu/launch.hpp"
#include "gpu/unit.hpp"

namespace tessera::gpu {
namespace {

constexpr std::int64_t chunk = 4;  // numbers that a lane moves at a time, where it can

TypedRows rows_of(const Tensor& t, bool packed) {
  if (!t) return {};
  const int first = packed ? 0 : 1;
  return {.rows = {t.data, packed ? 0 : stride(t, 0), stride(t, first), stride(t, first + 1)},
          .type = element_of(t.type)};
}

TokenNumbers numbers_of(const Tensor& t) {
  if (!t) return {};
  return {.data = t.data,
          .batch = t.ndim == 2 ? stride(t, 0) : 0,
          .token = stride(t, t.ndim - 1),
          .wide = t.type == Type::i64};
}

// Whether every row begins at a multiple of `chunk` elements, and has so many.
bool in_chunks(const Tensor& t) {
  if (!t) return true;
  if (reinterpret_cast<std::uintptr_t>(t.data) % static_cast<std::uintptr_t>(chunk * size_of(t.type)) != 0)
    return false;
  for (int d = 0; d + 1 < t.ndim; ++d)
    if (stride(t, d) % chunk != 0) return false;
  return t.shape[static_cast<std::size_t>(t.ndim - 1)] % chunk == 0;
}

AppendSide side_of(const Appending& c, const Tensor& from, const Tensor& to, const Tensor& scale) {
  return {.from = rows_of(from, c.packed),
          .to = rows_of(to, false),
          .scale = scale_ref(scale),
          .scale_group = scale.ndim == 4 ? stride(scale, 3) : 0,
          .group_dims = scale.ndim == 4 ? append_group_dims : std::max<Int32>(static_cast<Int32>(to.shape[3]), 1),
          .computes_scale = scale.ndim > 2,
          .width = static_cast<Int32>(to.shape[3])};
}

}  // namespace

std::string append_refusal(const Appending& c) {
  const AppendArgs& a = c.a;
  for (const auto& [name, t] : {std::pair{"k_new", &a.k_new},
                                {"v_new", &a.v_new},
                                {"k", &a.k},
                                {"v", &a.v},
                                {"rotary_cos", &a.rotary_cos},
                                {"rotary_sin", &a.rotary_sin},
                                {"q", &a.q}})
    if (*t && t->type == Type::f64)
      return text(name, ": has type f64; append on GPUs takes f32, f16 and bf16, and caches of 8 bits");
  return "";
}

AppendParams append_params(const Appending& c) {
  const AppendArgs& a = c.a;
  const bool by_slots = bool(a.slots);
  AppendParams out{};
  out.k = side_of(c, a.k_new, a.k, a.k_scale), out.v = side_of(c, a.v_new, a.v, a.v_scale);
  out.q = rows_of(a.q, c.packed), out.q_out = rows_of(a.q_out, c.packed);
  out.pages = page_tables(c.p, c.call);
  if (a.cu_seqlens_new)
    out.cu_seqlens_new = {static_cast<const Int32*>(a.cu_seqlens_new.data), stride(a.cu_seqlens_new, 0)};
  if (a.seqused_k) out.seqused_k = {static_cast<const Int32*>(a.seqused_k.data), stride(a.seqused_k, 0)};
  out.slots = numbers_of(a.slots), out.positions = numbers_of(a.positions), out.q_positions = numbers_of(a.q_positions);
  if (a.rotary_cos)
    out.rotary = {.cos = a.rotary_cos.data,
                  .sin = a.rotary_sin.data,
                  .cos_row = stride(a.rotary_cos, 0),
                  .sin_row = stride(a.rotary_sin, 0),
                  .positions = a.rotary_cos.shape[0],
                  .half = static_cast<Int32>(a.rotary_cos.shape[1]),
                  .interleaved = a.interleaved,
                  .cos_type = element_of(a.rotary_cos.type),
                  .sin_type = element_of(a.rotary_sin.type)};
  // Packed tokens that have slots are one sequence.
  out.B = static_cast<Int32>(by_slots && c.packed ? 1 : c.p.B);
  out.tokens = c.n, out.q_tokens = !a.q || c.packed ? c.n : a.q.shape[1];
  out.capacity = by_slots ? product({a.k.shape[0], a.k.shape[1]}) : c.p.Nk;
  const bool searched = bool(a.cu_seqlens_new);
  out.numbers = c.tokens == 0 ? 0 : block_count(searched, out.tokens, 1, out.B);
  out.q_numbers = c.q_tokens == 0 ? 0 : block_count(searched, out.q_tokens, 1, out.B);
  out.Hk = static_cast<Int32>(c.p.Hk);
  out.Hq = static_cast<Int32>(a.q ? a.q.shape[static_cast<std::size_t>(a.q.ndim - 2)] : 0);
  const std::initializer_list<const Tensor*> moved{&a.k_new, &a.v_new, &a.k,          &a.v,
                                                   &a.q,     &a.q_out, &a.rotary_cos, &a.rotary_sin};
  out.wide = std::all_of(moved.begin(), moved.end(), [](const Tensor* t) { return in_chunks(*t); });
  return out;
}

std::string append_unit_text() {
  return UnitText{.file = "gpu/kernel/append.cuh",
                  .function = "tessera::gpu::append",
                  .parameters = "tessera::gpu::AppendParams",
                  .config = "",
                  .launch_bounds = text(append_threads)}
      .str();
}

std::int64_t append_blocks(const AppendParams& p) {
  constexpr std::int64_t enough = 1 << 16;  // blocks take more rows where there are more
  return std::min<std::int64_t>(ceil_div(p.rows(), append_threads / 32), enough);
}

void append(const Appending& c, const Execution& execution) {
  if (const std::string reason = append_refusal(c); !reason.empty()) throw Failure(TESSERA_UNSUPPORTED, reason);
  const AppendParams params = append_params(c);
  static constinit LaunchSite site;
  site.launch(append_unit_text, c.p.device.id, execution.stream, append_blocks(params), append_threads, params);
}

}  // namespace tessera::gpu
