# SPDX-License-Identifier: Apache-2.0
"""append from Python: NumPy's arrays, PyTorch's operator with its fake implementation, and what each refuses."""
import numpy as np
import pytest

import tessera

B, N, HK, HQ, D, P = 2, 3, 2, 4, 16, 4
LENGTHS = np.array([7, 3], np.int32)  # the new tokens counted
TABLE = np.array([[4, 0, 9], [2, 1, 9]], np.int32)


def tokens(rng, dtype=np.float32):
    return [rng.standard_normal((B, N, heads, D)).astype(dtype) for heads in (HK, HK, HQ)]


def angles(rng):
    angle = rng.uniform(0, 6.28, (20, D // 4)).astype(np.float32)
    return np.cos(angle), np.sin(angle)


def turned(x, places, cos, sin, interleaved):
    """Rotation of the first dims, as complex numbers in float64; places [B,N]."""
    x, half = x.astype(np.float64), cos.shape[1]
    first = x[..., 0:2 * half:2] if interleaved else x[..., :half]
    second = x[..., 1:2 * half:2] if interleaved else x[..., half:2 * half]
    z = (first + 1j * second) * (cos.astype(np.float64) + 1j * sin)[places][:, :, None]
    if interleaved:
        x[..., 0:2 * half:2], x[..., 1:2 * half:2] = z.real, z.imag
    else:
        x[..., :half], x[..., half:2 * half] = z.real, z.imag
    return x


@pytest.mark.parametrize("interleaved", [False, True])
def test_numpy_arrays(rng, interleaved):
    k_new, v_new, q = tokens(rng)
    cos, sin = angles(rng)
    k, v = np.full((2, 5, P, HK, D), np.nan, np.float16)
    status = np.zeros(1, np.int32)
    q_out = tessera.append(k_new, v_new, k, v, seqused_k=LENGTHS, block_table=TABLE, rotary_cos=cos, rotary_sin=sin,
                           interleaved=interleaved, q=q, status=status)
    places = LENGTHS[:, None] - N + np.arange(N)
    pages = np.take_along_axis(TABLE, places // P, 1), places % P
    np.testing.assert_allclose(k[pages], turned(k_new, places, cos, sin, interleaved), rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(v[pages], v_new.astype(np.float16))
    np.testing.assert_allclose(q_out, turned(q, places, cos, sin, interleaved), rtol=1e-5, atol=1e-5)
    assert np.isnan(k).sum() == k.size - B * N * HK * D and status[0] == 0


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots(rng, dtype):
    k_new, v_new, _ = tokens(rng)
    k_new, v_new = k_new.reshape(-1, HK, D), v_new.reshape(-1, HK, D)
    k, v = np.zeros((2, 5, P, HK, D), np.float32)
    slots, status = np.array([3, -1, 19, 0, 20, 7], dtype), np.zeros(1, np.int32)
    assert tessera.append(k_new, v_new, k, v, slots=slots, status=status) is None
    stored = k.reshape(-1, HK, D)
    for token, slot in enumerate(slots):
        if 0 <= slot < 20:
            np.testing.assert_array_equal(stored[slot], k_new[token])
    assert np.count_nonzero(stored.any((1, 2))) == 4
    assert status[0] == tessera.PAGE_OUTSIDE_POOL  # slot 20


def test_lengths_of_other_types_and_rows_in_other_orders(rng):
    k_new, v_new, _ = tokens(rng)
    expected, found = (np.zeros((2, 5, P, HK, D), np.float32) for _ in range(2))
    tessera.append(k_new, v_new, *expected, seqused_k=LENGTHS, block_table=TABLE)
    tessera.append(np.asfortranarray(k_new), v_new, *found, seqused_k=LENGTHS.astype(np.int64),
                   block_table=TABLE.astype(np.int16))
    np.testing.assert_array_equal(found, expected)


def test_eight_bits_of_numpy(rng):
    k_new, v_new, q = tokens(rng)
    k, v = np.zeros((2, 5, P, HK, D), np.int8)
    k_scale, v_scale = np.zeros((2, 5, P, HK), np.float32)
    tessera.append(k_new, v_new, k, v, seqused_k=LENGTHS, block_table=TABLE, k_scale=k_scale, v_scale=v_scale)
    places = LENGTHS[:, None] - N + np.arange(N)
    pages = np.take_along_axis(TABLE, places // P, 1), places % P
    np.testing.assert_allclose(k_scale[pages], np.abs(k_new).max(-1) / 127, rtol=1e-6)
    np.testing.assert_allclose(k[pages] * k_scale[pages][..., None], k_new, atol=0.02)
    o = tessera.attention(q, k, v, block_table=TABLE, seqused_k=LENGTHS, k_scale=k_scale, v_scale=v_scale)
    wide_k, wide_v = k * k_scale[..., None], v * v_scale[..., None]
    np.testing.assert_allclose(o, tessera.attention(q, wide_k, wide_v, block_table=TABLE, seqused_k=LENGTHS), atol=1e-5)


def test_then_attention_over_the_pages(rng):
    k_new, v_new, q = tokens(rng)
    k, v = np.full((2, 5, P, HK, D), np.nan, np.float32)
    before = LENGTHS - N
    for step in range(N):
        tessera.append(k_new[:, step:step + 1], v_new[:, step:step + 1], k, v, seqused_k=np.array([step + 1] * 2, np.int32),
                       block_table=TABLE)
    o = tessera.attention(q, k, v, causal=True, block_table=TABLE, seqused_k=np.array([N, N], np.int32))
    np.testing.assert_array_equal(o, tessera.attention(q, k_new, v_new, causal=True))
    assert (before >= 0).all()


def test_refusals(rng):
    k_new, v_new, _ = tokens(rng)
    k, v = np.zeros((2, 5, P, HK, D), np.float32)
    frozen = k.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="k: cannot be written"):
        tessera.append(k_new, v_new, frozen, v, seqused_k=LENGTHS, block_table=TABLE)
    with pytest.raises(ValueError, match="seqused_k: entry 1 is 2 but the sequence has 3 new tokens; it must count them"):
        tessera.append(k_new, v_new, k, v, seqused_k=np.array([7, 2], np.int32), block_table=TABLE)
    with pytest.raises(TypeError, match="threads: is 'two'"):
        tessera.append(k_new, v_new, k, v, seqused_k=LENGTHS, block_table=TABLE, threads="two")
    assert not k.any() and not v.any()


def test_jax_arrays_cannot_be_written(rng):
    jax = pytest.importorskip("jax")
    k_new, v_new, _ = tokens(rng)
    cache = jax.numpy.zeros((5, P, HK, D))
    with pytest.raises(ValueError, match="k: cannot be written"):
        tessera.append(k_new, v_new, cache, np.zeros((5, P, HK, D), np.float32), seqused_k=LENGTHS, block_table=TABLE)


# --- PyTorch ---------------------------------------------------------------------------------------------------------

def torch_arguments(rng, rotary=True):
    import torch
    k_new, v_new, q = map(torch.from_numpy, tokens(rng))
    cos, sin = map(torch.from_numpy, angles(rng))
    k, v = torch.zeros(2, 5, P, HK, D)
    given = {"k_new": k_new, "v_new": v_new, "k": k, "v": v, "seqused_k": torch.from_numpy(LENGTHS),
             "block_table": torch.from_numpy(TABLE)}
    return {**given, "rotary_cos": cos, "rotary_sin": sin, "q": q} if rotary else given


def test_torch_is_the_same_call(rng):
    torch = pytest.importorskip("torch")
    given = torch_arguments(rng)
    version = given["k"]._version
    rotated = tessera.append(**given)
    arrays = {name: t.numpy() for name, t in given.items()}
    arrays["k"], arrays["v"] = np.zeros((2, 5, P, HK, D), np.float32)
    np.testing.assert_array_equal(rotated.numpy(), tessera.append(**arrays))
    np.testing.assert_array_equal(given["k"].numpy(), arrays["k"])
    assert given["k"]._version > version, "autograd must see that the cache has changed"
    assert isinstance(rotated, torch.Tensor)


def test_opcheck(rng):
    torch = pytest.importorskip("torch")
    import tessera.torch  # noqa: F401  the operator
    given = torch_arguments(rng)
    given["q_out"] = torch.zeros_like(given["q"])
    torch.library.opcheck(torch.ops.tessera.append.default, (), given)


def test_compiles_without_a_break(rng):
    torch = pytest.importorskip("torch")
    import tessera.torch

    def step(q, k_new, v_new, k, v, seqused_k, block_table, rotary_cos, rotary_sin):
        q = tessera.torch.append(k_new, v_new, k, v, seqused_k=seqused_k, block_table=block_table, q=q,
                                 rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        return tessera.torch.attention(q, k, v, causal=True, seqused_k=seqused_k, block_table=block_table)

    given = torch_arguments(rng)
    eager = {**given, "k": given["k"].clone(), "v": given["v"].clone()}
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(**given)
    assert torch.equal(compiled, step(**eager))
    assert torch.equal(given["k"], eager["k"]) and given["k"].any()


def test_no_tokens_whose_rows_have_no_step(rng):
    """Without numbers they are contiguous to PyTorch, whatever their strides."""
    torch = pytest.importorskip("torch")
    import tessera.torch
    given = torch_arguments(rng)
    none = torch.zeros(given["k_new"].shape[0], 0, HK, 1).expand(-1, -1, -1, D)
    assert none.stride(-1) == 0 and none.is_contiguous()
    tessera.torch.append(none, none, given["k"], given["v"], seqused_k=given["seqused_k"], block_table=given["block_table"])
    assert not given["k"].any() and tessera.forward(none, none, none)[0].shape == none.shape


def test_torch_refusals(rng):
    torch = pytest.importorskip("torch")
    import tessera.torch
    given = torch_arguments(rng, rotary=False)
    for name, changed, error, message in (
            ("k_new", given["k_new"].numpy(), TypeError, "k_new: is a ndarray; must be a PyTorch tensor"),
            ("k_cache", given["k"], TypeError, "k_cache: is no argument of append"),
            ("k", given["k"].clone().requires_grad_(), ValueError, "k: requires a gradient"),
            ("seqused_k", given["seqused_k"].float(), ValueError, "seqused_k: has type f32; must be i32"),
            ("v", given["v"].to("meta"), (ValueError, TypeError), "v: is on meta")):
        with pytest.raises(error, match=message):
            tessera.torch.append(**{**given, name: changed})
    with torch.inference_mode():
        of_inference = torch.zeros(5, P, HK, D)
    with pytest.raises(ValueError, match="v: is a tensor of inference mode"):
        tessera.torch.append(**{**given, "v": of_inference})
    assert not given["k"].any()
