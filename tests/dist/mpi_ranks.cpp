// SPDX-License-Identifier: Apache-2.0
// mpi_ranks single|serialized check|FAULT: one rank of a run under mpirun, for tests/dist/mpi_test.py, with this thread
// level of MPI. `check` runs every scheme over MPI and compares with ranks as threads, bit by bit; then it misuses MPI.
// A fault is something that happens to the last rank; every rank prints one line: what it said, after how many seconds,
// and whether its outputs are as they were. Then it waits to be ended.
#include <dlfcn.h>
#include <mpi.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <thread>

#include "dist/faulty.hpp"
#include "dist/transport.hpp"
#include "mpi/transport.hpp"
#include "tests/dist/world.hpp"

// MPI that never returns from a call, from some moment on: these stand before its own.
static std::atomic<bool> test_hangs{false}, testall_hangs{false};
// The process is stopped in the next MPI_Testall, for longer than a limit of 1 s.
static std::atomic<bool> testall_is_stopped{false};
static std::atomic<bool> no_threads{false};

static void hang_if(const std::atomic<bool>& hangs) {
  while (hangs) pause();
}

extern "C" int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
  hang_if(test_hangs);
  return PMPI_Test(request, done, status);
}

extern "C" int MPI_Testall(int count, MPI_Request* requests, int* done, MPI_Status* statuses) {
  hang_if(testall_hangs);
  if (testall_is_stopped.exchange(false)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1200));
    *done = 0;
    return MPI_SUCCESS;
  }
  return PMPI_Testall(count, requests, done, statuses);
}

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                              void* argument) noexcept {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return no_threads ? EAGAIN : create(thread, attributes, body, argument);
}

namespace tessera::dist {
namespace {

constexpr double timeout = 2;

std::shared_ptr<Communicator> mpi_communicator(double limit) {
  return communicator_over(detail::to_c(mpi::transport_over(MPI_COMM_WORLD, limit)));
}

// For how long the threads of this process could have run since then, while the machine ran others. A thread that has
// ended since does not count.
class Starved {
 public:
  double seconds() const {
    double all = 0;
    for (const auto& [task, waited] : waits())
      all += std::max(0.0, waited - (before.contains(task) ? before.at(task) : 0));
    return 1e-9 * all;
  }

 private:
  static std::map<std::string, double> waits() {
    std::map<std::string, double> out;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      double ran = 0, waited = 0;
      std::ifstream(task.path() / "schedstat") >> ran >> waited;
      out[task.path().filename()] = waited;
    }
    return out;
  }
  std::map<std::string, double> before = waits();
};

// A rank to which something happens while a group is under way.
class Struck : public Faulty {
 public:
  Struck(std::shared_ptr<Communicator> real, int group, std::function<void()> blow) :
      Faulty(std::move(real), {}), left(group), blow(std::move(blow)) {}
  void start(std::span<const Message> group) override {
    if (left-- == 0) {
      std::printf("struck: rank %d, starved %.2f s\n", rank(), starved.seconds());
      std::fflush(stdout);
      blow();
    }
    Faulty::start(group);
  }

 private:
  int left;
  std::function<void()> blow;
  Starved starved;
};

int check(int ranks) {
  struct Row {
    Problem problem;
    Features features;
  };
  const std::vector<Row> rows = {
      {{{260, 0, 75}, 4, 2, 32, 32, Type::bf16, {.causal = true}}, {.sinks = true}},
      {{{300}, 4, 2, 16, 32, Type::f32, {.window_left = 60, .window_right = 10, .dropout = 0.2}}, {}},
      {{{1200}, 2, 2, 64, 64, Type::f32, {.causal = true}}, {}},  // messages of several slices
  };
  int compared = 0, wrong = 0;
  for (const Row& row : rows) {
    const World world(row.problem, row.features, 21);
    const std::vector<Int64>& lengths = row.problem.lengths;
    std::vector<Sharing> ways = {
        {.partition = zigzag(lengths, ranks, 16), .scheme = Scheme::ring},
        {.partition = balanced(lengths, {.causal = row.problem.options.causal}, ranks, 16), .scheme = Scheme::gather},
        {.partition = zigzag(lengths, ranks, 32), .scheme = Scheme::gather, .segment = 32}};
    if (lengths[0] > 1000) ways.resize(2);
    if (ranks % 2 == 0)
      ways.push_back({.partition = two_level(zigzag(lengths, ranks / 2, 16), 2, 4), .scheme = Scheme::gather});
    for (Sharing& way : ways) {
      way.timeout = 60, way.threads = 1;
      const Answer threads = world.ranks(way);
      const auto communicator = mpi_communicator(std::numeric_limits<double>::infinity());
      Answer mine = world.empty();
      world.rank(communicator, way, mine);
      for (const auto& [name, numbers] : mine.of) {
        if (name == "dSinks" && communicator->rank() != 0) continue;
        const int different = world.differing(numbers, threads.of.at(name), way.partition, communicator->rank());
        compared += 1, wrong += different != 0;
      }
    }
  }
  std::printf("check: rank %s, %d outputs compared, %d wrong\n", getenv("OMPI_COMM_WORLD_RANK"), compared, wrong);
  return wrong;
}

// Whether a plan over this communicator is refused with these words.
bool refuses(const std::shared_ptr<Communicator>& communicator, const char* words) {
  const Problem problem{{96}, 2, 2, 16, 16, Type::f32, {}};
  try {
    Plan(communicator, problem, {.partition = zigzag(problem.lengths, communicator->size(), 8), .timeout = timeout});
  } catch (const Error& error) {
    return std::string(error.what()).find(words) != std::string::npos;
  }
  return false;
}

// What MPI takes badly, in several ranks: how much of it goes without its sentence. And a job that is suspended while
// communicators are made, and threads that cannot be had.
int misuse(int rank, const std::shared_ptr<Communicator>& communicator) {
  MPI_Comm half, between;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 1, &between);
  std::string said;
  try {
    mpi::transport_over(between, timeout);
  } catch (const Error& error) {
    said = error.what();
  }
  int wrong = said != "comm: is an intercommunicator; must be of one group (MPI_Intercomm_merge)";
  MPI_Comm_free(&between), MPI_Comm_free(&half);
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level == MPI_THREAD_SINGLE) {
    testall_is_stopped = true;
    mpi::transport_over(MPI_COMM_WORLD, 1);
  } else {
    no_threads = true;
    try {
      mpi::transport_over(MPI_COMM_WORLD, timeout);
      ++wrong;
    } catch (const std::bad_alloc&) {  // as every thread that cannot be had
    }
    no_threads = false;
  }
  const pid_t child = fork();
  if (child == 0) _exit(refuses(communicator, "communicator: was made before this process was forked, and ") ? 0 : 1);
  int status = 1;
  waitpid(child, &status, 0);
  return wrong + (status != 0);
}

