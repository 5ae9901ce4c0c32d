# SPDX-License-Identifier: Apache-2.0
"""tessera.torch.scaled_dot_product_attention beside PyTorch's by its math backend: values, gradients, refusals; `layout`;
jagged nested tensors."""
import inspect

import numpy as np
import pytest
from conftest import assert_close

torch = pytest.importorskip("torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as theirs  # noqa: E402

import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tessera.torch import attention  # noqa: E402
from tessera.torch import scaled_dot_product_attention as ours  # noqa: E402


def by_math(*tensors, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return theirs(*tensors, **options)


# --- a seeded grid of random calls

def maybe_one(rng, shape, chance):
    """The shape with some sizes, or leading ones altogether, broadcast."""
    shape = [1 if rng.random() < chance else n for n in shape]
    while shape and rng.random() < chance / 2:
        shape = shape[1:]
    return shape


def random_call(rng):
    """Tensors and options of a call that follows the rules."""
    ndim = int(rng.integers(2, 6))
    batch = [int(n) for n in rng.integers(1, 4, max(ndim - 3, 0))]
    length, keys, dim, dim_v = (int(n) for n in rng.integers(1, 12, 4))
    grouped = ndim > 2 and rng.random() < 0.4
    heads = [] if ndim == 2 else [int(rng.choice([2, 4, 6]))]
    kv_heads = [[2]] * 2 if grouped and rng.random() < 0.7 else [[heads[0]], [1]] if grouped else None
    shapes = []
    for place, (n, d) in enumerate(((length, dim), (keys, dim), (keys, dim_v))):
        chance = 0.15 if len(batch) else 0.0
        lead = maybe_one(rng, batch, chance) if grouped else maybe_one(rng, batch + heads, chance)
        if grouped:
            lead = [*lead, *(heads if place == 0 else kv_heads[place - 1])]
        shapes.append([*lead, n, d])
    options = {"enable_gqa": True} if grouped else {}
    if rng.random() < 0.4:
        options["scale"] = float(rng.normal())
    tensors = dict(zip(("query", "key", "value"), (torch.from_numpy(rng.standard_normal(s)) for s in shapes)))
    kind = rng.choice(["none", "causal", "bool", "float"])
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        scores = torch.broadcast_shapes(*(s[:-3] if grouped else s[:-2] for s in shapes[:2]))
        shape = maybe_one(rng, [*scores, *(heads if grouped else []), length, keys], 0.2)
        mask = rng.standard_normal(shape)
        tensors["attn_mask"] = torch.from_numpy(np.asarray(mask > -0.6 if kind == "bool" else mask))
    return tensors, options


def cast(tensors, dtype):
    return {n: x.to(dtype).requires_grad_() if x.is_floating_point() else x for n, x in tensors.items()}


@pytest.mark.parametrize("seed", range(10))
def test_values_and_gradients(seed):
    rng = np.random.default_rng(seed)
    for _ in range(30):
        tensors, options = random_call(rng)
        dtype = [torch.float32, torch.float32, torch.float64, torch.bfloat16][int(rng.integers(4))]
        mine = cast(tensors, dtype)
        exact = {n: x.detach().double().requires_grad_() if x.is_floating_point() else x for n, x in mine.items()}
        o, exact_o = ours(**mine, **options), by_math(**exact, **options)
        assert o.shape == exact_o.shape and o.dtype == dtype
        d_o = torch.from_numpy(rng.standard_normal(o.shape)).to(dtype)
        o.backward(d_o)
        exact_o.backward(d_o.double())
        name = str(dtype).removeprefix("torch.")
        assert_close(o.detach().double(), exact_o.detach(), name, factor=2)
        size = max(float(x.grad.norm()) for x in exact.values() if x.grad is not None)
        for key, x in mine.items():
            if x.grad is not None:  # gradients that cancel out to almost 0 have the others' rounding
                error = float((x.grad.double() - exact[key].grad).norm())
                allowed = {"float32": 6e-6, "float64": 3e-12, "bfloat16": 5e-2}[name]
                assert x.grad.shape == exact[key].grad.shape and error <= allowed * size, (key, error, size)


def corrupt(rng, tensors, options):
    """Something that may or may not break a rule."""
    name = str(rng.choice(list(tensors)))
    x = tensors[name]
    what = rng.choice(["size", "narrow", "type", "dims", "gqa", "both", "dropout"])
    if what == "size" and x.dim():
        place = int(rng.integers(x.dim()))
        tensors[name] = torch.cat([x, x], place)
    elif what == "narrow" and x.dim():
        place = int(rng.integers(x.dim()))
        tensors[name] = x.narrow(place, 0, max(x.shape[place] - 1, 1))
    elif what == "type":
        tensors[name] = x.to([torch.float64, torch.float32, torch.bfloat16, torch.int64][int(rng.integers(4))])
    elif what == "dims":
        tensors[name] = x[None] if rng.random() < 0.5 else x[0] if x.dim() else x
    elif what == "gqa":
        options["enable_gqa"] = not options.get("enable_gqa", False)
    elif what == "both":
        options["is_causal"] = True
    elif what == "dropout":
        options["dropout_p"] = 1.5


@pytest.mark.parametrize("seed", range(4))
def test_refusals_are_the_same(seed):
    rng = np.random.default_rng(100 + seed)
    refused = 0
    for _ in range(100):
        tensors, options = random_call(rng)
        tensors = {n: x.float() if x.is_floating_point() else x for n, x in tensors.items()}
        corrupt(rng, tensors, options)
        told = []
        for function in (by_math, ours):
            try:
                told.append(function(**tensors, **options))
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                told.append(error)
        expected, got = told
        shapes = {n: (list(x.shape), x.dtype) for n, x in tensors.items()}
        assert isinstance(expected, Exception) == isinstance(got, Exception), (shapes, options, expected, got)
        if isinstance(got, Exception):
            refused += 1
            assert isinstance(got, (ValueError, TypeError)), got
        else:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert 20 < refused < 80


# --- by hand

def tensors(*lead, length=5, keys=7, dim=8):
    torch.manual_seed(1)
    return [torch.randn(*lead, n, dim) for n in (length, keys, keys)]


def test_signature():
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    parameters = inspect.signature(ours).parameters.values()
    assert [a.name for a in schema.arguments] == [p.name for p in parameters]
    assert [a.kwarg_only for a in schema.arguments] == [p.kind is p.KEYWORD_ONLY for p in parameters]
    for a, p in zip(schema.arguments, parameters):
        assert (a.default_value if a.has_default_value() else p.empty) == p.default


def test_rows_that_see_nothing():
    q, k, v = (x.requires_grad_() for x in tensors(2, 3))
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    o = ours(q, k, v, mask)
    assert torch.all(o[:, :, 2] == 0)
    torch.testing.assert_close(o, by_math(q, k, v, mask))
    o.sum().backward()
    assert torch.all(q.grad[:, :, 2] == 0) and k.grad.isfinite().all()


def test_empty_sizes():
    q, k, v = tensors(2, 3)
    for call in ((q, k[:, :, :0], v[:, :, :0]), (q[:, :, :0], k, v), (q[:0], k[:0], v[:0]), (q[:, :0], k[:, :0], v[:, :0])):
        o, expected = ours(*call), by_math(*call)
        assert o.shape == expected.shape
        torch.testing.assert_close(o, expected)
        for gradient, t in zip(torch.autograd.grad(ours(*(x.requires_grad_() for x in call)).sum(), call), call):
            assert gradient.shape == t.shape and not gradient.any()
    broadcast = q[:, :, :0, :1].expand(-1, -1, -1, 8)  # contiguous to PyTorch, and rows without a step
    assert ours(broadcast, k, v).shape == broadcast.shape


def test_dropout():
    q, k, v = (x.requires_grad_() for x in tensors(2, 3, length=64, keys=64))
    v = torch.ones_like(v)
    torch.manual_seed(4)
    first = ours(q, k, v, dropout_p=0.5)
    torch.manual_seed(4)
    assert torch.equal(ours(q, k, v, None, 0.5), first) and not torch.equal(ours(q, k, v, None, 0.5), first)
    assert abs(float(first.detach().mean()) - 1) < 0.05  # what is kept is scaled
    none = ours(q, k, v, dropout_p=1.0)
    assert torch.all(none == 0) and torch.all(torch.autograd.grad(none.sum(), q)[0] == 0)


def test_autocast_and_compile():
    q, k, v = tensors(2, 3)
    mask = torch.randn(5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        o, expected = ours(q, k, v, mask), by_math(q, k, v, mask)
    assert o.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-2)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, mask), ours(q, k, v, mask))
    torch.testing.assert_close(compiled(q, k[:, :1], v[:, :1], is_causal=True), by_math(q, k[:, :1], v[:, :1], is_causal=True))


