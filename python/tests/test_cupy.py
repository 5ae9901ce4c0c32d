# SPDX-License-Identifier: Apache-2.0
"""CuPy arrays: on a GPU with CuPy itself; elsewhere a stand-in with its interface, whose memory is the CPU's."""
import contextlib
import sys
import types

import numpy as np
import oracle
import pytest
from conftest import assert_close

import tessera

B, NQ, NK, HQ, HK, D = 2, 37, 53, 6, 2, 32


def inputs(rng, dtype=np.float32):
    return [rng.standard_normal(s).astype(dtype) for s in ((B, NQ, HQ, D), (B, NK, HK, D), (B, NK, HK, D))]


class Device:
    """cupy.cuda.Device, as far as it is used."""
    id = 0

    def __init__(self):
        self.entered = 0

    def __enter__(self):
        self.entered += 1

    def __exit__(self, *error):
        pass


class Array:
    """cupy.ndarray, as far as it is used. Says that it is on the CPU, so that the call runs."""
    device = Device()
    heard = []

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None):
        Array.heard.append(stream)
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


Array.__module__ = "cupy"


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("cupy")
    module.streams = []

    @contextlib.contextmanager
    def external(pointer, device_id):
        module.streams.append((pointer, device_id))
        yield

    module.empty = lambda shape, dtype: Array(np.empty(shape, dtype))
    module.full = lambda shape, value, dtype: Array(np.full(shape, value, dtype))
    module.cuda = types.SimpleNamespace(get_current_stream=lambda device_id: types.SimpleNamespace(ptr=device_id + 77),
                                        ExternalStream=external)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize("stream", [None, 5])
def test_stand_in(rng, stand_in, stream):
    q, k, v = inputs(rng)
    before = Array.device.entered
    o, lse = tessera.forward(*(Array(x) for x in (q, k, v)), causal=True, stream=stream)
    assert isinstance(o, Array) and isinstance(lse, Array) and Array.device.entered == before + 2
    assert stand_in.streams == ([] if stream is None else [(5, 0)] * 2)
    exact_o, exact_lse = oracle.attention(q, k, v, causal=True)
    assert_close(o.array, exact_o)
    assert_close(lse.array, exact_lse)
    gradients = tessera.backward(o, *(Array(x) for x in (q, k, v)), o, lse, causal=True, stream=stream)
    wanted = tessera.backward(o.array, q, k, v, o.array, lse.array, causal=True)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(gradients, name).array, getattr(wanted, name))


def test_stand_in_with_padding(rng, stand_in):
    q, k, v = (Array(x[0]) for x in inputs(rng))
    ends_q, ends_k = (Array(np.array(ends, np.int32)) for ends in ([0, 20, NQ - 3], [0, 31, NK]))
    o, lse = tessera.forward(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    assert np.all(o.array[-3:] == 0) and np.all(np.isneginf(lse.array[:, -3:]))


def test_stand_in_current_stream(stand_in):
    from tessera import _arrays
    assert _arrays.maker(Array(np.zeros(1))).stream == 77
    assert _arrays.maker(Array(np.zeros(1)), stream=9).stream == 9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("side", [False, True])
def test_cupy(rng, dtype, side):
    cupy = pytest.importorskip("cupy")
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    host = inputs(rng, kind)
    stream = cupy.cuda.Stream(non_blocking=True) if side else cupy.cuda.Stream.null
    with stream:
        q, k, v = (cupy.asarray(x) for x in host)
        o, lse = tessera.forward(q, k, v, causal=True)
        assert isinstance(o, cupy.ndarray) and o.dtype == q.dtype
        gradients = tessera.backward(o, q, k, v, o, lse, causal=True)
    stream.synchronize()
    exact_o, exact_lse = oracle.attention(*host, causal=True)
    assert_close(cupy.asnumpy(o), exact_o, dtype)
    assert_close(cupy.asnumpy(lse), exact_lse)
    wide = [x.astype(np.float64) for x in host]
    d_o = cupy.asnumpy(o).astype(np.float64)
    wanted = tessera.backward(d_o, *wide, *tessera.forward(*wide, causal=True), causal=True)
    for name in ("dq", "dk", "dv"):
        assert_close(cupy.asnumpy(getattr(gradients, name)), getattr(wanted, name), dtype, factor=3)


@pytest.mark.gpu
def test_cupy_on_a_given_stream(rng):
    cupy = pytest.importorskip("cupy")
    host = inputs(rng)
    q, k, v = (cupy.asarray(x) for x in host)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    o, _ = tessera.forward(q, k, v, stream=stream.ptr)
    stream.synchronize()
    assert_close(cupy.asnumpy(o), oracle.attention(*host)[0])
