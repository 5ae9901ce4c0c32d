#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# msl_test.sh FOLDER: every kernel's SPIR-V there is valid, and becomes Metal's language by spirv-cross, as MoltenVK makes
# it, without what Metal lacks. Run by ctest; skipped where spirv-cross is missing. docs/vulkan.md.
set -euo pipefail
folder=$1
command -v spirv-cross > /dev/null || { echo "SKIPPED: there is no spirv-cross"; exit 77; }
kernels=0
for spirv in "$folder"/*.spv; do
  if command -v spirv-val > /dev/null; then spirv-val --target-env vulkan1.2 --scalar-block-layout "$spirv"; fi
  metal=$(spirv-cross --msl --msl-version 20400 "$spirv")
  if [[ $metal != *"kernel void main0"* ]]; then
    echo "$spirv: no Metal kernel came out" >&2
    exit 1
  fi
  if grep -n 'double' <<< "$metal"; then
    echo "$spirv: Metal has no double" >&2
    exit 1
  fi
  kernels=$((kernels + 1))
done
echo "$kernels kernels became Metal's"
[[ $kernels -ge 5 ]]
