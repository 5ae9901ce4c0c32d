# SPDX-License-Identifier: Apache-2.0
"""How bench.py and the programs in bench/ measure: medians over rounds in which all contenders take turns (_rounds.py).

`measure` times bursts of calls, on a GPU by events, on the CPU by the clock; `measure_rounds` gives the figures of all
rounds, and `compared` ratios within them. `measure_cold` times GPU work alone, with
nothing of the inputs left in the L2 cache. PlannedPass is a pass of Tessera without a front end around it.
"""
from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from typing import Any, Callable, NamedTuple, Optional, Sequence

from . import _call
from ._abi import CUDA
from ._arrays import view
from ._options import Settings
from ._rounds import CPU_PACE, GPU_PACE, Pace, Timer, take_turns

WARM_UP = 3  # calls before the first is timed
FLUSH_BYTES = 256 << 20  # several times any L2 cache
GRAPH_CALLS = 8  # at least, so that the gap between two replays does not count

Call = Callable[[], Any]


class PlannedPass:
    """One pass over fixed PyTorch tensors, planned once; calling it enqueues on the current stream.

    Tensors are named as in the C ABI, in its layouts: q, k, v, ..., o, lse and, for the backward pass, d_o, dq, dk, dv.
    A workspace that is large enough is used, as that of another pass on the same stream.
    """

    def __init__(self, settings: Settings, workspace: Any = None, **tensors: Any) -> None:
        import torch
        self._tensors = tensors  # the plan's structs hold their addresses
        views = {name: view(name, tensor, 0, []) for name, tensor in tensors.items()}
        self._pointers = [x.pointer for x in views.values()]
        self._call = _call.plan(views, settings)
        self.kernel, self.description = self._call.kernel, self._call.description
        size = max(self._call.workspace_size, 1)
        fits = workspace is not None and workspace.numel() >= size
        self.workspace = workspace if fits else torch.empty(size, dtype=torch.uint8, device=tensors["q"].device)
        self._current_stream = torch.cuda.current_stream if views["q"].device_type == CUDA else None

    def __call__(self) -> None:
        stream = self._current_stream().cuda_stream if self._current_stream else 0
        self._call.run(self._pointers, (0, 0), stream, self.workspace.data_ptr())


# --- bursts ----------------------------------------------------------------------------------------------------------

def _seconds_cpu(call: Call, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def _seconds_cuda(call: Call, count: int) -> float:
    import torch
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3 / count


class Burst:
    """Calls one after another, with whatever the host does for them."""

    def __init__(self, call: Call, device: str) -> None:
        self._call, self._seconds = call, _seconds_cuda if device == "cuda" else _seconds_cpu
        self._seconds(call, WARM_UP)
        self._estimate = self._seconds(call, 1)

    def seconds(self, budget: float) -> float:
        """Of one call: the mean of a burst."""
        self._estimate = self._seconds(self._call, max(1, math.ceil(budget / self._estimate)))
        return self._estimate


def measure_rounds(calls: dict[str, Call], device: str, pace: Optional[Pace] = None) -> dict[str, list[float]]:
    """Seconds of each call in each round."""
    timers: dict[str, Timer] = {name: Burst(call, device) for name, call in calls.items()}
    return take_turns(timers, pace or (GPU_PACE if device == "cuda" else CPU_PACE))


def measure(calls: dict[str, Call], device: str, pace: Optional[Pace] = None) -> dict[str, float]:
    """Median seconds of each call."""
    return {name: statistics.median(values) for name, values in measure_rounds(calls, device, pace).items()}


class Spread(NamedTuple):
    """Of the figures of all rounds."""
    quarter: float
    median: float
    three_quarters: float


def spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def compared(times: dict[str, list[float]], ours: str) -> dict[str, Spread]:
    """How many times as long as ours the others take. A round's turns lie close together, so what drifts slowly is in
    both, and their ratio scatters less than either."""
    return {name: spread([t / base for t, base in zip(values, times[ours])])
            for name, values in times.items() if name != ours}


# --- GPU work alone, from a cold cache -------------------------------------------------------------------------------

class Flushed:
    """Launches with a flush of the L2 cache before each: events stand around the launch alone.

    The flush lasts longer than the host needs for a launch, so the GPU never waits for the host between the events.
    """
    method = "flushed"

    def __init__(self, call: Call, flush: Call) -> None:
        self._call, self._flush = call, flush
        self._events: list[tuple[Any, Any]] = []
        self._estimate = self._median(3)

    def _median(self, count: int) -> float:
        import torch
        while len(self._events) < count:
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        for start, stop in self._events[:count]:
            self._flush()
            start.record()
            self._call()
            stop.record()
        stop.synchronize()
        return float(statistics.median(start.elapsed_time(stop) for start, stop in self._events[:count])) * 1e-3

    def seconds(self, budget: float) -> float:
        """Of one launch: the median of as many as take `budget` seconds, flushes not counted."""
        self._estimate = self._median(max(1, math.ceil(budget / self._estimate)))
        return self._estimate


class Graphed:
    """Replays of a CUDA graph that holds the same call over several sets of buffers: no host time at all.

    The buffers of one set must exceed the L2 cache, or all sets together, so that each call finds it cold.
    """
    method = "graph"

    def __init__(self, calls: Sequence[Call], least: int = GRAPH_CALLS) -> None:
        import torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        side.synchronize()
        self._count = len(calls) * -(-least // len(calls))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            for i in range(self._count):
                calls[i % len(calls)]()
        self._estimate = _seconds_cuda(self._graph.replay, 2)

    def seconds(self, budget: float) -> float:
        """Of one call, over replays that take `budget` seconds."""
        self._estimate = _seconds_cuda(self._graph.replay, max(1, math.ceil(budget / self._estimate)))
        return self._estimate / self._count


def measure_cold(calls: dict[str, Sequence[Call]], graphs: bool, pace: Pace = GPU_PACE,
                 graph_calls: int = GRAPH_CALLS) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each contender's call in each round, and how it was timed.

    A contender is the same call over several sets of buffers. With `graphs` it is captured, at least `graph_calls` calls
    in a graph; where it cannot be, and without `graphs`, its launches are flushed.
    """
    import torch
    room = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    timers: dict[str, Any] = {}
    for name, variants in calls.items():
        if graphs:
            try:
                timers[name] = Graphed(variants, graph_calls)
            except RuntimeError:  # a contender whose call does more than to launch
                torch.cuda.synchronize()
        if name not in timers:
            timers[name] = Flushed(variants[0], room.zero_)
    return take_turns(timers, pace), {name: timer.method for name, timer in timers.items()}


def require_places(*paths: Optional[str]) -> None:
    """Ends the program in a sentence where a file that is to be written cannot be. To be asked before anything is
    measured; what is there already stays as it is."""
    for path in paths:
        if path is None:
            continue
        is_new = not os.path.lexists(path)
        try:
            with open(path, "ab"):
                pass
        except OSError as error:
            sys.exit(f"cannot write {path}: {error.strerror}")
        if is_new:
            os.unlink(path)


def write_report(path: Optional[str], report: Any) -> None:
    """As JSON, where a path is given."""
    if path is None:
        return
    with open(path, "w", encoding="utf-8") as out:
        json.dump(report, out, indent=2)
        out.write("\n")
