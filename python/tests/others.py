# SPDX-License-Identifier: Apache-2.0
"""Functions of flash-attn and xformers as far as docs/coming_from.md names them, by PyTorch's operations in float64, from
their documentation: neither runs without a GPU. Used by test_coming_from.py."""
import eager
import torch


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                    return_attn_probs=False):
    q, k, v = (x.double() for x in (q, k, v))
    if softmax_scale is not None:
        q = q * softmax_scale * q.shape[-1] ** 0.5
    o, lse = eager.attention(q, k, v, causal=causal, window=window_size, softcap=softcap, slopes=alibi_slopes)
    return (o, lse, None) if return_attn_probs else o


def flash_attn_qkvpacked_func(qkv, **options):
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], **options)


def flash_attn_kvpacked_func(q, kv, **options):
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **options)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    sequences = []
    for n in range(len(cu_seqlens_q) - 1):
        rows_q, rows_k = (slice(int(ends[n]), int(ends[n + 1])) for ends in (cu_seqlens_q, cu_seqlens_k))
        sequences.append(flash_attn_func(q[None, rows_q], k[None, rows_k], v[None, rows_k], **options)[0])
    return torch.cat(sequences)


def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens):
    used = [int(n) for n in cache_seqlens]
    return torch.cat([flash_attn_func(q[n:n + 1], k_cache[n:n + 1, :m], v_cache[n:n + 1, :m]) for n, m in enumerate(used)])


class _Mask:
    """What xformers takes for attn_bias in place of a tensor: visible(queries, keys) -> bool [queries, keys]."""

    def __init__(self, visible):
        self.visible = visible


def _places(nq, nk):
    return torch.arange(nq)[:, None], torch.arange(nk)[None, :]


def _top_left(nq, nk):
    i, j = _places(nq, nk)
    return j <= i


def LowerTriangularMask():  # noqa: N802
    return _Mask(_top_left)


def LowerTriangularFromBottomRightMask():  # noqa: N802
    return LocalAttentionFromBottomRightMask(10**9, 0)


def LocalAttentionFromBottomRightMask(window_left, window_right):  # noqa: N802
    def visible(nq, nk):
        i, j = _places(nq, nk)
        i = i + nk - nq
        return (j >= i - window_left) & (j <= i + window_right)
    return _Mask(visible)


class BlockDiagonalMask(_Mask):
    @classmethod
    def from_seqlens(cls, lengths):
        return cls(lambda nq, nk: torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool())


def memory_efficient_attention(q, k, v, attn_bias=None, p=0.0, scale=None):
    q, k, v = (x.double() for x in (q, k, v))
    if scale is not None:
        q = q * scale * q.shape[-1] ** 0.5
    if isinstance(attn_bias, _Mask):
        return eager.attention(q, k, v, mask=attn_bias.visible(q.shape[1], k.shape[1]))[0]
    return eager.attention(q, k, v, bias=None if attn_bias is None else attn_bias.double())[0]
