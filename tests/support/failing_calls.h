/* SPDX-License-Identifier: Apache-2.0 */
/* System calls that fail, or end the process, at a chosen moment. failing_calls.c stands before the C library: linked
 * into a test, or loaded into a program by LD_PRELOAD, where it reads its orders from the environment:
 * FAILING_CALL="KIND:N:ERROR", FAILING_CALL_UNDER=FOLDER, FAILING_CALL_REPORT=FILE. */
#ifndef TESSERA_TESTS_FAILING_CALLS_H
#define TESSERA_TESTS_FAILING_CALLS_H

#ifdef __cplusplus
extern "C" {
#endif

/* From now on the n-th call (from 1) of this kind that concerns something under the folder fails with `error`; where
 * error is 0, the process is killed instead, before the call. Kinds: open, write, short (a write that takes one byte),
 * fsync, close (the descriptor is closed all the same), rename, link, unlink, mkdir, flock. */
void failing_calls_order(const char* kind, int n, int error, const char* folder);

/* Whether that moment has come. */
int failing_calls_happened(void);

/* Called once, before the n-th call, which then goes on: for races with somebody else. Null: none. */
void failing_calls_meanwhile(void (*function)(void));

#ifdef __cplusplus
}
#endif
#endif
