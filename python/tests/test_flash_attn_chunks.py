# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's attention_chunk, and its flash_attn_with_kvcache: packed queries beside other new tokens, positions
of their own, batch indices into page tables, 8 bits. Against attention in float64, sequence by sequence."""
import random

import pytest

torch = pytest.importorskip("torch")

from conftest import assert_close  # noqa: E402
from test_kvcache import turned  # noqa: E402

from tessera.flash_attn_interface import (flash_attn_func, flash_attn_varlen_func,  # noqa: E402
                                          flash_attn_with_kvcache)


def exact(q, k, v, causal=False, window=(-1, -1), chunk=0, qv=None):
    """(O [Nq,Hq,Dv], LSE [Hq,Nq]) of one sequence; rows without keys are 0 and -inf."""
    nq, hq, d = q.shape
    nk, hk = k.shape[:2]
    k, v = (x.repeat_interleave(hq // hk, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k)
    if qv is not None:
        s, d = s + torch.einsum("ihd,jhd->hij", qv, v), d + v.shape[-1]
    i, j = torch.arange(nq)[:, None] + nk - nq, torch.arange(nk)
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(nq, nk, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0 or causal:
        seen &= j <= i + right
    if chunk:
        seen &= j // chunk == i // chunk  # both round down
    s = (s * d ** -0.5).masked_fill(~seen, -1e300)
    lse = s.logsumexp(-1).masked_fill(~seen.any(-1), -torch.inf) if nk else torch.full((hq, nq), -torch.inf).double()
    p = (s - lse.nan_to_num(neginf=0.0)[..., None]).exp() * seen
    return torch.einsum("hij,jhd->ihd", p, v), lse


@pytest.mark.parametrize("chunk", [1, 3, 8, 16, 1000])
@pytest.mark.parametrize("nq, nk", [(20, 20), (7, 29), (1, 17), (29, 7), (5, 0), (0, 6)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 2)}], ids=str)
def test_func(options, nq, nk, chunk):
    torch.manual_seed(chunk)
    tensors = [torch.randn(2, n, h, 16, requires_grad=True) for n, h in ((nq, 4), (nk, 2), (nk, 2))]
    o, lse = flash_attn_func(*tensors, attention_chunk=chunk, return_attn_probs=True, **options)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    causal, window = options.get("causal", False), options.get("window_size", (-1, -1))
    results = [exact(*(x[b] for x in wide), causal, window, chunk) for b in range(2)]
    exact_o, exact_lse = (torch.stack(parts) for parts in zip(*results))
    assert_close(o.detach(), exact_o.detach())
    assert_close(lse.detach(), exact_lse.detach())
    d_o = torch.randn_like(o)
    for x, y in zip(torch.autograd.grad(o, tensors, d_o), torch.autograd.grad(exact_o, wide, d_o.double())):
        assert_close(x, y, factor=2)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_varlen(chunk, used):
    torch.manual_seed(chunk)
    q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((30, 4), (44, 2), (44, 2)))
    cu_q, cu_k = torch.tensor([0, 7, 7, 12, 30]).int(), torch.tensor([0, 20, 25, 27, 44]).int()
    seqused = (torch.tensor([6, 0, 5, 11]).int(), torch.tensor([13, 5, 2, 17]).int()) if used else (None, None)
    o, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 18, 20, *seqused, causal=True, attention_chunk=chunk,
                                    return_attn_probs=True)
    expected, expected_lse = torch.zeros(30, 4, 16).double(), torch.full((4, 30), -torch.inf).double()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for b in range(4):
        nq, nk = (int((cu.diff() if n is None else n)[b]) for n, cu in zip(seqused, (cu_q, cu_k)))
        rows, keys = slice(int(cu_q[b]), int(cu_q[b]) + nq), slice(int(cu_k[b]), int(cu_k[b]) + nk)
        expected[rows], expected_lse[:, rows] = exact(wide[0][rows], wide[1][keys], wide[2][keys], True, chunk=chunk)
    assert_close(o.detach(), expected.detach())
    assert_close(lse.detach(), expected_lse.detach())
    d_o = torch.randn_like(o)
    for x, y in zip(torch.autograd.grad(o, (q, k, v), d_o), torch.autograd.grad(expected, wide, d_o.double())):
        assert_close(x, y, factor=2)


def test_chunks_with_scales_and_qv():
    torch.manual_seed(2)
    q, k, v, qv = (torch.randn(2, n, h, 16).bfloat16() for n, h in ((6, 4), (11, 2), (11, 2), (6, 4)))
    k_descale, v_descale = torch.rand(2, 2) + 0.5, torch.rand(2, 11, 2) + 0.5
    o = flash_attn_func(q, k, v, causal=True, qv=qv, k_descale=k_descale, v_descale=v_descale, attention_chunk=4)
    keys, values = k.double() * k_descale[:, None, :, None], v.double() * v_descale[..., None]
    for b in range(2):
        expected, _ = exact(q[b].double(), keys[b], values[b], True, chunk=4, qv=qv[b].double())
        assert_close(o[b].double(), expected, "bfloat16")


@pytest.mark.parametrize("changed, message", [
    ({"seqused_k": torch.tensor([21]).int()}, r"seqused_k: is \[21\]; must be from 0 to the lengths \[20\]"),
    ({"seqused_q": torch.tensor([-1]).int()}, r"seqused_q: is \[-1\]; must be from 0 to the lengths \[20\]"),
    ({"cu_seqlens_k": torch.tensor([0.0, 20.0])}, "cu_seqlens_k: has type f32"),
    ({"cu_seqlens_q": torch.tensor([3, 30]).int()}, "cu_seqlens_q"), ({"softcap": -1.0}, "softcap: is -1")])
def test_chunks_refuse_what_the_call_would(changed, message):
    x, cu = torch.randn(20, 2, 16), torch.tensor([0, 20]).int()
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(**{"q": x, "k": x, "v": x, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 20,
                                  "max_seqlen_k": 20, "attention_chunk": 4, **changed})


def test_chunks_compile():
    x = torch.randn(1, 12, 2, 16)
    call = lambda x: flash_attn_func(x, x, x, causal=True, attention_chunk=5)  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


GRID = {"dtype": ["float32", "bfloat16", "float8_e4m3fn"], "page": [None, 1, 8], "new": [True, True, False],
        "packed_q": [False, True], "packed_new": [False, True], "rotary": [0, 8, 16], "interleaved": [False, True],
        "own_positions": [False, True], "mask": ["none", "causal", "window"], "chunk": [0, 0, 3, 30],
        "batch_idx": [False, True], "leftpad": [False, True], "qv": [False, False, True]}
SAMPLE = 120
B, HQ, HK, D, DV, CAPACITY = 3, 4, 2, 16, 24, 40


def draw(seed):
    dice = random.Random(seed)
    return {name: dice.choice(values) for name, values in GRID.items()}


def padded_or_packed(rows, packed):
    """Of [n,H,D] for each sequence: packed with their offsets, or, all as long as the first, [B,n,H,D] and None."""
    if not packed:
        return torch.stack(rows), None
    lengths = torch.tensor([0] + [x.shape[0] for x in rows])
    return torch.cat(rows), lengths.cumsum(0).int()


@pytest.mark.parametrize("seed", range(SAMPLE))
def test_kvcache(seed):
    chosen = draw(seed)
    torch.manual_seed(seed)
    dtype = getattr(torch, chosen["dtype"])
    wide = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype

    def made(*shape):
        return torch.randn(shape).to(dtype)

    counts = [5, 1, 4] if chosen["packed_q"] else [4] * B
    new = [3, 0, 6] if chosen["packed_new"] else [2] * B
    if not chosen["new"]:
        new = [0] * B
    lengths = torch.randint(6, CAPACITY - 6, (B,)).int()
    leftpad = torch.randint(0, 6, (B,)).int() if chosen["leftpad"] else None
    q, qv = [made(n, HQ, D) for n in counts], [made(n, HQ, DV) for n in counts] if chosen["qv"] else None
    k, v = [made(n, HK, D) for n in new], [made(n, HK, DV) for n in new]
    index = torch.randperm(5)[:B].int() if chosen["batch_idx"] else None
    caches, page = B if index is None else 5, chosen["page"]
    which = range(B) if index is None else index.tolist()
    meant_k, meant_v = made(caches, CAPACITY, HK, D), made(caches, CAPACITY, HK, DV)
    table, pools = None, (meant_k.clone(), meant_v.clone())
    if page is not None:
        entries = CAPACITY // page
        table = torch.randperm(caches * entries).reshape(caches, entries).int()
        pools = [torch.empty(caches * entries, page, *x.shape[2:], dtype=dtype) for x in pools]
        for pool, x in zip(pools, (meant_k, meant_v)):
            pool[table.long()] = x.unflatten(1, (entries, page))
    rotary = chosen["rotary"] if chosen["new"] else 0
    angle = torch.rand(CAPACITY + 8, rotary // 2) * 6.28
    cos, sin = (x.to(dtype) if rotary else None for x in (angle.cos(), angle.sin()))
    first = lengths // 2 if chosen["own_positions"] else lengths
    causal, window = chosen["mask"] == "causal", (7, 3) if chosen["mask"] == "window" else (-1, -1)
    chunk = chosen["chunk"]

    given_q, cu_q = padded_or_packed(q, chosen["packed_q"])
    (given_k, cu_new), (given_v, _) = (padded_or_packed(x, chosen["packed_new"]) for x in (k, v))
    if not chosen["new"]:
        given_k = given_v = cu_new = None
    o, lse, *rest = flash_attn_with_kvcache(
        given_q, *pools, given_k, given_v, padded_or_packed(qv, chosen["packed_q"])[0] if qv else None, cos, sin, lengths,
        index, leftpad, table, cu_q, cu_new, max(counts) if chosen["packed_q"] else None,
        first if chosen["own_positions"] else None, causal=causal, window_size=window, attention_chunk=chunk,
        rotary_interleaved=chosen["interleaved"], scheduler_metadata=torch.empty(0), num_splits=3, pack_gqa=True,
        sm_margin=1, return_softmax_lse=True)
    assert len(rest) == 2 and not any(x.numel() for x in rest) and o.dtype == wide

    ordered = causal or chunk > 0 or window != (-1, -1)
    rows = o if chosen["packed_q"] else o.flatten(0, 1)
    row_lse = lse if chosen["packed_q"] else lse.transpose(0, 1).flatten(1)
    tolerance = "bfloat16" if dtype != torch.float32 else "float32"
    for b, begin in enumerate([sum(counts[:b]) for b in range(B)]):
        n, end, start = int(lengths[b]), int(lengths[b]) + new[b], int(first[b])
        keys, values = meant_k[which[b], :end].clone(), meant_v[which[b], :end].clone()
        keys[n:], values[n:] = k[b], v[b]
        exact_q = q[b].to(wide)
        if rotary:
            wide_cos, wide_sin = cos.to(wide), sin.to(wide)
            keys[n:] = turned(k[b].to(wide)[None], start + torch.arange(new[b])[None], wide_cos, wide_sin,
                              chosen["interleaved"])[0].float().to(dtype)
            places = start + torch.arange(counts[b])[None] * int(ordered)
            exact_q = turned(exact_q[None], places, wide_cos, wide_sin, chosen["interleaved"])[0].to(wide)
        stored = pools[0][which[b]] if page is None else pools[0][table[which[b]].long()].flatten(0, 1)
        assert_close(stored[:n].double(), keys[:n].double())
        assert_close(stored[n:end].double(), keys[n:].double(), tolerance if dtype == wide else "bfloat16", 3)
        pad = 0 if leftpad is None else int(leftpad[b])
        expected, expected_lse = exact(exact_q.double(), stored[pad:end].double(), values[pad:].double(), causal, window,
                                       chunk, None if qv is None else qv[b].double())
        assert_close(rows[begin:begin + counts[b]].double(), expected, tolerance, 2)
        assert_close(row_lse[:, begin:begin + counts[b]], expected_lse, tolerance, 2)


def test_the_sample_covers_the_grid():
    """Every value of every option occurs, and packed queries beside other new tokens with rotation."""
    drawn = [draw(seed) for seed in range(SAMPLE)]
    for name, values in GRID.items():
        assert {str(chosen[name]) for chosen in drawn} == {str(value) for value in values}, name
    assert sum(d["packed_q"] and d["packed_new"] and d["new"] and d["rotary"] > 0 for d in drawn) >= 10


def test_rows_of_a_page_table_are_not_counted_from_its_end():
    q, caches = torch.randn(2, 1, HQ, D), torch.randn(2, 6, 8, HK, D)
    table = torch.arange(6).view(3, 2).int()
    for entries in ([-1, 0], [0, 3]):
        with pytest.raises(ValueError, match=rf"cache_batch_idx: is \[{entries[0]}, {entries[1]}\]; must be from 0 to 2$"):
            flash_attn_with_kvcache(q, *caches, cache_seqlens=9, page_table=table, cache_batch_idx=torch.tensor(entries).int())


def test_windows_without_bounds_rotate_as_no_window_does():
    torch.manual_seed(4)
    q, new, caches = torch.randn(2, 3, HQ, D), torch.randn(2, 3, HK, D), torch.randn(2, 2, CAPACITY, HK, D)
    angle = torch.rand(CAPACITY, D // 2) * 6.28
    results = [flash_attn_with_kvcache(q, *caches.clone(), new, new, rotary_cos=angle.cos(), rotary_sin=angle.sin(),
                                       cache_seqlens=5, window_size=window)
               for window in ((-1, -1), [-1, -1], (None, None), (-1, None), None)]
    assert all(torch.equal(o, results[0]) for o in results)


def test_eight_bits_are_stored_as_they_are():
    """New tokens of 8 bits have been divided by their scales; others are divided here."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, h, 16).to(torch.float8_e4m3fn) for h in (4, 2, 2))
    scales = {name: torch.rand(2, 2) + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    caches = [torch.zeros(2, 8, 2, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    o = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0, **scales)
    for cache, x in zip(caches, (k, v)):
        assert torch.equal(cache[:, :2].float(), x.float())
    meant = [x.double() * scale.double().repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
             for x, scale in zip((q, k, v), scales.values())]
    for b in range(2):
        assert_close(o[b].double(), exact(*(x[b] for x in meant))[0], "bfloat16")
    numbers = [x.to(torch.bfloat16) for x in (k, v)]
    flash_attn_with_kvcache(q, *caches, *numbers, cache_seqlens=2, **scales)
    divided = (numbers[0].float() / scales["k_descale"][:, None, :, None]).to(torch.float8_e4m3fn)
    assert torch.equal(caches[0][:, 2:4].float(), divided.float())


def refusals():
    x = torch.randn(2, 3, 2, 16)
    cos, cu = torch.ones(40, 8), torch.tensor([0, 2, 3]).int()
    return {
        r"cu_seqlens_k_new: is given without k; there are no new tokens": {"k": None, "v": None, "cu_seqlens_k_new": cu},
        r"cu_seqlens_k_new: has shape \[2\]; must be \[3\], one more than q has sequences":
            {"k": x[0], "v": x[0], "cu_seqlens_k_new": cu[:2]},
        r"k: has shape \[2, 3, 2, 16\]; must be \[1, 2, 16\]: k's tokens, heads and dim of k_cache": {"cu_seqlens_k_new": cu},
        r"cu_seqlens_k_new: has type torch.float32; must be torch.int32":
            {"k": x[0], "v": x[0], "cu_seqlens_k_new": cu.float()},
        r"cu_seqlens_k_new: entry": {"k": x[0], "v": x[0], "cu_seqlens_k_new": cu * 2},
        r"q: has shape \[2, 3, 2, 16\] and k_cache .*; q must have 3 with cu_seqlens_q, k_cache 4": {"cu_seqlens_q": cu},
        r"v: is missing": {"v": None},
        r"v: is given without k": {"k": None},
        r"k_cache: has 2 sequences but q has 3; each needs a cache":
            {"q": x[0], "k": None, "v": None, "cu_seqlens_q": torch.arange(4).int()},
        r"cache_seqlens: has shape \[3\]; must be \[2\]":
            {"k": x[0], "v": x[0], "cu_seqlens_k_new": cu, "cache_seqlens": torch.ones(3).int()},
        r"cache_seqlens: places 18 to 20 are to be written but a sequence's cache has 20": {"cache_seqlens": 18},
        r"page_table: names pages 9 to 9 to be written": {"page_table": torch.full((2, 1), 9, dtype=torch.int32)},
        r"cache_leftpad: is \[9, 9\]; must be": {"cache_leftpad": torch.tensor([9, 9]).int()},
        r"rotary_seqlens: is 41 for token 0": {"rotary_cos": cos, "rotary_sin": cos,
                                               "rotary_seqlens": torch.tensor([41, 0]).int()},
        r"rotary_seqlens: is 40 for token 0": {"rotary_cos": cos[:8], "rotary_sin": cos[:8], "q": x[0], "cu_seqlens_q": cu,
                                            "causal": True, "rotary_seqlens": torch.tensor([40, 0]).int()},
        r"rotary_seqlens: has type torch.float32; must be torch.int32":
            {"rotary_cos": cos, "rotary_sin": cos, "rotary_seqlens": torch.tensor([1.5, 0.0])},
        r"rotary_seqlens: has shape \[3\]; must be \[2\], one for each":
            {"rotary_cos": cos, "rotary_sin": cos, "rotary_seqlens": cu},
        r"attention_chunk: is -3": {"attention_chunk": -3},
        **{f"{name}: is a list; must be a PyTorch tensor": {"rotary_cos": cos, "rotary_sin": cos, name: [0, 1]}
           for name in ("q", "k_cache", "k", "v", "rotary_cos", "rotary_seqlens", "cache_leftpad", "cu_seqlens_q",
                        "page_table")},
        "cu_seqlens_k_new: is a list": {"k": x[0], "v": x[0], "cu_seqlens_k_new": [0, 2, 3]},
        "cache_batch_idx: is a list": {"page_table": torch.zeros(2, 1).int(), "cache_batch_idx": [0, 1]},
        "page_table: is a list; must": {"page_table": [[0], [1]], "cache_batch_idx": torch.tensor([0, 1])}}


@pytest.mark.parametrize("message", refusals())
def test_refusals(message):
    torch.manual_seed(3)
    q, caches = torch.randn(2, 3, 2, 16), torch.randn(2, 2, 20, 2, 16)
    new = torch.randn(2, 3, 2, 16)
    before = caches.clone()
    arguments = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "k": new, "v": new, "cache_seqlens": 4}
    with pytest.raises((ValueError, TypeError), match=message):
        flash_attn_with_kvcache(**{**arguments, **refusals()[message]})
    assert torch.equal(caches, before)
