// SPDX-License-Identifier: Apache-2.0
// Damage to a call: one field, tensor, struct or dimension at a time; see questions.hpp. Damage stays what a caller
// could do with memory of its own: no view of it leads out of memory that is there.
#include <algorithm>
#include <cstring>

#include "fuzz/questions.hpp"

namespace tessera::fuzz {
namespace {

// Sizes around those of the fields and of the whole.
std::size_t struct_size(Bytes& in, std::size_t whole) {
  const std::uint8_t kind = in.byte();
  if (kind < 16) return whole + 8 * (kind + 1U);
  if (kind < 32) return static_cast<std::size_t>(in.integer());
  return static_cast<std::size_t>(in.below(static_cast<std::int64_t>(whole) + 16));
}

std::int32_t code(Bytes& in) {
  return in.rarely() ? static_cast<std::int32_t>(in.integer()) : static_cast<std::int32_t>(in.below(14)) - 2;
}

// Another tensor's memory, at a place that suits the elements.
void move_in(Bytes& in, Call& call, std::size_t index) {
  Argument& a = call.arguments[index];
  const auto other = static_cast<std::size_t>(in.below(static_cast<std::int64_t>(call.arguments.size())));
  if (other == index || call.arguments[other].host >= 0) return;
  for (const Argument& guest : call.arguments)
    if (guest.host == static_cast<int>(index)) return;
  a.host = static_cast<int>(other);
  a.place = static_cast<std::size_t>(in.flag() ? in.below(1024) * 4 : 0);
}

void damage_tensor(Bytes& in, Call& call) {
  const auto index = static_cast<std::size_t>(in.below(static_cast<std::int64_t>(call.arguments.size())));
  const auto other = static_cast<std::size_t>(in.below(static_cast<std::int64_t>(call.arguments.size())));
  const auto d = static_cast<std::size_t>(in.below(4)), e = static_cast<std::size_t>(in.below(4));
  Argument& a = call.arguments[index];
  switch (in.below(14)) {
    case 0:
      a.given = !a.given;
      break;
    case 1:
      a.null = true;
      break;
    case 2:
      a.view.size = struct_size(in, sizeof(tessera_tensor));
      break;
    case 3:
      a.view.type = code(in);
      break;
    case 4:
      a.view.ndim = code(in);
      break;
    case 5:
      (in.flag() ? a.view.device_type : a.view.device_id) = code(in);
      break;
    case 6:
      a.view.shape[d] = in.integer();
      break;
    case 7:
      a.view.strides[d] = in.integer();
      break;
    case 8:
      a.view.strides[d] = in.flag() ? -a.view.strides[d] : 0;
      break;
    case 9:
      std::swap(a.view.shape[d], a.view.shape[e]);
      if (in.flag()) std::swap(a.view.strides[d], a.view.strides[e]);
      break;
    case 10:  // another tensor's form
      a.view = call.arguments[other].view;
      a.given = true;
      if (in.flag()) a.content = call.arguments[other].content;
      break;
    case 11: {  // contents: lengths, seeds, numbers
      const auto value = in.flag() ? in.raw<std::int64_t>() : in.integer();
      const std::size_t at = static_cast<std::size_t>(in.byte()) * 4, bytes = in.flag() ? 8 : 4;
      if (at + bytes <= a.content.size()) std::memcpy(&a.content[at], &value, bytes);
      break;
    }
    case 12:
      a.shift = static_cast<std::size_t>(in.below(16));
      break;
    default:
      move_in(in, call, index);
  }
}

// One dimension of the whole question takes a new size; inputs are stretched with stride 0, as PyTorch's expand does.
void stretch(Bytes& in, Call& call) {
  if (call.function != Function::forward && call.function != Function::backward) return damage_tensor(in, call);
  enum Dim { B, Nq, Nk, Hq, Hk, none };
  static constexpr Dim padded[][4] = {
      {B, Nq, Hq, none},        {B, Nk, Hk, none},        {B, Nk, Hk, none},      {B, Hq, Nq, Nk},
      {B, Hq, Nq, Nk},          {B, Hq, none, none},      {Hq, none, none, none}, {none, none, none, none},
      {none, none, none, none}, {B, none, none, none},    {B, none, none, none},  {none, none, none, none},
      {B, Nq, Hq, none},        {B, Hq, Nq, none},        {B, Nq, Hq, none},      {B, Hq, Nq, none},
      {B, Nq, Hq, none},        {B, Nk, Hk, none},        {B, Nk, Hk, none},      {B, Hq, Nq, Nk},
      {Hq, none, none, none},   {B, Nk, Hk, none},        {B, Nk, Hk, none},      {B, Nq, Hq, none},
      {B, Nq, none, none},      {B, Nq, none, none},      {B, none, none, none},  {B, none, none, none},
      {none, none, none, none}, {none, none, none, none}, {B, none, none, none},  {none, none, none, none},
      {B, Nq, Hq, none},        {B, Hq, Nq, none},        {B, Hq, Nq, none},      {B, Nq, Hq, none},
      {B, Hq, Nq, none},        {B, Hq, Nq, none},        {B, none, none, none},  {B, none, none, none},
      {B, none, none, none}};
  static_assert(std::size(padded) == slots);
  const auto dim = static_cast<Dim>(in.below(5));
  const std::int64_t size = in.integer();
  const bool drop_outputs = in.flag();
  for (std::size_t slot = 0; slot < call.arguments.size(); ++slot) {
    Argument& a = call.arguments[slot];
    // Packed tensors of tokens lack the batch in front; per-head slopes and broadcast dimensions stay as they are.
    const bool short_form =
        (slot == slot_slopes && a.view.ndim == 1) ||
        (call.arguments[slot_q].view.ndim == 3 && padded[slot][0] == B && a.view.ndim < 4 && slot != slot_slopes);
    for (int d = 0; d < std::clamp(a.view.ndim, 0, 4); ++d) {
      const int place = short_form ? d + 1 : d;
      const Dim here = place < 4 ? padded[slot][place] : none;
      const bool both_heads = (dim == Hk && here == Hq) || (dim == Hq && here == Hk);
      if (here != dim && !both_heads) continue;
      if (slot >= slot_bias && slot <= slot_mask && a.view.shape[d] == 1) continue;
      a.view.shape[d] = size;
      if (!call.writes(slot)) a.view.strides[d] = 0;
      if (call.writes(slot) && drop_outputs) a.given = false;
    }
  }
}

void damage_options(Bytes& in, Call& call) {
  tessera_options& o = call.options;
  std::int64_t* const integers[] = {
      &o.diagonal_offset, &o.window_left, &o.window_right, &o.row0,         &o.col0,
      &o.head0,           &o.batch0,      &o.max_seqlen_q, &o.max_seqlen_k, &o.segment_rows};
  double* const numbers[] = {&o.scale, &o.softcap, &o.dropout};
  std::int32_t* const codes[] = {&o.causal, &o.alignment, &o.accumulate, &o.deterministic, &o.part_invariant};
  switch (in.below(6)) {
    case 0:
    case 1:
      *in.pick(integers) = in.integer();
      break;
    case 2:
      *in.pick(numbers) = in.number();
      break;
    case 3:
      *in.pick(codes) = code(in);
      break;
    case 4:
      (in.flag() ? o.seed : o.seed_offset) = static_cast<std::uint64_t>(in.integer());
      break;
    default:
      o.size = struct_size(in, sizeof(o));
  }
}

void damage_execution(Bytes& in, Call& call) {
  constexpr std::int32_t threads[] = {0, -1, 5, 17, std::numeric_limits<std::int32_t>::min(), 2};
  switch (in.below(7)) {
    case 0:
      call.execution.size = struct_size(in, sizeof(call.execution));
      break;
    case 1:
      (in.flag() ? call.execution.device_type : call.execution.device_id) = code(in);
      break;
    case 2:
      call.execution.threads = in.pick(threads);
      break;
    case 3:
      call.execution.sm_margin = code(in);
      break;
    case 4:
      call.execution.stream = reinterpret_cast<void*>(static_cast<std::uintptr_t>(in.integer()));
      break;
    case 5:
      call.kernel = in.text(12);
      break;
    default:
      call.workspace = Workspace::too_small;
  }
}

void damage_structs(Bytes& in, Call& call) {
  const auto n = static_cast<std::size_t>(in.below(4));
  const Call fresh;
  switch (in.below(4)) {
    case 0:
      call.given[n] = false;
      break;
    case 1:
      (in.flag() ? call.options_given : call.execution_given) = false;
      break;
    case 2:
      call.partials = std::min(in.integer(), call.partials);
      break;
    default:
      call.sizes[n] = struct_size(in, n == 0 && call.function == Function::merge ? fresh.sizes[1] : fresh.sizes[n]);
  }
}

}  // namespace

void damage(Bytes& in, Call& call) {
  switch (in.below(8)) {
    case 0:
    case 1:
    case 2:
      return damage_tensor(in, call);
    case 3:
      return damage_options(in, call);
    case 4:
      return damage_execution(in, call);
    case 5:
      return damage_structs(in, call);
    default:
      return stretch(in, call);
  }
}

}  // namespace tessera::fuzz
