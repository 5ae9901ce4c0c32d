# SPDX-License-Identifier: Apache-2.0
"""What the functions of FlashAttention-3 and -4 share: their arguments in the library's terms, 8-bit inputs, merging.

Used by flash_attn_interface.py and flash_attn/cute/interface.py. PyTorch only.
"""
from __future__ import annotations

from typing import Any, Mapping, Optional, overload

import torch
from torch import Tensor

from . import _chunks
from ._abi import renamed
from ._api import merge
from .torch import attention, check

# The library's names of arguments, and FlashAttention's.
NAMES = {"scale": "softmax_scale", "window": "window_size", "window_left": "window_size", "window_right": "window_size",
         "k_scale": "k_descale", "v_scale": "v_descale", "sinks": "learnable_sink", "block_table": "page_table"}

HALF = torch.bfloat16  # holds every number of 8 bits, and is what FlashAttention returns for them


@overload
def widened(x: Tensor) -> Tensor: ...


@overload
def widened(x: Optional[Tensor]) -> Optional[Tensor]: ...


def widened(x: Optional[Tensor]) -> Optional[Tensor]:
    """Queries, new tokens and cosines of 8 bits, exactly, in 16: the library takes 8 bits for k and v."""
    return x.to(HALF) if isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn else x


def joined(q_descale: Optional[Tensor], k_descale: Optional[Tensor], qv: Optional[Tensor]) -> Optional[Tensor]:
    """q's scale and k's as one: scores have their product as a factor."""
    if q_descale is None:
        return k_descale
    if not isinstance(q_descale, Tensor) or q_descale.dim() > 2:
        found = list(q_descale.shape) if isinstance(q_descale, Tensor) else type(q_descale).__name__
        raise ValueError(f"q_descale: is {found}; must be a tensor [1], [k's heads] or [batch, k's heads]")
    if qv is not None:
        raise NotImplementedError("q_descale: is given with qv, whose scores it would scale too; there is k_descale alone "
                                  "for them")
    if k_descale is None:
        return q_descale
    if not isinstance(k_descale, Tensor):
        raise TypeError(f"k_descale: is a {type(k_descale).__name__}; must be a PyTorch tensor")
    if k_descale.dim() > 2:
        raise NotImplementedError(f"q_descale: is given while k_descale is {list(k_descale.shape)}, one for each key; must "
                                  "be None")
    try:
        return q_descale * k_descale
    except RuntimeError:
        raise ValueError(f"q_descale: is {list(q_descale.shape)} on {q_descale.device} but k_descale is "
                         f"{list(k_descale.shape)} on {k_descale.device}; must be [1], [k's heads] or [batch, k's heads], "
                         "on one device") from None


def scale_name(q_descale: Optional[Tensor], k_descale: Optional[Tensor]) -> dict[str, str]:
    """Whose scale the library's k_scale is, where it is not k's."""
    return {"k_scale": "q_descale"} if k_descale is None and q_descale is not None else {}


def pair(window_size: Any) -> Any:
    """A window's two numbers; those of a tensor too."""
    return tuple(window_size.tolist()) if isinstance(window_size, Tensor) else window_size


def refuse(**given: Any) -> None:
    """What no kernel here can do."""
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}: is given; kernels here take no functions of scores, no lists of blocks or "
                                      "keys, use mask or bias of tessera.torch.attention")


def _differentiates(q: Tensor, k: Tensor, v: Tensor, qv: Optional[Tensor] = None, k_scale: Optional[Tensor] = None,
                    v_scale: Optional[Tensor] = None, block_table: Optional[Tensor] = None,
                    sinks: Optional[Tensor] = None, **options: Any) -> bool:
    """Whether a call with qv is to have gradients: q and qv are then one query of k and v, one key. Shapes that do not fit
    are the library's to refuse."""
    tensors = q, k, v, qv
    if qv is None or not torch.is_grad_enabled() or not all(isinstance(t, Tensor) for t in tensors):
        return False
    given = any(t is not None for t in (k_scale, v_scale, block_table))
    fits = qv.shape == (*q.shape[:-1], v.shape[-1]) and k.shape[:-1] == v.shape[:-1]
    return fits and not given and any(isinstance(t, Tensor) and t.requires_grad for t in (*tensors, sinks))


def attend(q: Tensor, k: Tensor, v: Tensor, *, attention_chunk: int = 0, names: Mapping[str, str] = {}, **options: Any
           ) -> tuple[Tensor, Tensor]:
    """(O, LSE) of a call whose options have the library's names; what is refused has FlashAttention's, or `names`."""
    chunk = _chunks.size(attention_chunk)
    q, options["qv"] = widened(q), widened(options.get("qv"))
    if _differentiates(q, k, v, **options):
        q, k, options["qv"] = torch.cat((q, options["qv"]), -1), torch.cat((k, v), -1), None
    try:
        if not chunk:
            return attention(q, k, v, return_lse=True, **options)  # type: ignore[no-any-return]
        return _in_chunks(chunk, q, k, v, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise renamed(error, {**NAMES, **names}) from None


def _in_chunks(chunk: int, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Optional[Tensor] = None,
               cu_seqlens_k: Optional[Tensor] = None, seqused_q: Optional[Tensor] = None,
               seqused_k: Optional[Tensor] = None, max_seqlen_q: Optional[int] = None,
               max_seqlen_k: Optional[int] = None, qv: Optional[Tensor] = None, k_scale: Optional[Tensor] = None,
               v_scale: Optional[Tensor] = None, **options: Any) -> tuple[Tensor, Tensor]:
    if not torch.compiler.is_compiling():  # rules of the call as it is; a plan cannot be traced
        check(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
              max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, qv=qv, k_scale=k_scale, v_scale=v_scale, **options)
    parts, places = _chunks.of_sequences(chunk, q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_k)
    scales = _chunks.scales(parts, k.dim() == 4, k_scale=k_scale, v_scale=v_scale)
    o, lse = attention(_chunks.flat(q), _chunks.flat(k), _chunks.flat(v), return_lse=True,
                       qv=None if qv is None else _chunks.flat(qv), **places, **scales, **options)
    return _chunks.back(o, lse, q)


def combine(out_partial: Tensor, lse_partial: Tensor, out: Optional[Tensor], out_dtype: Optional[torch.dtype]
            ) -> tuple[Tensor, Tensor]:
    """Partial results [splits,...,N,H,D] and LSE [splits,...,N,H] of all splits: O [...,N,H,D], LSE [...,N,H]."""
    for name, t in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: is a {type(t).__name__}; must be a PyTorch tensor")
        if t.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: requires a gradient, which merging does not give; use torch.no_grad()")
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1] or not out_partial.shape[0]:
        raise ValueError(f"lse_partial: has shape {list(lse_partial.shape)} and out_partial {list(out_partial.shape)}; must "
                         "be [splits, batch, tokens, heads] or [splits, tokens, heads], and the same with dim behind")
    dtype = out_dtype or out_partial.dtype
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"out_dtype: is {dtype}; must be float32, float16 or bfloat16")
    if out is not None and (out.shape != out_partial.shape[1:] or out.dtype != dtype):
        raise ValueError(f"out: is {list(out.shape)}, {out.dtype}; must be {list(out_partial.shape[1:])}, {dtype}")
    if dtype != out_partial.dtype and out_partial.element_size() == 2:  # rounded once
        out_partial = out_partial.float()
    o, lse = merge(list(zip(out_partial, lse_partial.float().transpose(-1, -2))))
    made = o.to(dtype) if out is None else out.copy_(o)
    return made, lse.transpose(-1, -2)
