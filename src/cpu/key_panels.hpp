// SPDX-License-Identifier: Apache-2.0
// K and V of a KV head, packed once into panels that all its tasks read, as a matrix product packs its operands: which
// heads are packed in one round, and where in the workspace their panels lie. Included by cpu/run.cpp and
// cpu/backend.cpp.
// Implements docs/cpu_kernels.md, "The matrix unit".
#pragma once

#include <vector>

#include "core/parallel.hpp"
#include "cpu/run.hpp"

namespace tessera::cpu {

// Bytes of the workspace that panels take: all of them, but no more than this. A KV head that needs more, of
// some hundred thousand keys, is packed by its tasks, each for itself.
inline constexpr Int64 most_panel_bytes = Int64(64) << 20;
Int64 panel_room(const Problem& problem, const Isa& isa);

// A KV head of a sequence. The panel of its n-th block of keys begins at panels + n * isa.panel_bytes.
struct SharedKeys {
  const Sequence* sequence;
  Int64 kv;
  float* panels;  // null: its tasks load K and V themselves
};

// All the KV heads of the sequences, in order, in rounds whose panels fit the workspace together.
std::vector<std::vector<SharedKeys>> rounds_of(const Problem& problem, const Isa& isa, const WorkspaceLayout& layout,
                                               const Call& call, const std::vector<Sequence>& sequences);

// Packs what the tasks of a round will read. All arguments must live until it is done.
Step pack_round(const Problem& problem, const Isa& isa, const WorkspaceLayout& layout, const Call& call,
                const std::vector<SharedKeys>& round);

}  // namespace tessera::cpu
