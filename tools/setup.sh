#!/usr/bin/env bash
# Installs what the build (setup.sh build) or the tests as well (setup.sh test) need and do not find. Called by the
# Makefile before everything else, so it is instant when nothing is missing. It looks for the tools and headers
# themselves, not for packages: on another distribution, or with everything built by hand, it has nothing to do.
set -euo pipefail

purpose=${1:-test}
case $purpose in
  build | test) ;;
  *) echo "usage: tools/setup.sh [build|test]" >&2; exit 2 ;;
esac

# Debian's package for each tool, and for each header.
tools=("cmake cmake" "ninja ninja-build")
headers=("hwy/highway.h libhwy-dev" "CLI/CLI.hpp libcli11-dev" "nlohmann/json.hpp nlohmann-json3-dev")
if [[ $purpose == test ]]; then
  tools+=("python3 python3" "pkg-config pkgconf")
  headers+=("gtest/gtest.h libgtest-dev")
fi

find_missing() {
  missing=()
  local entry compiler=${CXX:-c++}
  for entry in "${tools[@]}"; do
    command -v "${entry% *}" > /dev/null || missing+=("${entry#* }")
  done
  if ! command -v "${compiler%% *}" > /dev/null || ! command -v "${CC:-cc}" > /dev/null; then
    missing+=(g++)
    compiler=
  fi
  for entry in "${headers[@]}"; do
    # Without a compiler nothing can be asked; Debian's own place is then a good guess.
    if [[ -n $compiler ]]; then
      printf '#if !__has_include(<%s>)\n#error\n#endif\n' "${entry% *}" |
        $compiler -std=c++20 -x c++ -E - > /dev/null 2>&1 || missing+=("${entry#* }")
    else
      [[ -e /usr/include/${entry% *} ]] || missing+=("${entry#* }")
    fi
  done
}

find_missing
[[ ${#missing[@]} -eq 0 ]] && exit 0

as_root=()
if ! command -v apt-get > /dev/null; then
  echo "setup: please install the equivalents of these Debian packages, then try again: ${missing[*]}" >&2
  exit 1
elif [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo > /dev/null; then
    echo "setup: please run this as root, then try again: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
install_packages() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "$@" > "$log" 2>&1
}
echo "setup: installing ${missing[*]}"
# The lists may be missing or out of date: without them the first attempt fails quickly, and they are fetched.
if ! install_packages install -y -q --no-install-recommends "${missing[@]}"; then
  echo "setup: fetching the package lists first"
  if ! install_packages update -q || ! install_packages install -y -q --no-install-recommends "${missing[@]}"; then
    tail -n 20 "$log" >&2
    echo "setup: apt-get could not install ${missing[*]}; its last lines are above." >&2
    exit 1
  fi
fi

find_missing
if [[ ${#missing[@]} -ne 0 ]]; then
  echo "setup: installed, but still not found: ${missing[*]}" >&2
  exit 1
fi
