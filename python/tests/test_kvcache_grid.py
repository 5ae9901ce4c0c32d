# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache over the grid of its options: a sample, drawn with a seed, of their whole product, each call
against attention in float64 over what the cache means."""
import random

import pytest

torch = pytest.importorskip("torch")

import eager  # noqa: E402
from conftest import assert_close  # noqa: E402

from tessera.flash_attn import flash_attn_with_kvcache  # noqa: E402

GRID = {"dtype": ["float32", "float16", "bfloat16"], "heads": [(4, 4), (6, 2), (5, 1)], "dim": [16, 40, 64, 128],
        "queries_keys": [(1, 40), (1, 129), (3, 70), (16, 16), (9, 200), (33, 65)], "page": [None, None, 1, 16, 48, 256],
        "new": [None, "as queries", "fewer", "more"], "rotary": [0.0, 0.5, 1.0], "interleaved": [False, True],
        "mask": ["none", "causal", "window", "causal window"], "batch_idx": [False, True], "leftpad": [False, True],
        "alibi": [False, True], "softcap": [0.0, 0.0, 8.0], "lengths": ["tensor", "number"], "splits": [0, 1, 3]}
SAMPLE = 160


def draw(seed):
    dice = random.Random(seed)
    while True:
        chosen = {name: dice.choice(values) for name, values in GRID.items()}
        if chosen["page"] is not None and chosen["batch_idx"]:
            continue  # refused, by FlashAttention too
        if chosen["new"] is None and chosen["rotary"] > 0:
            continue
        if chosen["leftpad"] and chosen["lengths"] == "number":
            continue
        return chosen


def turned(x, places, cos, sin, interleaved):
    """In float64, pair by pair."""
    x = x.double().clone()
    half = cos.shape[1]
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        c, s = (t.double()[places, pair][..., None] for t in (cos, sin))
        x[..., a], x[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return x


@pytest.mark.parametrize("seed", range(SAMPLE))
def test_grid(seed):
    chosen = draw(seed)
    torch.manual_seed(seed)
    dtype, (hq, hk), dim = getattr(torch, chosen["dtype"]), chosen["heads"], chosen["dim"]
    queries, capacity = chosen["queries_keys"]
    batch, caches, page = 3, 5, chosen["page"]
    new = {None: 0, "as queries": queries, "fewer": max(1, queries // 2), "more": queries + 3}[chosen["new"]]
    capacity += new

    # What each sequence's cache means, and the cache.
    meant_k, meant_v = torch.randn(2, batch, capacity, hk, dim).to(dtype)
    index = torch.randperm(caches)[:batch].int() if chosen["batch_idx"] else None
    if page is None:
        rows = torch.arange(batch) if index is None else index.long()
        k_cache, v_cache = (torch.full((batch if index is None else caches, capacity, hk, dim), torch.nan, dtype=dtype)
                            for _ in range(2))
        k_cache[rows], v_cache[rows] = meant_k, meant_v
        table = None
    else:
        entries = -(-capacity // page)
        table = torch.randperm(batch * entries + 2)[:batch * entries].reshape(batch, entries).int()
        k_cache, v_cache = (torch.full((batch * entries + 2, page, hk, dim), torch.nan, dtype=dtype) for _ in range(2))
        for cache, meant in ((k_cache, meant_k), (v_cache, meant_v)):
            padded = torch.nn.functional.pad(meant, (0, 0, 0, 0, 0, entries * page - capacity), value=torch.nan)
            cache[table.long()] = padded.unflatten(1, (entries, page))
    most = capacity - new
    lengths = torch.randint(min(queries, most), most + 1, (batch,)).int()  # every row sees a key
    if chosen["lengths"] == "number":
        lengths[:] = lengths[0]
    leftpad = (torch.rand(batch) * (lengths + new - queries + 1).clamp(min=1)).int() if chosen["leftpad"] else None

    q = torch.randn(batch, queries, hq, dim).to(dtype)
    k, v = torch.randn(2, batch, new, hk, dim).to(dtype) if new else (None, None)
    rotated = int(chosen["rotary"] * dim) // 16 * 16
    cos = sin = None
    if rotated:
        angle = torch.rand(capacity + queries, rotated // 2) * 6.28
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    causal, local = "causal" in chosen["mask"], "window" in chosen["mask"]
    window = (capacity // 3, 0 if causal else capacity // 4) if local else (-1, -1)
    slopes = torch.rand(batch, hq) * 0.3 if chosen["alibi"] else None

    o, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, int(lengths[0]) if chosen["lengths"] == "number" else lengths, index, leftpad,
        table, causal=causal, window_size=window, softcap=chosen["softcap"], rotary_interleaved=chosen["interleaved"],
        alibi_slopes=slopes, num_splits=chosen["splits"], return_softmax_lse=True)

    exact_q = q.double()
    if rotated:
        places = lengths.long()[:, None] + torch.arange(queries) * int(causal or local)
        exact_q = turned(q, places, cos, sin, chosen["interleaved"]).to(dtype).double()
    for b in range(batch):
        n, pad = int(lengths[b]), 0 if leftpad is None else int(leftpad[b])
        keys, values = meant_k[b, :n + new].double(), meant_v[b, :n + new].double()
        if new:
            keys[n:], values[n:] = k[b].double(), v[b].double()
            if rotated:
                places = torch.arange(n, n + new)
                keys[n:] = turned(k[b:b + 1], places[None], cos, sin, chosen["interleaved"])[0].to(dtype).double()
        stored = k_cache[b if index is None else int(index[b])] if page is None else k_cache[table[b].long()].flatten(0, 1)
        assert_close(stored[:n + new].double(), keys, chosen["dtype"])
        expected, expected_lse = eager.attention(exact_q[b:b + 1], keys[None, pad:], values[None, pad:], causal=causal,
                                                 window=window, softcap=chosen["softcap"],
                                                 slopes=None if slopes is None else slopes[b:b + 1])
        assert_close(o[b:b + 1].double(), expected, chosen["dtype"], 2)
        assert torch.allclose(lse[b:b + 1].double(), expected_lse, atol=2e-5 if chosen["dtype"] == "float32" else 2e-2)


def test_the_sample_covers_the_grid():
    """Every value of every option occurs."""
    drawn = [draw(seed) for seed in range(SAMPLE)]
    for name, values in GRID.items():
        assert {str(chosen[name]) for chosen in drawn} == {str(value) for value in values}, name