// Happens to the last rank. Each changes what it asks for, or its communicator.
void misfortune(const std::string& fault, int rank, int ranks) {
  Problem problem{{192}, 4, 2, 16, 16, Type::f32, {.causal = true}};
  const bool victim = rank == ranks - 1;
  Sharing sharing{
      .partition = zigzag(problem.lengths, ranks, 4), .scheme = Scheme::ring, .timeout = timeout, .threads = 1};
  auto begin = Clock::now();
  Starved starved;
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  std::string said = "fine";
  std::printf("here: rank %d, process %d\n", rank, getpid());
  std::fflush(stdout);
  const World world(problem, {}, 3);
  Answer out = world.empty();
  for (auto& [name, numbers] : out.of)
    for (Int64 i = 0; i < numbers.count(); ++i) numbers.set(i, -77);
  if (victim && fault == "hang_connecting") testall_hangs = true;
  try {
    std::shared_ptr<Communicator> communicator = mpi_communicator(timeout);
    begin = Clock::now(), starved = {};  // all are there
    const std::map<std::string, Fault> faults = {
        {"corrupt", {Fault::corrupt, 2}}, {"wrong_size", {Fault::wrong_size, 2}}, {"link", {Fault::drop, 2}},
        {"throw", {Fault::fail, 2}},      {"hang_telling", {Fault::fail, 2}},     {"late", {Fault::delay, 2, 0.7}}};
    if (victim && faults.contains(fault)) communicator = std::make_shared<Faulty>(communicator, faults.at(fault));
    const std::map<std::string, std::function<void()>> blows = {{"kill", [] { raise(SIGKILL); }},
                                                                {"stop", [] { raise(SIGSTOP); }},
                                                                {"hang", [] { test_hangs = true; }},
                                                                {"hang_telling", [] { testall_hangs = true; }}};
    if (victim && blows.contains(fault)) communicator = std::make_shared<Struck>(communicator, 2, blows.at(fault));
    if (victim && fault == "differ") problem.D = 8;
    if (victim && fault == "absent") std::this_thread::sleep_for(std::chrono::duration<double>(timeout + 1));
    World mine(problem, {}, 3);
    if (!(victim && fault == "absent")) mine.rank(communicator, sharing, out);
  } catch (const Error& error) {
    said = error.what();
  }
  bool untouched = true;
  for (const auto& [name, numbers] : out.of)
    for (Int64 i = 0; i < numbers.count(); ++i) untouched &= numbers.get(i) == -77;
  std::printf("fault %s: rank %d, %.2f s, starved %.2f s, outputs %s: %s\n", fault.c_str(), rank, seconds(),
              starved.seconds(), untouched ? "untouched" : "written", said.c_str());
  std::fflush(stdout);
  std::this_thread::sleep_for(std::chrono::seconds(60));  // mpi_test.py ends it when all have spoken
  _exit(0);
}

}  // namespace
}  // namespace tessera::dist

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int level = std::string(argv[1]) == "single" ? MPI_THREAD_SINGLE : MPI_THREAD_SERIALIZED;
  int provided = 0, rank = 0, ranks = 1;
  MPI_Init_thread(&argc, &argv, level, &provided);
  if (provided < level) return 3;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (std::string(argv[2]) != "check") tessera::dist::misfortune(argv[2], rank, ranks);
  int wrong = tessera::dist::check(ranks);
  if (ranks > 1) {
    const auto communicator = tessera::dist::mpi_communicator(60);
    wrong += tessera::dist::misuse(rank, communicator);
    MPI_Finalize();
    wrong += !tessera::dist::refuses(communicator, "communicator: MPI has been finalised since it was made");
  } else {
    MPI_Finalize();
  }
  return wrong != 0;
}
