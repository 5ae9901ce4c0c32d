#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tessera's decoding beside cuDNN, FlashAttention-2, FlashAttention-3 and a kernel that only reads, on one GPU.

    python3 bench/decode_peers.py [--parts bars,kv8,...] [--limit SECONDS] [--json FILE]
    python3 bench/decode_peers.py --parts grid --heads 32/8,64/8 --dims 128 --batches 1,16 --keys 8192
    python3 bench/decode_peers.py --dry

All contenders of a point take turns in one process (python/tessera/_rounds.py): each turn is warmed up, calls are
captured in CUDA graphs of 48 or more over caches that exceed the L2 cache several times together, and medians over the
rounds count. Before that, the first and the last sequence's results are compared with PyTorch's plain operations in f32;
a contender that differs gets no figure. cuDNN and FlashAttention-2 are PyTorch's, called as operators: they take
contiguous caches of 16 bits; FlashAttention-3 takes part if flash_attn_interface can be imported, with packed heads
(`fa3`: its own number of splits, `fa3 split`: two, which packs heads in every build). Several queries see all keys: peers
differ about where a diagonal lies. `host us` is what a call costs the caller, Python included.

Parts, in the order of what they tell: bars (one query at the sizes that have one, contiguous and in shuffled pages of 1,
16, 64 and 256), kv8 (e4m3), queries (4 and 8), mla, append (64 tokens), prefill (prompts over pages), ragged, grid.
--limit begins no further point after so many seconds, and says what is left. --dry runs tiny points of every part on the
CPU, to see that the program works; its figures mean nothing.
"""
import argparse
import datetime
import importlib
import itertools
import statistics
import sys
import time

import contenders
from caches import Append, Cache, Decoding, Flash3, OfPyTorch, Ours, Reading, open_reading
from contenders import Cudnn, Flash2, first_line, torch
from decode_tables import READ, bar_of, speed_table, title, verdict_table, verdicts

ALL_PAGES = (0, 1, 16, 64, 256)
PARTS = ("bars", "kv8", "queries", "mla", "append", "prefill", "ragged", "grid")
HEADS, DIMS, BATCHES = ((32, 32), (32, 8), (64, 8), (64, 4)), (64, 128, 256), (1, 2, 8, 16, 64, 256)
KEYS = (512, 1024, 4096, 8192, 32768, 131072)
MOST_BYTES = 60e9  # of K and V
GRAPH_CALLS, HOST_CALLS = 48, 50
LARGEST_DIFFERENCE = 1e-2  # relative, in the Frobenius norm, of each sequence that is looked at


def problems(arguments):
    """Points of the parts that were asked for."""
    ragged = {"uniform 1 to 16k": tuple(1 + 16383 * n // 63 for n in range(64)), "one of 128k": (131072,) + 31 * (2048,),
              "256 of 256 to 2k": tuple(256 + 1792 * n // 255 for n in range(256))}
    found = {
        "bars": [Decoding("bars", b, n, pages=ALL_PAGES)
                 for b, n in ((1, 8192), (64, 8192), (1, 1024), (1, 4096), (1, 32768), (1, 131072), (8, 4096),
                              (16, 8192))],
        "kv8": [Decoding("kv8", b, n, kv=kv, pages=(0, 16)) for kv in ("e4m3", "e4m3 token")
                for b, n in ((1, 8192), (64, 8192), (16, 8192))],
        "queries": [Decoding("queries", b, 8192, heads=h, queries=nq) for b in (1, 16)
                    for h, nq in ((32, 4), (32, 8), (64, 4), (64, 8))],
        "mla": [Decoding("mla", b, 8192, h, 1, 64, 512, pages=(0, 64), latent=True) for h in (16, 64, 128)
                for b in (1, 16, 64)],
        "append": [Decoding("append", 64, 8192, pages=(16,))],
        "prefill": [Decoding("prefill", b, n, queries=nq, pages=(0, 16, 64, 256), causal=True, kernel="mma")
                    for b, nq, n in ((1, 2048, 16384), (4, 2048, 8192))],
        "ragged": [Decoding("ragged", len(x), -(-max(x) // 256) * 256, lengths=x, pages=(0, 16))
                   for x in ragged.values()],
        "grid": [Decoding("grid", b, n, hq, hk, dim) for (hq, hk), dim, b, n in itertools.product(
            arguments.heads, arguments.dims, arguments.batches, arguments.keys)]}
    chosen = [x for part in PARTS if part in arguments.parts for x in found[part] if x.bytes() <= MOST_BYTES]
    return list(dict.fromkeys(map(small, chosen))) if arguments.dry else chosen


def small(problem):
    """A point of the same kind that a processor does in no time."""
    lengths = (511, 1, 300) if problem.lengths else None
    return problem._replace(batch=3 if lengths else min(problem.batch, 2), keys=512, lengths=lengths,
                            queries=min(problem.queries, 8))


def peers_of(arguments):
    """Contenders that are not ours: name, and what makes one over a cache."""
    if arguments.dry:
        return {}
    found = {"cudnn": lambda cache: OfPyTorch(Cudnn, cache), "fa2": lambda cache: OfPyTorch(Flash2, cache)}
    try:
        importlib.import_module("flash_attn_interface")
        found.update({"fa3": lambda cache: Flash3(cache, 0, 0), "fa3 split": lambda cache: Flash3(cache, 0, 2)})
    except Exception as error:  # whatever goes wrong inside a foreign module
        print(f"left out: fa3: {first_line(error)}", flush=True)
    return found


def makers(problem, arguments):
    """{name: (what makes the contender over a cache, the page size with which it reads it)}."""
    if problem.part == "append":
        return {"tessera": (lambda cache: Append(cache, problem.pages[0]), problem.pages[0])}
    found = {}
    for page in problem.pages:
        shared = {}
        kernel = None if arguments.dry else problem.kernel or arguments.kernel
        for name in (kernel, "decode_queue") if arguments.queue and not problem.kernel else (kernel,):
            found["tessera" + (f" page {page}" if page else "") + (" queue" if name != kernel else "")] = (
                lambda cache, page=page, shared=shared, kernel=name: Ours(cache, kernel, page, shared), page)
    found.update({name: (make, 0) for name, make in arguments.peers.items()})
    if problem.part != "prefill" and arguments.read:
        found[READ] = (lambda cache: Reading(cache, arguments.read), 0)
    return found


def difference(contender, cache, page):
    """The largest relative difference of the first and the last sequence's O; raises where it is too large."""
    if isinstance(contender, Append):
        contender.check()
    if isinstance(contender, (Append, Reading)):
        return contender() or 0.0
    o, largest = contender(), 0.0
    for b in sorted({0, cache.problem.batch - 1}):
        wanted = cache.exact(b, page)
        largest = max(largest, float((o[b].float() - wanted).norm() / wanted.norm()))
        if not largest <= LARGEST_DIFFERENCE:
            raise ArithmeticError(f"wrong: O of sequence {b} differs by {largest:.2g}")
    return largest


