# SPDX-License-Identifier: Apache-2.0
"""`attn_implementation="tessera"` in Hugging Face transformers: call register() once, before a model is made.

Masks are those that transformers makes for SDPA: none where `causal` says it all, else boolean ones. Models whose layers
do not say whether they are causal always get one.
"""
from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from .torch import attention


def attention_forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
                      dropout: float = 0.0, scaling: Optional[float] = None, is_causal: Optional[bool] = None,
                      softcap: Optional[float] = None, s_aux: Optional[Tensor] = None,
                      position_bias: Optional[Tensor] = None, sinks: Optional[Tensor] = None, cache: Any = None,
                      **kwargs: Any) -> tuple[Tensor, None]:
    """query [B,Hq,Nq,D], key [B,Hk,Nk,D], value [B,Hk,Nk,Dv] -> (O [B,Nq,Hq,Dv], no weights)."""
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: is True; attention weights are never stored, use 'eager' for them")
    if sinks is not None:
        raise NotImplementedError(f"sinks: has shape {list(sinks.shape)}; a sink for each query is not there, only for each "
                                  "head (s_aux), use 'eager'")
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _says_whether_causal(config: type) -> bool:
    """Whether a model's layers do, by their `is_causal`: where transformers allows SDPA, and where all layers decode."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_MAPPING
    model = MODEL_MAPPING.get(config, None)
    models = model if isinstance(model, (tuple, list)) else (model,)
    return all(getattr(each, "_supports_sdpa", False) for each in models) or (
        config in MODEL_FOR_CAUSAL_LM_MAPPING and config not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)


def mask(*arguments: Any, config: Any = None, **options: Any) -> Optional[Tensor]:
    """transformers' mask for SDPA, bool. It is left out only where the layers say what it would."""
    from transformers.masking_utils import sdpa_mask
    if not _says_whether_causal(type(config)):
        options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(*arguments, config=config, **options)  # type: ignore[no-any-return]


def register(name: str = "tessera") -> None:
    """Makes attn_implementation=name available to every model of transformers (5.0 or later)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask)
