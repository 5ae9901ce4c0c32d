#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# static_objects.sh NM OBJECT...: the library's objects have no static object with a guard, and no thread-local one with
# a destructor. Run by ctest with all the library's objects.
# Such objects hang in a forked child or end a process without memory: see docs/cpu_kernels.md, "Memory that runs out".
set -eu
nm=$1
shift

failed=0
for object in "$@"; do
  # _ZGV: a guard. __cxa_thread_atexit: a thread-local destructor. __once_proxy: std::call_once.
  found=$("$nm" --no-demangle "$object" | grep -E ' (_ZGV.*7tessera|__cxa_thread_atexit|__once_proxy)' || true)
  # std::future in the memory of loaded GPU kernels, which a forked child does not reach.
  case $object in
    */cuda/jit/cache.cpp.o) found=$(printf '%s' "$found" | grep -v __once_proxy || true) ;;
  esac
  if [ -n "$found" ]; then
    failed=1
    echo "$object has static objects that are made late (use Once or PerThread of src/core):"
    printf '%s\n' "$found"
  fi
done

if [ $# -lt 10 ]; then
  echo "only $# objects given"
  exit 1
fi
echo "$# objects checked"
exit "$failed"
