// Which instruction sets are compiled in, and which this processor has.
// Included by cpu/*.cpp.
// Implements docs/architecture.md, "CPU kernels".
#pragma once

#include <vector>

#include "cpu/job.hpp"

namespace tessera::cpu {

struct IsaChoice {
  const Isa* isa;
  bool here;          // this processor and its operating system can run it
  const char* needs;  // for the sentence that refuses it
};

// Best first.
const std::vector<IsaChoice>& isa_choices();

}  // namespace tessera::cpu
