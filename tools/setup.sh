#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what the build (setup.sh build), the tests as well (setup.sh test), the Python package (setup.sh python), a
# wheel of it for others (setup.sh wheel), the fuzz targets (setup.sh fuzz), the documentation site (setup.sh site), its
# tests in a browser (setup.sh pages) or a build for 64-bit ARM (setup.sh aarch64) need and do not find. Called by the
# Makefile before everything else, so it is instant when nothing is missing. It looks for the tools and headers
# themselves, not for packages: on another distribution, or with everything built by hand, it has nothing to do.
# For the tests and for a wheel it also looks for NVRTC, the compiler of GPU kernels, and otherwise fetches it into
# build-nvrtc/.
set -euo pipefail

purpose=${1:-test}
case $purpose in
  build | test | python | wheel | fuzz | site | pages | aarch64) ;;
  *) echo "usage: tools/setup.sh [build|test|python|wheel|fuzz|site|pages|aarch64]" >&2; exit 2 ;;
esac

# Debian's package for each tool, and for each header.
tools=("cmake cmake" "ninja ninja-build")
headers=("hwy/highway.h libhwy-dev")
if [[ $purpose == @(python|wheel) ]]; then
  tools+=("python3 python3")
else
  headers+=("CLI/CLI.hpp libcli11-dev")
fi
if [[ $purpose == test ]]; then
  tools+=("python3 python3" "pkg-config pkgconf" "mpicc libopenmpi-dev" "mpirun openmpi-bin")
  headers+=("gtest/gtest.h libgtest-dev")
  # The Vulkan backend, which a build leaves out without its tools, and a driver that runs it on the processor.
  tools+=("glslangValidator glslang-tools" "spirv-cross spirv-cross" "spirv-val spirv-tools")
  headers+=("vulkan/vulkan.h libvulkan-dev")
fi

# The site is made by Python alone.
if [[ $purpose == site ]]; then
  tools=("python3 python3")
  headers=()
fi
if [[ $purpose == pages ]]; then tools+=("python3 python3" "node nodejs" "chromium chromium"); fi
# GoogleTest comes as text, since its library is for one processor only (tests/CMakeLists.txt).
if [[ $purpose == aarch64 ]]; then
  tools+=("python3 python3" "aarch64-linux-gnu-g++ g++-aarch64-linux-gnu" "qemu-aarch64 qemu-user")
  headers+=("../src/googletest/CMakeLists.txt googletest")
fi

# The fuzz targets are built by clang, for its libFuzzer.
if [[ $purpose == fuzz ]]; then
  tools+=("clang++ clang")
  CC=clang CXX=clang++
fi
has_libfuzzer() { compgen -G "$(clang++ -print-runtime-dir 2> /dev/null)/libclang_rt.fuzzer*.a" > /dev/null; }

