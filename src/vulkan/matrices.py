#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# matrices.py IN OUT NAME f16|bf16: SPIR-V of SPV_NV_cooperative_matrix in the file IN becomes SPV_KHR_cooperative_matrix,
# with operands of the type, as a C array NAME in OUT.hpp and as OUT itself. Older compilers (Debian 12's glslang) know the
# one and drivers the other; instruction by instruction they are the same. It stops at what it does not know. Run by
# src/vulkan/vulkan.cmake. Implements docs/vulkan.md, "vk_matrix".
import struct
import sys
from pathlib import Path

# Instructions: their numbers in SPIR-V.
EXTENSION, CAPABILITY, DECORATE, TYPE_INT, TYPE_FLOAT = 10, 17, 71, 21, 22
CONSTANT_TRUE, CONSTANT_FALSE, CONSTANT, SPEC_OP, FMUL, FDIV = 41, 42, 43, 52, 133, 136
TYPE_NV, LOAD_NV, STORE_NV, MULTIPLY_NV, LENGTH_NV = 5358, 5359, 5360, 5361, 5362
TYPE_KHR, LOAD_KHR, STORE_KHR, MULTIPLY_KHR = 4456, 4457, 4458, 4459
# Capabilities, and a decoration.
FLOAT16, MATRIX_NV, MATRIX_KHR, BF16_TYPE, BF16_MATRIX, SPEC_ID = 9, 5357, 6022, 5116, 5118, 1
DEPTH_ID = 6  # the constant K in matrix.glsl: the left operand has so many columns, the right one so many rows
LEFT, RIGHT, SUM = 0, 1, 2


def fail(message):
    sys.exit(f"matrices.py: {message}")


def text_of(words):
    return struct.pack(f"<{len(words)}I", *words).split(b"\0")[0].decode()


def words_of(text):
    data = text.encode() + b"\0"
    data += b"\0" * (-len(data) % 4)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def instructions(words):
    at = 5
    while at < len(words):
        length = words[at] >> 16
        if length == 0:
            fail("an instruction has no length")
        yield words[at] & 0xffff, words[at + 1:at + length]
        at += length


def converted(words, brain):
    """The module's words; `brain`: operands are bf16."""
    header, listed = words[:5], list(instructions(words))
    out, bound = [], header[3]
    spec_ids = {o[0]: o[2] for code, o in listed if code == DECORATE and o[1] == SPEC_ID}
    layouts = {o[1]: int(code == CONSTANT_TRUE) for code, o in listed if code in (CONSTANT_TRUE, CONSTANT_FALSE)}
    number_type = next(o[0] for code, o in listed if code == TYPE_INT and o[1:] == [32, 0])
    widths, matrices, numbers, counts = {}, {}, {}, {}

    def put(code, operands):
        out.extend([(len(operands) + 1) << 16 | code, *operands])

    def layout_of(flag):
        if flag not in layouts:
            fail("a layout is not a constant")
        return numbers[layouts[flag]]

    for code, o in listed:
        counts[code] = counts.get(code, 0) + 1
        if code == CAPABILITY and o == [MATRIX_NV]:
            for capability in [MATRIX_KHR] + ([BF16_TYPE, BF16_MATRIX] if brain else []):
                put(CAPABILITY, [capability])
        elif code == CAPABILITY and o == [FLOAT16] and brain:
            continue
        elif code == EXTENSION and text_of(o) == "SPV_NV_cooperative_matrix":
            for name in ["SPV_KHR_cooperative_matrix"] + (["SPV_KHR_bfloat16"] if brain else []):
                put(EXTENSION, words_of(name))
        elif code == TYPE_FLOAT:
            widths[o[0]] = o[1]
            put(code, o + ([0] if brain and o[1] == 16 else []))  # 0: the encoding BFloat16KHR
        elif code == TYPE_NV:
            if not numbers:  # what says how a matrix is used and laid out
                numbers = {value: bound + value for value in (LEFT, RIGHT, SUM)}
                bound += 3
                for value, name in numbers.items():
                    put(CONSTANT, [number_type, name, value])
            result, element, _, rows, columns = o
            use = SUM if widths[element] == 32 else LEFT if spec_ids.get(columns) == DEPTH_ID else RIGHT
            if use == RIGHT and spec_ids.get(rows) != DEPTH_ID:
                fail("an operand is neither of M x K nor of K x N")
            matrices[result] = use
            put(TYPE_KHR, o + [numbers[use]])
        elif code == LOAD_NV:
            put(LOAD_KHR, o[:3] + [layout_of(o[4]), o[3]] + o[5:])
        elif code == STORE_NV:
            put(STORE_KHR, o[:2] + [layout_of(o[3]), o[2]] + o[4:])
        elif code == MULTIPLY_NV:
            put(MULTIPLY_KHR, o)
        elif code == LENGTH_NV or (code == SPEC_OP and o[2] == LENGTH_NV):
            fail("the length of a matrix is used")
        elif code == FDIV and o[0] in matrices:
            put(FMUL, o)
        else:
            put(code, o)
    if sorted(set(matrices.values())) != [LEFT, RIGHT, SUM] or not (counts.get(LOAD_NV) and counts.get(MULTIPLY_NV)):
        fail("there are no products of matrices in it")
    return header[:3] + [bound] + header[4:] + out


def main():
    source, target, name, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    if kind not in ("f16", "bf16"):
        fail(f"{kind} is neither f16 nor bf16")
    data = source.read_bytes()
    words = list(struct.unpack(f"<{len(data) // 4}I", data))
    if words[0] != 0x07230203:
        fail(f"{source} is not SPIR-V")
    words = converted(words, kind == "bf16")
    target.write_bytes(struct.pack(f"<{len(words)}I", *words))
    rows = ["\t" + ",".join(f"0x{word:08x}" for word in words[n:n + 8]) for n in range(0, len(words), 8)]
    Path(f"{target}.hpp").write_text(f"// Generated by src/vulkan/matrices.py.\n#pragma once\nconst uint32_t {name}[] = {{\n"
                                     + ",\n".join(rows) + "};\n")


if __name__ == "__main__":
    main()
