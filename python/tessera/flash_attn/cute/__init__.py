# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4's functions, with its arguments and meanings, by Tessera: put `tessera.` before its module's name."""
from .interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
