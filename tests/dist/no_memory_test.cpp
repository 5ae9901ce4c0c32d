// SPDX-License-Identifier: Apache-2.0
// One of two ranks runs out of memory, at each of its allocations in turn: it says so, and the other one hears of it
// instead of waiting for its time-out. This program's operator new fails on demand, thread by thread.
// Implements docs/scale_out.md, "Failure".
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "dist/communicator.hpp"
#include "dist/threads.hpp"
#include "tests/dist/api_data.hpp"

static thread_local long allocations_left = -1;  // of this thread, until one fails; below 0: none does
static thread_local bool all_fail_then = false;

static void* allocated(std::size_t bytes) noexcept {
  if (allocations_left > 0) --allocations_left;
  if (allocations_left == 0) {
    if (!all_fail_then) allocations_left = -1;
    return nullptr;
  }
  return std::malloc(bytes ? bytes : 1);
}

// All forms, or a sanitizer's own would meet these.
void* operator new(std::size_t bytes) {
  if (void* const at = allocated(bytes)) return at;
  throw std::bad_alloc();
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocated(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocated(bytes); }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // g++ 12 does not see that all are replaced
void operator delete(void* at) noexcept { std::free(at); }
void operator delete[](void* at) noexcept { std::free(at); }
void operator delete(void* at, std::size_t) noexcept { std::free(at); }
void operator delete[](void* at, std::size_t) noexcept { std::free(at); }
void operator delete(void* at, const std::nothrow_t&) noexcept { std::free(at); }
void operator delete[](void* at, const std::nothrow_t&) noexcept { std::free(at); }
#pragma GCC diagnostic pop

namespace tessera {
namespace {

constexpr std::int64_t rows = 8;  // of each rank
constexpr double timeout = 5;

// Both ranks make the same calls until one fails. Rank 1's n-th allocation fails, and if `lasting` all that follow.
// Returns whether it came to that.
bool with_failure(long n, bool lasting, const std::function<tessera_status(int rank, Communicator&)>& calls) {
  std::vector<Communicator> all = Communicator::threads(2);
  std::string said[2];
  bool failed = false;
  std::thread other([&] {
    tessera_status status = TESSERA_OK;
    all_fail_then = lasting, allocations_left = n;
    status = calls(1, all[1]);
    failed = allocations_left <= 0, allocations_left = -1;
    if (status == TESSERA_OK) return;
    said[1] = tessera_last_error();
    EXPECT_EQ(status, TESSERA_OUT_OF_MEMORY) << n << ": " << said[1];
  });
  if (calls(0, all[0]) != TESSERA_OK) {
    said[0] = tessera_last_error();
    EXPECT_NE(said[0], "") << n;
  }
  other.join();
  EXPECT_TRUE(said[0].empty() || said[0] == "rank 1: " + said[1] ||
              said[0] == "another rank has failed, and did not say why")
      << n << ": " << said[0] << "; rank 1: " << said[1];
  return failed;
}

void expect_told(long least, const std::function<tessera_status(int rank, Communicator&)>& calls) {
  for (const bool lasting : {false, true}) {
    long n = 1;
    while (with_failure(n, lasting, calls) && !testing::Test::HasFailure()) ++n;
    EXPECT_GT(n, least);
  }
}

TEST(NoMemory, OfPlansTheOthersHear) {
  const Partition partition({.lengths = {2 * rows}, .ranks = 2, .align = 4});
  Data data[2] = {Data(rows), Data(rows)};
  expect_told(200, [&](int rank, Communicator& communicator) {
    tessera_dist_args c;
    tessera_dist_args_init(&c);
    c.communicator = communicator.c(), c.partition = partition.c(), c.timeout = timeout;
    c.query_heads = heads, c.key_heads = kv_heads, c.head_dim = c.value_dim = dim;
    tessera_execution execution;
    tessera_execution_init(&execution);
    execution.threads = 1;
    tessera_dist_plan* plan = nullptr;
    tessera_status status = tessera_dist_plan_make(&c, nullptr, &execution, &plan);
    const detail::CInputs in(data[rank].inputs());
    const detail::COutputs out(data[rank].outputs());
    if (status == TESSERA_OK) status = tessera_dist_forward(plan, &in.view, &out.view, nullptr);
    tessera_dist_plan_destroy(plan);
    return status;
  });
}

TEST(NoMemory, OfDecodersTheOthersHear) {
  Data data[2] = {Data(rows), Data(rows)};
  const std::int64_t length = 2 * rows;
  expect_told(50, [&](int rank, Communicator& communicator) {
    tessera_decoder_args c;
    tessera_decoder_args_init(&c);
    c.communicator = communicator.c(), c.timeout = timeout, c.groups = 2, c.block = rows;
    c.query_heads = heads, c.key_heads = kv_heads, c.head_dim = c.value_dim = dim;
    tessera_execution execution;
    tessera_execution_init(&execution);
    execution.threads = 1;
    tessera_decoder* decoder = nullptr;
    tessera_status status = tessera_decoder_make(&c, nullptr, &execution, &decoder);
    Inputs inputs;
    inputs.q = Tensor(data[rank].q.data(), Type::f32, {1, 1, heads, dim});
    inputs.k = Tensor(data[rank].k.data(), Type::f32, {1, rows, kv_heads, dim});
    inputs.v = Tensor(data[rank].v.data(), Type::f32, {1, rows, kv_heads, dim});
    Outputs outputs;
    outputs.o = Tensor(data[rank].o.data(), Type::f32, {1, 1, heads, dim});
    const detail::CInputs in(inputs);
    const detail::COutputs out(outputs);
    if (status == TESSERA_OK) status = tessera_decoder_forward(decoder, &in.view, &length, 1, &out.view);
    tessera_decoder_destroy(decoder);
    return status;
  });
}

// Of the threads of ranks one cannot be had: the others end, and the caller's process does not.
TEST(NoMemory, ForAThreadTheOthersHear) {
  bool failed = true;
  int n = 0;
  for (; failed && !HasFailure(); n += failed) {
    failed = false;
    all_fail_then = false, allocations_left = n + 1;
    try {
      dist::run_ranks(3, [&](int, const std::shared_ptr<dist::Communicator>& communicator) {
        try {
          dist::Line line(communicator, timeout);
          line.together([&] { line.gather(dist::Bytes(8)); });
        } catch (const Error& error) {
          EXPECT_STREQ(error.what(), "out of memory");
        }
      });
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
  }
  EXPECT_GT(n, 10);
}

}  // namespace
}  // namespace tessera
