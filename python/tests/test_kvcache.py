# SPDX-License-Identifier: Apache-2.0
"""tessera.flash_attn's functions for caches against calls on what the caches mean: pages, appending, rotary embedding."""
import unittest.mock

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import eager  # noqa: E402
from conftest import assert_close  # noqa: E402

from tessera import _call, _kvcache  # noqa: E402
from tessera.flash_attn import (flash_attn_func, flash_attn_varlen_func, flash_attn_varlen_kvpacked_func,  # noqa: E402
                                flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache)

B, HQ, HK, D, P, CAPACITY = 3, 4, 2, 32, 8, 48
NEW = 3
LENGTHS = torch.tensor([0, 13, 40], dtype=torch.int32)


def make_cache(paged, seed=3):
    """k_cache, v_cache, block_table or None, and a function that shows a cache as [B,CAPACITY,Hk,D]."""
    torch.manual_seed(seed)
    if not paged:
        caches = torch.randn(2, B, CAPACITY, HK, D)
        return *caches, None, lambda cache: cache
    pages = B * CAPACITY // P + 2
    caches = torch.randn(2, pages, P, HK, D)
    table = torch.randperm(pages)[:B * CAPACITY // P].reshape(B, -1).int()
    return *caches, table, lambda cache: cache[table.long()].flatten(1, 2)


def exact(q, k, v, lengths, **options):
    """Row by row, in float64; k and v [B,CAPACITY,Hk,D] after appending."""
    return torch.cat([eager.attention(q[b:b + 1].double(), k[b:b + 1, :n].double(), v[b:b + 1, :n].double(),
                                      **options)[0] for b, n in enumerate(lengths.tolist())])


def turned(x, positions, cos, sin, interleaved):
    """Rotary embedding as complex numbers. x [B,n,H,D], positions [B,n]."""
    half = cos.shape[1]
    part = x[..., :2 * half].double()
    z = torch.view_as_complex(part.unflatten(-1, (half, 2)).contiguous()) if interleaved else torch.complex(
        part[..., :half], part[..., half:])
    z = z * torch.complex(cos.double(), sin.double())[positions][:, :, None]
    part = torch.view_as_real(z).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((part, x[..., 2 * half:].double()), -1)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_appends_and_attends(paged, causal):
    k_cache, v_cache, table, shown = make_cache(paged)
    q, k, v = torch.randn(B, NEW, HQ, D), torch.randn(B, NEW, HK, D), torch.randn(B, NEW, HK, D)
    before_k, before_v = shown(k_cache).clone(), shown(v_cache).clone()
    o, lse = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS, block_table=table, causal=causal,
                                     return_softmax_lse=True)
    for b, n in enumerate(LENGTHS.tolist()):
        before_k[b, n:n + NEW], before_v[b, n:n + NEW] = k[b], v[b]
    assert torch.equal(shown(k_cache), before_k) and torch.equal(shown(v_cache), before_v)
    assert lse.shape == (B, HQ, NEW)
    assert_close(o, exact(q, before_k, before_v, LENGTHS + NEW, causal=causal))


def test_pages_give_the_bits_of_one_piece():
    k_cache, v_cache, table, shown = make_cache(True)
    q = torch.randn(B, 1, HQ, D)
    options = {"cache_seqlens": LENGTHS, "causal": True, "window_size": (30, 0), "softcap": 3.0}
    one_piece = flash_attn_with_kvcache(q, shown(k_cache), shown(v_cache), **options)
    assert torch.equal(one_piece, flash_attn_with_kvcache(q, k_cache, v_cache, block_table=table, **options))


