// SPDX-License-Identifier: Apache-2.0
// Which instruction sets are compiled in, and which this processor has.
// Included by cpu/*.cpp.
// Implements docs/cpu_kernels.md.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernel_jobs.hpp"

namespace tessera::cpu {

struct IsaChoice {
  const Isa* isa;
  std::string missing;  // why it cannot run here; empty: it can
};

struct IsaChoices {
  std::vector<IsaChoice> list;  // best first
  std::string limit;            // $TESSERA_ISA, the best one that may run; empty: any
  std::string fault;            // what is wrong with the limit; calls that a CPU kernel could run then fail
};

// Found out once.
const IsaChoices& isa_choices();

}  // namespace tessera::cpu
