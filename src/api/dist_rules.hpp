// SPDX-License-Identifier: Apache-2.0
// What plans and decoders over several ranks ask of a rank's own arguments, before it asks the others. Included by
// dist_api.cpp. Implements tessera/dist.h.
#pragma once

#include <vector>

#include "core/failure.hpp"
#include "core/overlap.hpp"
#include "tessera/types.hpp"

namespace tessera::api {

inline void require(const char* name, const void* given) {
  if (!given) invalid(name, ": is NULL; it is required");
}

// Before the others are asked, for whose answers one would wait.
inline void require_timeout(double seconds) {
  if (!(seconds > 0)) invalid("timeout: is ", seconds, "; must be a positive number of seconds");
}

inline void require_no_kernel(const Execution& how) {
  if (how.kernel) invalid("kernel: is '", how.kernel, "'; over several ranks the library chooses it");
}

inline void require_no_state(const Outputs& out) {
  if (out.status || out.state) invalid("status and state: are given; over several ranks there are none");
}

struct Named {
  const char* name;
  Tensor tensor;
};

inline std::vector<Named> named(const Inputs& in) {
  return {{"q", in.q},       {"k", in.k},           {"v", in.v},        {"bias", in.bias},
          {"mask", in.mask}, {"slopes", in.slopes}, {"sinks", in.sinks}};
}

// The rule of aliasing is that of one device.
inline void check_outputs(const std::vector<Named>& outputs, const std::vector<Named>& inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& [name, t] = outputs[i];
    if (!t) continue;
    check_writable(name, t);
    for (const auto& [other, x] : inputs)
      if (x) check_apart(name, t, other, x);
    for (std::size_t j = 0; j < i; ++j)
      if (outputs[j].tensor) check_apart(name, t, outputs[j].name, outputs[j].tensor);
  }
}

}  // namespace tessera::api
