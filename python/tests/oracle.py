# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 by NumPy, straight from docs/algorithm.md, for the tests: padded input, every option but
dropout's bits, which tessera.dropout_mask tells. Shares nothing with the package."""
import numpy as np


def visible(nq, nk, causal, window, off):
    i, j = np.arange(nq)[:, None] + off, np.arange(nk)[None, :]
    left, right = window
    seen = np.ones((nq, nk), bool)
    if causal:
        seen &= j <= i
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def attention(q, k, v, *, causal=False, off=None, window=(-1, -1), scale=None, softcap=0.0, slopes=None, bias=None,
              mask=None, sinks=None, keep=None, dropout=0.0):
    """(O [B,Nq,Hq,Dv], LSE [B,Hq,Nq])."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (nq, hq, d), (nk, hk) = q.shape[1:], k.shape[1:3]
    k, v = (np.repeat(x, hq // hk, axis=2) for x in (k, v))
    off = nk - nq if off is None else off
    s = np.einsum("bihd,bjhd->bhij", q, k) * (d ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    if slopes is not None:
        distance = np.abs(np.arange(nq)[:, None] + off - np.arange(nk)[None, :])
        s = s - np.asarray(slopes, np.float64).reshape(-1, hq, 1, 1) * distance
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    seen = visible(nq, nk, causal, window, off)
    if mask is not None:
        seen = seen & (np.asarray(mask) != 0)
    s = np.where(seen, s, -np.inf)
    rows = s if sinks is None else np.concatenate(
        [s, np.broadcast_to(np.asarray(sinks, np.float64).reshape(1, hq, 1, 1), (*s.shape[:3], 1))], -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.max(rows, -1, keepdims=True, initial=-np.inf)
        lse = np.where(np.isneginf(top), -np.inf, np.log(np.sum(np.exp(rows - top), -1, keepdims=True)) + top)
        p = np.where(np.isneginf(lse), 0, np.exp(s - lse))
    if keep is not None:
        dropped = round(65536 * dropout) / 65536
        p = p * keep / (1 - dropped)
    return np.einsum("bhij,bjhd->bihd", p, v), lse[..., 0]
