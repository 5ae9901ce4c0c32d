// K and V of a KV head brought into the kernels' own form once, for all the tasks that read them: which heads share a
// round, and where in the workspace they lie. Included by cpu/run.cpp and cpu/backend.cpp.
// Implements docs/architecture.md, "The matrix unit".
#pragma once

#include <vector>

#include "core/parallel.hpp"
#include "cpu/run.hpp"

namespace tessera::cpu {

// Bytes of the workspace that packs take: those of everything, but no more than this. A KV head that needs more, of
// some hundred thousand keys, is packed by its tasks, each for itself.
inline constexpr Int64 most_pack_bytes = Int64(64) << 20;
Int64 pack_room(const Problem& problem, const Isa& isa);

// A KV head of a sequence. Pack n of its blocks of keys begins at packs + n * isa.pack_bytes.
struct SharedKeys {
  const Sequence* sequence;
  Int64 kv;
  float* packs;  // null: its tasks load K and V themselves
};

// All the KV heads of the sequences, in order, in rounds whose packs fit the workspace together.
std::vector<std::vector<SharedKeys>> rounds_of(const Problem& problem, const Isa& isa, const WorkspaceLayout& layout,
                                               const Call& call, const std::vector<Sequence>& sequences);

// Packs what the tasks of a round will read. All arguments must live until it is done.
Step pack_round(const Problem& problem, const Isa& isa, const WorkspaceLayout& layout, const Call& call,
                const std::vector<SharedKeys>& round);

}  // namespace tessera::cpu
