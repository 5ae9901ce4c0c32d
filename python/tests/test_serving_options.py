# SPDX-License-Identifier: Apache-2.0
"""qv, tree_mask, positions and scales of every form, from NumPy, PyTorch and JAX, contiguous and in pages: against
float64, against each other bit by bit, in torch.compile, and what is refused."""
import numpy as np
import pytest

import tessera
from conftest import assert_close
from oracle import attention as exact

B, NQ, NK, HQ, HK, D, DV, P = 2, 5, 37, 4, 2, 16, 24, 8
LENGTHS = np.array([37, 20], np.int32)


@pytest.fixture
def tensors(rng):
    return {name: rng.standard_normal(shape, np.float32) for name, shape in
            {"q": (B, NQ, HQ, D), "k": (B, NK, HK, D), "v": (B, NK, HK, DV), "qv": (B, NQ, HQ, DV)}.items()}


def random_tree(rng):
    """Token t descends from one before it: it sees itself, its ancestors, nothing else of the tree."""
    tree = np.zeros((B, NQ, NQ), bool)
    for b in range(B):
        for t in range(NQ):
            if t:
                tree[b, t] = tree[b, rng.integers(t)]
            tree[b, t, t] = True
    return tree


def words_of(tree):
    return (tree * (1 << np.arange(tree.shape[-1]))).sum(-1, keepdims=True).astype(np.int32)


def second_product(tensors, n, b, **options):
    """q.k + qv.v as one product over D + Dv dims, in float64, of the first n keys of sequence b."""
    q = np.concatenate([tensors["q"], tensors["qv"]], -1)[b:b + 1]
    k = np.concatenate([tensors["k"], tensors["v"]], -1)[b:b + 1, :n]
    return exact(q, k, tensors["v"][b:b + 1, :n], **options)


def in_pages(rng, *arrays):
    """Pools of shuffled pages, NaN (of integers, 99) where no key lies, and their table."""
    entries = -(-NK // P)
    table = rng.permutation(B * entries + 3)[:B * entries].reshape(B, entries).astype(np.int32)
    pools = []
    for x in arrays:
        pool = np.full((B * entries + 3, P, *x.shape[2:]), np.nan if x.dtype.kind == "f" else 99, x.dtype)
        for b, n in enumerate(LENGTHS):
            for j in range(n):
                pool[table[b, j // P], j % P] = x[b, j]
        pools.append(pool)
    return *pools, table


def test_qv_agrees_with_float64(tensors, rng):
    options = {"causal": True, "seqused_k": LENGTHS}
    o, lse = tessera.forward(**tensors, **options)
    for b, n in enumerate(LENGTHS):
        wanted = second_product(tensors, n, b, causal=True)
        assert_close(o[b], wanted[0][0])
        assert_close(lse[b], wanted[1][0])
    k, v, table = in_pages(rng, tensors["k"], tensors["v"])
    paged = tessera.forward(tensors["q"], k, v, qv=tensors["qv"], block_table=table, **options)
    for x, y in zip((o, lse), paged):
        np.testing.assert_array_equal(x, y)
    swapped = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in tensors.items()}
    np.testing.assert_array_equal(o, tessera.attention(**swapped, layout="bhnd", **options).swapaxes(1, 2))
    fortran = {**tensors, "qv": np.asfortranarray(tensors["qv"])}
    np.testing.assert_array_equal(o, tessera.attention(**fortran, **options))


def test_trees_agree_with_masks(tensors, rng):
    del tensors["qv"]
    tree = random_tree(rng)
    mask = np.ones((B, 1, NQ, NK), bool)
    for b, n in enumerate(LENGTHS):
        mask[b, 0, :, n - NQ:n] = tree[b]
    o = tessera.attention(**tensors, tree_mask=words_of(tree), seqused_k=LENGTHS)
    for b, n in enumerate(LENGTHS):
        one = (tensors[name][b:b + 1] for name in "qkv")
        q, k, v = (x if x.shape[1] == NQ else x[:, :n] for x in one)
        assert_close(o[b], exact(q, k, v, mask=mask[b:b + 1, :, :, :n])[0][0])
    for same in (tree, words_of(tree).view(np.uint32)):
        np.testing.assert_array_equal(o, tessera.attention(**tensors, tree_mask=same, seqused_k=LENGTHS))
    k, v, table = in_pages(rng, tensors["k"], tensors["v"])
    np.testing.assert_array_equal(o, tessera.attention(tensors["q"], k, v, tree_mask=tree, seqused_k=LENGTHS,
                                                       block_table=table))
    chain = np.tril(np.ones((B, NQ, NQ), bool))
    np.testing.assert_array_equal(tessera.attention(**tensors, tree_mask=chain, seqused_k=LENGTHS),
                                  tessera.attention(**tensors, causal=True, seqused_k=LENGTHS))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 70])