def test_compile_with_numbers_that_vary():
    """dynamic=True makes symbols of numbers, too."""
    compiled = torch.compile(lambda *x: ours(*x[:3], scale=x[3]), fullgraph=True, dynamic=True, backend="aot_eager")
    for length, scale in ((5, 0.3), (9, -0.2), (4, 1.0)):
        q, k, v = tensors(2, 3, length=length)
        torch.testing.assert_close(compiled(q, k, v, scale), ours(q, k, v, scale=scale))


REFUSED = [
    (TypeError, "query: is a ndarray; must be a PyTorch tensor", lambda q, k, v: ours(q.numpy(), k, v)),
    (TypeError, "attn_mask: is a list; must be a PyTorch tensor", lambda q, k, v: ours(q, k, v, [True])),
    (TypeError, "is_causal: is 'yes'; must be True or False", lambda q, k, v: ours(q, k, v, is_causal="yes")),
    (ValueError, r"query: has shape \[8\]; must be \[..., tokens, dim\]", lambda q, k, v: ours(q[0, 0, 0], k, v)),
    (ValueError, r"query: has shape \[5, 8\]; must be \[..., heads, tokens, dim\] with enable_gqa",
     lambda q, k, v: ours(q[0, 0], k, v, enable_gqa=True)),
    (ValueError, "query: has 4 heads but key 3 and value 3; with enable_gqa query's must be a multiple of both",
     lambda q, k, v: ours(q, k[:, :3], v[:, :3], enable_gqa=True)),
    (ValueError, r"query: has shape \[2, 4, 5, 8\] beside key \[2, 3, 7, 8\] and value \[2, 4, 7, 8\]; their heads must agree or be 1",
     lambda q, k, v: ours(q, k[:, :3], v)),
    (ValueError, r"query: has shape .* beside key .* and value .*; their batches must agree or be 1",
     lambda q, k, v: ours(q, torch.cat([k, k]), v)),
    (ValueError, "value: has type torch.float64 but query has torch.float32; query, key and value must agree in type",
     lambda q, k, v: ours(q, k, v.double())),
    (ValueError, "attn_mask: has type torch.float16; must be torch.bool or torch.float32$",
     lambda q, k, v: ours(q, k, v, torch.zeros(5, 7).half())),
    (ValueError, "attn_mask: has type torch.int64; must be torch.bool, torch.float32 or query's torch.bfloat16",
     lambda q, k, v: ours(q.bfloat16(), k.bfloat16(), v.bfloat16(), torch.zeros(5, 7, dtype=torch.int64))),
    (ValueError, r"dropout_p: is 1.5; must be in \[0, 1\]", lambda q, k, v: ours(q, k, v, dropout_p=1.5)),
    (TypeError, "dropout_p: is '0.1'; must be a number", lambda q, k, v: ours(q, k, v, dropout_p="0.1")),
    (ValueError, "key: is on cpu but query is on meta; all tensors must be on one device",
     lambda q, k, v: ours(q.to("meta"), k, v)),
    (ValueError, r"attn_mask: has shape \[5, 6\]; must broadcast to the scores' \[2, 4, 5, 7\]",
     lambda q, k, v: ours(q, k, v, torch.zeros(5, 6))),
    (ValueError, "attn_mask: is given while is_causal is True; use one or the other",
     lambda q, k, v: ours(q, k, v, torch.zeros(5, 7), is_causal=True)),
]


