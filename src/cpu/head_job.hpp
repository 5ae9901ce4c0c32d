// SPDX-License-Identifier: Apache-2.0
// Makes a HeadJob from a call: one head's rows, and everything that turns q.k into a score. Included by the files of
// cpu/ that make tasks.
#pragma once

#include <vector>

#include "core/kernel.hpp"
#include "cpu/kernel_jobs.hpp"

namespace tessera::cpu {

Rows head_rows(const TokenRows& rows, Int64 h);
RowNumbers head_numbers(RowNumbers numbers, Int64 h);
PairNumbers head_pairs(PairNumbers pairs, Int64 h);
CarriedState head_state(const State& state, const Problem& p, const Sequence& s, Int64 h);
HeadJob head_job(const Problem& p, const Call& call, const Sequence& s, Int64 h);

// Those that have queries or keys, in order.
std::vector<Sequence> all_sequences(const Problem& p, const Call& call);

}  // namespace tessera::cpu
