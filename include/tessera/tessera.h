/* SPDX-License-Identifier: Apache-2.0 */
/* Tessera's C ABI: exact attention, forward and backward. Usable from C99, ctypes, Rust.
 * Includes nothing but <stddef.h> and <stdint.h>. What is computed: docs/algorithm.md.
 *
 * Rules of the ABI
 * - Every struct begins with its own size. Call its _init function, which sets the size and the
 *   defaults, then fill in what you need. Fields that your header did not know take their defaults.
 *   A size that ends inside a field, or that is larger than the library's own, is refused.
 * - A call returns TESSERA_OK or a status; tessera_last_error() then holds one sentence that names
 *   the argument, its value and the rule. When a call fails, no output has been written, also when
 *   memory runs out (TESSERA_OUT_OF_MEMORY); later calls are not affected.
 * - Tensors are views: the library never owns, frees or keeps a pointer beyond the call.
 * - Inputs may share memory. A tensor that a call writes must not overlap an input, another output,
 *   itself or the workspace, nor the workspace any tensor; that is checked (docs/algorithm.md,
 *   "Aliasing"). Views that interleave are legal, such as slices of one [B,N,3,H,D].
 * - Every function may be called from several threads at once, and in a forked child, whatever the
 *   parent's other threads were doing. Nothing prints, exits or aborts. */
#ifndef TESSERA_H
#define TESSERA_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TESSERA_API __attribute__((visibility("default")))
#else
#define TESSERA_API
#endif

#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 1
#define TESSERA_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* What a call returns. */
typedef enum tessera_status {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1, /* the arguments break a rule of the contract */
  TESSERA_UNSUPPORTED = 2,      /* legal, but no kernel here can do it; the sentence says what would work */
  TESSERA_OUT_OF_MEMORY = 3,
  TESSERA_DEVICE_ERROR = 4,       /* a driver or compiler call failed; the sentence carries its report */
  TESSERA_INTERNAL = 5,           /* a bug of ours */
  TESSERA_COMMUNICATION_ERROR = 6 /* another rank failed, differs or did not answer in time; docs/scale_out.md */
} tessera_status;

/* Types of elements. */
typedef enum tessera_type {
  TESSERA_F64 = 0, /* the reference kernel only */
  TESSERA_F32 = 1,
  TESSERA_F16 = 2,
  TESSERA_BF16 = 3,
  TESSERA_E4M3 = 4, /* of k and v: OCP's, without infinities (e4m3fn); largest 448, NaN 0x7f and 0xff */
  TESSERA_E5M2 = 5, /* reserved */
  TESSERA_I32 = 6,
  TESSERA_I64 = 7,
  TESSERA_U8 = 8, /* also a boolean: non-zero means true */
  TESSERA_I8 = 9  /* of k and v */
} tessera_type;

/* DLPack's device codes. */
typedef enum tessera_device_type {
  TESSERA_DEVICE_ANY = 0, /* in tessera_execution: wherever the tensors are */
  TESSERA_DEVICE_CPU = 1,
  TESSERA_DEVICE_CUDA = 2,
  TESSERA_DEVICE_VULKAN = 7 /* data is a VkDeviceAddress; tessera/vulkan.h */
} tessera_device_type;

/* A non-owning view with DLPack's fields. Strides count elements. A stride of a dimension of size 1
 * is never read. From its first to its last element a view lies within 2^56 bytes. A NULL tensor
 * pointer in the structs below means: not given. */
typedef struct tessera_tensor {
  size_t size; /* sizeof(tessera_tensor) */
  void* data;  /* may be NULL when the tensor has no elements, or when only planning */
  int32_t type;
  int32_t ndim;
  int32_t device_type;
  int32_t device_id;
  int64_t shape[4];
  int64_t strides[4];
} tessera_tensor;

/* Padded: q [B,Nq,Hq,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv].
 * Packed (cu_seqlens_q and cu_seqlens_k given): q [Tq,Hq,D], k [Tk,Hk,D], v [Tk,Hk,Dv].
 * Paged (block_table, or page_indptr and page_indices given): q padded, or packed by cu_seqlens_q alone;
 * k [pages,page_size,Hk,D], v [pages,page_size,Hk,Dv]; seqused_k holds the lengths. Key j of sequence b is
 * number (j + leftpad) % page_size of page table[b][(j + leftpad) / page_size]; NHD and HND caches, [2,...]
 * and slices of one tensor for K and V are strides. Forward pass only (docs/algorithm.md, "Paged keys and
 * values").
 * k and v may each have a type of their own (f32, f16, bf16, e4m3, i8) and scales. Forward pass only
 * (docs/algorithm.md, "Types and scales of keys and values").
 * D is at most 576, Dv 512, B, Hq and Hk 2^31 - 1, Nq, Nk, Tq and Tk 2^48. */
