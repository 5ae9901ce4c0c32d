/* SPDX-License-Identifier: Apache-2.0 */
/* Messages over NCCL, for the plans of dist.h. libnccl.so.2 (2.14 or later) is opened at run time; NCCL's header is not
 * needed. C99 and C++. Messages of a plan are in the CPU's memory, and NCCL moves a GPU's: every message is copied to
 * the GPU, sent, and copied back. What it means: docs/scale_out.md. */
#ifndef TESSERA_NCCL_H
#define TESSERA_NCCL_H

#include "tessera/dist.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TESSERA_NCCL_ID_BYTES 128

/* With a unique id: a communicator of its own, made together with all ranks. Or with `comm`: over the caller's, best a
 * non-blocking one, of which rank, ranks and device are then taken. */
typedef struct tessera_nccl_args {
  size_t size;
  const void* unique_id; /* TESSERA_NCCL_ID_BYTES, the same on every rank; or NULL */
  void* comm;            /* ncclComm_t, or NULL. It stays the caller's, but a failure aborts it, which also frees it */
  int32_t rank;          /* 0 */
  int32_t ranks;         /* 1 */
  int32_t device;        /* 0; each rank has one of its own */
  int32_t reserved;      /* 0 */
  double timeout;        /* 300; seconds, for making the communicator */
} tessera_nccl_args;

/* Sets the size and the defaults. */
TESSERA_API void tessera_nccl_args_init(tessera_nccl_args* args);
/* By one rank, which gives it to the others. */
TESSERA_API tessera_status tessera_nccl_unique_id(void* id);
/* Each step of a plan is one group of sends and receives. Errors of NCCL are polled for; a plan's time-out aborts. A
 * rank that fails can tell the others nothing: they hear NCCL's error, or run into their time-out. */
TESSERA_API tessera_status tessera_nccl_communicator(const tessera_nccl_args* args,
                                                     tessera_communicator** communicator);

#ifdef __cplusplus
}
#endif
#endif
