# SPDX-License-Identifier: Apache-2.0
"""`attn_implementation="tessera"` in Hugging Face transformers: call register() once, before a model is made.

Masks are those that transformers makes for SDPA: none where `causal` says it all, else boolean ones. Models whose layers
do not say whether they are causal always get one. Models that do not ask for a function of attention get those of eager,
which they add to their scores.
"""
from __future__ import annotations

import functools
from typing import Any, Iterator, Optional

import torch
from torch import Tensor, nn

from .torch import attention


def _chosen(indices: Tensor, keys: int) -> Tensor:
    """Keys [B,Nq,n] that an indexer has chosen, as a mask [B,1,Nq,Nk]; numbers below 0 are none."""
    mask = torch.zeros(*indices.shape[:2], keys + 1, dtype=torch.bool, device=indices.device)
    places = torch.where(indices < 0, keys, indices).long()
    return mask.scatter_(-1, places, True)[:, None, :, :keys]


def attention_forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
                      dropout: float = 0.0, scaling: Optional[float] = None, is_causal: Optional[bool] = None,
                      softcap: Optional[float] = None, s_aux: Optional[Tensor] = None,
                      position_bias: Optional[Tensor] = None, sinks: Optional[Tensor] = None, cache: Any = None,
                      indices: Optional[Tensor] = None, block_indices: Optional[Tensor] = None, **kwargs: Any
                      ) -> tuple[Tensor, None]:
    """query [B,Hq,Nq,D], key [B,Hk,Nk,D], value [B,Hk,Nk,Dv] -> (O [B,Nq,Hq,Dv], no weights)."""
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: is True; attention weights are never stored, use 'eager' for them")
    if sinks is not None:
        raise NotImplementedError(f"sinks: has shape {list(sinks.shape)}; a sink for each query is not there, only for each "
                                  "head (s_aux), use 'eager'")
    if cache is not None:
        raise NotImplementedError(f"cache: is a {type(cache).__name__}, as continuous batching passes; dynamic and "
                                  "static caches work, pages only in tessera.attention and tessera.flash_attn")
    if block_indices is not None:
        raise NotImplementedError(f"block_indices: has shape {list(block_indices.shape)}; blocks of keys that an indexer has "
                                  "chosen are not there, use 'eager' or 'sdpa'")
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0, "bias": position_bias}
    if attention_mask is not None:
        attention_mask = attention_mask[..., :key.shape[2]]
    if indices is not None:  # DeepSeek-V3.2 and its relatives choose keys; only for eager and SDPA the mask says which
        options["mask"] = _chosen(indices, key.shape[2])
    if attention_mask is not None and attention_mask.is_floating_point():
        options["bias"] = attention_mask if position_bias is None else position_bias + attention_mask
    elif attention_mask is not None:
        options["mask"] = attention_mask if indices is None else attention_mask & options["mask"]
    elif query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        # Without a mask, queries begin where keys do: a static cache is longer than what it holds.
        options.update(causal=True, alignment="top_left")
    if s_aux is not None:
        options["sinks"] = s_aux.float()
    o = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **options)
    return o, None


def _derived(model: type) -> Iterator[type]:
    for each in model.__subclasses__():
        yield each
        yield from _derived(each)


@functools.lru_cache(maxsize=None)
def _what_layers_do(config: type) -> tuple[bool, bool]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, PreTrainedModel
    for parent in config.__mro__:  # one's own config may be derived from a model's
        models = [model for model in _derived(PreTrainedModel) if getattr(model, "config_class", None) is parent]
        if models:
            sdpa, backends = ([getattr(model, name, False) for model in models]
                              for name in ("_supports_sdpa", "_supports_attention_backend"))
            decodes = parent in MODEL_FOR_CAUSAL_LM_MAPPING and parent not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
            asks = all(map(any, zip(sdpa, backends)))
            return asks, all(sdpa) or (asks and decodes)
    return False, False


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _layers(config: type) -> tuple[bool, bool]:
    """Of models with this config: whether all their layers ask for a function of attention, which transformers allows
    SDPA or backends of others then; and whether they say by their `is_causal` what a missing mask means, as for SDPA and
    where all layers decode."""
    return _what_layers_do(config)


def _drops_queries(config: Any) -> bool:
    """Whether layers may attend with the last queries alone, as Gemma 4's with keys of other layers: a missing mask would
    then not say where they stand."""
    return any(getattr(each, "num_kv_shared_layers", 0) for each in (config, getattr(config, "text_config", None)))


def mask(*arguments: Any, config: Any = None, **options: Any) -> Optional[Tensor]:
    """transformers' mask for SDPA, bool, which is left out only where the layers say what it would; or eager's, for
    layers that ask for no function of attention."""
    from transformers.masking_utils import eager_mask, sdpa_mask
    ask, say_whether_causal = _layers(type(config))
    if not say_whether_causal:
        options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    elif _drops_queries(config):
        options.update(allow_is_causal_skip=False)
    return (sdpa_mask if ask else eager_mask)(*arguments, config=config, **options)  # type: ignore[no-any-return]


def register(name: str = "tessera") -> None:
    """Makes attn_implementation=name available to every model of transformers (5.0 or later)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask)