typedef struct tessera_inputs {
  size_t size;
  const tessera_tensor* q;
  const tessera_tensor* k;
  const tessera_tensor* v;
  const tessera_tensor* bias;          /* [B|1,Hq|1,Nq|1,Nk|1], q's type or f32, added to the scores */
  const tessera_tensor* mask;          /* same shapes, u8: non-zero means visible */
  const tessera_tensor* slopes;        /* ALiBi, f32 [Hq] or [B,Hq] */
  const tessera_tensor* sinks;         /* f32 [Hq] */
  const tessera_tensor* cu_seqlens_q;  /* i32 [B+1] */
  const tessera_tensor* cu_seqlens_k;  /* i32 [B+1] */
  const tessera_tensor* seqused_q;     /* i32 [B] */
  const tessera_tensor* seqused_k;     /* i32 [B] */
  const tessera_tensor* rng;           /* i64 [2]: dropout's seed and offset, read on the device */
  const tessera_tensor* block_table;   /* i32 [B,entries]: the pages of each sequence, in order */
  const tessera_tensor* v_block_table; /* the same for v, where its pages are not k's */
  const tessera_tensor* page_indptr;   /* i32 [B+1], instead of block_table: sequence b has the pages */
  const tessera_tensor* page_indices;  /* i32 [n]: indices[indptr[b]] to indices[indptr[b+1] - 1] */
  const tessera_tensor* leftpad_k;     /* i32 [B]: places before key 0; seqused_k counts them, Nk_b does not */
  const tessera_tensor* state_o;       /* forward: the state to continue from, as tessera_outputs has it; all three */
  const tessera_tensor* state_m;    /* or none: rows have then seen nothing yet. Sinks are counted by the call that */
  const tessera_tensor* state_l;    /* starts without a state */
  const tessera_tensor* seq_row0;   /* i64 [B]: added to options.row0, sequence by sequence */
  const tessera_tensor* seq_col0;   /* i64 [B]: added to options.col0 */
  const tessera_tensor* seq_batch0; /* i64 [B]: sequence b counts as number seq_batch0[b] + options.batch0 */
  const tessera_tensor* k_scale;    /* f32: an element of k means scale times number. [1], [Hk], [B,Hk], or */
  const tessera_tensor* v_scale;    /* [B,Nk,Hk], packed [1,Tk,Hk], paged [pages,page_size,Hk], or one per 128 dims: */
                                    /* these, with ceil(D/128) behind */
  const tessera_tensor* qv;         /* [B,Nq,Hq,Dv] or [Tq,Hq,Dv], q's type: scores are scale * (q.k + qv.v). For */
                                    /* caches in which v is a part of the key (MLA). Forward pass only */
  const tessera_tensor* tree_mask;  /* i32 [B,Nq,words] or [Tq,words]: query i sees key Nk_b - Nq_b + t of its */
                                    /* sequence if bit t % 32 of word t / 32 is set, instead of `causal` there */
  const tessera_tensor* positions;  /* i32 [B,Nq] or [Tq], instead of i + off in causal, window and ALiBi. These */
                                    /* two: forward pass only (docs/algorithm.md, "Mask") */
} tessera_inputs;

/* Bits of tessera_outputs.status. */
#define TESSERA_PAGE_OUTSIDE_POOL 1 /* a table entry in use was no page of the pool: its keys counted as zeros */
#define TESSERA_BEYOND_BOUNDS 2     /* on GPUs: a length or a position was beyond the plan's bounds, the table, the */
                                    /* cache or rotary_cos: a length was cut, a row of append left out */

