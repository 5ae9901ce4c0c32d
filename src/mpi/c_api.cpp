// SPDX-License-Identifier: Apache-2.0
// The C ABI of libtessera_mpi. See tessera/mpi.h.
#include "tessera/mpi.h"

#include <exception>
#include <new>
#include <utility>

#include "mpi/transport.hpp"

tessera_status tessera_mpi_communicator(MPI_Comm comm, double timeout, tessera_communicator** communicator) {
  try {
    if (!communicator) return tessera_fail(TESSERA_INVALID_ARGUMENT, "communicator: is NULL; it is required");
    const tessera_transport t = tessera::detail::to_c(tessera::mpi::transport_over(comm, timeout));
    const tessera_status status = tessera_communicator_make(&t, communicator);
    if (status != TESSERA_OK) t.destroy(t.context);
    return status;
  } catch (const tessera::Error& error) {
    return tessera_fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return tessera_fail(TESSERA_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return tessera_fail(TESSERA_INTERNAL, error.what());
  }
}
