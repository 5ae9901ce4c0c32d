"""FlashAttention-2's functions, with its arguments and meanings, by Tessera: replace `flash_attn` in an import.

What cannot be honoured raises. Differences, all in docs/python.md: LSE of a row that sees no key is -inf; LSE is
differentiable; any head dim, f32 and the CPU work too.
"""
from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from .torch import attention


def _attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: Optional[float], causal: bool,
               window_size: tuple[int, int], softcap: float, alibi_slopes: Optional[Tensor], deterministic: bool,
               return_attn_probs: bool, **packed: Any) -> Any:
    if return_attn_probs and dropout_p > 0:
        raise NotImplementedError("return_attn_probs: is True while dropout_p is "
                                  f"{dropout_p}; the dropped probabilities are never stored (see tessera.dropout_mask)")
    o, lse = attention(q, k, v, return_lse=True, dropout_p=dropout_p, scale=softmax_scale, causal=causal,
                       window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
                       **packed)
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
    """q [Tq,Hq,D], k and v [Tk,Hk,D], cu_seqlens int32 [B+1] -> O [Tq,Hq,D], or (O, LSE [Hq,Tq], None)."""
    if block_table is not None:
        raise NotImplementedError("block_table: is given; paged keys and values are not there yet")
    return _attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                      return_attn_probs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                      max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