@pytest.mark.parametrize("error, sentence, call", REFUSED, ids=[row[1][:30] for row in REFUSED])
def test_sentences(error, sentence, call):
    with pytest.raises(error, match=sentence):
        call(*tensors(2, 4))


def test_meta_tensors():
    q, k, v = (t.to("meta").requires_grad_() for t in tensors(2, 4))
    o = ours(q, k, v, torch.empty(5, 7, device="meta"), is_causal=False)
    assert o.shape == by_math(q, k, v).shape and o.device.type == "meta"
    assert torch.autograd.grad(o.sum(), k)[0].shape == k.shape


# --- layout

def test_layout():
    q, k, v = (x.requires_grad_() for x in tensors(2, 4))
    o, lse = attention(q, k, v, causal=True, layout="bhnd", return_lse=True)
    tokens_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected, expected_lse = attention(*tokens_first, causal=True, layout="bnhd", return_lse=True)
    assert torch.equal(o, expected.transpose(1, 2)) and torch.equal(lse, expected_lse) and o.shape == q.shape
    for x, y in zip(torch.autograd.grad(o.square().sum(), (q, k, v)),
                    torch.autograd.grad(expected.square().sum(), (q, k, v))):
        assert torch.equal(x, y)
    for layout in ("BHND", "", None, 4):
        with pytest.raises(ValueError, match=r"layout: is .*; must be 'bnhd' \(tokens before heads\) or 'bhnd' \(heads"):
            attention(q, k, v, layout=layout)
    with pytest.raises(TypeError, match="k: is a list; must be a PyTorch tensor"):
        attention(q, [1], v, layout="bhnd")


# --- biases of torch.nn.attention.bias

