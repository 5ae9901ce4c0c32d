// SPDX-License-Identifier: Apache-2.0
// Messages over NCCL, staged through a GPU's memory. Included by the C ABI. Implements docs/scale_out.md,
// "Communicators".
#pragma once

#include <memory>

#include "nccl/library.hpp"
#include "tessera/dist.hpp"

namespace tessera::nccl {

// Together with all ranks that have the same id. Throws Failure.
std::unique_ptr<Transport> transport_of(const UniqueId& id, int rank, int ranks, int device, double timeout);
// Over the caller's communicator, which is aborted after a failure, and not destroyed otherwise.
std::unique_ptr<Transport> transport_over(Comm comm);

}  // namespace tessera::nccl
