/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over several ranks, processes or devices, each of which holds some rows of every tensor (context
 * parallelism). C99; the rules of the ABI are those of tessera.h. What it means: docs/scale_out.md.
 *
 * - A communicator moves messages between ranks; a partition says which rows each rank holds; a plan is made by all
 *   ranks together, from both; its passes take local rows and give local rows, in the CPU's memory or a GPU's.
 * - Every call on a plan is made by all ranks, in the same order. When something goes wrong on one of them, each gets
 *   a sentence within the plan's time-out and a second, and has written nothing.
 * - A plan keeps what it needs of its partition and communicator: both may be destroyed before it.
 * - A communicator and its plans are used by one thread at a time: a second one's call is refused. */
#ifndef TESSERA_DIST_H
#define TESSERA_DIST_H

#include "tessera/tessera.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- partitions */

/* Rows begin to end of a sequence. Three numbers for good, so that it needs no size. */
typedef struct tessera_span {
  int64_t sequence, begin, end;
} tessera_span;

/* Which rows go to which rank. */
typedef enum tessera_partition_kind {
  TESSERA_ZIGZAG = 0,     /* of every sequence the r-th of 2P chunks from either end: even under a causal mask */
  TESSERA_CONTIGUOUS = 1, /* all rows in order, in equal parts */
  TESSERA_BALANCED = 2    /* equal work under the mask, documents whole where they fit */
} tessera_partition_kind;

/* What a partition is made of. The same on every rank: it is a pure function of these. */
typedef struct tessera_partition_args {
  size_t size;
  const int64_t* lengths;         /* of the sequences, each with as many queries as keys; 0 is legal */
  int64_t sequences;              /* how many */
  int32_t kind;                   /* TESSERA_ZIGZAG */
  int32_t ranks;                  /* 1 */
  int32_t slices;                 /* 1; ranks of a node, which share its heads out. Must divide ranks */
  int32_t reserved;               /* 0 */
  int64_t align;                  /* 128; cuts lie on its multiples, or at the end of a sequence */
  const tessera_options* options; /* NULL; with TESSERA_BALANCED: causal, window and diagonal count as work */
} tessera_partition_args;

/* Which rows each rank holds. */
typedef struct tessera_partition tessera_partition;

/* Sets the size and the defaults. */
TESSERA_API void tessera_partition_args_init(tessera_partition_args* args);
/* A partition of one of the kinds. It is the caller's, to be destroyed. */
TESSERA_API tessera_status tessera_partition_make(const tessera_partition_args* args, tessera_partition** partition);
/* A partition of one's own: counts[r] spans for each rank, one rank after another. Together they hold every row of
 * every sequence once; a span may also be without rows (begin = end, from 0 to the length). Of the args, kind, align
 * and options are not read. */
TESSERA_API tessera_status tessera_partition_from_spans(const tessera_partition_args* args, const tessera_span* spans,
                                                        const int64_t* counts, tessera_partition** partition);
/* NULL is allowed. */
TESSERA_API void tessera_partition_destroy(tessera_partition* partition);
/* How many ranks it is for. */
TESSERA_API int32_t tessera_partition_ranks(const tessera_partition* partition);
/* How many rows a rank holds; 0 where there is no such rank. */
TESSERA_API int64_t tessera_partition_rows(const tessera_partition* partition, int32_t rank);
/* A rank's spans, in the order in which its tensors hold them. They live as long as the partition. */
TESSERA_API const tessera_span* tessera_partition_spans(const tessera_partition* partition, int32_t rank,
                                                        int64_t* count);

/* --- communicators */

/* One end of a message. Both ends know its size. */
typedef struct tessera_message {
  void* data; /* what is sent, or room for what is received */
  size_t bytes;
  int32_t peer;
  int32_t send; /* 1: to the peer; 0: from it */
} tessera_message;

#define TESSERA_SENTENCE_BYTES 512 /* room for a callback's sentence, its final zero included */

/* How messages travel, as five functions: MPI, NCCL, sockets, another language's library. None of them waits;
 * time-outs, agreement and seals are the library's. They are called by the thread that calls the plan, unless
 * own_thread says otherwise. A function that returns a status other than TESSERA_OK writes why to `sentence`. */
