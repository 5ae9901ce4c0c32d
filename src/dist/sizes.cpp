// SPDX-License-Identifier: Apache-2.0
// Sizes of a schedule's parts; see sizes.hpp.
#include "dist/sizes.hpp"

#include "dist/attention.hpp"

namespace tessera::dist {

Int64 Sizes::key_heads(int rank) const {
  return dist::key_heads(shape.Hk, s.slice_of(rank), s.partition.slices).size();
}

Int64 Sizes::query_heads(int rank) const { return shape.Hk == 0 ? 0 : shape.Hq / shape.Hk * key_heads(rank); }

double Sizes::pairs(const Work& job) const {
  const Span& query = s.pieces[static_cast<std::size_t>(job.query)].rows;
  BandMask band = s.mask.band(s.lengths[static_cast<std::size_t>(query.sequence)]);
  band.low -= job.keys.begin, band.high -= job.keys.begin, band.keys = job.keys.size();
  return visible_pairs(band, query.begin, query.end);
}

// Of one row, for the heads of a rank: what goes to it, Q, K and V, backward O, dO and LSE too; and what comes back.
Int64 Sizes::row_there(int rank) const {
  const Int64 keys = key_heads(rank) * (shape.D + shape.Dv), queries = query_heads(rank);
  return (keys + queries * (shape.D + (backward() ? 2 * shape.Dv : 0))) * shape.bytes + queries * (backward() ? 4 : 0);
}
Int64 Sizes::row_back(int rank) const {
  const Int64 keys = key_heads(rank) * (shape.D + shape.Dv);
  if (backward()) return (query_heads(rank) * shape.D + keys) * shape.bytes;
  return query_heads(rank) * (shape.Dv * shape.bytes + 4);
}

Int64 Sizes::bytes(int rank, const Transfer& x) const {
  const Int64 row = key_heads(rank) * (shape.D + shape.Dv);
  if (x.what == What::keys) return x.rows.rows() * row * shape.bytes;
  if (x.what == What::gradients || x.what == What::sums) return x.rows.rows() * row * 4;
  const bool there = x.what == What::heads;
  const int owner = there == x.send ? rank : x.peer, worker = there == x.send ? x.peer : rank;
  return s.partition.rows(owner) * (there ? row_there(worker) : row_back(worker));
}

}  // namespace tessera::dist
