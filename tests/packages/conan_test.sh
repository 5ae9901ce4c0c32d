#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the package of packaging/conan, without remotes and with this system's headers of Highway, optimised little and
# without GPU kernels; Conan then builds and runs the C++ example with it. Looks at what the package holds.
# Usage: conan_test.sh SOURCE-FOLDER CONAN HOME-FOLDER-OF-CONAN. Run by `make test-packages`.
set -euo pipefail
source_folder=$(realpath "$1")
conan=$2
mkdir -p "$3"
export CONAN_HOME
CONAN_HOME=$(realpath "$3")

fail() {
  echo "conan_test: $1" >&2
  exit 1
}

"$conan" profile detect --exist-ok > "$CONAN_HOME/log" 2>&1
"$conan" create "$source_folder/packaging/conan" --no-remote -o 'tessera/*:system=True' -o 'tessera/*:pack=False' \
  -c tools.cmake.cmaketoolchain:extra_variables='{"TESSERA_QUICK_BUILD": "ON"}' -c tools.cmake.cmaketoolchain:generator=Ninja \
  -c tools.cmake.cmake_layout:test_folder="$CONAN_HOME/test" \
  --format=json > "$CONAN_HOME/created.json" 2> "$CONAN_HOME/log" ||
  { tail -n 40 "$CONAN_HOME/log"; fail "conan create failed"; }

package=$(python3 - "$CONAN_HOME/created.json" << 'END'
import json, sys
nodes = json.load(open(sys.argv[1]))["graph"]["nodes"].values()
print(next(node["package_folder"] for node in nodes if node["name"] == "tessera"))
END
)
for file in include/tessera/tessera.h include/tessera/tessera.hpp lib/libtessera.so lib/cmake/tessera/tessera-config.cmake \
  lib/pkgconfig/tessera.pc licenses/LICENSE; do
  [[ -e $package/$file ]] || fail "the package lacks $file"
done
grep -q 'O\[0\] = ' "$CONAN_HOME/log" || { tail -n 20 "$CONAN_HOME/log"; fail "the example did not run"; }
echo "conan_test: ok, $("$conan" --version)"
