# SPDX-License-Identifier: Apache-2.0
"""What flash_attn_with_kvcache does: lengths, tables, appending with rotary embedding, and the attention that follows.

Used by the package flash_attn and by flash_attn_interface. PyTorch only.
"""
from __future__ import annotations

import operator
from typing import Any, Callable, Mapping, NamedTuple, Optional, Union

import torch
from torch import Tensor

from . import _chunks
from ._abi import renamed
from ._torch_append import append as append_by_library
from ._torch_shapes import require_tensors
from .torch import attention, check

# What the library calls the arguments of flash_attn_with_kvcache.
_NAMES = {"k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v", "q_out": "q", "q_positions": "cache_seqlens",
          "seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad", "scale": "softmax_scale",
          "k_scale": "k_descale", "v_scale": "v_descale",
          "slopes": "alibi_slopes", "window": "window_size", "window_left": "window_size",
          "window_right": "window_size"}


class Cache(NamedTuple):
    k: Tensor
    v: Tensor
    seqlens: Optional[Union[int, Tensor]]
    batch_idx: Optional[Tensor]
    leftpad: Optional[Tensor]
    table: Optional[Tensor]
    names: Mapping[str, str] = {}  # the caller's, where they are not FlashAttention-2's

    def named(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The call, whose errors have the names of the caller's arguments."""
        try:
            return function(*arguments, **options)
        except (ValueError, TypeError, NotImplementedError) as error:
            of_pages = {"block_table": "cache_batch_idx"} if self.batch_idx is not None else {}
            raise renamed(error, {**_NAMES, **self.names, **of_pages}) from None


Scales = Mapping[str, Optional[Tensor]]


def first_caches(q: Tensor, cache: Cache, scales: Scales) -> tuple[Cache, Scales]:
    """Of more caches than sequences the first ones are theirs, in FlashAttention-2 if nothing says which; so are the scales
    of their rows."""
    require_tensors({"q": q, "k_cache": cache.k, "v_cache": cache.v})
    batch, count = q.shape[:1], cache.k.shape[:1]
    named = cache.table is not None or cache.batch_idx is not None
    if named or q.dim() != 4 or cache.k.dim() != 4 or count <= batch or cache.v.shape[:1] != count:
        return cache, scales

    def first(scale: Optional[Tensor]) -> Optional[Tensor]:
        of_rows = isinstance(scale, Tensor) and scale.dim() > 2 and scale.shape[:1] == count
        return scale[:batch[0]] if scale is not None and of_rows else scale
    return (cache._replace(k=cache.k[:batch[0]], v=cache.v[:batch[0]]),
            {name: first(scale) for name, scale in scales.items()})


class New(NamedTuple):
    """Tokens to be appended: [B,n,Hk,D], or [T,Hk,D] with cu_seqlens."""
    k: Tensor
    v: Tensor
    cu_seqlens: Optional[Tensor] = None


def new(k: Optional[Tensor], v: Optional[Tensor], cu_seqlens: Optional[Tensor] = None) -> Optional[New]:
    if k is None:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens_k_new: is given without k; there are no new tokens")
        if v is not None:
            raise ValueError("v: is given without k; k and v are appended together")
        return None
    if v is None:
        raise ValueError("v: is missing; k and v are appended together")
    return New(k, v, cu_seqlens)


class Rotary(NamedTuple):
    cos: Tensor
    sin: Tensor
    interleaved: bool
    first: Optional[Tensor] = None  # position of each sequence's first new token; None: the cache's length


def rotary(cos: Optional[Tensor], sin: Optional[Tensor], interleaved: bool, first: Optional[Tensor] = None
           ) -> Optional[Rotary]:
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos: goes with rotary_sin, k and v; rotating without appending is not defined")
    return None if cos is None or sin is None else Rotary(cos, sin, interleaved, first)


def _batch(q: Tensor, cu_seqlens_q: Optional[Tensor]) -> int:
    return q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1


def _lengths(q: Tensor, cu_seqlens_q: Optional[Tensor], cache: Cache, appends: bool) -> Tensor:
    """Used places of each sequence's cache, int32 [B]; all of them where none are given."""
    if q.dim() != (4 if cu_seqlens_q is None else 3) or cache.k.dim() != 4:
        dims = "both must have 4 dimensions" if cu_seqlens_q is None else "q must have 3 with cu_seqlens_q, k_cache 4"
        raise ValueError(f"q: has shape {list(q.shape)} and k_cache {list(cache.k.shape)}; {dims}")
    seqlens = cache.seqlens
    if isinstance(seqlens, Tensor):
        return seqlens
    if seqlens is None:
        if appends:
            raise ValueError("cache_seqlens: is missing; k and v are appended behind them")
        name = cache.names.get("block_table", "block_table")
        seqlens = cache.k.shape[1] * (1 if cache.table is None else _chunks.entries(name, cache.table))
    elif not isinstance(seqlens, (int, torch.SymInt)):
        try:
            seqlens = operator.index(seqlens)  # NumPy's whole numbers
        except TypeError:
            raise TypeError(f"cache_seqlens: is {seqlens!r}; must be a whole number or an int32 tensor") from None
    if not 0 <= seqlens < 2**31:
        raise ValueError(f"cache_seqlens: is {seqlens}; must be from 0 to 2^31 - 1")
    return torch.full((_batch(q, cu_seqlens_q),), seqlens, dtype=torch.int32, device=q.device)


def _table(cache: Cache, batch: int, needed: bool) -> Optional[Tensor]:
    """The page table, int32 [B,entries]. A cache in one piece is a page; one for each sequence has no table unless needed."""
    if cache.table is not None:
        if cache.batch_idx is not None:
            raise ValueError("cache_batch_idx: is given with block_table; use one or the other")
        return cache.table
    if cache.batch_idx is not None:
        require_tensors({"cache_batch_idx": cache.batch_idx})
        return cache.batch_idx.int()[:, None]
    if cache.leftpad is not None or needed:
        if cache.k.shape[0] < batch:  # pages that are not there would be zeros
            raise ValueError(f"k_cache: has {cache.k.shape[0]} sequences but q has {batch}; each needs a cache")
        return torch.arange(batch, dtype=torch.int32, device=cache.k.device)[:, None]
    return None


def _check_numbers(name: str, numbers: Tensor, count: int, which: str) -> None:
    """Whether these are so many whole numbers: cut to such, others would be read as what they are not."""
    require_tensors({name: numbers})
    if list(numbers.shape) != [count]:
        raise ValueError(f"{name}: has shape {list(numbers.shape)}; must be [{count}], {which}")
    if numbers.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"{name}: has type {numbers.dtype}; must be torch.int32")


