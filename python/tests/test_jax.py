# SPDX-License-Identifier: Apache-2.0
"""tessera.jax: eager, inside jit, gradients against float64, options, errors. `-m gpu`: the same on CUDA."""
import importlib.util

import numpy as np
import oracle
import pytest
from conftest import assert_close

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import tessera  # noqa: E402
import tessera.jax  # noqa: E402

B, NQ, NK, HQ, HK, D, DV = 2, 37, 53, 6, 2, 24, 16


def gpu():
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("JAX finds no GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    chosen = jax.devices("cpu")[0] if request.param == "cpu" else gpu()
    with jax.default_device(chosen):
        yield chosen


def inputs(rng, device, dtype=jnp.float32):
    shapes = (B, NQ, HQ, D), (B, NK, HK, D), (B, NK, HK, DV)
    return [jax.device_put(jnp.asarray(rng.standard_normal(s), dtype), device) for s in shapes]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_forward(rng, device, dtype, jit):
    q, k, v = inputs(rng, device, dtype)
    function = lambda *x: tessera.attention(*x, causal=True, return_lse=True)  # noqa: E731
    o, lse = (jax.jit(function) if jit else function)(q, k, v)
    exact_o, exact_lse = oracle.attention(*(np.asarray(x, np.float64) for x in (q, k, v)), causal=True)
    assert isinstance(o, jax.Array) and o.dtype == q.dtype and o.devices() == {device}
    assert_close(o, exact_o, dtype)
    assert_close(lse, exact_lse)


@pytest.mark.parametrize("jit", [False, True])
def test_gradients(rng, device, jit):
    q, k, v = inputs(rng, device)
    bias = jnp.asarray(rng.standard_normal((1, HQ, NQ, NK)), jnp.float32)
    sinks = jnp.asarray(rng.standard_normal(HQ), jnp.float32)
    d_o, d_lse = rng.standard_normal((B, NQ, HQ, DV)), rng.standard_normal((B, HQ, NQ))

    def loss(q, k, v, bias, sinks):
        o, lse = tessera.jax.attention(q, k, v, bias=bias, sinks=sinks, window=(9, 4), return_lse=True)
        return (o * jnp.asarray(d_o, jnp.float32)).sum() + (lse * jnp.asarray(d_lse, jnp.float32)).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2, 3, 4))
    ours = (jax.jit(gradient) if jit else gradient)(q, k, v, bias, sinks)
    arrays = [np.asarray(x, np.float64) for x in (q, k, v, bias, sinks)]
    o, lse = tessera.forward(*arrays[:3], bias=arrays[3], sinks=arrays[4], window=(9, 4))
    exact = tessera.backward(d_o, *arrays[:3], o, lse, d_lse=d_lse, bias=arrays[3], sinks=arrays[4], window=(9, 4),
                             gradients=("dq", "dk", "dv", "dbias", "dsinks"))
    for x, y in zip(ours, exact):
        assert_close(x, y, factor=3)


def test_only_wanted_gradients_are_computed(rng, device):
    q, k, v = inputs(rng, device)
    bias = jnp.zeros((1, 1, NQ, NK))
    text = str(jax.make_jaxpr(jax.grad(lambda q: tessera.jax.attention(q, k, v, bias=bias).sum()))(q))
    assert '"outputs": ["dq"]' in text.replace("\\", "")
    assert "d_lse" not in text


def test_padding_and_packing(rng, device):
    q, k, v = inputs(rng, device)
    cu_q, cu_k = jnp.asarray([0, 20, NQ - 2], jnp.int32), jnp.asarray([0, 31, NK], jnp.int32)
    o, lse = jax.jit(lambda q, k, v: tessera.jax.attention(q, k, v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
                                                           return_lse=True))(q[0], k[0], v[0])
    alone = tessera.jax.attention(q[:1, :20], k[:1, :31], v[:1, :31], causal=True)
    np.testing.assert_array_equal(o[:20], alone[0])
    assert np.all(np.asarray(o[-2:]) == 0) and np.all(np.isneginf(lse[:, -2:]))


