# SPDX-License-Identifier: Apache-2.0
"""What a user of a wheel does first: forward, backward, packed sequences, a refusal, and the drop-in for PyTorch.

Run by wheel_test.py in an environment that holds the wheel, NumPy and perhaps PyTorch, by `python -I`, so that nothing
of the tree is seen. Results are compared with the plain formulas in float64.
"""
import importlib.util
import platform
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import tessera

B, NQ, NK, H, HK, D = 2, 37, 53, 4, 2, 24
TOLERANCE = 2e-5  # of f32 results of this size


def formulas(q, k, v, d_o):
    """(O, dQ, dK, dV) of causal attention aligned at the end, heads sharing keys, in float64: docs/algorithm.md."""
    q, k, v, d_o = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v, d_o))
    group = q.shape[1] // k.shape[1]
    shared = [np.repeat(x, group, axis=1) for x in (k, v)]
    nq, nk = q.shape[2], k.shape[2]
    scale = q.shape[3] ** -0.5
    s = q @ shared[0].swapaxes(2, 3) * scale
    s[..., np.arange(nk)[None, :] > np.arange(nq)[:, None] + nk - nq] = -np.inf
    p = np.exp(s - s.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    o = p @ shared[1]
    ds = p * (d_o @ shared[1].swapaxes(2, 3) - (d_o * o).sum(axis=3, keepdims=True))
    over_group = lambda x: x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)
    results = o, ds @ shared[0] * scale, over_group(ds.swapaxes(2, 3) @ q * scale), over_group(p.swapaxes(2, 3) @ d_o)
    return [x.transpose(0, 2, 1, 3) for x in results]


def near(name, result, expected):
    error = np.abs(np.asarray(result, np.float64) - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, f"{name}: is off by {error:.2g} of its largest value"
    return error


def tensors(seed):
    random = np.random.default_rng(seed)
    return [random.standard_normal((B, n, h, D), dtype=np.float32) for n, h in [(NQ, H), (NK, HK), (NK, HK), (NQ, H)]]


def with_numpy():
    q, k, v, d_o = tensors(1)
    expected = formulas(q, k, v, d_o)
    o, lse = tessera.forward(q, k, v, causal=True, alignment="bottom_right")
    gradients = tessera.backward(d_o, q, k, v, o, lse, causal=True, alignment="bottom_right")
    worst = max(near(name, x, e) for name, x, e in
                zip(["o", "dq", "dk", "dv"], [o, gradients.dq, gradients.dk, gradients.dv], expected))
    # The same sequences, end to end.
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    starts = {"cu_seqlens_q": np.arange(B + 1, dtype=np.int32) * NQ, "cu_seqlens_k": np.arange(B + 1, dtype=np.int32) * NK}
    o_packed = tessera.attention(*packed, causal=True, alignment="bottom_right", **starts)
    assert (o_packed == o.reshape(o_packed.shape)).all(), "packed sequences: not the bits of padded ones"
    try:
        tessera.attention(q, k, v, softcap=-1.0)
    except ValueError as error:
        assert str(error).startswith("softcap: is -1"), error
    else:
        raise AssertionError("softcap=-1 was not refused")
    print(f"NumPy {np.__version__}: forward, backward, packed, refusal ok; largest error {worst:.1e}")


def with_torch():
    import torch
    import tessera.torch
    q, k, v, d_o = (torch.from_numpy(x).transpose(1, 2) for x in tensors(2))
    results = []
    for function in (torch.nn.functional.scaled_dot_product_attention, tessera.torch.scaled_dot_product_attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = function(*leaves, is_causal=True, enable_gqa=True)
        o.backward(d_o)
        results.append([o.detach(), *(x.grad for x in leaves)])
    worst = max(near(name, ours, theirs.double().numpy()) for name, theirs, ours in zip(["o", "dq", "dk", "dv"], *results))
    print(f"PyTorch {torch.__version__}: scaled_dot_product_attention and its gradients ok; largest difference {worst:.1e}")


def main():
    compilers = [name for name in ("cc", "c++", "gcc", "g++", "clang", "nvcc", "cmake", "ninja") if shutil.which(name)]
    assert not compilers, f"this environment has {compilers}"
    folder = Path(tessera.__file__).resolve().parent
    assert folder.is_relative_to(sysconfig.get_path("platlib")), f"{folder} is not the installed package"
    with_numpy()
    if importlib.util.find_spec("torch"):
        with_torch()
    print(f"Python {platform.python_version()}, no compiler on the PATH: ok")


main()