def test_batch_indices_and_left_padding():
    k_cache, v_cache, _, _ = make_cache(False)
    q, which = torch.randn(2, 2, HQ, D), torch.tensor([2, 0], dtype=torch.int32)
    lengths, leftpad = torch.tensor([30, 20], dtype=torch.int32), torch.tensor([4, 0], dtype=torch.int32)
    for padding in (None, leftpad):
        o = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=which,
                                    cache_leftpad=padding, causal=True)
        for n, (row, length) in enumerate(zip(which.tolist(), lengths.tolist())):
            begin = 0 if padding is None else int(padding[n])
            alone = flash_attn_func(q[n:n + 1], k_cache[row:row + 1, begin:length], v_cache[row:row + 1, begin:length],
                                    causal=True)
            assert torch.equal(o[n], alone[0])
    o = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, cache_leftpad=leftpad)
    assert torch.equal(o[1], flash_attn_func(q[1:], k_cache[1:2, :20], v_cache[1:2, :20])[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 32])
def test_rotary(interleaved, causal, rotary_dim):
    k_cache, v_cache, table, shown = make_cache(True)
    q, k, v = torch.randn(B, NEW, HQ, D), torch.randn(B, NEW, HK, D), torch.randn(B, NEW, HK, D)
    angle = torch.rand(CAPACITY, rotary_dim // 2) * 6.28
    cos, sin = angle.cos(), angle.sin()
    places = LENGTHS.long()[:, None] + torch.arange(NEW)
    o = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, LENGTHS, block_table=table, causal=causal,
                                rotary_interleaved=interleaved)
    q_places = places if causal else LENGTHS.long()[:, None].expand(B, NEW)
    exact_q, exact_k = turned(q, q_places, cos, sin, interleaved), turned(k, places, cos, sin, interleaved)
    keys, values = shown(k_cache).double(), shown(v_cache)
    for b, n in enumerate(LENGTHS.tolist()):
        assert_close(keys[b, n:n + NEW], exact_k[b])
        keys[b, n:n + NEW] = exact_k[b]
    assert_close(o, exact(exact_q, keys, values, LENGTHS + NEW, causal=causal))


def test_a_number_is_every_length():
    k_cache, v_cache, _, _ = make_cache(False)
    q = torch.randn(B, 1, HQ, D)
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=20),
                       flash_attn_func(q, k_cache[:, :20], v_cache[:, :20]))
    assert torch.equal(flash_attn_with_kvcache(q, k_cache, v_cache), flash_attn_func(q, k_cache, v_cache))


def test_varlen_with_pages():
    k_cache, v_cache, table, shown = make_cache(True)
    cu_q, cu_k = (torch.tensor([0, *n], dtype=torch.int32).cumsum(0).int() for n in ([1, 7, 20], [5, 13, 40]))
    q = torch.randn(28, HQ, D)
    o, lse, _ = flash_attn_varlen_func(q, k_cache, v_cache, cu_q, cu_k, 20, 40, causal=True, return_attn_probs=True,
                                       block_table=table)
    k, v = (torch.cat([shown(cache)[b, :n] for b, n in enumerate([5, 13, 40])]) for cache in (k_cache, v_cache))
    packed_o, packed_lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 20, 40, causal=True, return_attn_probs=True)
    assert torch.equal(o, packed_o) and torch.equal(lse, packed_lse)


def test_packed_varlen_functions_are_views():
    torch.manual_seed(5)
    qkv = torch.randn(30, 3, HK, D, requires_grad=True)
    cu = torch.tensor([0, 11, 30], dtype=torch.int32)
    q, k, v = qkv.unbind(1)
    o = flash_attn_varlen_func(q, k, v, cu, cu, 19, 19, causal=True)
    assert torch.equal(o, flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 19, 19, causal=True))
    packed, lse, _ = flash_attn_varlen_qkvpacked_func(qkv, cu, 19, causal=True, return_attn_probs=True)
    assert torch.equal(o, packed) and lse.shape == (HK, 30)
    packed.sum().backward()
    assert qkv.grad.abs().sum() > 0


