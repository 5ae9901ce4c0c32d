/* SPDX-License-Identifier: Apache-2.0 */
/* Attention with Tessera from C99: forward, backward, and what an error looks like.
 * A program of its own: copy it. Builds against an installed library, with CMake or pkg-config.
 * What is computed: docs/algorithm.md. */
#include <stdio.h>
#include <stdlib.h>
#include <tessera/tessera.h>

enum { BATCH = 2, TOKENS = 256, HEADS = 4, DIM = 64, SIZE = BATCH * TOKENS * HEADS * DIM };

/* A view of contiguous floats [BATCH, TOKENS, HEADS, DIM]. The library never owns memory. */
static tessera_tensor view(float* data) {
  const int64_t shape[4] = {BATCH, TOKENS, HEADS, DIM};
  tessera_tensor tensor;
  int64_t stride = 1;
  tessera_tensor_init(&tensor); /* sets the struct's size and the defaults: CPU, f32 */
  tensor.data = data;
  tensor.type = TESSERA_F32;
  tensor.ndim = 4;
  for (int i = 3; i >= 0; --i) {
    tensor.shape[i] = shape[i];
    tensor.strides[i] = stride;
    stride *= shape[i];
  }
  return tensor;
}

static float* random_floats(void) {
  float* data = malloc(SIZE * sizeof *data);
  if (!data) abort();
  for (int i = 0; i < SIZE; ++i) data[i] = 2.0f * (float)rand() / (float)RAND_MAX - 1.0f;
  return data;
}

static int failed(const char* what) {
  fprintf(stderr, "%s failed: %s\n", what, tessera_last_error());
  return 1;
}

int main(void) {
  float *q_data = random_floats(), *v_data = random_floats(), *o_data = random_floats(), *dq_data = random_floats();
  float* lse_data = malloc(BATCH * HEADS * TOKENS * sizeof *lse_data);
  tessera_tensor q = view(q_data), k = view(random_floats()), v = view(v_data), o = view(o_data);
  tessera_tensor d_o = view(random_floats()), dq = view(dq_data), dk = view(random_floats()),
                 dv = view(random_floats());

  tessera_tensor lse; /* [BATCH, HEADS, TOKENS] */
  tessera_tensor_init(&lse);
  lse.data = lse_data;
  lse.type = TESSERA_F32;
  lse.ndim = 3;
  lse.shape[0] = BATCH, lse.shape[1] = HEADS, lse.shape[2] = TOKENS;
  lse.strides[0] = HEADS * TOKENS, lse.strides[1] = TOKENS, lse.strides[2] = 1;

  /* Every struct has an _init function; fields that you do not set keep their defaults. */
  tessera_inputs inputs;
  tessera_outputs outputs;
  tessera_saved saved;
  tessera_gradients gradients;
  tessera_options options;
  tessera_inputs_init(&inputs);
  tessera_outputs_init(&outputs);
  tessera_saved_init(&saved);
  tessera_gradients_init(&gradients);
  tessera_options_init(&options);
  inputs.q = &q, inputs.k = &k, inputs.v = &v;
  outputs.o = &o, outputs.lse = &lse;
  saved.o = &o, saved.lse = &lse, saved.d_o = &d_o;
  gradients.dq = &dq, gradients.dk = &dk, gradients.dv = &dv;
  options.causal = 1;

  /* NULL for the execution: the best kernel here, all threads, workspace allocated for the call. */
  if (tessera_forward(&inputs, &outputs, &options, NULL) != TESSERA_OK) return failed("forward");
  if (tessera_backward(&inputs, &saved, &gradients, &options, NULL) != TESSERA_OK) return failed("backward");
  printf("Tessera %d: O[0] = %.6f, dQ[last] = %.3e\n", tessera_version(), o_data[0], dq_data[SIZE - 1]);

  /* The first row of a causal problem sees one key, so its output is that key's value: a check that anyone can do. */
  if (o_data[0] != v_data[0]) return fprintf(stderr, "O[0] should be V[0]\n"), 1;

  /* An error is a status and one sentence that names the argument, its value and the rule. Nothing is written then. */
  options.softcap = -1;
  if (tessera_forward(&inputs, &outputs, &options, NULL) != TESSERA_INVALID_ARGUMENT)
    return fprintf(stderr, "a negative softcap should be an error\n"), 1;
  printf("an error reads: %s\n", tessera_last_error());

  free(q_data), free(k.data), free(v_data), free(o_data), free(d_o.data), free(dq_data), free(dk.data), free(dv.data);
  free(lse_data);
  return 0;
}