/* What the forward pass writes (and what merge writes). */
typedef struct tessera_outputs {
  size_t size;
  const tessera_tensor* o;      /* [B,Nq,Hq,Dv] or [Tq,Hq,Dv]; q's type or f32 */
  const tessera_tensor* lse;    /* optional; f32 [B,Hq,Nq] or [Hq,Tq]; natural logarithm */
  const tessera_tensor* status; /* optional, beside a page table; i32 [1]: the call sets bits, and clears none */
  /* Instead of o and lse, all three: the call ends by writing its state, from which another one continues (docs/
     algorithm.md, "Carried state"). Each may be the same view as the one in tessera_inputs. */
  const tessera_tensor* state_o; /* o's shape, f32: relative to 2^m and not divided yet */
  const tessera_tensor* state_m; /* lse's shape, f32: -inf where a row has seen no key */
  const tessera_tensor* state_l; /* lse's shape, f64 */
} tessera_outputs;

/* What append takes: new tokens, the cache that they go to, where in it, and how keys and queries are rotated.
 * What it means: docs/algorithm.md, "Append". Where a token goes is said by slots; or by seqused_k, the places in use
 * with the new tokens counted, and a page table as in tessera_inputs; or, without both, by seqused_k alone: k and v are
 * then [B,capacity,Hk,D] and [B,capacity,Hk,Dv]. */
typedef struct tessera_append_args {
  size_t size;
  const tessera_tensor* k_new;          /* [B,n,Hk,D], or packed [T,Hk,D]; f32, f16, bf16 or f64, like v_new */
  const tessera_tensor* v_new;          /* [B,n,Hk,Dv], or packed [T,Hk,Dv] */
  const tessera_tensor* k;              /* written: the cache, [pages,page_size,Hk,D]; these types, e4m3 or i8 */
  const tessera_tensor* v;              /* written: [pages,page_size,Hk,Dv] */
  const tessera_tensor* cu_seqlens_new; /* i32 [B+1]: packed tokens without slots */
  const tessera_tensor* seqused_k;      /* i32 [B]: places in use after the call */
  const tessera_tensor* block_table;    /* this and the next three as in tessera_inputs */
  const tessera_tensor* v_block_table;
  const tessera_tensor* page_indptr;
  const tessera_tensor* page_indices;
  const tessera_tensor* slots;       /* i32 or i64 [B,n] or [T]: page * page_size + place in it; below 0: skipped */
  const tessera_tensor* rotary_cos;  /* [positions,rotary_dim/2], k_new's type or f32 */
  const tessera_tensor* rotary_sin;  /* likewise */
  const tessera_tensor* positions;   /* i32 [B,n] or [T]: rows of rotary_cos; NULL: the place of each token */
  const tessera_tensor* q;           /* [B,Nq,Hq,D], or packed [T,Hq,D]; f32, f16, bf16 or f64 */
  const tessera_tensor* q_out;       /* written: q rotated, in q's type or f32; may be the same view as q */
  const tessera_tensor* q_positions; /* i32 [B,Nq] or [T]; NULL: positions, or places from the first new token's on */
  const tessera_tensor* status;      /* written: i32 [1], beside a page table or slots, as in tessera_outputs */
  int32_t interleaved;               /* 1: pairs are neighbours. 0: half of rotary_dim apart (NeoX) */
  int32_t reserved;
  const tessera_tensor* k_scale; /* f32: numbers are divided by it before they are stored. [1], [Hk], [B,Hk]: read. */
  const tessera_tensor* v_scale; /* [pages,page_size,Hk] or [B,capacity,Hk], also with ceil(D/128) behind, of e4m3 */
                                 /* and i8: written */
} tessera_append_args;

/* What the backward pass reads besides the inputs. */
typedef struct tessera_saved {
  size_t size;
  const tessera_tensor* o;     /* of the forward pass, or of a merge */
  const tessera_tensor* lse;   /* likewise */
  const tessera_tensor* d_o;   /* incoming gradient of o; q's type or f32 */
  const tessera_tensor* d_lse; /* optional: incoming gradient of lse, f32 */
} tessera_saved;

/* What the backward pass writes. Each is optional; what is not asked for is not computed.
 * Type: that of the matching input, or f32. */
typedef struct tessera_gradients {
  size_t size;
  const tessera_tensor* dq;
  const tessera_tensor* dk;
  const tessera_tensor* dv;
  const tessera_tensor* dbias;
  const tessera_tensor* dsinks;
} tessera_gradients;

/* Where the diagonal of the causal mask, the window and ALiBi lies: j = i + off. */
typedef enum tessera_alignment {
  TESSERA_BOTTOM_RIGHT = 0, /* off = Nk - Nq, per sequence (FlashAttention) */
  TESSERA_TOP_LEFT = 1,     /* off = 0 (PyTorch's is_causal) */
  TESSERA_OFFSET = 2        /* off = tessera_options.diagonal_offset */
} tessera_alignment;

