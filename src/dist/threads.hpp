// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process, which hand messages to each other through memory: for tests, and for `tessera dist`
// on one machine. Included by them. Implements docs/scale_out.md, "Communicators".
#pragma once

#include <functional>

#include "dist/communicator.hpp"

namespace tessera::dist {

// One communicator for each of `size` ranks.
std::vector<std::shared_ptr<Communicator>> thread_communicators(int size);

// Runs a body on a thread for each rank, and returns when all have ended. The body must not throw.
// Throws std::bad_alloc if a thread cannot be had: the other ranks have heard of it then.
void run_ranks(int size, const std::function<void(int rank, std::shared_ptr<Communicator>)>& body);

}  // namespace tessera::dist