def _check_one(name: str, tokens: Tensor, cache: Tensor, shape: list[int]) -> None:
    require_tensors({name: tokens})
    if list(tokens.shape) != shape:
        places = "q's batch, k's tokens" if len(shape) == 4 else "k's tokens"
        raise ValueError(f"{name}: has shape {list(tokens.shape)}; must be {shape}: {places}, heads and "
                         f"dim of {name}_cache")
    if tokens.device != cache.device or not tokens.is_floating_point() or not (
            cache.is_floating_point() or cache.dtype == torch.int8):
        raise ValueError(f"{name}: is {tokens.dtype} on {tokens.device} but {name}_cache is {cache.dtype} on "
                         f"{cache.device}; both must hold real numbers on one device")
    if any(step == 0 and count > 1 for step, count in zip(cache.stride(), cache.shape)):
        raise ValueError(f"{name}_cache: has strides {cache.stride()}; places that are written must lie apart")
    if not torch.compiler.is_compiling() and cache.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}_cache: is a tensor of inference mode; it can be written in that mode only")


def _check_new(cache: Cache, tokens: New, batch: int) -> None:
    """Whether such k and v can be written to the caches."""
    dims = 4 if tokens.cu_seqlens is None else 3
    count = tokens.k.shape[dims - 3] if isinstance(tokens.k, Tensor) and tokens.k.dim() == dims else 1
    for name, given, stored in (("k", tokens.k, cache.k), ("v", tokens.v, cache.v)):
        _check_one(name, given, stored, [*([batch] if dims == 4 else []), count, *stored.shape[2:]])
    if tokens.cu_seqlens is not None:
        _check_numbers("cu_seqlens_k_new", tokens.cu_seqlens, batch + 1, "one more than q has sequences")


def _check_rotary(x: Tensor, given: Rotary, batch: int) -> None:
    cos, sin = given.cos, given.sin
    require_tensors({"rotary_cos": cos, "rotary_sin": sin})
    if given.first is not None:
        _check_numbers("rotary_seqlens", given.first, batch, "one for each of q's sequences")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"rotary_cos: has shape {list(cos.shape)} and rotary_sin {list(sin.shape)}; both must be "
                         f"[positions, dims], with at most {x.shape[-1] // 2} dims")


