# SPDX-License-Identifier: Apache-2.0
"""flash_attn.layers.rotary: rotary position embedding of q and k. Differentiable, in f32, on any device.

PyTorch's own operations, with the names, arguments and results that callers of FlashAttention know. A cache of keys
needs none of this: flash_attn_with_kvcache and tessera.append rotate what they store.
"""
from __future__ import annotations

from typing import Any, Optional, Sequence, Union

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


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor, dims: int) -> None:
    if cos.dim() not in (2, dims) or cos.shape != sin.shape or not 0 < 2 * cos.shape[-1] <= x.shape[-1]:
        batch = " or [batch, tokens, dims]" if dims == 3 else ""
        raise ValueError(f"cos: has shape {list(cos.shape)} and sin {list(sin.shape)}; both must be [positions, dims]"
                         f"{batch}, with 1 to {x.shape[-1] // 2} dims")


def _rotated(x: Tensor, c: Tensor, s: Tensor, interleaved: bool) -> Tensor:
    """The dims of x [...,H,D] that cosines and sines [...,R/2] rotate: [...,H,R]."""
    part = x[..., :2 * c.shape[-1]].float()
    c, s = (t.float().unsqueeze(-2) for t in (c, s))  # one for all heads
    c, s = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (c, s))
    return (part * c + rotate_half(part, interleaved) * s).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seqlen_offsets: Union[int, Tensor],
            cu_seqlens: Optional[Tensor]) -> Tensor:
    """The same at the positions of x's tokens, in tables of all positions."""
    _check_tables(x, cos, sin, 2)
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise ValueError(f"x: has shape {list(x.shape)}; must be [batch, tokens, heads, dim], or [tokens, heads, dim] "
                         "with cu_seqlens")
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    if not x.is_cuda and not torch.compiler.is_compiling() and positions.numel():
        first, last = (int(n) for n in positions.aminmax())
        if first < 0 or last >= cos.shape[0]:
            raise ValueError(f"seqlen_offsets: lead to positions {first} to {last}; cos and sin have {cos.shape[0]}")
    return _rotated(x, cos[positions], sin[positions], interleaved)


_Parts = Sequence[tuple[tuple[Any, ...], Tensor, Tensor]]  # where in a tensor, and cosines and sines for it


def _assign(x: Tensor, parts: _Parts, turned: Sequence[Tensor]) -> Tensor:
    for (where, _, _), rows in zip(parts, turned):
        x[where][..., :rows.shape[-1]] = rows
    return x


class _Assigned(torch.autograd.Function):
    """Rotation in place, where PyTorch refuses to assign: to leaves, and to views that unbind, split and chunk make."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: _Parts, how: tuple[Any, ...]) -> Tensor:
        ctx.parts, ctx.how = parts, how
        return _assign(x, parts, [_turned(x[where], cos, sin, *how) for where, cos, sin in parts])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], ...]:  # type: ignore[override]
        back = [(where, cos, -sin) for where, cos, sin in ctx.parts]
        turned = [_turned(gradient[where], cos, sin, *ctx.how) for where, cos, sin in back]
        return _assign(gradient.clone(), back, turned), None, None


def _in_place(x: Tensor, parts: _Parts, *how: Any) -> Tensor:
    """x, some parts of which are rotated. The result carries the gradient, x itself need not."""
    turned = [_turned(x[where], cos, sin, *how) for where, cos, sin in parts]
    try:
        return _assign(x, parts, turned)
    except RuntimeError:  # nothing has been written
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
            raise
    return _Assigned.apply(x, parts, how)  # type: ignore[no-any-return, no-untyped-call]


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
                     seqlen_offsets: Union[int, Tensor] = 0, cu_seqlens: Optional[Tensor] = None,
                     max_seqlen: Optional[int] = None) -> Tensor:
    """x [B,N,H,D], or [T,H,D] with cu_seqlens (int32 [B+1]); cos and sin [positions,R/2] rotate the first R dims.

    Pairs lie R/2 dims apart (NeoX), or are neighbours (interleaved). seqlen_offsets, a number or a tensor [B], is the
    position of each sequence's first token. max_seqlen changes nothing. With inplace x is written, a leaf too: go on
    with the result, which carries the gradient.
    """
    if inplace:
        return _in_place(x, [((...,), cos, sin)], interleaved, seqlen_offsets, cu_seqlens)
    turned = _turned(x, cos, sin, interleaved, seqlen_offsets, cu_seqlens)
    return torch.cat((turned, x[..., turned.shape[-1]:]), -1)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [B,N,H,D]; cos and sin of its tokens, [N,R/2] or [B,N,R/2], or of more positions behind them."""
    _check_tables(x, cos, sin, 3)
    if x.dim() != 4 or cos.shape[-2] < x.shape[1]:
        raise ValueError(f"x: has shape {list(x.shape)}; must be [batch, tokens, heads, dim], with at most the "
                         f"{cos.shape[-2]} tokens of cos")
    turned = _rotated(x, *(t[..., :x.shape[1], :] for t in (cos, sin)), interleaved)
    return torch.cat((turned, x[..., turned.shape[-1]:]), -1)


