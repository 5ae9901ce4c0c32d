// SPDX-License-Identifier: Apache-2.0
// Tasks of the CPU kernels; see run.hpp. Which thread takes which task never changes a bit: every output element has
// one task that computes it, in an order fixed by its own sequence.
#include "cpu/run.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/parallel.hpp"
#include "core/spin.hpp"
#include "cpu/decode.hpp"
#include "cpu/head_job.hpp"
#include "cpu/key_panels.hpp"
#include "cpu/segments.hpp"
#include "math/softmax.hpp"

namespace tessera::cpu {
namespace {

double pairs(const Sequence& s) { return double(s.nq) * double(s.nk); }
bool has_more_pairs(const Sequence& a, const Sequence& b) { return pairs(a) > pairs(b); }

// The tasks of several sequences in the order in which they are handed out: longest sequence first, so that short tasks
// fill the tail.
class TaskList {
 public:
  // count(s): the tasks of sequence s.
  template <class Count>
  TaskList(const std::vector<Sequence>& sequences, Count count) : order(sequences.size()) {
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return has_more_pairs(sequences[a], sequences[b]); });
    first.push_back(0);
    for (std::size_t i : order) first.push_back(first.back() + count(sequences[i]));
  }

  Int64 count() const { return first.back(); }

  struct Task {
    std::size_t sequence;
    Int64 index;  // inside the sequence
  };
  Task operator[](Int64 task) const {
    const auto at = static_cast<std::size_t>(std::upper_bound(first.begin(), first.end(), task) - first.begin()) - 1;
    return {order[at], task - first[at]};
  }

 private:
  std::vector<std::size_t> order;
  std::vector<Int64> first;
};

// Waking a thread costs some microseconds: below this many operations per thread it does not pay.
int useful_threads(const Problem& p, const std::vector<Sequence>& sequences, int threads) {
  double operations = 0;
  for (const Sequence& s : sequences)
    operations += 2.0 * double(p.Hq) * double(s.nq) * double(s.nk) * double(p.D + p.Dv);
  return static_cast<int>(std::clamp(operations / 2e6, 1.0, static_cast<double>(threads)));
}

// Attention of the KV heads of a round, `group` blocks of queries to a task. The last tasks are smaller, which shortens
// the tail in which few threads work; not where they read panels, which they would read more often. All arguments must
// live until it is done.
Step attend_round(const Problem& p, const Isa& isa, const WorkspaceLayout& layout, const Call& call,
                  const std::vector<SharedKeys>& round, Int64 group, int threads) {
  struct Blocks {
    const SharedKeys* keys;
    Int64 head;
    Range range;
  };
  Int64 left = 0;
  for (const SharedKeys& keys : round) left += p.heads_per_kv() * ceil_div(query_blocks(keys.sequence->nq), group);
  std::vector<Blocks> tasks;
  for (const SharedKeys& keys : round)
    for (Int64 h = 0; h < p.heads_per_kv(); ++h)
      // Causal: later blocks see more keys; longest first.
      for (Int64 n = ceil_div(query_blocks(keys.sequence->nq), group) - 1; n >= 0; --n, --left) {
        const Int64 begin = n * group, end = lesser(begin + group, query_blocks(keys.sequence->nq));
        const Int64 each = left <= 2 * (threads - 1) && !keys.panels ? ceil_div(group, 4) : group;
        for (Int64 at = begin; at < end; at += each)
          tasks.push_back({&keys, keys.kv * p.heads_per_kv() + h, {at, lesser(at + each, end)}});
      }
  const auto count = Int64(tasks.size());
  return {count, [&, tasks = std::move(tasks)](Int64 index, int worker) {
            const Blocks& blocks = tasks[static_cast<std::size_t>(index)];
            const Sequence& s = *blocks.keys->sequence;
            const ForwardJob job{.head = head_job(p, call, s, blocks.head),
                                 .o = head_rows(token_rows(call.outputs.o, p, s.b, s.q_begin), blocks.head),
                                 .lse = head_numbers(row_numbers(call.outputs.lse, p, s), blocks.head),
                                 .from = head_state(call.inputs.state, p, s, blocks.head),
                                 .to = head_state(call.outputs.state, p, s, blocks.head),
                                 .panels = blocks.keys->panels};
            isa.forward(job, blocks.range, scratch_of(call, layout, worker));
          }};
}

// Query blocks of all sequences together, at most. Packed: a block has a query, and each sequence one block that is not
// full.
Int64 total_query_blocks(const Problem& p) {
  return p.packed ? lesser(p.Nq, p.Nq / block_q + p.B) : product({p.B, query_blocks(p.Nq)});
}

}  // namespace

