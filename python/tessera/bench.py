# SPDX-License-Identifier: Apache-2.0
"""python -m tessera.bench: attention through tessera.torch beside what else is importable, in one process, in turn.

    python -m tessera.bench [--device cuda] [--dtype bfloat16] [--tokens 512 1024 ...] [--dims 64 128] [--png FILE]
    python -m tessera.bench --overhead          host time of a call beside an empty operator registered the same way,
                                                with gradients beside an autograd.Function that only makes its results

Contenders: PyTorch's SDPA with each of its backends, flash_attn, flash_attn_interface. Those that are missing, or
refuse the problem, are left out and named. All read the same numbers, as [B,N,H,D] or views of it. Under each time stand
the quartiles over the rounds, and how many times as long as Tessera the others take: the median of the rounds' ratios,
and quartiles. Needs PyTorch.
"""
from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import importlib.util
import statistics
import sys
import time
from typing import Any, Callable, Iterable, Optional

import torch
from torch import Tensor

from . import _torch_calls, _torch_ops
from . import torch as tessera_torch
from ._measure import PlannedPass, Spread, compared, measure_rounds, require_places, spread, write_report
from ._options import Settings
from ._rounds import HOST_PACE, turns

EMPTY = "empty operator"
LONGEST_OF_HOST = 1024  # tokens up to which the host may take longer than a GPU
Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def _sdpa(backend: Any) -> Attention:
    from torch.nn.attention import sdpa_kernel

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    return attention


def _flash(module: Any) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        o = module.flash_attn_func(q, k, v, causal=causal)
        return o[0] if isinstance(o, tuple) else o  # type: ignore[no-any-return]
    return attention


def contenders() -> tuple[dict[str, Attention], list[str]]:
    """Those that can be imported, and sentences about the others."""
    from torch.nn.attention import SDPBackend
    found: dict[str, Attention] = {"tessera": lambda q, k, v, causal: tessera_torch.attention(q, k, v, causal=causal)}
    for name, backend in (("sdpa cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa flash", SDPBackend.FLASH_ATTENTION),
                          ("sdpa efficient", SDPBackend.EFFICIENT_ATTENTION), ("sdpa math", SDPBackend.MATH)):
        found[name] = _sdpa(backend)
    missing = []
    for name in ("flash_attn", "flash_attn_interface"):
        try:
            found[name] = _flash(importlib.import_module(name))
        except Exception as error:  # whatever goes wrong inside a foreign module
            missing.append(f"{name}: {error}")
    return found, missing


def _operations(batch: int, heads: int, tokens: int, dim: int, causal: bool, backward: bool) -> float:
    """By the usual count: 4 N^2 D a head, half when causal, 2.5 times more for the backward pass."""
    return 4.0 * batch * heads * tokens**2 * dim / (2 if causal else 1) * (3.5 if backward else 1)


def _calls(attention: Attention, tensors: list[Tensor], d_o: Tensor, causal: bool) -> dict[str, Callable[[], Any]]:
    q, k, v = tensors
    plain_q, plain_k, plain_v = (t.detach() for t in tensors)
    return {"forward": lambda: attention(plain_q, plain_k, plain_v, causal),
            "forward+backward": lambda: torch.autograd.grad(attention(q, k, v, causal), tensors, d_o)}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _line(tokens: Any, dim: Any, mask: str, what: str, cells: dict[str, str], columns: Iterable[str]) -> str:
    return f"{tokens:>6} {dim:>4}  {mask:6}  {what:16}" + "".join(f"{cells.get(name, '-'):>18}" for name in columns)


def _row(point: dict[str, Any], times: dict[str, list[float]], work: float) -> dict[str, Any]:
    spreads = {name: spread(values) for name, values in times.items()}
    return {**point, "seconds": {name: s.median for name, s in spreads.items()},
            "tflops": {name: work / s.median / 1e12 for name, s in spreads.items()},
            "quartiles": {name: [s.quarter, s.three_quarters] for name, s in spreads.items()},
            "over_tessera": compared(times, "tessera") if "tessera" in times else {},
            "rounds": len(next(iter(times.values()), []))}


