# SPDX-License-Identifier: Apache-2.0
"""tessera.flash_attn_interface and tessera.flash_attn.cute, the functions of FlashAttention-3 and -4: signatures, values
and gradients against float64, refusals. Chunks and caches are in test_flash_attn_chunks.py."""
import inspect

import pytest

torch = pytest.importorskip("torch")

import eager  # noqa: E402
from conftest import assert_close  # noqa: E402

from tessera import flash_attn_interface as fa3  # noqa: E402
from tessera.flash_attn import cute  # noqa: E402
from tessera.flash_attn.cute import interface as fa4  # noqa: E402

# What FlashAttention's functions take (0251105a, August 2026): names in their order, and defaults.
WINDOW = "window_size=(-1, -1)"
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
MODS = "score_mod=None, score_mod_bwd=None, mask_mod=None"
SIGNATURES = {
    fa3.flash_attn_func:
        f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALES}, {WINDOW}, attention_chunk=0, softcap=0.0, "
        "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",
    fa3.flash_attn_qkvpacked_func:
        f"qkv, softmax_scale=None, causal=False, {DESCALES}, {WINDOW}, attention_chunk=0, softcap=0.0, "
        "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    fa3.flash_attn_varlen_func:
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
        f"softmax_scale=None, causal=False, qv=None, {DESCALES}, {WINDOW}, attention_chunk=0, softcap=0.0, num_splits=1, "
        "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",
    fa3.flash_attn_combine: "out_partial, lse_partial, out=None, out_dtype=None",
    fa3.flash_attn_with_kvcache:
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, {WINDOW}, "
        "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, "
        "sm_margin=0, return_softmax_lse=False",
    fa3.get_scheduler_metadata:
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        f"page_size=None, max_seqlen_k_new=0, causal=False, {WINDOW}, attention_chunk=0, has_softcap=False, "
        "num_splits=0, pack_gqa=None, sm_margin=0",
    fa4.flash_attn_func:
        "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), "
        f"learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, {MODS}, aux_tensors=None, "
        "aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False",
    fa4.flash_attn_varlen_func:
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, "
        "causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
        f"deterministic=False, {MODS}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False",
    fa4.flash_attn_combine:
        "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, virtual_batch_idx=None, "
        "return_lse=True",
    fa4.get_scheduler_metadata:
        "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None, causal=False, "
        "window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, cu_seqlens_k=None, "
        "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None, seqlen_k_per_split=None, _arch=None",
}
CU = torch.tensor([0, 11, 11, 40], dtype=torch.int32)
SPANS = (0, 11), (11, 11), (11, 40)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_signatures(function):
    found = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    assert str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty)) == f"({SIGNATURES[function]})"


def test_all_functions_are_there():
    assert sorted(fa3.__all__) == sorted(f.__name__ for f in SIGNATURES if f.__module__ == fa3.__name__)
    assert all(getattr(cute, name) is getattr(fa4, name) for name in cute.__all__) and len(cute.__all__) == 2


def make(*shapes, dtype=torch.float32, grad=True):
    torch.manual_seed(5)
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def compare(call, exact, tensors, dtype="float32"):
    """(O, LSE) and all gradients, O's and LSE's together, of `call`, beside those of `exact` in float64."""
    o, lse = call(*tensors)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact_o, exact_lse = exact(*wide)
    assert_close(o.detach().double(), exact_o.detach(), dtype, 2)
    assert_close(lse.detach(), exact_lse.detach(), dtype, 2)
    d_o, d_lse = torch.randn_like(exact_o), torch.randn_like(exact_lse)
    given = torch.autograd.grad((o, lse), tensors, (d_o.to(o.dtype), d_lse.float()))
    wanted = torch.autograd.grad((exact_o, exact_lse), wide, (d_o.to(o.dtype).double(), d_lse.float().double()))
    for x, y in zip(given, wanted):
        assert_close(x.double(), y, dtype, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 4), "softcap": 3.0},
                                     {"causal": True, "window_size": torch.tensor([9, 5])}], ids=str)
