/* SPDX-License-Identifier: Apache-2.0 */
/* What a call from PyTorch costs the host, without the interpreter: reads tensors through DLPack's C exchange interface
 * and runs a prepared plan, or answers a question that was asked before. python/tessera/_native.py loads this library
 * and says what is whose.
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
extern Object* PyTuple_New(Size count);
extern Object* PyTuple_Pack(Size count, ...);
extern Size PyTuple_Size(Object* tuple);
extern Object* PyTuple_GetItem(Object* tuple, Size place);           /* borrowed, as of all containers here */
extern int PyTuple_SetItem(Object* tuple, Size place, Object* item); /* which is the tuple's then */
extern Size PyList_Size(Object* list);
extern Object* PyList_GetItem(Object* list, Size place);
extern int PyList_SetSlice(Object* list, Size begin, Size end, Object* items);
extern int PyList_Append(Object* list, Object* item);
extern Object* PyDict_Copy(Object* dict);
extern Object* PyDict_GetItemWithError(Object* dict, Object* key);
extern Object* PyIter_Next(Object* iterator);
extern Object* PyUnicode_InternFromString(const char* text);
extern Object* PyBytes_FromStringAndSize(const char* data, Size size);
extern int PyBytes_AsStringAndSize(Object* object, char** data, Size* size);
extern Object* PyLong_FromLong(long value);
extern long PyLong_AsLong(Object* number);
extern void* PyLong_AsVoidPtr(Object* number);
extern Object* PyObject_Type(Object* object);
extern Object* PyObject_GetAttr(Object* object, Object* name);
extern int PyObject_SetAttr(Object* object, Object* name, Object* value);
extern Object* PyObject_Call(Object* callable, Object* arguments, Object* keywords);
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
extern Object PyTuple_Type;

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
  Object* type;       /* torch.Tensor */
  Object* is_neg;     /* its method */
  Object* empty_like; /* torch.empty_like */
  Object* empty;      /* torch.empty */
  Object* raw_stream; /* an index of a GPU -> its current stream, as a number */
} torch;
static struct {
  Object* kept;  /* _call.questions': key -> question */
  Object* clock; /* their iterator of times */
} questions;
static struct { Object *quick, *last_use, *prepared; } names;

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

/* Of tensors: what of a question's key is theirs, and their addresses. */
typedef struct {
  char key[MAX_TENSORS * (sizeof(Header) + 2 * MAX_NDIM * sizeof(int64_t)) + 1];
  Size size; /* of the key */
  void* addresses[MAX_TENSORS];
  Size given; /* so many addresses */
} Look;

/* Whether all of them are plain. Some may be None. */
static int look_at(Look* look, Object* const* tensors, Size count) {
  uintptr_t bits = 0;
  char* end = look->key;
  look->given = 0;
  if (!torch.exchange || count > MAX_TENSORS) return 0;
  for (Size i = 0; i < count; ++i) {
    Header header;
    memset(&header, 0, sizeof header);
    if (tensors[i] == &_Py_NoneStruct) {
      memcpy(end, &header, sizeof header);
      end += sizeof header;
      continue;
    }
    DlTensor t;
    if (!plain(tensors[i], &t)) {
      PyErr_Clear();
      return 0;
    }
    header.device_type = t.device_type, header.device_id = t.device_id, header.ndim = t.ndim;
    header.code = t.code, header.bits = t.bits, header.lanes = t.lanes;
    memcpy(end, &header, sizeof header);
    end += sizeof header;
    const size_t bytes = (size_t)t.ndim * sizeof(int64_t);
    memcpy(end, t.shape, bytes);
    memcpy(end + bytes, t.strides, bytes);
    end += 2 * bytes;
    void* const address = (char*)t.data + t.byte_offset;
    look->addresses[look->given++] = address;
    bits |= (uintptr_t)address;
  }
  *end++ = (char)(bits % ALIGNMENT); /* a plan asks for what all pointers have in common */
  look->size = end - look->key;
  return 1;
}

/* describe(*tensors) -> (key, addresses), two bytes objects, or None where one of them is not plain. Some may be None.
 */
static Object* describe(Object* self, Object* const* arguments, Size count) {
  (void)self;
  Look look;
  if (!look_at(&look, arguments, count)) return none();
  Object* seen = PyBytes_FromStringAndSize(look.key, look.size);
  Object* where = PyBytes_FromStringAndSize((const char*)look.addresses, look.given * (Size)sizeof(void*));
  Object* result = seen && where ? PyTuple_Pack(2, seen, where) : NULL;
  if (seen) Py_DecRef(seen);
  if (where) Py_DecRef(where);
  return result;
}

static Object* failed(const char* message) {
  PyErr_SetString(PyExc_RuntimeError, message);
  return NULL;
}

static int other_count(void) {
  failed("tessera: a call is run with another number of tensors than planned");
  return -1;
}

