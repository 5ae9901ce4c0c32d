#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the build into an empty folder and uses it as a stranger would: the examples, with CMake and pkg-config.
# Usage: install_test.sh SOURCE-FOLDER BUILD-FOLDER. Registered by tests/cli/tests.cmake.
# Also checks what the library exports and needs; see docs/architecture.md.
set -euo pipefail
source_folder=$(realpath "$1")
build_folder=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix

fail() {
  echo "install_test: $1" >&2
  exit 1
}

cmake --install "$build_folder" --prefix "$prefix" > /dev/null
library=$(find "$prefix" -name 'libtessera.so.*.*.*' -type f)
[[ -n $library ]] || fail "libtessera.so.X.Y.Z was not installed"
library_folder=$(dirname "$library")
for file in "$prefix"/include/tessera/{tessera.h,tessera.hpp,types.hpp,dlpack.h,dist.h,dist.hpp,nccl.h} "$prefix/bin/tessera" \
    "$library_folder/libtessera.so" "$library_folder/pkgconfig/tessera.pc" \
    "$library_folder/cmake/tessera/"{tessera-config.cmake,tessera-config-version.cmake,tessera-targets.cmake}; do
  [[ -e $file ]] || fail "${file#"$prefix"/} was not installed"
done
texts=("$prefix/include" "$library_folder/pkgconfig" "$library_folder/cmake")
! grep -rqF -e "$source_folder" -e "$build_folder" "${texts[@]}" ||
  fail "an installed text names the source or build folder"

echo "the library: name, exports, needs"
dynamic=$(readelf -d "$library")
grep -qE 'SONAME.*\[libtessera\.so\.[0-9]+\]' <<< "$dynamic" || fail "the library has no soname"
exported=$(nm -D --defined-only "$library" | awk '{print $NF}' | sed 's/@.*//' | grep -v '^TESSERA' | sort -u || true)
mpi_library=$(find "$prefix" -name 'libtessera_mpi.so.*.*.*' -type f)  # where there was an MPI
strangers=$(grep -v '^tessera_' <<< "$exported" || true)
[[ -z $strangers ]] || fail "symbols other than tessera_* are exported: $(head -n 5 <<< "$strangers" | tr '\n' ' ')"
declared=$(grep -ohE 'TESSERA_API [^;(]*\(' "$prefix"/include/tessera/{tessera,dlpack,dist,nccl,vulkan}.h |
  grep -oE 'tessera_[a-z_]+\($' | tr -d '(' | sort -u)
[[ $(grep . <<< "$exported") == "$declared" ]] ||
  fail "exported and declared functions differ: $(diff <(echo "$exported") <(echo "$declared") | tr '\n' ' ')"
for file in "$library" "$prefix/bin/tessera"; do
  needed=$(readelf -d "$file" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' |
    grep -vE '^(libc|libm|libdl|libpthread|ld-linux[a-z0-9_-]*)\.so\.[0-9]+$' || true)
  [[ -z $needed ]] || fail "$(basename "$file") needs $(tr '\n' ' ' <<< "$needed")"
done

if [[ -n $mpi_library ]]; then
  exported=$(nm -D --defined-only "$mpi_library" | awk '{print $NF}' | sed 's/@.*//' | grep -v '^TESSERA')
  [[ $exported == tessera_mpi_communicator ]] || fail "libtessera_mpi exports $(tr '\n' ' ' <<< "$exported")"
fi

echo "the program"
"$prefix/bin/tessera" --version > /dev/null

# Runs a command quietly; its output matters only when it fails.
quietly() {
  "$@" > "$work/log" 2>&1 || { cat "$work/log"; fail "failed: $*"; }
}
examples=$source_folder/examples

for example in c/attention cpp/attention serving/serving; do
  folder=$(dirname "$example")
  echo "examples/$folder with CMake"
  quietly cmake -S "$examples/$folder" -B "$work/$folder" -G Ninja -DCMAKE_PREFIX_PATH="$prefix"
  quietly cmake --build "$work/$folder"
  "$work/$example"
done

echo "examples/ranks with CMake: threads"
quietly cmake -S "$examples/ranks" -B "$work/ranks" -G Ninja -DCMAKE_PREFIX_PATH="$prefix"
quietly cmake --build "$work/ranks"
"$work/ranks/train"
export PKG_CONFIG_PATH=$library_folder/pkgconfig
if [[ -n $mpi_library ]] && command -v mpirun > /dev/null; then
  echo "examples/ranks with processes, by CMake and by pkg-config"
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_plm_rsh_agent=false
  timeout -k 5 300 mpirun -n 4 "$work/ranks/train_mpi" < /dev/null
  read -ra flags <<< "$(pkg-config --cflags --libs tessera_mpi)"
  OMPI_CXX=${CXX:-c++} quietly mpicxx -std=c++20 -DOMPI_SKIP_MPICXX "$examples/ranks/train_mpi.cpp" -o "$work/mpi-pkg" \
    "${flags[@]}"
  LD_LIBRARY_PATH=$library_folder timeout -k 5 300 mpirun -n 3 "$work/mpi-pkg" < /dev/null
else
  echo "without MPI: libtessera_mpi was not built"
fi

echo "examples with pkg-config"
read -ra flags <<< "$(pkg-config --cflags --libs tessera) -Wall -Wextra -Wshadow -Wconversion -Werror"
quietly "${CC:-cc}" -std=c99 -pedantic "$examples/c/attention.c" -o "$work/c-pkg" "${flags[@]}"
quietly "${CXX:-c++}" -std=c++20 "$examples/cpp/attention.cpp" -o "$work/cpp-pkg" "${flags[@]}"
LD_LIBRARY_PATH=$library_folder "$work/c-pkg"
LD_LIBRARY_PATH=$library_folder "$work/cpp-pkg"

echo "the first programs of the README"
# The first block in a language.
block() {
  awk -v fence="\`\`\`$1" '/^```/ { inside = $0 == fence && !found++; next } inside' "$source_folder/README.md"
}
block cpp > "$work/readme.cpp"
{
  printf '#include <stdio.h>\n#include <tessera/tessera.h>\n'
  echo 'void call(tessera_tensor q, tessera_tensor k, tessera_tensor v, tessera_tensor o, tessera_tensor lse);'
  echo 'void call(tessera_tensor q, tessera_tensor k, tessera_tensor v, tessera_tensor o, tessera_tensor lse) {'
  block c
  echo '}'
} > "$work/readme.c"
quietly "${CXX:-c++}" -std=c++20 "$work/readme.cpp" -o "$work/readme" "${flags[@]}"
quietly "${CC:-cc}" -std=c99 -pedantic -c "$work/readme.c" -o "$work/readme.o" "${flags[@]}"
LD_LIBRARY_PATH=$library_folder "$work/readme"

echo "a version that is not there is refused"
mkdir "$work/wrong"
cp "$examples"/c/* "$work/wrong"
sed -i 's/find_package(tessera [0-9.]*/find_package(tessera 9.9/' "$work/wrong/CMakeLists.txt"
! cmake -S "$work/wrong" -B "$work/wrong/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" > /dev/null 2>&1 ||
  fail "find_package(tessera 9.9) succeeded"
echo "all as it should be"
