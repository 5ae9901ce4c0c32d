# SPDX-License-Identifier: Apache-2.0
"""What is converted because it is harmless, what is refused because it is not, and the caller's names in what is told.
The same for NumPy, PyTorch and JAX."""
import importlib.util

import numpy as np
import pytest

import tessera

B, NQ, NK, HQ, HK, D = 2, 5, 7, 4, 2, 8
LIBRARIES = ["numpy", *(pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None,
                                                                     reason=f"{name} is not installed"))
                        for name in ("torch", "jax"))]


@pytest.fixture(params=LIBRARIES)
def to(request):
    """NumPy's array as one of the library's, of the same type."""
    if request.param == "torch":
        import torch
        return torch.from_numpy
    if request.param == "jax":
        import jax
        jax.config.update("jax_enable_x64", True)
        request.addfinalizer(lambda: jax.config.update("jax_enable_x64", False))
        return jax.numpy.asarray
    return lambda x: x


def inputs(rng):
    return [rng.standard_normal(s, dtype=np.float32) for s in ((B, NQ, HQ, D), (B, NK, HK, D), (B, NK, HK, D))]


def same(to, arrays, given, plain):
    """A call with the given options has the bits of one with the plain ones."""
    arrays = [to(x) for x in arrays]
    convert = lambda options: {n: to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}  # noqa: E731
    expected = tessera.attention(*arrays, return_lse=True, **convert(plain))
    for x, y in zip(tessera.attention(*arrays, return_lse=True, **convert(given)), expected):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    for x, y in zip(tessera.forward(*arrays, **convert(given)), expected):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("kind", ["int64", "int16", "uint8"])
def test_integers_of_other_types(rng, to, kind):
    q, k, v = inputs(rng)
    used = {"seqused_q": np.array([3, 5], np.int32), "seqused_k": np.array([7, 2], np.int32)}
    same(to, (q, k, v), {n: x.astype(kind) for n, x in used.items()}, used)
    ends = {"cu_seqlens_q": np.array([0, 2, NQ], np.int32), "cu_seqlens_k": np.array([0, 4, NK], np.int32)}
    same(to, (q[0], k[0], v[0]), {n: x.astype(kind) for n, x in ends.items()}, ends)


def test_integers_that_do_not_fit(rng, to):
    """They are not cut off: 2^32 + 2 is not 2."""
    q, k, v = (to(x[0]) for x in inputs(rng))
    ends_q, ends_k = np.array([0, 2**32 + 2, NQ]), np.array([0, 2**32 + 2, NK])
    with pytest.raises(Exception, match="cu_seqlens_q"):
        np.asarray(tessera.attention(q, k, v, cu_seqlens_q=to(ends_q), cu_seqlens_k=to(ends_k)))


@pytest.mark.parametrize("kind", ["float64", "float16"])
def test_numbers_of_other_types(rng, to, kind):
    arrays = inputs(rng)
    for name, shape in (("alibi_slopes", (HQ,)), ("sinks", (HQ,)), ("bias", (1, HQ, NQ, NK))):
        value = rng.random(shape).astype(np.float16)
        same(to, arrays, {name: value.astype(kind)}, {name: value.astype(np.float32)})


def test_two_dimensions(rng, to):
    arrays = inputs(rng)
    mask = rng.random((NQ, NK)) < 0.7
    bias = rng.standard_normal((NQ, NK), dtype=np.float32)
    same(to, arrays, {"mask": mask, "bias": bias}, {"mask": mask[None, None], "bias": bias[None, None]})
    same(to, arrays, {"mask": mask[:1]}, {"mask": mask[None, None, :1]})
    for name, value in (("mask", mask), ("bias", bias)):
        with pytest.raises(ValueError, match=rf"{name}: has shape \[1, 5, 7\]; must be \[batch\|1, heads\|1, queries\|1, "
                                             r"keys\|1\] or \[queries, keys\]"):
            tessera.attention(*(to(x) for x in arrays), **{name: to(value[None])})


def test_none_is_off(rng, to):
    same(to, inputs(rng), {"softcap": None, "scale": None, "window": None, "mask": None}, {})


def test_fortran_order(rng):
    q, k, v = inputs(rng)
    o, lse = tessera.forward(q, k, v, causal=True)
    gradients = tessera.backward(o, q, k, v, o, lse, causal=True)
    far = lambda x: np.repeat(x, 2, axis=-1)[..., ::2]  # noqa: E731  every second number
    for order in (np.asfortranarray, far):
        fq, fk, fv, fo = (order(x) for x in (q, k, v, o))
        assert fq.strides[-1] != 4
        np.testing.assert_array_equal(tessera.attention(fq, fk, fv, causal=True), o)
        for x, y in zip(tessera.backward(fo, fq, fk, fv, fo, lse, causal=True)[:3], gradients[:3]):
            np.testing.assert_array_equal(x, y)
    torch = pytest.importorskip("torch")
    fq, fk, fv = (torch.from_numpy(np.asfortranarray(x)) for x in (q, k, v))
    np.testing.assert_array_equal(tessera.forward(fq, fk, fv, causal=True)[0].numpy(), o)