/* Where a tensor's numbers are; NULL and an exception where that cannot be said. */
static void* address_of(Object* tensor, int* status) {
  DlTensor t;
  *status = torch.exchange->view(tensor, &t);
  return *status ? NULL : (char*)t.data + t.byte_offset;
}

/* A tessera_status. Other threads run Python meanwhile. */
static int run_plan(const Prepared* call) {
  void* const* a = call->arguments;
  ThreadState* state = PyEval_SaveThread();
  const int status = a[5] ? ((RunBackward)(uintptr_t)call->run)(a[0], a[1], a[2], a[3], a[4], a[5])
                          : ((RunForward)(uintptr_t)call->run)(a[0], a[1], a[2], a[3], a[4]);
  PyEval_RestoreThread(state);
  return status;
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
  if (before + results != call->count) return other_count(), NULL;
  for (Size i = 0; i < before; ++i) memcpy(call->data[i], addresses + i * (Size)sizeof(void*), sizeof(void*));
  for (Size i = 0; i < results; ++i) {
    int status;
    *call->data[before + i] = address_of(arguments[4 + i], &status);
    if (status) return NULL;
  }
  *call->stream = PyLong_AsVoidPtr(arguments[2]);
  *call->workspace = PyLong_AsVoidPtr(arguments[3]);
  if (PyErr_Occurred()) return NULL;
  return PyLong_FromLong(run_plan(call));
}

/* --- a question that was answered before: all of a call at once --- */

/* A tensor like that at a place, or torch.empty of a tuple of arguments and a dict, or None. */
static Object* make(Object* maker, Object* const* tensors, Size count) {
  if (maker == &_Py_NoneStruct) return none();
  Object* type = PyObject_Type(maker);
  Py_DecRef(type);
  if (type == &PyTuple_Type) {
    Object* keywords = PyDict_Copy(PyTuple_GetItem(maker, 1)); /* a TorchFunctionMode may write to them */
    Object* made = keywords ? PyObject_Call(torch.empty, PyTuple_GetItem(maker, 0), keywords) : NULL;
    if (keywords) Py_DecRef(keywords);
    return made;
  }
  const long place = PyLong_AsLong(maker);
  if (place < 0 || place >= count) return failed("tessera: a result is like a tensor that is not there");
  return PyObject_CallFunctionObjArgs(torch.empty_like, tensors[place], NULL);
}

enum { IDLE, DEVICE, WORKSPACE, FIRST_RESULT }; /* places in a question's `quick` */

/* Makes results into a tuple, whose addresses come after the others; 0, or -1 and an exception. */
static int make_results(const Prepared* call, Object* results, Object* quick, const Look* look, Object* const* tensors,
                        Size count) {
  Size given = look->given;
  if (given > call->count) return other_count();
  for (Size i = 0; i < given; ++i) *call->data[i] = look->addresses[i];
  const Size wanted = PyTuple_Size(results);
  for (Size i = 0; i < wanted; ++i) {
    Object* made = make(PyTuple_GetItem(quick, FIRST_RESULT + i), tensors, count);
    if (!made || PyTuple_SetItem(results, i, made) != 0) return -1;
    if (made == &_Py_NoneStruct) continue;
    if (given == call->count) return other_count();
    int status;
    *call->data[given++] = address_of(made, &status);
    if (status) return -1;
  }
  return given == call->count ? 0 : other_count();
}

/* The stream, and a workspace that lives until it is dropped; 0, or -1 and an exception. */
static int make_room(const Prepared* call, Object* quick, Object** room) {
  *call->stream = *call->workspace = NULL;
  Object* device = PyTuple_GetItem(quick, DEVICE);
  if (device == &_Py_NoneStruct) return 0;
  Object* stream = PyObject_CallFunctionObjArgs(torch.raw_stream, device, NULL);
  if (!stream) return -1;
  *call->stream = PyLong_AsVoidPtr(stream);
  Py_DecRef(stream);
  if (PyErr_Occurred()) return -1;
  *room = make(PyTuple_GetItem(quick, WORKSPACE), NULL, 0);
  if (!*room) return -1;
  int status = 0;
  if (*room != &_Py_NoneStruct) *call->workspace = address_of(*room, &status);
  return status;
}

static Object* run_quick(Object* made_call, Object* quick, const Look* look, Object* const* tensors, Size count) {
  Object* number = PyObject_GetAttr(made_call, names.prepared);
  if (!number) return NULL;
  const Prepared* call = (const Prepared*)PyLong_AsVoidPtr(number);
  Py_DecRef(number);
  Object* results = call ? PyTuple_New(PyTuple_Size(quick) - FIRST_RESULT) : NULL;
  if (!results) return NULL;
  Object* room = NULL;
  Object* answer = NULL;
  if (make_results(call, results, quick, look, tensors, count) == 0 && make_room(call, quick, &room) == 0) {
    const int status = run_plan(call);
    answer = status ? PyLong_FromLong(status) : results;
  }
  if (room) Py_DecRef(room);
  if (answer != results) Py_DecRef(results);
  return answer;
}