def refused_calls():
    """Arguments of flash_attn_with_kvcache that replace those of a call that appends, and what each is refused with.

    Whatever it is that refuses: the function itself, its plan, or the numbers of lengths and tables.
    """
    k, cos = torch.randn(B, NEW, HK, D), torch.ones(CAPACITY + NEW, D // 2)
    odd = torch.zeros(4 * B * NEW * HQ * D + 1, dtype=torch.uint8)
    with torch.inference_mode():
        of_inference = torch.zeros(B * CAPACITY // P + 2, P, HK, D)
    rotary = {"rotary_cos": cos, "rotary_sin": cos}
    return {
        "q of no real type": ({"q": torch.ones(B, NEW, HQ, D, dtype=torch.int16)}, TypeError, "q: has type torch.int16"),
        "q's dim": ({"q": torch.randn(B, NEW, HQ, D + 8)}, ValueError, "head_dim"),
        "q's heads": ({"q": torch.randn(B, NEW, HK + 1, D)}, ValueError, "heads"),
        "q's batch": ({"q": torch.randn(B + 1, NEW, HQ, D)}, ValueError, "k: has shape"),
        "q elsewhere": ({"q": torch.randn(B, NEW, HQ, D, device="meta")}, TypeError, "q: is on meta"),
        "q out of line": ({"q": torch.frombuffer(odd.numpy(), dtype=torch.float32, offset=1,
                                                 count=B * NEW * HQ * D).view(B, NEW, HQ, D)}, ValueError, "q: data"),
        "k's tokens": ({"v": k[:, :1]}, ValueError, "v: has shape"),
        "k's heads": ({"k": k[:, :, :1]}, ValueError, "k: has shape"),
        "k's batch": ({"k": k[:1]}, ValueError, "k: has shape"),
        "k's dimensions": ({"k": k[0, 0, 0]}, ValueError, "k: has shape"),
        "k of no real type": ({"k": k.to(torch.complex64)}, ValueError, "k: is torch.complex64"),
        "v elsewhere": ({"v": k.to("meta")}, ValueError, "v: is torch.float32 on meta"),
        "v of NumPy": ({"v": k.numpy()}, TypeError, "v: is a ndarray; must be a PyTorch tensor"),
        "v_cache of another type": ({"v_cache": torch.zeros(B * CAPACITY // P + 2, P, HK, D).short()}, ValueError,
                                    "v: is torch.float32 on cpu but v_cache is torch.int16"),
        "v_cache with fewer pages": ({"v_cache": torch.zeros(3, P, HK, D)}, ValueError, "v_cache: has 3 pages"),
        "v_cache in one place": ({"v_cache": torch.zeros(1, P, HK, D).expand(B * CAPACITY // P + 2, P, HK, D)},
                                 ValueError, "v_cache: has strides"),
        "v_cache of inference mode": ({"v_cache": of_inference}, ValueError, "v_cache: is a tensor of inference mode"),
        "lengths of another type": ({"cache_seqlens": LENGTHS.float()}, ValueError, "cache_seqlens: has type f32"),
        "lengths of another batch": ({"cache_seqlens": LENGTHS[:2]}, ValueError, "cache_seqlens: has shape"),
        "lengths elsewhere": ({"cache_seqlens": LENGTHS.to("meta")}, TypeError, "cache_seqlens: is on meta"),
        "lengths below 0": ({"cache_seqlens": LENGTHS - 1}, ValueError, "cache_seqlens: places -1 to"),
        "a length of halves": ({"cache_seqlens": 2.5}, TypeError, "cache_seqlens: is 2.5; must be a whole"),
        "a length of text": ({"cache_seqlens": "3"}, TypeError, "cache_seqlens: is '3'; must be a whole"),
        "one length below 0": ({"cache_seqlens": -1}, ValueError, "cache_seqlens: is -1; must be from 0"),
        "one length beyond 32 bits": ({"cache_seqlens": 2**40}, ValueError, "cache_seqlens: is 1099511627776; must be"),
        "lengths beyond the cache": ({"cache_seqlens": LENGTHS + 8}, ValueError, "cache_seqlens: places 8 to 50"),
        "padding beyond the lengths": ({"cache_leftpad": LENGTHS + NEW + 1}, ValueError, "cache_leftpad: is"),
        "padding below 0": ({"cache_leftpad": LENGTHS - 1}, ValueError, "cache_leftpad: is"),
        "padding of another type": ({"cache_leftpad": LENGTHS.float()}, ValueError, "cache_leftpad: has type f32"),
        "a table of another type": ({"block_table": torch.zeros(B, CAPACITY // P)}, ValueError,
                                    "block_table: has type f32"),
        "a table of another batch": ({"block_table": torch.zeros(B + 1, CAPACITY // P).int()}, ValueError,
                                     "block_table: has shape"),
        "a table of other pages": ({"block_table": torch.full((B, CAPACITY // P), 99, dtype=torch.int32)}, ValueError,
                                   "block_table: names pages 99"),
        "a scale": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: is nan"),
        "a softcap": ({"softcap": -1.0}, ValueError, "softcap"),
        "a softcap of text": ({"softcap": "1"}, TypeError, "softcap"),
        "a window": ({"window_size": (-2, 0)}, ValueError, "window_size's left: is -2"),
        "a window of three": ({"window_size": (1, 2, 3)}, TypeError, "window_size: is"),
        "slopes": ({"alibi_slopes": torch.ones(HQ + 1)}, ValueError, "alibi_slopes: has shape"),
        "slopes of NumPy": ({"alibi_slopes": torch.ones(HQ).numpy()}, TypeError, "alibi_slopes: is a ndarray"),
        "rotary and a softcap": ({**rotary, "softcap": -1.0}, ValueError, "softcap"),
        "rotary and padding": ({**rotary, "cache_leftpad": LENGTHS - 1}, ValueError, "cache_leftpad: is"),
        "rotary of few positions": ({"rotary_cos": cos[:9], "rotary_sin": cos[:9]}, ValueError, "rotary_cos: has 9"),
        "rotary and v's tokens": ({**rotary, "v": k[:, :1]}, ValueError, "v: has shape"),
    }


@pytest.mark.parametrize("name", refused_calls())
def test_a_refused_call_leaves_the_caches_as_they_were(name):
    changed, error, message = refused_calls()[name]
    k_cache, v_cache, table, _ = make_cache(True)
    new = torch.randn(B, NEW, HK, D)
    arguments = {"q": torch.randn(B, NEW, HQ, D), "k_cache": k_cache, "v_cache": v_cache, "k": new, "v": new,
                 "cache_seqlens": LENGTHS, "block_table": table, "causal": True, **changed}
    caches = arguments["k_cache"], arguments["v_cache"]
    before = [cache.clone() for cache in caches]
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**arguments)
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before))


def test_more_caches_than_sequences():
    """The first ones are theirs, where nothing says which."""
    k_cache, v_cache, _, _ = make_cache(False)
    q, k = torch.randn(B - 1, 1, HQ, D), torch.randn(B - 1, 1, HK, D)
    copies = k_cache[:-1].clone(), v_cache[:-1].clone()
    last = k_cache[-1].clone()
    for new in (None, k):
        o = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=4)
        assert torch.equal(o, flash_attn_with_kvcache(q, *copies, new, new, cache_seqlens=4))
    assert torch.equal(k_cache[:-1], copies[0]) and torch.equal(v_cache[:-1], copies[1]) and torch.equal(k_cache[-1], last)
    codes, scales = torch.zeros(2, B, CAPACITY, HK, D, dtype=torch.int8), torch.zeros(2, B, CAPACITY, HK)  # computed
    o = flash_attn_with_kvcache(q, *codes, k, k, cache_seqlens=0, k_descale=scales[0], v_descale=scales[1])
    assert_close(o, k.repeat_interleave(HQ // HK, 2), "bfloat16")
    assert scales[:, :-1, 0].all() and scales.count_nonzero() == 2 * (B - 1) * HK and not codes[:, -1].any()
    with pytest.raises(ValueError, match="k_cache: batch is 1 but q has 2; q, k_cache and v_cache must agree in batch"):
        flash_attn_with_kvcache(q, k_cache[:1], v_cache[:1], cache_seqlens=4)


def test_names_of_batch_indices_and_of_calls_that_append_nothing():
    k_cache, v_cache, _, _ = make_cache(False)
    q, k = torch.randn(2, 1, HQ, D), torch.randn(2, 1, HK, D)
    with pytest.raises(ValueError, match="cache_batch_idx: tokens 0 and 1 both go to one row of the cache"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=4, cache_batch_idx=torch.tensor([1, 1]).int())
    for entries in ([0, 3], [-1, 0]):  # whose keys would be zeros
        index, lengths = torch.tensor(entries).int(), torch.tensor([4, 4]).int()
        for new in (None, k):
            with pytest.raises(ValueError, match=rf"cache_batch_idx: is \[{entries[0]}, {entries[1]}\]; must be from 0 to 2$"):
                flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lengths, cache_batch_idx=index)
        lengths[index.clamp(0, 2) != index] = 0  # without keys there is nothing to be read
        o = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=index)
        assert not o[lengths == 0].any() and o[lengths > 0].any()
    with pytest.raises(TypeError, match="cache_batch_idx: is a list; must be a PyTorch tensor"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=4, cache_batch_idx=[0, 1])
    with pytest.raises(ValueError, match="cache_seqlens: entry 0 is 49"):
        flash_attn_with_kvcache(q, k_cache[:2], v_cache[:2], cache_seqlens=CAPACITY + 1)


class Operators(TorchDispatchMode):
    """Keeps the names of the operators that are called, and the devices of their tensors."""

    def __init__(self):
        super().__init__()
        self.called = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        self.called.setdefault(str(function), set()).update(x.device.type for x in tensors)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_on_a_gpu_the_library_appends(paged, rotates, scaled):
    """Tensors of a GPU that is not there: one operator of the library's writes the caches, and nothing is read back."""
    with FakeTensorMode():
        k_cache, v_cache, table, _ = make_cache(paged)
        k_cache, v_cache = (torch.empty(cache.shape, dtype=torch.bfloat16, device="cuda") for cache in (k_cache, v_cache))
        table = None if table is None else torch.empty(table.shape, dtype=torch.int32, device="cuda")
        lengths = torch.empty(B, dtype=torch.int32, device="cuda")
        q, k, v = (torch.empty(B, NEW, heads, D, device="cuda", dtype=torch.bfloat16) for heads in (HQ, HK, HK))
        rotary = _kvcache.Rotary(*torch.empty(2, CAPACITY, 8, device="cuda"), False) if rotates else None
        scales = {"k_scale": torch.empty(HK, device="cuda"), "v_scale": torch.empty(HK, device="cuda")} if scaled else {}
        leftpad = torch.zeros(B, dtype=torch.int32, device="cuda") if paged else None
        with Operators() as seen:
            cache = _kvcache.Cache(k_cache, v_cache, lengths, None, leftpad, table)
            turned_q = _kvcache.append(q, cache, _kvcache.New(k, v), lengths, lengths + NEW, table, rotary, False, **scales)
        assert turned_q.is_cuda and (turned_q is not q) == rotates
    assert seen.called["tessera.append.default"] == {"cuda"}
    writing = {"aten.index_put_.default", "aten.copy_.default", "aten.index_put.default", "aten.scatter_.src"}
    reading = {"aten._local_scalar_dense.default", "aten.min.default", "aten.max.default"}
    assert not set(seen.called) & (writing | reading)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("form", ["heads", "sequences", "rows"])
@pytest.mark.parametrize("paged", [False, True])
def test_eight_bits(dtype, form, paged):
    """Near what a cache of 32 bits gives, and for the numbers that are stored exactly that."""
    k_cache, v_cache, table, shown = make_cache(paged)
    q, k, v = torch.randn(B, NEW, HQ, D), torch.randn(B, NEW, HK, D), torch.randn(B, NEW, HK, D)
    largest = 448.0 if dtype == torch.float8_e4m3fn else 127.0
    shape = {"heads": (HK,), "sequences": (B, HK), "rows": k_cache.shape[:3]}[form]
    scales = [torch.full(shape, 5 / largest) for _ in range(2)]

    def stored(cache):
        codes = cache / (5 / largest)
        return codes.to(dtype) if dtype.is_floating_point else codes.round().clamp(-128, 127).to(dtype)

    caches = [stored(cache) for cache in (k_cache, v_cache)]
    o = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=LENGTHS, block_table=table, causal=True,
                                k_descale=scales[0], v_descale=scales[1])
    meant = []
    for codes, scale in zip(caches, scales):
        factor = shown(scale[..., None]) if form == "rows" else scale.reshape(-1, 1, HK, 1)
        meant.append(shown(codes.float()) * factor)
    for new, whole in ((k, meant[0]), (v, meant[1])):
        for b, n in enumerate(LENGTHS.tolist()):
            assert (whole[b, n:n + NEW] - new[b]).norm() < 0.05 * new[b].norm()
    assert_close(o, exact(q, meant[0], meant[1], LENGTHS + NEW, causal=True), factor=4)
    changed = (scales[0] != 5 / largest).sum()
    assert changed == (B * NEW * HK if form == "rows" else 0)


def test_an_appending_call_plans_once():
    """What checks the call leaves its plan to the call."""
    k_cache, v_cache, table, _ = make_cache(True)
    q, new = torch.randn(B, NEW, HQ, D), torch.randn(B, NEW, HK, D)
    with unittest.mock.patch.object(_call, "plan", wraps=_call.plan) as plan:
        flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=LENGTHS, block_table=table, softcap=7.25)
    assert plan.call_count == 1


@pytest.mark.parametrize("paged", [False, True])
def test_compiles_without_a_break(paged):
    k_cache, v_cache, table, _ = make_cache(paged)
    caches = k_cache.clone(), v_cache.clone()
    q, new = torch.randn(B, NEW, HQ, D), torch.randn(B, NEW, HK, D)
    cos, sin = torch.rand(2, CAPACITY, 8)

    def step(q, k_cache, v_cache):
        return flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cos, sin, LENGTHS, block_table=table, causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k_cache, v_cache)
    assert torch.equal(compiled, step(q, *caches)) and torch.equal(k_cache, caches[0])


def test_refusals():
    k_cache, v_cache, table, _ = make_cache(True)
    q, k = torch.randn(B, 1, HQ, D), torch.randn(B, 1, HK, D)
    cos = torch.ones(10, 8)
    for message, options in {
            "cache_seqlens: is missing": {"k": k, "v": k, "block_table": table},
            "v: is missing": {"k": k, "cache_seqlens": LENGTHS, "block_table": table},
            "cache_batch_idx: is given with block_table": {"cache_batch_idx": LENGTHS, "cache_seqlens": 3,
                                                           "block_table": table},
            "rotary_cos: goes with rotary_sin, k and v": {"rotary_cos": cos, "rotary_sin": cos, "block_table": table},
            "rotary_cos: has 10 positions but token 1 is at 13": {"rotary_cos": cos, "rotary_sin": cos, "k": k, "v": k,
                                                             "cache_seqlens": LENGTHS, "block_table": table},
            "rotary_cos: has shape": {"rotary_cos": torch.ones(50, 17), "rotary_sin": torch.ones(50, 17), "k": k,
                                      "v": k, "cache_seqlens": LENGTHS, "block_table": table},
            "cache_seqlens: places 48 to 48 are to be written but a sequence's cache has 48":
                {"k": k, "v": k, "cache_seqlens": CAPACITY, "block_table": table},
            "block_table: names pages -1 to": {"k": k, "v": k, "cache_seqlens": 0, "block_table": table * 0 - 1},
            "q: has shape": {"cache_seqlens": LENGTHS, "block_table": table, "q": q[0]}}.items():
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(**{"q": q, "k_cache": k_cache, "v_cache": v_cache, **options})
    with pytest.raises(ValueError, match="kv: has shape"):
        flash_attn_varlen_kvpacked_func(q[0], k_cache, LENGTHS, LENGTHS, 1, 1)
    with pytest.raises(ValueError, match="qkv: has shape"):
        flash_attn_varlen_qkvpacked_func(k_cache, LENGTHS, 1)
    k_cache.requires_grad_()
    cu = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    o = flash_attn_varlen_func(q[:, 0], k_cache, v_cache, cu, cu, 1, 1, block_table=table)
    with pytest.raises(NotImplementedError, match="k: is paged; there is no backward pass through a page table"):
        o.sum().backward()
