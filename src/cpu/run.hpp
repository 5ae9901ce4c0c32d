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
};

float* scratch_of(const Call& call, const WorkspaceLayout& layout, int worker);

WorkspaceLayout workspace_layout(const Problem& problem, const Isa& isa, int threads);

void run_forward(const Problem& problem, const Isa& isa, const WorkspaceLayout& layout, const Call& call);
void run_backward(const Problem& problem, const Isa& isa, const WorkspaceLayout& layout, const Call& call);

}  // namespace tessera::cpu
