/* SPDX-License-Identifier: Apache-2.0 */
/* See failing_calls.h. Everything here goes to the kernel directly, so that it counts nothing of its own. */
#define _GNU_SOURCE
#include "failing_calls.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char ordered_kind[16], ordered_folder[PATH_MAX];
static int calls_left, ordered_error, happened;
static void (*ordered_function)(void);

void failing_calls_order(const char* kind, int n, int error, const char* folder) {
  snprintf(ordered_kind, sizeof ordered_kind, "%s", kind);
  snprintf(ordered_folder, sizeof ordered_folder, "%s", folder);
  calls_left = n, ordered_error = error, happened = 0;
  ordered_function = NULL;
}

int failing_calls_happened(void) { return happened; }

void failing_calls_meanwhile(void (*function)(void)) { ordered_function = function; }

__attribute__((constructor)) static void read_orders(void) {
  const char *order = getenv("FAILING_CALL"), *folder = getenv("FAILING_CALL_UNDER");
  char kind[16];
  int n, error;
  if (order && folder && sscanf(order, "%15[a-z]:%d:%d", kind, &n, &error) == 3)
    failing_calls_order(kind, n, error, folder);
}

static int begins_with_folder(const char* path) {
  return ordered_folder[0] && strncmp(path, ordered_folder, strlen(ordered_folder)) == 0;
}

static int descriptor_is_concerned(int descriptor) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  return begins_with_folder(path);
}

static int path_is_concerned(int folder, const char* path) {
  return path[0] == '/' ? begins_with_folder(path) : folder != AT_FDCWD && descriptor_is_concerned(folder);
}

/* Asked first: where nothing is ordered, nothing else happens here, on however small a stack. */
static int is_awaited(const char* kind) { return calls_left > 0 && strcmp(kind, ordered_kind) == 0; }

/* Whether this call, of the awaited kind and of the folder, is the one that has been ordered. */
static int is_the_one(void) {
  if (--calls_left > 0) return 0;
  happened = 1;
  const char* report = getenv("FAILING_CALL_REPORT");
  if (report) syscall(SYS_close, syscall(SYS_openat, AT_FDCWD, report, O_CREAT | O_WRONLY, 0600));
  if (ordered_function) {
    ordered_function();
    return 0;
  }
  if (ordered_error == 0) kill(getpid(), SIGKILL);
  errno = ordered_error;
  return 1;
}

static int open_file(int folder, const char* path, int flags, mode_t mode) {
  if (is_awaited("open") && path_is_concerned(folder, path) && is_the_one()) return -1;
  return (int)syscall(SYS_openat, folder, path, flags, mode);
}

static mode_t mode_of(int flags, va_list arguments) { return flags & O_CREAT ? (mode_t)va_arg(arguments, int) : 0; }

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_file(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return open_file(folder, path, flags, mode);
}

ssize_t write(int file, const void* bytes, size_t count) {
  if (is_awaited("write") && descriptor_is_concerned(file) && is_the_one()) return -1;
  const int is_short = is_awaited("short") && count > 0 && descriptor_is_concerned(file) && is_the_one();
  return syscall(SYS_write, file, bytes, is_short ? 1 : count);
}

int fsync(int file) {
  return is_awaited("fsync") && descriptor_is_concerned(file) && is_the_one() ? -1 : (int)syscall(SYS_fsync, file);
}

int close(int file) {
  const int fails = is_awaited("close") && descriptor_is_concerned(file) && is_the_one(), error = errno;
  const int result = (int)syscall(SYS_close, file);
  if (fails) errno = error;
  return fails ? -1 : result;
}

int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  if (is_awaited("rename") && path_is_concerned(to_folder, to) && is_the_one()) return -1;
  return (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, 0);
}

int rename(const char* from, const char* to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  if (is_awaited("link") && path_is_concerned(to_folder, to) && is_the_one()) return -1;
  return (int)syscall(SYS_linkat, from_folder, from, to_folder, to, flags);
}

int unlinkat(int folder, const char* path, int flags) {
  if (is_awaited("unlink") && path_is_concerned(folder, path) && is_the_one()) return -1;
  return (int)syscall(SYS_unlinkat, folder, path, flags);
}

int mkdir(const char* path, mode_t mode) {
  if (is_awaited("mkdir") && path_is_concerned(AT_FDCWD, path) && is_the_one()) return -1;
  return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int flock(int file, int operation) {
  return is_awaited("flock") && descriptor_is_concerned(file) && is_the_one()
             ? -1
             : (int)syscall(SYS_flock, file, operation);
}
