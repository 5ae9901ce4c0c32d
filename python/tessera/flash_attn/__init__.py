# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-2's functions, with its arguments and meanings, by Tessera: replace `flash_attn` in an import.

What cannot be honoured raises. Differences, all in docs/python.md: LSE of a row that sees no key is -inf; LSE is
differentiable; any head dim, f32 and the CPU work too.
"""
from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor

from .. import _kvcache
from .._abi import renamed
from ..torch import attention


def _attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: Optional[float], causal: bool,
               window_size: tuple[int, int], softcap: float, alibi_slopes: Optional[Tensor], deterministic: bool,
               return_attn_probs: bool, **packed: Any) -> Any:
    if return_attn_probs and dropout_p > 0:
        raise NotImplementedError("return_attn_probs: is True while dropout_p is "
                                  f"{dropout_p}; the dropped probabilities are never stored (see tessera.dropout_mask)")
    try:
        o, lse = attention(q, k, v, return_lse=True, dropout_p=dropout_p, scale=softmax_scale, causal=causal,
                           window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
                           **packed)
    except (TypeError, ValueError) as error:
        lengths = {"seqused_k": "cu_seqlens_k's lengths"} if "seqused_k" in packed else {}
        raise renamed(error, {"scale": "softmax_scale", "window": "window_size", **lengths}) from None
    return (o, lse, None) if return_attn_probs else o


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Optional[Tensor] = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Any:
    """q [B,Nq,Hq,D], k and v [B,Nk,Hk,D] -> O [B,Nq,Hq,D], or (O, LSE [B,Hq,Nq], None) with return_attn_probs."""
    return _attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                      return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                             causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Optional[Tensor] = None, deterministic: bool = False,
                             return_attn_probs: bool = False) -> Any:
    """q [B,Nq,Hq,D], kv [B,Nk,2,Hk,D]."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: has shape {list(kv.shape)}; must be [batch, tokens, 2, heads, dim]")
    return _attention(q, kv[:, :, 0], kv[:, :, 1], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                      deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                              causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Optional[Tensor] = None, deterministic: bool = False,
                              return_attn_probs: bool = False) -> Any:
    """qkv [B,N,3,H,D]."""
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv: has shape {list(qkv.shape)}; must be [batch, tokens, 3, heads, dim]")
    return _attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], dropout_p, softmax_scale, causal, window_size, softcap,
                      alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: Optional[float] = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Optional[Tensor] = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Optional[Tensor] = None) -> Any:
    """q [Tq,Hq,D], k and v [Tk,Hk,D], cu_seqlens int32 [B+1] -> O [Tq,Hq,D], or (O, LSE [Hq,Tq], None).

    With block_table, int32 [B,entries], k and v are pools [pages,page_size,Hk,D]; cu_seqlens_k still holds the lengths.
    """
    keys: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k}
    if block_table is not None:
        keys = {"block_table": block_table, "seqused_k": cu_seqlens_k.diff()}
    return _attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                      return_attn_probs, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
                      max_seqlen_k=max_seqlen_k, **keys)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                                    softmax_scale: Optional[float] = None, causal: bool = False,
                                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Optional[Tensor] = None, deterministic: bool = False,
                                    return_attn_probs: bool = False) -> Any:
    """q [Tq,Hq,D], kv [Tk,2,Hk,D]."""
    if kv.dim() != 4 or kv.shape[1] != 2:
        raise ValueError(f"kv: has shape {list(kv.shape)}; must be [tokens, 2, heads, dim]")
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                  dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
                                     softmax_scale: Optional[float] = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Optional[Tensor] = None, deterministic: bool = False,
                                     return_attn_probs: bool = False) -> Any:
    """qkv [T,3,H,D], cu_seqlens int32 [B+1]."""
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv: has shape {list(qkv.shape)}; must be [tokens, 3, heads, dim]")
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
                                  dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Optional[Tensor] = None,
                            v: Optional[Tensor] = None, rotary_cos: Optional[Tensor] = None,
                            rotary_sin: Optional[Tensor] = None,
                            cache_seqlens: Optional[Union[int, Tensor]] = None,
                            cache_batch_idx: Optional[Tensor] = None, cache_leftpad: Optional[Tensor] = None,
                            block_table: Optional[Tensor] = None, softmax_scale: Optional[float] = None,
                            causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Optional[Tensor] = None, num_splits: int = 0,
                            return_softmax_lse: bool = False, k_descale: Optional[Tensor] = None,
                            v_descale: Optional[Tensor] = None, qv: Optional[Tensor] = None) -> Any:
    """Appends k and v to the caches, in place, and attends to them: O [B,Nq,Hq,D], or (O, LSE [B,Hq,Nq]).

    q [B,Nq,Hq,D]; k_cache and v_cache [Bc,capacity,Hk,D], or pools [pages,page_size,Hk,D] with block_table; k and v
    [B,n,Hk,D]; cache_seqlens int32 [B], before appending. No gradients. num_splits changes nothing: how keys are split
    depends on their number alone. Caches may be float8_e4m3fn or int8, with k_descale and v_descale: f32 [1], [Hk], [B,Hk],
    or, written for k and v, [pages,page_size,Hk] or [B,capacity,Hk], also with ceil(D/128) behind. With qv [B,Nq,Hq,Dv]
    scores are those of q and k plus those of qv and v. A call that is refused leaves the caches as they were.
    """
    rotary = _kvcache.rotary(rotary_cos, rotary_sin, rotary_interleaved)
    cache, scales = _kvcache.first_caches(q, _kvcache.Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx,
                                                            cache_leftpad, block_table),
                                          {"k_scale": k_descale, "v_scale": v_descale})
    with torch.no_grad():
        o, lse = _kvcache.attend(q, cache, _kvcache.new(k, v), rotary, scales, scale=softmax_scale, causal=causal,
                                 window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, qv=qv)
    return (o, lse) if return_softmax_lse else o
