# SPDX-License-Identifier: Apache-2.0
"""flash_attn.layers.rotary: rotary position embedding of q and k. Differentiable, in f32, on any device.

PyTorch's own operations, with the names, arguments and results that callers of FlashAttention know. A cache of keys
needs none of this: flash_attn_with_kvcache and tessera.append rotate what they store.
"""
from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair (a, b) as (-b, a)."""
    if not interleaved:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((-b, a), dim=-1).flatten(-2)


def _positions(x: Tensor, seqlen_offsets: Union[int, Tensor], cu_seqlens: Optional[Tensor]) -> Tensor:
    """Of the tokens of [B,N,...], or of [T,...] with cu_seqlens: each counts from its sequence's offset."""
    if cu_seqlens is None:
        offsets = seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        return torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]) + offsets
    places = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens.long(), places, right=True) - 1
    offsets = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    return places - cu_seqlens.long()[sequence] + offsets


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
                     seqlen_offsets: Union[int, Tensor] = 0, cu_seqlens: Optional[Tensor] = None,
                     max_seqlen: Optional[int] = None) -> Tensor:
    """x [B,N,H,D], or [T,H,D] with cu_seqlens (int32 [B+1]); cos and sin [positions,R/2] rotate the first R dims.

    Pairs lie R/2 dims apart (NeoX), or are neighbours (interleaved). seqlen_offsets, a number or a tensor [B], is the
    position of each sequence's first token. max_seqlen changes nothing.
    """
    half = cos.shape[-1]
    if cos.dim() != 2 or cos.shape != sin.shape or not 0 < 2 * half <= x.shape[-1]:
        raise ValueError(f"cos: has shape {list(cos.shape)} and sin {list(sin.shape)}; both must be [positions, dims], "
                         f"with 1 to {x.shape[-1] // 2} dims")
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise ValueError(f"x: has shape {list(x.shape)}; must be [batch, tokens, heads, dim], or [tokens, heads, dim] "
                         "with cu_seqlens")
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    c, s = (t[positions].float().unsqueeze(-2) for t in (cos, sin))  # one for all heads
    c, s = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (c, s))
    part = x[..., :2 * half].float()
    turned = (part * c + rotate_half(part, interleaved) * s).to(x.dtype)
    if inplace:
        x[..., :2 * half] = turned
        return x
    return torch.cat((turned, x[..., 2 * half:]), -1)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The same from position 0 on."""
    return apply_rotary_emb(x, cos, sin, interleaved)


def apply_rotary_emb_qkv_(qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Optional[Tensor] = None,
                          sin_k: Optional[Tensor] = None, interleaved: bool = False,
                          seqlen_offsets: Union[int, Tensor] = 0, num_heads_q: Optional[int] = None) -> Tensor:
    """q and k of qkv [B,N,3,H,D], or [B,N,Hq+2*Hk,D] with num_heads_q, in place; k by cos_k and sin_k, if given."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:num_heads_q + heads]
    else:
        raise ValueError(f"qkv: has shape {list(qkv.shape)}; must be [batch, tokens, 3, heads, dim], or [batch, tokens, "
                         "q's heads and twice k's, dim] with num_heads_q")
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True,
                     seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False,
                         seqlen_offsets: Union[int, Tensor] = 0) -> Tensor:
    """k of kv [B,N,2,H,D], in place."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: has shape {list(kv.shape)}; must be [batch, tokens, 2, heads, dim]")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k; keeps the tables of cosines and sines. With scale_base also xPos's scale, which decays."""

    inv_freq: Tensor
    scale: Optional[Tensor]

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: Optional[float] = None,
                 device: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        steps = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", 1.0 / self.base ** (steps / dim), persistent=False)
        scale = None if scale_base is None else (steps + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._made: tuple[Any, ...] = (0, None, None)  # what the tables were made for: length, device, type
        self._tables: tuple[Tensor, ...] = ()

    def tables(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """cos and sin [seqlen or more,dim/2] for q, and those for k."""
        if seqlen > self._made[0] or self._made[1:] != (device, dtype):
            places = torch.arange(seqlen, device=device, dtype=torch.float32)
            angles = torch.outer(places, self.inv_freq.to(device, torch.float32))
            cos, sin = angles.cos(), angles.sin()
            tables = cos, sin, cos, sin
            if self.scale is not None and self.scale_base is not None:
                power = (places - seqlen // 2) / self.scale_base
                factor = self.scale.to(device, torch.float32) ** power[:, None]
                tables = cos * factor, sin * factor, cos / factor, sin / factor
            self._tables, self._made = tuple(t.to(dtype) for t in tables), (seqlen, device, dtype)
        return self._tables

    def forward(self, qkv: Tensor, kv: Optional[Tensor] = None, seqlen_offset: Union[int, Tensor] = 0,
                max_seqlen: Optional[int] = None, num_heads_q: Optional[int] = None) -> Any:
        """qkv [B,N,3,H,D] or [B,N,Hq+2*Hk,D], in place; or q [B,N,H,D] and kv [B,N,2,H,D]: (q rotated, kv in place).

        A tensor of offsets needs max_seqlen, the most positions.
        """
        if isinstance(seqlen_offset, int):
            length = qkv.shape[1] + seqlen_offset
        elif max_seqlen is None:
            raise ValueError("max_seqlen: is missing; it says how many positions a tensor of offsets may reach")
        else:
            length = max_seqlen
        cos, sin, cos_k, sin_k = self.tables(length, qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, False, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