/* The question of these tensors, or NULL; its use is noted. */
static Object* find(Object* kind, Object* threads, const Look* look) {
  Object* seen = PyBytes_FromStringAndSize(look->key, look->size);
  Object* key = seen ? PyTuple_Pack(3, kind, seen, threads) : NULL;
  if (seen) Py_DecRef(seen);
  if (!key) return NULL;
  Object* question = PyDict_GetItemWithError(questions.kept, key);
  if (question) Py_IncRef(question);
  Py_DecRef(key);
  if (!question) return NULL;
  Object* now = PyIter_Next(questions.clock);
  const int status = now ? PyObject_SetAttr(question, names.last_use, now) : -1;
  if (now) Py_DecRef(now);
  if (status == 0) return question;
  Py_DecRef(question);
  return NULL;
}

/* answer(kind, threads, tensors) -> a tuple of results, or the status of a call that failed; None where a tensor is not
 * plain, or the question is new, has nothing `quick`, or has no idle call. The tensors are a tuple. */
static Object* answer(Object* self, Object* const* arguments, Size given) {
  (void)self;
  Object* tensors[MAX_TENSORS];
  Look look;
  const Size count = given == 3 ? PyTuple_Size(arguments[2]) : -1;
  if (count < 0)
    return PyErr_Occurred() ? NULL : failed("tessera: answer takes a kind, a number of threads and a tuple");
  if (count > MAX_TENSORS) return none();
  for (Size i = 0; i < count; ++i) tensors[i] = PyTuple_GetItem(arguments[2], i);
  if (!look_at(&look, tensors, count)) return none();
  Object* question = find(arguments[0], arguments[1], &look);
  if (!question) return PyErr_Occurred() ? NULL : none();
  Object* quick = PyObject_GetAttr(question, names.quick);
  Py_DecRef(question);
  if (!quick || quick == &_Py_NoneStruct) return quick;
  Object* idle = PyTuple_GetItem(quick, IDLE);
  const Size last = PyList_Size(idle) - 1;
  Object* result = NULL;
  if (last < 0) {
    result = none();
  } else {
    Object* call = PyList_GetItem(idle, last);
    Py_IncRef(call); /* ours alone while it runs: nothing between these lines lets another thread run */
    if (PyList_SetSlice(idle, last, last + 1, NULL) == 0) {
      result = run_quick(call, quick, &look, tensors, count);
      if (PyList_Append(idle, call) != 0 && result) {
        Py_DecRef(result);
        result = NULL;
      }
    }
    Py_DecRef(call);
  }
  Py_DecRef(quick);
  return result;
}

static MethodDef methods[] = {
    {"describe", describe, FASTCALL, "describe(*tensors) -> (key, addresses), or None where one is not plain"},
    {"run", run, FASTCALL, "run(prepared, addresses, stream, workspace, *results) -> status"},
    {"answer", answer, FASTCALL, "answer(kind, threads, tensors) -> results, a status, or None"},
};

#define EXPORTED __attribute__((visibility("default")))

EXPORTED const int64_t tessera_python_prepared_size = sizeof(Prepared);

/* (describe, run, answer) for a PyTorch with this capsule, torch.Tensor.__dlpack_c_exchange_api__, and these functions,
 * and for these questions; NULL and an exception, or None where its interface is of another version. */
EXPORTED Object* tessera_python_functions(Object* capsule, Object* type, Object* is_neg, Object* empty_like,
                                          Object* empty, Object* raw_stream, Object* kept, Object* clock) {
  const Exchange* exchange = (const Exchange*)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!exchange) return NULL;
  while (exchange && exchange->major != 1) exchange = exchange->older;
  if (!exchange || !exchange->view) return none();
  Object* const used[] = {type, is_neg, empty_like, empty, raw_stream, kept, clock};
  for (unsigned i = 0; i < sizeof used / sizeof *used; ++i) Py_IncRef(used[i]);
  torch.exchange = exchange, torch.type = type, torch.is_neg = is_neg;
  torch.empty_like = empty_like, torch.empty = empty, torch.raw_stream = raw_stream;
  questions.kept = kept, questions.clock = clock;
  names.quick = PyUnicode_InternFromString("quick");
  names.last_use = PyUnicode_InternFromString("last_use");
  names.prepared = PyUnicode_InternFromString("prepared");
  if (!names.quick || !names.last_use || !names.prepared) return NULL;
  enum { COUNT = sizeof methods / sizeof *methods };
  Object* functions = PyTuple_New(COUNT);
  for (Size i = 0; functions && i < COUNT; ++i) {
    Object* function = PyCFunction_NewEx(&methods[i], NULL, NULL);
    if (function && PyTuple_SetItem(functions, i, function) == 0) continue;
    Py_DecRef(functions);
    return NULL;
  }
  return functions;
}