def test_gradients_pass_conversions(rng):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in inputs(rng))
    bias = torch.randn(NQ, NK, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(HQ, dtype=torch.float64, requires_grad=True)
    tessera.attention(q, k, v, bias=bias, sinks=sinks).square().sum().backward()
    plain = [x.detach().float().requires_grad_() for x in (bias, sinks)]
    tessera.attention(q, k, v, bias=plain[0][None, None], sinks=plain[1]).square().sum().backward()
    for x, y in zip((bias, sinks), plain):
        assert x.grad.dtype == torch.float64 and x.grad.shape == x.shape
        assert torch.equal(x.grad.float(), y.grad)


# Refused, in the caller's words.
REFUSED = [
    (TypeError, "causal: is 'yes'; must be True or False", {"causal": "yes"}),
    (TypeError, "scale: is '0.1'; must be a number", {"scale": "0.1"}),
    (ValueError, r"dropout_p: is 1.5; must be in \[0, 1\)", {"dropout_p": 1.5, "seed": 1}),
    (ValueError, "window's left: is -3; must be -1", {"window": (-3, 0)}),
    (ValueError, "window's right: is -3; must be -1", {"window": (0, -3)}),
    (ValueError, "alignment: is 9007199254740992; must be from -2.48 to 2.48", {"causal": True, "alignment": 2**53}),
    (ValueError, r"alibi_slopes: has shape \[3\]; must be \[heads\] or \[batch, heads\] = \[4\]",
     {"alibi_slopes": np.ones(3, np.float32)}),
    (ValueError, "alibi_slopes: has type i32; must be f32", {"alibi_slopes": np.ones(HQ, np.int32)}),
    (ValueError, "mask: has type f32; must be bool or uint8", {"mask": np.ones((NQ, NK), np.float32)}),
]


@pytest.mark.parametrize("error, sentence, options", REFUSED, ids=[row[1][:30] for row in REFUSED])
def test_refused(rng, to, error, sentence, options):
    options = {n: to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    with pytest.raises(error, match=sentence):
        tessera.attention(*(to(x) for x in inputs(rng)), **options)


@pytest.mark.parametrize("name", ["q", "k", "bias", "alibi_slopes", "cu_seqlens_q"])
def test_masked_arrays(rng, name):
    q, k, v = inputs(rng)
    hidden = {"bias": np.zeros((NQ, NK), np.float64), "alibi_slopes": np.ones(HQ), "cu_seqlens_q": np.array([0, NQ])}
    given = {"q": q, "k": k, "v": v, **({name: hidden[name]} if name in hidden else {})}
    given[name] = np.ma.masked_array(given[name], mask=np.zeros(given[name].shape, bool))
    fronts = [tessera.attention]
    if importlib.util.find_spec("jax"):
        from tessera.jax import attention as of_jax
        fronts.append(of_jax)
    for attention in fronts:
        with pytest.raises(TypeError, match=f"{name}: is a masked array; must be a plain one, as numpy.ma.filled makes"):
            attention(**given)


def test_names_of_other_functions(rng):
    torch = pytest.importorskip("torch")
    from tessera.flash_attn import flash_attn_func, flash_attn_varlen_func
    from tessera.torch import scaled_dot_product_attention
    q, k, v = (torch.from_numpy(x) for x in inputs(rng))
    with pytest.raises(TypeError, match="softmax_scale: is '0.1'; must be a number"):
        flash_attn_func(q, k, v, softmax_scale="0.1")
    with pytest.raises(TypeError, match=r"window_size: is 3; must be a pair \(left, right\)"):
        flash_attn_func(q, k, v, window_size=3)
    ends, table = torch.tensor([0, k.shape[1] + 1]), torch.tensor([[0]])
    with pytest.raises(ValueError, match=f"cu_seqlens_k's lengths: entry 0 is {ends[1]}; must be from 0 to {k.shape[1]}"):
        flash_attn_varlen_func(q[0], k, v, torch.tensor([0, q.shape[1]]), ends, 99, 99, block_table=table)
    with pytest.raises(ValueError, match="key: head_dim is 7 but query has 8; query and key must agree in head_dim"):
        scaled_dot_product_attention(k, k[..., :-1], v)
