# SPDX-License-Identifier: Apache-2.0
"""`attn_implementation="tessera"` in Hugging Face transformers: call register() once, before a model is made.

Masks are those that transformers makes for SDPA: none where `causal` says it all, else boolean ones.
"""
from __future__ import annotations

from typing import Any, Optional

from torch import Tensor, nn

from .torch import attention


def attention_forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
                      dropout: float = 0.0, scaling: Optional[float] = None, is_causal: Optional[bool] = None,
                      softcap: Optional[float] = None, s_aux: Optional[Tensor] = None,
                      position_bias: Optional[Tensor] = None, cache: Any = None, **kwargs: Any) -> tuple[Tensor, None]:
    """query [B,Hq,Nq,D], key [B,Hk,Nk,D], value [B,Hk,Nk,Dv] -> (O [B,Nq,Hq,Dv], no weights)."""
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: is True; attention weights are never stored, use 'eager' for them")
    if cache is not None:
        raise NotImplementedError(f"cache: is a {type(cache).__name__}, as continuous batching passes; dynamic and "
                                  "static caches work, pages only in tessera.attention and tessera.flash_attn")
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0, "bias": position_bias}
    if attention_mask is not None and attention_mask.is_floating_point():
        options["bias"] = attention_mask if position_bias is None else position_bias + attention_mask
    elif attention_mask is not None:
        options["mask"] = attention_mask[..., :key.shape[2]]
    elif query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        # Without a mask, queries begin where keys do: a static cache is longer than what it holds.
        options.update(causal=True, alignment="top_left")
    if s_aux is not None:
        options["sinks"] = s_aux.float()
    o = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **options)
    return o, None


def register(name: str = "tessera") -> None:
    """Makes attn_implementation=name available to every model of transformers (5.0 or later)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)
