// SPDX-License-Identifier: Apache-2.0
// Messages over a real NCCL, as far as one GPU can show: it loads, a rank's messages to itself arrive, a caller's
// communicator stays the caller's, and what cannot end is aborted in time. Links tessera_cases. Implements
// docs/scale_out.md, "Communicators". tests/fake/fake_nccl_test.cpp has several ranks, on a NCCL that is not there.
#include "tessera/nccl.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "nccl/transport.hpp"
#include "tests/gpu/support.hpp"

namespace tessera::test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

std::string why_no_nccl() {
  try {
    nccl::library();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

class GpuNccl : public Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (IsSkipped()) return;
    if (const std::string reason = why_no_nccl(); !reason.empty()) GTEST_SKIP() << reason;
    int version = 0;
    nccl::library().get_version(&version);
    RecordProperty("nccl", version);
  }
};

nccl::UniqueId new_id() {
  nccl::UniqueId id{};
  EXPECT_EQ(tessera_nccl_unique_id(&id), TESSERA_OK) << tessera_last_error();
  return id;
}

std::unique_ptr<Transport> alone() { return nccl::transport_of(new_id(), 0, 1, gpu.id, 30); }

// Whether a group has come within these seconds.
bool arrives(Transport& transport, std::size_t messages, double seconds) {
  std::vector<std::uint8_t> done(messages);
  const auto begin = Clock::now();
  while (seconds_since(begin) < seconds) {
    transport.test(done);
    if (std::ranges::all_of(done, [](std::uint8_t one) { return one == 1; })) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return false;
}

// A message of so many bytes from a rank to itself.
class ToItself {
 public:
  explicit ToItself(std::size_t bytes) : from(bytes), to(bytes, 0xFF) {
    for (std::size_t i = 0; i < bytes; ++i) from[i] = static_cast<unsigned char>(i * 7 + i / 251);
  }
  std::vector<tessera_message> group() { return {{from.data(), from.size(), 0, 1}, {to.data(), to.size(), 0, 0}}; }
  bool arrived() const { return from == to; }

 private:
  std::vector<unsigned char> from, to;
};

void expect_exchange(Transport& transport, std::size_t bytes) {
  ToItself message(bytes);
  const std::vector<tessera_message> group = message.group();
  transport.start(group);
  ASSERT_TRUE(arrives(transport, group.size(), 20)) << bytes << " bytes did not come";
  EXPECT_TRUE(message.arrived()) << bytes << " bytes";
}

TEST_F(GpuNccl, ARanksMessagesToItselfArrive) {
  const std::unique_ptr<Transport> transport = alone();
  EXPECT_EQ(transport->rank(), 0);
  EXPECT_EQ(transport->ranks(), 1);
  for (const std::size_t bytes : {1, 4099, 61440, 16 << 20, (64 << 20) + 3, 17}) {
    expect_exchange(*transport, bytes);
    ++case_count.judged;
  }
}

TEST_F(GpuNccl, ACallersCommunicatorStaysTheCallers) {
  const nccl::Library& library = nccl::library();
  nccl::Config config;
  nccl::Comm comm = nullptr;
  nccl::check(library.comm_init(&comm, 1, new_id(), 0, &config), "ncclCommInitRankConfig");
  for (nccl::Result state = nccl::in_progress; state == nccl::in_progress;)
    nccl::check(library.comm_get_async_error(comm, &state), "ncclCommGetAsyncError", comm);
  for (int user = 0; user < 2; ++user) {
    const std::unique_ptr<Transport> transport = nccl::transport_over(comm);
    expect_exchange(*transport, 100'000);
  }
  nccl::check(library.comm_destroy(comm), "ncclCommDestroy");
}

TEST_F(GpuNccl, AnAbortEndsWhatIsUnderWayAndAFreshCommunicatorWorks) {
  for (int turn = 0; turn < 3; ++turn) {
    std::unique_ptr<Transport> transport = alone();
    ToItself message(std::size_t{64} << 20);
    const std::vector<tessera_message> group = message.group();
    transport->start(group);
    const auto begin = Clock::now();
    transport->fail("the rank has failed");
    transport.reset();
    EXPECT_LT(seconds_since(begin), 10);
  }
  expect_exchange(*alone(), 100'000);
}

// Whether NCCL says so or waits for ever: it never looks as if it had come, and the rank gets away.
TEST_F(GpuNccl, AReceiveThatNobodySendsToEndsInAnAbort) {
  std::unique_ptr<Transport> transport = alone();
  std::vector<unsigned char> room(1000, 0xFF);
  const std::vector<tessera_message> group{{room.data(), room.size(), 0, 0}};
  std::string said;
  try {
    transport->start(group);
    EXPECT_FALSE(arrives(*transport, 1, 2));
  } catch (const std::exception& error) {
    said = error.what();
  }
  RecordProperty("said", said);
  const auto begin = Clock::now();
  transport->fail(said.c_str());
  transport.reset();
  EXPECT_LT(seconds_since(begin), 10);
  EXPECT_TRUE(std::ranges::all_of(room, [](unsigned char x) { return x == 0xFF; }));
  expect_exchange(*alone(), 100'000);
}

// What the C ABI says to one of two ranks.
std::string refusal(const nccl::UniqueId& id, int rank, double timeout) {
  tessera_nccl_args args;
  tessera_nccl_args_init(&args);
  args.unique_id = &id, args.rank = rank, args.ranks = 2, args.device = gpu.id, args.timeout = timeout;
  tessera_communicator* made = nullptr;
  const tessera_status status = tessera_nccl_communicator(&args, &made);
  tessera_communicator_destroy(made);
  return status == TESSERA_OK ? "" : tessera_last_error();
}

TEST_F(GpuNccl, ARankThatDoesNotComeIsNotWaitedForForEver) {
  const auto begin = Clock::now();
  EXPECT_EQ(refusal(new_id(), 0, 2), "no answer within 2 s from all ranks of the NCCL communicator");
  EXPECT_LT(seconds_since(begin), 2 + 5);
  expect_exchange(*alone(), 100'000);
}

TEST_F(GpuNccl, TwoRanksOnOneGpuAreToldSo) {
  const nccl::UniqueId id = new_id();
  const auto begin = Clock::now();
  std::string said[2];
  std::thread other([&] { said[1] = refusal(id, 1, 20); });
  said[0] = refusal(id, 0, 20);
  other.join();
  for (const std::string& sentence : said)
    EXPECT_NE(sentence.find("NCCL cannot share a device between ranks: give each its own, or use MPI"),
              std::string::npos)
        << sentence;
  EXPECT_LT(seconds_since(begin), 15);
}

}  // namespace
}  // namespace tessera::test
