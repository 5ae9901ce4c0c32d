# SPDX-License-Identifier: Apache-2.0
"""flash_attn.bert_padding's functions: from padded batches to packed tokens, and back. Differentiable, on any device.

PyTorch's own operations, with the names, arguments and results that callers of FlashAttention know.
"""
from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x [n,...] by their numbers, int64 [m]: [m,...]. A row may be asked for once only."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The other way: values [m,...] as rows of zeros [first_axis_dim,...]."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """index_first_axis, and x itself."""
    return index_first_axis(x, indices), x


def _packed(hidden_states: Tensor, present: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Tokens where `present`, bool [B,N], and cu_seqlens, int32, of `lengths`."""
    indices = present.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Optional[Tensor] = None
                ) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """hidden_states [B,N,...] and attention_mask [B,N], non-zero where there is a token.

    -> tokens [T,...], their numbers in [B*N] (int64), cu_seqlens (int32 [B+1]), the longest sequence's length, and how
    many tokens of each sequence attention_mask counts (int32 [B]). With unused_mask, [B,N] too, tokens of either mask are
    kept, room for later ones, and cu_seqlens counts both.
    """
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    lengths = kept.sum(-1, dtype=torch.int32)
    return *_packed(hidden_states, kept, lengths), used.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor
                                           ) -> tuple[Tensor, Tensor, Tensor, int]:
    """Rows of several sequences each: attention_mask_in_length [B,N] holds their lengths, then zeros.

    -> tokens [T,...], their numbers in [B*N] (int64), cu_seqlens (int32) of all sequences, the longest one's length.
    """
    tokens = attention_mask_in_length.sum(-1)
    places = torch.arange(attention_mask_in_length.shape[1], device=tokens.device)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _packed(hidden_states, places < tokens[:, None], lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Tokens [T,...] at their numbers: [batch,seqlen,...], zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
