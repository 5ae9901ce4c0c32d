#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# translate.py SRC OUT: the rules that CPU and CUDA kernels share (src/math, src/gpu/params.hpp) and the parameters of the
# Vulkan kernels, as GLSL. So mask ranges, places of blocks, the score chain and Philox exist once, as constexpr text.
# Run by src/vulkan/vulkan.cmake. It knows the subset of C++ that those files use, and stops at a name that it does not
# find; tests/vulkan/vulkan_rules_test.cpp compares what the device computes with the constexpr text.
# Implements docs/vulkan.md, "One rule in one place".
import re
import sys
from pathlib import Path

# What is translated, in the order in which GLSL must see it.
WANTED = [
    ("math/types.hpp", ["ceil_div", "lesser", "greater", "clamp", "BF16", "F16", "narrow<BF16>", "narrow<F16>"]),
    ("math/mask.hpp", ["BandMask", "Range", "TileClass", "bounded", "diagonal_offset", "diagonal_shift", "band_mask",
                       "visible_keys", "visible_queries", "tile_class"]),
    ("math/philox.hpp", ["Philox4", "PhiloxKey", "philox", "dropout_key", "dropout_block", "dropout_value"]),
    ("math/compensated.hpp", ["add_compensated"]),
    ("math/score.hpp", ["ScoreOptions", "ScoreParameters", "ScoreNumbers", "score_argument", "score_numbers"]),
    ("math/score_rule.hpp", ["derivative_of", "capped", "placed"]),
    ("gpu/params.hpp", ["TokenRef", "RowRef", "PairRef", "LengthRef", "Question", "ForwardParams", "Sum",
                        "BackwardParams", "DeviceSequence", "makes_sense", "packed_rows", "packed_begin", "set_band",
                        "sequence_of", "block_count", "first_block", "BlockPlace", "place_of", "finds_blocks"]),
    ("vulkan/params.hpp", ["Launch", "Kinds", "ForwardBlock", "BackwardBlock"]),
]
SCALARS = {"Int64": "int64_t", "Int32": "int", "UInt32": "uint", "UInt64": "uint64_t", "UInt16": "uint", "int": "int",
           "float": "float", "bool": "bool", "double": "float", "Number": "float", "void": "void"}
ALIASES = {"Numbers": "ScoreNumbers", "Element": "ScoreElement"}  # of the score rule's template parameters
SIZES = {"int64_t": 8, "uint64_t": 8, "int": 4, "uint": 4, "float": 4}


class Struct:
    def __init__(self, name):
        self.name, self.fields, self.methods, self.indexed = name, [], {}, False


structs, enums, functions, methods, indexed_names = {}, {}, {}, {"distance": "ScoreElement", "bias": "ScoreElement"}, set()


def fail(message):
    sys.exit(f"translate.py: {message}")


def type_of(text):
    """GLSL's type for a C++ one; a pointer is an address."""
    text = re.sub(r"\b(const|constexpr|static|inline)\b|tessera::|gpu::|<\w+>", "", text).strip()
    if text.endswith("*"):
        return "uint64_t"
    name = text.rstrip("&").strip()
    name = ALIASES.get(name, name)
    if name in enums:
        return "int"
    return SCALARS.get(name, name)


