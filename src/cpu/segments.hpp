// SPDX-License-Identifier: Apache-2.0
// dK and dV of a part of a problem: sums over segments of queries, added as a binary tree whose shape depends on the
// queries' global positions alone. Included by cpu/run.cpp. Implements docs/algorithm.md, "Parts of a problem".
#pragma once

#include "cpu/kernel_jobs.hpp"

namespace tessera::cpu {

// Bytes that one thread keeps sums in, at most; 0: the problem has no segments.
Int64 segment_bytes(const Problem& problem);

// Runs a span of keys, segment by segment. row0: global position of query 0. `sums` are the thread's own.
void add_segments(const Problem& problem, const Isa& isa, const KeySpanJob& span, Int64 row0, float* scratch,
                  float* sums);

}  // namespace tessera::cpu