/* The value of `scale` that means 1/sqrt(D), or with qv 1/sqrt(D + Dv). Any other finite value is used as it is, 0
 * included. */
#define TESSERA_DEFAULT_SCALE 1.7976931348623157e308

/* What to compute. Zero bytes are not the defaults: call tessera_options_init. */
typedef struct tessera_options {
  size_t size;
  double scale;            /* TESSERA_DEFAULT_SCALE */
  double softcap;          /* 0: none */
  int32_t causal;          /* 0 */
  int32_t alignment;       /* TESSERA_BOTTOM_RIGHT */
  int64_t diagonal_offset; /* 0; read only with TESSERA_OFFSET, must be 0 otherwise. From -2^48 to 2^48 */
  int64_t window_left;     /* -1: no bound. Inclusive */
  int64_t window_right;    /* -1: no bound. Inclusive */
  double dropout;          /* probability of dropping, in [0, 1) */
  uint64_t seed;           /* 0; not together with inputs.rng */
  uint64_t seed_offset;    /* 0; not together with inputs.rng */
  int64_t row0;            /* 0; global position of query 0, key 0, head 0, sequence 0, if this is a part */
  int64_t col0;            /* all four from -2^48 to 2^48 */
  int64_t head0;
  int64_t batch0;
  int64_t max_seqlen_q; /* -1: unknown. Upper bounds for packed input; they never change a bit of a result */
  int64_t max_seqlen_k; /* -1. For paged keys too */
  int32_t accumulate;   /* 0; 1: gradients (all f32) are added to what the buffers hold */
  /* 1: the same call gives the same bits in every run. 0: a backward pass on a GPU may add up dQ, or dK and dV, in any
     order, which can be faster; their bits may then vary between runs. Forward passes and the CPU do not change. */
  int32_t deterministic;
  /* 0; 1: the bits of a row do not depend on how a problem is cut into calls, at multiples of tessera_plan_key_tile and
     tessera_plan_query_tile (docs/algorithm.md, "Parts of a problem"). */
  int32_t part_invariant;
  int32_t reserved;
  int64_t segment_rows; /* 0; with part_invariant: dK and dV are summed as a tree over segments of so many queries */
} tessera_options;

/* Where and how to run. */
typedef struct tessera_execution {
  size_t size;
  int32_t device_type;    /* TESSERA_DEVICE_ANY: where the tensors are */
  int32_t device_id;      /* 0 */
  void* stream;           /* NULL; a CUstream for CUDA, a tessera_vulkan_queue* for Vulkan */
  int32_t threads;        /* 0: all that the process may use */
  int32_t sm_margin;      /* 0; multiprocessors of a GPU that persistent kernels leave free */
  void* workspace;        /* NULL on the CPU: the library allocates for the duration of the call */
  size_t workspace_bytes; /* 0 */
  const char* kernel;     /* NULL: the best one. A name from tessera_plan_describe or `tessera info` forces it */
} tessera_execution;

/* Each sets the size and the defaults of its struct. */
TESSERA_API void tessera_tensor_init(tessera_tensor* tensor);
TESSERA_API void tessera_inputs_init(tessera_inputs* inputs);
TESSERA_API void tessera_outputs_init(tessera_outputs* outputs);
TESSERA_API void tessera_append_args_init(tessera_append_args* args);
TESSERA_API void tessera_saved_init(tessera_saved* saved);
TESSERA_API void tessera_gradients_init(tessera_gradients* gradients);
TESSERA_API void tessera_options_init(tessera_options* options);
TESSERA_API void tessera_execution_init(tessera_execution* execution);

/* The forward pass: O = softmax(scale * q k^T) v, with all that the options and the other inputs add to it, and LSE; or
 * a carried state. What is computed: docs/algorithm.md, "Softmax and output". On a CUDA device this and every pass is
 * enqueued on the execution's stream. options and execution may be NULL here and everywhere: the defaults. */
TESSERA_API tessera_status tessera_forward(const tessera_inputs* inputs, const tessera_outputs* outputs,
                                           const tessera_options* options, const tessera_execution* execution);
/* The backward pass: those gradients that are asked for, from the inputs and options of the forward pass, what it wrote
 * and the gradient that arrives there. What is computed: docs/algorithm.md, "Backward". */
