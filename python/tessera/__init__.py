# SPDX-License-Identifier: Apache-2.0
"""Tessera: exact attention, forward and backward, for NumPy, PyTorch, JAX and every array that speaks DLPack.

    import tessera
    o = tessera.attention(q, k, v, causal=True)           # q [B,Nq,Hq,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv]

tessera.torch and tessera.jax are differentiable, tessera.flash_attn has FlashAttention's functions, and
tessera.transformers registers an attention implementation with Hugging Face transformers. See docs/python.md.
"""
from ._abi import version as _version
from ._api import (BEYOND_BOUNDS, PAGE_OUTSIDE_POOL, Gradients, Plan, attention, backward, dropout_mask, forward, info,
                   merge, plan)
from ._append import append
from ._options import AttentionOptions

__version__ = _version()
__all__ = ["BEYOND_BOUNDS", "PAGE_OUTSIDE_POOL", "AttentionOptions", "Gradients", "Plan", "append", "attention",
           "backward", "dropout_mask", "forward", "info", "merge", "plan"]