def test_dropout(rng, device):
    q, k, v = inputs(rng, device)
    words = jnp.asarray([11, 0, 5, 0], jnp.uint32)
    o = jax.jit(lambda r: tessera.jax.attention(q, k, v, dropout_p=0.3, rng=r))(words)
    keep = tessera.dropout_mask((B, HQ, NQ, NK), dropout_p=0.3, seed=11, seed_offset=5)
    assert_close(o, oracle.attention(*(np.asarray(x) for x in (q, k, v)), keep=keep, dropout=0.3)[0])
    np.testing.assert_array_equal(o, tessera.jax.attention(q, k, v, dropout_p=0.3, seed=11, seed_offset=5))


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_dropout_by_keys(rng, device, kind):
    """A key of jax.random is a seed: other keys, other masks; the same inside jit, and in the backward pass."""
    q, k, v = inputs(rng, device)
    drop = lambda key: tessera.jax.attention(q, k, v, dropout_p=0.3, rng=key)  # noqa: E731
    key, other = jax.random.split(jax.random.key(7, impl=kind))
    o = drop(key)
    np.testing.assert_array_equal(jax.jit(drop)(key), o)
    assert not np.array_equal(o, drop(other))
    words = [int(word) for word in jax.random.key_data(key)] + [0, 0]
    seeds = {"seed": words[0] + (words[1] << 32), "seed_offset": words[2] + (words[3] << 32)}
    keep = tessera.dropout_mask((B, HQ, NQ, NK), dropout_p=0.3, **seeds)
    assert_close(o, oracle.attention(*(np.asarray(x) for x in (q, k, v)), keep=keep, dropout=0.3)[0])
    np.testing.assert_array_equal(drop(jax.random.key_data(key)), o)
    gradients = [jax.grad(lambda v, options=options: tessera.jax.attention(q, k, v, dropout_p=0.3, **options).sum())(v)
                 for options in ({"rng": key}, seeds)]
    np.testing.assert_array_equal(*gradients)
    each = jax.vmap(drop)(jnp.stack([key, other]))
    np.testing.assert_array_equal(each[1], drop(other))
    with pytest.raises(ValueError, match=r"rng: has shape \[2\]; must be one key of jax.random"):
        drop(jax.random.split(key))
    for words in (jnp.array([1, 2], jnp.int32), jnp.zeros((3, 2), jnp.uint32), jnp.zeros(3, jnp.uint32), 7, jnp.zeros(2)):
        for call in (drop, jax.jit(drop)):  # the library reads 16 bytes, whatever the array has
            with pytest.raises(ValueError, match=r"rng: is .*; must be a key of jax.random, uint32 \[4\]"):
                call(words)
    with pytest.raises(TypeError, match="seed: is a key of jax.random; pass it as rng"):
        tessera.jax.attention(q, k, v, dropout_p=0.3, seed=key)


def test_gradients_that_nobody_gives_are_refused(rng, device):
    q, k, v = inputs(rng, device)
    slopes = jnp.ones(HQ)
    loss = lambda q, slopes: tessera.jax.attention(q, k, v, alibi_slopes=slopes).sum()  # noqa: E731
    for gradient in (jax.grad(loss, 1), jax.grad(jax.jit(loss), 1), jax.jit(jax.grad(loss, (0, 1)))):
        with pytest.raises(NotImplementedError, match="alibi_slopes: are to be differentiated, but attention gives them "
                                                      "no gradient; pass jax.lax.stop_gradient.alibi_slopes."):
            gradient(q, slopes)
    assert jax.grad(loss)(q, slopes).shape == q.shape
    stopped = jax.grad(lambda s: loss(q, jax.lax.stop_gradient(s)))(slopes)
    np.testing.assert_array_equal(stopped, np.zeros(HQ))


def test_second_derivatives_are_refused(rng, device):
    q, k, v = inputs(rng, device)
    loss = lambda q: tessera.jax.attention(q, k, v).sum()  # noqa: E731
    twice = lambda q: jax.grad(loss)(q).sum()  # noqa: E731
    for function in (jax.grad(twice), jax.jit(jax.grad(twice)), jax.hessian(loss), jax.jacrev(jax.grad(loss))):
        with pytest.raises(NotImplementedError, match="tessera: second derivatives of attention are not there"):
            function(q)


def test_layout(rng, device):
    q, k, v = inputs(rng, device)
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
    o, lse = jax.jit(lambda *x: tessera.attention(*x, layout="bhnd", return_lse=True))(*heads_first)
    expected, expected_lse = tessera.attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(jnp.swapaxes(o, 1, 2), expected)
    np.testing.assert_array_equal(lse, expected_lse)
    gradients = tessera.jax.backward(o, *heads_first, o, lse, layout="bhnd")
    for name, exact in tessera.jax.backward(expected, q, k, v, expected, lse).items():
        np.testing.assert_array_equal(jnp.swapaxes(gradients[name], 1, 2), exact)
    with pytest.raises(ValueError, match="layout: is 'bdhn'; must be"):
        tessera.jax.attention(q, k, v, layout="bdhn")


