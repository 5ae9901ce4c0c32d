// SPDX-License-Identifier: Apache-2.0
// `tessera dist faults`: what happens to four ranks when the last one asks for something else, fails, vanishes, is late
// or sends nonsense. Ranks are threads; processes that are killed or stopped are tests/dist/mpi_test.py's part.
// Implements docs/scale_out.md, "Failure".
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cli/dist.hpp"
#include "dist/attention.hpp"
#include "dist/faulty.hpp"
#include "dist/threads.hpp"

namespace tessera::cli {
namespace {

using namespace tessera::dist;

constexpr int ranks = 4, victim = ranks - 1;
constexpr float untouched = -77;

// What is different about the last rank.
struct Case {
  const char* name;
  const char* sentence;  // part of what every live rank must say; "": that nothing is wrong
  std::function<void(Problem&, Sharing&)> change{};
  Fault fault{};
  bool absent = false, wrong_tensor = false;
};

// Messages are those of group 1, the first after the agreement: every rank then still needs something from the others.
std::vector<Case> cases(double timeout) {
  const auto differs = [](const char* name, const char* sentence, std::function<void(Problem&, Sharing&)> change) {
    return Case{.name = name, .sentence = sentence, .change = std::move(change)};
  };
  return {
      {.name = "absent", .sentence = "no answer within", .absent = true},
      {.name = "dead link", .sentence = "no answer within", .fault = {Fault::drop, 1}},
      {.name = "late", .sentence = "", .fault = {Fault::delay, 1, timeout / 3}},
      // Noticed by the next message, which is not the one that was due, or at the limit.
      {.name = "lost message", .sentence = "rank ", .fault = {Fault::lose, 1}},
      {.name = "damaged message", .sentence = "arrived damaged", .fault = {Fault::corrupt, 1}},
      {.name = "shortened message", .sentence = "were expected", .fault = {Fault::wrong_size, 1}},
      {.name = "failing transport", .sentence = "the network is down", .fault = {Fault::fail, 1}},
      {.name = "wrong tensor", .sentence = "v: has the shape", .wrong_tensor = true},
      differs("asks wrongly", "accumulate: is 1; must be 0", [](Problem& p, Sharing&) { p.options.accumulate = true; }),
      differs("Hq", "Hq differs", [](Problem& p, Sharing&) { p.Hq = 8; }),
      differs("Hk", "Hk differs", [](Problem& p, Sharing&) { p.Hk = 1; }),
      differs("D", "D differs", [](Problem& p, Sharing&) { p.D = 8; }),
      differs("Dv", "Dv differs", [](Problem& p, Sharing&) { p.Dv = 24; }),
      differs("type", "type differs", [](Problem& p, Sharing&) { p.type = Type::bf16; }),
      differs("sequences", "sequences differs", [](Problem& p, Sharing&) { p.lengths.push_back(0); }),
      differs("lengths", "lengths differs", [](Problem& p, Sharing&) { p.lengths[0] += 1; }),
      differs("causal", "causal differs", [](Problem& p, Sharing&) { p.options.causal = false; }),
      differs("scale", "scale differs", [](Problem& p, Sharing&) { p.options.scale = 0.5; }),
      differs("softcap", "softcap differs", [](Problem& p, Sharing&) { p.options.softcap = 30; }),
      differs("window_left", "window_left differs", [](Problem& p, Sharing&) { p.options.window_left = 9; }),
      differs("window_right", "window_right differs", [](Problem& p, Sharing&) { p.options.window_right = 9; }),
      differs("diagonal_offset", "diagonal_offset differs",
              [](Problem& p, Sharing&) { p.options.alignment = Alignment::offset, p.options.diagonal_offset = 3; }),
      differs("dropout", "dropout differs", [](Problem& p, Sharing&) { p.options.dropout = 0.1; }),
      differs("seed", "seed differs", [](Problem& p, Sharing&) { p.options.seed = 5; }),
      differs("seed_offset", "seed_offset differs", [](Problem& p, Sharing&) { p.options.seed_offset = 5; }),
      differs("deterministic", "deterministic differs", [](Problem& p, Sharing&) { p.options.deterministic = false; }),
      differs("part_invariant", "part_invariant differs",
              [](Problem& p, Sharing&) { p.options.part_invariant = true; }),
      differs("segment_rows", "segment_rows differs", [](Problem& p, Sharing&) { p.options.segment_rows = 64; }),
      differs("scheme", "scheme differs", [](Problem&, Sharing& s) { s.scheme = Scheme::gather; }),
      differs("segment", "segment differs", [](Problem&, Sharing& s) { s.segment = 4; }),
      differs("slices", "slices differs",
              [](Problem& p, Sharing& s) { s.partition = two_level(zigzag(p.lengths, ranks / 2, 4), 2, 1); }),
      differs("partition", "partition differs",
              [](Problem& p, Sharing& s) { s.partition = contiguous(p.lengths, ranks, 4); }),
  };
}

struct Rank {
  bool answered = false, written = false;
  double seconds = 0;
  std::string said;
};

// Lives as long as the last thread, also if nobody waits for it any more.
struct Outcome {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Rank> of = std::vector<Rank>(ranks);
};

void rank(const Case& c, double timeout, std::shared_ptr<Communicator> messages, Outcome& outcome) {
  const int r = messages->rank();
  const auto begin = Clock::now();
  Rank mine;
  Problem problem{{96}, 4, 2, 16, 16, Type::f32, {.causal = true}};
  const Partition partition = zigzag(problem.lengths, ranks, 4);
  const Int64 n = partition.rows(r);
  std::vector<float> q(static_cast<std::size_t>(n * 4 * 16), 0.5f), kv(static_cast<std::size_t>(n * 2 * 16), 0.5f),
      o(q.size(), untouched), lse(static_cast<std::size_t>(n * 4), untouched);
  try {
    Sharing sharing{.partition = partition, .scheme = Scheme::ring, .timeout = timeout, .threads = 1};
    if (r == victim && c.change) c.change(problem, sharing);
    if (r == victim && c.fault.kind != Fault::none) messages = std::make_shared<Faulty>(std::move(messages), c.fault);
    dist::Plan plan(std::move(messages), problem, sharing);
    const Int64 rows = r == victim && c.wrong_tensor ? n - 1 : n;
    Inputs in;
    in.q = Tensor(q.data(), Type::f32, {n, 4, 16}), in.k = Tensor(kv.data(), Type::f32, {n, 2, 16});
    in.v = Tensor(kv.data(), Type::f32, {rows, 2, 16});
    plan.forward(in, {Tensor(o.data(), Type::f32, {n, 4, 16}), Tensor(lse.data(), Type::f32, {4, n}), {}, {}});
  } catch (const std::exception& error) {
    mine.said = error.what();
  }
  mine.answered = true, mine.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  for (const std::vector<float>* x : {&o, &lse})
    mine.written |= std::any_of(x->begin(), x->end(), [](float y) { return y != untouched; });
  const std::lock_guard lock(outcome.mutex);
  outcome.of[static_cast<std::size_t>(r)] = mine;
  outcome.changed.notify_all();
}

std::vector<Rank> run(const Case& c, double timeout) {
  const auto outcome = std::make_shared<Outcome>();
  const auto all = thread_communicators(ranks);
  const std::size_t live = c.absent ? ranks - 1 : ranks;
  for (std::size_t r = 0; r < live; ++r)
    std::thread([c, timeout, outcome, messages = all[r]] { rank(c, timeout, messages, *outcome); }).detach();
  std::unique_lock lock(outcome->mutex);
  outcome->changed.wait_for(lock, std::chrono::duration<double>(timeout + 10), [&] {
    return static_cast<std::size_t>(
               std::count_if(outcome->of.begin(), outcome->of.end(), [](const Rank& x) { return x.answered; })) == live;
  });
  return {outcome->of.begin(), outcome->of.begin() + static_cast<std::ptrdiff_t>(live)};
}

}  // namespace

int dist_faults(double timeout, Json& rows) {
  int wrong = 0, hangs = 0, count = 0;
  for (const Case& c : cases(timeout)) {
    const std::vector<Rank> all = run(c, timeout);
    bool good = true;
    const Rank* slowest = &all[0];
    for (const Rank& x : all) {
      const bool harmless = *c.sentence == 0;
      good &= x.answered && x.seconds < timeout + 1 && x.written == harmless;
      good &= harmless ? x.said.empty() : x.said.find(c.sentence) != std::string::npos;
      hangs += !x.answered;
      if (x.seconds > slowest->seconds) slowest = &x;
    }
    std::printf("%-18s %zu ranks answered, the last after %.2f s: %s%s\n", c.name, all.size(), slowest->seconds,
                all[0].said.empty() ? "fine" : all[0].said.c_str(), good ? "" : "  WRONG");
    rows.push_back({{"fault", c.name}, {"seconds", slowest->seconds}, {"sentence", all[0].said}, {"good", good}});
    wrong += !good, ++count;
  }
  if (wrong)
    std::printf("%d faults, %d wrong, %d hangs\n", count, wrong, hangs);
  else
    std::printf("%d faults, every live rank answered within deadline + 1 s, outputs untouched, 0 hangs\n", count);
  return wrong != 0;
}

}  // namespace tessera::cli
