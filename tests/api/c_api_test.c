/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI from C99, linked with libtessera.so alone: what is exported, what the structs' sizes mean, what a caller in
 * any language can rely on. A problem small enough to be worked by hand runs through every entry point.
 * Links tessera (the shared library). Implements the rules at the top of include/tessera/tessera.h. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera/tessera.h"

static int failures = 0;

static void expect(int ok, const char* what, int line) {
  if (ok) return;
  ++failures;
  fprintf(stderr, "c_api_test.c:%d: %s; last error: %s\n", line, what, tessera_last_error());
}
#define EXPECT(condition) expect(condition, #condition, __LINE__)
#define EXPECT_NEAR(x, y) expect(fabs((double)(x) - (double)(y)) < 1e-6, #x " is near " #y, __LINE__)
#define EXPECT_ERROR(call, code, text) \
  expect((call) == (code) && strcmp(tessera_last_error(), text) == 0, #call, __LINE__)

/* One query, two keys, scale 1. q.k is 0 and ln 3, so p = 1/4 and 3/4, and with v = (4, 8):
 * O = 7, LSE = ln 4; dO = 1 gives dV = p, ds = p (v - O) = (-3/4, 3/4), dQ = 3/4 k_1, dK = 2 ds. */
#define LN3 1.0986122886681098
#define LN4 1.3862943611198906

typedef struct Problem {
  float q[1], k[2], v[2], o[1], lse[1], d_o[1], dq[1], dk[2], dv[2];
  tessera_tensor tq, tk, tv, to, tlse, tdo, tdq, tdk, tdv;
  tessera_inputs in;
  tessera_outputs out;
  tessera_saved saved;
  tessera_gradients grads;
  tessera_options options;
} Problem;

static void view(tessera_tensor* t, float* data, int tokens, int ndim) {
  int i;
  tessera_tensor_init(t);
  t->data = data;
  t->ndim = ndim;
  for (i = 0; i < ndim; ++i) t->shape[i] = t->strides[i] = 1;
  t->shape[ndim == 4 ? 1 : 2] = tokens; /* [1,tokens,1,1] or, for LSE, [1,1,tokens] */
}

static void set_up(Problem* p) {
  memset(p, 0, sizeof(*p));
  p->q[0] = 2, p->k[1] = (float)(LN3 / 2), p->v[0] = 4, p->v[1] = 8, p->d_o[0] = 1;
  view(&p->tq, p->q, 1, 4), view(&p->tk, p->k, 2, 4), view(&p->tv, p->v, 2, 4);
  view(&p->to, p->o, 1, 4), view(&p->tlse, p->lse, 1, 3), view(&p->tdo, p->d_o, 1, 4);
  view(&p->tdq, p->dq, 1, 4), view(&p->tdk, p->dk, 2, 4), view(&p->tdv, p->dv, 2, 4);
  tessera_inputs_init(&p->in), tessera_outputs_init(&p->out), tessera_saved_init(&p->saved);
  tessera_gradients_init(&p->grads), tessera_options_init(&p->options);
  p->in.q = &p->tq, p->in.k = &p->tk, p->in.v = &p->tv;
  p->out.o = &p->to, p->out.lse = &p->tlse;
  p->saved.o = &p->to, p->saved.lse = &p->tlse, p->saved.d_o = &p->tdo;
  p->grads.dq = &p->tdq, p->grads.dk = &p->tdk, p->grads.dv = &p->tdv;
  p->options.scale = 1;
}

static void expect_forward(const Problem* p) {
  EXPECT_NEAR(p->o[0], 7);
  EXPECT_NEAR(p->lse[0], LN4);
}

static void expect_backward(const Problem* p) {
  EXPECT_NEAR(p->dq[0], 0.75 * LN3 / 2);
  EXPECT_NEAR(p->dk[0], -1.5);
  EXPECT_NEAR(p->dk[1], 1.5);
  EXPECT_NEAR(p->dv[0], 0.25);
  EXPECT_NEAR(p->dv[1], 0.75);
}

static void test_attention(void) {
  Problem p;
  set_up(&p);
  EXPECT(tessera_forward(&p.in, &p.out, &p.options, NULL) == TESSERA_OK);
  expect_forward(&p);
  EXPECT(tessera_backward(&p.in, &p.saved, &p.grads, &p.options, NULL) == TESSERA_OK);
  expect_backward(&p);
  set_up(&p);
  EXPECT(tessera_forward(&p.in, &p.out, NULL, NULL) == TESSERA_OK); /* default scale: 1/sqrt(1) */
  expect_forward(&p);
}

static void test_plan(void) {
  Problem p;
  tessera_plan *forward = NULL, *backward = NULL;
  tessera_execution execution;
  size_t bytes;
  set_up(&p);
  tessera_execution_init(&execution);
  EXPECT(tessera_plan_forward(&p.in, &p.out, &p.options, NULL, &forward) == TESSERA_OK);
  EXPECT(tessera_plan_backward(&p.in, &p.saved, &p.grads, &p.options, NULL, &backward) == TESSERA_OK);
  EXPECT(strlen(tessera_plan_kernel(forward)) > 0);
  EXPECT(strstr(tessera_plan_describe(backward), "workspace") != NULL);
  bytes = tessera_plan_workspace_size(forward);
  if (tessera_plan_workspace_size(backward) > bytes) bytes = tessera_plan_workspace_size(backward);
  execution.workspace = malloc(bytes + 1);
  execution.workspace_bytes = bytes;
  memset(execution.workspace, 0xff, bytes + 1); /* NaN */
  EXPECT(tessera_plan_run_forward(forward, &p.in, &p.out, &p.options, &execution) == TESSERA_OK);
  expect_forward(&p);
  EXPECT(tessera_plan_run_backward(backward, &p.in, &p.saved, &p.grads, &p.options, &execution) == TESSERA_OK);
  expect_backward(&p);
  free(execution.workspace);
  tessera_plan_destroy(forward);
  tessera_plan_destroy(backward);
  tessera_plan_destroy(NULL);
}

/* Each key alone is a partial result; together they are the whole. */
static void test_merge(void) {
  Problem whole, part[2];
  tessera_outputs outputs[2];
  int n;
  set_up(&whole);
  for (n = 0; n < 2; ++n) {
    set_up(&part[n]);
    part[n].tk.shape[1] = part[n].tv.shape[1] = 1;
    part[n].tk.data = &part[n].k[n], part[n].tv.data = &part[n].v[n];
    EXPECT(tessera_forward(&part[n].in, &part[n].out, &part[n].options, NULL) == TESSERA_OK);
    outputs[n] = part[n].out;
  }
  EXPECT_NEAR(part[0].o[0], 4);
  EXPECT_NEAR(part[0].lse[0], 0);
  EXPECT_NEAR(part[1].lse[0], LN3);
  EXPECT(tessera_merge(outputs, 2, &whole.out, NULL) == TESSERA_OK);
  expect_forward(&whole);
}

/* One key after the other, the state carried in place; the second call finishes. */
static void test_state(void) {
  Problem p;
  float state_o[1], state_m[1];
  double state_l[1];
  tessera_tensor to, tm, tl;
  tessera_outputs state;
  tessera_plan* plan = NULL;
  int64_t place[1] = {0};
  tessera_tensor tplace;
  set_up(&p);
  view(&to, state_o, 1, 4), view(&tm, state_m, 1, 3), view(&tl, NULL, 1, 3), view(&tplace, NULL, 1, 3);
  tl.data = state_l, tl.type = TESSERA_F64;
  tplace.data = place, tplace.type = TESSERA_I64, tplace.ndim = 1;
  tessera_outputs_init(&state);
  state.state_o = &to, state.state_m = &tm, state.state_l = &tl;
  p.tk.shape[1] = p.tv.shape[1] = 1;
  EXPECT(tessera_forward(&p.in, &state, &p.options, NULL) == TESSERA_OK);
  EXPECT_NEAR(state_o[0] / state_l[0], 4);
  EXPECT_NEAR(state_m[0] + log(state_l[0]) / log(2.0), 0); /* the score is 0 */
  p.tk.data = &p.k[1], p.tv.data = &p.v[1], p.options.col0 = 1;
  p.in.state_o = &to, p.in.state_m = &tm, p.in.state_l = &tl, p.in.seq_row0 = &tplace;
  EXPECT(tessera_forward(&p.in, &p.out, &p.options, NULL) == TESSERA_OK);
  expect_forward(&p);
  p.options.part_invariant = 1, p.options.col0 = 0;
  EXPECT(tessera_plan_forward(&p.in, &p.out, &p.options, NULL, &plan) == TESSERA_OK);
  EXPECT(tessera_plan_key_tile(plan) > 0 && tessera_plan_query_tile(plan) > 0);
  EXPECT(tessera_plan_key_tile(NULL) == 0 && tessera_plan_query_tile(NULL) == 0);
  tessera_plan_destroy(plan);
}

/* Seed 11, offset 5, p = 1/2, rows 3 and 4 of head 1: computed from the contract by another program. */
static void test_dropout_mask(void) {
  static const uint8_t expected[2][20] = {{0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0},
                                          {1, 0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1}};
  uint8_t mask[2][20];
  tessera_tensor t;
  tessera_options options;
  int64_t words[2] = {11, 5};
  tessera_tensor rng;
  tessera_tensor_init(&t);
  t.data = mask, t.type = TESSERA_U8, t.ndim = 4;
  t.shape[0] = t.shape[1] = 1, t.shape[2] = 2, t.shape[3] = 20;
  t.strides[2] = 20, t.strides[3] = 1;
  tessera_options_init(&options);
  options.dropout = 0.5, options.seed = 11, options.seed_offset = 5, options.row0 = 3, options.head0 = 1;
  EXPECT(tessera_dropout_mask(&t, NULL, &options, NULL) == TESSERA_OK);
  EXPECT(memcmp(mask, expected, sizeof(mask)) == 0);
  memset(mask, 0xff, sizeof(mask));
  tessera_tensor_init(&rng);
  rng.data = words, rng.type = TESSERA_I64, rng.ndim = 1, rng.shape[0] = 2, rng.strides[0] = 1;
  options.seed = options.seed_offset = 0;
  EXPECT(tessera_dropout_mask(&t, &rng, &options, NULL) == TESSERA_OK);
  EXPECT(memcmp(mask, expected, sizeof(mask)) == 0);
}

/* Each struct with every size, in memory of that size. Those that end with a field are read; what is then missing has
 * its own sentence. */
#define END(type, field) (offsetof(type, field) + sizeof(((type*)0)->field))
enum { TENSOR, INPUTS, OUTPUTS, SAVED, GRADIENTS, OPTIONS, EXECUTION, STRUCTS };
static const struct {
  const char* name;
  size_t bytes, ends[32];
} structs[STRUCTS] = {
    {"tensor",
     sizeof(tessera_tensor),
     {END(tessera_tensor, size), END(tessera_tensor, data), END(tessera_tensor, type), END(tessera_tensor, ndim),
      END(tessera_tensor, device_type), END(tessera_tensor, device_id), END(tessera_tensor, shape),
      END(tessera_tensor, strides)}},
    {"inputs",
     sizeof(tessera_inputs),
     {END(tessera_inputs, size),
      END(tessera_inputs, q),
      END(tessera_inputs, k),
      END(tessera_inputs, v),
      END(tessera_inputs, bias),
      END(tessera_inputs, mask),
      END(tessera_inputs, slopes),
      END(tessera_inputs, sinks),
      END(tessera_inputs, cu_seqlens_q),
      END(tessera_inputs, cu_seqlens_k),
      END(tessera_inputs, seqused_q),
      END(tessera_inputs, seqused_k),
      END(tessera_inputs, rng),
      END(tessera_inputs, block_table),
      END(tessera_inputs, v_block_table),
      END(tessera_inputs, page_indptr),
      END(tessera_inputs, page_indices),
      END(tessera_inputs, leftpad_k),
      END(tessera_inputs, state_o),
      END(tessera_inputs, state_m),
      END(tessera_inputs, state_l),
      END(tessera_inputs, seq_row0),
      END(tessera_inputs, seq_col0),
      END(tessera_inputs, seq_batch0),
      END(tessera_inputs, k_scale),
      END(tessera_inputs, v_scale),
      END(tessera_inputs, qv),
      END(tessera_inputs, tree_mask),
      END(tessera_inputs, positions)}},
    {"outputs",
     sizeof(tessera_outputs),
     {END(tessera_outputs, size), END(tessera_outputs, o), END(tessera_outputs, lse), END(tessera_outputs, status),
      END(tessera_outputs, state_o), END(tessera_outputs, state_m), END(tessera_outputs, state_l)}},
    {"saved",
     sizeof(tessera_saved),
     {END(tessera_saved, size), END(tessera_saved, o), END(tessera_saved, lse), END(tessera_saved, d_o),
      END(tessera_saved, d_lse)}},
    {"gradients",
     sizeof(tessera_gradients),
     {END(tessera_gradients, size), END(tessera_gradients, dq), END(tessera_gradients, dk), END(tessera_gradients, dv),
      END(tessera_gradients, dbias), END(tessera_gradients, dsinks)}},
    {"options",
     sizeof(tessera_options),
     {END(tessera_options, size),          END(tessera_options, scale),          END(tessera_options, softcap),
      END(tessera_options, causal),        END(tessera_options, alignment),      END(tessera_options, diagonal_offset),
      END(tessera_options, window_left),   END(tessera_options, window_right),   END(tessera_options, dropout),
      END(tessera_options, seed),          END(tessera_options, seed_offset),    END(tessera_options, row0),
      END(tessera_options, col0),          END(tessera_options, head0),          END(tessera_options, batch0),
      END(tessera_options, max_seqlen_q),  END(tessera_options, max_seqlen_k),   END(tessera_options, accumulate),
      END(tessera_options, deterministic), END(tessera_options, part_invariant), END(tessera_options, reserved),
      END(tessera_options, segment_rows)}},
    {"execution",
     sizeof(tessera_execution),
     {END(tessera_execution, size), END(tessera_execution, device_type), END(tessera_execution, device_id),
      END(tessera_execution, stream), END(tessera_execution, threads), END(tessera_execution, sm_margin),
      END(tessera_execution, workspace), END(tessera_execution, workspace_bytes), END(tessera_execution, kernel)}}};

/* A call in which one struct lies elsewhere. */
static tessera_status call_with(Problem* p, int which, const void* other) {
  tessera_execution execution;
  tessera_execution_init(&execution);
  if (which == TENSOR) p->in.k = other;
  if (which == SAVED || which == GRADIENTS)
    return tessera_backward(&p->in, which == SAVED ? other : &p->saved, which == GRADIENTS ? other : &p->grads,
                            &p->options, &execution);
  return tessera_forward(which == INPUTS ? other : &p->in, which == OUTPUTS ? other : &p->out,
                         which == OPTIONS ? other : &p->options, which == EXECUTION ? other : &execution);
}

static void test_every_struct_size(void) {
  int which, field;
  size_t size;
  for (which = 0; which < STRUCTS; ++which)
    for (size = 0; size <= structs[which].bytes + 8; ++size) {
      Problem p;
      tessera_execution execution;
      char text[200] = "";
      const char* argument = which == TENSOR ? "k" : structs[which].name;
      int ends = 0;
      const void* sources[STRUCTS] = {&p.tk, &p.in, &p.out, &p.saved, &p.grads, &p.options, &execution};
      char* memory = calloc(1, size < sizeof(size_t) ? sizeof(size_t) : size);
      tessera_status status;
      set_up(&p), tessera_execution_init(&execution);
      memcpy(memory, sources[which], size < structs[which].bytes ? size : structs[which].bytes);
      memcpy(memory, &size, sizeof(size));
      for (field = 0; field < 32; ++field) ends = ends || (size > 0 && structs[which].ends[field] == size);
      status = call_with(&p, which, memory);
      if (size > structs[which].bytes)
        sprintf(text, "%s: size is %lu but this library, version %d, knows %lu; the header is newer than the library",
                argument, (unsigned long)size, tessera_version(), (unsigned long)structs[which].bytes);
      else if (size < sizeof(size_t))
        sprintf(text, "%s: size is %lu; call tessera_%s_init before filling it in", argument, (unsigned long)size,
                structs[which].name);
      else if (!ends)
        sprintf(
            text,
            "%s: size is %lu, which ends inside a field; must be the size of a tessera_%s that some header declares",
            argument, (unsigned long)size, structs[which].name);
      if (text[0]) EXPECT(status == TESSERA_INVALID_ARGUMENT && strcmp(tessera_last_error(), text) == 0);
      if (ends) EXPECT(status == TESSERA_OK || strstr(tessera_last_error(), "size is") == NULL);
      if (size == structs[which].bytes) EXPECT(status == TESSERA_OK);
      free(memory);
    }
}

/* The step of an array of partial results is the size that the first one tells. */
static void test_partials_of_several_sizes(void) {
  Problem p;
  tessera_outputs parts[2];
  set_up(&p);
  parts[0] = parts[1] = p.out;
  parts[1].size = offsetof(tessera_outputs, lse);
  EXPECT_ERROR(tessera_merge(parts, 2, &p.out, NULL), TESSERA_INVALID_ARGUMENT,
               "partials[1]: size is 16 but that of partials[0] is 56; all elements of an array have one size");
}

/* A shorter struct comes from an older header: what lies behind it is not read. A longer one comes from a newer header
 * and may ask for something that this library would ignore. */
static void test_struct_sizes(void) {
  Problem p;
  tessera_execution execution;
  char text[200];
  set_up(&p);
  p.options.size = offsetof(tessera_options, softcap);
  p.options.softcap = -1, p.options.window_left = -7, p.options.dropout = 5;
  EXPECT(tessera_forward(&p.in, &p.out, &p.options, NULL) == TESSERA_OK);
  expect_forward(&p);
  set_up(&p);
  p.in.size = offsetof(tessera_inputs, bias);
  p.in.bias = p.in.rng = &p.tq;
  EXPECT(tessera_forward(&p.in, &p.out, &p.options, NULL) == TESSERA_OK);
  expect_forward(&p);
  tessera_execution_init(&execution);
  execution.size = offsetof(tessera_execution, kernel);
  execution.kernel = "no such kernel";
  EXPECT(tessera_forward(&p.in, &p.out, &p.options, &execution) == TESSERA_OK);

  set_up(&p);
  p.options.size = sizeof(tessera_options) + 8;
  sprintf(text, "options: size is %lu but this library, version %d, knows %lu; the header is newer than the library",
          (unsigned long)p.options.size, tessera_version(), (unsigned long)sizeof(tessera_options));
  EXPECT_ERROR(tessera_forward(&p.in, &p.out, &p.options, NULL), TESSERA_INVALID_ARGUMENT, text);
  EXPECT(p.o[0] == 0);

  set_up(&p);
  p.in.size = 0;
  EXPECT_ERROR(tessera_forward(&p.in, &p.out, &p.options, NULL), TESSERA_INVALID_ARGUMENT,
               "inputs: size is 0; call tessera_inputs_init before filling it in");
  set_up(&p);
  p.tk.size = 3;
  EXPECT_ERROR(tessera_forward(&p.in, &p.out, &p.options, NULL), TESSERA_INVALID_ARGUMENT,
               "k: size is 3; call tessera_tensor_init before filling it in");
  set_up(&p);
  p.tq.ndim = 0;
  EXPECT_ERROR(tessera_forward(&p.in, &p.out, &p.options, NULL), TESSERA_INVALID_ARGUMENT,
               "q: has 0 dimensions; tensors have 1 to 4");
  EXPECT(p.o[0] == 0);
}

static void test_null_arguments(void) {
  Problem p;
  tessera_plan* plan = NULL;
  set_up(&p);
  EXPECT_ERROR(tessera_forward(NULL, &p.out, NULL, NULL), TESSERA_INVALID_ARGUMENT, "inputs: is NULL; it is required");
  EXPECT_ERROR(tessera_forward(&p.in, NULL, NULL, NULL), TESSERA_INVALID_ARGUMENT, "outputs: is NULL; it is required");
  EXPECT_ERROR(tessera_backward(&p.in, NULL, &p.grads, NULL, NULL), TESSERA_INVALID_ARGUMENT,
               "saved: is NULL; it is required");
  EXPECT_ERROR(tessera_backward(&p.in, &p.saved, NULL, NULL, NULL), TESSERA_INVALID_ARGUMENT,
               "gradients: is NULL; it is required");
  EXPECT_ERROR(tessera_plan_forward(&p.in, &p.out, NULL, NULL, NULL), TESSERA_INVALID_ARGUMENT,
               "plan: is NULL; it is required");
  EXPECT_ERROR(tessera_plan_run_forward(NULL, &p.in, &p.out, NULL, NULL), TESSERA_INVALID_ARGUMENT,
               "plan: is NULL; it is required");
  EXPECT_ERROR(tessera_merge(NULL, 2, &p.out, NULL), TESSERA_INVALID_ARGUMENT,
               "partials: is NULL but n is 2; it is required");
  EXPECT_ERROR(tessera_merge(&p.out, -1, &p.out, NULL), TESSERA_INVALID_ARGUMENT,
               "n: is -1; merging needs at least one partial result");
  EXPECT_ERROR(tessera_dropout_mask(NULL, NULL, NULL, NULL), TESSERA_INVALID_ARGUMENT,
               "mask: is missing; it is required");
  p.in.q = NULL;
  EXPECT_ERROR(tessera_plan_forward(&p.in, &p.out, NULL, NULL, &plan), TESSERA_INVALID_ARGUMENT,
               "q: is missing; it is required");
  EXPECT(plan == NULL);
  EXPECT(tessera_plan_workspace_size(NULL) == 0);
  EXPECT(strcmp(tessera_plan_kernel(NULL), "") == 0);
  EXPECT(strcmp(tessera_plan_describe(NULL), "") == 0);
}

static void* fail_elsewhere(void* unused) {
  (void)unused;
  EXPECT(strcmp(tessera_last_error(), "") == 0);
  EXPECT_ERROR(tessera_merge(NULL, 0, NULL, NULL), TESSERA_INVALID_ARGUMENT,
               "n: is 0; merging needs at least one partial result");
  return NULL;
}

static void test_last_error_is_per_thread(void) {
  Problem p;
  pthread_t thread;
  set_up(&p);
  EXPECT(tessera_forward(NULL, NULL, NULL, NULL) == TESSERA_INVALID_ARGUMENT);
  EXPECT(pthread_create(&thread, NULL, fail_elsewhere, NULL) == 0);
  EXPECT(pthread_join(thread, NULL) == 0);
  EXPECT(strcmp(tessera_last_error(), "inputs: is NULL; it is required") == 0);
  EXPECT(tessera_forward(&p.in, &p.out, NULL, NULL) == TESSERA_OK); /* success leaves the sentence alone */
  EXPECT(strcmp(tessera_last_error(), "inputs: is NULL; it is required") == 0);
}

int main(void) {
  EXPECT(strcmp(tessera_last_error(), "") == 0);
  EXPECT(tessera_version() == TESSERA_VERSION_MAJOR * 10000 + TESSERA_VERSION_MINOR * 100 + TESSERA_VERSION_PATCH);
  EXPECT(strstr(tessera_info(), "kernels") != NULL);
  test_attention();
  test_plan();
  test_merge();
  test_state();
  test_dropout_mask();
  test_struct_sizes();
  test_every_struct_size();
  test_partials_of_several_sizes();
  test_null_arguments();
  test_last_error_is_per_thread();
  if (failures) fprintf(stderr, "%d failures\n", failures);
  return failures != 0;
}
