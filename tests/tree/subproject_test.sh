#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Takes the tree into another project, by add_subdirectory and by FetchContent, as a stranger would, and looks at what
# that project would build and install: the library, and nothing of the program, the tests or the examples.
# Usage: subproject_test.sh SOURCE-FOLDER. Registered by tests/tree/tests.cmake. Nothing is compiled: install_test.sh
# compiles programs against the library.
set -euo pipefail
source_folder=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "subproject_test: $1" >&2
  exit 1
}

# Usage: check NAME, with the lines that take the tree in on standard input.
check() {
  local name=$1 project=$work/$1
  mkdir "$project"
  cp "$source_folder/examples/cpp/attention.cpp" "$project"
  {
    echo 'cmake_minimum_required(VERSION 3.25)'
    echo 'project(stranger LANGUAGES C CXX)'
    cat
    echo 'add_executable(attention attention.cpp)'
    echo 'target_link_libraries(attention PRIVATE tessera::tessera)'
  } > "$project/CMakeLists.txt"
  cmake -S "$project" -B "$project/build" -G Ninja > "$project/log" 2>&1 ||
    { cat "$project/log"; fail "$name: configuring failed"; }

  local commands
  commands=$(ninja -C "$project/build" -t commands all)
  grep -q 'src/cpu/isa' <<< "$commands" || fail "$name: the library is not built"
  grep -q 'attention\.cpp' <<< "$commands" || fail "$name: the stranger's own program is not built"
  local folder
  for folder in cases cli tests bench tools/pictures; do
    ! grep -qF "$source_folder/$folder/" <<< "$commands" || fail "$name: $folder/ is built too"
  done
  cmake --install "$project/build" --prefix "$project/prefix" --component Unspecified > "$project/log" 2>&1 ||
    { cat "$project/log"; fail "$name: something is installed unasked"; }
  [[ -z $(find "$project/prefix" -type f 2> /dev/null) ]] || fail "$name: something is installed unasked"
}

check add_subdirectory <<< "add_subdirectory($source_folder tessera)"
check FetchContent << END
include(FetchContent)
FetchContent_Declare(tessera SOURCE_DIR $source_folder)
FetchContent_MakeAvailable(tessera)
END
echo "all as it should be"
