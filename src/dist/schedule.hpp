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

struct Settings {
  Scheme scheme = Scheme::gather;
  Pass pass = Pass::forward;
  // Rows are worked on in segments of this many, the same ones everywhere, so that results have the same bits on any
  // number of ranks. 0: not at all.
  Int64 segment = 0;
  // Scheme::gather cuts the keys of a row on multiples of this alone (with segments, on the next multiple of theirs;
  // backward, between them). A cut on a kernel's key tile leaves the forward pass its bits; 384 holds the tiles of 64,
  // 128 and 192 keys.
  Int64 grain = 384;
};

// Neighbouring rows of one sequence that a node holds; with segments, one of them.
struct Piece {
  Span rows;
  int node = 0;    // who holds it
  Int64 at = 0;    // its first row among the node's
  Int64 leaf = 0;  // its place among the pieces of its sequence
};

enum class What {
  heads,      // rows of a rank of the node, for the heads of the receiver
  keys,       // K and V of some rows
  gradients,  // a share of dK and dV of some rows, to the node that sums them
  sums,       // dK and dV of some rows, to the node that holds them
  results,    // rows of a rank of the node, back to it, from the heads of the sender
};

struct Transfer {
  What what = What::keys;
  bool send = false;
  int peer = 0;               // a rank
  Span rows{};                // of keys
  Int64 at = 0;               // where these begin in this end's memory for keys
  Int64 first = 0, last = 0;  // gradients: the share is that of the leaves first to last of queries; 0, 0: of all
};

// One call: attention of the queries of a piece with some keys of its sequence, which lie from row `at` on.
struct Work {
  int query = 0;
  Range keys{};
  Int64 at = 0;
};

// The group is started, and the work is done. Groups travel one after the other in the order of steps, beside the work
// of this step and of the next ones.
struct Step {
  std::vector<Transfer> group;
  std::vector<Work> work;
};

struct RankSchedule {
  std::vector<Step> steps;  // as many on every rank
  std::vector<Int64> home;  // where each span of the node's rows begins in the rank's memory for keys
  Int64 slot_rows = 0;      // rows of that memory
};

struct Schedule {
  Settings settings;
  Partition partition;
  std::vector<Int64> lengths;
  Mask mask;
  int ahead = 1;  // a step begins when all groups are complete that were started this many steps before, or earlier
  std::vector<Piece> pieces;  // by sequence and position
  std::vector<RankSchedule> of;

  int node_of(int rank) const { return rank / partition.slices; }
  int slice_of(int rank) const { return rank % partition.slices; }
  int rank_of(int node, int slice) const { return node * partition.slices + slice; }
};

Schedule make_schedule(const std::vector<Int64>& lengths, const Mask& mask, const Partition& partition,
                       const Settings& settings);

// The keys that some query of a piece sees.
Range keys_seen(const Schedule& schedule, const Piece& query);
// The piece that holds a row.
int piece_at(const Schedule& schedule, Int64 sequence, Int64 row);

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
// or worked on that may still be under way, and no row of memory is written while it may be read; with Scheme::gather
// every row sees its keys in ascending order; every share of dK and dV is in one sum, and every sum comes to the node
// that holds the rows, once and complete. Independent of how the schedule was made: it looks at the steps, and at
// visible() for tiles of `tile` rows.
Judgement check_schedule(const Schedule& schedule, Int64 tile);

}  // namespace tessera::dist
