#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# msl_test.sh FOLDER: every kernel's SPIR-V there is valid, and becomes Metal's language by spirv-cross, as MoltenVK makes
# it, without what Metal lacks. Those of cooperative matrices, in FOLDER/matrices, are valid, where spirv-val knows them
# (from 2023.4 on f16, later bf16); spirv-cross makes no right Metal of them yet. Run by ctest; skipped where spirv-cross
# is missing. docs/vulkan.md.
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
matrices=0
for spirv in "$folder"/matrices/*.spv; do
  matrices=$((matrices + 1))
  complaint=$(spirv-val --target-env vulkan1.3 --scalar-block-layout "$spirv" 2>&1) && continue
  if [[ $complaint == *"Invalid capability operand"* || $complaint == *"command not found"* ]]; then
    echo "${spirv##*/}: this spirv-val does not know its matrices"
  else
    echo "$spirv: $complaint" >&2
    exit 1
  fi
done
[[ $matrices -eq 4 ]]
[[ $kernels -ge 5 ]]
