# SPDX-License-Identifier: Apache-2.0
"""Attention for PyTorch: differentiable in q, k, v, bias, sinks and through LSE; with torch.compile and autocast.

`attention` is the function to call, or `scaled_dot_product_attention` in place of PyTorch's; `append` writes to a cache
of keys and values. The operators that torch.compile and the profiler see are in _torch_ops.py and _torch_append.py.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Mapping, Optional, Sequence, Union, overload

import torch
from torch import Tensor

from . import _torch_ops as ops
from . import _torch_rules  # noqa: F401  registers them
from ._abi import renamed
from ._convert import optional, type_name
from ._options import KEYWORDS, flag, number, sort, swaps_heads
from ._torch_append import append
from ._torch_dtensor import attend as attend_divided, divided
from ._torch_shapes import Arranged, CausalBias, autocast_type, diagonal_of, pack, require_tensors, unpack

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import AttentionOptions, Layout

__all__ = ["append", "attention", "scaled_dot_product_attention"]

_EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)


def _signed(value: int) -> int:
    """Operators take integers of 64 bits with a sign."""
    return (value + 2**63) % 2**64 - 2**63


def _prepared(q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
              ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k and v in autocast's type, and an operator's other arguments by their names."""
    given: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    if len(options) == 1 and options.get("causal") is True:  # the usual ones, as `sort` gives them
        given["causal"] = 1
    elif options:
        given, tensors, seeds = sort(options)
        if "dropout" in given and given["dropout"] > 0 and "seed" not in seeds and "rng" not in tensors:
            tensors["rng"] = torch.randint(-2**63, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
        if "kernel" in given:
            given[ops.KERNEL] = given.pop("kernel")
        if tensors or seeds:
            require_tensors({KEYWORDS[name]: t for name, t in tensors.items()})
            given.update(tensors, **{name: _signed(seed) for name, seed in seeds.items()})
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        require_tensors({"q": q, "k": k, "v": v})
    dtype = autocast_type(q)
    if dtype is not None:
        q, k, v = (x if x.dtype in _EIGHT_BITS else x.to(dtype) for x in (q, k, v))  # a cache stays what it is
        if "qv" in given:
            given["qv"] = given["qv"].to(dtype)
    for name in tensors:
        given[name] = optional(name, given[name], type_name(q))
    if "qv" in given:
        given["qv"] = ops.rows(given["qv"])
    return q, k, v, given


def _nested(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    (packed_q, packed_k, packed_v), more = unpack(q, k, v)
    for name in more:
        if name in given:
            raise ValueError(f"{name}: is given with nested tensors, which have their own; use one or the other")
    if "qv" in given and given["qv"].is_nested:
        if not torch.equal(given["qv"].offsets(), q.offsets()):
            raise ValueError("qv: has other lengths than q; they must agree in tokens")
        given["qv"] = given["qv"].values()
    o, lse = ops.forward_operator(packed_q, packed_k, packed_v, **given, **more)
    return pack(o, q, 1), pack(lse, q, 2)


def _require_strides(tensors: Mapping[str, Any]) -> None:
    """PyTorch's own error would name a key of its dispatcher."""
    for name, t in tensors.items():
        if isinstance(t, Tensor) and t.layout != torch.strided:
            raise TypeError(f"{KEYWORDS.get(name, name)}: is nested or sparse ({t.layout}); must be a tensor with strides")


def _attend(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], lse: bool, options: Mapping[str, Any]
            ) -> Sequence[Any]:
    """O, and LSE at least where it is wanted."""
    results = None if torch.compiler.is_compiling() else ops.attend_unobserved(q, k, v, given, lse)
    if results is not None:
        return results
    if q.is_nested or k.is_nested or v.is_nested:
        return _nested(q, k, v, given)
    if divided((q, k, v, *given.values())):
        drawn = "rng" in given and options.get("rng") is None
        return attend_divided(q, k, v, given, drawn, lambda *call: _attend(*call, True, options))
    _require_strides({"q": q, "k": k, "v": v, **given})
    return ops.forward_operator(q, k, v, **given)  # type: ignore[no-any-return]


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, layout: Layout = "bnhd",
              **options: Unpack[AttentionOptions]) -> Tensor: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], layout: Layout = "bnhd",
              **options: Unpack[AttentionOptions]) -> tuple[Tensor, Tensor]: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, layout: Layout = "bnhd",
              **options: Unpack[AttentionOptions]) -> Union[Tensor, tuple[Tensor, Tensor]]: ...


