// Sequences with few queries, such as one token after the others: their keys are split into chunks, each a task for all
// the query heads of a KV head, and the chunks' results are merged in order. Included by cpu/run.cpp and
// cpu/backend.cpp. Implements docs/architecture.md, "Few queries".
#pragma once

#include <vector>

#include "cpu/run.hpp"

namespace tessera::cpu {

// Whether a sequence is computed this way: by its own number of queries and by the options, never by its neighbours.
bool is_decoding(const Problem& problem, const Sequence& sequence);

// Bytes of partial results, at most.
Int64 decode_bytes(const Problem& problem);

void run_decode(const Problem& problem, const Isa& isa, const WorkspaceLayout& layout, const Call& call,
                const std::vector<Sequence>& sequences);

}  // namespace tessera::cpu
