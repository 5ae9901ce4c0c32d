// SPDX-License-Identifier: Apache-2.0
// What every rank does, step by step, as plain data: which rows travel to whom and which attention is computed. Made
// by a pure function and checked without any network (check_schedule); one executor runs it, one simulator times it.
// Included by both, by tests and by the command line. Implements docs/scale_out.md, "Schedules".
#pragma once

#include <string>
#include <vector>

#include "dist/partition.hpp"

namespace tessera::dist {

enum class Scheme {
  ring,    // step s brings the keys of the node s places before, and only these are kept
  gather,  // keys arrive in ascending order and stay; every row sees its keys in that order on any number of ranks
};
enum class Pass { forward, backward };

// What is cut smaller than the partition does, so that results have the same bits on any number of ranks: rows are
// then worked on in segments of this many, the same ones everywhere. 0: not at all.
struct Settings {
  Scheme scheme = Scheme::gather;
  Pass pass = Pass::forward;
  Int64 segment = 0;
};

// The unit of work and of transfer: neighbouring rows of one sequence that a node holds.
struct Piece {
  Span rows;
  int node = 0;    // who holds it
  Int64 at = 0;    // its first row among the node's
  Int64 leaf = 0;  // its place among the pieces of its sequence
};

enum class What {
  heads,      // rows of a rank of the node, for the heads of the receiver
  keys,       // K and V of a piece
  gradients,  // a share of dK and dV of a piece, to the node that holds it
  results,    // rows of a rank of the node, back to it, from the heads of the sender
};

struct Transfer {
  What what = What::keys;
  bool send = false;
  int peer = 0;               // a rank
  int piece = -1;             // keys, gradients
  int slot = -1;              // keys: where they lie at this end
  Int64 first = 0, last = 0;  // gradients: the share is that of the leaves first to last of queries; 0, 0: of all
};

// Attention of the queries of one piece with the keys of another, which lie in `slot`.
struct Work {
  int query = 0, key = 0, slot = 0;
};

// The group is started, the work is done meanwhile, and the step ends when both are complete. Work uses what earlier
// groups brought, and a group sends what earlier steps left.
struct Step {
  std::vector<Transfer> group;
  std::vector<Work> work;
};

struct RankSchedule {
  std::vector<Step> steps;      // as many on every rank
  std::vector<Int64> slot_row;  // where each slot begins in the rank's memory for keys
  Int64 slot_rows = 0;          // rows of that memory
};

struct Schedule {
  Settings settings;
  Partition partition;
  std::vector<Int64> lengths;
  Mask mask;
  std::vector<Piece> pieces;  // by sequence and position
  std::vector<RankSchedule> of;

  int node_of(int rank) const { return rank / partition.slices; }
  int slice_of(int rank) const { return rank % partition.slices; }
  int rank_of(int node, int slice) const { return node * partition.slices + slice; }
};

Schedule make_schedule(const std::vector<Int64>& lengths, const Mask& mask, const Partition& partition,
                       const Settings& settings);

// Does some query of one piece see some key of the other?
bool sees(const Schedule& schedule, const Piece& query, const Piece& key);

// The shares in which a node returns the gradients of a key piece, as leaves of queries: one share for all of them, or
// (segments) the largest aligned subtrees that its pieces fill, less those that see nothing of the key piece.
struct Leaves {
  Int64 first = 0, last = 0;
  bool operator==(const Leaves&) const = default;
};
std::vector<Leaves> shares(const Schedule& schedule, int node, const Piece& key);

struct Judgement {
  std::string fault;   // empty: none. One sentence that names rank, step and piece
  double balance = 1;  // mean over largest work of the nodes, in visible pairs
};

// Every visible pair of a query tile and a key tile exactly once; sends match receives, step by step; nothing is sent
// or worked on before it is there, and no slot is overwritten in use; with Scheme::gather every row sees its keys in
// ascending order; gradients of every piece return complete to the node that holds it. Independent of how the schedule
// was made: it looks at the steps, and at visible() for tiles of `tile` rows.
Judgement check_schedule(const Schedule& schedule, Int64 tile);

}  // namespace tessera::dist
