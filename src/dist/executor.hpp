// SPDX-License-Identifier: Apache-2.0
// Runs a schedule on one rank: messages of a step, work meanwhile, results at the end. Included by attention.cpp.
// Implements docs/scale_out.md, "Schedules" and "Same bits".
#pragma once

#include <deque>
#include <map>
#include <set>
#include <vector>

#include "dist/attention.hpp"
#include "dist/memory.hpp"
#include "dist/rows.hpp"

namespace tessera::dist {

class Executor {
 public:
  // number: distinguishes this call's messages from all others; the same on every rank.
  Executor(Line& line, const Problem& problem, const Sharing& sharing, const Schedule& schedule, UInt64 number);

  void forward(const Inputs& inputs, const Outputs& outputs);
  void backward(const Inputs& inputs, const Saved& saved, const Gradients& gradients);

 private:
  enum class Kind { query, key, shared };  // whose heads a tensor has; shared: one for all
  // A tensor of the caller, and the rows of the whole node for this rank's heads.
  struct Field {
    RowView user;
    Kind kind = Kind::query;
    Rows rows;
  };
  // dK and dV of some rows of a key piece, summed over some leaves of queries.
  struct Share {
    Int64 first = 0, last = 0;
    Range rows{};
    std::vector<float> sums;  // [rows][hk][D], then [rows][hk][Dv]
  };
  // Messages of a step that have not been read yet.
  struct Group {
    UInt64 number = 0;  // of the line
    std::size_t step = 0;
    std::vector<Message> received;
  };

  Range heads_of(Kind kind, int slice) const;
  Int64 node_row(const Span& span) const;
  Int64 row_in(const Field& field, const Span& span) const;
  const Piece& piece(int p) const { return s.pieces[static_cast<std::size_t>(p)]; }
  void take(Field& field, const RowView& user, Kind kind, Int64 rows);
  void take_inputs(const Inputs& inputs);
  void run();
  void start(std::size_t step);
  void read_until(std::size_t step);
  void do_work(const Step& step);
  void exchange_results();

  // Messages.
  static void require_sealed(const Bytes& message, UInt64 number, int from, std::size_t step);
  UInt64 number_of(std::size_t step, int from, int to) const;
  Int64 bytes_of(const Transfer& t) const;
  std::vector<const Transfer*> transfers_of(std::size_t step, int peer, bool send) const;
  std::byte* fill(std::byte* at, const Transfer& t);
  const std::byte* read(const std::byte* at, const Transfer& t);

  // Work.
  Options options_of(const Work& job, Int64 head) const;
  Inputs inputs_of(const Work& job, Range heads) const;
  Tensor pairs_of(const RowView& view, const Work& job, Range heads) const;
  std::vector<Range> head_groups(const Work& job) const;
  std::vector<Work> key_groups(const Work& job) const;
  Tensor sinks_of(Range heads) const;
  State state_of(const Piece& query, Range heads) const;
  Inputs continued(const Work& job, Range heads);
  void work_forward(const Work& job, Range heads);
  void work_backward(const Work& job, Range heads);
  void finish_forward(const Outputs& outputs);
  void finish_backward(const Gradients& gradients);
  std::vector<float> sum_sinks();
  void add_gradients(Int64 row, Int64 count, const float* sums);
  Int64 tree_of(Int64 sequence) const;
  std::vector<float> folded(const std::vector<Share>& shares, Int64 first, Int64 last, Range rows) const;
  void drop_sent(const Step& step);
  Rows own_rows(const Rows& sums, Type type);
  Rows rounded(const Rows& sums, Type type);

  // Results.
  void give(const RowView& user, Kind kind, Rows rows);
  void write_results();

  Line& line;
  const Problem& p;
  const Sharing& sharing;
  const Schedule& s;
  UInt64 number;
  int rank, node, slice;
  Range hq, hk;  // this rank's heads
  Memory& memory;
  Memory host;      // for results that have been rounded there
  Int64 rows = 0;   // of the node
  Int64 slots = 0;  // rows of memory for keys
  std::vector<Span> spans;
  std::vector<Int64> span_rows;

  Field q, k, v, bias, mask, o, d_o, lse, d_lse;
  std::vector<Field*> fields;  // those that are there
  Tensor slopes, sinks;
  bool want_dsinks = false;
  Rows state_o, state_m, state_l;               // forward: carried from job to job
  std::set<std::pair<int, Int64>> begun;        // query pieces and heads whose state has begun
  Rows sum_dq, sum_dk, sum_dv;                  // backward, f32; dK and dV as the memory for keys
  Rows sum_dbias;                               // the same, of the node's rows, if wanted
  Rows leaf_dk, leaf_dv;                        // segments: of the leaf that is worked on
  std::map<int, std::vector<Share>> shares_of;  // segments: by key piece
  std::set<int> kept;                           // key pieces of which this rank sums some rows
  std::vector<Field> results;
  std::deque<Group> unread;
  std::vector<std::pair<int, std::shared_ptr<Bytes>>> arrived;  // results from other slices, by rank
};

}  // namespace tessera::dist
