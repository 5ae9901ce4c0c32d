/* SPDX-License-Identifier: Apache-2.0 */
/* What the C++ runtime of this compiler asks of glibc and an older glibc does not have. Compiled into libtessera.so by
 * glibc.cmake beside it, for wheels that are to run there; nothing leaves the library (src/exports.map).
 * A function that a newer compiler's runtime needs and that is missing here ends the link with its name. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>

#if !__GLIBC_PREREQ(2, 35)
#error "a compiler's runtime made with this glibc needs no shims for a newer one: build without TESSERA_GLIBC"
#endif

/* 2.33: before it, these were inline calls of functions that take a version of the struct. */
#if defined(__x86_64__)
enum { stat_version = 1 };
#else
enum { stat_version = 0 };
#endif
int __fxstat(int version, int file, struct stat* out);
int __fxstatat(int version, int folder, const char* path, struct stat* out, int flags);

int fstat(int file, struct stat* out) { return __fxstat(stat_version, file, out); }
int fstatat(int folder, const char* path, struct stat* out, int flags) {
  return __fxstatat(stat_version, folder, path, out, flags);
}
/* On 64-bit systems both structs are one. */
int fstat64(int file, struct stat64* out) { return __fxstat(stat_version, file, (struct stat*)out); }

/* 2.32: "perhaps several threads" is always a right answer. */
char __libc_single_threaded = 0;

/* 2.36, for std::random_device. */
uint32_t arc4random(void) {
  uint32_t bits = 0;
  while (getrandom(&bits, sizeof bits, 0) != (ssize_t)sizeof bits) {
    if (errno != EINTR) abort();
  }
  return bits;
}

/* 2.35, for exceptions: where the unwinding tables of the code at an address are. */
struct search {
  uintptr_t address;
  struct dl_find_object* out;
};

static int look_into_object(struct dl_phdr_info* object, size_t size, void* argument) {
  (void)size;
  struct search* search = argument;
  uintptr_t start = UINTPTR_MAX, end = 0, tables = 0;
  int inside = 0;
  for (int i = 0; i < object->dlpi_phnum; i++) {
    const ElfW(Phdr)* part = &object->dlpi_phdr[i];
    const uintptr_t from = object->dlpi_addr + part->p_vaddr, to = from + part->p_memsz;
    if (part->p_type == PT_GNU_EH_FRAME) tables = from;
    if (part->p_type != PT_LOAD) continue;
    if (from < start) start = from;
    if (to > end) end = to;
    inside |= search->address >= from && search->address < to;
  }
  if (!inside || tables == 0) return 0;
  memset(search->out, 0, sizeof *search->out);
  search->out->dlfo_map_start = (void*)start;
  search->out->dlfo_map_end = (void*)end;
  search->out->dlfo_eh_frame = (void*)tables;
  return 1;
}

int _dl_find_object(void* address, struct dl_find_object* out) {
  struct search search = {(uintptr_t)address, out};
  return dl_iterate_phdr(look_into_object, &search) == 1 ? 0 : -1;
}
