// SPDX-License-Identifier: Apache-2.0
// Questions from a fuzzer's bytes: cases of attention, merges and dropout masks, valid ones, and how to damage them.
// Included by the files of the target c_api.
#pragma once

#include "cases/case.hpp"
#include "fuzz/bytes.hpp"
#include "fuzz/call.hpp"

namespace tessera::fuzz {

// Small: at most a few ten thousand pairs of elements; now and then one that is larger than a tile.
cases::Case case_from(Bytes& in);

// K and V in types of their own and with scales, scores of qv too, trees; the case then has no backward pass.
void use_caches(Bytes& in, cases::Case& c);

// A forward call with its keys in the pages of a cache instead; some table entries are no pages.
void use_pages(Bytes& in, Call& call);

// The same question as a part of a problem: from a state or to one, at positions of its own, with the promise or
// without.
void use_parts(Bytes& in, Call& call);

struct Merge {
  cases::Buffer o, lse;  // merged; lse may be absent
  std::vector<cases::Buffer> part_o, part_lse;
};
Merge merge_from(Bytes& in);
Call merge_call(const Merge& merge);

struct DropoutMask {
  cases::Buffer mask, rng;
  Options options;
};
DropoutMask mask_from(Bytes& in);
Call mask_call(const DropoutMask& mask);

// Threads, kernel and workspace of an ordinary call.
void execution_from(Bytes& in, Call& call);

// One more thing wrong, or strange, or at the edge of what is legal.
void damage(Bytes& in, Call& call);

}  // namespace tessera::fuzz
