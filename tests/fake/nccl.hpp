// SPDX-License-Identifier: Apache-2.0
// The state behind the fake libnccl (tests/fake/nccl.cpp), which tests read and steer. Ranks are threads of the test; a
// message is copied between the contents of the fake driver's allocations.
// Included by tests/fake. Implements docs/testing.md, "GPUs that are not there".
#pragma once

#include <string>
#include <vector>

namespace tessera::fake {

struct NcclState {
  std::vector<std::string> calls;
  std::vector<std::string> complaints;  // what NCCL's documentation forbids
  const char* failing = nullptr;        // the function that fails, on rank 1
  int async_error = 0;                  // what rank 1's communicator reports
  bool stuck = false;                   // messages never arrive
  int made = 0, destroyed = 0, aborted = 0;
};

NcclState& nccl_state();

// A communicator that is not the library's, of a rank on this device.
void* make_comm(const char* id, int rank, int ranks, int device);

}  // namespace tessera::fake
