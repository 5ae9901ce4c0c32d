# SPDX-License-Identifier: Apache-2.0
"""tessera.jax.dot_product_attention beside jax.nn's: the signature, random calls, their gradients, refusals."""
import inspect

import numpy as np
import pytest
from conftest import assert_close

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from tessera.jax import dot_product_attention  # noqa: E402


def test_the_signature_is_theirs():
    def parameters(function):
        return [(name, p.kind, p.default) for name, p in inspect.signature(function).parameters.items()]
    theirs = parameters(jax.nn.dot_product_attention)
    if len(theirs) == 11:  # before return_residual came
        theirs.append(("return_residual", inspect.Parameter.KEYWORD_ONLY, False))
    assert parameters(dot_product_attention) == theirs


def random_call(rng):
    """q, k, v, options, and which queries see a key."""
    batch, queries, keys, dim = rng.integers(1, 4), rng.integers(1, 20), rng.integers(1, 25), int(rng.choice([4, 8, 24]))
    key_heads = rng.integers(1, 4)
    heads = key_heads * rng.integers(1, 4)
    q, k, v = (rng.standard_normal(s, dtype=np.float32) for s in (
        (batch, queries, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, dim)))
    visible = np.ones((batch, heads, queries, keys), bool)
    i, j = np.arange(queries)[:, None], np.arange(keys)
    options = {}

    def maybe(share=0.4):
        return rng.random() < share

    def smaller(shape):
        return [1 if maybe(0.3) else count for count in shape]
    if maybe():
        options["scale"] = float(rng.choice([0.1, 1.0, -0.3]))
    if maybe():
        options["is_causal"] = True
        visible &= j <= i
    if maybe():
        left, right = (int(x) for x in rng.integers(0, 9, 2))
        options["local_window_size"] = (left, right) if maybe(0.7) else left
        visible &= (i <= j + left) & (i >= j - (right if isinstance(options["local_window_size"], tuple) else left))
    if maybe():
        options["mask"] = rng.random(smaller(visible.shape)) < 0.7
        visible &= options["mask"]
    if maybe():
        shape = *smaller(visible.shape[:3]), keys  # one number for all keys has no gradient but rounding errors
        options["bias"] = rng.standard_normal(shape, dtype=np.float32)
    for name, count in (("query_seq_lengths", queries), ("key_value_seq_lengths", keys)):
        if maybe(0.3):
            lengths = rng.integers(0, count + 1, batch).astype(np.int32)
            options[name] = lengths
            axis = i if name[0] == "q" else j
            visible &= axis < lengths[:, None, None, None]
    return q, k, v, options, visible.any(-1)


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(seed):
    rng = np.random.default_rng(seed)
    q, k, v, options, sees = random_call(rng)
    used = sees.transpose(0, 2, 1)  # queries that see nothing are 0 here, an average there
    weights = rng.standard_normal(q.shape, dtype=np.float32) * used[..., None]

    def loss(function, q, k, v, bias):
        o, residual = function(q, k, v, bias, return_residual=True,
                               **{name: x for name, x in options.items() if name != "bias"})
        assert residual.dtype == jnp.float32 and residual.shape == q.shape[:-1]
        return (o * weights).sum(), (o, residual)

    wanted = (1, 2, 3, 4) if "bias" in options else (1, 2, 3)
    results = []
    for function in (dot_product_attention, jax.nn.dot_product_attention):
        both = jax.jit(jax.value_and_grad(loss, wanted, has_aux=True), static_argnums=0)
        (_, (o, lse)), gradients = both(function, q, k, v, options.get("bias"))
        results.append([np.asarray(o)[used], np.asarray(lse)[used], *map(np.asarray, gradients)])
    for got, expected in zip(*results):
        assert_close(got, expected.astype(np.float64), factor=8)
    o = dot_product_attention(q, k, v, **options)
    assert not np.asarray(o)[~used].any()


def test_without_a_batch_and_inside_jit(rng):
    q, k, v = (jnp.asarray(rng.standard_normal((7, heads, 8)), jnp.bfloat16) for heads in (4, 2, 2))
    mask = jnp.asarray(rng.random((4, 7, 7)) < 0.7).at[..., 0].set(True)
    for function in (dot_product_attention, jax.jit(dot_product_attention, static_argnames="return_residual")):
        o, lse = function(q, k, v, mask=mask, return_residual=True)
        expected, its = jax.nn.dot_product_attention(q, k, v, mask=mask, return_residual=True)
        assert o.shape == expected.shape and lse.shape == its.shape and lse.dtype == its.dtype
        np.testing.assert_allclose(np.asarray(o, np.float32), np.asarray(expected, np.float32), atol=0.03)
        np.testing.assert_allclose(np.asarray(lse, np.float32), np.asarray(its, np.float32), atol=0.03)


def test_lengths_beyond_the_sequence(rng):
    """jax.nn compares positions with them: those beyond hide nothing, those below 0 everything."""
    q, k, v = (jnp.asarray(rng.standard_normal((4, 5, 2, 8)), jnp.float32) for _ in range(3))
    for kind in (np.int32, np.int64):
        lengths = np.array([2**31 - 1 if kind == np.int32 else 2**32 + 1, 5, 2, 6], kind)
        options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths[::-1]}
        theirs = {name: jnp.asarray(x.clip(0, 100), jnp.int32) for name, x in options.items()}
        expected = np.array(jax.nn.dot_product_attention(q, k, v, **theirs))
        for b in range(4):
            expected[b, lengths[b]:] = 0
        assert_close(dot_product_attention(q, k, v, **options), expected, factor=8)
    assert not dot_product_attention(q, k, v, key_value_seq_lengths=np.full(4, -3)).any()


def test_the_residual_has_no_gradient(rng):
    q, k, v = (jnp.asarray(rng.standard_normal((1, 5, 2, 8)), jnp.float32) for _ in range(3))
    gradient = jax.grad(lambda q: dot_product_attention(q, k, v, return_residual=True)[1].sum())(q)
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("change, error, sentence", [
    ({"implementation": "cudnn"}, ValueError, "implementation: is 'cudnn'; must be None"),
    ({"key": np.zeros((1, 5, 3, 8), np.float32)}, ValueError, "value: has 2 heads but key has 3"),
    ({"is_causal": "yes"}, TypeError, "is_causal: "),
    ({"local_window_size": (1, 2, 3)}, TypeError, "local_window_size: "),
    ({"local_window_size": (-1, 0)}, ValueError, r"local_window_size: is \(-1, 0\); must be 0 or more on each side"),
    ({"local_window_size": np.array([-1, 0])}, ValueError, r"local_window_size: is \[-1  0\]; must be 0 or more"),
    ({"local_window_size": (jnp.int32(0), jnp.int32(-1))}, ValueError, r"local_window_size: is .*; must be 0 or more"),
    ({"local_window_size": (1.5, 0)}, TypeError, "local_window_size's left: "),
    ({"query_seq_lengths": np.ones(1, np.float32)}, ValueError, "query_seq_lengths: has type f32"),
    ({"query_seq_lengths": np.zeros(3, np.int32)}, ValueError, "query_seq_lengths: ")])
def test_refusals(change, error, sentence):
    zeros = np.zeros((1, 5, 2, 8), np.float32)
    with pytest.raises(error, match=sentence):
        dot_product_attention(**{"query": zeros, "key": zeros, "value": zeros, **change})