def test_booleans_of_a_tree_become_words(rng, count):
    from tessera._convert import optional
    tree = rng.random((2, 3, count)) < 0.5
    words = np.zeros((2, 3, (count + 31) // 32), np.uint32)
    for t in range(count):
        words[:, :, t // 32] |= tree[:, :, t].astype(np.uint32) << np.uint32(t % 32)
    np.testing.assert_array_equal(optional("tree_mask", tree, "float32"), words.view(np.int32))
    torch = pytest.importorskip("torch")
    import tessera.torch
    ours = optional("tree_mask", torch.from_numpy(tree), "float32")
    assert ours.dtype == torch.int32
    np.testing.assert_array_equal(ours.numpy(), words.view(np.int32))


def test_positions_place_queries(tensors, rng):
    del tensors["qv"]
    places = rng.integers(0, 20, (B, NQ))
    options = {"causal": True, "window": (7, None), "seqused_k": LENGTHS}
    o = tessera.attention(**tensors, positions=places, **options)  # int64: converted
    for b, n in enumerate(LENGTHS):
        for i, place in enumerate(places[b]):
            begin = max(0, place - 7)
            alone = exact(tensors["q"][b:b + 1, i:i + 1], tensors["k"][b:b + 1, begin:place + 1],
                          tensors["v"][b:b + 1, begin:place + 1])[0]
            assert_close(o[b, i], alone[0, 0])
    in_line = np.arange(NQ, dtype=np.int32) + (LENGTHS[:, None] - NQ)
    np.testing.assert_array_equal(tessera.attention(**tensors, positions=in_line, **options),
                                  tessera.attention(**tensors, **options))


def scale_forms(rng, width, paged_by=None):
    """Scales of each form, and the same as [B,NK,HK,width]."""
    groups = -(-width // 128)
    for shape in ((1,), (HK,), (B, HK), (B, NK, HK), (B, NK, HK, groups)):
        scale = rng.uniform(0.01, 0.03, shape).astype(np.float32)
        full = scale
        if len(shape) == 2:
            full = scale[:, None]
        if len(shape) == 4:
            full = np.repeat(scale, 128, -1)[..., :width]
        else:
            full = full[..., None]
        yield scale, np.broadcast_to(full, (B, NK, HK, width))


@pytest.mark.parametrize("dim", [D, 160])
def test_scales_of_every_form(rng, dim):
    q = rng.standard_normal((B, NQ, HQ, dim), np.float32)
    k, v = rng.integers(-127, 128, (2, B, NK, HK, dim)).astype(np.int8)
    for (k_scale, k_full), (v_scale, v_full) in zip(scale_forms(rng, dim), scale_forms(rng, dim)):
        o = tessera.attention(q, k, v, k_scale=k_scale, v_scale=v_scale.astype(np.float64), seqused_k=LENGTHS)
        for b, n in enumerate(LENGTHS):
            one = exact(q[b:b + 1], (k * k_full)[b:b + 1, :n], (v * v_full)[b:b + 1, :n])[0]
            assert_close(o[b], one[0])
        own = k_scale.ndim > 2
        pools = in_pages(np.random.default_rng(1), k, v, *((k_scale, v_scale) if own else ()))
        scales = pools[2:4] if own else (k_scale, v_scale)
        paged = tessera.attention(q, pools[0], pools[1], k_scale=scales[0], v_scale=scales[1], seqused_k=LENGTHS,
                                  block_table=pools[-1])
        np.testing.assert_array_equal(o, paged)


def test_append_computes_scales_of_groups(rng):
    dim, tokens = 160, 20
    q = rng.standard_normal((1, 1, HQ, dim), np.float32)
    k, v = rng.standard_normal((2, 1, tokens, HK, dim), np.float32)
    k[..., 128:] *= 1000  # one scale for all dims would leave nothing of the others
    pools = np.zeros((2, 4, P, HK, dim), np.int8)
    scales = np.full((2, 4, P, HK, 2), np.nan, np.float32)
    cache = {"seqused_k": np.array([tokens], np.int32), "block_table": np.array([[2, 0, 3]], np.int32),
             "k_scale": scales[0], "v_scale": scales[1]}
    tessera.append(k, v, *pools, **cache)
    np.testing.assert_allclose(scales[0][2, 0, 1, 1], np.abs(k[0, 0, 1, 128:]).max() / 127, rtol=1e-6)
    o = tessera.attention(q, *pools, scale=0.001, **cache)
    assert_close(o, exact(q, k, v, scale=0.001)[0], factor=1e4)  # 8 bits


def test_refusals(tensors):
    with pytest.raises(ValueError, match=r"qv: has shape \[2,5,4,16\]; must be \[batch, tokens, heads, dim\]"):
        tessera.attention(**{**tensors, "qv": tensors["q"]})
    with pytest.raises(ValueError, match=r"tree_mask: has shape \[2,4,1\]; must be \[batch, queries, words\]"):
        tessera.attention(**tensors, tree_mask=np.ones((B, 4, 4), bool))
    with pytest.raises(ValueError, match="tree_mask: has type i64; must be i32"):
        tessera.attention(**tensors, tree_mask=np.ones((B, NQ, 1), np.int64))
    with pytest.raises(ValueError, match=r"positions: has shape \[5\]; must be \[batch, queries\]"):
        tessera.attention(**tensors, positions=np.zeros(NQ, np.int32))
    with pytest.raises(NotImplementedError, match="qv: is given; there is no backward pass with it"):
        o, lse = tessera.forward(**tensors)
        tessera.backward(o, tensors["q"], tensors["k"], tensors["v"], o, lse, qv=tensors["qv"])


# --- PyTorch

def serving_step(rng, torch, tensors):
    """A call with all of them: K in bf16, V in e4m3 with a scale for each key, in pages, a tree, positions, qv."""
    v_scale = rng.uniform(0.5, 2, (B, NK, HK)).astype(np.float32)
    k, v, v_scale, table = in_pages(rng, tensors["k"], tensors["v"], v_scale)
    positions = rng.integers(10, 20, (B, NQ)).astype(np.int32)
    step = {"q": tensors["q"], "k": k, "v": v, "qv": tensors["qv"], "v_scale": v_scale, "block_table": table,
            "tree_mask": words_of(random_tree(rng)), "positions": positions, "seqused_k": LENGTHS}
    step = {name: torch.from_numpy(x) for name, x in step.items()}
    step["v"] = step["v"].to(torch.float8_e4m3fn)
    return step


def test_pytorch_gives_the_same_bits(rng, tensors):
    torch = pytest.importorskip("torch")
    import tessera.torch
    step = serving_step(rng, torch, tensors)
    options = {"window": (12, None), "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    o, lse = tessera.torch.attention(**step, **options, return_lse=True)
    by_core = tessera.forward(**step, **options)
    assert torch.equal(o, by_core[0]) and torch.equal(lse, by_core[1]) and bool(torch.isfinite(o).all())
    compiled = torch.compile(lambda step: tessera.torch.attention(**step, **options), fullgraph=True,
                             backend="aot_eager")
    assert torch.equal(o, compiled(step))
    swapped = {**step, **{name: step[name].transpose(1, 2).contiguous() for name in ("q", "k", "v", "qv")}}
    assert torch.equal(o, tessera.torch.attention(**swapped, **options, layout="bhnd").transpose(1, 2))
    inputs = {"q": step.pop("q"), "k": step.pop("k"), "v": step.pop("v").float()}  # opcheck compares no 8-bit numbers
    torch.library.opcheck(torch.ops.tessera.forward.default, tuple(inputs.values()), step,
                          test_utils=("test_schema", "test_faketensor"))


def test_booleans_of_a_tree_in_a_compiled_call(rng, tensors):
    torch = pytest.importorskip("torch")
    import tessera.torch
    q, k, v = (torch.from_numpy(tensors[name]) for name in "qkv")
    tree = torch.from_numpy(random_tree(rng))
    call = lambda tree: tessera.torch.attention(q, k, v, tree_mask=tree)  # noqa: E731
    assert torch.equal(call(tree), torch.compile(call, fullgraph=True, backend="aot_eager")(tree))
    assert torch.equal(call(tree), call(torch.from_numpy(words_of(tree.numpy()))))


def test_no_gradients_of_pytorch(tensors):
    torch = pytest.importorskip("torch")
    import tessera.torch
    q, k, v, qv = (torch.from_numpy(tensors[name]) for name in ("q", "k", "v", "qv"))
    for name, x in {"qv": qv, "k_scale": torch.ones(1), "v_scale": torch.ones(HK)}.items():
        with pytest.raises(NotImplementedError, match=f"{name}: requires a gradient, which attention does not give; "
                                                      rf"pass {name}.detach\(\)"):
            tessera.torch.attention(q, k, v, **{name: x.clone().requires_grad_()})
    o = tessera.torch.attention(q.clone().requires_grad_(), k, v, qv=qv)
    with pytest.raises(NotImplementedError, match="qv: is given; there is no backward pass with it"):
        o.sum().backward()


def test_vmap_and_autocast(rng, tensors):
    torch = pytest.importorskip("torch")
    import tessera.torch
    from torch.utils.flop_counter import FlopCounterMode
    q, k, v, qv = (torch.from_numpy(tensors[name]) for name in ("q", "k", "v", "qv"))
    tree, places = torch.from_numpy(random_tree(rng)), torch.arange(NQ).expand(B, NQ).int().contiguous()
    call = lambda q, qv: tessera.torch.attention(q, k, v, qv=qv, tree_mask=tree, positions=places)  # noqa: E731
    pairs = torch.stack([q, -q]), torch.stack([qv, 2 * qv])
    assert torch.equal(torch.func.vmap(call)(*pairs), torch.stack([call(*x) for x in zip(*pairs)]))
    with FlopCounterMode(display=False) as counter:
        call(q, qv)
    assert counter.get_total_flops() == 2 * B * HQ * NQ * NK * (D + 2 * DV)
    byte = (127 * torch.rand(k.shape)).to(torch.int8)
    with torch.autocast("cpu", torch.bfloat16):
        o = tessera.torch.attention(q, byte, v, qv=qv, k_scale=torch.ones(1) / 99)
    assert o.dtype == torch.bfloat16
    half = [x.bfloat16() for x in (q, v, qv)]
    assert torch.equal(o, tessera.torch.attention(half[0], byte, half[1], qv=half[2], k_scale=torch.ones(1) / 99))


def test_kvcache_takes_qv(rng, tensors):
    torch = pytest.importorskip("torch")
    import tessera.torch
    from tessera.flash_attn import flash_attn_with_kvcache
    q, k, v, qv = (torch.from_numpy(tensors[name]) for name in ("q", "k", "v", "qv"))
    lengths = torch.from_numpy(LENGTHS)
    o = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, qv=qv)
    assert torch.equal(o, tessera.torch.attention(q, k, v, qv=qv, seqused_k=lengths, causal=True))


# --- JAX

def test_jax_gives_the_same_bits(rng, tensors):
    jax = pytest.importorskip("jax")
    import tessera.jax
    jnp = jax.numpy
    with jax.default_device(jax.devices("cpu")[0]):
        k8 = jnp.asarray(tensors["k"]).astype(jnp.float8_e4m3fn)
        v8 = rng.integers(-127, 128, tensors["v"].shape).astype(np.int8)
        k_scale, v_scale = rng.uniform(0.5, 1, (B, HK)).astype(np.float32), rng.uniform(0, 0.01, (B, NK, HK, 1)).astype(
            np.float32)
        tree, places = random_tree(rng), rng.integers(10, 20, (B, NQ)).astype(np.int32)
        more = {"k_scale": k_scale, "v_scale": v_scale, "positions": places, "tree_mask": tree, "seqused_k": LENGTHS}
        call = lambda q, k, v, qv, more: tessera.jax.attention(q, k, v, qv=qv, **more)  # noqa: E731
        arrays = [jnp.asarray(x) for x in (tensors["q"], k8, v8, tensors["qv"])]
        o = call(*arrays, more)
        np.testing.assert_array_equal(o, jax.jit(call)(*arrays, more))
        swapped = [jnp.swapaxes(x, 1, 2) for x in arrays]
        heads_first = tessera.jax.attention(*swapped[:3], qv=swapped[3], layout="bhnd", **more)
        np.testing.assert_array_equal(o, jnp.swapaxes(heads_first, 1, 2))
        # Devices may divide batch and heads.
        mesh = jax.make_mesh((2, 2), ("b", "h")) if jax.device_count() >= 4 else None
        if mesh is not None:
            place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b", None, "h"))
            split = [jax.device_put(x, place) for x in arrays]
            np.testing.assert_array_equal(o, jax.jit(call)(*split, more))
        with pytest.raises(NotImplementedError, match="qv: is to be differentiated, but attention gives it no gradient"):
            jax.grad(lambda qv: tessera.jax.attention(*arrays[:3], qv=qv, **more).sum())(arrays[3])
    wide = np.asarray(k8).astype(np.float32)
    ours = tessera.attention(tensors["q"], wide, v8, qv=tensors["qv"], **more)
    assert_close(np.asarray(o), ours)