def test_func(options, dtype):
    tensors = make((2, 30, 6, 16), (2, 40, 2, 16), (2, 40, 2, 24), dtype=getattr(torch, dtype))
    window = tuple(map(int, options.get("window_size", (-1, -1))))
    exact = {"causal": options.get("causal", False), "window": window, "softcap": options.get("softcap", 0.0)}
    hints = {"num_splits": 3, "pack_gqa": True}
    compare(lambda q, k, v: fa3.flash_attn_func(q, k, v, **options, **hints, sm_margin=8, return_attn_probs=True),
            lambda q, k, v: eager.attention(q, k, v, **exact), tensors, dtype)
    of_fa4 = {**options, "window_size": tuple(None if side < 0 else side for side in window)}
    compare(lambda q, k, v: fa4.flash_attn_func(q, k, v, **of_fa4, **hints, return_lse=True),
            lambda q, k, v: eager.attention(q, k, v, **exact), tensors, dtype)


def test_results_without_lse():
    q, k, v = make((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16), grad=False)
    o, lse = fa4.flash_attn_func(q, k, v)
    assert lse is None and torch.equal(o, fa3.flash_attn_func(q, k, v))


def test_qkvpacked():
    (qkv,) = make((2, 20, 8, 16))
    q, k, v = qkv.split([4, 2, 2], 2)
    o = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    assert torch.equal(o, fa3.flash_attn_func(q, k, v, causal=True))
    o.sum().backward()
    assert qkv.grad.abs().sum() > 0
    (qkv,) = make((2, 20, 3, 4, 16), grad=False)
    o, lse = fa3.flash_attn_qkvpacked_func(qkv, 0.3, True, return_attn_probs=True)
    expected = fa3.flash_attn_func(*qkv.unbind(2), 0.3, True, return_attn_probs=True)
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("used", [False, True])
def test_varlen(used):
    tensors = make((40, 4, 16), (40, 2, 16), (40, 2, 16))
    seqused_q = seqused_k = None
    if used:
        seqused_q, seqused_k = torch.tensor([7, 0, 29], dtype=torch.int32), torch.tensor([11, 0, 20], dtype=torch.int32)
    lengths = [(int(seqused_q[b]), int(seqused_k[b])) if used else (end - begin,) * 2
               for b, (begin, end) in enumerate(SPANS)]

    def exact(q, k, v):
        o, lse = torch.zeros_like(q), torch.full((4, 40), -torch.inf, dtype=q.dtype)
        for (begin, _), (nq, nk) in zip(SPANS, lengths):
            if nq:
                rows = slice(begin, begin + nq)
                seen = rows if nk >= nq else slice(begin + nq - nk, begin + nq)  # causal: rows before see no key
                keys = slice(begin, begin + nk)
                part, part_lse = eager.attention(q[None, seen], k[None, keys], v[None, keys], causal=True)
                o = o.index_put((torch.arange(40)[seen],), part[0])
                lse = lse.index_put((torch.arange(4)[:, None], torch.arange(40)[seen]), part_lse[0])
        return o, lse

    def finite(call):  # gradients arrive where LSE is a number
        def of_rows(*x):
            o, lse = call(*x)
            return o, lse.masked_fill(torch.isinf(lse), 0.0)
        return of_rows

    compare(finite(lambda q, k, v: fa3.flash_attn_varlen_func(q, k, v, CU, CU, 29, 29, seqused_q, seqused_k, causal=True,
                                                              return_attn_probs=True)), finite(exact), tensors)
    compare(finite(lambda q, k, v: fa4.flash_attn_varlen_func(q, k, v, None, CU, CU, 29, 29, 0, seqused_q, seqused_k,
                                                              causal=True, return_lse=True)), finite(exact), tensors)


