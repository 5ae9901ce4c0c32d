// SPDX-License-Identifier: Apache-2.0
// Decoding over several ranks: few queries, the same on every rank, over caches that are dealt to the ranks in blocks
// of keys, and results that are merged by a fixed binary tree: the same bits on any number of ranks. Included by
// programs and tests. Implements docs/scale_out.md, "Decoding".
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/communicator.hpp"
#include "tessera/tessera.hpp"

namespace tessera::dist {

// Which rank has which keys of a sequence. Blocks are numbered by position, block j belongs to group j % groups, and
// group g lies on rank g % ranks: round-robin, if the ranks divide the groups. A rank's blocks lie in its cache one
// after the other, in the order of positions.
struct Dealing {
  Int64 block = 4096;  // keys
  int groups = 64;     // a power of two. Ranks beyond it have no keys

  struct Place {
    int rank = 0;
    Int64 row = 0;  // of the sequence's rows on that rank
  };
  Place place(Int64 position, int ranks) const;
  // Rows that a rank needs for a sequence of so many keys: whole blocks.
  Int64 rows(Int64 length, int rank, int ranks) const;
};

// The question, the same on every rank.
struct DecodeProblem {
  Int64 Hq = 1, Hk = 1, D = 64, Dv = 64;
  Type type = Type::bf16;  // of q
  Options options;         // causal, window, softcap, scale; positions are the decoder's
  Dealing dealing;
};

class Decoder {
 public:
  // Together with all ranks: compares what they ask for. timeout: seconds that a rank waits for another. threads: of
  // each rank; 0: all that the process may use.
  Decoder(std::shared_ptr<Communicator> communicator, const DecodeProblem& problem, double timeout = 300,
          int threads = 0);

  // Together with all ranks. q [B,Nq,Hq,D], sinks [Hq] and slopes [Hq] are the same on every rank: queries are the last
  // Nq positions of their sequence, which has lengths[b] keys, those of the queries' own tokens included. k and v hold
  // this rank's rows: [B,rows,Hk,D] and [B,rows,Hk,Dv], or pages [pages,page_size,Hk,D] with a block_table [B,entries],
  // in types of their own; rows and page_size * entries are multiples of a block. o [B,Nq,Hq,Dv] and lse [B,Hq,Nq] are
  // written on every rank, when all is done: a call that fails has written nothing.
  void forward(const Inputs& inputs, std::span<const Int64> lengths, const Outputs& outputs);

 private:
  struct Partial;
  struct Node {  // of the tree, and the rank that has all its keys
    int level, residue, rank;
  };
  void check(const Inputs& inputs, std::span<const Int64> lengths, const Outputs& outputs) const;
  void agree();
  std::optional<Error> complaint() const;
  Partial group_partial(const Inputs& inputs, std::span<const Int64> lengths, int group) const;
  Partial merged(std::vector<Partial> partials, int level, int residue) const;
  void list_nodes(std::vector<Node>& nodes, int level, int residue, int groups) const;
  template <class Leaf>
  Partial fold(int level, int residue, int groups, const Leaf& leaf) const;
  std::vector<Partial> exchange(const std::vector<Node>& nodes, std::vector<Partial> mine, const Partial& like,
                                UInt64 call, UInt64 agreed);

  Line line;
  DecodeProblem p;
  int threads;
  UInt64 calls = 0;
};

}  // namespace tessera::dist
