// SPDX-License-Identifier: Apache-2.0
// One of several processes under mpirun that share one Hopper GPU, with their rows in its memory: messages travel
// through the host. Each compares its rows with those of ranks as threads, bit by bit, and O and LSE with one call.
// Started by tests/dist/mpi_test.py; links tessera_cases and libtessera_mpi's objects. Implements docs/scale_out.md,
// "Rows on a GPU" and "Communicators".
#include "tessera/mpi.h"

#include "tests/gpu/ranks.hpp"

namespace tessera::test {
namespace {

class GpuMpi : public Hopper {
 protected:
  void SetUp() override {
    Hopper::SetUp();
    if (IsSkipped()) return;
    int level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    ASSERT_GE(level, MPI_THREAD_SERIALIZED);
  }
  void TearDown() override {
    if (ranks == 0) return;
    // A rank that waits for another which has failed in between would wait for ever.
    if (HasFailure()) MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Finalize();
  }

  Communicator communicator() const {
    tessera_communicator* made = nullptr;
    if (const tessera_status status = tessera_mpi_communicator(MPI_COMM_WORLD, 60, &made); status != TESSERA_OK)
      throw Error(status, tessera_last_error());
    return Communicator(made);
  }

  int rank = 0, ranks = 0;
};

// The elements of a rank's rows of [1,N,H,D], or [1,H,N].
std::vector<std::uint64_t> bits_of_rows(const Buffer& buffer, tessera_span span) {
  const std::vector<std::uint64_t> all = buffer.bits();
  const bool numbers = buffer.tensor().ndim == 3;
  const std::int64_t rows = buffer.size(numbers ? 2 : 1), outer = numbers ? buffer.size(1) : 1;
  const std::int64_t row = buffer.elements() / (rows * outer);
  std::vector<std::uint64_t> mine;
  for (std::int64_t x = 0; x < outer; ++x)
    mine.insert(mine.end(), all.begin() + (x * rows + span.begin) * row, all.begin() + (x * rows + span.end) * row);
  return mine;
}

TEST_F(GpuMpi, ProcessesHaveTheBitsOfThreads) {
  const Communicator messages = communicator();
  for (const bool causal : {true, false})
    for (const Scheme scheme : {Scheme::gather, Scheme::ring}) {
      const Sharing sharing{.ranks = ranks, .scheme = scheme, .segment = scheme == Scheme::gather ? 384 : 0};
      const Case spec = case_of_ranks(causal);
      CaseData mine = build(spec), threads = build(spec), one = build(spec);
      {
        Placed placed(mine, gpu);
        placed.upload();
        run_rank(mine, placed, messages, sharing);
        placed.download();
      }
      run_ranks(threads, sharing);
      const Partition partition = partition_of(spec, sharing);
      const tessera_span span = span_of(partition, rank);
      ASSERT_LT(span.begin, span.end);
      const auto expect_rows = [&](const Buffer& a, const Buffer& b, const char* what) {
        EXPECT_TRUE(bits_of_rows(a, span) == bits_of_rows(b, span)) << what << " of rank " << rank;
      };
      expect_rows(mine.o, threads.o, "o"), expect_rows(mine.lse, threads.lse, "lse");
      expect_rows(mine.dq, threads.dq, "dq"), expect_rows(mine.dk, threads.dk, "dk");
      expect_rows(mine.dv, threads.dv, "dv");
      if (scheme == Scheme::gather) {
        run_one_call(one);
        expect_rows(mine.o, one.o, "o of one call"), expect_rows(mine.lse, one.lse, "lse of one call");
      }
      ++case_count.judged;
    }
}

}  // namespace
}  // namespace tessera::test
