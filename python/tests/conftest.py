# SPDX-License-Identifier: Apache-2.0
"""What the tests share: tolerances, random arrays, and skipping without a GPU, visibly."""
import os

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves PyTorch room on the GPU
# What torch.compile keeps on disk is found by operators' names, whatever has become of their arguments since.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

# Four devices of JAX's on the CPU, so that arrays can be divided among them.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2, "float64": 1e-12}


def relative_error(x, exact):
    x, exact = np.asarray(x, np.float64), np.asarray(exact, np.float64)
    size = np.linalg.norm(exact)
    return float(np.linalg.norm(x - exact) / (size if size else 1))


def assert_close(x, exact, dtype="float32", factor=1.0):
    x, exact = np.asarray(x, np.float64), np.asarray(exact, np.float64)
    assert x.shape == exact.shape
    infinite = np.isinf(exact)
    np.testing.assert_array_equal(x[infinite], exact[infinite])
    error = relative_error(np.where(infinite, 0, x), np.where(infinite, 0, exact))
    assert error <= factor * TOLERANCES[dtype], f"relative error {error:.2e}"


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def gpu_missing():
    """Why there are no CUDA tensors here, or ''."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    return "" if torch.cuda.is_available() else "PyTorch finds no GPU"


def pytest_collection_modifyitems(items):
    missing = gpu_missing() if any("gpu" in item.keywords for item in items) else ""
    for item in items:
        if missing and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=missing))
