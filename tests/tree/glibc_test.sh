#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Links the library's objects for glibc 2.28, as wheels are (packaging/glibc), and looks at what the result asks of a
# system; then runs an example with it, which throws and catches inside the library.
# Usage: glibc_test.sh SOURCE-FOLDER OBJECTS... Registered by tests/tree/tests.cmake.
set -euo pipefail
source_folder=$(realpath "$1")
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
limit=2.28

fail() {
  echo "glibc_test: $1" >&2
  exit 1
}

newest() { # the newest version of glibc that a file asks for
  readelf -W --dyn-syms "$1" | grep -oE '@GLIBC_[0-9.]+' | grep -oE '[0-9.]+' | sort -uV | tail -n 1
}
is_old_enough() { [[ $(printf '%s\n' "$1" "$limit" | sort -V | tail -n 1) == "$limit" ]]; }

parts=$source_folder/packaging/glibc
python3 "$parts/stubs.py" "${CC:-cc}" "$limit" "$work/stubs"
"${CC:-cc}" -std=gnu99 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Werror -c "$parts/shims.c" -o "$work/shims.o"
link() { # link FILE OPTIONS...
  local out=$1
  shift
  "${CXX:-c++}" -shared -static-libstdc++ -static-libgcc -Wl,-soname,libtessera.so.0 -Wl,--no-undefined \
    -Wl,--version-script="$source_folder/src/exports.map" "$@" -o "$out"
}
link "$work/libtessera.so.0" "$@" "$work/shims.o" -L"$work/stubs"
version=$(newest "$work/libtessera.so.0")
is_old_enough "$version" || fail "the library needs glibc $version"

# The same test of the same objects without stubs must see this system's versions, or it would see nothing above either.
link "$work/plain.so" "$@"
version=$(newest "$work/plain.so")
if is_old_enough "$version"; then echo "this system's glibc is old itself ($version): nothing was compared"; fi

ln -s libtessera.so.0 "$work/libtessera.so"
"${CC:-cc}" -std=c99 -I"$source_folder/include" "$source_folder/examples/c/attention.c" -L"$work" -ltessera -o "$work/attention"
LD_LIBRARY_PATH=$work "$work/attention"
echo "all as it should be"
