// SPDX-License-Identifier: Apache-2.0
// From a checked call to the kernels' plain parameters, the backward pass's workspace, and what sizes a grid.
// Included by the GPU families' planners.
// Problem, Config, Params: docs/architecture.md says why there are three.
#pragma once

#include "core/kernel.hpp"
#include "cuda/device.hpp"
#include "gpu/config.hpp"
#include "gpu/pages.hpp"
#include "gpu/state.hpp"

namespace tessera::gpu {

Element element_of(Type type);
ScoreConfig score_config(const Problem& problem);

// The scale of scores, and what Hopper's tensor cores lose: they cut off what does not fit into a sum's f32, so that
// sums of products of one sign come out too small by a share that grows with their length (docs/numerics.md, "Tensor
// cores"). `halves`: S is the sum of two such sums.
double corrected_scale(const Problem& problem, bool halves);

// `score_scale`: see Question.
ForwardParams forward_params(const Problem& problem, const Call& call, double score_scale);

TokenRef token_ref(const Tensor& tensor, const Problem& problem);  // [B,N,H,D], or packed
States states_of(const Problem& problem, const Call& call);        // of a forward pass; all null where there are none

TokenRef page_ref(const Tensor& pool);  // [pages,P,H,D]; batch: from page to page
// Tables and the status word of keys in pages; all null where there are none.
PageTables page_tables(const Problem& problem, const Call& call);
// k_scale or v_scale, whatever its form.
ScaleRef scale_ref(const Tensor& scale);

// f32 sums in the workspace, of which a rung may ask for several copies: `convert` adds them in their order and writes
// the gradient. 0: the rung's own kernels write it.
struct Accumulators {
  int dq = 0, dk = 0, dv = 0;  // copies of each
};

// The backward pass's workspace: delta, lse2, then the accumulators.
BackwardParams backward_params(const Problem& problem, const Call& call, const Accumulators& accumulators,
                               double score_scale);
std::int64_t workspace_bytes(const Problem& problem, const Accumulators& accumulators);

// Blocks of `rows` queries (keys) and all heads: what a grid must cover, at most.
std::int64_t query_blocks(const Problem& problem, std::int64_t rows);
std::int64_t key_blocks(const Problem& problem, std::int64_t rows);

// How many heads the L2 cache keeps so many bytes of, for all who work on them at the same time: at least one. The
// cache has two halves, and what streams past wants room too.
std::int64_t heads_in_cache(const cuda::Target& target, std::int64_t head_bytes);

}  // namespace tessera::gpu
