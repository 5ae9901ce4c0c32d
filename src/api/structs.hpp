// SPDX-License-Identifier: Apache-2.0
// The structs of the C ABI as the library's inside has them: how a caller's struct, of whatever version, is read, and
// the C++ struct of each. Included by the files that define the C ABI. Implements tessera.h, "Rules of the ABI".
#pragma once

#include <cstddef>
#include <cstring>

#include "core/failure.hpp"
#include "tessera/dist.h"
#include "tessera/nccl.h"
#include "tessera/tessera.h"
#include "tessera/types.hpp"

namespace tessera::api {

// Offsets at which the fields of a struct end. A caller's size must be one of them: a truncated field is refused.
template <class Struct, class... Fields>
bool ends_one_of(std::size_t size, Fields Struct::*... fields) {
  static_assert((sizeof(Fields) + ...) == sizeof(Struct), "every field, and no padding");
  const Struct s{};
  const auto end = [&](const auto& field) {
    return static_cast<std::size_t>(reinterpret_cast<const char*>(&field + 1) - reinterpret_cast<const char*>(&s));
  };
  return ((end(s.*fields) == size) || ...);
}

// Whether a caller's struct of this size ends with a field.
bool ends_a_field(const tessera_tensor*, std::size_t size);
bool ends_a_field(const tessera_inputs*, std::size_t size);
bool ends_a_field(const tessera_outputs*, std::size_t size);
bool ends_a_field(const tessera_append_args*, std::size_t size);
bool ends_a_field(const tessera_saved*, std::size_t size);
bool ends_a_field(const tessera_gradients*, std::size_t size);
bool ends_a_field(const tessera_options*, std::size_t size);
bool ends_a_field(const tessera_execution*, std::size_t size);
bool ends_a_field(const tessera_partition_args*, std::size_t size);
bool ends_a_field(const tessera_transport*, std::size_t size);
bool ends_a_field(const tessera_dist_args*, std::size_t size);
bool ends_a_field(const tessera_nccl_args*, std::size_t size);
bool ends_a_field(const tessera_decoder_args*, std::size_t size);

// ABI compatibility. A caller with an older header passes a shorter struct: the missing fields take their defaults. A
// longer struct, from a newer header, may hold fields that this library would ignore, so it is refused. `argument`:
// what the caller knows it by, if that is not the struct's name.
template <class Struct>
Struct read_struct(const char* name, const Struct* given, void (*init)(Struct*), const char* argument = nullptr) {
  if (!argument) argument = name;
  Struct full;
  init(&full);
  if (!given) return full;
  if (given->size < sizeof(std::size_t))
    invalid(argument, ": size is ", given->size, "; call tessera_", name, "_init before filling it in");
  if (given->size > sizeof(Struct))
    invalid(argument, ": size is ", given->size, " but this library, version ", tessera_version(), ", knows ",
            sizeof(Struct), "; the header is newer than the library");
  if (!ends_a_field(given, given->size))
    invalid(argument, ": size is ", given->size, ", which ends inside a field; must be the size of a tessera_", name,
            " that some header declares");
  std::memcpy(static_cast<void*>(&full), given, given->size);
  full.size = sizeof(Struct);
  return full;
}

template <class Struct>
Struct require_struct(const char* name, const Struct* given, void (*init)(Struct*)) {
  if (!given) invalid(name, ": is NULL; it is required");
  return read_struct(name, given, init);
}

template <class Struct>
void zero(Struct* s) {
  std::memset(s, 0, sizeof(*s));
  s->size = sizeof(*s);
}

Tensor tensor(const char* name, const tessera_tensor* given);
Inputs inputs(const tessera_inputs* given);
Outputs outputs(const tessera_outputs* given);
AppendArgs append_args(const tessera_append_args* given);
Saved saved_tensors(const tessera_saved* given);
Gradients gradients(const tessera_gradients* given);
Options options(const tessera_options* given);
Execution execution(const tessera_execution* given);

}  // namespace tessera::api
