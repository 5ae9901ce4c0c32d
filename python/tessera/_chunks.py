# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's attention_chunk: a query sees the keys of its own chunk of positions alone.

The blocks that this leaves on the diagonal are shorter sequences: packed ones, or caches with left padding. So nothing
is masked that would have been computed, and gradients are those of packed sequences. Query i of Nq stands beside key
i + Nk - Nq, here as everywhere; its chunk is that of this key. Used by _flash.py and _kvcache.py. PyTorch only.
"""
from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ._abi import integer


def size(attention_chunk: Any) -> int:
    """How many positions a chunk has; 0: there are none."""
    chunk = integer("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk: is {chunk}; must be 0 (none) or the length of a chunk")
    return chunk


def entries(name: str, table: Any) -> int:
    """How many pages a page table has for each sequence."""
    if not isinstance(table, Tensor):
        raise TypeError(f"{name}: is a {type(table).__name__}; must be a PyTorch tensor")
    if table.dim() != 2:
        raise ValueError(f"{name}: has shape {list(table.shape)}; must be [batch, entries]")
    return table.shape[1]


def _lengths(x: Tensor, cu_seqlens: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    """Where each sequence's tokens begin in [all tokens,...], and how many it has, int64 [B]."""
    if cu_seqlens is not None:
        return cu_seqlens[:-1].long(), cu_seqlens.long().diff()
    batch, tokens = x.shape[:2]
    return torch.arange(batch, device=x.device) * tokens, torch.full((batch,), tokens, device=x.device)


def longest(lengths: Tensor, bound: Optional[int], tokens: int) -> int:
    """Of the lengths, which are read on the CPU alone; on a GPU a bound of them, at most the tensor's `tokens`."""
    if not lengths.is_cuda and not torch.compiler.is_compiling():
        return int(lengths.max()) if lengths.numel() else 0
    return tokens if bound is None else integer("max_seqlen", bound)


def flat(x: Tensor) -> Tensor:
    """Padded sequences as packed ones; packed ones as they are."""
    return x.flatten(0, 1) if x.dim() == 4 else x


def back(o: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Results of packed sequences in the form of q."""
    if q.dim() != 4:
        return o, lse
    batch, tokens = q.shape[:2]
    return o.reshape(batch, tokens, *o.shape[1:]), lse.reshape(lse.shape[0], batch, tokens).transpose(0, 1)


def _offsets(starts: Tensor, ends: Tensor) -> Tensor:
    """cu_seqlens, int32, of parts that end at `ends` [B,parts] of sequences that begin at `starts` [B]."""
    first = starts[:1] if starts.shape[0] else starts.new_zeros(1)
    return torch.cat((first, (starts[:, None] + ends).flatten())).int()


def _used(name: str, seqused: Optional[Tensor], lengths: Tensor) -> Tensor:
    if seqused is None:
        return lengths
    if not lengths.is_cuda and not torch.compiler.is_compiling() and bool(((seqused < 0) | (seqused > lengths)).any()):
        raise ValueError(f"{name}: is {seqused.tolist()}; must be from 0 to the lengths {lengths.tolist()}")
    return seqused.long()


def of_sequences(chunk: int, q: Tensor, k: Tensor, cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor],
                 seqused_q: Optional[Tensor], seqused_k: Optional[Tensor], max_seqlen_k: Optional[int]
                 ) -> tuple[int, dict[str, Any]]:
    """The parts of each sequence, and options that say where they are: of q, k and v as `flat` gives them.

    A sequence's parts are its queries before key 0, its chunks, and behind them tokens that are not in use: queries
    first, keys then.
    """
    start_q, all_q = _lengths(q, cu_seqlens_q)
    start_k, all_k = _lengths(k, cu_seqlens_k)
    used_q, used_k = _used("seqused_q", seqused_q, all_q), _used("seqused_k", seqused_k, all_k)
    count = -(-longest(used_k, max_seqlen_k, k.shape[-3]) // chunk)
    marks = torch.arange(count + 1, device=q.device) * chunk
    ends_k = torch.minimum(marks, used_k[:, None])
    ends_q = torch.minimum((marks - (used_k - used_q)[:, None]).clamp(min=0), used_q[:, None])
    if seqused_q is not None or seqused_k is not None:
        ends_q = torch.cat((ends_q, all_q[:, None], all_q[:, None]), 1)
        ends_k = torch.cat((ends_k, used_k[:, None], all_k[:, None]), 1)
    return ends_q.shape[1], {"cu_seqlens_q": _offsets(start_q, ends_q), "cu_seqlens_k": _offsets(start_k, ends_k)}


def of_caches(chunk: int, q: Tensor, cu_seqlens_q: Optional[Tensor], max_seqlen_q: Optional[int], seqused_k: Tensor,
              leftpad_k: Optional[Tensor], block_table: Tensor) -> tuple[int, dict[str, Any]]:
    """The same where keys lie in pages. Only chunks that have queries are parts."""
    start_q, used_q = _lengths(q, cu_seqlens_q)
    pad = torch.zeros_like(seqused_k) if leftpad_k is None else leftpad_k.long()
    used_k = seqused_k.long() - pad
    before = used_k - used_q  # keys before query 0
    most = longest(used_q, max_seqlen_q, q.shape[-3])
    count = (most + chunk - 2) // chunk + 1
    marks = (before.clamp(min=0) // chunk)[:, None] * chunk + torch.arange(count + 1, device=q.device) * chunk
    ends_k = torch.minimum(marks, used_k[:, None])
    ends_q = torch.minimum((marks - before[:, None]).clamp(min=0), used_q[:, None])
    starts_k = torch.cat((ends_k[:, :1], ends_k[:, :-1]), 1)  # the first part has no keys
    return count + 1, {"cu_seqlens_q": _offsets(start_q, ends_q),
                       "seqused_k": (pad[:, None] + ends_k).flatten().int(),
                       "leftpad_k": (pad[:, None] + starts_k).flatten().int(),
                       "block_table": block_table.repeat_interleave(count + 1, 0)}


def scales(parts: int, flattened: bool, **given: Optional[Tensor]) -> dict[str, Any]:
    """Scales of sequences as those of their parts; of rows of padded keys, if these are flattened, as of packed ones."""
    def of_parts(scale: Optional[Tensor]) -> Optional[Tensor]:
        if scale is not None and scale.dim() == 2:
            return scale.repeat_interleave(parts, 0)
        return scale.flatten(0, 1)[None] if scale is not None and scale.dim() > 2 and flattened else scale
    return {name: of_parts(scale) for name, scale in given.items()}
