// SPDX-License-Identifier: Apache-2.0
// mpi_overlap ring|gather forward|backward TOKENS TURNS: one rank of a run under mpirun, for tests/dist/namespaces.py.
// Measures a pass: its work alone, its messages alone, both together, in turns; calibrates the simulator by the first
// two, and prints all of it as one line of JSON. Implements docs/scale_out.md, "Overlap".
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "dist/simulate.hpp"
#include "dist/transport.hpp"
#include "mpi/transport.hpp"
#include "tests/dist/world.hpp"

namespace tessera::dist {
namespace {

constexpr Int64 heads = 4, dim = 64;
constexpr Shape shape{heads, heads, dim, dim, 4};

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

double processor_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Seconds until the slowest rank is done.
template <class Body>
double timed(Body body) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto begin = Clock::now();
  body();
  double mine = std::chrono::duration<double>(Clock::now() - begin).count(), all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return all;
}

using Log = std::vector<std::vector<Bytes>>;  // by group, what was received

// Keeps a copy of all that arrives.
class Recorder : public Communicator {
 public:
  Recorder(std::shared_ptr<Communicator> real, Log& log) : real(std::move(real)), log(log) {}
  int rank() const override { return real->rank(); }
  int size() const override { return real->size(); }
  void start(std::span<const Message> messages) override {
    group.assign(messages.begin(), messages.end()), kept = false;
    real->start(messages);
  }
  std::vector<bool> test() override {
    const std::vector<bool> done = real->test();
    if (!kept && std::find(done.begin(), done.end(), false) == done.end()) {
      log.emplace_back(), kept = true;
      for (const Message& m : group)
        if (!m.send) log.back().push_back(*m.bytes);
    }
    return done;
  }
  std::optional<std::string> notice() override { return real->notice(); }
  void fail(const std::string& sentence) noexcept override { real->fail(sentence); }

 private:
  std::shared_ptr<Communicator> real;
  Log& log;
  std::vector<Message> group;
  bool kept = true;
};

// Gives what a recorder has kept, at once: the executor's work without any network.
class Replayer : public Communicator {
 public:
  Replayer(int rank, int size, const Log& log) : me(rank), ranks(size), log(log) {}
  int rank() const override { return me; }
  int size() const override { return ranks; }
  void start(std::span<const Message> messages) override {
    std::size_t i = 0;
    for (const Message& m : messages)
      if (!m.send) *m.bytes = log.at(next).at(i++);
    ++next, count = messages.size();
  }
  std::vector<bool> test() override { return std::vector<bool>(count, true); }
  std::optional<std::string> notice() override { return {}; }
  void fail(const std::string&) noexcept override {}

 private:
  int me, ranks;
  const Log& log;
  std::size_t next = 0, count = 0;
};

class Measured {
 public:
  Measured(Scheme scheme, Pass pass, Int64 tokens, int rank, int ranks) : rank(rank), pass(pass) {
    problem = {{tokens}, heads, heads, dim, dim, Type::f32, {.causal = true}};
    sharing = {.partition = zigzag(problem.lengths, ranks, 192), .scheme = scheme, .timeout = 60, .threads = 1};
    communicator = communicator_over(detail::to_c(mpi::transport_over(MPI_COMM_WORLD, 60)));
    plan = std::make_unique<Plan>(communicator, problem, sharing);
    const Int64 n = sharing.partition.rows(rank);
    for (Numbers* x : {&q, &k, &v, &o, &d_o, &dq, &dk, &dv}) *x = Numbers(Type::f32, n, heads, dim);
    lse = Numbers(Type::f32, n, heads, 1);
    for (Numbers* x : {&q, &k, &v, &d_o})
      for (Int64 i = 0; i < x->count(); ++i) x->set(i, double(i * 7919 % 1000) / 500 - 1);
    forward(*plan);
    Plan recorded(std::make_shared<Recorder>(communicator, log), problem, sharing);
    run(recorded);
  }

  const Schedule& schedule() const { return plan->schedule(pass); }
  const RankSchedule& mine() const { return schedule().of[static_cast<std::size_t>(rank)]; }

  void together() { run(*plan); }

  // A plan whose pass is the executor's work alone.
  Plan alone() const { return Plan(std::make_shared<Replayer>(rank, communicator->size(), log), problem, sharing); }

