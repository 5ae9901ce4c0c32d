# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's functions, with its arguments and meanings, by Tessera: put `tessera.` before its module's name.

What cannot be honoured raises. `num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` say how FlashAttention is
to divide its work; here they change nothing. Differences, all in docs/python.md: attention_chunk and LSE have gradients;
any head dim, f32 and the CPU work too.
"""
from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor

from . import _chunks, _flash, _kvcache

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_with_kvcache", "get_scheduler_metadata"]

_NAMES = {"block_table": "page_table", "cu_seqlens_new": "cu_seqlens_k_new"}


def _attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Optional[float], causal: bool, qv: Optional[Tensor],
               q_descale: Optional[Tensor], k_descale: Optional[Tensor], v_descale: Optional[Tensor],
               window_size: tuple[int, int], attention_chunk: int, softcap: float, deterministic: bool,
               return_attn_probs: bool, **lengths: Any) -> Any:
    o, lse = _flash.attend(q, k, v, scale=softmax_scale, causal=causal, qv=qv,
                           k_scale=_flash.joined(q_descale, k_descale, qv), v_scale=v_descale,
                           window=_flash.pair(window_size), attention_chunk=attention_chunk, softcap=softcap,
                           deterministic=deterministic, names=_flash.scale_name(q_descale, k_descale), **lengths)
    return (o, lse) if return_attn_probs else o


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Optional[float] = None, causal: bool = False,
                    qv: Optional[Tensor] = None, q_descale: Optional[Tensor] = None,
                    k_descale: Optional[Tensor] = None, v_descale: Optional[Tensor] = None,
                    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                    num_splits: int = 1, pack_gqa: Optional[bool] = None, deterministic: bool = False,
                    sm_margin: int = 0, return_attn_probs: bool = False) -> Any:
    """q [B,Nq,Hq,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv] -> O [B,Nq,Hq,Dv], or (O, LSE [B,Hq,Nq]) with return_attn_probs.

    Of float8_e4m3fn O is bfloat16; scales are f32 [B,Hk]. With qv [B,Nq,Hq,Dv] scores are those of q and k plus those
    of qv and v. Scales have no gradients. attention_chunk: keys in other chunks of so many positions than
    the query's are hidden.
    """
    return _attention(q, k, v, softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk,
                      softcap, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(qkv: Tensor, softmax_scale: Optional[float] = None, causal: bool = False,
                              q_descale: Optional[Tensor] = None, k_descale: Optional[Tensor] = None,
                              v_descale: Optional[Tensor] = None, window_size: tuple[int, int] = (-1, -1),
                              attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
                              num_heads_q: Optional[int] = None, sm_margin: int = 0,
                              return_attn_probs: bool = False) -> Any:
    """qkv [B,N,3,H,D], or [B,N,Hq+2*Hk,D] with num_heads_q."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and 0 <= num_heads_q <= qkv.shape[2] and (
            qkv.shape[2] - num_heads_q) % 2 == 0:
        values = (qkv.shape[2] + num_heads_q) // 2
        q, k, v = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:values], qkv[:, :, values:]
    else:
        raise ValueError(f"qkv: has shape {list(qkv.shape)} and num_heads_q is {num_heads_q}; must be [batch, tokens, 3, "
                         "heads, dim], or [batch, tokens, q's heads and twice k's, dim] with num_heads_q")
    return _attention(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
                      softcap, deterministic, return_attn_probs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, seqused_q: Optional[Tensor] = None,
                           seqused_k: Optional[Tensor] = None, softmax_scale: Optional[float] = None,
                           causal: bool = False, qv: Optional[Tensor] = None, q_descale: Optional[Tensor] = None,
                           k_descale: Optional[Tensor] = None, v_descale: Optional[Tensor] = None,
                           window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                           num_splits: int = 1, pack_gqa: Optional[bool] = None, deterministic: bool = False,
                           sm_margin: int = 0, return_attn_probs: bool = False) -> Any:
    """q [Tq,Hq,D], k [Tk,Hk,D], v [Tk,Hk,Dv], cu_seqlens int32 [B+1] -> O [Tq,Hq,Dv], or (O, LSE [Hq,Tq]).

    seqused_q and seqused_k, int32 [B]: how much of each sequence counts; other rows of O are 0.
    """
    return _attention(q, k, v, softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk,
                      softcap, deterministic, return_attn_probs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                      max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k)


