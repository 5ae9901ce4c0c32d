# SPDX-License-Identifier: Apache-2.0
"""tessera.jax over several devices: jit's partitioning and explicit sharding without gathering, shard_map, dropout."""
import re

import numpy as np
import pytest
from conftest import assert_close

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from tessera.jax import attention, backward  # noqa: E402

B, NQ, NK, HQ, D = 4, 9, 12, 4, 8
MOVES = re.compile(r"\b(all-gather|all-to-all|collective-permute)\b")


@pytest.fixture(autouse=True)
def four_devices():
    if len(jax.devices("cpu")) < 4 or jax.default_backend() != "cpu":
        pytest.skip("needs four devices of JAX's on the CPU: XLA_FLAGS=--xla_force_host_platform_device_count=4")


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))


def arrays(kv_heads=2, **shapes):
    rng = np.random.default_rng(3)
    shapes = {"q": (B, NQ, HQ, D), "k": (B, NK, kv_heads, D), "v": (B, NK, kv_heads, D), **shapes}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def put(given, where, specs):
    return {name: jax.device_put(x, NamedSharding(where, specs.get(name, P()))) for name, x in given.items()}


def results(given, **options):
    """O, LSE and gradients of all that has any."""
    wanted = {name: given[name] for name in ("q", "k", "v", "bias", "sinks") if name in given}
    rest = {name: x for name, x in given.items() if name not in wanted and name != "d_o"}

    def loss(w):
        o, lse = attention(**w, **rest, **options, return_lse=True)
        return (o * given["d_o"]).sum() + lse.sum(), (o, lse)

    (_, (o, lse)), gradients = jax.value_and_grad(loss, has_aux=True)(wanted)
    return {"o": o, "lse": lse, **{"d" + name: x for name, x in gradients.items()}}


