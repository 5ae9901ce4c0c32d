// SPDX-License-Identifier: Apache-2.0
// One call of the C ABI as data that may be damaged, and the call itself, made with memory of exactly the size that its
// views address, so that AddressSanitizer sees every step beyond it.
// Included by the files of the target c_api.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cases/buffer.hpp"
#include "cases/case.hpp"
#include "tessera/tessera.h"

namespace tessera::fuzz {

// One tensor of a call.
struct Argument {
  const char* name = "";
  bool given = false;
  tessera_tensor view{};           // but for data, which is found when the call is made
  bool null = false;               // data is NULL
  std::vector<std::byte> content;  // from the lowest element on: cut, or repeated, to what the view addresses
  std::size_t shift = 0;           // bytes by which its memory is off an aligned address
  int host = -1;                   // lies in the memory of this argument, `place` bytes behind its beginning
  std::size_t place = 0;
};

Argument argument_of(const char* name, const cases::Buffer& buffer);

// The bytes that a view addresses. Views that are not legal address nothing.
struct Range {
  bool fits = true;      // into as much memory as a target gives to one tensor
  std::int64_t low = 0;  // first byte, relative to data; negative where strides are
  std::size_t size = 0;
  double elements = 0;
};
Range addressed(const tessera_tensor& view);

enum class Function { forward, backward, merge, dropout_mask };

// Arguments of forward and backward: those of cases::CaseData::buffers(), in their order, those of paged keys
// and those of parts.
enum Slot : std::size_t {
  slot_q,
  slot_k,
  slot_v,
  slot_bias,
  slot_mask,
  slot_slopes,
  slot_sinks,
  slot_cu_q,
  slot_cu_k,
  slot_used_q,
  slot_used_k,
  slot_rng,
  slot_o,
  slot_lse,
  slot_d_o,
  slot_d_lse,
  slot_dq,
  slot_dk,
  slot_dv,
  slot_dbias,
  slot_dsinks,
  slot_k_scale,
  slot_v_scale,
  slot_qv,
  slot_tree_mask,
  slot_positions,
  slot_block_table,
  slot_v_block_table,
  slot_page_indptr,
  slot_page_indices,
  slot_leftpad,
  slot_status,
  slot_from_o,  // the state that a forward pass starts from, and the one that it ends with
  slot_from_m,
  slot_from_l,
  slot_to_o,
  slot_to_m,
  slot_to_l,
  slot_seq_row0,
  slot_seq_col0,
  slot_seq_batch0,
  slots
};

// How the call gets its workspace.
enum class Workspace { library, caller, too_small };

struct Call {
  Function function = Function::forward;
  // merge: the merged o and lse, then o and lse of each partial result. dropout_mask: mask and rng.
  std::vector<Argument> arguments;
  tessera_options options;
  tessera_execution execution;  // but for kernel and workspace
  std::string kernel;           // empty: NULL
  Workspace workspace = Workspace::library;
  std::int64_t partials = 0;
  // The structs that hold tensors: inputs, outputs, saved, gradients; a merge has an array of outputs instead of
  // inputs.
  std::array<std::size_t, 4> sizes;
  std::array<bool, 4> given{true, true, true, true};
  bool options_given = true, execution_given = true;

  Call();
  bool writes(std::size_t argument) const;
};

Call attention_call(Function function, const cases::CaseData& data);
std::string text_of(const Call& call);

// What a call gave back. `outputs` holds the elements of every output, NaNs of any kind made equal.
struct Outcome {
  tessera_status status = TESSERA_OK;
  bool ran = false;  // false: only planned, because running would take too much time or memory
  std::string sentence;
  std::vector<std::vector<std::uint64_t>> outputs;
  std::vector<std::vector<std::byte>> memory;  // of every argument after a run, from its lowest element on
};

// Makes the call, after planning it where there is a plan (by `planned`'s question, if one is given). Whatever must
// hold for every call, however wrong, is checked here: a status of the header's, a sentence with each refusal, nothing
// written by a refused call, nothing written but outputs by any. Breaches are findings.
Outcome make(const Call& call, const Call* planned = nullptr);

// The same call with every tensor in memory of its own that holds the same bytes.
Call separated(const Call& call);

// For the line that a target prints when it ends.
struct Counts {
  std::uint64_t calls = 0, refused = 0, repeated = 0, judged = 0, unlucky = 0;
};
extern Counts counts;

}  // namespace tessera::fuzz
