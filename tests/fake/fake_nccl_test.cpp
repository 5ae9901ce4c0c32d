// SPDX-License-Identifier: Apache-2.0
// Messages over a NCCL that is not there: what is called in which order, results beside ranks as threads, failures,
// time-outs, aborts, refusals.
// Links the fake libcuda and libnccl. Implements docs/scale_out.md, "Communicators".
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tessera/dist.hpp"
#include "tessera/nccl.h"
#include "tests/fake/environment.hpp"
#include "tests/fake/machine.hpp"
#include "tests/fake/nccl.hpp"

namespace tessera::test {
namespace {

using fake::machine;
using fake::nccl_state;

constexpr std::int64_t tokens = 96, heads = 2, dim = 16;

std::string said(tessera_status status) { return status == TESSERA_OK ? "" : tessera_last_error(); }

struct Id {
  char bytes[TESSERA_NCCL_ID_BYTES];
};

Id new_id() {
  Id id{};
  EXPECT_EQ(said(tessera_nccl_unique_id(&id)), "");
  return id;
}

// Rank r is on GPU r.
Communicator communicator(const Id& id, int rank, int ranks, double timeout = 20) {
  tessera_nccl_args args;
  tessera_nccl_args_init(&args);
  args.unique_id = &id, args.rank = rank, args.ranks = ranks, args.device = rank, args.timeout = timeout;
  tessera_communicator* made = nullptr;
  if (const tessera_status status = tessera_nccl_communicator(&args, &made); status != TESSERA_OK)
    throw Error(status, tessera_last_error());
  return Communicator(made);
}

struct Answer {
  std::vector<std::vector<float>> o;  // by rank
  std::vector<std::string> said;
  double seconds = 0;
};

// A forward pass of every rank, on a thread of its own, over what `make` gives it.
template <class Make>
Answer run(int ranks, double timeout, Make make) {
  Answer answer;
  answer.o.resize(std::size_t(ranks)), answer.said.resize(std::size_t(ranks));
  const Partition partition({.lengths = {tokens}, .ranks = ranks, .align = 8});
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        const Communicator messages = make(r);
        DistPlan plan(messages, partition,
                      {.query_heads = heads, .key_heads = heads, .head_dim = dim, .value_dim = dim, .timeout = timeout},
                      {.causal = true}, {.threads = 1});
        const std::int64_t n = partition.rows(r);
        std::vector<float> x, o(std::size_t(n * heads * dim), -77.f);
        for (const tessera_span& s : partition.spans(r))
          for (std::int64_t i = s.begin * heads * dim; i < s.end * heads * dim; ++i) x.push_back(float(i % 97) / 97);
        const auto view = [&](std::vector<float>& of) { return Tensor(of.data(), Type::f32, {n, heads, dim}); };
        Inputs in;
        in.q = in.k = in.v = view(x);
        answer.o[std::size_t(r)] = o;
        Outputs out;
        out.o = view(answer.o[std::size_t(r)]);
        plan.forward(in, out);
      } catch (const Error& error) {
        answer.said[std::size_t(r)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  answer.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return answer;
}

class Nccl : public testing::Test {
 protected:
  void SetUp() override { nccl_state() = {}, machine().forget(); }
  void TearDown() override {
    EXPECT_EQ(nccl_state().complaints, std::vector<std::string>());
    EXPECT_EQ(machine().complaints, std::vector<std::string>());
    EXPECT_TRUE(machine().allocations.empty()) << "device memory is left";
    EXPECT_TRUE(machine().streams.empty()) << "a stream is left";
    nccl_state() = {};
  }
};

TEST_F(Nccl, HasTheBitsOfRanksAsThreads) {
  std::vector<Communicator> threads = Communicator::threads(4);
  const Answer expected = run(4, 20, [&](int r) { return std::move(threads[std::size_t(r)]); });
  const Id id = new_id();
  const Answer answer = run(4, 20, [&](int r) { return communicator(id, r, 4); });
  EXPECT_EQ(answer.said, std::vector<std::string>(4));
  EXPECT_EQ(answer.o, expected.o);
  EXPECT_EQ(nccl_state().made, 4);
  EXPECT_EQ(nccl_state().destroyed, 4);
  EXPECT_EQ(nccl_state().aborted, 0);
  const auto count = [](const char* name) { return std::ranges::count(nccl_state().calls, name); };
  EXPECT_EQ(count("ncclGroupStart"), count("ncclGroupEnd"));
  EXPECT_EQ(count("ncclSend"), count("ncclRecv"));
  EXPECT_GE(count("ncclSend"), 4 * 3 + 4);  // the agreement alone is one with each other rank
  EXPECT_GT(count("ncclCommGetAsyncError"), count("ncclGroupEnd"));
}

TEST_F(Nccl, WorksOverTheCallersCommunicator) {
  const Id id = new_id();
  const Answer answer = run(2, 20, [&](int r) {
    // Somebody else's: made by the test's own calls, as a framework would.
    tessera_nccl_args args;
    tessera_nccl_args_init(&args);
    args.comm = fake::make_comm(id.bytes, r, 2, r);
    tessera_communicator* made = nullptr;
    EXPECT_EQ(said(tessera_nccl_communicator(&args, &made)), "");
    EXPECT_EQ(tessera_communicator_rank(made), r);
    EXPECT_EQ(tessera_communicator_size(made), 2);
    return Communicator(made);
  });
  EXPECT_EQ(answer.said, std::vector<std::string>(2));
  EXPECT_EQ(nccl_state().destroyed, 0) << "it is the caller's";
}

TEST_F(Nccl, MessagesThatNeverComeEndAtTheLimitInAnAbort) {
  const Id id = new_id();
  nccl_state().stuck = true;
  const Answer answer = run(2, 0.3, [&](int r) { return communicator(id, r, 2); });
  EXPECT_EQ(answer.said[0], "no answer within 0.3 s from rank 1");
  EXPECT_EQ(answer.said[1], "no answer within 0.3 s from rank 0");
  EXPECT_LT(answer.seconds, 1.3);
  EXPECT_EQ(nccl_state().aborted, 2);
  EXPECT_EQ(nccl_state().destroyed, 0);
}

TEST_F(Nccl, ARankThatDoesNotComeIsNotWaitedForForEver) {
  const Id id = new_id();
  try {
    communicator(id, 0, 2, 0.2);
    ADD_FAILURE() << "a communicator without its other rank";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "no answer within 0.2 s from all ranks of the NCCL communicator");
    EXPECT_EQ(error.status(), TESSERA_COMMUNICATION_ERROR);
  }
  EXPECT_EQ(nccl_state().aborted, 1);
}

TEST_F(Nccl, TwoRanksOnOneGpuAreToldSo) {
  const Id id = new_id();
  tessera_nccl_args args;
  tessera_nccl_args_init(&args);
  args.unique_id = &id, args.ranks = 2, args.timeout = 0.2;
  tessera_communicator* made = nullptr;
  EXPECT_NE(said(tessera_nccl_communicator(&args, &made)), "");  // alone: nobody comes
  args.rank = 1;
  EXPECT_EQ(
      said(tessera_nccl_communicator(&args, &made)),
      "ncclCommInitRankConfig failed: invalid usage; NCCL cannot share a device between ranks: give each its own, or "
      "use MPI");
  EXPECT_EQ(made, nullptr);
}

TEST_F(Nccl, AnErrorThatNcclReportsLaterIsTheRanksSentence) {
  const Id id = new_id();
  const Answer answer = run(2, 0.4, [&](int r) {
    Communicator made = communicator(id, r, 2);
    if (r == 1) nccl_state().async_error = 6;
    return made;
  });
  EXPECT_EQ(answer.said[1], "a message over NCCL failed: remote process exited");
  EXPECT_EQ(answer.said[0], "no answer within 0.4 s from rank 1");
  EXPECT_EQ(nccl_state().aborted, 2);
}

TEST_F(Nccl, EveryCallThatFailsIsNamed) {
  for (const char* call : {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"}) {
    nccl_state() = {};
    const Id id = new_id();
    const Answer answer = run(2, 0.4, [&](int r) {
      Communicator made = communicator(id, r, 2);
      nccl_state().failing = call;
      return made;
    });
    EXPECT_EQ(answer.said[1], std::string(call) + " failed: unhandled system error");
    EXPECT_NE(answer.said[0], "");
    EXPECT_LT(answer.seconds, 1.4);
    for (const std::vector<float>& o : answer.o)
      EXPECT_TRUE(std::ranges::all_of(o, [](float x) { return x == -77; })) << call;
    EXPECT_EQ(nccl_state().aborted, 2) << call;
  }
  nccl_state() = {};
  nccl_state().failing = "ncclGetUniqueId";
  Id id{};
  EXPECT_EQ(said(tessera_nccl_unique_id(&id)), "ncclGetUniqueId failed: unhandled system error");
}

TEST_F(Nccl, Refusals) {
  tessera_nccl_args args;
  tessera_nccl_args_init(&args);
  tessera_communicator* made = nullptr;
  const auto make = [&] { return said(tessera_nccl_communicator(&args, &made)); };
  EXPECT_EQ(said(tessera_nccl_unique_id(nullptr)), "id: is NULL; it is required");
  EXPECT_EQ(said(tessera_nccl_communicator(&args, nullptr)), "communicator: is NULL; it is required");
  EXPECT_EQ(said(tessera_nccl_communicator(nullptr, &made)), "nccl_args: is NULL; it is required");
  EXPECT_EQ(make(), "unique_id and comm: exactly one of them must be given");
  const Id id{};
  args.unique_id = &id, args.ranks = 0;
  EXPECT_EQ(make(), "ranks: is 0; must be positive");
  args.ranks = 2, args.rank = 2;
  EXPECT_EQ(make(), "rank: is 2; must be from 0 to 1");
  args.rank = 0, args.timeout = -1;
  EXPECT_EQ(make(), "timeout: is -1; must be a positive number of seconds");
  EXPECT_EQ(made, nullptr);
}

}  // namespace
}  // namespace tessera::test
