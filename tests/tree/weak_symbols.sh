#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# weak_symbols.sh NM OBJECT...: objects of cpu/isa/ define no weak symbol outside their instruction set's namespace.
# Run by ctest with all the library's objects; it picks those of cpu/isa/ itself.
# A weak function compiled for AVX-512 may be the copy that the linker keeps for everyone: see docs/cpu_kernels.md.
set -eu
nm=$1
shift

# Weak and unique definitions: W, V, u. The names are taken apart in both forms, since the demangler of an older nm may
# leave a new mangling as it is. Namespaces are tessera::cpu::N_AVX2 and the like, and Highway's hwy::N_AVX2.
outside_namespace() {
  "$nm" "$1" "$2" | awk '$2 ~ /^[WVu]$/ { $1 = $2 = ""; print substr($0, 3) }' | grep -Ev "$3" || true
}

checked=0
failed=0
for object in "$@"; do
  case $object in
    */cpu/isa/*) ;;
    *) continue ;;
  esac
  checked=$((checked + 1))
  demangled=$(outside_namespace -C "$object" '(^|[ *&])(tessera::cpu|hwy)::N_[A-Z0-9_]+::|^DW\.ref\.')
  mangled=$(outside_namespace --no-demangle "$object" \
    '^_Z(GV|T[VTIS])?Z?N[rVKRO]*(7tessera3cpu|3hwy)[0-9]+N_|^DW\.ref\.')
  if [ -n "$demangled$mangled" ]; then
    failed=1
    echo "$object defines weak symbols outside its instruction set's namespace:"
    printf '%s\n%s\n' "$demangled" "$mangled"
  fi
done

if [ "$checked" -eq 0 ]; then
  echo "no object of cpu/isa/ among the $# files given"
  exit 1
fi
echo "$checked objects of cpu/isa/ checked"
exit "$failed"
