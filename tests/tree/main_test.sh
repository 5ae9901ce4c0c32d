#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# That tests which run no case do not pass: tests/support/main.cpp and available_kernels(). Usage: main_test.sh TEST [AMX-TEST],
# two programs of the tests: any that asks for kernels, and one with an emulated matrix unit where there is one.
set -uo pipefail
failures=0

# expect STATUS WORDS COMMAND...
expect() {
  local wanted=$1 words=$2 output status
  shift 2
  output=$(env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX "$@" 2>&1)
  status=$?
  if [[ $status != "$wanted" || $output != *"$words"* ]]; then
    echo "$*: status $status instead of $wanted, or without the words '$words':"$'\n'"$output"
    failures=$((failures + 1))
  fi
}

expect 1 "has no test to run" "$1" --gtest_filter=None.*
expect 1 "has no test to run" GTEST_TOTAL_SHARDS=1000 GTEST_SHARD_INDEX=999 "$1"
expect 1 "kernel: is 'magic'; must be one of" TESSERA_TEST_KERNELS=magic "$1"
expect 1 "TESSERA_ISA: is 'magic'; must be empty or one of" TESSERA_ISA=magic "$1"
if [[ $(uname -m) == x86_64 ]]; then
  expect 1 "TESSERA_TEST_KERNELS: no kernel that it names runs" TESSERA_ISA=sse4 TESSERA_TEST_KERNELS=avx2 "$1"
fi
if [[ $# -gt 1 ]]; then
  expect 77 "SKIPPED: the emulated matrix unit needs AVX-512" TESSERA_ISA=avx2 TESSERA_TEST_KERNELS=amx "$2"
fi
exit $((failures > 0))
