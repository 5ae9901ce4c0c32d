// SPDX-License-Identifier: Apache-2.0
// Global memory in which the search for races looks at every access: a call's outputs and its workspace. Included by
// the tests that run kernels' text on the emulated machine. docs/testing.md, "Races".
#pragma once

#include "core/kernel.hpp"
#include "core/overlap.hpp"
#include "core/tensor.hpp"
#include "tests/emulated/machine.hpp"

namespace tessera::emulated {

// As long as it lives.
class Watch {
 public:
  Watch() = default;
  Watch(const Call& call, const void* workspace, std::size_t workspace_bytes) {
    memory(workspace, workspace_bytes, "the workspace");
    tensor(call.outputs.o, "o"), tensor(call.outputs.lse, "lse"), tensor(call.outputs.status, "status");
    const State& state = call.outputs.state;
    tensor(state.o, "the state's o"), tensor(state.m, "its m"), tensor(state.l, "its l");
    tensor(call.gradients.dq, "dq"), tensor(call.gradients.dk, "dk"), tensor(call.gradients.dv, "dv");
    tensor(call.gradients.dbias, "dbias"), tensor(call.gradients.dsinks, "dsinks");
  }
  ~Watch() { Machine::here().forget(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void memory(const void* at, std::size_t bytes, const char* name) { Machine::here().watch(at, bytes, 4, name); }
  void tensor(const Tensor& t, const char* name) {
    if (!t) return;
    const Reach reach = reach_of(t);
    if (reach.first > reach.last) return;
    Machine::here().watch(reinterpret_cast<const void*>(reach.first), reach.last - reach.first + 1,
                          static_cast<std::size_t>(lesser(size_of(t.type), 4)), name);
  }
};

}  // namespace tessera::emulated
