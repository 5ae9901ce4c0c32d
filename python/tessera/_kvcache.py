"""What flash_attn_with_kvcache does around the attention: lengths, tables, rotary embedding, appending. PyTorch only.

Used by flash_attn.py.
"""
from __future__ import annotations

from typing import Optional, Union

import torch
from torch import Tensor


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor, seqused: Tensor, interleaved: bool, ordered: bool) -> Tensor:
    """Rotary embedding of [B,n,H,D] in f32, of the first 2 * cos.shape[1] dims.

    Token t of sequence b has position seqused[b] + t, or seqused[b] where the tokens have no order. Pairs are
    neighbours (interleaved) or lie half of those dims apart (NeoX).
    """
    half = cos.shape[-1]
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * half > x.shape[-1]:
        raise ValueError(f"rotary_cos: has shape {list(cos.shape)} and rotary_sin {list(sin.shape)}; both must be "
                         f"[positions, dims], with at most {x.shape[-1] // 2} dims")
    places = torch.arange(x.shape[1], device=x.device) * int(ordered)
    positions = seqused.long()[:, None] + places
    if not x.is_cuda and positions.numel() and int(positions.max()) >= cos.shape[0]:
        raise ValueError(f"rotary_cos: has {cos.shape[0]} positions but position {int(positions.max())} is needed")
    c, s = (t[positions].float()[:, :, None] for t in (cos, sin))  # [B,n,1,half]
    turned = x[..., :2 * half].float()
    a, b = turned.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turned.split(half, -1)
    pair = a * c - b * s, a * s + b * c
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half:]), -1)


def append(cache: Tensor, new: Tensor, seqused: Tensor, table: Optional[Tensor]) -> None:
    """Rows of [B,n,H,D] go to the places behind those in use, in the cache's type."""
    size = cache.shape[1]
    places = seqused.long()[:, None] + torch.arange(new.shape[1], device=new.device)  # [B,n]
    capacity = size * (1 if table is None else table.shape[1])
    if not new.is_cuda and places.numel() and (int(places.min()) < 0 or int(places.max()) >= capacity):
        raise ValueError(f"cache_seqlens: places {int(places.min())} to {int(places.max())} are to be written but a "
                         f"sequence's cache has {capacity}")
    if table is None:
        rows = torch.arange(new.shape[0], device=new.device)[:, None]
    else:
        rows = table.long().gather(1, places // size)
        if not new.is_cuda and rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= cache.shape[0]):
            raise ValueError(f"block_table: names pages {int(rows.min())} to {int(rows.max())} to be written but the "
                             f"cache has {cache.shape[0]}")
    cache[rows, places % size] = new.to(cache.dtype)