QUERIES = P("x", None, "y", None)
# Shardings over batch and heads: heads of keys, specs, other arrays, options.
CASES = {
    "batch": (2, {"q": P("x"), "k": P("x"), "v": P("x")}, {}, {"causal": True}),
    "heads": (2, {name: P(None, None, "y") for name in "qkv"}, {}, {"window": (3, 2)}),
    "both": (4, {name: QUERIES for name in "qkv"}, {}, {"causal": True, "softcap": 3.0}),
    "grouped": (2, {name: QUERIES for name in "qkv"}, {}, {}),
    "one head of keys": (1, {"q": QUERIES, "k": P("x"), "v": P("x")}, {}, {"causal": True}),
    "two axes": (2, {name: P(("x", "y")) for name in "qkv"}, {}, {}),
    "bias": (2, {**{name: QUERIES for name in "qkv"}, "bias": P("x", "y")}, {"bias": (B, HQ, NQ, NK)}, {}),
    "bias for all": (2, {name: QUERIES for name in "qkv"}, {"bias": (1, 1, NQ, NK)}, {}),
    "sinks and slopes": (2, {**{name: QUERIES for name in "qkv"}, "sinks": P("y"), "alibi_slopes": P("y")},
                         {"sinks": (HQ,), "alibi_slopes": (HQ,)}, {}),
    "dropout": (2, {name: QUERIES for name in "qkv"}, {}, {"dropout_p": 0.4, "seed": 11}),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_gathered(name, kind):
    kv_heads, specs, shapes, options = CASES[name]
    given = arrays(kv_heads, d_o=(B, NQ, HQ, D), **shapes)
    expected = results(given, **options)
    divided = put(given, mesh(kind), {**specs, "d_o": specs["q"]})
    compiled = jax.jit(lambda x: results(x, **options)).lower(divided).compile()
    text = compiled.as_text()
    moved = set(MOVES.findall(text))
    assert not moved, moved
    assert text.count("tessera_attention") >= 2
    got = compiled(divided)
    sums = {"dbias", "dsinks"} | ({"dk", "dv"} if kv_heads == 1 else set())  # over what is divided
    for n, x in expected.items():
        assert_close(got[n], x) if n in sums else np.testing.assert_array_equal(got[n], x)
    assert got["o"].sharding.is_equivalent_to(NamedSharding(got["o"].sharding.mesh, specs["q"]), 4)
    for n in "qkv":
        assert got["d" + n].sharding.is_equivalent_to(divided[n].sharding, 4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_other_dimensions_are_gathered(kind):
    """Tokens and dims that are divided: slower, and right. So are heads that do not come out even."""
    given = arrays()
    expected = attention(**given, causal=True)
    for specs in ({"k": P(None, "x"), "v": P(None, "x")}, {"q": P("x", None, None, "y")},
                  {name: P("x", None, ("y",)) for name in "qkv"}, {"q": P(None, None, ("x", "y"))}):
        divided = put(given, mesh(kind), specs)
        np.testing.assert_array_equal(jax.jit(lambda x: attention(**x, causal=True))(divided), expected)


def test_eagerly_and_backward():
    given = arrays()
    divided = put(given, mesh(), {name: QUERIES for name in "qkv"})
    o, lse = attention(**divided, return_lse=True)
    assert o.sharding.is_equivalent_to(divided["q"].sharding, 4)
    expected_o, expected_lse = attention(**given, return_lse=True)
    np.testing.assert_array_equal(o, expected_o)
    gradients = backward(o, **divided, o=o, lse=lse)
    for name, x in backward(expected_o, **given, o=expected_o, lse=expected_lse).items():
        np.testing.assert_array_equal(gradients[name], x)
        assert gradients[name].sharding.is_equivalent_to(divided[name[1:]].sharding, 4)


def test_packed_sequences_are_divided_by_heads():
    given = {name: x[0] for name, x in arrays().items()}
    ends = {"cu_seqlens_q": jnp.asarray([0, 4, NQ - 1]), "cu_seqlens_k": jnp.asarray([0, 7, NK])}
    function = jax.jit(lambda x: attention(**x, **ends, causal=True))
    divided = put(given, mesh(), {name: P(None, "y") for name in "qkv"})
    assert not MOVES.search(function.lower(divided).compile().as_text())
    np.testing.assert_array_equal(function(divided), function(given))


def test_lengths_are_divided_with_the_batch():
    given = {**arrays(), "seqused_k": jnp.asarray([3, 12, 1, 7])}
    divided = put(given, mesh(), {"q": P("x"), "k": P("x"), "v": P("x"), "seqused_k": P("x")})
    function = jax.jit(lambda x: attention(**x))
    assert not MOVES.search(function.lower(divided).compile().as_text())
    np.testing.assert_array_equal(function(divided), attention(**given))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("check", [True, False])
def test_shard_map_and_its_gradient(check, jit):
    """A bias that every device has the whole of: its gradient is the sum of theirs."""
    given = arrays(bias=(1, 1, NQ, NK))
    specs = {"q": QUERIES, "k": QUERIES, "v": QUERIES, "bias": P()}
    function = jax.shard_map(lambda x: attention(**x, causal=True), mesh=mesh(), in_specs=(specs,), out_specs=QUERIES,
                             check_vma=check)
    gradient = jax.grad(lambda x: jnp.sin(function(x)).sum())
    expected = jax.grad(lambda x: jnp.sin(attention(**x, causal=True)).sum())(given)
    if jit:
        function, gradient = jax.jit(function), jax.jit(gradient)
    np.testing.assert_array_equal(function(given), attention(**given, causal=True))
    got = gradient(given)
    for name, x in expected.items():
        assert_close(got[name], x, factor=3)


def test_vmap_over_divided_arrays():
    given = arrays()
    stacked = {name: jnp.stack([x, 2 * x]) for name, x in given.items()}
    divided = put(stacked, mesh(), {name: P(None, "x") for name in "qkv"})
    mapped = jax.jit(jax.vmap(lambda x: attention(**x)))(divided)
    for n in range(2):
        np.testing.assert_array_equal(mapped[n], attention(**{name: x[n] for name, x in stacked.items()}))


def test_export():
    """For one device, from a process that has several."""
    given = arrays()
    function = jax.jit(lambda x: attention(**x, causal=True))
    checks = [export.DisabledSafetyCheck.custom_call("tessera_attention")]
    exported = export.export(function, disabled_checks=checks)(given)
    np.testing.assert_array_equal(jax.jit(exported.call)(given), function(given))