def closing(text, start):
    """The index of the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] in "({[":
            depth += 1
        elif text[at] in ")}]":
            depth -= 1
            if depth == 0:
                return at
    fail("a bracket is not closed: " + text[start:start + 60])


def split(text, separator=","):
    """Parts between separators that no bracket encloses."""
    parts, depth, last = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == separator and depth == 0:
            parts.append(text[last:at])
            last = at + 1
    return [p.strip() for p in parts + [text[last:]] if p.strip()]


def zero(kind, length):
    if length:
        return f"{kind}[{length}](" + ", ".join([zero(kind, 0)] * length) + ")"
    return made(kind, "") if kind in structs else f"{kind}(0)"


def made(kind, content, scope=None):
    """A value of a struct from the inside of its braces."""
    parts = split(content)
    given = {}
    for number, part in enumerate(parts):
        named = re.match(r"\.(\w+) = (.*)", part, re.S)
        given[named[1] if named else structs[kind].fields[number][1]] = named[2] if named else part
    values = []
    for field, name, length, default in structs[kind].fields:
        value = given.pop(name, default)
        if value is None:
            values.append(zero(field, length))
        elif length:
            values.append(f"{field}[{length}](" + ", ".join(f"{field}({expression(x, scope)})" for x in split(value[1:-1])) + ")")
        elif value.startswith("{"):
            values.append(made(field, value[1:-1], scope))
        else:
            value = expression(value, scope)
            values.append(value if field in structs else f"{field}({value})")
    if given:
        fail(f"{kind} has no {', '.join(given)}")
    return f"{kind}({', '.join(values)})"


def receiver(text, end):
    """Where the expression begins that ends before `end`: names, members, calls."""
    at = end
    while at > 0:
        if text[at - 1] in ")]":
            depth, at = 1, at - 1
            while depth:
                at -= 1
                depth += (text[at] in ")]") - (text[at] in "([")
        elif re.match(r"[\w.]", text[at - 1]):
            at -= 1
        else:
            break
    return at


def braced(text, scope):
    """Braces of values become constructors; those of blocks stay."""
    at = 0
    while (at := text.find("{", at)) >= 0:
        end, before = closing(text, at), text[:at].rstrip()
        kind = None
        if before.endswith((")", "else", ";", "{", "}")) or not before:
            at += 1
            continue
        if match := re.search(r"(\w+)$", before):
            word = match[1]
            if word in structs:
                kind, begin = word, match.start()
                text = text[:begin] + made(kind, text[at + 1:end], scope) + text[end + 1:]
                at = begin
                continue
            if word == "return":
                kind = scope["return"]
            elif owner := re.search(r"(\w+) \w+$", before):  # a declaration
                kind = type_of(owner[1])
                text = text[:at] + " = " + made(kind, text[at + 1:end], scope) + text[end + 1:]
                continue
        elif match := re.search(r"(\w+) =$", before):
            kind = scope["names"].get(match[1])
        elif before[-1] in "(,":
            depth, place, commas = 1, len(before) if before[-1] == "(" else len(before) - 1, 0
            place = len(before)
            while depth:
                place -= 1
                depth += (before[place] in ")}]") - (before[place] in "({[")
                commas += before[place] == "," and depth == 1
            callee = re.search(r"(\w+)$", before[:place])
            if callee and callee[1] in functions:
                kind = functions[callee[1]][commas][0]
        if kind not in structs:
            fail(f"of what type is the value behind '{before[-40:]}'?")
        text = text[:at] + made(kind, text[at + 1:end], scope) + text[end + 1:]
    return text


def expression(text, scope):
    text = braced(text, scope)
    text = re.sub(r"__builtin_bit_cast\(float, ", "uintBitsToFloat(", text)
    text = re.sub(r"__builtin_bit_cast\(UInt32, ", "floatBitsToUint(", text)
    text = re.sub(r"\bUInt16\(", "low16(", text)
    text = re.sub(r"(\w+) ([/%]) (ceil_div\([^()]*\))",  # the divisor is no constant: see common.glsl
                  lambda found: f"{ {'/': 'quotient', '%': 'remainder'}[found[2]]}({found[1]}, {found[3]})", text)
    text = re.sub(r"(\w+)::(\w+)", r"\1_\2", text)
    text = re.sub(r"((?:\([^()]*\)|\w+) & 1) \?", r"((\1) != 0) ?", text)  # integers are no conditions in GLSL
    text = re.sub(r">> \((16 \* \(j & 1\))\)", r">> int(\1)", text)
    for name in sorted(indexed_names, key=len, reverse=True):
        while match := re.search(rf"\b{name}\[", text):
            end, begin = closing(text, match.end() - 1), receiver(text, match.end() - 1)
            text = f"{text[:begin]}LengthRef_at({text[begin:match.end() - 1]}, {text[match.end():end]}){text[end + 1:]}"
    for method, owner in methods.items():
        while match := re.search(rf"\.{method}\(", text):
            begin, end = receiver(text, match.start()), closing(text, match.end() - 1)
            rest = text[match.end():end]
            text = (f"{text[:begin]}{owner}_{method}({text[begin:match.start()]}{', ' + rest if rest else ''})"
                    f"{text[end + 1:]}")
    text = re.sub(r"(?<![\w.])((?:\w+\.)*\w+\.data)\b(?! !=)", r"(\1 != 0)", text)  # an address as a condition
    for name, parameters in functions.items():  # what becomes a bool in C++ by itself
        if not any(kind == "bool" for kind, _ in parameters):
            continue
        for match in reversed(list(re.finditer(rf"(?<![\w.]){name}\(", text))):
            end = closing(text, match.end() - 1)
            arguments = split(text[match.end():end])
            arguments = [f"bool({a})" if kind == "bool" and not a.startswith("bool(") else a
                         for a, (kind, _) in zip(arguments, parameters)]
            text = text[:match.end()] + ", ".join(arguments) + text[end:]
    for name, glsl in SCALARS.items():
        text = re.sub(rf"\b{name}\b", glsl, text)
    text = re.sub(r"\bstatic constexpr\b|\bconstexpr\b", "const", text)
    return re.sub(r"\bclamp\(", "clamped(", text)


def parameters_of(text):
    result = []
    for number, part in enumerate(split(text)):
        part = part.split(" = ")[0]
        match = re.match(r"(.*?[\s&*])(\w+)$", part) or re.match(r"(.*)()$", part)
        kind, name = match[1].strip(), match[2] or f"unused_{number}"
        changed = (kind.endswith("&") and not kind.startswith("const")) or (kind.endswith("*") and "Number" in kind)
        result.append(("float" if kind.endswith("*") and "Number" in kind else type_of(kind), name, changed))
    return result


def function(name, returns, parameters, body, owner=None):
    """GLSL for one function or method."""
    listed = parameters_of(parameters)
    glsl_name = {"clamp": "clamped"}.get(name, re.sub(r"<(\w+)>", r"_\1", name))
    scope = {"return": type_of(returns), "names": {n: k for k, n, _ in listed}}
    for kind, names in re.findall(r"\b(?:const )?([A-Z]\w+) (\w+(?:, \w+)*)(?= =|\{|;)", body):
        for local in names.split(", "):
            scope["names"][local] = type_of(kind)
    functions[glsl_name if owner is None else f"{owner.name}_{name}"] = [(k, n) for k, n, _ in listed]
    for kind, local, _ in listed:
        if kind in structs and structs[kind].indexed:
            indexed_names.add(local)
    signature = [f"{'inout ' if changed else ''}{k} {n}" for k, n, changed in listed]
    if owner:
        for _, field, _, _ in owner.fields:
            body = re.sub(rf"(?<![\w.]){field}\b", f"self.{field}", body)
        for method in owner.methods:
            body = re.sub(rf"(?<![\w.]){re.escape(method)}\(", f"self.{method}(", body)
        body = re.sub(r"self\.data\[([^\]]*)\]", r"load_int(self.data, \1)", body)
        signature.insert(0, f"{owner.name} self")
        glsl_name = f"{owner.name}_{name}"
    body = body.replace("derivative && ", "").replace("*derivative = ", "derivative = ")
    body = expression(body, scope).replace("(self.data != 0)", "self.data")
    if name == "add_compensated":
        body = body.replace("const float", "precise float")
    return f"{scope['return']} {glsl_name}({', '.join(signature)}) {body}\n"


def struct(name, body):
    made_here, after = Struct(name), []
    structs[name] = made_here
    constants = ""
    at = 0
    while at < len(body):
        item = re.compile(r"\s*(?:constexpr |static |TESSERA_ALWAYS_INLINE )*([\w:<>*& ]+?)"
                          r"(operator\[\]|operator==|\b\w+)\(([^()]*)\) const (\{|= default;)").match(body, at)
        if item:
            if item[4] == "{":
                end = closing(body, item.end() - 1)
                if item[2] == "operator[]":
                    made_here.indexed = True
                made_here.methods[item[2]] = (item[1], item[3], body[item.end() - 1:end + 1])
                at = end + 1
            else:
                at = item.end()
            continue
        line = re.compile(r"\s*([^;{]*(?:\{[^;]*\})?[^;{]*);").match(body, at)
        if not line:
            break
        at = line.end()
        text = line[1]
        if "static constexpr" in text:
            kind, constant, value = re.match(r"static constexpr (\w+) (\w+) = (.*)", text).groups()
            constants += f"const {type_of(kind)} {name}_{constant} = {expression(value, {})};\n"
            body = body[:at] + re.sub(rf"\b{constant}\b", f"{name}_{constant}", body[at:])
            continue
        kind, names = re.match(r"(?:const )?([\w:<>]+)\s*(.*)", text, re.S).groups()
        for part in split(names):
            field = re.match(r"(\*?)\s*(\w+)(?:\[(\d+)\])?(?: = (.*))?$", part.removeprefix("const ").strip())
            glsl = "uint64_t" if field[1] else type_of(kind)
            made_here.fields.append((glsl, field[2], int(field[3] or 0), field[4]))
            if glsl in structs and structs[glsl].indexed:
                indexed_names.add(field[2])
    for method, (returns, parameters, inside) in made_here.methods.items():
        if method == "operator[]":
            method = "at"
        else:
            methods[method] = name
        after.append(function(method, returns, parameters, inside, made_here))
    lines = "".join(f"  {k} {n}{f'[{length}]' if length else ''};\n" for k, n, length, _ in made_here.fields)
    return f"struct {name} {{\n{lines}}};\n" + constants + "".join(after)


def translated(text, name):
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"\n#pragma[^\n]*|\n#include[^\n]*", "", text)
    if match := re.search(rf"enum class {name} \{{([^}}]*)\}}", text):
        enums[name] = match[1]
        return "".join(f"const int {name}_{value} = {n};\n" for n, value in enumerate(split(match[1])))
    if match := re.search(rf"\bstruct {name} (?=\{{)", text):
        return struct(name, text[match.end() + 1:closing(text, match.end())])
    if match := re.search(rf"(?:constexpr|TESSERA_ALWAYS_INLINE) (?:static )?([\w<>]+) {re.escape(name)}\(", text):
        end = closing(text, match.end() - 1)
        begin = text.index("{", end)
        return function(name, match[1], text[match.end():end], text[begin:closing(text, begin) + 1])
    fail(f"there is no {name}")


def layout(name, base, out):
    """Offsets of a block's members by C's rule; the host's compiler is asked whether it agrees."""
    at, most = 0, 1
    for kind, field, length, _ in structs[name].fields:
        size, align = layout_of(kind)
        at = -(-at // align) * align
        out.append((f"{base}, {field}", at))
        at, most = at + size * max(1, length), max(most, align)
    return -(-at // most) * most, most


def layout_of(kind):
    return layout(kind, "", []) if kind in structs else (SIZES[kind], SIZES[kind])


def main():
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    pieces = ["// Generated by src/vulkan/translate.py from constexpr text in src/. Not to be edited, not to be committed.\n"]
    for file, names in WANTED:
        text = (source / file).read_text()
        pieces += [translated(text, name) for name in names]
    (out / "rules.glsl").write_text("\n".join(pieces))
    places = []
    for name in ("ForwardBlock", "BackwardBlock", "gpu::Question", "gpu::ForwardParams", "gpu::BackwardParams", "Launch", "Kinds"):
        layout(name.removeprefix("gpu::"), name, places)
    lines = [f"static_assert(offsetof({member}) == {at});\n" for member, at in places]
    (out / "layout_check.hpp").write_text(
        "// Generated by src/vulkan/translate.py: GLSL's scalar layout of the blocks is the host's.\n"
        '#include <cstddef>\n\n#include "vulkan/params.hpp"\n\nnamespace tessera::vulkan {\n' + "".join(lines) + "}\n")


if __name__ == "__main__":
    main()
