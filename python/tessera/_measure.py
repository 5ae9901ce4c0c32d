"""How bench.py measures: medians over rounds of all contenders in turn, on a GPU by events, on the CPU by the clock."""
from __future__ import annotations

import statistics
import time
from typing import Any, Callable

WARM_UP, ROUNDS, SHORTEST_BURST = 3, 15, 5e-3  # calls, measurements, seconds that a measurement lasts at least

Call = Callable[[], Any]


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


def measure(calls: dict[str, Call], device: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of each call."""
    seconds = _seconds_cuda if device == "cuda" else _seconds_cpu
    for call in calls.values():
        seconds(call, WARM_UP)
    counts = {name: max(1, round(SHORTEST_BURST / seconds(call, 1))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, counts[name]))
    return {name: statistics.median(values) for name, values in times.items()}