def flash_attn_combine(out_partial: Tensor, lse_partial: Tensor, out: Optional[Tensor] = None,
                       out_dtype: Optional[torch.dtype] = None) -> tuple[Tensor, Tensor]:
    """Partial results over disjoint sets of keys as that of their union: (O [B,N,H,D], LSE [B,N,H]).

    out_partial [splits,B,N,H,D], lse_partial [splits,B,N,H]. No gradients.
    """
    return _flash.combine(out_partial, lse_partial, out, out_dtype)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Optional[Tensor] = None,
                            v: Optional[Tensor] = None, qv: Optional[Tensor] = None,
                            rotary_cos: Optional[Tensor] = None, rotary_sin: Optional[Tensor] = None,
                            cache_seqlens: Optional[Union[int, Tensor]] = None,
                            cache_batch_idx: Optional[Tensor] = None, cache_leftpad: Optional[Tensor] = None,
                            page_table: Optional[Tensor] = None, cu_seqlens_q: Optional[Tensor] = None,
                            cu_seqlens_k_new: Optional[Tensor] = None, max_seqlen_q: Optional[int] = None,
                            rotary_seqlens: Optional[Tensor] = None, q_descale: Optional[Tensor] = None,
                            k_descale: Optional[Tensor] = None, v_descale: Optional[Tensor] = None,
                            softmax_scale: Optional[float] = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
                            rotary_interleaved: bool = True, scheduler_metadata: Optional[Tensor] = None,
                            num_splits: int = 0, pack_gqa: Optional[bool] = None, sm_margin: int = 0,
                            return_softmax_lse: bool = False) -> Any:
    """Appends k and v to the caches, in place, and attends to them: O, or (O, LSE, empty, empty).

    q [B,Nq,Hq,D], or [Tq,Hq,D] with cu_seqlens_q; k and v [B,n,Hk,D], or [T,Hk,D] with cu_seqlens_k_new, which need not
    be q's. k_cache and v_cache [Bc,capacity,Hk,D], or pools [pages,page_size,Hk,D] with page_table, int32 [B,entries].
    cache_batch_idx, int32 [B], says which caches, or which rows of page_table, are those of the batch. cache_seqlens,
    int32 [B], are lengths before appending; new tokens are rotated from there on, or from rotary_seqlens, int32 [B]. Where
    FlashAttention returns partial results of its splits, there are empty tensors, as there with num_splits=1. k and v of
    float8_e4m3fn are stored as they are; others are divided by k_descale and v_descale first. No gradients. A call that
    is refused leaves the caches as they were.
    """
    scales = {"k_scale": _flash.joined(q_descale, k_descale, qv), "v_scale": v_descale}
    stored = {"k_scale": k_descale, "v_scale": v_descale}
    if isinstance(k, Tensor) and k.dtype == torch.float8_e4m3fn:  # they have been divided by scales of heads and sequences
        stored = {name: scale for name, scale in stored.items() if scale is not None and scale.dim() > 2}
    if page_table is not None and cache_batch_idx is not None:
        _chunks.entries("page_table", page_table)
        _kvcache.check_batch_idx(cache_batch_idx, page_table.shape[0])
        page_table, cache_batch_idx = page_table[cache_batch_idx.long()], None
    rotary = _kvcache.rotary(_flash.widened(rotary_cos), _flash.widened(rotary_sin), rotary_interleaved, rotary_seqlens)
    names = {**_NAMES, **_flash.scale_name(q_descale, k_descale)}
    if rotary_seqlens is not None:
        names.update(dict.fromkeys(("positions", "q_positions"), "rotary_seqlens"))
    cache = _kvcache.Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, names)
    new = _kvcache.new(_flash.widened(k), _flash.widened(v), cu_seqlens_k_new)
    with torch.no_grad():
        o, lse = _kvcache.attend(_flash.widened(q), cache, new, rotary, scales, stored, cu_seqlens_q=cu_seqlens_q,
                                 max_seqlen_q=max_seqlen_q, attention_chunk=attention_chunk, qv=_flash.widened(qv),
                                 scale=softmax_scale, causal=causal, window=_flash.pair(window_size), softcap=softcap)
    return (o, lse, *(torch.empty(0, device=o.device) for _ in range(2))) if return_softmax_lse else o


def get_scheduler_metadata(batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
                           headdim: int, cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16,
                           headdim_v: Optional[int] = None, cu_seqlens_q: Optional[Tensor] = None,
                           cu_seqlens_k_new: Optional[Tensor] = None, cache_leftpad: Optional[Tensor] = None,
                           page_size: Optional[int] = None, max_seqlen_k_new: int = 0, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False,
                           num_splits: int = 0, pack_gqa: Optional[bool] = None, sm_margin: int = 0) -> Tensor:
    """An empty int32 tensor where the lengths are: no kernel here needs a schedule that was made before the call."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
