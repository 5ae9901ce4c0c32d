// SPDX-License-Identifier: Apache-2.0
// Sequences with few queries (decoding): split-KV. A sequence's keys are split into chunks, each a task for all the
// query heads of a KV head, and the chunks' partial results are merged in order. Included by cpu/run.cpp and
// cpu/backend.cpp. Implements docs/cpu_kernels.md, "Few queries".
#pragma once

#include <vector>

#include "core/parallel.hpp"
#include "cpu/run.hpp"

namespace tessera::cpu {

// Whether a sequence is computed this way: by its own number of queries and by the options, never by its neighbours.
bool is_decoding(const Problem& problem, const Sequence& sequence);

// Bytes of partial results, at most.
Int64 decode_bytes(const Problem& problem);

// One sequence: its chunks, and where its partial results lie.
struct Decoding {
  const Sequence* sequence;
  Range keys;            // those that some query sees
  Int64 chunks, passes;  // passes: over K and V, each for some of a KV head's query heads
  float* partials;

  Range chunk(Int64 c) const {
    const Int64 size = decode_chunk(keys.size());
    return {keys.begin + c * size, lesser(keys.begin + (c + 1) * size, keys.end)};
  }
};

// The tasks of a call's sequences. All arguments must live until they are done, and all memory is taken beforehand.
class Decode {
 public:
  Decode(const Problem& problem, const Isa& isa, const WorkspaceLayout& layout, const Call& call,
         const std::vector<Sequence>& sequences);

  std::vector<Step> steps() const;  // this must live until they are done
  int threads() const { return thread_count; }

 private:
  void read_chunk(Int64 index, int worker) const;
  void merge_chunks(Int64 index) const;

  const Problem& p;
  const Isa& isa;
  const WorkspaceLayout& layout;
  const Call& call;
  std::vector<Decoding> list;
  int thread_count;
  Int64 beside = decode_jobs;   // passes side by side
  std::vector<Int64> first{0};  // task of each sequence
};

}  // namespace tessera::cpu