typedef struct tessera_transport {
  size_t size;
  void* context; /* the first argument of all */
  int32_t rank;
  int32_t ranks;
  /* Begins a group; the group before is complete. At most one message for each peer and direction. The memory stays
   * valid until a message is complete; after `fail`, for ever. */
  tessera_status (*start)(void* context, const tessera_message* group, int64_t count, char* sentence);
  /* Makes progress, and sets done[i] to 1 for each message of the group that is complete; never back to 0. A message of
   * another size than expected is an error where the transport can tell. */
  tessera_status (*test)(void* context, uint8_t* done, int64_t count, char* sentence);
  /* Returns 1, with its sentence, if another rank has called `fail`; 0 otherwise. NULL: nobody is ever told, and ranks
   * run into their time-out. */
  int32_t (*notice)(void* context, char* sentence);
  /* Tells every other rank, as far as that is possible without waiting, and gives up what is under way. Nothing but
   * destroy is called afterwards. May be NULL. */
  void (*fail)(void* context, const char* sentence);
  void (*destroy)(void* context); /* may be NULL */
  /* 0; 1: a thread of the communicator's own makes these calls (but destroy), and all that a pass does between them,
   * while the caller waits. If a call does not return in time, the caller gets a sentence all the same. The call is
   * left behind then, the context is never destroyed, and all memory that the call may use stays valid. */
  int32_t own_thread;
  int32_t reserved; /* 0 */
} tessera_transport;

/* Moves messages between ranks, over a transport. */
typedef struct tessera_communicator tessera_communicator;

/* Sets the size, and one rank; all functions are NULL. */
TESSERA_API void tessera_transport_init(tessera_transport* transport);
/* Takes the context over: it is destroyed with the communicator. If the call fails it is still the caller's. */
TESSERA_API tessera_status tessera_communicator_make(const tessera_transport* transport,
                                                     tessera_communicator** communicator);
/* Ranks that are threads of this process, for tests and first steps: fills in `ranks` communicators. */
TESSERA_API tessera_status tessera_communicator_threads(int32_t ranks, tessera_communicator** communicators);
/* NULL is allowed. */
TESSERA_API void tessera_communicator_destroy(tessera_communicator* communicator);
/* Each is of the end that is here: the number of its rank, from 0 on, and how many ranks there are. */
TESSERA_API int32_t tessera_communicator_rank(const tessera_communicator* communicator);
TESSERA_API int32_t tessera_communicator_size(const tessera_communicator* communicator);

/* For libraries that add communicators: makes the sentence this thread's tessera_last_error(); returns the status. */
TESSERA_API tessera_status tessera_fail(tessera_status status, const char* sentence);

/* --- plans */

/* How keys come to the queries of other ranks. */
typedef enum tessera_scheme {
  TESSERA_RING = 0,  /* keys pass by, two sets at a time: least memory */
  TESSERA_GATHER = 1 /* keys arrive in ascending order and stay: with `segment` the same bits on any number of ranks */
} tessera_scheme;

/* The question, the same on every rank, and how it is shared out. */
typedef struct tessera_dist_args {
  size_t size;
  tessera_communicator* communicator;
  const tessera_partition* partition; /* for as many ranks as the communicator has */
  int64_t query_heads;                /* 1 */
  int64_t key_heads;                  /* 1 */
  int64_t head_dim;                   /* 64 */
  int64_t value_dim;                  /* 64 */
  int32_t type;                       /* TESSERA_F32; or F16, BF16: of q, k and v */
  int32_t scheme;                     /* TESSERA_GATHER */
  int64_t
      segment;    /* 0; S: the same bits on any number of ranks whose cuts lie on multiples of S. With TESSERA_GATHER */
  double timeout; /* 300; seconds that a rank waits for another */
} tessera_dist_args;

/* Both passes over several ranks. */
typedef struct tessera_dist_plan tessera_dist_plan;

/* Sets the size and the defaults. */
TESSERA_API void tessera_dist_args_init(tessera_dist_args* args);
/* Together with all ranks: compares what they ask for before the first row travels. Of the execution (NULL: the
 * defaults), threads and sm_margin are used, in every call that a rank makes of the library; and device and stream: on
 * a CUDA device all of the rank's tensors lie there, work is in the order of that stream, and the plan keeps memory. */
