/* SPDX-License-Identifier: Apache-2.0 */
/* Loaded into a program by LD_PRELOAD, runs its main() again and again in forked children, each with another allocation
 * that fails. Orders come from the descriptor that $FAILING_MEMORY names, one byte string "N M\n" each: the N-th
 * allocation of main() fails (0: none), and with M = 1 all that follow. The answer, written to the descriptor after it:
 * the child's status as waitpid tells it, and whether an allocation failed. See memory_test.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

static long counted, chosen;
static int and_all_after, *failed;

static int fails(void) {
  if (chosen == 0) return 0;
  const long number = __atomic_add_fetch(&counted, 1, __ATOMIC_RELAXED);
  if (and_all_after ? number < chosen : number != chosen) return 0;
  *failed = 1;
  errno = ENOMEM;
  return 1;
}

void* malloc(size_t bytes) { return fails() ? NULL : __libc_malloc(bytes); }
void* calloc(size_t count, size_t bytes) { return fails() ? NULL : __libc_calloc(count, bytes); }
void* realloc(void* memory, size_t bytes) { return fails() ? NULL : __libc_realloc(memory, bytes); }
void* memalign(size_t alignment, size_t bytes) { return fails() ? NULL : __libc_memalign(alignment, bytes); }
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  void* made = memalign(alignment, bytes);
  if (!made) return ENOMEM;
  *memory = made;
  return 0;
}

static int (*real_main)(int, char**, char**);

static int serve(int argc, char** argv, char** envp) {
  const char* descriptor = getenv("FAILING_MEMORY");
  if (!descriptor) return real_main(argc, argv, envp);
  const int orders = atoi(descriptor), answers = orders + 1;
  failed = mmap(NULL, sizeof *failed, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  char order[64];
  for (long count; (count = read(orders, order, sizeof order - 1)) > 0;) {
    long n = 0;
    int all = 0;
    order[count] = '\0';
    if (sscanf(order, "%ld %d", &n, &all) != 2) return 99;
    *failed = 0;
    const pid_t child = fork();
    if (child == 0) {
      close(orders), close(answers);
      alarm(100);
      and_all_after = all, chosen = n;
      const int status = real_main(argc, argv, envp);
      chosen = 0; /* what the C library does at the end is its own */
      exit(status);
    }
    int status = 0;
    waitpid(child, &status, 0);
    dprintf(answers, "%d %d\n", status, *failed);
  }
  return 0;
}

int __libc_start_main(int (*program)(int, char**, char**), int argc, char** argv, void (*init)(void),
                      void (*fini)(void), void (*loader_fini)(void), void* stack_end) {
  int (*next)(int (*)(int, char**, char**), int, char**, void (*)(void), void (*)(void), void (*)(void), void*);
  *(void**)&next = dlsym(RTLD_NEXT, "__libc_start_main");
  real_main = program;
  return next(serve, argc, argv, init, fini, loader_fini, stack_end);
}
