# SPDX-License-Identifier: Apache-2.0
"""The core with NumPy arrays: results against float64, layouts, options, errors."""
import subprocess
import sys

import numpy as np
import oracle
import pytest
from conftest import assert_close

import tessera

B, NQ, NK, HQ, HK, D, DV = 2, 37, 53, 6, 2, 24, 16


def inputs(rng, dtype=np.float32):
    shapes = (B, NQ, HQ, D), (B, NK, HK, D), (B, NK, HK, DV)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


# Options of the package, and the same in the oracle's words.
OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "top_left": ({"causal": True, "alignment": "top_left"}, {"causal": True, "off": 0}),
    "offset": ({"causal": True, "alignment": 5}, {"causal": True, "off": 5}),
    "window": ({"window": (7, 3)}, {"window": (7, 3)}),
    "left": ({"window": (7, None)}, {"window": (7, -1)}),
    "scale": ({"scale": -0.3}, {"scale": -0.3}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(rng, name):
    ours, theirs = OPTIONS[name]
    q, k, v = inputs(rng)
    o, lse = tessera.attention(q, k, v, return_lse=True, **ours)
    exact_o, exact_lse = oracle.attention(q, k, v, **theirs)
    assert o.dtype == np.float32 and lse.dtype == np.float32
    assert_close(o, exact_o)
    assert_close(lse, exact_lse)


def test_tensor_options(rng):
    q, k, v = inputs(rng)
    slopes = rng.random(HQ).astype(np.float32)
    sinks = rng.standard_normal(HQ).astype(np.float32)
    bias = rng.standard_normal((1, HQ, NQ, NK)).astype(np.float32)
    mask = rng.random((B, 1, NQ, NK)) < 0.7
    mask[:, :, 5] = False
    o, lse = tessera.forward(q, k, v, alibi_slopes=slopes, sinks=sinks, bias=bias, mask=mask)
    exact_o, exact_lse = oracle.attention(q, k, v, slopes=slopes, sinks=sinks, bias=bias, mask=mask)
    assert_close(o, exact_o)
    assert_close(lse, exact_lse)


def test_row_that_sees_no_key(rng):
    q, k, v = inputs(rng)
    o, lse = tessera.forward(q, k[:, :4], v[:, :4], causal=True)
    assert np.all(o[:, :NQ - 4] == 0) and np.all(np.isneginf(lse[:, :, :NQ - 4]))
    assert np.all(np.isfinite(lse[:, :, NQ - 4:]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_types(rng, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = inputs(rng, dtype)
    o, lse = tessera.forward(q, k, v, causal=True)
    assert o.dtype == q.dtype
    exact_o, exact_lse = oracle.attention(q, k, v, causal=True)
    assert_close(o, exact_o, q.dtype.name)
    assert_close(lse, exact_lse, "float64" if q.dtype == np.float64 else "float32")


def test_dropout(rng):
    q, k, v = inputs(rng)
    keep = tessera.dropout_mask((B, HQ, NQ, NK), dropout_p=0.3, seed=11)
    assert 0.6 < keep.mean() < 0.8
    o = tessera.attention(q, k, v, dropout_p=0.3, seed=11)
    assert_close(o, oracle.attention(q, k, v, keep=keep, dropout=0.3)[0])
    from_array = tessera.attention(q, k, v, dropout_p=0.3, rng=np.array([11, 0]))
    np.testing.assert_array_equal(o, from_array)
    with pytest.raises(ValueError, match="seed: is missing"):
        tessera.attention(q, k, v, dropout_p=0.3)


def test_gradients_against_finite_differences(rng):
    q, k, v = inputs(rng, np.float64)
    bias, sinks = rng.standard_normal((1, HQ, NQ, NK)), rng.standard_normal(HQ)
    d_o, d_lse = rng.standard_normal((B, NQ, HQ, DV)), rng.standard_normal((B, HQ, NQ))
    arrays = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}

    def loss(changed):
        x = {**arrays, **changed}
        o, lse = oracle.attention(x["q"], x["k"], x["v"], causal=True, softcap=3.0, bias=x["bias"], sinks=x["sinks"])
        return (o * d_o).sum() + (lse * d_lse).sum()

    o, lse = tessera.forward(q, k, v, causal=True, softcap=3.0, bias=bias, sinks=sinks)
    gradients = tessera.backward(d_o, q, k, v, o, lse, d_lse=d_lse, causal=True, softcap=3.0, bias=bias, sinks=sinks,
                                 gradients=("dq", "dk", "dv", "dbias", "dsinks"))
    for name, array in arrays.items():
        direction, step = rng.standard_normal(array.shape), 1e-5
        slope = (loss({name: array + step * direction}) - loss({name: array - step * direction})) / (2 * step)
        assert np.isclose((getattr(gradients, "d" + name) * direction).sum(), slope, rtol=1e-6), name


def test_gradients_in_f32(rng):
    q, k, v = inputs(rng)
    d_o = rng.standard_normal((B, NQ, HQ, DV)).astype(np.float32)
    exact = [x.astype(np.float64) for x in (d_o, q, k, v)]
    exact += tessera.forward(*exact[1:], window=(9, 2))
    o, lse = tessera.forward(q, k, v, window=(9, 2))
    gradients = tessera.backward(d_o, q, k, v, o, lse, window=(9, 2))
    wanted = tessera.backward(*exact, window=(9, 2))
    assert gradients.dbias is None and gradients.dsinks is None
    for name in ("dq", "dk", "dv"):
        assert getattr(gradients, name).dtype == np.float32
        assert_close(getattr(gradients, name), getattr(wanted, name), factor=2)
    only_v = tessera.backward(d_o, q, k, v, o, lse, window=(9, 2), gradients=["dv"])
    np.testing.assert_array_equal(only_v.dv, gradients.dv)
    assert only_v.dq is None and only_v.dk is None


def test_packed_is_padded(rng):
    q, k, v = inputs(rng)
    lengths_q, lengths_k = np.array([0, 20, NQ], np.int32), np.array([0, 31, NK], np.int32)
    tail = np.full((3, HQ, D), np.nan, np.float32)  # belongs to no sequence
    o, lse = tessera.forward(np.concatenate([q[0], tail]), k[0], v[0], causal=True, cu_seqlens_q=lengths_q,
                             cu_seqlens_k=lengths_k, max_seqlen_q=20, max_seqlen_k=31)
    assert o.shape == (NQ + 3, HQ, DV) and lse.shape == (HQ, NQ + 3)
    for begin, end, k_begin, k_end in ((0, 20, 0, 31), (20, NQ, 31, NK)):
        alone, alone_lse = tessera.forward(q[:1, begin:end], k[:1, k_begin:k_end], v[:1, k_begin:k_end], causal=True)
        np.testing.assert_array_equal(o[begin:end], alone[0])
        np.testing.assert_array_equal(lse[:, begin:end], alone_lse[0])
    assert np.all(o[NQ:] == 0) and np.all(np.isneginf(lse[:, NQ:]))


def test_used_lengths(rng):
    q, k, v = inputs(rng)
    used = np.array([5, 40], np.int32)
    o = tessera.attention(q, k, v, seqused_k=used)
    for b in range(B):
        alone = tessera.attention(q[b:b + 1], k[b:b + 1, :used[b]], v[b:b + 1, :used[b]])
        np.testing.assert_array_equal(o[b], alone[0])


def test_strides(rng):
    q, k, v = inputs(rng)
    heads_first = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)]
    np.testing.assert_array_equal(tessera.attention(*heads_first), tessera.attention(q, k, v))
    every_second = np.repeat(q, 2, axis=1)[:, ::2]
    backwards = np.ascontiguousarray(q[:, ::-1])[:, ::-1]
    for view in (every_second, backwards):
        np.testing.assert_array_equal(tessera.attention(view, k, v), tessera.attention(q, k, v))
    read_only = q.copy()
    read_only.flags.writeable = False
    np.testing.assert_array_equal(tessera.attention(read_only, k, v), tessera.attention(q, k, v))


def test_layout(rng):
    q, k, v = inputs(rng)
    options = {"window": (9, 2), "softcap": 5.0}
    o, lse = tessera.forward(q, k, v, **options)
    gradients = tessera.backward(o, q, k, v, o, lse, **options)
    swap = lambda x: np.ascontiguousarray(x.swapaxes(-3, -2))  # noqa: E731
    heads_first = [swap(x) for x in (q, k, v)]
    swapped_o, swapped_lse = tessera.attention(*heads_first, layout="bhnd", return_lse=True, **options)
    assert swapped_o.shape == (B, HQ, NQ, DV) and swapped_o.flags.c_contiguous
    swapped = tessera.backward(swapped_o, *heads_first, swapped_o, swapped_lse, layout="bhnd", **options)
    np.testing.assert_array_equal(swapped_lse, lse)
    for x, y in zip((swapped_o, *swapped[:3]), (o, *gradients[:3])):
        np.testing.assert_array_equal(swap(x), y)
    ends_q, ends_k = np.array([0, 20, NQ], np.int32), np.array([0, 31, NK], np.int32)
    packed = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    np.testing.assert_array_equal(swap(tessera.attention(*(x[0] for x in heads_first), layout="bhnd", **packed)),
                                  tessera.attention(q[0], k[0], v[0], **packed))
    for backward in (False, True):
        plan = tessera.plan(*heads_first, layout="bhnd", backward=backward)
        assert f"Nq={NQ} Nk={NK} Hq={HQ} Hk={HK}" in plan.description
    with pytest.raises(ValueError, match="layout: is 'nhd'; must be 'bnhd'"):
        tessera.forward(q, k, v, layout="nhd")


def test_merge(rng):
    q, k, v = inputs(rng)
    parts = [tessera.forward(q, k[:, s], v[:, s]) for s in (slice(0, 20), slice(20, NK))]
    o, lse = tessera.merge(parts)
    exact_o, exact_lse = oracle.attention(q, k, v)
    assert_close(o, exact_o)
    assert_close(lse, exact_lse)


def test_zero_sizes(rng):
    q, k, v = inputs(rng)
    o, lse = tessera.forward(q, k[:, :0], v[:, :0])
    assert np.all(o == 0) and np.all(np.isneginf(lse))
    assert tessera.attention(q[:0], k[:0], v[:0]).shape == (0, NQ, HQ, DV)
    assert tessera.attention(q[:, :0], k, v).shape == (B, 0, HQ, DV)


def test_plan_and_info(rng):
    q, k, v = inputs(rng)
    plan = tessera.plan(q, k, v, backward=True, kernel="sse4" if "sse4" in tessera.info() else "reference")
    assert plan.kernel in ("sse4", "reference") and plan.workspace_size >= 0
    assert "backward, cpu, f32, B=2 Nq=37 Nk=53 Hq=6 Hk=2 D=24 Dv=16" in plan.description
    assert "processor" in tessera.info()


def test_plans_are_kept_and_dropped(rng):
    from tessera import _call
    _call.questions.kept.clear()
    often = np.ones((1, 1, 2, 4), np.float32)
    tessera.attention(often, often, often)
    (first,) = _call.questions.kept.values()
    (call,) = first.idle
    for length in range(1, _call.KEPT_QUESTIONS + 10):
        q = np.ones((1, length, 1, 4), np.float32)
        for array in (q, q, often):
            assert_close(tessera.attention(array, array, array), array)
    assert len(_call.questions.kept) == _call.KEPT_QUESTIONS
    assert all(len(question.idle) == 1 for question in _call.questions.kept.values())
    assert first in _call.questions.kept.values() and first.idle == [call]  # what is used is not dropped


ERRORS = [
    (ValueError, r"softcap: is -1; must be 0 \(none\) or a positive number", {"softcap": -1}),
    (ValueError, r"dropout_p: is 2; must be in \[0, 1\)", {"dropout_p": 2, "seed": 1}),
    (ValueError, "kernel: is 'fast'; must be one of", {"kernel": "fast"}),
    (ValueError, "alignment: is 'left'; must be 'bottom_right', 'top_left' or an integer", {"alignment": "left"}),
    (TypeError, "window: is 3; must be a pair", {"window": 3}),
    (TypeError, "window's left: is 1.5; must be an integer", {"window": (1.5, 2)}),
    (TypeError, "scale: is 'big'; must be a number", {"scale": "big"}),
    (TypeError, "is_causal: is no option of attention; it is called causal here", {"is_causal": True}),
    (TypeError, "implementation: is no option of attention; there are causal, alignment,", {"implementation": "xla"}),
    (TypeError, "mask: is a list; must be an array that speaks DLPack", {"mask": [[True]]}),
    (TypeError, "bias: has type complex64; must be one of", {"bias": np.zeros((1, 1, 1, 1), np.complex64)}),
    (ValueError, r"bias: has shape \[1, 1, 1, 1, 1\]; must be \[batch|1, heads|1, queries|1, keys|1\] or \[queries, keys\]",
     {"bias": np.zeros((1, 1, 1, 1, 1), np.float32)}),
    (NotImplementedError, "no kernel can run this: vector: device is cpu", {"kernel": "vector"}),
]


@pytest.mark.parametrize("error, sentence, options", ERRORS, ids=[e[1][:25] for e in ERRORS])
def test_errors(rng, error, sentence, options):
    q, k, v = inputs(rng)
    with pytest.raises(error, match=sentence):
        tessera.attention(q, k, v, **options)


def test_errors_of_arrays(rng):
    q, k, v = inputs(rng)
    with pytest.raises(ValueError, match="k: head_dim is 23 but q has 24; q and k must agree in head_dim"):
        tessera.attention(q, k[..., :-1], v)
    with pytest.raises(ValueError, match="q: has shape .*; expected 4, .batch, tokens, heads, dim."):
        tessera.attention(q[0, 0, 0], k, v)
    with pytest.raises(TypeError, match="byte order"):
        tessera.attention(q.astype(">f4"), k, v)
    with pytest.raises(ValueError, match="gradients: holds 'dbias' but bias is not given"):
        tessera.backward(q, q, k, v, q, q, gradients=["dbias"])
    with pytest.raises(ValueError, match="gradients: holds 'do'"):
        tessera.backward(q, q, k, v, q, q, gradients=["do"])
    with pytest.raises(ValueError, match="partials: is empty"):
        tessera.merge([])


class OnlyDLPack:
    """An array of a library that nobody knows."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None):
        assert stream is None
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack(rng):
    q, k, v = inputs(rng)
    o = tessera.attention(*(OnlyDLPack(x) for x in (q, k.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), v)))
    assert isinstance(o, np.ndarray)
    np.testing.assert_array_equal(o, tessera.attention(q, k, v))


@pytest.mark.parametrize("stream, told", [(0, 1), (0x7f0012345678, 0x7f0012345678)])
def test_dlpack_is_told_the_stream(stream, told):
    """Without a GPU: an array that says it is on one. Its memory is never read."""
    from tessera import _arrays
    heard = []

    class OnGpu(OnlyDLPack):
        def __dlpack__(self, stream=None):
            heard.append(stream)
            return self.array.__dlpack__()

        def __dlpack_device__(self):
            return (2, 3)

    array = np.zeros((2, 3, 4), np.float16)[:, ::2]
    keep = []
    view = _arrays.view("q", OnGpu(array), stream, keep)
    assert heard == [told] and len(keep) == 1
    assert view == (array.ctypes.data, 2, 2, 3, (2, 2, 4), (12, 8, 1))  # f16 on cuda:3
    with pytest.raises(TypeError, match="outputs can be made as torch, cupy or jax arrays"):
        _arrays.maker(OnGpu(array))


@pytest.mark.parametrize("status, error", [(1, ValueError), (2, NotImplementedError), (3, MemoryError),
                                           (4, RuntimeError), (5, RuntimeError)])
def test_statuses(status, error):
    from tessera import _abi
    with pytest.raises(error) as raised:
        _abi.check(status)
    assert type(raised.value) is error
    _abi.check(0)


def test_library_of_another_version_is_refused():
    code = ("import ctypes, tessera._abi as abi\n"
            "abi.Options._fields_\n"
            "class Longer(ctypes.Structure): _fields_ = [*abi.Options._fields_, ('more', ctypes.c_int64)]\n"
            "abi._STRUCTS = {Longer: 'options'}\n"
            "try: abi._read_defaults()\n"
            "except ImportError as error: print(error)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "package and library must be of one version" in done.stdout


def test_needs_nothing_but_numpy(rng):
    """Neither importing the package nor calling it with NumPy arrays imports another framework."""
    code = ("import sys, numpy, tessera\n"
            "x = numpy.ones((1, 2, 1, 4), numpy.float32); tessera.attention(x, x, x)\n"
            "print([m for m in ('torch', 'jax', 'cupy', 'transformers', 'ml_dtypes') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_threads_at_once(rng):
    from concurrent.futures import ThreadPoolExecutor
    q, k, v = inputs(rng)
    scales = [0.1 * n for n in range(1, 17)]
    alone = [tessera.attention(q, k, v, scale=s) for s in scales]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda s: tessera.attention(q, k, v, scale=s), scales * 5))
    for n, result in enumerate(together):
        np.testing.assert_array_equal(result, alone[n % len(scales)])


@pytest.mark.parametrize("dtype, code", [("float64", 0), ("float32", 1), ("float16", 2), ("int32", 6), ("int64", 7),
                                         ("uint8", 8), ("bool", 8), ("int8", 9)])
def test_the_c_abi_takes_what_numpy_exports(dtype, code):
    """tessera_tensor_from_dlpack on a real DLManagedTensor: a sliced, transposed view."""
    import ctypes

    from tessera import _abi, _arrays
    array = np.zeros((4, 6, 8), dtype)[1:, ::2].transpose(2, 0, 1)
    capsule = array.__dlpack__()
    convert = _abi.lib.tessera_tensor_from_dlpack
    convert.argtypes = [ctypes.c_void_p, ctypes.POINTER(_abi.Tensor)]
    view = _abi.Tensor()
    assert convert(_arrays._capsule_pointer(capsule, b"dltensor"), ctypes.byref(view)) == 0
    assert (view.data, view.type, view.ndim) == (array.ctypes.data, code, 3)
    assert tuple(view.shape[:3]) == array.shape == (8, 3, 3)
    assert tuple(view.strides[:3]) == tuple(step // array.itemsize for step in array.strides)
