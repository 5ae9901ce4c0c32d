#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# compare_kernels.py BEFORE.pack AFTER.pack [--diff]: did a change of device code change the machine code? Compares two
# packs of kernels (`gate quick --pack FILE`, `tessera pack`, or common.pack of a build folder) instruction by
# instruction. Kernels are matched by name, problem and architecture; where these repeat, in the packs' order. Needs
# nvdisasm, of the CUDA toolkit. The exit status is 1 if a kernel differs or is missing.
import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

MAGIC = b"TESSERA PACK 1\n"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
LABEL = re.compile(r"\.L_x_\d+")


def read_pack(path):
    """{(kernel, problem, architecture, number): cubin} of a pack's file (src/cuda/jit/pack.hpp)."""
    data = Path(path).read_bytes()
    if not data.startswith(MAGIC):
        sys.exit(f"{path}: is not a pack of kernels")
    at, found, seen = len(MAGIC) + 64, {}, Counter()
    entries = []
    while at < len(data):
        fields = []
        for _ in range(5):
            size = int(data[at:at + 16], 16)
            fields.append(data[at + 16:at + 16 + size])
            at += 16 + size
        _, architecture, kernel, variant = (f.decode() for f in fields[:4])
        entries.append(((kernel, variant, architecture), len(fields[4]), fields[4]))
    # A pack is in the order of its keys, which change with every word of the text: size tells more.
    for name, _, cubin in sorted(entries, key=lambda e: (e[0], e[1])):
        found[(*name, seen[name])] = cubin
        seen[name] += 1
    return found


def instructions(cubin):
    """The instructions of a cubin without their addresses; labels numbered as they come."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            text = subprocess.run(["nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
        except FileNotFoundError:
            sys.exit("nvdisasm: is not on the PATH; it comes with the CUDA toolkit")
    labels = {}
    return [LABEL.sub(lambda m: labels.setdefault(m[0], f"L{len(labels)}"), line) for line in INSTRUCTION.findall(text)]


def opcode(line):
    words = [w for w in line.split() if not w.startswith("@")]
    return words[0].split(".")[0]


def main():
    parser = argparse.ArgumentParser(description="Compare the machine code of two packs of kernels.")
    parser.add_argument("before"), parser.add_argument("after")
    parser.add_argument("--diff", action="store_true", help="print the instructions that differ")
    options = parser.parse_args()
    before, after = read_pack(options.before), read_pack(options.after)
    same = differ = 0
    for name in sorted(before.keys() | after.keys()):
        title = f"{name[0]} {name[1]} {name[2]}" + (f" ({name[3] + 1})" if name[3] else "")
        if name not in before or name not in after:
            print(f"{title}: only {'before' if name in before else 'after'}")
            differ += 1
            continue
        a, b = instructions(before[name]), instructions(after[name])
        if a == b:
            same += 1
            continue
        differ += 1
        counts = Counter(map(opcode, b))
        counts.subtract(Counter(map(opcode, a)))
        changed = ", ".join(f"{n:+} {op}" for op, n in sorted(counts.items()) if n)
        print(f"{title}: {len(a)} -> {len(b)} instructions{'; ' + changed if changed else ', others of the same kinds'}")
        if options.diff:
            print("\n".join(difflib.unified_diff(a, b, "before", "after", lineterm="", n=1)))
    print(f"{same} kernels are identical, {differ} differ")
    return 1 if differ else 0


sys.exit(main())
