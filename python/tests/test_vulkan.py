# SPDX-License-Identifier: Apache-2.0
"""device="vulkan": NumPy arrays in and out, computed on the first Vulkan device. Skipped, visibly, without one."""
import ctypes

import numpy as np
import oracle
import pytest
import tessera
from conftest import assert_close
from tessera import _abi

_count = ctypes.c_int32()
MISSING = "" if _abi.lib.tessera_vulkan_device_count(ctypes.byref(_count)) == 0 else "there is no Vulkan device"
needs_vulkan = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@needs_vulkan
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_both_passes(rng, dtype):
    q = rng.standard_normal((2, 37, 4, 40)).astype(dtype)
    k, v = (rng.standard_normal((2, 50, 2, 40)).astype(dtype)[:, ::-1] for _ in range(2))  # negative strides
    o, lse = tessera.forward(q, k, v, causal=True, device="vulkan")
    exact_o, exact_lse = oracle.attention(q, k, v, causal=True)
    assert_close(o, exact_o, dtype)
    assert_close(lse, exact_lse)
    np.testing.assert_array_equal(tessera.attention(q, k, v, causal=True, device="vulkan"), o)
    d_o = rng.standard_normal(o.shape).astype(dtype)
    ours = tessera.backward(d_o, q, k, v, o, lse, causal=True, device="vulkan")
    cpu = tessera.backward(d_o, q, k, v, o, lse, causal=True)
    for name in ("dq", "dk", "dv"):
        assert_close(getattr(ours, name), getattr(cpu, name), dtype, 2.0)
    assert ours.dbias is None


@needs_vulkan
def test_refusals_of_the_library(rng):
    q = rng.standard_normal((1, 8, 1, 300)).astype(np.float32)
    with pytest.raises(Exception, match="Vulkan kernels take up to 256"):
        tessera.forward(q, q, q, device="vulkan")


def test_refusals(rng):
    q = rng.standard_normal((1, 8, 1, 16)).astype(np.float32)
    with pytest.raises(ValueError, match="device: is 'metal'; must be None, which is where the arrays are, or 'vulkan'"):
        tessera.forward(q, q, q, device="metal")
    with pytest.raises(ValueError, match="stream: is 5; a call with device='vulkan' returns when its work is done"):
        tessera.forward(q, q, q, device="vulkan", stream=5)