def _bounds(window: Any) -> bool:
    """Whether a window hides a key; what it says has been checked."""
    return window is not None and any(side is not None and side != -1 for side in window)


def check_batch_idx(batch_idx: Tensor, count: int, used: Optional[Tensor] = None) -> None:
    """Whether entries are below `count`, but for sequences without keys: others would read zeros, or another's keys."""
    require_tensors({"cache_batch_idx": batch_idx})
    if batch_idx.is_cuda or torch.compiler.is_compiling():
        return
    outside = (batch_idx < 0) | (batch_idx >= count)
    if used is not None and used.shape == batch_idx.shape:
        outside &= used > 0
    if bool(outside.any()):
        raise ValueError(f"cache_batch_idx: is {batch_idx.tolist()}; must be from 0 to {count - 1}")


def _check_leftpad(leftpad: Tensor, used: Tensor) -> None:
    if bool(((leftpad < 0) | (leftpad > used)).any()):
        raise ValueError(f"cache_leftpad: is {leftpad.tolist()}; must be from 0 to the lengths {used.tolist()}, k's "
                         "tokens included")


def _counted(x: Tensor, cu_seqlens: Optional[Tensor], first: Tensor, ordered: bool) -> tuple[Tensor, Tensor]:
    """The sequence of each token of x, and its position there: `first` of the sequence, or from `first` on if ordered.

    Both [B,n] or, packed, [T]. Tokens of no sequence have position 0.
    """
    if cu_seqlens is None:
        step = torch.arange(x.shape[1], device=x.device) * int(ordered)
        sequence = torch.arange(x.shape[0], device=x.device)[:, None].expand(x.shape[:2])
        return sequence, first.long()[:, None] + step
    token, offsets = torch.arange(x.shape[0], device=x.device), cu_seqlens.long()
    sequence = torch.searchsorted(offsets, token, right=True) - 1
    inside = (sequence >= 0) & (sequence < first.shape[0])
    sequence = torch.where(inside, sequence, 0)
    place = first.long()[sequence] + (token - offsets[sequence]) * int(ordered)
    return sequence, torch.where(inside, place, 0)


