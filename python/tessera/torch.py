"""Attention for PyTorch: differentiable in q, k, v, bias, sinks and through LSE; with torch.compile and autocast.

`attention` is the function to call. Its operators, which torch.compile and the profiler see, are in _torch_ops.py.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

import torch
from torch import Tensor

from . import _torch_ops as ops
from . import _torch_rules  # noqa: F401  registers them
from ._options import sort

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import AttentionOptions


def _signed(value: int) -> int:
    """Operators take integers of 64 bits with a sign."""
    return (value + 2**63) % 2**64 - 2**63


def _require_tensors(tensors: dict[str, Any]) -> None:
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: is a {type(t).__name__}; must be a PyTorch tensor")


def _prepared(q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
              ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k and v in autocast's type, and an operator's other arguments by their names."""
    given: dict[str, Any] = {}
    if options:
        given, tensors, seeds = sort(options)
        if "dropout" in given and given["dropout"] > 0 and "seed" not in seeds and "rng" not in tensors:
            tensors["rng"] = torch.randint(-2**63, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
        if "kernel" in given:
            given[ops.KERNEL] = given.pop("kernel")
        if tensors or seeds:
            _require_tensors(tensors)
            given.update(tensors, **{name: _signed(seed) for name, seed in seeds.items()})
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _require_tensors({"q": q, "k": k, "v": v})
    device = "cuda" if q.is_cuda else "cpu"
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:  # q, k, v and a 16-bit bias take its type
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        bias = given.get("bias")
        if bias is not None and bias.dtype != torch.float32:
            given["bias"] = bias.to(dtype)
    return q, k, v, given


def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[AttentionOptions]) -> Any:
    """Exact attention: O [B,Nq,Hq,Dv] in q's type, or (O, LSE f32 [B,Hq,Nq]) with return_lse.

    q [B,Nq,Hq,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv]; packed with cu_seqlens: q [Tq,Hq,D], ..., O [Tq,Hq,Dv], LSE [Hq,Tq].
    Options: tessera.AttentionOptions. With dropout and neither seed nor rng, the mask's seed is drawn from PyTorch's
    generator of the device. Rows whose last stride is not 1 are copied, everything else is used as it lies.
    """
    q, k, v, given = _prepared(q, k, v, options)
    if torch.compiler.is_compiling() or not ops.unobserved((q, k, v, *given.values())):
        o, lse = ops.forward_operator(q, k, v, **given)
    else:
        arguments = q, k, v, *ops.in_order(given)
        o, lse = ops.Attention.apply(*arguments) if ops.needs_gradient(arguments) else ops.run_forward(*arguments)
    return (o, lse) if return_lse else o


def check(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Raises what `attention` would, but for what depends on the numbers in lengths and tables. Nothing is computed.

    For calls that write before they attend. The plan is kept, so that `attention` finds it.
    """
    q, k, v, given = _prepared(q, k, v, options)
    optional, settings, _ = ops.sort_arguments(tuple(ops.in_order(given)))
    inputs = (ops.rows(q), ops.rows(k), ops.rows(v), *optional)
    for name, t in zip(ops.INPUTS, inputs):
        if t is not None and ops.view(name, t).pointer % t.element_size():
            raise ValueError(f"{name}: data is not aligned to its elements of {t.element_size()} bytes")
    question, _ = ops.find(settings, inputs)
    if not question.idle:
        if question.note is None:
            question.note = ops.outputs(q, v, optional)
        question.idle.append(ops.plan(settings, inputs, ops.RESULTS, question.note.make(q)))