def test_vmap(rng, device):
    q, k, v = inputs(rng, device)
    stacked = [jnp.stack([x, 2 * x]) for x in (q, k, v)]
    o = jax.vmap(tessera.jax.attention)(*stacked)
    np.testing.assert_array_equal(o[1], tessera.jax.attention(*(x[1] for x in stacked)))


def test_errors(rng, device):
    q, k, v = inputs(rng, device)
    loss = lambda *x: tessera.jax.attention(*x).sum()  # noqa: E731
    for function in (tessera.jax.attention, jax.jit(tessera.jax.attention), jax.grad(loss)):
        with pytest.raises(ValueError, match="k: head_dim is 23 but q has 24; q and k must agree in head_dim"):
            function(q, k[..., :-1], v)
    with pytest.raises(ValueError, match="mask: has type i8; must be bool or uint8"):
        tessera.jax.attention(q, k, v, mask=jnp.ones((1, 1, NQ, NK), jnp.int8))
    with pytest.raises(ValueError, match="kernel: is 'fast'; must be one of"):
        tessera.jax.attention(q, k, v, kernel="fast")
    with pytest.raises(ValueError, match="seed: is missing"):
        tessera.jax.attention(q, k, v, dropout_p=0.5)
    with pytest.raises(ValueError, match="q: has shape"):
        tessera.jax.attention(q[0, 0], k, v)
    for name, instead in (("causal", "name it in jit's static_argnames"), ("scale", "name it in jit's static_argnames"),
                          ("seed", "pass rng, which is an array")):
        with pytest.raises(TypeError, match=f"{name}: is traced; must be known when the call is compiled: {instead}"):
            jax.jit(tessera.jax.attention)(q, k, v, **{name: 1})
    jax.jit(tessera.jax.attention, static_argnames="causal")(q, k, v, causal=True)


def test_export(rng):
    q, k, v = inputs(rng, jax.devices("cpu")[0])
    unchecked = jax.export.DisabledSafetyCheck.custom_call("tessera_attention")
    exported = jax.export.export(jax.jit(tessera.jax.attention), disabled_checks=[unchecked])(q, k, v)
    np.testing.assert_array_equal(exported.call(q, k, v), tessera.jax.attention(q, k, v))


def test_errors_of_the_handler(rng):
    """What only running can tell reaches XLA: lengths are read then."""
    q, k, v = inputs(rng, jax.devices("cpu")[0])
    used = jnp.asarray([NK + 1, 3], jnp.int32)
    with pytest.raises(Exception, match="seqused_k: entry 0 is 54; must be from 0 to the sequence's length 53"):
        jax.block_until_ready(tessera.jax.attention(q, k, v, seqused_k=used))


def test_dlpack(rng):
    """The core takes JAX arrays on the CPU as they are, and makes its results in JAX."""
    q, k, v = inputs(rng, jax.devices("cpu")[0])
    o, lse = tessera.forward(q, k, v, causal=True)
    assert isinstance(o, jax.Array)
    np.testing.assert_array_equal(o, tessera.jax.attention(q, k, v, causal=True))
    gradients = tessera.backward(o, q, k, v, o, lse, causal=True)
    _, pull = jax.vjp(lambda *x: tessera.jax.attention(*x, causal=True), q, k, v)
    for x, y in zip(gradients, pull(o)):
        np.testing.assert_array_equal(x, y)


def test_status_of_pages():
    """A word of NumPy's is written by eager calls on the CPU; nothing of JAX's is, nor anything inside jit."""
    with jax.default_device(jax.devices("cpu")[0]):
        q, pool = jnp.ones((1, 1, 2, 8)), jnp.ones((2, 4, 2, 8))
        paged = {"seqused_k": jnp.array([4], jnp.int32), "block_table": jnp.array([[2]], jnp.int32)}
    status = np.zeros(1, np.int32)
    for word in (jnp.zeros(1, jnp.int32), status):
        with pytest.raises(ValueError, match="status: cannot be written; must be a writable array"):
            jax.jit(lambda q: tessera.forward(q, pool, pool, **paged, status=word))(q)
    with pytest.raises(ValueError, match="status: cannot be written; must be a writable array"):
        tessera.forward(q, pool, pool, **paged, status=jnp.zeros(1, jnp.int32))
    assert status[0] == 0
    tessera.forward(q, pool, pool, **paged, status=status)
    assert status[0] == tessera.PAGE_OUTSIDE_POOL


