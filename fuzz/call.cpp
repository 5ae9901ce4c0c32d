// SPDX-License-Identifier: Apache-2.0
// Calls as data: which bytes a view addresses, tensors of a case as arguments, and a call as text. See call.hpp.
#include "fuzz/call.hpp"

#include <cmath>
#include <cstring>
#include <sstream>

#include "fuzz/bytes.hpp"
#include "tessera/tessera.hpp"

namespace tessera::fuzz {
namespace {

constexpr std::int64_t most_bytes = 1 << 21;  // for one tensor
constexpr const char* names[] = {"q",
                                 "k",
                                 "v",
                                 "bias",
                                 "mask",
                                 "slopes",
                                 "sinks",
                                 "cu_seqlens_q",
                                 "cu_seqlens_k",
                                 "seqused_q",
                                 "seqused_k",
                                 "rng",
                                 "o",
                                 "lse",
                                 "d_o",
                                 "d_lse",
                                 "dq",
                                 "dk",
                                 "dv",
                                 "dbias",
                                 "dsinks",
                                 "k_scale",
                                 "v_scale",
                                 "qv",
                                 "tree_mask",
                                 "positions",
                                 "block_table",
                                 "v_block_table",
                                 "page_indptr",
                                 "page_indices",
                                 "leftpad_k",
                                 "status",
                                 "inputs.state_o",
                                 "inputs.state_m",
                                 "inputs.state_l",
                                 "outputs.state_o",
                                 "outputs.state_m",
                                 "outputs.state_l",
                                 "seq_row0",
                                 "seq_col0",
                                 "seq_batch0"};
static_assert(std::size(names) == slots);

bool takes(Function function, std::size_t slot) {
  if (function == Function::forward) return slot <= slot_lse || slot >= slot_k_scale;
  return true;
}

}  // namespace

Range addressed(const tessera_tensor& view) {
  if (view.ndim < 1 || view.ndim > 4 || view.type < TESSERA_F64 || view.type > TESSERA_I8) return {};
  const auto bytes = static_cast<std::int64_t>(cases::size_of(static_cast<Type>(view.type)));
  Range range;
  range.elements = 1;
  for (int d = 0; d < view.ndim; ++d) {
    if (view.shape[d] < 0) return {};
    range.elements *= static_cast<double>(view.shape[d]);
  }
  if (range.elements == 0) return range;
  std::int64_t low = 0, high = bytes;
  for (int d = 0; d < view.ndim; ++d) {
    if (view.shape[d] == 1 || view.strides[d] == 0) continue;
    const double reach = static_cast<double>(view.shape[d] - 1) * std::abs(static_cast<double>(view.strides[d]));
    if (reach > static_cast<double>(most_bytes)) {
      range.fits = false;
      return range;
    }
    const std::int64_t step = (view.shape[d] - 1) * view.strides[d] * bytes;
    (step < 0 ? low : high) += step;
  }
  range.low = low, range.size = static_cast<std::size_t>(high - low);
  range.fits = high - low <= most_bytes;
  return range;
}

Argument argument_of(const char* name, const cases::Buffer& buffer) {
  Argument argument;
  argument.name = name, argument.given = bool(buffer);
  tessera_tensor_init(&argument.view);
  if (!buffer) return argument;
  const Tensor& from = buffer.tensor();
  argument.view.type = static_cast<std::int32_t>(from.type), argument.view.ndim = from.ndim;
  for (std::size_t d = 0; d < 4; ++d)
    argument.view.shape[d] = from.shape[d], argument.view.strides[d] = from.strides[d];
  const Range range = addressed(argument.view);
  if (!range.fits) finding(std::string("a case's tensor is too large: ") + name);
  const auto* first = static_cast<const std::byte*>(from.data) + range.low;
  argument.content.assign(first, first + range.size);
  argument.shift = reinterpret_cast<std::uintptr_t>(first) % 16;
  return argument;
}

Call::Call() :
    sizes{sizeof(tessera_inputs), sizeof(tessera_outputs), sizeof(tessera_saved), sizeof(tessera_gradients)} {
  tessera_options_init(&options);
  tessera_execution_init(&execution);
}

bool Call::writes(std::size_t argument) const {
  switch (function) {
    case Function::forward:
      return argument == slot_o || argument == slot_lse || argument == slot_status ||
             (argument >= slot_to_o && argument <= slot_to_l);
    case Function::backward:
      return argument >= slot_dq && argument <= slot_dsinks;
    case Function::merge:
      return argument < 2;
    default:
      return argument == 0;
  }
}

Call attention_call(Function function, const cases::CaseData& data) {
  Call call;
  call.function = function;
  call.options = detail::to_c(data.options());
  const auto buffers = data.buffers();
  static const cases::Buffer none;
  for (std::size_t slot = 0; slot < slots; ++slot) {
    const bool given = slot < buffers.size() && takes(function, slot);
    call.arguments.push_back(argument_of(names[slot], given ? *buffers[slot] : none));
  }
  return call;
}

std::string text_of(const Call& call) {
  constexpr const char* functions[] = {"forward", "backward", "merge", "dropout_mask"};
  std::ostringstream out;
  out << functions[static_cast<int>(call.function)] << "\n";
  for (const Argument& a : call.arguments) {
    if (!a.given) continue;
    out << "  " << a.name << " size " << a.view.size << " type " << a.view.type << " device " << a.view.device_type
        << ":" << a.view.device_id << " ndim " << a.view.ndim << (a.null ? " NULL" : "") << " shape";
    for (const auto n : a.view.shape) out << " " << n;
    out << " strides";
    for (const auto n : a.view.strides) out << " " << n;
    if (a.host >= 0) out << " in " << call.arguments[static_cast<std::size_t>(a.host)].name << " + " << a.place;
    if (a.view.type == TESSERA_I32 && !a.content.empty()) {
      out << " holds";
      for (std::size_t i = 0; i + 4 <= a.content.size() && i < 64; i += 4) {
        std::int32_t value;
        std::memcpy(&value, &a.content[i], 4);
        out << " " << value;
      }
    }
    out << "\n";
  }
  const tessera_options& o = call.options;
  out << "  options" << (call.options_given ? "" : " NULL") << " size " << o.size << " scale " << o.scale << " softcap "
      << o.softcap << " causal " << o.causal << " alignment " << o.alignment << " offset " << o.diagonal_offset
      << " window " << o.window_left << " " << o.window_right << " dropout " << o.dropout << " seed " << o.seed << " "
      << o.seed_offset << " at " << o.row0 << " " << o.col0 << " " << o.head0 << " " << o.batch0 << " max_seqlen "
      << o.max_seqlen_q << " " << o.max_seqlen_k << " accumulate " << o.accumulate << " deterministic "
      << o.deterministic << " part_invariant " << o.part_invariant << " " << o.segment_rows << "\n  execution"
      << (call.execution_given ? "" : " NULL") << " size " << call.execution.size << " device "
      << call.execution.device_type << ":" << call.execution.device_id << " threads " << call.execution.threads
      << " kernel '" << call.kernel << "' workspace " << static_cast<int>(call.workspace) << " partials "
      << call.partials << "\n  structs";
  for (std::size_t n = 0; n < 4; ++n) out << " " << call.sizes[n] << (call.given[n] ? "" : " NULL");
  return out.str();
}

}  // namespace tessera::fuzz
