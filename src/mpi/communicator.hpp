// SPDX-License-Identifier: Apache-2.0
// Messages over MPI, whichever one is there: a small library of its own, so that the core never sees it. Included by
// programs that have MPI. Implements docs/scale_out.md, "Communicators".
#pragma once

#include <mpi.h>

#include <memory>

#include "dist/communicator.hpp"

namespace tessera::dist {

// Together with all ranks of `comm`, of which it uses two duplicates: one for rows, one for word of failures. Throws
// Error if that takes longer than `timeout` seconds. MPI must be initialised, and all calls be made by one thread.
// After a failure the communicator must not be expected to survive MPI_Finalize: requests may be open for ever.
std::shared_ptr<Communicator> mpi_communicator(MPI_Comm comm, double timeout);

}  // namespace tessera::dist
