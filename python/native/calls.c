/* SPDX-License-Identifier: Apache-2.0 */
/* What a call from PyTorch costs the host, without the interpreter: reads tensors through DLPack's C exchange interface
 * and runs a prepared plan. python/tessera/_native.py loads this library and says what is whose.
 *
 * Of Python only its stable ABI is used, declared here, so that one file serves every version and none of its headers
 * is needed; of PyTorch nothing. libtessera is called by the addresses that are handed over. */
#include <stdint.h>
#include <string.h>

/* --- Python's stable ABI, as far as it is used here --- */

typedef struct Object Object;
typedef struct ThreadState ThreadState;
typedef intptr_t Size;

typedef struct {
  const char* name;
  Object* (*function)(Object* self, Object* const* arguments, Size count);
  int flags;
  const char* help;
} MethodDef;

enum { FASTCALL = 0x80 };

extern Object* PyCFunction_NewEx(MethodDef* method, Object* self, Object* module);
extern Object* PyTuple_Pack(Size count, ...);
extern Object* PyBytes_FromStringAndSize(const char* data, Size size);
extern int PyBytes_AsStringAndSize(Object* object, char** data, Size* size);
extern Object* PyLong_FromLong(long value);
extern void* PyLong_AsVoidPtr(Object* number);
extern Object* PyObject_Type(Object* object);
extern Object* PyObject_CallFunctionObjArgs(Object* callable, ...);
extern void* PyCapsule_GetPointer(Object* capsule, const char* name);
extern Object* PyErr_Occurred(void);
extern void PyErr_Clear(void);
extern void PyErr_SetString(Object* type, const char* message);
extern ThreadState* PyEval_SaveThread(void);
extern void PyEval_RestoreThread(ThreadState* state);
extern void Py_IncRef(Object* object);
extern void Py_DecRef(Object* object);
extern Object* PyExc_RuntimeError;
extern Object _Py_NoneStruct, _Py_FalseStruct; /* None and False: what the stable ABI's macros name */

/* --- DLPack's, of major version 1 --- */

typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
} DlTensor;

typedef struct Exchange {
  uint32_t major, minor;
  const struct Exchange* older;
  void *allocate, *own, *give; /* of tensors that are kept, which none is here */
  int (*view)(void* object, DlTensor* tensor);
  void* current_stream;
} Exchange;

/* --- what is kept --- */

enum { MAX_TENSORS = 40, MAX_NDIM = 4, CPU = 1, CUDA = 2, ALIGNMENT = 16 };

/* Set once, when the library is loaded, and never again: calls of all threads read it. */
static struct {
  const Exchange* exchange;
  Object* type;   /* torch.Tensor */
  Object* is_neg; /* its method */
} torch;

/* A prepared call, as _native.py's Prepared: the C structs of a plan, and where addresses are written before it runs.
 */
typedef struct {
  void* run;          /* tessera_plan_run_forward or tessera_plan_run_backward */
  void* arguments[6]; /* the plan and its structs; the last is NULL in a forward pass */
  void** stream;      /* of tessera_execution */
  void** workspace;   /* the same */
  int64_t count;      /* of tensors */
  void** data[MAX_TENSORS];
} Prepared;

typedef int (*RunForward)(void*, void*, void*, void*, void*);
typedef int (*RunBackward)(void*, void*, void*, void*, void*, void*);

/* A tensor's part of a key; its sizes and strides follow. */
typedef struct {
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
} Header;

