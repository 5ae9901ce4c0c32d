# SPDX-License-Identifier: Apache-2.0
"""Tensors of other shapes than the operators': those of scaled_dot_product_attention, and jagged nested ones.

Only views are made, but where a batch of several dimensions is broadcast. Used by torch.py.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Optional, Sequence

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

if TYPE_CHECKING:
    from ._options import AttentionOptions


def require_tensors(tensors: dict[str, Any]) -> None:
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: is a {type(t).__name__}; must be a PyTorch tensor")


# --- scaled_dot_product_attention: [..., heads, tokens, dim] ---------------------------------------------------------

def _shape(t: Tensor) -> str:
    return str(list(t.shape))


def _broadcast(what: str, given: dict[str, Tensor], shapes: Sequence[Sequence[int]]) -> list[int]:
    """The shape of all; `what` of the given tensors it is."""
    try:
        return list(torch.broadcast_shapes(*(tuple(shape) for shape in shapes)))
    except RuntimeError:
        q, k, v = map(_shape, given.values())
        raise ValueError(f"query: has shape {q} beside key {k} and value {v}; their {what} must agree or be 1") from None


def _expand_heads(given: dict[str, Tensor], grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads as the library has them: q's a multiple of k's, which are v's."""
    q, k, v = (t if t.dim() > 2 else t[None] for t in given.values())
    counts = [t.shape[-3] for t in (q, k, v)]
    if grouped:
        if any((counts[0] % count if count else counts[0]) for count in counts[1:]):
            raise ValueError(f"query: has {counts[0]} heads but key {counts[1]} and value {counts[2]}; with enable_gqa "
                             "query's must be a multiple of both")
        if counts[1] != counts[2]:
            k, v = (t.repeat_interleave(counts[0] // t.shape[-3], -3) for t in (k, v))
        return q, k, v
    (heads,) = _broadcast("heads", given, [(count,) for count in counts])
    q = q.expand(*q.shape[:-3], heads, -1, -1)
    if counts[1] != counts[2]:
        k, v = (t.expand(*t.shape[:-3], heads, -1, -1) for t in (k, v))
    return q, k, v


def _flatten(t: Tensor, batch: Sequence[int]) -> Tensor:
    """[..., H, N, D] as [B, H, N, D], for all sequences of the batch."""
    return t.expand(*batch, *t.shape[-3:]).reshape(math.prod(batch), *t.shape[-3:])


def _mask_of(attn_mask: Tensor, batch: Sequence[int], scores: Sequence[int]) -> Tensor:
    """[B|1, H|1, L|1, S|1]. The mask must be as large as the scores or smaller, never larger."""
    most = len(scores) + (len(scores) == 3)  # PyTorch takes three dimensions for a batch of one
    places = max(most, 3)
    whole = [1] * (places - len(scores)) + list(scores)
    shape = [1] * (places - attn_mask.dim()) + list(attn_mask.shape)
    if attn_mask.dim() > most or any(count not in (1, full) for count, full in zip(shape, whole)):
        raise ValueError(f"attn_mask: has shape {_shape(attn_mask)}; must broadcast to the scores' {list(scores)}")
    attn_mask = attn_mask.reshape(shape)
    if math.prod(shape[:-3]) == 1:
        return attn_mask.reshape(1, *shape[-3:])
    return _flatten(attn_mask, batch)


def autocast_type(q: Tensor) -> Optional[torch.dtype]:
    """What autocast makes of q, k and v, where it is on. Devices that PyTorch has no autocast for, as meta, count as the
    CPU."""
    device = "cuda" if q.is_cuda else "cpu"
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return None


def diagonal_of(bias: CausalBias, query: Tensor, key: Tensor) -> Literal["bottom_right", "top_left"]:
    """Where it lies. Such a bias has no numbers: PyTorch's own function looks at what it says, and so does ours."""
    require_tensors({"query": query, "key": key})
    for name, t, count in (("query", query, bias.seq_len_q), ("key", key, bias.seq_len_kv)):
        if t.dim() > 1 and t.shape[-2] != count:
            raise ValueError(f"attn_mask: is a causal bias of {bias.seq_len_q} queries and {bias.seq_len_kv} keys but "
                             f"{name} has shape {_shape(t)}")
    return "top_left" if bias.variant == CausalVariant.UPPER_LEFT else "bottom_right"


def _check_types(q: Tensor, others: dict[str, Tensor], attn_mask: Optional[Tensor]) -> None:
    if autocast_type(q) is not None:
        return  # which makes them one
    for name, t in others.items():
        if t.dtype != q.dtype:
            raise ValueError(f"{name}: has type {t.dtype} but query has {q.dtype}; query, key and value must agree in "
                             "type")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
        types = "torch.bool or torch.float32"
        if q.dtype != torch.float32:
            types = f"torch.bool, torch.float32 or query's {q.dtype}"
        raise ValueError(f"attn_mask: has type {attn_mask.dtype}; must be {types}")


class Arranged:
    """query, key, value and attn_mask as [B,N,H,D] and [B|1,H|1,L|1,S|1], and the way back."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor], grouped: bool) -> None:
        given = {"query": query, "key": key, "value": value}
        require_tensors(given if attn_mask is None else {**given, "attn_mask": attn_mask})
        for name, t in given.items():
            if t.dim() < (3 if grouped else 2):
                raise ValueError(f"{name}: has shape {_shape(t)}; must be "
                                 + ("[..., heads, tokens, dim] with enable_gqa" if grouped else "[..., tokens, dim]"))
        _check_types(query, {"key": key, "value": value}, attn_mask)
        self._heads = any(t.dim() > 2 for t in given.values())
        q, k, v = _expand_heads(given, grouped)
        self._batch = _broadcast("batches", given, [t.shape[:-3] for t in (q, k, v)])
        self.tensors = [_flatten(t, self._batch).transpose(1, 2) for t in (q, k, v)]
        self.options: AttentionOptions = {}
        if attn_mask is not None:
            scores = [*torch.broadcast_shapes(q.shape[:-3], k.shape[:-3]), q.shape[-3], q.shape[-2], k.shape[-2]]
            scores = scores[query.dim() == key.dim() == 2:]
            mask = _mask_of(attn_mask, self._batch, scores)
            self.options = {"mask": mask} if mask.dtype == torch.bool else {"bias": mask}

    def back(self, o: Tensor) -> Tensor:
        """[B,L,H,Dv] with query's dimensions."""
        o = o.transpose(1, 2)
        o = o.reshape(*self._batch, *o.shape[1:])
        return o if self._heads else o[0]


# --- jagged nested tensors: [B, j, heads, dim], packed in their values -----------------------------------------------

def _same(x: Optional[Tensor], y: Optional[Tensor]) -> bool:
    return x is y or (x is not None and y is not None and torch.equal(x, y))


def unpack(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """Values of jagged q, k and v, [T,H,D], and an operator's arguments that say where sequences begin and end."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not t.is_nested or t.layout != torch.jagged:
            raise ValueError(f"{name}: is no jagged nested tensor; q, k and v must all be, or none")
        if t.dim() != 4 or t._ragged_idx != 1:  # type: ignore[attr-defined]
            raise ValueError(f"{name}: has shape {list(t.shape)}; must be [batch, tokens, heads, dim] with jagged "
                             "tokens")
    if k.shape[1] != v.shape[1] and not (torch.equal(k.offsets(), v.offsets()) and _same(k.lengths(), v.lengths())):
        raise ValueError("v: has other lengths than k; k and v must agree in tokens")
    more: dict[str, Any] = {}
    for side, t in (("q", q), ("k", k)):
        more[f"cu_seqlens_{side}"] = t.offsets().int()
        if t.lengths() is not None:
            more[f"seqused_{side}"] = t.lengths().int()
    return [t.values() for t in (q, k, v)], more


def pack(values: Tensor, like: Tensor, jagged_dim: int) -> Tensor:
    """A jagged tensor with the sequences of another one."""
    return torch.nested.nested_tensor_from_jagged(values, like.offsets(), like.lengths(), jagged_dim)