TESSERA_API tessera_status tessera_dist_plan_make(const tessera_dist_args* args, const tessera_options* options,
                                                  const tessera_execution* execution, tessera_dist_plan** plan);
/* NULL is allowed. */
TESSERA_API void tessera_dist_plan_destroy(tessera_dist_plan* plan);
/* A few human-readable lines: of each rank its rows, steps, bytes sent and memory; and how even the work is. */
TESSERA_API const char* tessera_dist_plan_describe(const tessera_dist_plan* plan);

/* A rank's rows, T of them, in the order of its spans: q [T,Hq,D], k [T,Hk,D], v [T,Hk,Dv], o [T,Hq,Dv], lse [Hq,T];
 * bias and mask [1,Hq|1,T|1,M|1] with M at least the longest sequence; slopes [Hq] or [sequences,Hq]; sinks [Hq]. No
 * other input. `options` may be NULL: those of the plan; only seed and seed_offset may differ from them, and must be
 * the same on all ranks. */
TESSERA_API tessera_status tessera_dist_forward(tessera_dist_plan* plan, const tessera_inputs* inputs,
                                                const tessera_outputs* outputs, const tessera_options* options);
/* dq, dk and dv are all given; dsinks, the sum over all ranks on every rank, if wanted; and dbias, if bias has every
 * row of this rank, and every head where slices share them. */
TESSERA_API tessera_status tessera_dist_backward(tessera_dist_plan* plan, const tessera_inputs* inputs,
                                                 const tessera_saved* saved, const tessera_gradients* gradients,
                                                 const tessera_options* options);

/* --- decoding: few queries, the same on every rank, over caches that are dealt to the ranks in blocks of keys */

/* The question, the same on every rank. Block j of a sequence's keys belongs to group j % groups, and group g lies on
 * rank g % ranks; a rank's blocks lie in its cache one after the other. The same bits on any number of ranks. */
typedef struct tessera_decoder_args {
  size_t size;
  tessera_communicator* communicator;
  int64_t query_heads; /* 1 */
  int64_t key_heads;   /* 1 */
  int64_t head_dim;    /* 64 */
  int64_t value_dim;   /* 64 */
  int32_t type;        /* TESSERA_F32; or F16, BF16: of q */
  int32_t groups;      /* 64; a power of two. Ranks beyond it have no keys */
  int64_t block;       /* 4096 keys */
  double timeout;      /* 300; seconds that a rank waits for another */
} tessera_decoder_args;

/* Decoding over several ranks. */
typedef struct tessera_decoder tessera_decoder;

/* Sets the size and the defaults. */
TESSERA_API void tessera_decoder_args_init(tessera_decoder_args* args);
/* Together with all ranks. Of the options: causal, window, softcap, scale. Of the execution: threads; a kernel's name
 * and a GPU are refused. */
TESSERA_API tessera_status tessera_decoder_make(const tessera_decoder_args* args, const tessera_options* options,
                                                const tessera_execution* execution, tessera_decoder** decoder);
/* NULL is allowed. */
TESSERA_API void tessera_decoder_destroy(tessera_decoder* decoder);
/* Which rank has the key at this position of a sequence, and in *row (unless NULL) its row among that rank's; -1 where
 * the position is negative. */
TESSERA_API int32_t tessera_decoder_place(const tessera_decoder* decoder, int64_t position, int64_t* row);
/* Rows, whole blocks, that a rank's cache needs for a sequence of so many keys. */
TESSERA_API int64_t tessera_decoder_rows(const tessera_decoder* decoder, int64_t length, int32_t rank);
/* Together with all ranks. q [B,Nq,Hq,D], sinks [Hq] and slopes [Hq] are the same on every rank: queries are the last
 * Nq positions of sequences with lengths[b] keys, those of the queries' own tokens included. k and v hold this rank's
 * rows: [B,rows,Hk,D|Dv], or pages with a block_table, in types of their own. o [B,Nq,Hq,Dv] and lse [B,Hq,Nq] are
 * written on every rank. */
TESSERA_API tessera_status tessera_decoder_forward(tessera_decoder* decoder, const tessera_inputs* inputs,
                                                   const int64_t* lengths, int64_t sequences,
                                                   const tessera_outputs* outputs);

#ifdef __cplusplus
}
#endif
#endif
