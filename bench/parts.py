#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a carried state costs on a GPU: a forward pass over ranges of its keys, one call after the other, beside one call.

    python3 bench/parts.py [--ranges 16384,8192,4096] [--keys 65536] [--dims 64,128,256] [--json FILE]
    python3 bench/parts.py --dry

16384 queries in bf16, 2048 / D heads, the last rows of the sequence: under a causal mask their diagonal lies in the last
range. `one call` is planned as any call, `one call, invariant` with `part_invariant`, which promises the bits of every
cut; so are the ranges but for `any cut`. All take turns in one process, each warmed up before it is timed
(python/tessera/_rounds.py); medians over the rounds count, of bursts of calls with the host's part. Before that O of the
ranges is compared with that of one call, bit by bit or, for `any cut`, up to rounding. The bar is 1 % for ranges of
16384 keys or more, beside `one call`. --dry runs a tiny point on the CPU, to see that the program works; its figures
mean nothing.
"""
import argparse
import ctypes
import statistics
import sys

import contenders
from contenders import torch

QUERIES, HIDDEN = 16384, 2048  # of every point: heads x head dim
BAR, BAR_FROM = 1.01, 16384  # times as long as one call, for ranges of so many keys
LARGEST_DIFFERENCE = 1e-2  # relative, in the Frobenius norm, from one call


class Forward:
    """A forward pass of the last queries of a sequence over its keys in ranges: a planned call for each."""

    def __init__(self, q, k, v, causal, length, invariant):
        from tessera import _abi, _arrays, _call
        self._abi, self._held = _abi, []
        B, Nq, H, D = q.shape
        Nk, Dv = k.shape[1], v.shape[-1]
        fill = lambda shape, dtype: torch.full(shape, float("nan"), device=q.device, dtype=dtype)
        self.o, lse = fill((B, Nq, H, Dv), q.dtype), fill((B, H, Nq), torch.float32)
        state = {"state_o": fill((B, Nq, H, Dv), torch.float32), "state_m": fill((B, H, Nq), torch.float32),
                 "state_l": fill((B, H, Nq), torch.float64)}

        def struct(kind, tensors):
            views = {name: _call.tensor(name, _arrays._torch_view(name, t)) for name, t in tensors.items()}
            self._held += [tensors, views]
            return _abi.make(kind, **{name: ctypes.pointer(view) for name, view in views.items()})

        self._calls = []
        for begin in range(0, Nk, length):
            end = min(begin + length, Nk)
            inputs = {"q": q, "k": k[:, begin:end], "v": v[:, begin:end], **(state if begin else {})}
            outputs = state if end < Nk else {"o": self.o, "lse": lse}
            options = _abi.make(_abi.Options, causal=causal, alignment=2, diagonal_offset=0, row0=Nk - Nq, col0=begin,
                                part_invariant=invariant)
            execution = _abi.make(_abi.Execution, device_type=_abi.CUDA if q.is_cuda else _abi.CPU)
            self._plan([struct(_abi.Inputs, inputs), struct(_abi.Outputs, outputs), options, execution], q.device)

    def _plan(self, structs, device):
        abi, made = self._abi, ctypes.c_void_p()
        pointers = [ctypes.c_void_p(ctypes.addressof(s)) for s in structs]
        abi.check(abi.lib.tessera_plan_forward(*pointers, ctypes.byref(made)))
        execution = structs[-1]
        size = execution.workspace_bytes = abi.lib.tessera_plan_workspace_size(made)
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        execution.workspace = workspace.data_ptr()
        self.kernel = abi.lib.tessera_plan_kernel(made).decode()
        key_tile = abi.lib.tessera_plan_key_tile
        key_tile.restype, key_tile.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        self.key_tile = key_tile(made)
        self._held += [structs, workspace]
        self._calls.append((execution, (made, *pointers)))

    def __call__(self):
        stream = torch.cuda.current_stream().cuda_stream if self.o.is_cuda else None
        for execution, arguments in self._calls:
            execution.stream = stream
            if status := self._abi.lib.tessera_plan_run_forward(*arguments):
                self._abi.check(status)


def entries_of(arguments, inputs, causal):
    """Each way to compute the pass, by its name, and its longest range; 0: it is one call."""
    keys = inputs[1].shape[1]
    found = {"one call": (Forward(*inputs, causal, keys, 0), 0),
             "one call, invariant": (Forward(*inputs, causal, keys, 1), 0)}
    tile = found["one call, invariant"][0].key_tile
    lengths = [-(-length // tile) * tile for length in arguments.ranges]  # cuts lie on the kernel's tiles
    for length in lengths:
        found[f"ranges of {length}"] = Forward(*inputs, causal, length, 1), length
    found[f"ranges of {lengths[0]}, any cut"] = Forward(*inputs, causal, lengths[0], 0), lengths[0]
    return found


def require_right(entries):
    """That all give the result of one call: those that promise its bits, these."""
    for forward, _ in entries.values():
        forward()
    one, exact = (entries[name][0].o for name in ("one call", "one call, invariant"))
    for name, (forward, length) in entries.items():
        difference = float((forward.o.float() - one.float()).norm() / one.float().norm())
        if not difference <= LARGEST_DIFFERENCE:
            sys.exit(f"wrong: O of {name} differs by {difference:.2g}")
        if length and "any cut" not in name and not torch.equal(forward.o, exact):
            sys.exit(f"wrong: O of {name} has not the bits of one call")


def measure(arguments, dim, causal):
    """A row for each entry."""
    from tessera._measure import Burst
    from tessera._rounds import take_turns
    heads = max(arguments.hidden // dim, 1)
    generator = torch.Generator(contenders.DEVICE).manual_seed(dim + causal)
    inputs = [torch.randn((1, n, heads, dim), device=contenders.DEVICE, generator=generator).to(torch.bfloat16)
              for n in (arguments.queries, arguments.keys, arguments.keys)]
    entries = entries_of(arguments, inputs, causal)
    require_right(entries)
    times = take_turns({name: Burst(forward, contenders.DEVICE) for name, (forward, _) in entries.items()},
                       arguments.pace)
    hidden = arguments.queries * (arguments.queries - 1) / 2 if causal else 0
    work = 4 * heads * dim * (arguments.queries * arguments.keys - hidden) / 1e12
    whole, exact = (statistics.median(times[name]) for name in ("one call", "one call, invariant"))
    rows = []
    for name, (forward, length) in entries.items():
        ratios = [x / y for x, y in zip(times[name], times["one call"])]
        seconds = statistics.median(times[name])
        rows.append({"kind": "parts", "D": dim, "causal": bool(causal), "H": heads, "Nq": arguments.queries,
                     "Nk": arguments.keys, "entry": name, "range": length, "kernel": forward.kernel,
                     "ms": round(seconds * 1e3, 4), "tflops": round(work / seconds, 1),
                     "ratio": round(seconds / whole, 4), "ratio_invariant": round(seconds / exact, 4),
                     "ratios": [round(ratio, 4) for ratio in ratios]})
    return rows


def parse_arguments():
    numbers = lambda text: [int(word) for word in text.split(",")]
    masks = lambda text: [{"full": 0, "causal": 1}[word] for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/src/libtessera.so", help="Tessera's shared library")
    parser.add_argument("--ranges", type=numbers, default=[16384, 8192, 4096], help="keys of a range, of each entry")
    parser.add_argument("--keys", type=int, default=65536, help="keys in all")
    parser.add_argument("--dims", type=numbers, default=[64, 128, 256], help="64,128,256")
    parser.add_argument("--masks", type=masks, default=[0, 1], help="full,causal")
    parser.add_argument("--rounds", type=int, default=4, help="rounds, of 80 ms of warm-up and 80 ms for each entry")
    parser.add_argument("--dry", action="store_true", help="a tiny point on the CPU")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    arguments = parser.parse_args()
    arguments.queries, arguments.hidden = QUERIES, HIDDEN
    if arguments.dry:
        contenders.DEVICE = "cpu"
        arguments.ranges, arguments.keys, arguments.dims = [768, 384], 1536, [64]
        arguments.queries, arguments.hidden = 384, 128
    if not 0 < max(arguments.ranges) < arguments.keys or arguments.keys < arguments.queries:
        parser.error(f"--ranges, --keys: ranges are shorter than all keys, which are at least {arguments.queries}")
    return arguments


def main():
    arguments = parse_arguments()
    contenders.open_library(arguments.library)
    from tessera._rounds import GPU_PACE, Pace
    arguments.pace = Pace(1, 0, 1e-3) if arguments.dry else GPU_PACE._replace(rounds=arguments.rounds)
    rows, put = contenders.open_report(arguments.json)
    where = "CPU" if arguments.dry else torch.cuda.get_device_name()
    print(f"{where}, {arguments.queries} queries, {arguments.keys} keys, bf16. Last: times as long as one call, as the "
          "invariant one, as one call in each round")
    for dim in arguments.dims:
        for causal in arguments.masks:
            for row in measure(arguments, dim, causal):
                put(row)
                print(f"D={dim:<3} {'causal' if causal else 'full':6}  {row['entry']:25}  {row['kernel']:8}  "
                      f"{row['ms']:9.4f} ms  {row['tflops']:6.1f} TFLOP/s  {row['ratio']:.4f} {row['ratio_invariant']:.4f}  "
                      + " ".join(f"{ratio:.4f}" for ratio in row["ratios"]), flush=True)
    judged = [row for row in rows if row["range"] >= BAR_FROM]
    if judged:
        worst = max(judged, key=lambda row: row["ratio"])
        print(f"\nranges of {BAR_FROM} keys or more: at most {worst['ratio']:.4f} times one call (D={worst['D']}, "
              f"{worst['entry']}, {'causal' if worst['causal'] else 'full'}); the bar is {BAR}: "
              f"{'met' if worst['ratio'] <= BAR else 'NOT met'}")


if __name__ == "__main__":
    main()
