#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# sanitize.sh [TESSERA]: compute-sanitizer's memcheck and racecheck on a few small cases, for every kernel of the GPU.
# One line per kernel and tool; the exit status is 1 if anything was found, or if a tool did not finish its report.
# TESSERA is the program (default: build/cli/tessera). KERNELS and CASES, lists of names, replace the defaults.
set -uo pipefail

tessera=${1:-build/cli/tessera}
read -ra kernels <<< "${KERNELS:-}"
read -ra cases <<< "${CASES:-one_tile_f32 random_128x64 length_causal_65 packed_causal_f16 layout_mixed_bf16 everything_f32 square_causal_bf16 wide_head_f16}"
least=${CASES:+1}  # so many of a kernel's cases must have run, or it has shown nothing
least=${least:-3}
tool_finds=99      # exit status by which compute-sanitizer reports a finding
limit=300          # seconds for one case under one tool

die() {
  echo "sanitize.sh: $1" >&2
  exit 2
}
[[ -x $tessera ]] || die "there is no program $tessera; make build makes it"
sanitizer=$(command -v compute-sanitizer || true)
for folder in "${CUDA_HOME:-/usr/local/cuda}"/bin /usr/local/cuda/compute-sanitizer; do
  [[ -z $sanitizer && -x $folder/compute-sanitizer ]] && sanitizer=$folder/compute-sanitizer
done
[[ -n $sanitizer ]] || die "compute-sanitizer is missing; it comes with the CUDA toolkit"
gpu=$("$tessera" info | sed -n 's/^GPU *//p')
[[ $gpu != none* ]] || die "there is no GPU ($gpu)"
# The library lists the GPU's kernels first; a CPU's kernel refuses the device.
if ((${#kernels[@]} == 0)); then
  for name in $("$tessera" info | sed -n 's/^kernels *//p' | tr -d ','); do
    report=$("$tessera" check --device cuda --kernel "$name" --nondeterministic --case one_tile_f32 2>&1)
    [[ $report == *"runs on cpu"* ]] || kernels+=("$name")
  done
fi
((${#kernels[@]} > 0)) || die "the library has no kernel for the GPU"

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Runs one case under one tool. Sets verdict to ran, refused, or what is wrong.
run_case() {
  local tool=$1 kernel=$2 name=$3
  local flags=(--tool "$tool" --error-exitcode "$tool_finds" --print-limit 5)
  timeout --kill-after=10 $limit "$sanitizer" "${flags[@]}" \
    "$tessera" check --device cuda --kernel "$kernel" --nondeterministic --case "$name" > "$log" 2>&1
  local status=$?
  local summary
  summary=$(grep -E 'ERROR SUMMARY:|RACECHECK SUMMARY:' "$log" | tail -n 1)
  if ((status == 124 || status == 137)); then
    verdict="took over $limit s"
  elif [[ -z $summary ]]; then
    verdict="exit status $status and no summary"
  elif ((status == tool_finds)) || ! grep -qE 'SUMMARY: 0 (errors|hazards)' <<< "$summary"; then
    verdict="${summary#*SUMMARY: }"
  elif ((status == 0)); then
    verdict=ran
  elif grep -q ' 0 failed, 1 skipped' "$log"; then
    verdict=refused
  else
    verdict="exit status $status: the case failed"
  fi
}

failures=0
for kernel in "${kernels[@]}"; do
  for tool in memcheck racecheck; do
    ran=0 refused=0 wrong=()
    for name in "${cases[@]}"; do
      run_case "$tool" "$kernel" "$name"
      case $verdict in
        ran) ((++ran)) ;;
        refused) ((++refused)) ;;
        *)
          wrong+=("$name: $verdict")
          tail -n 40 "$log" >&2
          ;;
      esac
    done
    line="$kernel $tool: $ran cases clean, $refused refused"
    ((ran >= least)) || wrong+=("only $ran cases ran, at least $least must")
    if ((${#wrong[@]} > 0)); then
      ((++failures))
      line+=$(printf '; %s' "${wrong[@]}")
    fi
    echo "$line"
  done
done
exit $((failures > 0))
