// SPDX-License-Identifier: Apache-2.0
// Do views share memory? Exact arithmetic on addresses and strides; no memory is read. And the rules that rest on it.
// Included by core/check.cpp, core/check_run.cpp and tests. Implements docs/algorithm.md, "Aliasing".
#pragma once

#include <cstdint>
#include <limits>

#include "tessera/types.hpp"

namespace tessera {

// The answer is exact for all views that nest, which is all that slicing and transposing one buffer yields, and for
// most others. Where strides are so unrelated that a bounded search does not decide, it is yes.
bool overlaps_itself(const Tensor& t);  // two elements share memory. Reads no address
bool overlap(const Tensor& a, const Tensor& b);
// From the first byte of a view to its last, ends that no address can have left out. Views whose reaches do not touch
// lie apart, which is quickly seen: whoever compares many views finds the reach of each once. Without elements there is
// none, and only the whole address space touches it.
struct Reach {
  std::uint64_t first = std::numeric_limits<std::uint64_t>::max(), last = 0;
};
Reach reach_of(const Tensor& t);
inline bool touch(const Reach& a, const Reach& b) { return a.first <= b.last && b.first <= a.last; }

bool same_view(const Tensor& a, const Tensor& b);  // element for element the same memory, of the same type

void check_writable(const char* name, const Tensor& t);  // does not overlap itself
void check_apart(const char* name, const Tensor& output, const char* other_name, const Tensor& other);

}  // namespace tessera