TESSERA_API tessera_status tessera_backward(const tessera_inputs* inputs, const tessera_saved* saved,
                                            const tessera_gradients* gradients, const tessera_options* options,
                                            const tessera_execution* execution);

/* Rotates new keys, converts new keys and values to the cache's types and stores them; rotates queries, if given. What
 * it stores, a later call reads. */
TESSERA_API tessera_status tessera_append(const tessera_append_args* args, const tessera_execution* execution);

/* Merges n partial results (o, lse) over disjoint key sets (split-KV, ring attention), in index order. merged->o
 * may be the same view as a partial's o, and merged->lse as a partial's lse: merging in place. */
TESSERA_API tessera_status tessera_merge(const tessera_outputs* partials, int64_t n, const tessera_outputs* merged,
                                         const tessera_execution* execution);

/* Writes the dropout mask that forward and backward use: u8 [B,Hq,Nq,Nk], 1 = kept. Reads dropout,
 * seed, seed_offset, row0, col0, head0 and batch0 of the options. rng may be NULL; see tessera_inputs. */
TESSERA_API tessera_status tessera_dropout_mask(const tessera_tensor* mask, const tessera_tensor* rng,
                                                const tessera_options* options, const tessera_execution* execution);

/* A plan is the dispatch decision for one problem: which kernel, which tiles, how much workspace. It
 * is made once and run many times. Planning reads shapes, types and alignments, never data: tensors
 * may have data == NULL, which then counts as aligned to 16 bytes. Running a plan needs tensors of
 * the same problem, with pointers at least as aligned. Plans are immutable and may be shared between
 * threads. */
typedef struct tessera_plan tessera_plan;

/* Each makes a plan for a problem, or says of every kernel why it refuses. The plan is the caller's to destroy. */
TESSERA_API tessera_status tessera_plan_forward(const tessera_inputs* inputs, const tessera_outputs* outputs,
                                                const tessera_options* options, const tessera_execution* execution,
                                                tessera_plan** plan);
TESSERA_API tessera_status tessera_plan_backward(const tessera_inputs* inputs, const tessera_saved* saved,
                                                 const tessera_gradients* gradients, const tessera_options* options,
                                                 const tessera_execution* execution, tessera_plan** plan);
/* NULL is allowed. */
TESSERA_API void tessera_plan_destroy(tessera_plan* plan);

/* Bytes of workspace that a run of this plan uses. */
TESSERA_API size_t tessera_plan_workspace_size(const tessera_plan* plan);
/* Name of the kernel; the text lives as long as the plan. */
TESSERA_API const char* tessera_plan_kernel(const tessera_plan* plan);
/* Each says where a problem may be cut into calls that keep its bits (tessera_options.part_invariant): at keys, or
 * queries, whose global position is a multiple of it. 0: the plan's kernel makes no such promise. */
TESSERA_API int64_t tessera_plan_key_tile(const tessera_plan* plan);
TESSERA_API int64_t tessera_plan_query_tile(const tessera_plan* plan);
/* Several human-readable lines: problem, kernel, tiles, workspace, why other kernels were refused. */
TESSERA_API const char* tessera_plan_describe(const tessera_plan* plan);

/* Each runs a plan. The options must be those of the plan; only seed and seed_offset may differ. Of the execution,
 * workspace and stream are used; device, threads and kernel were fixed by the plan. */
TESSERA_API tessera_status tessera_plan_run_forward(const tessera_plan* plan, const tessera_inputs* inputs,
                                                    const tessera_outputs* outputs, const tessera_options* options,
                                                    const tessera_execution* execution);
TESSERA_API tessera_status tessera_plan_run_backward(const tessera_plan* plan, const tessera_inputs* inputs,
                                                     const tessera_saved* saved, const tessera_gradients* gradients,
                                                     const tessera_options* options,
                                                     const tessera_execution* execution);

/* The sentence of this thread's last failed call; "" if none has failed. Valid until its next failure. */
TESSERA_API const char* tessera_last_error(void);
/* major * 10000 + minor * 100 + patch of the library that is running. */
TESSERA_API int tessera_version(void);
/* A few human-readable lines: CPU, instruction sets, kernels. The text lives as long as the process. "" where there is
 * no memory for it; tessera_last_error() then says so. */
TESSERA_API const char* tessera_info(void);

#ifdef __cplusplus
}
#endif
#endif
