# SPDX-License-Identifier: Apache-2.0
"""What flash_attn_with_kvcache does around the attention: lengths, tables, appending with rotary embedding.

Used by the package flash_attn. PyTorch only.
"""
from __future__ import annotations

import operator
from typing import Any, Callable, NamedTuple, Optional, Union

import torch
from torch import Tensor

from ._abi import renamed
from ._torch_append import append as append_by_library


# What the library calls the arguments of flash_attn_with_kvcache.
_NAMES = {"k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v", "q_out": "q", "q_positions": "cache_seqlens",
          "seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad", "scale": "softmax_scale",
          "k_scale": "k_descale", "v_scale": "v_descale",
          "slopes": "alibi_slopes", "window": "window_size", "window_left": "window_size",
          "window_right": "window_size"}


def named(by_index: bool, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The call, whose errors have the names of the caller's arguments."""
    try:
        return function(*arguments, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise renamed(error, {**_NAMES, "block_table": "cache_batch_idx"} if by_index else _NAMES) from None


def lengths(q: Tensor, k_cache: Tensor, cache_seqlens: Optional[Union[int, Tensor]], block_table: Optional[Tensor],
            appends: bool) -> Tensor:
    """Used places of each sequence's cache, int32 [B]; all of them where none are given."""
    if q.dim() != 4 or k_cache.dim() != 4:
        raise ValueError(f"q: has shape {list(q.shape)} and k_cache {list(k_cache.shape)}; both must have 4 dimensions")
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        if appends:
            raise ValueError("cache_seqlens: is missing; k and v are appended behind them")
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    elif not isinstance(cache_seqlens, (int, torch.SymInt)):
        try:
            cache_seqlens = operator.index(cache_seqlens)  # NumPy's whole numbers
        except TypeError:
            raise TypeError(f"cache_seqlens: is {cache_seqlens!r}; must be a whole number or an int32 tensor") from None
    if not 0 <= cache_seqlens < 2**31:
        raise ValueError(f"cache_seqlens: is {cache_seqlens}; must be from 0 to 2^31 - 1")
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)


def table(k_cache: Tensor, seqused: Tensor, cache_batch_idx: Optional[Tensor], leftpad: Optional[Tensor],
          block_table: Optional[Tensor]) -> Optional[Tensor]:
    """The page table, int32 [B,entries]. A cache in one piece is a page; without batch indices and padding, none."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: is given with block_table; use one or the other")
        return block_table
    if cache_batch_idx is not None:
        return cache_batch_idx.int()[:, None]
    if leftpad is not None:
        return torch.arange(seqused.shape[0], dtype=torch.int32, device=k_cache.device)[:, None]
    return None


def _check_new(name: str, new: Tensor, cache: Tensor, shape: list[int]) -> None:
    if not isinstance(new, Tensor):
        raise TypeError(f"{name}: is a {type(new).__name__}; must be a PyTorch tensor")
    if list(new.shape) != shape:
        raise ValueError(f"{name}: has shape {list(new.shape)}; must be {shape}: q's batch, k's tokens, heads and "
                         f"dim of {name}_cache")
    if new.device != cache.device or not new.is_floating_point() or not (
            cache.is_floating_point() or cache.dtype == torch.int8):
        raise ValueError(f"{name}: is {new.dtype} on {new.device} but {name}_cache is {cache.dtype} on {cache.device}; "
                         "both must hold real numbers on one device")
    if any(step == 0 and count > 1 for step, count in zip(cache.stride(), cache.shape)):
        raise ValueError(f"{name}_cache: has strides {cache.stride()}; places that are written must lie apart")
    if not torch.compiler.is_compiling() and cache.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}_cache: is a tensor of inference mode; it can be written in that mode only")


def check_new(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None:
    """Whether such k and v can be written to the caches."""
    tokens = k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else 1
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        _check_new(name, new, cache, [q.shape[0], tokens, *cache.shape[2:]])


def _check_leftpad(leftpad: Tensor, used: Tensor) -> None:
    if bool(((leftpad < 0) | (leftpad > used)).any()):
        raise ValueError(f"cache_leftpad: is {leftpad.tolist()}; must be from 0 to the lengths {used.tolist()}, k's "
                         "tokens included")


def _check_places(new: Tensor, cache: Tensor, seqused: Tensor, table: Optional[Tensor]) -> None:
    """Whether rows of [B,n,H,D] have places behind those in use."""
    size = cache.shape[1]
    places = seqused.long()[:, None] + torch.arange(new.shape[1], device=new.device)
    capacity = size * (1 if table is None else table.shape[1])
    if places.numel() and (int(places.min()) < 0 or int(places.max()) >= capacity):
        raise ValueError(f"cache_seqlens: places {int(places.min())} to {int(places.max())} are to be written but a "
                         f"sequence's cache has {capacity}")
    if table is None:
        return
    pages = table.long().gather(1, places // size)
    if pages.numel() and (int(pages.min()) < 0 or int(pages.max()) >= cache.shape[0]):
        raise ValueError(f"block_table: names pages {int(pages.min())} to {int(pages.max())} to be written but the "
                         f"cache has {cache.shape[0]}")


class Rotary(NamedTuple):
    cos: Tensor
    sin: Tensor
    interleaved: bool
    ordered: bool  # query i is at position cache_seqlens + i; else all are at cache_seqlens


def check_rotary(x: Tensor, rotary: Rotary) -> None:
    cos, sin = rotary.cos, rotary.sin
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"rotary_cos: has shape {list(cos.shape)} and rotary_sin {list(sin.shape)}; both must be "
                         f"[positions, dims], with at most {x.shape[-1] // 2} dims")


def append(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, seqused: Tensor, used: Tensor,
           table: Optional[Tensor], leftpad: Optional[Tensor], rotary: Optional[Rotary], by_index: bool,
           **scales: Optional[Tensor]) -> Tensor:
    """k, rotated, and v go to the places behind those in use, in the caches' types; returns q, rotated.

    Checks the numbers of lengths and tables on the CPU before it writes; the rest has been checked. Those on a GPU are not
    read: there the library writes to no place outside of the cache.
    """
    if not q.is_cuda and not torch.compiler.is_compiling():  # what they say of numbers; the library checks them again
        if leftpad is not None:
            _check_leftpad(leftpad, used)
        _check_places(k, k_cache, seqused, table)
    options: dict[str, Any] = {}
    if rotary is not None:
        options = {"rotary_cos": rotary.cos, "rotary_sin": rotary.sin, "interleaved": rotary.interleaved, "q": q}
        if not rotary.ordered:
            options["q_positions"] = seqused[:, None].expand(q.shape[0], q.shape[1])
    rotated = named(by_index, append_by_library, k, v, k_cache, v_cache, seqused_k=used, block_table=table,
                    **scales, **options)
    return q if rotated is None else rotated
