// From a call to the jobs of the kernels: one head's rows and numbers, with everything that turns q.k into a score.
// Included by cpu/run.cpp and cpu/decode.cpp.
#pragma once

#include <vector>

#include "core/kernel.hpp"
#include "cpu/job.hpp"

namespace tessera::cpu {

Rows head_rows(const TokenRows& rows, Int64 h);
RowNumbers head_numbers(RowNumbers numbers, Int64 h);
PairNumbers head_pairs(PairNumbers pairs, Int64 h);
HeadJob head_job(const Problem& p, const Call& call, const Sequence& s, Int64 h);

// Those that have queries or keys, in order.
std::vector<Sequence> all_sequences(const Problem& p, const Call& call);

}  // namespace tessera::cpu
