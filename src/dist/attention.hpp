// SPDX-License-Identifier: Apache-2.0
// Attention over several ranks: a plan that all ranks make together, and its two passes, each with local rows in and
// local rows out. Included by the command line, the tests and the C ABI. Implements docs/scale_out.md.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "dist/communicator.hpp"
#include "dist/memory.hpp"
#include "dist/schedule.hpp"
#include "tessera/tessera.hpp"

namespace tessera::dist {

// The question, the same on every rank: sequences of tokens with a query and a key each.
struct Problem {
  std::vector<Int64> lengths;
  Int64 Hq = 1, Hk = 1, D = 64, Dv = 64;
  Type type = Type::f32;
  Options
      options;  // those of one device; positions, `accumulate` and the bounds of lengths stay as they are by default
};

struct Sharing {
  Partition partition;
  Scheme scheme = Scheme::gather;
  Int64 segment =
      0;  // results have the same bits on any number of ranks whose cuts lie on its multiples; 0: no promise
  Int64 grain = 384;  // rows: where a gather without segments may cut the keys; multiples of a kernel's key tile keep
                      // the bits of one call
  double timeout = 300;  // seconds that a rank waits for another
  int threads = 0;       // of each rank; 0: all that the process may use
  int sm_margin = 0;     // multiprocessors of a GPU that a rank's calls leave to messages

  std::shared_ptr<Memory> memory = std::make_shared<Memory>();  // where the rank's tensors lie

  // Of every call that a rank makes of the library.
  Execution execution() const { return {.device = memory->device(), .threads = threads, .sm_margin = sm_margin}; }
};

// Dropout's, of one call; the same on every rank.
struct Seed {
  UInt64 seed = 0, offset = 0;
};

// Instead of a call of a plan's, or of making one: tells the others why there is none on this rank, and throws that.
[[noreturn]] void refuse(std::shared_ptr<Communicator> communicator, std::exception_ptr why);

// Which heads the ranks of slice u work on, as key/value heads.
Range key_heads(Int64 Hk, int slice, int slices);

// Tensors of a rank hold its rows in the order of its spans: q [T,Hq,D], k [T,Hk,D], v [T,Hk,Dv], o [T,Hq,Dv], lse
// [Hq,T]; bias and mask [1,Hq|1,T|1,M|1] with M at least the longest sequence; slopes [Hq] or [sequences,Hq]; sinks
// [Hq]. dsinks is the sum over all ranks, on every rank. All where `memory` says. Outputs are written when all is done:
// a pass that fails has written nothing.
class Plan {
 public:
  // Together with all ranks: compares what they ask for before the first row travels.
  Plan(std::shared_ptr<Communicator> communicator, Problem problem, Sharing sharing);

  // Without a seed: that of the problem.
  void forward(const Inputs& inputs, const Outputs& outputs, std::optional<Seed> seed = {});
  void backward(const Inputs& inputs, const Saved& saved, const Gradients& gradients, std::optional<Seed> seed = {});

  const Problem& question() const { return problem; }
  const Schedule& schedule(Pass pass) const { return pass == Pass::forward ? forward_schedule : backward_schedule; }

 private:
  void agree();
  std::optional<Error> complaint() const;
  Problem with(const std::optional<Seed>& seed) const;
  UInt64 call_number(const Problem& now, UInt64 flags, Type written);

  Line line;
  Problem problem;
  Sharing sharing;
  Schedule forward_schedule, backward_schedule;
  UInt64 calls = 0;
};

}  // namespace tessera::dist
