#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tessera and PyTorch's attention on the CPU, interleaved in one process, with the same threads, forward and backward.

    TESSERA_LIBRARY=build/src/libtessera.so python3 bench/cpu_peers.py [--threads 2] [--types f32 bf16 f16]
                                                                       [--kernel NAME] [--only TEXT] [--json FILE]
                                                                       [--disturb PROCESSORS]

Both read the same memory: contiguous [B,N,H,D], which PyTorch takes as views [B,H,N,D]. Tessera is called through its C
ABI, planned once, with a workspace; PyTorch's backward pass alone is torch.autograd.grad over a kept graph. Interleaved
rounds, medians, after warm-up. Decoding (one query) is counted in bytes of K and V per second, beside a loop that
only reads as much memory, if there is a C compiler to make one. --disturb keeps some processors busy a quarter of the
time, as other programs or other guests of the machine do. Needs PyTorch.
"""
import argparse
import ctypes
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
os.environ.setdefault("TESSERA_LIBRARY", str(ROOT / "build" / "src" / "libtessera.so"))

# Goals: the geometric mean of each group on two threads, and that of every group on more than two.
WANTED = {("bf16", "forward"): 2.5, ("bf16", "backward"): 4.0, ("f16", "forward"): 2.5, ("f16", "backward"): 2.0,
          ("f32", "forward"): 1.4, ("f32", "backward"): 1.4}
WANTED_DECODE, WANTED_DECODE_OF_LIMIT, WANTED_ON_MANY, WANTED_OF_EACH_ROW = 2.0, 0.85, 1.3, 1.0
ROUNDS, SHORTEST_BURST = 9, 2e-2  # rounds, and the least seconds of a measurement
READ_TIMES = 8


class Shape(NamedTuple):
    tokens: int
    dim: int
    causal: bool = False
    heads: int = 8
    kv_heads: int = 8

    def __str__(self):
        group = f" {self.heads}/{self.kv_heads} heads" if self.heads != self.kv_heads else ""
        return f"{self.tokens},{self.dim} {'causal' if self.causal else 'full'}{group}"


ADDED = [Shape(4096, 64), Shape(2048, 128, True, 32, 8)]  # to the rows of the published table, for every type
SHAPES = {"f32": [Shape(512, 64), Shape(2048, 64), Shape(2048, 128), Shape(2048, 128, True), Shape(4096, 128, True)],
          "bf16": [Shape(512, 64), Shape(2048, 64), Shape(2048, 128), Shape(4096, 128), Shape(4096, 128, True)],
          "f16": [Shape(2048, 128)]}
DECODE_KEYS, DECODE_DIM = (8192, 32768), 128
DECODE_HEADS = ((8, 8), (32, 8))

READER = """
#include <pthread.h>
#include <stddef.h>
typedef unsigned long long Words __attribute__((vector_size(64)));
struct Reader { const Words* memory; size_t part, first; int parts, times; Words sum; };
static void* read_parts(void* argument) {
  struct Reader* reader = argument;
  Words a = {0}, b = {0}, c = {0}, d = {0};
  for (int time = 0; time < reader->times; ++time) {
    const Words* begin = reader->memory + (reader->first + time) % reader->parts * reader->part;
    for (size_t n = 0; n + 4 <= reader->part; n += 4)
      a ^= begin[n], b ^= begin[n + 1], c ^= begin[n + 2], d ^= begin[n + 3];
  }
  reader->sum = a ^ b ^ c ^ d;
  return NULL;
}
unsigned long long read_all(const void* memory, size_t bytes, int threads, int times) {
  struct Reader readers[256];
  pthread_t helpers[256];
  for (int t = 0; t < threads; ++t) {
    readers[t] = (struct Reader){memory, bytes / sizeof(Words) / (size_t)threads, (size_t)t, threads, times, {0}};
    if (t > 0) pthread_create(&helpers[t], NULL, read_parts, &readers[t]);
  }
  read_parts(&readers[0]);
  unsigned long long all = readers[0].sum[0];
  for (int t = 1; t < threads; ++t) pthread_join(helpers[t], NULL), all ^= readers[t].sum[0];
  return all;
}
"""


def build_reader():
    """A loop of loads on several threads, compiled here; None without a C compiler. It reads everything several times,
    so that starting the threads hardly counts, and no thread the same part twice in a row."""
    folder = tempfile.mkdtemp()
    source, library = Path(folder) / "reader.c", Path(folder) / "reader.so"
    source.write_text(READER)
    command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(source), "-o",
               str(library)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    function = ctypes.CDLL(str(library)).read_all
    function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 2
    return function


class Problem:
    """Inputs of one shape and type, and both libraries' passes over them."""

    def __init__(self, torch, arguments, type_name, shape, queries=None, backward=True):
        from tessera import _measure, _options
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[type_name]
        make = torch.Generator().manual_seed(shape.dim + shape.causal)
        rows = shape.tokens if queries is None else queries
        normal = lambda n, heads: torch.randn(1, n, heads, shape.dim, generator=make).to(dtype)
        q, d_o = normal(rows, shape.heads), normal(rows, shape.heads)
        k, v = normal(shape.tokens, shape.kv_heads), normal(shape.tokens, shape.kv_heads)
        inputs = {"q": q, "k": k, "v": v}
        o, lse = torch.empty_like(q), torch.empty(1, shape.heads, rows)
        settings = _options.Settings(causal=shape.causal, threads=arguments.threads, kernel=arguments.kernel)
        self.forward = _measure.PlannedPass(settings, **inputs, o=o, lse=lse)
        self.forward()
        views = [t.transpose(1, 2) for t in (q, k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        more = {"is_causal": shape.causal, "enable_gqa": shape.heads != shape.kv_heads}

        def peer_forward():
            with torch.no_grad():
                return attend(*views, **more)

        self.peer_forward = peer_forward
        self.difference = float((peer_forward().transpose(1, 2).float() - o.float()).abs().max())
        if not backward:
            return
        self.backward = _measure.PlannedPass(settings, **inputs, o=o, lse=lse, d_o=d_o, dq=torch.empty_like(q),
                                             dk=torch.empty_like(k), dv=torch.empty_like(v))
        leaves = [t.detach().requires_grad_() for t in views]
        graph = attend(*leaves, **more)
        self.peer_backward = lambda: torch.autograd.grad(graph, leaves, d_o.transpose(1, 2), retain_graph=True)


def disturb(processors):
    """A process for each of so many processors, spread out, that takes it for 3 of every 12 ms until this one ends."""
    allowed = sorted(os.sched_getaffinity(0))
    if not 0 <= processors <= len(allowed):
        sys.exit(f"cpu_peers.py: --disturb is {processors}: it must lie between 0 and the {len(allowed)} processors here")
    for number in range(processors):
        if os.fork() == 0:
            parent = os.getppid()
            os.sched_setaffinity(0, {allowed[number * len(allowed) // processors]})
            while os.getppid() == parent:
                end = time.perf_counter() + 3e-3
                while time.perf_counter() < end:
                    pass
                time.sleep(9e-3)
            os._exit(0)


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(x) for x in values))


def measure_products(torch, measure, arguments, rows):
    print(f"{'type':5}{'N,D mask':29}{'pass':9}{'kernel':10}{'tessera':>11}{'GF/s':>8}{'torch':>12}{'GF/s':>8}{'ratio':>8}")
    for type_name in arguments.types:
        for shape in SHAPES[type_name] + ADDED:
            if arguments.only and arguments.only not in str(shape):
                continue
            problem = Problem(torch, arguments, type_name, shape)
            for name in ("forward", "backward"):
                ours = getattr(problem, name)
                times = measure({"tessera": ours, "torch": getattr(problem, "peer_" + name)})
                work = 4 * shape.heads * shape.tokens**2 * shape.dim * (2.5 if name == "backward" else 1)
                work /= 2 if shape.causal else 1
                row = {"type": type_name, "shape": str(shape), "pass": name, "kernel": ours.kernel, "seconds": times,
                       "gflops": {who: work / t / 1e9 for who, t in times.items()},
                       "ratio": times["torch"] / times["tessera"], "largest_difference": problem.difference}
                rows.append(row)
                print(f"{type_name:5}{str(shape):29}{name:9}{ours.kernel:10}"
                      f"{times['tessera'] * 1e3:>8.2f} ms{row['gflops']['tessera']:>8.0f}"
                      f"{times['torch'] * 1e3:>9.2f} ms{row['gflops']['torch']:>8.0f}{row['ratio']:>7.2f}x", flush=True)


def measure_decoding(torch, measure, arguments, rows):
    reader = build_reader()
    print(f"\n{'type':5}{'one query':24}{'kernel':10}{'tessera':>11}{'GB/s':>7}{'torch':>12}{'GB/s':>7}{'read':>7}"
          f"{'ratio':>8}{'of read':>9}")
    for type_name in arguments.types:
        for heads, kv_heads in DECODE_HEADS:
            for keys in DECODE_KEYS:
                shape = Shape(keys, DECODE_DIM, False, heads, kv_heads)
                label = f"{keys} keys {heads}/{kv_heads} heads"
                if arguments.only and arguments.only not in label:
                    continue
                problem = Problem(torch, arguments, type_name, shape, queries=1, backward=False)
                size = 2 * keys * kv_heads * DECODE_DIM * (4 if type_name == "f32" else 2)
                memory = torch.full((size,), 85, dtype=torch.uint8)
                calls = {"tessera": problem.forward, "torch": problem.peer_forward}
                if reader:
                    calls["read"] = lambda: reader(memory.data_ptr(), size, arguments.threads, READ_TIMES)
                times = measure(calls)
                if reader:
                    times["read"] /= READ_TIMES
                rate = {who: size / t / 1e9 for who, t in times.items()}
                row = {"type": type_name, "shape": label, "pass": "decode", "kernel": problem.forward.kernel,
                       "seconds": times, "gbytes": rate, "ratio": times["torch"] / times["tessera"],
                       "of_read": rate["tessera"] / rate["read"] if reader else None}
                rows.append(row)
                limit = f"{rate['read']:>7.1f}" if reader else f"{'-':>7}"
                share = f"{row['of_read']:>9.2f}" if reader else f"{'-':>9}"
                print(f"{type_name:5}{label:24}{row['kernel']:10}{times['tessera'] * 1e6:>8.0f} us{rate['tessera']:>7.1f}"
                      f"{times['torch'] * 1e6:>9.0f} us{rate['torch']:>7.1f}{limit}{row['ratio']:>7.2f}x{share}",
                      flush=True)


def judge(rows, threads):
    """The goal of each group beside its measurement."""
    verdicts = []

    def say(what, value, wanted):
        verdicts.append({"what": what, "value": value, "wanted": wanted, "met": value >= wanted})
        print(f"  {what:34}{value:6.2f}   wanted {wanted:.2f}: {'met' if value >= wanted else 'NOT met'}")

    print("\nratios (PyTorch's time over Tessera's), geometric means:")
    groups = {}
    for row in rows:
        groups.setdefault((row["type"], row["pass"]) if row["pass"] != "decode" else ("", "decode"), []).append(row)
    for (type_name, name), members in groups.items():
        wanted = WANTED_DECODE if name == "decode" else WANTED[type_name, name]
        wanted = wanted if threads <= 2 else WANTED_ON_MANY
        say(f"{type_name} {name}".strip(), geometric_mean([row["ratio"] for row in members]), wanted)
    shares = [row["of_read"] for row in rows if row.get("of_read")]
    if shares:
        say("decode, smallest share of reading", min(shares), WANTED_DECODE_OF_LIMIT)
    if rows:
        worst = min(rows, key=lambda row: row["ratio"])
        say(f"worst: {worst['type']} {worst['pass']} {worst['shape']}", worst["ratio"], WANTED_OF_EACH_ROW)
    return verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", nargs="+", default=["f32", "bf16", "f16"], choices=["f32", "bf16", "f16"])
    parser.add_argument("--kernel", help="force one of Tessera's kernels, as `tessera info` names it")
    parser.add_argument("--only", metavar="TEXT", help="only the rows whose description holds this")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--passes", nargs="+", default=["products", "decode"], choices=["products", "decode"])
    parser.add_argument("--disturb", type=int, default=0, metavar="PROCESSORS", help="keep so many busy now and then")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    disturb(arguments.disturb)  # before there are threads
    try:
        import torch
    except ImportError as error:
        sys.exit(f"cpu_peers.py: PyTorch is needed: {error}")
    try:
        from tessera import _measure
    except ImportError as error:
        sys.exit(f"cpu_peers.py: {error}")
    _measure.require_places(arguments.json)
    torch.set_num_threads(arguments.threads)
    pace = _measure.Pace(arguments.rounds, 0.0, SHORTEST_BURST)
    measure = lambda calls: _measure.measure(calls, "cpu", pace)
    report = {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(), "rows": [],
              "threads": arguments.threads, "load_before": os.getloadavg()[0], "disturbed": arguments.disturb}
    print(f"PyTorch {report['torch']} ({report['capability']}), {arguments.threads} threads, B=1\n")
    if "products" in arguments.passes:
        measure_products(torch, measure, arguments, report["rows"])
    if "decode" in arguments.passes:
        measure_decoding(torch, measure, arguments, report["rows"])
    report["verdicts"] = judge(report["rows"], arguments.threads)
    _measure.write_report(arguments.json, report)


if __name__ == "__main__":
    main()