def _print_row(row: dict[str, Any], columns: Iterable[str]) -> None:
    times = {name: f"{t * 1e3:.4g} ({row['tflops'][name]:.3g})" for name, t in row["seconds"].items()}
    between = {name: f"{low * 1e3:.4g} to {high * 1e3:.4g}" for name, (low, high) in row["quartiles"].items()}
    ratios = {name: _ratio_text(ratio) for name, ratio in row["over_tessera"].items()}
    print(_line(row["tokens"], row["dim"], "causal" if row["causal"] else "full", row["pass"], times, columns))
    print(_line("", "", "", "  quartiles", between, columns))
    print(_line("", "", "", "  over tessera", ratios, columns), flush=True)


def _ratio_text(ratio: Spread) -> str:
    low, middle, high = (f"{value:.2f}" if value < 10 else f"{value:.3g}" for value in ratio)
    return f"{middle} ({low}-{high})"


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found, missing = contenders()
    for sentence in missing:
        print(f"left out: {sentence}")
    print(_line("tokens", "dim", "mask", "pass", {name: name for name in found}, found))
    rows = []
    refused: set[str] = set()
    dtype = getattr(torch, arguments.dtype)
    for dim in arguments.dims:
        for causal in (False, True):
            for tokens in arguments.tokens:
                shape = (arguments.batch, tokens, arguments.heads, dim)
                tensors = [torch.randn(shape, device=arguments.device, dtype=dtype, requires_grad=True) for _ in "qkv"]
                d_o = torch.randn(shape, device=arguments.device, dtype=dtype)
                able = {}
                for name, attention in found.items():
                    try:
                        for call in _calls(attention, tensors, d_o, causal).values():
                            call()
                        able[name] = _calls(attention, tensors, d_o, causal)
                    except Exception as error:  # a refusal: of this problem, on this machine
                        refused.add(f"{name}: {_first_line(error)}")
                pace = HOST_PACE if arguments.device == "cuda" and tokens <= LONGEST_OF_HOST else None
                for what in ("forward", "forward+backward"):
                    times = measure_rounds({name: calls[what] for name, calls in able.items()}, arguments.device, pace)
                    work = _operations(arguments.batch, arguments.heads, tokens, dim, causal, what != "forward")
                    rows.append(_row({"tokens": tokens, "dim": dim, "causal": causal, "pass": what}, times, work))
                    _print_row(rows[-1], found)
    for sentence in sorted(refused):
        print(f"refused: {sentence}")
    return rows


def draw(rows: list[dict[str, Any]], title: str, file: str) -> None:
    """Speed against sequence length, a panel for each head dim and mask, solid for forward, dashed with backward."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    panels = sorted({(row["dim"], row["causal"]) for row in rows})
    names = sorted({name for row in rows for name in row["tflops"]}, key=lambda name: (name != "tessera", name))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), squeeze=False)
    for axis, (dim, causal) in zip(axes[0], panels):
        for number, name in enumerate(names):
            for what, style in (("forward", "-"), ("forward+backward", "--")):
                points = [(row["tokens"], row["tflops"][name]) for row in rows
                          if (row["dim"], row["causal"], row["pass"]) == (dim, causal, what) and name in row["tflops"]]
                if points:
                    axis.plot(*zip(*sorted(points)), style, marker="o", markersize=3, color=f"C{number}",
                              label=name if what == "forward" else None)
        axis.set_xscale("log", base=2)
        axis.set_title(f"D = {dim}, {'causal' if causal else 'full'}")
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("TFLOP/s (dashed: forward + backward)")
    axes[0][0].legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


ONE_TOKEN = (1, 1, 1, 64)


@functools.cache
def _empty_operator() -> tuple[Any, Any]:
    """An operator that only makes its outputs, registered as ours is; and its library, without which it is gone."""
    def make(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(*ONE_TOKEN), q.new_empty(*ONE_TOKEN[:3], dtype=torch.float32)

    library = torch.library.Library("tessera_empty", "DEF")  # type: ignore[no-untyped-call]
    return _torch_ops.register(library, "forward", _torch_ops.FORWARD, "(Tensor, Tensor)", make,
                               _torch_ops.Attention), library


class _EmptyFunction(torch.autograd.Function):
    """What PyTorch takes for itself: saves what ours saves, makes what ours makes, computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        o, lse = q.new_empty(*ONE_TOKEN), q.new_empty(*ONE_TOKEN[:3], dtype=torch.float32)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, d_lse: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(x.new_empty(*ONE_TOKEN) for x in ctx.saved_tensors[:3])


