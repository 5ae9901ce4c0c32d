// SPDX-License-Identifier: Apache-2.0
// How a CPU plan runs: tasks over (sequence, head, block) for the kernels of one instruction set, and the workspace
// they share. Included by cpu/backend.cpp and cpu/decode.cpp.
#pragma once

#include "core/kernel.hpp"
#include "cpu/kernel_jobs.hpp"

namespace tessera::cpu {

// Where the parts of the workspace begin, in bytes. Upper bounds from shapes alone; lengths are not read for this.
struct WorkspaceLayout {
  int threads = 1;
  Int64 scratch_bytes = 0;                           // of one thread
  Int64 panels = 0, partials = 0;                    // forward: cpu/key_panels.hpp; cpu/decode.hpp
  Int64 delta = 0, lse2 = 0, images = 0, bytes = 0;  // scratch begins at 0
  Int64 segments = 0, segment_bytes = 0;             // of one thread: cpu/segments.hpp
};

float* scratch_of(const Call& call, const WorkspaceLayout& layout, int worker);

// Groups of keys of the backward pass; the sums of a part continue in another call, in one group.
inline Int64 groups_of(const Problem& p, Int64 keys) { return p.options.part_invariant ? 1 : key_groups(keys); }

WorkspaceLayout workspace_layout(const Problem& problem, const Isa& isa, int threads);

void run_forward(const Problem& problem, const Isa& isa, const WorkspaceLayout& layout, const Call& call);
void run_backward(const Problem& problem, const Isa& isa, const WorkspaceLayout& layout, const Call& call);

}  // namespace tessera::cpu