def apply_rotary_emb_qkv_(qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Optional[Tensor] = None,
                          sin_k: Optional[Tensor] = None, interleaved: bool = False,
                          seqlen_offsets: Union[int, Tensor] = 0, num_heads_q: Optional[int] = None) -> Tensor:
    """q and k of qkv [B,N,3,H,D], or [B,N,Hq+2*Hk,D] with num_heads_q, in place; k by cos_k and sin_k, if given."""
    q: Any
    k: Any
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k = 0, 1
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        q, k = slice(num_heads_q), slice(num_heads_q, (qkv.shape[2] + num_heads_q) // 2)
    else:
        raise ValueError(f"qkv: has shape {list(qkv.shape)}; must be [batch, tokens, 3, heads, dim], or [batch, tokens, "
                         "q's heads and twice k's, dim] with num_heads_q")
    every = slice(None)
    parts = [((every, every, q), cos, sin),
             ((every, every, k), cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)]
    return _in_place(qkv, parts, interleaved, seqlen_offsets, None)


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False,
                         seqlen_offsets: Union[int, Tensor] = 0) -> Tensor:
    """k of kv [B,N,2,H,D], in place."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: has shape {list(kv.shape)}; must be [batch, tokens, 2, heads, dim]")
    return _in_place(kv, [((slice(None), slice(None), 0), cos, sin)], interleaved, seqlen_offsets, None)


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
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = torch.empty(0, dim // 2)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Optional[torch.dtype] = None) -> None:
        """Tables of `seqlen` positions or more, [positions,dim/2], for q and for k. A name that callers know."""
        device = self.inv_freq.device if device is None else torch.device(device)
        dtype = self.inv_freq.dtype if dtype is None else dtype
        if seqlen <= self._made[0] and self._made[1:] == (device, dtype):
            return
        places = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(places, self.inv_freq.to(device, torch.float32))
        cos, sin = angles.cos(), angles.sin()
        tables = cos, sin, cos, sin
        if self.scale is not None and self.scale_base is not None:
            power = (places - seqlen // 2) / self.scale_base
            factor = self.scale.to(device, torch.float32) ** power[:, None]
            tables = cos * factor, sin * factor, cos / factor, sin / factor
        self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = (t.to(dtype) for t in tables)
        self._made = seqlen, device, dtype

    def forward(self, qkv: Tensor, kv: Optional[Tensor] = None, seqlen_offset: Union[int, Tensor] = 0,
                max_seqlen: Optional[int] = None, num_heads_q: Optional[int] = None) -> Any:
        """qkv [B,N,3,H,D] or [B,N,Hq+2*Hk,D], in place; or q [B,N,H,D] and kv [B,N,2,H,D]: (q rotated, kv in place).

        A tensor of offsets needs max_seqlen, the most positions.
        """
        if max_seqlen is not None:
            length = max_seqlen
        elif isinstance(seqlen_offset, int):
            length = qkv.shape[1] + seqlen_offset
        else:
            raise ValueError("max_seqlen: is missing; it says how many positions a tensor of offsets may reach")
        self._update_cos_sin_cache(length, qkv.device, qkv.dtype)
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, False, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