def _planned(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> Callable[[], None]:
    """Both passes of causal attention without PyTorch: what is not host time on the CPU, and launches on a GPU."""
    o, lse = _torch_ops.run_forward(q, k, v, True)
    saved = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    gradients = {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
    settings = Settings(causal=1, threads=torch.get_num_threads())
    passes = PlannedPass(settings, **saved), PlannedPass(settings, **saved, d_o=d_o, **gradients)

    def run() -> None:
        for planned in passes:
            planned()
    return run


def overhead(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of host time per call: an operator that only makes its outputs, ours, and the function around it."""
    q, k, v = (torch.randn(ONE_TOKEN, device=device, dtype=dtype) for _ in range(3))
    trained, d_o = [x.detach().requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    empty, _ = _empty_operator()
    forward, attention = torch.ops.tessera.forward.default, tessera_torch.attention
    sdpa = torch.nn.functional.scaled_dot_product_attention  # of one token: with heads first it is the same
    found, _ = contenders()

    def gradients(o: Tensor) -> Any:
        return torch.autograd.grad(o, trained, d_o)

    calls = {EMPTY: lambda: empty(q, k, v),
             "tessera::forward": lambda: forward(q, k, v),
             "tessera.torch.attention": lambda: attention(q, k, v),
             "the same, causal=True": lambda: attention(q, k, v, causal=True),
             "and its gradients": lambda: gradients(attention(*trained, causal=True)),
             "of them, the two plans": _planned(q, k, v, d_o),
             "empty Function's": lambda: gradients(_EmptyFunction.apply(*trained)[0]),  # type: ignore[no-untyped-call]
             "SDPA's, causal": lambda: gradients(sdpa(*trained, is_causal=True))}
    for name in ("sdpa flash", "flash_attn", "flash_attn_interface"):  # as they are called with [B,N,H,D]
        if name in found:
            calls[f"{name}'s"] = functools.partial(lambda attend: gradients(attend(*trained, True)), found[name])
            try:
                calls[f"{name}'s"]()
            except Exception:  # a refusal: on this machine, or of this type
                del calls[f"{name}'s"]
    times: dict[str, list[float]] = {name: [] for name in calls}
    clock = time.perf_counter if device == "cuda" else time.process_time  # which no other process disturbs
    for number in range(30):
        for name in turns(list(calls), number):
            call = calls[name]
            if device == "cuda":
                torch.cuda.synchronize()
            begin = clock()
            for _ in range(100):  # few enough for a GPU's queue: enqueuing never waits
                call()
            times[name].append((clock() - begin) / 100 * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main(words: Optional[list[str]] = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m tessera.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cuda", "cpu"])
    types = ["float32", "float16", "bfloat16"]
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32", choices=types)
    parser.add_argument("--batch", type=int, default=4 if cuda else 1)
    parser.add_argument("--heads", type=int, default=16 if cuda else 4)
    lengths = [512, 1024, 2048, 4096, 8192] if cuda else [256, 512, 1024]
    parser.add_argument("--tokens", type=int, nargs="+", default=lengths)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128] if cuda else [64])
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--png", metavar="FILE", help="draw them (needs matplotlib)")
    parser.add_argument("--overhead", action="store_true", help="measure host time per call instead")
    arguments = parser.parse_args(words)
    if arguments.device == "cuda" and not cuda:
        sys.exit("tessera.bench: PyTorch finds no GPU; --device cpu compares on the CPU")
    require_places(arguments.json, arguments.png)
    if arguments.png and importlib.util.find_spec("matplotlib") is None:
        sys.exit("tessera.bench: --png needs matplotlib, which is not installed")
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    report: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "date": datetime.date.today().isoformat(),
                              **vars(arguments)}
    if arguments.overhead:
        times = report["microseconds"] = overhead(arguments.device, getattr(torch, arguments.dtype))
        way = "C" if _torch_calls.in_c else "Python"
        print(f"{machine}, {arguments.dtype}, one token, PyTorch {torch.__version__}, tensors read in {way}")
        for name, value in times.items():
            print(f"{name:24} {value:7.1f} us  {value - times[EMPTY]:+7.1f}")
    else:
        title = f"{machine}, {arguments.dtype}, B={arguments.batch} H={arguments.heads}, PyTorch {torch.__version__}"
        print(f"{title}; milliseconds (TFLOP/s)")
        report["rows"] = compare(arguments)
        if arguments.png:
            draw(report["rows"], title, arguments.png)
    write_report(arguments.json, report)


if __name__ == "__main__":
    main()
