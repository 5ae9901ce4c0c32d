/* SPDX-License-Identifier: Apache-2.0 */
/* Messages over MPI, for the plans of dist.h. Needs libtessera_mpi, which is linked to the MPI that was there when it
 * was built: a program uses the same one. C99 and C++. What it means: docs/scale_out.md. */
#ifndef TESSERA_MPI_H
#define TESSERA_MPI_H

#include <mpi.h>

#include "tessera/dist.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Together with all ranks of `comm`, of which it uses two duplicates: one for rows, one for word of failures. Fails if
 * that takes longer than `timeout` seconds. MPI must be initialised, and all calls be made by one thread. If MPI was
 * asked for MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE, a thread of the communicator's own calls it while the caller
 * waits: if MPI never returns from a call, which it may do when a rank dies, the caller still gets its sentence.
 * Destroy the communicator before MPI_Finalize. After a failure MPI_Finalize may never return, since requests to a lost
 * rank stay open: say the sentence, and end by MPI_Abort or _exit. */
TESSERA_API tessera_status tessera_mpi_communicator(MPI_Comm comm, double timeout, tessera_communicator** communicator);

#ifdef __cplusplus
}
#endif
#endif
