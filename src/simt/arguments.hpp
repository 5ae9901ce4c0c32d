// From a checked call to the kernels' plain parameters.
// Included by src/simt.
// Problem, Config, Params: docs/architecture.md says why there are three.
#pragma once

#include "core/kernel.hpp"
#include "simt/config.hpp"
#include "simt/params.hpp"

namespace tessera::simt {

Element element_of(Type type);
Config config_of(const Problem& problem, int threads);

ForwardParams forward_params(const Problem& problem, const Call& call);
// f32 sums in the workspace, of which a rung may ask for several copies: `convert` adds them in their order and writes
// the gradient. 0: the rung's own kernels write it.
struct Accumulators {
  int dq = 0, dk = 0, dv = 0;  // copies of each
};

// The backward pass's workspace: delta, lse2, then the accumulators.
BackwardParams backward_params(const Problem& problem, const Call& call, const Accumulators& accumulators);
std::int64_t workspace_bytes(const Problem& problem, const Accumulators& accumulators);

// Blocks of `rows` queries (keys) and all heads: what a grid must cover, at most.
std::int64_t query_blocks(const Problem& problem, std::int64_t rows);
std::int64_t key_blocks(const Problem& problem, std::int64_t rows);

}  // namespace tessera::simt