def _check_places(cache: Cache, tokens: New, seqused: Tensor, table: Optional[Tensor]) -> None:
    """Whether rows of new tokens have places behind those in use."""
    size = cache.k.shape[1]
    sequence, places = _counted(tokens.k, tokens.cu_seqlens, seqused, True)
    capacity = size * (1 if table is None else table.shape[1])
    if places.numel() and (int(places.min()) < 0 or int(places.max()) >= capacity):
        raise ValueError(f"cache_seqlens: places {int(places.min())} to {int(places.max())} are to be written but a "
                         f"sequence's cache has {capacity}")
    if table is None:
        return
    pages = table.long()[sequence, places // size]
    if pages.numel() and (int(pages.min()) < 0 or int(pages.max()) >= cache.k.shape[0]):
        raise ValueError(f"{cache.names.get('block_table', 'block_table')}: names pages {int(pages.min())} to "
                         f"{int(pages.max())} to be written but the cache has {cache.k.shape[0]}")


def _turned(q: Tensor, positions: Tensor, cache: Cache, tokens: New, given: Rotary) -> Tensor:
    """q, rotated, by an append of no tokens: q's may be others than the new ones."""
    rows, positions = (q, positions) if q.dim() == 4 else (q[None], positions[None])
    batch = rows.shape[0]
    none = (x.new_empty(batch, 0, *x.shape[-2:]) for x in tokens[:2])
    empty = torch.empty(batch, 0, dtype=torch.int32, device=q.device)
    turned = cache.named(append_by_library, *none, cache.k, cache.v, slots=empty, positions=empty, q=rows,
                         q_positions=positions.int(), rotary_cos=given.cos, rotary_sin=given.sin,
                         interleaved=given.interleaved)
    return turned.view(q.shape)  # type: ignore[no-any-return]


def append(q: Tensor, cache: Cache, tokens: New, seqused: Tensor, used: Tensor, table: Optional[Tensor],
           given: Optional[Rotary], ordered: bool, cu_seqlens_q: Optional[Tensor] = None,
           **scales: Optional[Tensor]) -> Tensor:
    """k, rotated, and v go to the places behind those in use, in the caches' types; returns q, rotated.

    Query i is at the position of new token i if ordered, else all are at that of the first. Checks the numbers of lengths
    and tables on the CPU before it writes; the rest has been checked. Those on a GPU are not read: there the library
    writes to no place outside of the cache.
    """
    if not q.is_cuda and not torch.compiler.is_compiling():  # what they say of numbers; the library checks them again
        if cache.leftpad is not None:
            _check_leftpad(cache.leftpad, used)
        _check_places(cache, tokens, seqused, table)
    options: dict[str, Any] = {}
    together = cu_seqlens_q is None and tokens.cu_seqlens is None
    if given is not None:
        options = {"rotary_cos": given.cos, "rotary_sin": given.sin, "interleaved": given.interleaved}
        first = seqused if given.first is None else given.first
        if given.first is not None:
            options["positions"] = _counted(tokens.k, tokens.cu_seqlens, first, True)[1]
        if not together:
            q = _turned(q, _counted(q, cu_seqlens_q, first, ordered)[1], cache, tokens, given)
        elif given.first is not None or not ordered:
            options["q_positions"] = _counted(q, None, first, ordered)[1]
        if together:
            options["q"] = q
    turned = cache.named(append_by_library, tokens.k, tokens.v, cache.k, cache.v, seqused_k=used, block_table=table,
                         cu_seqlens_new=tokens.cu_seqlens, **scales, **options)
    return q if turned is None else turned


def attend(q: Tensor, cache: Cache, tokens: Optional[New], given: Optional[Rotary],
           scales: Scales, append_scales: Optional[Scales] = None, *,
           cu_seqlens_q: Optional[Tensor] = None, max_seqlen_q: Optional[int] = None, attention_chunk: int = 0,
           **options: Any) -> tuple[Tensor, Tensor]:
    """(O, LSE). What is appended is divided by append_scales, which are `scales` where they are not given."""
    chunk = _chunks.size(attention_chunk)
    require_tensors({"q": q, "k_cache": cache.k, "v_cache": cache.v})
    if cu_seqlens_q is not None:
        require_tensors({"cu_seqlens_q": cu_seqlens_q})
    seqused = _lengths(q, cu_seqlens_q, cache, appends=tokens is not None)
    table = _table(cache, _batch(q, cu_seqlens_q), needed=bool(chunk) or cu_seqlens_q is not None)
    if given is not None and tokens is None:
        raise ValueError("rotary_cos: goes with rotary_sin, k and v; rotating without appending is not defined")
    used = seqused
    if tokens is not None:
        _check_new(cache, tokens, _batch(q, cu_seqlens_q))
        if tokens.cu_seqlens is not None:
            _check_numbers("cache_seqlens", seqused, _batch(q, cu_seqlens_q), "one for each of q's sequences")
        used = seqused + (tokens.k.shape[1] if tokens.cu_seqlens is None else tokens.cu_seqlens.diff())
        if given is not None:
            _check_rotary(tokens.k, given, _batch(q, cu_seqlens_q))
    if cache.batch_idx is not None:
        check_batch_idx(cache.batch_idx, cache.k.shape[0], used)
    options.update(scales, seqused_k=used)
    if table is not None:
        options.update(block_table=table, leftpad_k=cache.leftpad)
    if cu_seqlens_q is not None:
        options.update(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    if not torch.compiler.is_compiling() and (tokens is not None or chunk):  # a plan cannot be traced
        cache.named(check, q, cache.k, cache.v, **options)
    if tokens is not None:
        ordered = bool(options["causal"] or chunk) or _bounds(options["window"])
        q = append(q, cache, tokens, seqused, used, table, given, ordered, cu_seqlens_q,
                   **(scales if append_scales is None else append_scales))
    if not chunk or table is None:
        return cache.named(attention, q, cache.k, cache.v, return_lse=True, **options)  # type: ignore[no-any-return]
    if tokens is None and cache.leftpad is not None and not q.is_cuda and not torch.compiler.is_compiling():
        _check_leftpad(cache.leftpad, used)
    parts, places = _chunks.of_caches(chunk, q, cu_seqlens_q, max_seqlen_q, used, cache.leftpad, table)
    qv = options.pop("qv", None)
    options = {**options, **places, **_chunks.scales(parts, False, **scales), "max_seqlen_q": None}
    o, lse = cache.named(attention, _chunks.flat(q), cache.k, cache.v, return_lse=True,
                         qv=None if qv is None else _chunks.flat(qv), **options)
    return _chunks.back(o, lse, q)
