/* SPDX-License-Identifier: Apache-2.0 */
/* Append from C99, in numbers that can be checked by hand, and its struct with every size, in memory of that size.
 * Links the shared library alone. Implements include/tessera/tessera.h. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera/tessera.h"

static int failures = 0;

#define EXPECT(condition)                                             \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                     \
    }                                                                 \
  } while (0)

/* One token of one head and two dims, and the cache of a sequence of three. */
typedef struct NewToken {
  float token[2], k_cache[6], v_cache[6], cos[3], sin[3];
  int32_t used;
  tessera_tensor k_new, v_new, k, v, seqused_k, rotary_cos, rotary_sin;
  tessera_append_args args;
} NewToken;

static void view(tessera_tensor* t, void* data, int ndim, const int64_t* shape) {
  int i;
  int64_t stride = 1;
  tessera_tensor_init(t);
  t->data = data, t->ndim = ndim;
  for (i = ndim - 1; i >= 0; --i) t->shape[i] = shape[i], t->strides[i] = stride, stride *= shape[i];
}

static void set_up(NewToken* t) {
  const int64_t one[] = {1, 1, 1, 2}, cache[] = {1, 3, 1, 2}, angles[] = {3, 1}, length[] = {1};
  memset(t, 0, sizeof(*t));
  t->token[0] = 3, t->token[1] = 5, t->used = 2;
  t->sin[1] = 1; /* a quarter turn */
  view(&t->k_new, t->token, 4, one), view(&t->v_new, t->token, 4, one);
  view(&t->k, t->k_cache, 4, cache), view(&t->v, t->v_cache, 4, cache);
  view(&t->rotary_cos, t->cos, 2, angles), view(&t->rotary_sin, t->sin, 2, angles);
  view(&t->seqused_k, &t->used, 1, length), t->seqused_k.type = TESSERA_I32;
  tessera_append_args_init(&t->args);
  t->args.k_new = &t->k_new, t->args.v_new = &t->v_new, t->args.k = &t->k, t->args.v = &t->v;
  t->args.seqused_k = &t->seqused_k, t->args.rotary_cos = &t->rotary_cos, t->args.rotary_sin = &t->rotary_sin;
}

static void test_a_token(void) {
  const float k[] = {0, 0, -5, 3, 0, 0}, v[] = {0, 0, 3, 5, 0, 0};
  NewToken t;
  set_up(&t);
  EXPECT(tessera_append(&t.args, NULL) == TESSERA_OK);
  EXPECT(memcmp(t.k_cache, k, sizeof(k)) == 0 && memcmp(t.v_cache, v, sizeof(v)) == 0);
  EXPECT(tessera_append(NULL, NULL) == TESSERA_INVALID_ARGUMENT);
  EXPECT(strcmp(tessera_last_error(), "append_args: is NULL; it is required") == 0);
}

/* All fields but two are pointers. Sizes that end with a field are read, as an older header's. */
static void test_every_size(void) {
  const size_t whole = sizeof(tessera_append_args);
  size_t size;
  for (size = 0; size <= whole + 8; ++size) {
    const int ends = size >= sizeof(size_t) && size <= whole &&
                     (size % sizeof(void*) == 0 || size == offsetof(tessera_append_args, reserved));
    NewToken t;
    char* memory = calloc(1, size < sizeof(size_t) ? sizeof(size_t) : size);
    tessera_status status;
    set_up(&t);
    memcpy(memory, &t.args, size < whole ? size : whole);
    memcpy(memory, &size, sizeof(size));
    status = tessera_append((const tessera_append_args*)memory, NULL);
    if (!ends) EXPECT(status == TESSERA_INVALID_ARGUMENT && strstr(tessera_last_error(), "append_args: size is"));
    if (ends) EXPECT(status == TESSERA_OK || strstr(tessera_last_error(), "size is") == NULL);
    if (size == whole) EXPECT(status == TESSERA_OK);
    free(memory);
  }
}

int main(void) {
  test_a_token();
  test_every_size();
  if (failures == 0) puts("append_c_test: all passed");
  return failures != 0;
}
