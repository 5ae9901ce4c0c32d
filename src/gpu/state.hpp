// SPDX-License-Identifier: Apache-2.0
// The states that a forward pass begins and ends with, as kernels are given them. Shared by host and device code;
// included by the families that carry one and by gpu/row_steps.cpp. docs/algorithm.md, "Carried state".
#pragma once

#include "gpu/params.hpp"

namespace tessera::gpu {

struct StateRef {
  TokenRef o;  // f32; without data there is no state
  RowRef m;
  double* l;  // as m, with strides of its own
  Int64 l_batch = 0, l_head = 0, l_row = 0;
};

struct States {
  StateRef in;   // none: rows begin with their sink, or with nothing
  StateRef out;  // none: the call ends with O and LSE
};

// Of rows that see no key in a call (gpu/kernel/state.cuh).
struct StateParams : ForwardParams {
  States states;
  float whole;  // what O is multiplied by in the end: dropout's factor
};

}  // namespace tessera::gpu