find_missing() {
  missing=()
  local entry compiler=${CXX:-c++}
  for entry in "${tools[@]}"; do
    command -v "${entry% *}" > /dev/null || missing+=("${entry#* }")
  done
  if [[ $purpose == @(python|wheel|site) ]] && ! python3 -c 'import ensurepip' 2> /dev/null; then missing+=(python3-venv); fi
  if [[ $purpose == site ]]; then return; fi
  if ! command -v "${compiler%% *}" > /dev/null || ! command -v "${CC:-cc}" > /dev/null; then
    missing+=(g++)
    compiler=
  fi
  if [[ $purpose == test ]]; then
    compgen -G '/usr/share/vulkan/icd.d/*.json' > /dev/null || missing+=(mesa-vulkan-drivers)
    compgen -G '/usr/share/vulkan/explicit_layer.d/*validation*' > /dev/null || missing+=(vulkan-validationlayers)
  fi
  if [[ $purpose == fuzz ]] && ! has_libfuzzer; then missing+=(libclang-rt-dev); fi
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

# In the places where src/cuda/jit/nvrtc.cpp looks, and where fetch_nvrtc puts it.
has_nvrtc() {
  [[ -n ${TESSERA_NVRTC:-} || -e $nvrtc_folder/nvidia/cu13/lib/libnvrtc.so.13 ]] && return
  PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2> /dev/null | grep 'libnvrtc\.so' > /dev/null && return
  local -a folders
  local folder prefix
  IFS=: read -ra folders <<< "${LD_LIBRARY_PATH:-}"
  folders+=("${CUDA_HOME:-/none}/lib64" "${CUDA_PATH:-/none}/lib64" /usr/local/cuda/lib64 /opt/cuda/lib64)
  shopt -s nullglob
  folders+=(/usr/local/cuda-1[23]*/lib64)
  for prefix in "${VIRTUAL_ENV:-/none}" "${CONDA_PREFIX:-/none}" "${HOME:-/none}/.local" /usr/local /usr; do
    folders+=("$prefix"/lib/python3*/{site,dist}-packages/nvidia/{cu13,cuda_nvrtc}/lib)
  done
  shopt -u nullglob
  for folder in "${folders[@]}"; do
    compgen -G "$folder/libnvrtc.so*" > /dev/null && return
  done
  return 1
}

as_root=()
can_install() {
  command -v apt-get > /dev/null || return
  [[ $(id -u) -eq 0 ]] && return
  as_root=(sudo)
  command -v sudo > /dev/null
}

apt_get() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "$@" > "$log" 2>&1
}

# The lists may be missing or out of date: without them the first attempt fails quickly, and they are fetched.
install_packages() {
  echo "setup: installing $*"
  apt_get install -y -q --no-install-recommends "$@" && return
  echo "setup: fetching the package lists first"
  apt_get update -q && apt_get install -y -q --no-install-recommends "$@"
}

install_missing() {
  if ! command -v apt-get > /dev/null; then
    echo "setup: please install the equivalents of these Debian packages, then try again: ${missing[*]}" >&2
    exit 1
  elif ! can_install; then
    echo "setup: please run this as root, then try again: apt-get install ${missing[*]}" >&2
    exit 1
  elif ! install_packages "${missing[@]}"; then
    tail -n 20 "$log" >&2
    echo "setup: apt-get could not install ${missing[*]}; its last lines are above." >&2
    exit 1
  fi
  find_missing
  if [[ ${#missing[@]} -ne 0 ]]; then
    echo "setup: installed, but still not found: ${missing[*]}" >&2
    exit 1
  fi
}

has_pip() { python3 -m pip --version > /dev/null 2>&1; }

# A wheel unpacked into a folder of the tree: nobody's Python is touched. Registers and spills depend on the compiler's
# version, so it is always the same one.
fetch_nvrtc() {
  has_pip || { can_install && install_packages python3-pip && has_pip; } || return
  echo "setup: fetching NVRTC, NVIDIA's compiler of GPU kernels, into ${nvrtc_folder##*/}/"
  rm -rf "$nvrtc_folder"
  python3 -m pip install --disable-pip-version-check --no-deps --only-binary :all: --retries 1 --timeout 20 \
    --target "$nvrtc_folder" 'nvidia-cuda-nvrtc==13.0.*' > "$log" 2>&1
}

nvrtc_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/build-nvrtc
log=$(mktemp)
trap 'rm -f "$log"' EXIT

find_missing
if [[ ${#missing[@]} -ne 0 ]]; then install_missing; fi

# Without NVRTC everything else still works, so this is no failure here.
if [[ $purpose == @(test|wheel) ]] && ! has_nvrtc && ! fetch_nvrtc; then
  rm -rf "$nvrtc_folder"
  lost="tests that compile GPU kernels will be skipped"
  if [[ $purpose == wheel ]]; then lost="the wheel will hold no GPU kernels"; fi
  echo "setup: NVRTC is neither here nor could pip fetch it: $lost." >&2
fi
