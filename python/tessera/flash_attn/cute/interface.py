# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4's functions where flash_attn.cute has them all.

What cannot be honoured raises: functions of scores and masks, blocks and keys by lists. `num_splits`, `pack_gqa`,
`min_seqlen_k`, `scheduler_metadata`, `seqlen_k_per_split` and `disable_scheduler_metadata` say how FlashAttention is to
divide its work; here they change nothing, and the same bits come out of every division.
"""
from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor

from ... import _chunks, _flash
from ..._abi import integer

__all__ = ["SchedulerMetadataTensorsTorch", "flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func",
           "get_scheduler_metadata"]


def _window(causal: bool, window_size: tuple[Optional[int], Optional[int]]) -> tuple[Optional[int], Optional[int]]:
    """As the library has it. Numbers whose sum is below 0 bound nothing; other negative ones would move the window."""
    try:
        left, right = _flash.pair(window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size: is {window_size!r}; must be a pair (left, right)") from None
    right = 0 if causal else right
    left, right = (None if side is None else integer("window_size", side) for side in (left, right))
    if left is not None and right is not None and left + right < 0:
        return None, None
    if any(side is not None and side < 0 for side in (left, right)):
        raise NotImplementedError(f"window_size: is ({left}, {right}); numbers below 0, which move a window away from the "
                                  "diagonal, are not there")
    return left, right


def _is_shared(k: Tensor, v: Tensor) -> bool:
    """FlashAttention takes q for qv then, and leaves q and k out: the same scores."""
    return k is v and isinstance(v, Tensor) and v.shape[-1:] == (512,)


def _attention(q: Tensor, k: Tensor, v: Tensor, qv: Optional[Tensor], causal: bool,
               window_size: tuple[Optional[int], Optional[int]], return_lse: bool, **options: Any
               ) -> tuple[Tensor, Optional[Tensor]]:
    shared = _is_shared(k, v)
    if shared and qv is not None:
        raise NotImplementedError("qv: is given while k is v; FlashAttention would leave q and k out there, pass what is "
                                  "meant as q and k alone")
    o, lse = _flash.attend(q, k, v, qv=qv, causal=causal, window=_window(causal, window_size), **options)
    if not return_lse:
        return o, None
    return o, lse.transpose(-1, -2) if shared or qv is not None else lse


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, qv: Optional[Tensor] = None,
                    gather_kv_indices: Optional[Tensor] = None, softmax_scale: Optional[float] = None,
                    causal: bool = False, window_size: tuple[Optional[int], Optional[int]] = (None, None),
                    learnable_sink: Optional[Tensor] = None, softcap: float = 0.0, num_splits: int = 1,
                    pack_gqa: Optional[bool] = None, deterministic: bool = False,
                    score_mod: Optional[Callable[..., Any]] = None, score_mod_bwd: Optional[Callable[..., Any]] = None,
                    mask_mod: Optional[Callable[..., Any]] = None, aux_tensors: Optional[list[Any]] = None,
                    aux_scalars: Optional[tuple[Any, ...]] = None, block_sparse_tensors: Any = None,
                    block_sparse_tensors_bwd: Any = None, return_lse: bool = False) -> tuple[Tensor, Optional[Tensor]]:
    """q [B,Nq,Hq,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv] -> (O [B,Nq,Hq,Dv], LSE [B,Hq,Nq] or None without return_lse).

    learnable_sink [Hq]: a logit that takes part in the softmax and has no value; it has a gradient. With qv [B,Nq,Hq,Dv]
    scores are those of q and k plus those of qv and v, and LSE is [B,Nq,Hq]; so it is where k is v and Dv is 512.
    """
    _flash.refuse(gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
                  mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
                  block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    return _attention(q, k, v, qv, causal, window_size, return_lse, scale=softmax_scale, sinks=learnable_sink,
                      softcap=softcap, deterministic=deterministic)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, qv: Optional[Tensor] = None,
                           cu_seqlens_q: Optional[Tensor] = None, cu_seqlens_k: Optional[Tensor] = None,
                           max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
                           min_seqlen_k: Optional[int] = None, seqused_q: Optional[Tensor] = None,
                           seqused_k: Optional[Tensor] = None, gather_kv_indices: Optional[Tensor] = None,
                           page_table: Optional[Tensor] = None, softmax_scale: Optional[float] = None,
                           causal: bool = False, window_size: tuple[Optional[int], Optional[int]] = (None, None),
                           learnable_sink: Optional[Tensor] = None, softcap: float = 0.0, num_splits: int = 1,
                           pack_gqa: Optional[bool] = None, deterministic: bool = False,
                           score_mod: Optional[Callable[..., Any]] = None,
                           score_mod_bwd: Optional[Callable[..., Any]] = None,
                           mask_mod: Optional[Callable[..., Any]] = None, block_sparse_tensors: Any = None,
                           aux_tensors: Optional[list[Any]] = None, aux_scalars: Optional[tuple[Any, ...]] = None,
                           return_lse: bool = False, scheduler_metadata: Any = None,
                           seqlen_k_per_split: Optional[int] = None, disable_scheduler_metadata: bool = False
                           ) -> tuple[Tensor, Optional[Tensor]]:
    """q [Tq,Hq,D] with cu_seqlens_q, else [B,Nq,Hq,D]; k and v likewise with cu_seqlens_k, and either with seqused.

    With page_table, int32 [B,entries], k and v are pools [pages,page_size,Hk,D], seqused_k their lengths, and there are no
    gradients. Results have q's form: (O [Tq,Hq,Dv], LSE [Hq,Tq] or None), with qv LSE [Tq,Hq].
    """
    _flash.refuse(gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
                  mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
                  block_sparse_tensors=block_sparse_tensors)
    options: dict[str, Any] = {"scale": softmax_scale, "sinks": learnable_sink, "softcap": softcap,
                               "deterministic": deterministic, "seqused_q": seqused_q, "seqused_k": seqused_k}
    if page_table is not None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k: is given with page_table; seqused_k says how many keys there are")
        full = _chunks.entries("page_table", page_table) * k.shape[1]
        lengths = torch.full(page_table.shape[:1], full, dtype=torch.int32, device=k.device)
        options.update(block_table=page_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
                       max_seqlen_k=max_seqlen_k, seqused_k=lengths if seqused_k is None else seqused_k)
    elif cu_seqlens_q is not None or cu_seqlens_k is not None:
        options.update(cu_seqlens_q=_offsets(q, cu_seqlens_q), cu_seqlens_k=_offsets(k, cu_seqlens_k),
                       max_seqlen_q=q.shape[1] if cu_seqlens_q is None else max_seqlen_q,
                       max_seqlen_k=k.shape[1] if cu_seqlens_k is None else max_seqlen_k)
        if cu_seqlens_q is None or cu_seqlens_k is None:
            return _mixed(q, k, v, qv, causal, window_size, return_lse, **options)
    return _attention(q, k, v, qv, causal, window_size, return_lse, **options)


def _offsets(x: Tensor, cu_seqlens: Optional[Tensor]) -> Tensor:
    """Where the sequences of [B,N,...] begin once they are packed, if none are given."""
    if cu_seqlens is not None:
        return cu_seqlens
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def _mixed(q: Tensor, k: Tensor, v: Tensor, qv: Optional[Tensor], *arguments: Any, **options: Any
           ) -> tuple[Tensor, Optional[Tensor]]:
    """One of q and k is packed, the other becomes so."""
    packed_k = _chunks.flat(k)
    packed_v = packed_k if k is v else _chunks.flat(v)
    o, lse = _attention(_chunks.flat(q), packed_k, packed_v, None if qv is None else _chunks.flat(qv), *arguments, **options)
    if q.dim() != 4:
        return o, lse
    if lse is None or qv is not None or _is_shared(k, v):
        return o.reshape(*q.shape[:2], *o.shape[1:]), None if lse is None else lse.reshape(q.shape[:3])
    return _chunks.back(o, lse, q)


def flash_attn_combine(out_partial: Tensor, lse_partial: Tensor, out: Optional[Tensor] = None,
                       out_dtype: Optional[torch.dtype] = None, cu_seqlens: Optional[Tensor] = None,
                       seqused: Optional[Tensor] = None, virtual_batch_idx: Optional[Tensor] = None,
                       return_lse: bool = True) -> tuple[Tensor, Optional[Tensor]]:
    """Partial results over disjoint sets of keys as that of their union: (O [B,N,H,D], LSE [B,N,H] or None).

    out_partial [splits,B,N,H,D] or [splits,T,H,D], lse_partial [splits,B,N,H] or [splits,T,H]. O has out_dtype, which is
    out's type if out is given, else out_partial's. A row is merged by itself: cu_seqlens, seqused and virtual_batch_idx
    change nothing, and rows beyond seqused are merged too. No gradients.
    """
    if out_dtype is None and out is not None:
        out_dtype = out.dtype
    o, lse = _flash.combine(out_partial, lse_partial, out, out_dtype)
    return o, lse if return_lse else None


class SchedulerMetadataTensorsTorch(NamedTuple):
    """What get_scheduler_metadata returns: nothing, since no kernel here needs it."""
    num_m_blocks_ptr: Optional[Tensor] = None
    num_splits_dynamic_ptr: Optional[Tensor] = None
    virtual_batch_idx_ptr: Optional[Tensor] = None
    num_nheads_in_l2_ptr: Optional[Tensor] = None
    tile_count_semaphore: Optional[Tensor] = None
    cu_total_m_blocks: Optional[Tensor] = None
    cu_total_splits_m_blocks: Optional[Tensor] = None


def get_scheduler_metadata(max_seqlen_q: int, max_seqlen_k: int, nheads: int, nheads_kv: int, headdim: int,
                           num_splits: int, headdim_v: Optional[int] = None, pack_gqa: Optional[int] = None,
                           causal: bool = False, window_size_left: Optional[int] = None,
                           window_size_right: Optional[int] = None, seqlen_k_new: int = 0,
                           cu_seqlens_q: Optional[Tensor] = None, cu_seqlens_k: Optional[Tensor] = None,
                           cu_seqlens_k_new: Optional[Tensor] = None, seqused_q: Optional[Tensor] = None,
                           seqused_k: Optional[Tensor] = None, leftpad_k: Optional[Tensor] = None,
                           seqlen_k_per_split: Optional[int] = None, _arch: Optional[int] = None
                           ) -> SchedulerMetadataTensorsTorch:
    """No kernel here needs a schedule that was made before the call."""
    return SchedulerMetadataTensorsTorch()