def host_microseconds(call):
    """What the caller's thread spends on a call, medians of bursts that the GPU can take without a wait."""
    bursts = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        bursts.append((time.perf_counter() - begin) / HOST_CALLS)
    torch.cuda.synchronize()
    return statistics.median(bursts) * 1e6


def cache_count(problem, arguments):
    """So many caches that together they exceed the L2 cache several times."""
    if arguments.dry:
        return 2
    properties = torch.cuda.get_device_properties(contenders.DEVICE)
    return max(1, -(-4 * getattr(properties, "L2_cache_size", 60 << 20) // problem.bytes()))  # older PyTorch: not there


def measure_times(calls, arguments):
    """{name: seconds in each round}, {name: how it was timed}."""
    from tessera._measure import measure, measure_cold
    if arguments.dry:
        times = measure({name: variants[0] for name, variants in calls.items()}, "cpu", arguments.pace)
        return {name: [t] for name, t in times.items()}, {name: "dry" for name in calls}
    return measure_cold(calls, True, arguments.pace, GRAPH_CALLS)


def measure_point(problem, arguments):
    """A row for each contender: its figures, or the sentence why it has none."""
    caches = [Cache(problem, seed) for seed in range(cache_count(problem, arguments))]
    calls, notes, rows = {}, {}, {}
    for name, (make, page) in makers(problem, arguments).items():
        rows[name] = {**problem.row(), "peer": name}
        try:
            made = [make(cache) for cache in caches]
            notes[name] = {"difference": difference(made[0], caches[0], page)}
            if isinstance(made[0], Ours):
                notes[name]["kernel"] = made[0].kernel
            calls[name] = made
        except Exception as error:  # a refusal: of this problem, on this machine
            rows[name]["error"] = first_line(error)
    times, methods = measure_times(calls, arguments) if calls else ({}, {})
    reading = statistics.median(times[READ]) if READ in times else None
    for name, values in times.items():
        seconds = statistics.median(values)
        row = rows[name]
        row.update(us=round(seconds * 1e6, 3), us_range=[round(min(values) * 1e6, 3), round(max(values) * 1e6, 3)],
                   timing=methods[name], **notes[name])
        if problem.part not in ("append", "prefill"):
            row["tbytes"] = round(problem.bytes() / seconds / 1e12, 4)
        if reading and name != READ:
            row["of_reading"] = round(reading / seconds, 4)
        if not arguments.dry and (name == "tessera" or name in arguments.peers):
            row["host_us"] = round(host_microseconds(calls[name][0]), 2)
        if bar_of(row) and name == "tessera":
            row.update(bar=bar_of(row), met=row["us"] <= bar_of(row))
    return list(rows.values())


def print_point(rows):
    print(title(rows[0]) + f" [{rows[0]['part']}]", flush=True)
    for row in rows:
        if "us" not in row:
            print(f"  {row['peer']:18} {row['error']}", flush=True)
            continue
        print(f"  {row['peer']:18} {row['us']:9.2f} us" + (f"  {row['tbytes']:5.2f} TB/s" if "tbytes" in row else "")
              + (f"  {row['of_reading']:.3f} of reading" if "of_reading" in row else "")
              + (f"  host {row['host_us']:.1f} us" if "host_us" in row else "")
              + (f"  bar {row['bar']:g}: {'met' if row['met'] else 'MISSED'}" if "bar" in row else "")
              + ("" if row["timing"] == "graph" else f"  ({row['timing']})"), flush=True)


# --- the program -----------------------------------------------------------------------------------------------------

def parse_arguments():
    words = lambda text: text.split(",")
    numbers = lambda text: tuple(int(word) for word in words(text))
    pairs = lambda text: tuple(tuple(map(int, word.split("/"))) for word in words(text))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/src/libtessera.so", help="Tessera's shared library")
    parser.add_argument("--reading", default="build/bench/libtessera_reading.so", help="the library that only reads")
    parser.add_argument("--kernel", default="decode", help="Tessera's kernel, or a family, of which the planner "
                        "chooses (decode); empty: what calls get that name none")
    parser.add_argument("--parts", type=words, default=list(PARTS[:-1]), help=",".join(PARTS))
    parser.add_argument("--heads", type=pairs, default=HEADS, help="of the grid: 32/32,32/8,64/8,64/4")
    parser.add_argument("--dims", type=numbers, default=DIMS, help="of the grid: 64,128,256")
    parser.add_argument("--batches", type=numbers, default=BATCHES, help="of the grid: 1,2,8,16,64,256")
    parser.add_argument("--keys", type=numbers, default=KEYS, help="of the grid: 512,1024,4096,8192,32768,131072")
    parser.add_argument("--rounds", type=int, default=4, help="rounds in which all take turns (4)")
    parser.add_argument("--warm", type=float, default=0.08, help="seconds of warm-up of each turn (0.08)")
    parser.add_argument("--seconds", type=float, default=0.08, help="seconds of measurement of each turn (0.08)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no point begins")
    parser.add_argument("--queue", action="store_true", help="beside it decode_queue, whose blocks share a queue")
    parser.add_argument("--dry", action="store_true", help="tiny points on the CPU, to see that the program works")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    if any(len(pair) != 2 or pair[1] < 1 or pair[0] % pair[1] for pair in arguments.heads):
        parser.error("--heads: must be pairs such as 32/8, of which the second divides the first")
    arguments.kernel = arguments.kernel or None
    if arguments.dry:
        arguments.rounds, arguments.warm, arguments.seconds = 1, 0.0, 0.0
    return arguments


def describe_machine(arguments):
    gpu = "a processor: figures mean nothing" if arguments.dry else torch.cuda.get_device_name()
    return {"kind": "machine", "gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(), "command": " ".join(["bench/decode_peers.py", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(), "sustained": False,
            **{name: getattr(arguments, name) for name in ("rounds", "warm", "seconds")}}


def main():
    arguments = parse_arguments()
    contenders.DEVICE = "cpu" if arguments.dry else "cuda"
    contenders.open_library(arguments.library)
    from tessera._rounds import Pace
    arguments.pace = Pace(arguments.rounds, arguments.warm, arguments.seconds)
    begin, (rows, put) = time.monotonic(), contenders.open_report(arguments.json)

    put(describe_machine(arguments))
    print(" ".join(f"{key}={value}" for key, value in rows[0].items()), flush=True)
    arguments.peers = peers_of(arguments)
    arguments.read = (lambda ranges, found: None) if arguments.dry else open_reading(arguments.reading)
    left = problems(arguments)
    while left and time.monotonic() - begin < arguments.limit:
        measured = measure_point(left.pop(0), arguments)
        print_point(measured)
        for row in measured:
            put(row)
    for part in PARTS:
        if any(row["kind"] == "decode" and row["part"] == part and "us" in row for row in rows):
            print(f"\n{part}\n\n" + "\n".join(speed_table(rows, part)), flush=True)
    found = verdicts(rows)
    for row in found:
        put(row)
    print("\n" + "\n".join(verdict_table(found)))
    for problem in left:
        put({**problem.row(), "kind": "left"})
    print(f"\n{time.monotonic() - begin:.0f} s; {len(left)} points did not begin", flush=True)


if __name__ == "__main__":
    main()