static Object* none(void) {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

/* Whether it is a tensor, not of a derived class, whose numbers lie where it says and mean what they are. Tensors that
 * only stand for something (of transforms, lazily negated, of zeros without memory) are not. */
static int plain(Object* object, DlTensor* t) {
  Object* type = PyObject_Type(object);
  Py_DecRef(type);
  if (type != torch.type || torch.exchange->view(object, t) != 0) return 0;
  if ((t->device_type != CPU && t->device_type != CUDA) || t->ndim < 1 || t->ndim > MAX_NDIM || !t->data) return 0;
  Object* negated = PyObject_CallFunctionObjArgs(torch.is_neg, object, NULL);
  if (!negated) return 0;
  Py_DecRef(negated);
  return negated == &_Py_FalseStruct;
}

/* describe(*tensors) -> (key, addresses), two bytes objects, or None where one of them is not plain. Some may be None.
 */
static Object* describe(Object* self, Object* const* arguments, Size count) {
  (void)self;
  char key[MAX_TENSORS * (sizeof(Header) + 2 * MAX_NDIM * sizeof(int64_t)) + 1];
  void* addresses[MAX_TENSORS];
  uintptr_t bits = 0;
  char* end = key;
  Size given = 0;
  if (!torch.exchange || count > MAX_TENSORS) return none();
  for (Size i = 0; i < count; ++i) {
    Header header;
    memset(&header, 0, sizeof header);
    if (arguments[i] == &_Py_NoneStruct) {
      memcpy(end, &header, sizeof header);
      end += sizeof header;
      continue;
    }
    DlTensor t;
    if (!plain(arguments[i], &t)) {
      PyErr_Clear();
      return none();
    }
    header.device_type = t.device_type, header.device_id = t.device_id, header.ndim = t.ndim;
    header.code = t.code, header.bits = t.bits, header.lanes = t.lanes;
    memcpy(end, &header, sizeof header);
    end += sizeof header;
    const size_t bytes = (size_t)t.ndim * sizeof(int64_t);
    memcpy(end, t.shape, bytes);
    memcpy(end + bytes, t.strides, bytes);
    end += 2 * bytes;
    addresses[given] = (char*)t.data + t.byte_offset;
    bits |= (uintptr_t)addresses[given++];
  }
  *end++ = (char)(bits % ALIGNMENT); /* a plan asks for what all pointers have in common */
  Object* seen = PyBytes_FromStringAndSize(key, end - key);
  Object* where = PyBytes_FromStringAndSize((const char*)addresses, given * (Size)sizeof(void*));
  Object* result = seen && where ? PyTuple_Pack(2, seen, where) : NULL;
  if (seen) Py_DecRef(seen);
  if (where) Py_DecRef(where);
  return result;
}

static Object* failed(const char* message) {
  PyErr_SetString(PyExc_RuntimeError, message);
  return NULL;
}

/* run(prepared, addresses, stream, workspace, *results) -> status. The results' addresses come after the others. */
static Object* run(Object* self, Object* const* arguments, Size count) {
  (void)self;
  if (count < 4) return failed("tessera: run takes a call, addresses, a stream and a workspace");
  const Prepared* call = (const Prepared*)PyLong_AsVoidPtr(arguments[0]);
  char* addresses;
  Size size;
  if (!call || PyBytes_AsStringAndSize(arguments[1], &addresses, &size) != 0) return NULL;
  const Size before = size / (Size)sizeof(void*), results = count - 4;
  if (before + results != call->count)
    return failed("tessera: a call is run with another number of tensors than planned");
  for (Size i = 0; i < before; ++i) memcpy(call->data[i], addresses + i * (Size)sizeof(void*), sizeof(void*));
  for (Size i = 0; i < results; ++i) {
    DlTensor t;
    if (torch.exchange->view(arguments[4 + i], &t) != 0) return NULL;
    *call->data[before + i] = (char*)t.data + t.byte_offset;
  }
  *call->stream = PyLong_AsVoidPtr(arguments[2]);
  *call->workspace = PyLong_AsVoidPtr(arguments[3]);
  if (PyErr_Occurred()) return NULL;
  void* const* a = call->arguments;
  ThreadState* state = PyEval_SaveThread();
  const int status = a[5] ? ((RunBackward)(uintptr_t)call->run)(a[0], a[1], a[2], a[3], a[4], a[5])
                          : ((RunForward)(uintptr_t)call->run)(a[0], a[1], a[2], a[3], a[4]);
  PyEval_RestoreThread(state);
  return PyLong_FromLong(status);
}

static MethodDef methods[] = {
    {"describe", describe, FASTCALL, "describe(*tensors) -> (key, addresses), or None where one is not plain"},
    {"run", run, FASTCALL, "run(prepared, addresses, stream, workspace, *results) -> status"},
};

#define EXPORTED __attribute__((visibility("default")))

EXPORTED const int64_t tessera_python_prepared_size = sizeof(Prepared);

/* (describe, run) for a PyTorch with this capsule, torch.Tensor.__dlpack_c_exchange_api__; NULL and an exception, or
 * None where its interface is of another version. */
EXPORTED Object* tessera_python_functions(Object* capsule, Object* type, Object* is_neg) {
  const Exchange* exchange = (const Exchange*)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!exchange) return NULL;
  while (exchange && exchange->major != 1) exchange = exchange->older;
  if (!exchange || !exchange->view) return none();
  Py_IncRef(type);
  Py_IncRef(is_neg);
  torch.exchange = exchange, torch.type = type, torch.is_neg = is_neg;
  Object* first = PyCFunction_NewEx(&methods[0], NULL, NULL);
  Object* second = PyCFunction_NewEx(&methods[1], NULL, NULL);
  Object* functions = first && second ? PyTuple_Pack(2, first, second) : NULL;
  if (first) Py_DecRef(first);
  if (second) Py_DecRef(second);
  return functions;
}