WorkspaceLayout workspace_layout(const Problem& p, const Isa& isa, int threads) {
  WorkspaceLayout layout{.threads = threads, .scratch_bytes = rounded_up(isa.scratch_bytes(p), 64)};
  const auto take = [&](Int64 bytes) { return std::exchange(layout.bytes, sum({layout.bytes, bytes})); };
  take(product({threads, layout.scratch_bytes}));
  if (p.pass == Pass::forward) {
    layout.panels = take(rounded_up(panel_room(p, isa), 64));
    layout.partials = take(decode_bytes(p));
  } else {
    const Int64 row_bytes = product({p.Hq, total_query_blocks(p), block_q, sizeof(float)});
    layout.delta = take(row_bytes);
    layout.lse2 = take(row_bytes);
    layout.images = take(p.dq ? product({row_bytes, isa.image_rows(p.D), groups_of(p, p.longest_k())}) : 0);
    layout.segment_bytes = rounded_up(segment_bytes(p), 64);
    layout.segments = take(product({threads, layout.segment_bytes}));
  }
  if (layout.bytes > most_bytes)
    throw Failure(TESSERA_OUT_OF_MEMORY, "workspace: more than 2^56 bytes are needed, and no process can have them");
  return layout;
}

float* scratch_of(const Call& call, const WorkspaceLayout& layout, int worker) {
  return reinterpret_cast<float*>(static_cast<char*>(call.execution.workspace) + worker * layout.scratch_bytes);
}

void run_forward(const Problem& p, const Isa& isa, const WorkspaceLayout& layout, const Call& call) {
  if (!p.has_queries()) return;
  const std::vector<Sequence> all = all_sequences(p, call);
  std::vector<Sequence> sequences, few;  // few: with few queries
  for (const Sequence& s : all) (is_decoding(p, s) ? few : sequences).push_back(s);
  const int threads = useful_threads(p, sequences, layout.threads);
  // As many blocks to a task as leave every thread several tasks.
  Int64 blocks = 0, group = forward_blocks;
  for (const Sequence& s : sequences) blocks += p.Hq * query_blocks(s.nq);
  while (group > 1 && blocks < group * 4 * threads) group /= 2;

  std::stable_sort(sequences.begin(), sequences.end(), has_more_pairs);
  const auto rounds = rounds_of(p, isa, layout, call, sequences);
  std::vector<Step> steps;
  for (const std::vector<SharedKeys>& round : rounds) {
    if (round.empty()) continue;
    steps.push_back(pack_round(p, isa, layout, call, round));
    steps.push_back(attend_round(p, isa, layout, call, round, group, threads));
  }
  PreparedSteps attention(std::move(steps), threads);
  std::optional<Decode> decode;
  std::optional<PreparedSteps> decoding;
  if (!few.empty()) {
    decode.emplace(p, isa, layout, call, few);
    decoding.emplace(decode->steps(), decode->threads());
  }
  // From here on nothing fails: outputs are written.
  report_pages(p, call);
  if (decoding) decoding->run();
  attention.run();
}

// --- backward

namespace {

// The backward pass of one call: its jobs, one per (sequence, query head), and the steps over them.
class Backward {
 public:
  Backward(const Problem& p, const Isa& isa, const WorkspaceLayout& layout, const Call& call) :
      p(p), isa(isa), layout(layout), call(call), sequences(all_sequences(p, call)),
      threads(useful_threads(p, sequences, layout.threads)) {
    char* workspace = static_cast<char*>(call.execution.workspace);
    auto* delta = reinterpret_cast<float*>(workspace + layout.delta);
    auto* lse2 = reinterpret_cast<float*>(workspace + layout.lse2);
    auto* image = reinterpret_cast<float*>(workspace + layout.images);
    Int64 parts = 0;  // of images
    for (const Sequence& s : sequences) parts += p.Hq * query_blocks(s.nq) * groups_of(p, s.nk);
    turns.resize(static_cast<std::size_t>(parts));
    int* turn = turns.data();
    for (const Sequence& s : sequences)
      for (Int64 h = 0; h < p.Hq; ++h) {
        jobs.push_back({.head = head_job(p, call, s, h),
                        .o = head_rows(token_rows(call.saved.o, p, s.b, s.q_begin), h),
                        .d_o = head_rows(token_rows(call.saved.d_o, p, s.b, s.q_begin), h),
                        .lse = head_numbers(row_numbers(call.saved.lse, p, s), h),
                        .d_lse = head_numbers(row_numbers(call.saved.d_lse, p, s), h),
                        .delta = delta,
                        .lse2 = lse2,
                        .dq_images = p.dq ? image : nullptr,
                        .image_rows = isa.image_rows(p.D),
                        .groups = groups_of(p, s.nk),
                        .dq_from = p.options.part_invariant && p.options.accumulate ? dq_rows(s, h) : Rows{},
                        .turns = turn});
        turn += query_blocks(s.nq) * groups_of(p, s.nk);
        const Int64 rows = query_blocks(s.nq) * block_q;
        delta += rows, lse2 += rows, image += rows * isa.image_rows(p.D) * groups_of(p, s.nk);
      }
  }

