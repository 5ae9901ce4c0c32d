# SPDX-License-Identifier: Apache-2.0
"""Attention by PyTorch's own operations, in any type, for the tests: padded input, differentiable in everything."""
import torch


def attention(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None, bias=None, mask=None, sinks=None,
              keep=None, dropout=0.0):
    """(O [B,Nq,Hq,Dv], LSE [B,Hq,Nq]); the diagonal ends in the bottom right corner; every row sees a key or a sink."""
    nq, hq, d = q.shape[1:]
    nk, hk = k.shape[1:3]
    k, v = (x.repeat_interleave(hq // hk, dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * d ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(nq, device=q.device)[:, None] + nk - nq
    j = torch.arange(nk, device=q.device)[None, :]
    if slopes is not None:
        s = s - slopes.to(s.dtype).reshape(-1, hq, 1, 1) * (i - j).abs()
    if bias is not None:
        s = s + bias
    seen = torch.ones(nq, nk, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen & (j <= i)
    if window[0] >= 0:
        seen = seen & (j >= i - window[0])
    if window[1] >= 0:
        seen = seen & (j <= i + window[1])
    if mask is not None:
        seen = seen & mask
    s = s.masked_fill(~seen, -torch.inf)
    rows = s
    if sinks is not None:
        rows = torch.cat([s, sinks.reshape(1, hq, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(rows, -1)
    p = torch.exp(s - lse[..., None])
    if keep is not None:
        p = p * keep / (1 - round(65536 * dropout) / 65536)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse
