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
// The workspace holds delta and lse2, in this order.
BackwardParams backward_params(const Problem& problem, const Call& call);
std::int64_t row_count(const Problem& problem);  // numbers in delta, and in lse2

// Blocks of `rows` queries (keys) and all heads: what a grid must cover, at most.
std::int64_t query_blocks(const Problem& problem, std::int64_t rows);
std::int64_t key_blocks(const Problem& problem, std::int64_t rows);

}  // namespace tessera::simt