  void run() {
    std::vector<Step> steps{prepare()};
    if (p.dq || p.dk || p.dv) steps.push_back(key_spans());
    if (p.dq) steps.push_back(finish_dq());
    if (p.dbias) steps.push_back(bias_gradient());
    PreparedSteps prepared(std::move(steps), threads);
    // From here on nothing fails: outputs are written.
    clear_unused_rows(p, call);
    prepared.run();
    if (p.dsinks) sink_gradient();
  }

 private:
  const BackwardJob& job(std::size_t sequence, Int64 h) const {
    return jobs[sequence * static_cast<std::size_t>(p.Hq) + static_cast<std::size_t>(h)];
  }

  Rows dq_rows(const Sequence& s, Int64 h) const {
    return head_rows(token_rows(call.gradients.dq, p, s.b, s.q_begin), h);
  }

  // The place in the list of the first sequence whose number is at least b.
  std::size_t first_from(Int64 b) const {
    const auto found =
        std::partition_point(sequences.begin(), sequences.end(), [&](const Sequence& s) { return s.b < b; });
    return static_cast<std::size_t>(found - sequences.begin());
  }

  // step(job, sequence, head, block, worker) for every block of queries.
  template <class Block>
  Step for_query_blocks(Block step) const {
    const TaskList tasks(sequences, [&](const Sequence& s) { return p.Hq * query_blocks(s.nq); });
    return {tasks.count(), [this, step, tasks](Int64 index, int worker) {
              const auto task = tasks[index];
              const Int64 blocks = query_blocks(sequences[task.sequence].nq), h = task.index / blocks;
              step(job(task.sequence, h), sequences[task.sequence], h, task.index % blocks, worker);
            }};
  }

  Step prepare() const {
    return for_query_blocks(
        [this](const BackwardJob& j, const Sequence&, Int64, Int64 block, int) { isa.prepare(j, block); });
  }

  // dK, dV and the images of dQ: one task per KV head and span of keys. All groups' first spans come before the second
  // ones, which then hardly wait for their turn; and a span comes before the one that waits for it, so that there is no
  // deadlock. Causal: earlier keys are seen by more queries, so the longest tasks come first.
  Step key_spans() const {
    const auto spans = [&](const Sequence& s) {
      return p.Hk * groups_of(p, s.nk) * most_spans(s.nk, groups_of(p, s.nk));
    };
    const TaskList tasks(sequences, spans);
    return {tasks.count(), [this, tasks](Int64 index, int worker) {
              const auto task = tasks[index];
              const Sequence& s = sequences[task.sequence];
              const Int64 groups = groups_of(p, s.nk);
              const Int64 kv = task.index % p.Hk, group = task.index / p.Hk % groups;
              const Int64 number = task.index / p.Hk / groups;
              const Int64 first = group_begin(s.nk, groups, group), end = group_begin(s.nk, groups, group + 1);
              const Int64 begin = first + number * key_blocks_beside;
              if (begin >= end) return;
              const KeySpanJob span{.jobs = &job(task.sequence, kv * p.heads_per_kv()),
                                    .heads = p.heads_per_kv(),
                                    .group = group,
                                    .first_block = first,
                                    .block_begin = begin,
                                    .block_end = lesser(begin + key_blocks_beside, end),
                                    .queries = {0, s.nq},
                                    .dk = head_rows(token_rows(call.gradients.dk, p, s.b, s.k_begin), kv),
                                    .dv = head_rows(token_rows(call.gradients.dv, p, s.b, s.k_begin), kv),
                                    .key0 = 0,
                                    .accumulate = p.options.accumulate};
              if (layout.segment_bytes == 0) return isa.key_span(span, scratch_of(call, layout, worker));
              char* sums = static_cast<char*>(call.execution.workspace) + layout.segments;
              add_segments(p, isa, span, s.row0, scratch_of(call, layout, worker),
                           reinterpret_cast<float*>(sums + worker * layout.segment_bytes));
            }};
  }