def test_core_by_the_ffi(rng, device):
    """The core hands arrays on a GPU, and what there is inside jit, to XLA."""
    q, k, v = inputs(rng, device)
    bias = jnp.asarray(rng.standard_normal((1, HQ, NQ, NK)), jnp.float32)
    forward = jax.jit(lambda *x: tessera.forward(*x, bias=bias, causal=True))
    backward = jax.jit(lambda *x: tessera.backward(*x, bias=bias, causal=True, gradients=("dq", "dbias")))
    o, lse = forward(q, k, v)
    gradients = backward(o, q, k, v, o, lse)
    exact_o, exact_lse = tessera.forward(q, k, v, bias=bias, causal=True)
    exact = tessera.backward(o, q, k, v, o, lse, bias=bias, causal=True, gradients=("dq", "dbias"))
    assert gradients.dk is None and gradients.dv is None and gradients.dsinks is None
    for x, y in ((o, exact_o), (lse, exact_lse), (gradients.dq, exact.dq), (gradients.dbias, exact.dbias)):
        assert isinstance(y, jax.Array) and y.devices() == {device}
        np.testing.assert_array_equal(x, y)
    assert "D=24 Dv=16" in tessera.plan(q, k, v, causal=True).description
    with pytest.raises(ValueError, match="stream: is 7; JAX runs its calls on streams of its own"):
        jax.jit(lambda q: tessera.forward(q, k, v, stream=7))(q)
    with pytest.raises(ValueError, match="gradients: holds 'dsinks' but sinks is not given"):
        tessera.backward(o, q, k, v, o, lse, gradients=("dsinks",))


def test_hostile_values(rng):
    from tessera.jax import attention, backward
    q, k, v = inputs(rng, jax.devices("cpu")[0])
    o, lse = tessera.forward(q, k, v)
    once = backward(o, q, k, v, o, lse, gradients=(name for name in ("dq", "dv")))
    assert set(once) == {"dq", "dv"}
    with pytest.raises(ValueError, match="gradients: holds 'dx'; must be of dq, dk, dv, dbias, dsinks"):
        backward(o, q, k, v, o, lse, gradients=["dx"])
    with pytest.raises(ValueError, match="window's left: is 18446744073709551619; must be an integer of 64 bits"):
        jax.jit(lambda q: attention(q, k, v, window=(2**64 + 3, -1)))(q)
    with pytest.raises(ValueError, match="kernel: is .*; must not hold the character of code 0"):
        attention(q, k, v, kernel="reference\0junk")


@pytest.mark.parametrize("runtime, told", [(None, (0, 1)), ((0, 1), (0, 1)), ((0, 4), (0, 4)), ((0, 9), (0, 4)),
                                           ((1, 0), (0, 4))])
def test_version_of_the_ffi(runtime, told):
    """XLA asks for it when a handler is registered, and refuses one that was written for another API."""
    import ctypes

    from tessera import _xla_ffi
    api = None  # of jaxlib 0.7, with version 0.1, when it asks
    if runtime is not None:
        version = _xla_ffi._Version(major=runtime[0], minor=runtime[1])
        api = ctypes.pointer(_xla_ffi._Api(version=version))
    metadata = _xla_ffi._Metadata()
    extension = _xla_ffi._MetadataExtension(_xla_ffi._Extension(type=1), ctypes.pointer(metadata))
    frame = _xla_ffi._Frame(api=api, extension=ctypes.addressof(extension))
    assert tessera.jax._HANDLERS["cpu"](ctypes.pointer(frame)) is None
    assert (metadata.version.major, metadata.version.minor) == told


def test_old_versions_are_refused(monkeypatch):
    """When the module is imported, in a sentence, and not by what JAX lacks in the first call."""
    monkeypatch.setattr(jax, "__version_info__", (0, 6, 2))
    monkeypatch.setattr(jax, "__version__", "0.6.2")
    spec = importlib.util.spec_from_file_location("tessera.old_jax", tessera.jax.__file__)
    with pytest.raises(ImportError, match=r"^tessera\.jax: JAX is 0\.6\.2; must be 0\.7 or later"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_many_calls_share_plans(rng):
    from tessera import _call
    plans = lambda: [call for question in _call.questions.kept.values() for call in question.idle]  # noqa: E731
    q, k, v = inputs(rng, jax.devices("cpu")[0])
    function = jax.jit(lambda q, k, v: tessera.jax.attention(q, k, v))
    function(q, k, v).block_until_ready()
    before = sorted(map(id, plans()))
    for _ in range(20):
        function(q, k, v).block_until_ready()
    assert sorted(map(id, plans())) == before
