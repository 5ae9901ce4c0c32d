#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the port of packaging/vcpkg as vcpkg does, and builds and runs the C++ example with what it gives. With the scripts
# of a vcpkg whose folder is $VCPKG_ROOT (its program is not needed), otherwise with the stand-in beside this file. The
# headers of Highway are this system's, put where vcpkg would have installed them. Optimised little, without GPU kernels.
# Usage: vcpkg_test.sh SOURCE-FOLDER. Run by `make test-packages`.
set -euo pipefail
source_folder=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
port=$source_folder/packaging/vcpkg/tessera
triplet=stranger
package=$work/packages/tessera_$triplet

fail() {
  echo "vcpkg_test: $1" >&2
  exit 1
}

# What the vcpkg program reads of the manifest: it hands the names of the features over.
features=$(python3 - "$port/vcpkg.json" << 'END'
import json, re, sys
manifest = json.load(open(sys.argv[1]))
known = {"name", "version", "description", "license", "supports", "dependencies", "features"}
assert set(manifest) <= known, set(manifest) - known
assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", manifest["name"]), manifest["name"]
print(";".join(["core", *manifest["features"]]))
END
) || fail "vcpkg.json is not what it should be"

mkdir -p "$work/installed/$triplet/include"
highway=$(echo '#include <hwy/highway.h>' | c++ -std=c++17 -x c++ -M - | grep -o '/[^ ]*/hwy/highway\.h' | head -n 1)
cp -r "$(dirname "$highway")" "$work/installed/$triplet/include/"
case $(uname -m) in aarch64) architecture=arm64 ;; *) architecture=x64 ;; esac
cat > "$work/$triplet.cmake" << END
set(VCPKG_TARGET_ARCHITECTURE $architecture)
set(VCPKG_CRT_LINKAGE dynamic)
set(VCPKG_LIBRARY_LINKAGE static)
set(VCPKG_CMAKE_SYSTEM_NAME Linux)
set(VCPKG_BUILD_TYPE release)
set(VCPKG_FIXUP_ELF_RPATH OFF)
set(VCPKG_CMAKE_CONFIGURE_OPTIONS -DTESSERA_QUICK_BUILD=ON -DTESSERA_PACK=OFF)
END

variables=(CMD=BUILD PORT=tessera "FEATURES=core" "ALL_FEATURES=$features" "CURRENT_PORT_DIR=$port"
  "TARGET_TRIPLET=$triplet" "TARGET_TRIPLET_FILE=$work/$triplet.cmake" "_HOST_TRIPLET=$triplet"
  "_VCPKG_INSTALLED_DIR=$work/installed" "PACKAGES_DIR=$work/packages" "BUILDTREES_DIR=$work/trees"
  "VCPKG_CONCURRENCY=${JOBS:-2}")
script=$source_folder/tests/packages/vcpkg.cmake
if [[ -n ${VCPKG_ROOT:-} ]]; then
  script=$VCPKG_ROOT/scripts/ports.cmake
  configs="$VCPKG_ROOT/ports/vcpkg-cmake/vcpkg-port-config.cmake;$VCPKG_ROOT/ports/vcpkg-cmake-config/vcpkg-port-config.cmake"
  variables+=("VCPKG_ROOT_DIR=$VCPKG_ROOT" "VCPKG_PORT_CONFIGS=$configs" "DOWNLOADS=$work/downloads"
    "GIT=$(command -v git)" "NINJA=$(command -v ninja)" "VCPKG_BASE_VERSION=2026-01-01" VERSION=0)
fi
cmake "${variables[@]/#/-D}" -P "$script" > "$work/log" 2>&1 || { find "$work/log" "$work/trees" -name '*log' -exec tail -n 20 {} + | cut -c 1-400; fail "the port does not build"; }

grep -rqF "$work/installed/$triplet/include" "$work/trees" --include=compile_commands.json ||
  fail "Highway was not taken from where vcpkg installs it"
for file in include/tessera/tessera.h include/tessera/tessera.hpp lib/libtessera.so share/tessera/tessera-config.cmake \
  share/tessera/copyright lib/pkgconfig/tessera.pc; do
  [[ -e $package/$file ]] || fail "the package lacks $file"
done
for file in bin lib/cmake debug; do
  [[ ! -e $package/$file ]] || fail "the package holds $file, which vcpkg does not allow"
done
cmake -S "$source_folder/examples/cpp" -B "$work/example" -G Ninja -DCMAKE_PREFIX_PATH="$package" > "$work/log" 2>&1 &&
  cmake --build "$work/example" >> "$work/log" 2>&1 || { cat "$work/log"; fail "the example does not build"; }
"$work/example/attention" > "$work/log" || { cat "$work/log"; fail "the example fails"; }
echo "vcpkg_test: ok, by ${script#"$source_folder"/}"