def test_sinks():
    q, k, v, sinks = make((2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16), (4,))
    compare(lambda q, k, v, s: fa4.flash_attn_func(q, k, v, causal=True, learnable_sink=s, return_lse=True),
            lambda q, k, v, s: eager.attention(q, k, v, causal=True, sinks=s), [q, k, v, sinks])
    half = sinks.detach().bfloat16().requires_grad_()
    o, _ = fa4.flash_attn_func(q, k, v, learnable_sink=half)
    o.sum().backward()
    assert half.grad.dtype == torch.bfloat16 and half.grad.abs().sum() > 0


@pytest.mark.parametrize("with_qv", [False, True])
def test_varlen_of_fa4_in_every_form(with_qv):
    """Padded and packed queries and keys give the same numbers, and so do pages."""
    q, k, v, qv = make((2, 6, 4, 16), (2, 10, 2, 16), (2, 10, 2, 16), (2, 6, 4, 16), grad=False)
    used = torch.tensor([10, 7], dtype=torch.int32)
    cu_q, cu_k = (torch.arange(3, dtype=torch.int32) * x.shape[1] for x in (q, k))
    pages = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    pools = [torch.empty(4, 5, 2, 16).index_copy(0, pages.flatten().long(), x.reshape(4, 5, 2, 16)) for x in (k, v)]

    def call(packed_q, keys, **options):
        options["qv"] = (qv.flatten(0, 1) if packed_q else qv) if with_qv else None
        if packed_q:
            options.update(cu_seqlens_q=cu_q, max_seqlen_q=6)
        rows = q.flatten(0, 1) if packed_q else q
        o, lse = fa4.flash_attn_varlen_func(rows, *keys, seqused_k=used, causal=True, return_lse=True, **options)
        assert lse.shape == (*o.shape[:-1],) if with_qv else lse.shape[-1] == rows.shape[-3]
        lse = lse if with_qv else lse.transpose(-1, -2)
        return o.reshape(2, 6, 4, 16), lse.reshape(2, 6, 4)

    o, lse = call(False, (k, v))
    for keys, options in (((k, v), {}), ((k.flatten(0, 1), v.flatten(0, 1)), {"cu_seqlens_k": cu_k, "max_seqlen_k": 10}),
                          (pools, {"page_table": pages})):
        for packed_q in (False, True):
            other, other_lse = call(packed_q, keys, **options)
            assert_close(other, o), assert_close(other_lse, lse)
    scale = (16 + 16 * with_qv) ** -0.5
    joint_q = torch.cat((q, qv), -1) if with_qv else q
    joint_k = torch.cat((k, v), -1) if with_qv else k
    exact, _ = eager.attention(joint_q.double() * scale * joint_q.shape[-1] ** 0.5, joint_k.double(), v.double(),
                               causal=True)
    assert_close(o[:1], exact[:1])


def test_pages_without_lengths_are_full():
    q, k, v = make((2, 3, 4, 16), (4, 5, 2, 16), (4, 5, 2, 16), grad=False)
    pages = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    o, _ = fa4.flash_attn_varlen_func(q, k, v, page_table=pages)
    assert torch.equal(o, fa4.flash_attn_func(q, *(x[pages.long()].flatten(1, 2) for x in (k, v)))[0])


