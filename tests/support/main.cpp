// SPDX-License-Identifier: Apache-2.0
// The main of every GoogleTest program. Whoever runs no case has shown nothing, so that fails: a program or a shard
// without tests, and a test whose cases were all refused. A program whose tests are all skipped ends with a status that
// ctest shows as "Skipped". tests/tree/main_test.sh sees to it.
#include "tests/support/main.hpp"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdio>

namespace tessera::test {
namespace {

class NoCaseIsAFailure : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { case_count = {}; }
  void OnTestEnd(const testing::TestInfo&) override {
    if (case_count.refused == 0) return;
    EXPECT_GT(case_count.judged, 0U) << "no case ran: all " << case_count.refused << " were refused";
  }
};

// Tensors of a case are made and freed by the thousand. Fetching their pages from the system and giving them back each
// time took a seventh of the tests' processor time. Kept, they also hold old numbers instead of zeros, so that reading
// what nobody wrote shows.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

int run(testing::UnitTest& program) {
  const int status = RUN_ALL_TESTS();
  if (status != 0 || testing::GTEST_FLAG(list_tests)) return status;
  if (program.test_to_run_count() == 0) {
    std::puts("FAILED: this program or this shard of it has no test to run");
    return 1;
  }
  return program.skipped_test_count() == program.test_to_run_count() ? skipped_status : 0;
}

}  // namespace
}  // namespace tessera::test

int main(int argc, char** argv) {
  using namespace tessera::test;
  keep_freed_memory();
  testing::InitGoogleTest(&argc, argv);
  if (const std::string reason = reason_to_skip ? reason_to_skip() : ""; !reason.empty()) {
    std::printf("SKIPPED: %s\n", reason.c_str());
    return skipped_status;
  }
  testing::UnitTest& program = *testing::UnitTest::GetInstance();
  program.listeners().Append(new NoCaseIsAFailure);  // which GoogleTest deletes
  return run(program);
}