@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("counts", [(5, 9), (6, 6)])
def test_causal_biases(make, counts, compiled):
    """They are tensors without numbers: what they say counts."""
    q, k, v = torch.randn(2, 4, counts[0], 16), *torch.randn(2, 2, 4, counts[1], 16)
    function = torch.compile(ours, backend="aot_eager") if compiled else ours
    rows, columns = torch.arange(counts[0])[:, None], torch.arange(counts[1])
    keep = columns <= rows + (counts[1] - counts[0] if make is causal_lower_right else 0)
    expected = theirs(q, k, v, keep)
    torch.testing.assert_close(function(q, k, v, make(*counts)), expected, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(function(q, k, v, attn_mask=make(*counts)), expected, atol=2e-6, rtol=2e-5)


def test_causal_biases_that_are_refused():
    q = torch.randn(2, 4, 5, 16)
    with pytest.raises(ValueError, match=r"attn_mask: is a causal bias of 5 queries and 6 keys but key has shape \[2, 4"):
        ours(q, q, q, causal_upper_left(5, 6))
    with pytest.raises(ValueError, match="attn_mask: is given while is_causal is True; use one or the other"):
        ours(q, q, q, causal_upper_left(5, 5), is_causal=True)


# --- jagged nested tensors

def jagged(lengths, heads=2, dim=8, like=None):
    if like is not None:
        return torch.nested.nested_tensor_from_jagged(torch.randn(sum(lengths), heads, dim), like.offsets())
    return torch.nested.nested_tensor([torch.randn(n, heads, dim) for n in lengths], layout=torch.jagged)


def test_nested():
    torch.manual_seed(2)
    q, k = jagged([3, 6, 1], heads=4), jagged([4, 5, 2])
    v = jagged([4, 5, 2], like=k)
    given = [x.requires_grad_() for x in (q, k, v)]
    o, lse = attention(*given, causal=True, return_lse=True)
    assert o.is_nested and o.shape == q.shape and lse.shape[:2] == (3, 4)
    alone = [[x.detach()[None].requires_grad_() for x in t.unbind()] for t in given]
    results = [attention(*x, causal=True, return_lse=True) for x in zip(*alone)]
    for n, (o_n, lse_n) in enumerate(results):
        assert torch.equal(o.unbind()[n], o_n[0]) and torch.equal(lse.unbind()[n], lse_n[0])
    torch.autograd.backward([o.values().square().sum(), lse.values().sum()])
    for o_n, lse_n in results:
        torch.autograd.backward([o_n.square().sum(), lse_n.sum()])
    for t, sequences in zip(given, alone):
        for x, y in zip(t.grad.unbind(), sequences):
            assert torch.equal(x, y.grad[0])
    heads_first = [x.transpose(1, 2) for x in given]
    assert torch.equal(attention(*heads_first, causal=True, layout="bhnd").transpose(1, 2).values(), o.values())
    top_left = ours(*heads_first, is_causal=True)
    for n, o_n in enumerate(top_left.unbind()):
        sequence = [x.unbind()[n][None] for x in heads_first]
        torch.testing.assert_close(o_n, by_math(*sequence, is_causal=True, enable_gqa=True)[0])


def test_nested_with_holes():
    torch.manual_seed(2)
    padded = torch.randn(3, 9, 2, 8)
    starts, lengths = torch.tensor([0, 2, 4]), torch.tensor([3, 5, 1])
    x = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    o = attention(x, x, x, causal=True)
    for n in range(3):
        alone = padded[n:n + 1, starts[n]:starts[n] + lengths[n]]
        assert torch.equal(o.unbind()[n], attention(alone, alone, alone, causal=True)[0])


def test_nested_sentences():
    q, k, other = jagged([3, 6]), jagged([4, 5]), jagged([5, 4])
    plain = torch.randn(2, 4, 2, 8)
    with pytest.raises(ValueError, match="k: is no jagged nested tensor; q, k and v must all be, or none"):
        attention(q, plain, plain)
    with pytest.raises(ValueError, match="v: has other lengths than k; k and v must agree in tokens"):
        attention(q, k, other)
    with pytest.raises(ValueError, match=r"q: has shape .*; must be \[batch, tokens, heads, dim\] with jagged tokens"):
        attention(q.transpose(1, 2), k, k)
    with pytest.raises(ValueError, match="cu_seqlens_q: is given with nested tensors, which have their own"):
        attention(q, q, q, cu_seqlens_q=q.offsets().int())
    with pytest.raises(ValueError, match="attn_mask: is given with nested tensors; they take is_causal alone"):
        ours(*[q.transpose(1, 2)] * 3, torch.zeros(1))
    with pytest.raises(ValueError, match="query: is no jagged nested tensor; query, key and value must all be, or none"):
        ours(plain, *[k.transpose(1, 2)] * 2)
    with pytest.raises(ValueError, match=r"query: has shape .*; must be \[batch, tokens, heads, dim\] with jagged"):
        ours(*[torch.nested.nested_tensor_from_jagged(torch.randn(9, 8), q.offsets())] * 3)
