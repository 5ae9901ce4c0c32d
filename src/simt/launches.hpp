// Steps that are compiled and loaded on a GPU, ready to be launched one after another. Included by the ladder's own
// backend and by that of the Hopper kernels, whose backward pass begins and ends as the ladder's does.
#pragma once

#include <string>
#include <vector>

#include "cuda/jit/cache.hpp"
#include "simt/ladder.hpp"

namespace tessera::simt {

class Launches {
 public:
  Launches(const std::vector<Step>& steps, int device);
  // `params`: what every step is given, a ForwardParams or a BackwardParams.
  void run(void* params, cuda::StreamHandle stream) const;
  // A line for each, with a line's end before it.
  std::string describe() const;
  std::size_t count() const { return list.size(); }

 private:
  struct Launch {
    const cuda::LoadedKernel* kernel;
    Step step;
  };
  std::vector<Launch> list;
};

}  // namespace tessera::simt
