# SPDX-License-Identifier: Apache-2.0
# Arrays in .npy files, and attention in float64 over plain lists: what cli_test.py compares the program with.
# Imported by tests/cli/cli_case.py, cli_test.py and cli_files_test.py.
# Uses nothing but Python's standard library; the formulas are those of docs/algorithm.md.
import math
import random
import struct


class Array:
    """A flat list of numbers with a shape, and the .npy file of it."""

    FORMATS = {"<f4": "f", "<f2": "e", "<f8": "d", "<i4": "i", "<i8": "q", "|b1": "?", "|u1": "B"}

    def __init__(self, shape, values, descr="<f4"):
        self.shape, self.values, self.descr = tuple(shape), list(values), descr

    @staticmethod
    def normal(shape, seed, descr="<f4"):
        source = random.Random(seed)
        values = [source.gauss(0, 1) for _ in range(math.prod(shape))]
        code = Array.FORMATS[descr]
        return Array(shape, [struct.unpack("<" + code, struct.pack("<" + code, v))[0] for v in values], descr)

    def save(self, path):
        header = repr({"descr": self.descr, "fortran_order": False, "shape": self.shape})
        data = struct.pack("<%d%s" % (len(self.values), self.FORMATS[self.descr]), *self.values)
        with open(path, "wb") as out:
            out.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data)
        return path

    @staticmethod
    def load(path):
        with open(path, "rb") as file:
            content = file.read()
        assert content[:8] == b"\x93NUMPY\x01\x00", content[:8]
        (length,) = struct.unpack("<H", content[8:10])
        header = eval(content[10 : 10 + length].decode(), {"__builtins__": {}})
        code = Array.FORMATS[header["descr"]]
        values = struct.unpack("<%d%s" % (math.prod(header["shape"]), code), content[10 + length :])
        return Array(header["shape"], values, header["descr"])


def attention(q, k, v, d_o, visible):
    """Forward and backward of q [B,N,H,D] in float64, from the formulas of docs/algorithm.md."""
    B, N, H, D = q.shape
    scale = 1 / math.sqrt(D)
    at = lambda b, n, h, d: ((b * N + n) * H + h) * D + d
    out = {name: [0.0] * len(q.values) for name in ("o", "dq", "dk", "dv")}
    out["lse"] = [0.0] * (B * H * N)
    for b in range(B):
        for h in range(H):
            row = lambda x, n: [x[at(b, n, h, d)] for d in range(D)]
            dot = lambda x, y: sum(a * c for a, c in zip(x, y))
            for i in range(N):
                keys = [j for j in range(N) if visible(i, j)]
                s = {j: scale * dot(row(q.values, i), row(k.values, j)) for j in keys}
                lse = math.log(sum(math.exp(x) for x in s.values()))
                p = {j: math.exp(s[j] - lse) for j in keys}
                out["lse"][(b * H + h) * N + i] = lse
                for d in range(D):
                    out["o"][at(b, i, h, d)] = sum(p[j] * v.values[at(b, j, h, d)] for j in keys)
                delta = dot(row(d_o.values, i), row(out["o"], i))
                for j in keys:
                    ds = p[j] * (dot(row(d_o.values, i), row(v.values, j)) - delta)
                    for d in range(D):
                        out["dv"][at(b, j, h, d)] += p[j] * d_o.values[at(b, i, h, d)]
                        out["dq"][at(b, i, h, d)] += scale * ds * k.values[at(b, j, h, d)]
                        out["dk"][at(b, j, h, d)] += scale * ds * q.values[at(b, i, h, d)]
    return out