def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, layout: Layout = "bnhd",
              **options: Unpack[AttentionOptions]) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Exact attention: O [B,Nq,Hq,Dv] in q's type, or (O, LSE f32 [B,Hq,Nq]) with return_lse.

    q [B,Nq,Hq,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv]; packed with cu_seqlens: q [Tq,Hq,D], ..., O [Tq,Hq,Dv], LSE [Hq,Tq].
    With layout="bhnd" heads come before tokens in q, k, v and O: [B,Hq,Nq,D]. Jagged nested tensors [B,j,H,D] are
    packed sequences; so are their results. Options: tessera.AttentionOptions. With dropout and neither seed nor rng,
    the mask's seed is drawn from PyTorch's generator of the device. Rows whose last stride is not 1 are copied,
    everything else is used as it lies.
    """
    heads_first = layout != "bnhd" and swaps_heads(layout)
    if heads_first:
        require_tensors({"q": q, "k": k, "v": v})
        q, k, v = (x.transpose(-3, -2) if x.dim() > 2 + x.is_nested else x for x in (q, k, v))
        if isinstance(options.get("qv"), Tensor) and options["qv"].dim() > 2:
            options["qv"] = options["qv"].transpose(-3, -2)
    q, k, v, given = _prepared(q, k, v, options)
    o, lse = _attend(q, k, v, given, return_lse, options)
    if heads_first:
        o = o.transpose(-3, -2)
    return (o, lse) if return_lse else o


_NAMES_OF_SDPA = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "mask": "attn_mask"}


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor] = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, *, scale: Optional[float] = None,
                                 enable_gqa: bool = False) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with its arguments, shapes and meaning, by `attention`.

    query [...,H,L,E], key [...,H,S,E], value [...,H,S,Ev]; batches and heads broadcast. attn_mask, bool (True: visible)
    or float (added), broadcasts to [...,H,L,S] and is differentiable; or one of torch.nn.attention.bias. is_causal: query
    i sees the keys up to i.
    """
    causal, grouped = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    if causal and attn_mask is not None:
        raise ValueError("attn_mask: is given while is_causal is True; use one or the other")
    dropout = number("dropout_p", dropout_p)
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout_p: is {dropout_p}; must be in [0, 1]")
    options: AttentionOptions = {"scale": scale, "dropout_p": dropout}
    if causal:
        options.update({"causal": True, "alignment": "top_left"})
    elif isinstance(attn_mask, CausalBias):
        options.update({"causal": True, "alignment": diagonal_of(attn_mask, query, key)})
        attn_mask = None
    try:
        if any(isinstance(t, Tensor) and t.is_nested for t in (query, key, value)):
            if attn_mask is not None:
                raise ValueError("attn_mask: is given with nested tensors; they take is_causal alone")
            return attention(query, key, value, layout="bhnd", **options)
        call = Arranged(query, key, value, attn_mask, grouped)
        options.update(call.options)
        return _sdpa(call, options)
    except (TypeError, ValueError) as error:
        raise renamed(error, _NAMES_OF_SDPA) from None


def _sdpa(call: Arranged, options: AttentionOptions) -> Tensor:
    if options["dropout_p"] == 1:  # drops everything, and has no gradient
        options["dropout_p"] = 0.0
        return call.back(attention(*call.tensors, **options) * 0.0)
    return call.back(attention(*call.tensors, **options))


def check(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Raises what `attention` would, but for what depends on the numbers in lengths and tables. Nothing is computed.

    For calls that write before they attend. The plan is kept, so that `attention` finds it.
    """
    q, k, v, given = _prepared(q, k, v, options)
    optional, settings, _ = ops.sort_arguments(ops.in_order(given))
    inputs = (ops.rows(q), ops.rows(k), ops.rows(v), *optional)
    for name, t in zip(ops.INPUTS, inputs):
        if t is not None and ops.view(name, t).pointer % t.element_size():
            raise ValueError(f"{name}: data is not aligned to its elements of {t.element_size()} bytes")
    question = ops.find(settings, ops.look(inputs))
    if not question.idle:
        if question.note is None:
            question.note = ops.outputs(q, v, optional)
        question.idle.append(ops.plan(settings, inputs, ops.RESULTS, question.note.make(q)))
