// SPDX-License-Identifier: Apache-2.0
// What the parts of a schedule amount to for tensors of some shape: heads of a rank, pairs of a job, bytes of a
// transfer. Included by the simulator and by the count of costs.
#pragma once

#include "dist/schedule.hpp"

namespace tessera::dist {

struct Shape {
  Int64 Hq = 32, Hk = 8, D = 128, Dv = 128, bytes = 2;  // of an element
};

class Sizes {
 public:
  Sizes(const Schedule& schedule, const Shape& shape) : s(schedule), shape(shape) {}

  Int64 key_heads(int rank) const;
  Int64 query_heads(int rank) const;
  // Pairs of a query of the job and a key that it sees.
  double pairs(const Work& job) const;
  // As executor.cpp packs it, at this rank's end: the seal and what only some calls have (bias, mask, d_lse) left out.
  Int64 bytes(int rank, const Transfer& transfer) const;

 private:
  bool backward() const { return s.settings.pass == Pass::backward; }
  Int64 row_there(int rank) const;
  Int64 row_back(int rank) const;

  const Schedule& s;
  const Shape& shape;
};

}  // namespace tessera::dist