def test_eight_bits():
    """q, k and v of 8 bits are numbers like others, times their scales; O is bfloat16."""
    codes = [x.detach().to(torch.float8_e4m3fn) for x in make((2, 9, 4, 32), (2, 12, 2, 32), (2, 12, 2, 32))]
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    o = fa3.flash_attn_func(*codes, 0.2, True, None, *scales)
    factors = scales[0].repeat_interleave(2, 1), scales[1], scales[2]
    meant = [x.double() * factor.double()[:, None, :, None] for x, factor in zip(codes, factors)]
    exact, _ = eager.attention(meant[0] * 0.2 * 32 ** 0.5, meant[1], meant[2], causal=True)
    assert o.dtype == torch.bfloat16
    assert_close(o.double(), exact, "bfloat16")
    assert_close(fa4.flash_attn_func(*codes)[0].double(), eager.attention(*(x.double() for x in codes))[0], "bfloat16")
    half = [x.bfloat16() for x in codes]
    only_q = fa3.flash_attn_func(*half, q_descale=scales[0])
    assert_close(only_q.double(), eager.attention(meant[0], *(x.double() for x in half[1:]))[0], "bfloat16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("given", [False, True])
def test_combine(dtype, given):
    parts, lse = make((3, 2, 7, 4, 16), (3, 2, 4, 7), grad=False)
    lse = lse.transpose(-1, -2)
    lse[1:, 0] = -torch.inf
    lse[:, 1, 3] = -torch.inf
    total = lse.double().logsumexp(0)
    weight = (lse.double() - total).exp().nan_to_num(0.0)
    exact = (weight[..., None] * parts.double()).sum(0)
    out = torch.empty(2, 7, 4, 16, dtype=dtype) if given else None
    o, merged = fa3.flash_attn_combine(parts, lse, out, dtype)
    assert o.dtype == dtype and (o is out) == given and merged.shape == (2, 7, 4)
    assert_close(o.double(), exact, str(dtype)[6:], 2)
    assert_close(merged, total)
    packed, packed_lse = fa4.flash_attn_combine(parts.flatten(1, 2), lse.flatten(1, 2), out_dtype=dtype)
    assert torch.equal(packed, o.flatten(0, 1)) and torch.equal(packed_lse, merged.flatten(0, 1))
    assert fa4.flash_attn_combine(parts, lse, return_lse=False)[1] is None
    into = torch.empty_like(o)  # whose type counts
    assert fa4.flash_attn_combine(parts, lse, into)[0] is into and torch.equal(into, o)
    half = parts.half()  # rounded once, to the type that is asked for
    exact = (weight[..., None] * half.double()).sum(0)
    assert_close(fa3.flash_attn_combine(half, lse, out_dtype=dtype)[0].double(), exact, str(dtype)[6:], 2)


def refusals():
    q, k, v = make((2, 6, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16), grad=False)
    wide = torch.zeros(1, 4, 2, 512)
    functions = {name: {name: print} for name in ("score_mod", "score_mod_bwd", "mask_mod")}
    lists = {name: {name: [q]} for name in ("aux_tensors", "aux_scalars", "block_sparse_tensors", "gather_kv_indices")}
    rows = {f"{name}, {f.__name__}": (f, (q, k, v), option, NotImplementedError, f"{name}: is given; kernels here take no")
            for name, option in {**functions, **lists}.items()
            for f in (fa4.flash_attn_func, fa4.flash_attn_varlen_func)}
    scale, per_key = torch.ones(2, 2), torch.ones(2, 8, 2)
    return {**rows, **{
        "bwd blocks": (fa4.flash_attn_func, (q, k, v), {"block_sparse_tensors_bwd": q}, NotImplementedError,
                       "block_sparse_tensors_bwd: is given"),
        "window moved": (fa4.flash_attn_func, (q, k, v), {"window_size": (-2, 5)}, NotImplementedError,
                         r"window_size: is \(-2, 5\); numbers below 0"),
        "window of one in 4": (fa4.flash_attn_func, (q, k, v), {"window_size": 5}, TypeError,
                               "window_size: is 5; must be a pair"),
        "qv and k is v": (fa4.flash_attn_func, (wide, wide, wide), {"qv": wide}, NotImplementedError,
                          "qv: is given while k is v"),
        "window of text": (fa4.flash_attn_func, (q, k, v), {"window_size": ("3", 0)}, TypeError,
                           "window_size: is '3'; must be an integer"),
        "page_table and cu_seqlens_k": (fa4.flash_attn_varlen_func, (q, k, v), {"page_table": CU[None], "cu_seqlens_k": CU},
                                        ValueError, "cu_seqlens_k: is given with page_table"),
        "page_table of lists": (fa4.flash_attn_varlen_func, (q, k, v), {"page_table": [[0], [1]]}, TypeError,
                                "page_table: is a list; must be a PyTorch tensor"),
        "page_table's dims": (fa4.flash_attn_varlen_func, (q, k, v), {"page_table": CU}, ValueError,
                              r"page_table: has shape \[4\]; must be \[batch, entries\]"),
        "page_table's dims in 3": (fa3.flash_attn_with_kvcache, (q, k, v), {"page_table": CU}, ValueError,
                                   r"page_table: has shape \[4\]; must be \[batch, entries\]"),
        "sinks' shape": (fa4.flash_attn_func, (q, k, v), {"learnable_sink": torch.ones(3)}, ValueError,
                         r"learnable_sink: has shape \[3\]"),
        "window below -1": (fa3.flash_attn_func, (q, k, v), {"window_size": (-2, 0)}, ValueError, "window_size's left: is -2"),
        "window of one": (fa3.flash_attn_func, (q, k, v), {"window_size": 5}, TypeError, "window_size: is 5; must be a pair"),
        "scale": (fa3.flash_attn_func, (q, k, v), {"softmax_scale": "1"}, TypeError, "softmax_scale: is '1'"),
        "chunk below 0": (fa3.flash_attn_func, (q, k, v), {"attention_chunk": -1}, ValueError,
                          r"attention_chunk: is -1; must be 0 \(none\) or the length of a chunk"),
        "chunk of text": (fa3.flash_attn_func, (q, k, v), {"attention_chunk": "2"}, TypeError, "attention_chunk: is '2'"),
        "q_descale and qv": (fa3.flash_attn_func, (q, k, v), {"q_descale": scale, "qv": q}, NotImplementedError,
                             "q_descale: is given with qv"),
        "q_descale's heads": (fa3.flash_attn_func, (q, k, v), {"q_descale": torch.ones(3)}, ValueError,
                              r"q_descale: has shape \[3\]"),
        "q_descale unlike k_descale": (fa3.flash_attn_func, (q, k, v), {"q_descale": torch.ones(3), "k_descale": scale},
                                       ValueError, r"q_descale: is \[3\] on cpu but k_descale is \[2, 2\]"),
        "k_descale of a number": (fa3.flash_attn_func, (q, k, v), {"q_descale": scale, "k_descale": 2.0}, TypeError,
                                  "k_descale: is a float"),
        "q_descale's shape": (fa3.flash_attn_func, (q, k, v), {"q_descale": per_key}, ValueError,
                              r"q_descale: is \[2, 8, 2\]; must be a tensor"),
        "q_descale of a number": (fa3.flash_attn_func, (q, k, v), {"q_descale": 2.0}, ValueError, "q_descale: is float"),
        "q_descale beside keys'": (fa3.flash_attn_func, (q, k, v), {"q_descale": scale, "k_descale": per_key},
                                   NotImplementedError, r"q_descale: is given while k_descale is \[2, 8, 2\]"),
        "k_descale's shape": (fa3.flash_attn_func, (q, k, v), {"k_descale": torch.ones(3)}, ValueError,
                              r"k_descale: has shape \[3\]"),
        "qkv": (fa3.flash_attn_qkvpacked_func, (q,), {}, ValueError, "qkv: has shape .* and num_heads_q is None"),
        "qkv's heads": (fa3.flash_attn_qkvpacked_func, (q,), {"num_heads_q": 3}, ValueError, "num_heads_q is 3; must be"),
        "parts' shapes": (fa3.flash_attn_combine, (q, k), {}, ValueError, r"lse_partial: has shape \[2, 8, 2, 16\]"),
        "parts of NumPy": (fa3.flash_attn_combine, (q.numpy(), k), {}, TypeError, "out_partial: is a ndarray"),
        "out's type": (fa3.flash_attn_combine, (q, q[..., 0]), {"out": q[0], "out_dtype": torch.float16}, ValueError,
                       r"out: is \[6, 4, 16\], torch.float32; must be \[6, 4, 16\], torch.float16"),
        "out_dtype": (fa3.flash_attn_combine, (q, q[..., 0]), {"out_dtype": torch.int32}, ValueError, "out_dtype: is torch.int32"),
        "parts with gradients": (fa3.flash_attn_combine, (q.clone().requires_grad_(), q[..., 0]), {}, NotImplementedError,
                                 "out_partial: requires a gradient"),
    }}


@pytest.mark.parametrize("name", refusals())
def test_refusals(name):
    function, arguments, options, error, message = refusals()[name]
    with pytest.raises(error, match=message):
        function(*arguments, **options)


def test_qv_has_gradients():
    """FlashAttention-4 gives them, FlashAttention-3 drops them."""
    tensors = make((2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 24), (2, 9, 4, 24))

    def exact(q, k, v, qv):
        return eager.attention(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, causal=True)

    compare(lambda q, k, v, qv: fa3.flash_attn_func(q, k, v, None, True, qv, return_attn_probs=True), exact, tensors)
    compare(lambda q, k, v, qv: fa4.flash_attn_func(q, k, v, qv, causal=True, return_lse=True),
            lambda *x: (exact(*x)[0], exact(*x)[1].transpose(1, 2)), tensors)
    with torch.no_grad():
        plain = fa3.flash_attn_func(*tensors[:3], None, True, tensors[3])
    assert_close(plain, exact(*(t.detach().double() for t in tensors))[0])
    with pytest.raises(ValueError, match="qv: has shape"):
        fa3.flash_attn_func(*tensors[:3], None, True, tensors[3].detach()[:, :5])


def test_gradients_of_sinks_alone_with_qv():
    q, k, v, qv, sinks = make((1, 5, 4, 16), (1, 7, 2, 16), (1, 7, 2, 16), (1, 5, 4, 16), (4,), grad=False)
    sinks.requires_grad_()
    (alone,) = torch.autograd.grad(fa4.flash_attn_func(q, k, v, qv, learnable_sink=sinks)[0].sum(), sinks)
    _, both = torch.autograd.grad(fa4.flash_attn_func(q.requires_grad_(), k, v, qv, learnable_sink=sinks)[0].sum(), (q, sinks))
    assert alone.any() and torch.equal(alone, both)


def test_where_keys_are_values_of_512_dims():
    """FlashAttention-4 takes q for qv then, of which LSE has the heads last."""
    q, values = make((1, 3, 4, 512), (1, 5, 1, 512), grad=False)
    o, lse = fa4.flash_attn_func(q, values, values, causal=True, return_lse=True)
    expected, other = fa4.flash_attn_func(q, values, values.clone(), causal=True, return_lse=True)
    assert torch.equal(o, expected) and torch.equal(lse, other.transpose(1, 2)) and lse.shape == (1, 3, 4)
    packed = values[0]
    o, lse = fa4.flash_attn_varlen_func(q, packed, packed, cu_seqlens_k=torch.tensor([0, 5], dtype=torch.int32),
                                        max_seqlen_k=5, causal=True, return_lse=True)
    assert_close(o, expected), assert_close(lse, other.transpose(1, 2))


def test_gradients_that_are_not_there():
    q, k, v = make((2, 6, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16))
    with pytest.raises(NotImplementedError):
        fa3.flash_attn_func(q, k, v, k_descale=torch.ones(2, 2)).sum().backward()


def test_schedules_are_empty():
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    metadata = fa3.get_scheduler_metadata(2, 1, 8, 4, 2, 16, lengths)
    assert metadata.dtype == torch.int32 and metadata.numel() == 0 and metadata.device == lengths.device
    assert fa4.get_scheduler_metadata(1, 8, 4, 2, 16, 1, seqused_k=lengths) == (None,) * 7
