// SPDX-License-Identifier: Apache-2.0
// The interface between the library and its backends: a Kernel turns a Problem into a KernelPlan, or into the reason
// there is none. Supporting something and planning it are the same act, so they cannot disagree. Implemented by every
// backend, called by src/api only.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/problem.hpp"
#include "tessera/types.hpp"

namespace tessera {

// One call's arguments, checked. Only the members of the problem's pass are set.
struct Call {
  Inputs inputs;
  Outputs outputs;      // forward
  Saved saved;          // backward
  Gradients gradients;  // backward
  Options options;
  Execution execution;  // workspace is set and large enough
};

// Where a problem may be cut into calls that keep its bits: at multiples of so many queries and keys; 0: nowhere.
struct CutTiles {
  std::int64_t queries = 0, keys = 0;
};

// Immutable; may be run from several threads at once.
class KernelPlan {
 public:
  virtual ~KernelPlan() = default;
  virtual std::size_t workspace_bytes() const = 0;
  virtual CutTiles tiles() const { return {}; }
  virtual std::string describe() const = 0;  // tiles, threads and the like, one fact a line
  virtual void run(const Call& call) const = 0;
};

struct PlanOrReason {
  std::unique_ptr<const KernelPlan> plan;
  std::string reason;  // why there is no plan: names the option, its value and what would work
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual const char* name() const = 0;
  // Kernels of one family have the same options and places to run; asking for a family takes the best of it that can.
  virtual const char* family() const { return name(); }
  virtual DeviceType device() const = 0;  // where it runs; plan() and refusal() are asked of problems there only
  virtual PlanOrReason plan(const Problem& problem, const Execution& execution) const = 0;
  // The reason that plan() would give, or none. For kernels whose plans are costly to make.
  virtual std::string refusal(const Problem& problem, const Execution& execution) const {
    return plan(problem, execution).reason;
  }
};

}  // namespace tessera