  Step finish_dq() const {
    return for_query_blocks([this](const BackwardJob& j, const Sequence& s, Int64 h, Int64 block, int worker) {
      isa.finish_dq(j, dq_rows(s, h), p.options.accumulate && !j.dq_from, block, scratch_of(call, layout, worker));
    });
  }

  // One task per element of bias's leading dimensions and tile of the last two. A dimension of size 1 that stands for
  // many is summed over inside the task.
  Step bias_gradient() const {
    const auto shape = p.bias->shape;
    const bool sum_batch = shape[0] == 1, sum_heads = shape[1] == 1;
    const bool sum_rows = shape[2] == 1, sum_keys = shape[3] == 1;
    const Int64 row_tiles = sum_rows ? 1 : query_blocks(shape[2]), key_tiles = sum_keys ? 1 : key_blocks(shape[3]);
    const Int64 everything = std::numeric_limits<Int64>::max();
    // Each job belongs to one element of the leading dimensions; where the next element's begin.
    std::vector<const BackwardJob*> terms;
    std::vector<std::size_t> first{0};
    for (Int64 b = 0; b < shape[0]; ++b)
      for (Int64 h = 0; h < shape[1]; ++h) {
        for (std::size_t x = sum_batch ? 0 : first_from(b); x < (sum_batch ? sequences.size() : first_from(b + 1)); ++x)
          for (Int64 y = sum_heads ? 0 : h; y < (sum_heads ? p.Hq : h + 1); ++y) terms.push_back(&job(x, y));
        first.push_back(terms.size());
      }
    return {shape[0] * shape[1] * row_tiles * key_tiles, [=, this](Int64 index, int worker) {
              const Int64 key_tile = index % key_tiles, row_tile = index / key_tiles % row_tiles;
              const Int64 lead = index / key_tiles / row_tiles, h = lead % shape[1], b = lead / shape[1];
              Sequence place;
              place.b = b;
              isa.bias_gradient(
                  {.jobs = terms.data() + first[static_cast<std::size_t>(lead)],
                   .heads = Int64(first[static_cast<std::size_t>(lead) + 1] - first[static_cast<std::size_t>(lead)]),
                   .rows = sum_rows ? Range{0, everything}
                                    : Range{row_tile * block_q, std::min((row_tile + 1) * block_q, Int64(shape[2]))},
                   .keys = sum_keys ? Range{0, everything}
                                    : Range{key_tile * block_k, std::min((key_tile + 1) * block_k, Int64(shape[3]))},
                   .sum_rows = sum_rows,
                   .sum_keys = sum_keys,
                   .dbias = head_pairs(pair_numbers(call.gradients.dbias, place), h),
                   .accumulate = p.options.accumulate},
                  p.D, p.Dv, scratch_of(call, layout, worker));
            }};
  }

  // dSink_h = - sum over b, i of exp(sink_h - LSE_i) delta_i, in f64 and in order.
  void sink_gradient() const {
    const Tensor& out = call.gradients.dsinks;
    for (Int64 h = 0; h < p.Hq; ++h) {
      const double sink = sink_of(call, h) * log2e<double>;
      double sum = 0;
      for (std::size_t s = 0; s < sequences.size(); ++s) {
        const BackwardJob& j = job(s, h);
        for (Int64 i = 0; i < j.head.nq; ++i)
          if (std::isfinite(j.lse2[i]) || std::isnan(j.lse2[i]))
            sum -= std::exp2(sink - double(j.lse2[i])) * double(j.delta[i]);
      }
      if (p.options.accumulate) sum += load_element(out.data, out.type, h * stride(out, 0));
      store_element(out.data, out.type, h * stride(out, 0), sum);
    }
  }

  const Problem& p;
  const Isa& isa;
  const WorkspaceLayout& layout;
  const Call& call;
  std::vector<Sequence> sequences;
  int threads;
  std::vector<BackwardJob> jobs;
  std::vector<int> turns;  // the jobs' own
};

}  // namespace

void await_turn(const int* turns, int turn) {
  spin_until([&] { return __atomic_load_n(turns, __ATOMIC_ACQUIRE) >= turn; });
}

void run_backward(const Problem& p, const Isa& isa, const WorkspaceLayout& layout, const Call& call) {
  if (!p.has_queries()) return clear_gradients(p, call);
  Backward(p, isa, layout, call).run();
}

}  // namespace tessera::cpu