  void run(Plan& with) {
    if (pass == Pass::forward) return forward(with);
    with.backward(inputs(), {o.tokens(), lse.numbers(), d_o.tokens(), {}},
                  {dq.tokens(), dk.tokens(), dv.tokens(), {}, {}});
  }

  // Messages of the schedule's sizes, without any work between them.
  void messages() {
    Line line(communicator, 60);
    UInt64 last = 0;
    const Sizes sizes(schedule(), shape);
    for (const Step& step : mine().steps) {
      std::map<std::pair<int, bool>, Int64> bytes;
      for (const Transfer& x : step.group) bytes[{x.peer, x.send}] += sizes.bytes(rank, x);
      std::vector<Message> group;
      for (const auto& [link, size] : bytes)
        group.push_back({link.first, link.second, std::make_shared<Bytes>(static_cast<std::size_t>(size))});
      last = line.start(std::move(group));
    }
    line.wait(last);
  }

  // One group of nothing, to and from everybody.
  void nothing() {
    Line line(communicator, 60);
    std::vector<Message> group;
    for (int r = 0; r < communicator->size(); ++r)
      for (const bool send : {true, false})
        if (r != rank) group.push_back({r, send, std::make_shared<Bytes>(8)});
    line.wait(line.start(std::move(group)));
  }

 private:
  Inputs inputs() const {
    Inputs in;
    in.q = q.tokens(), in.k = k.tokens(), in.v = v.tokens();
    return in;
  }

  void forward(Plan& with) {
    Outputs out;
    out.o = o.tokens(), out.lse = lse.numbers();
    with.forward(inputs(), out);
  }

  int rank;
  Pass pass;
  Problem problem;
  Sharing sharing;
  std::shared_ptr<Communicator> communicator;
  std::unique_ptr<Plan> plan;
  Numbers q, k, v, o, lse, d_o, dq, dk, dv;
  Log log;
};

// A machine on which this schedule's work alone takes `work` seconds and its messages alone `messages`.
Machine calibrated(const Schedule& s, double work, double messages, double latency) {
  const auto machine = [](double flops, double link, double latency) {
    return Machine{flops, flops, 0, link, link, latency};
  };
  Machine m = machine(1e9 * simulate(s, shape, machine(1e9, 1e30, 0)).seconds / work, 1, latency);
  Machine only_link = machine(1e30, 1e6, 0);
  const double bytes = simulate(s, shape, only_link).seconds * 1e6;
  only_link.link = 1e30, only_link.latency = latency;
  m.link = bytes / std::max(messages - simulate(s, shape, only_link).seconds, 1e-9);
  return m;
}

void measure(Scheme scheme, Pass of, Int64 tokens, int turns) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  Measured pass(scheme, of, tokens, rank, ranks);
  std::vector<double> work, messages, together, hidden, simulated, share, latency;
  pass.together(), pass.messages();  // connections
  for (int turn = 0; turn < turns; ++turn) {
    Plan alone = pass.alone();
    const double before = processor_seconds();
    work.push_back(timed([&] { pass.run(alone); }));
    double used = processor_seconds() - before, all = 0;
    MPI_Allreduce(&used, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    share.push_back(all / ranks / work.back());
    messages.push_back(timed([&] { pass.messages(); }));
    latency.push_back(timed([&] { pass.nothing(); }));
    together.push_back(timed([&] { pass.together(); }));
    hidden.push_back((work.back() + messages.back() - together.back()) / std::min(work.back(), messages.back()));
    const Machine machine = calibrated(pass.schedule(), work.back(), messages.back(), median(latency));
    simulated.push_back(simulate(pass.schedule(), shape, machine).seconds / together.back());
  }
  if (rank != 0) return;
  std::printf(
      "{\"ranks\": %d, \"tokens\": %lld, \"work\": %.4f, \"messages\": %.4f, \"together\": %.4f, "
      "\"latency\": %.6f, \"hidden\": %.3f, \"simulated_over_measured\": %.3f, \"processor_share\": %.3f}\n",
      ranks, static_cast<long long>(tokens), median(work), median(messages), median(together), median(latency),
      median(hidden), median(simulated), median(share));
}

}  // namespace
}  // namespace tessera::dist

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 5) return 2;
  using namespace tessera::dist;
  measure(std::string(argv[1]) == "ring" ? Scheme::ring : Scheme::gather,
          std::string(argv[2]) == "backward" ? Pass::backward : Pass::forward, std::atoll(argv[3]), std::atoi(argv[4]));
  MPI_Finalize();
  return 0;
}
