// SPDX-License-Identifier: Apache-2.0
// Messages over MPI, whichever one is there: a small library of its own over the public interface, so that the core
// never sees it. Included by src/mpi and by the tests of ranks as processes. Implements docs/scale_out.md,
// "Communicators".
#pragma once

#include <mpi.h>

#include <memory>

#include "tessera/dist.hpp"

namespace tessera::mpi {

// Together with all ranks of `comm`; see tessera/mpi.h. Throws Error.
std::unique_ptr<Transport> transport_over(MPI_Comm comm, double timeout);

}  // namespace tessera::mpi
