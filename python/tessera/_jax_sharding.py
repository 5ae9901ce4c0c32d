# SPDX-License-Identifier: Apache-2.0
"""Calls over several devices in JAX: which dimensions may be split, and what each device then computes.

Batch and heads are split as the arrays are; every other dimension is gathered. `call` is for jit's automatic
partitioning and for explicitly sharded arrays; inside shard_map, `same_axes` makes the arrays' types agree. Used by
jax.py.
"""
from __future__ import annotations

import functools
import math
from typing import Any, Callable, NamedTuple, Optional, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ._roles import BATCH, HEADS, KV_HEADS, OTHER, Described

Array = Any
Axes = tuple[str, ...]  # of a mesh
# Results of one device's part of a call: (arrays by name, batch0, head0) -> results in their order.
Part = Callable[..., tuple[Array, ...]]


class Split(NamedTuple):
    """Axes of the mesh over which sequences and heads are divided."""
    batch: Axes
    heads: Axes
    one_key_head: bool  # which every device has

    def axes(self, role: str) -> Axes:
        if role == BATCH:
            return self.batch
        return self.heads if role == HEADS or (role == KV_HEADS and not self.one_key_head) else ()

    def spec(self, call: Described, name: str) -> PartitionSpec:
        return PartitionSpec(*(self.axes(role) or None for role in call.roles(name)))


def _as_axes(part: Any) -> Axes:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def split_of(call: Described, sizes: dict[str, int], specs: dict[str, Sequence[Any]]) -> Split:
    """How a call is divided whose arrays lie like this: as far as it comes out even. `sizes`: of the mesh's axes."""
    def found(role: str, counts: Sequence[int]) -> Axes:
        for name in call.names:
            for part, its_role in zip(specs.get(name, ()), call.roles(name) if name in specs else ()):
                axes = _as_axes(part) if its_role == role else ()
                while axes and any(count % math.prod(sizes[axis] for axis in axes) for count in counts):
                    axes = axes[:-1]
                if axes:
                    return axes
        return ()

    counts = call.counts
    one = counts[KV_HEADS] == 1
    heads = found(HEADS, [counts[HEADS]] if one else [counts[HEADS], counts[KV_HEADS]])
    batch = tuple(axis for axis in found(BATCH, [counts[BATCH]]) if axis not in heads)
    if counts[BATCH] % math.prod(sizes[axis] for axis in batch):
        batch = ()
    return Split(batch, heads, one)


def _parts(call: Described, split: Split, sizes: dict[str, int], part: Part) -> Callable[..., tuple[Array, ...]]:
    """What each device computes of its parts of the inputs."""
    counts = {role: math.prod(sizes[axis] for axis in split.axes(role)) for role in (BATCH, HEADS)}

    def at(batch0: int, head0: int, *arrays: Array) -> tuple[Array, ...]:
        return part(dict(zip(call.inputs, arrays)), batch0, head0)

    def compute(*arrays: Array) -> tuple[Array, ...]:
        if call.positions and (split.batch or split.heads):
            # Positions are static, so there is a branch for each device's.
            places = [(b * (call.counts[BATCH] // counts[BATCH]), h * (call.counts[HEADS] // counts[HEADS]))
                      for b in range(counts[BATCH]) for h in range(counts[HEADS])]
            index = jax.lax.axis_index(split.batch + split.heads)
            branches = [functools.partial(at, *place) for place in places]
            results = jax.lax.switch(index, branches, *arrays)
        else:
            results = at(0, 0, *arrays)
        return tuple(_sum(call, split, name, result) for name, result in zip(call.outputs, results))
    return compute


def _sum(call: Described, split: Split, name: str, result: Array) -> Array:
    """A gradient that several devices have parts of: the sum over those axes that do not divide it."""
    if not name.startswith("d"):
        return result
    divided = {axis for role in call.roles(name) for axis in split.axes(role)}
    axes = tuple(axis for axis in split.batch + split.heads if axis not in divided)
    if not axes:
        return result
    return jax.lax.psum(result.astype(jnp.promote_types(result.dtype, jnp.float32)), axes).astype(result.dtype)


# --- jit's automatic partitioning ------------------------------------------------------------------------------------

def _rule(call: Described) -> tuple[str, dict[str, Any]]:
    """Shardy's notation: which dimensions of which tensors are divided together."""
    counts = call.counts
    group = counts[HEADS] // max(counts[KV_HEADS], 1)
    alone: list[str] = []

    def factor(role: str) -> str:
        if role == HEADS and counts[KV_HEADS] > 1:
            return "g" if group == 1 else "(g r)"
        if role == OTHER or (role == KV_HEADS and counts[KV_HEADS] == 1):
            alone.append(f"x{len(alone)}")
            return alone[-1]
        return role

    texts = [" ".join(map(factor, call.roles(name))) for name in call.names]
    rule = ", ".join(texts[:len(call.inputs)]) + " -> " + ", ".join(texts[len(call.inputs):])
    return rule, {"need_replication_factors": tuple(alone), **({"r": group} if "r)" in rule else {})}


@functools.lru_cache(maxsize=256)
def _partitioned(call: Described, part: Part) -> Callable[..., tuple[Array, ...]]:
    """The call for jit to divide."""
    def whole(*arrays: Array) -> tuple[Array, ...]:
        return part(dict(zip(call.inputs, arrays)), 0, 0)

    def partition(mesh: Any, inputs: Any, results: Any) -> Any:
        sizes = dict(mesh.shape)
        specs = {name: x.sharding.spec for name, x in zip(call.names, (*inputs, *results)) if x.sharding is not None}
        split = split_of(call, sizes, specs)
        place = [NamedSharding(mesh, split.spec(call, name)) for name in call.names]
        count = len(call.inputs)
        return mesh, _parts(call, split, sizes, part), tuple(place[count:]), tuple(place[:count])

    divided = custom_partitioning(whole)
    rule, more = _rule(call)
    divided.def_partition(partition, sharding_rule=rule, **more)

    @jax.custom_batching.custom_vmap
    def one_after_another(*arrays: Array) -> tuple[Array, ...]:
        results: tuple[Array, ...] = divided(*arrays)
        return results

    @one_after_another.def_vmap
    def mapped(count: int, is_mapped: Sequence[bool], *arrays: Array) -> Any:
        def one(moving: list[Array]) -> tuple[Array, ...]:
            rest = iter(moving)
            return one_after_another(*(next(rest) if moves else x for x, moves in zip(arrays, is_mapped)))

        results = jax.lax.map(one, [x for x, moves in zip(arrays, is_mapped) if moves])
        return results, (True,) * len(results)

    return one_after_another


# --- explicit sharding, shard_map ------------------------------------------------------------------------------------

def _explicit_mesh(arrays: Sequence[Array]) -> Optional[Any]:
    """The mesh over which the types of some arrays say that they are divided."""
    for x in arrays:
        sharding = getattr(jax.typeof(x), "sharding", None)
        if sharding is not None and any(part is not None for part in sharding.spec):
            return sharding.mesh
    return None


def _explicit(call: Described, mesh: Any, part: Part, arrays: Sequence[Array]) -> tuple[Array, ...]:
    sizes = dict(mesh.shape)
    split = split_of(call, sizes, {name: jax.typeof(x).sharding.spec for name, x in zip(call.inputs, arrays)})
    specs = [split.spec(call, name) for name in call.names]
    count = len(call.inputs)
    arrays = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]
    compute = jax.shard_map(_parts(call, split, sizes, part), mesh=mesh, in_specs=tuple(specs[:count]),
                            out_specs=tuple(specs[count:]), check_vma=False)
    results: tuple[Array, ...] = compute(*arrays)
    return results


def like_inputs(call: Described, arrays: Sequence[Array], results: Sequence[Array]) -> tuple[Array, ...]:
    """Gradients with their inputs' types, which name a sharding where that is explicit."""
    if _explicit_mesh(arrays) is None:
        return tuple(results)
    inputs = dict(zip(call.inputs, arrays))
    return tuple(jax.sharding.reshard(x, jax.typeof(inputs[name[1:]]).sharding) if name[1:] in inputs else x
                 for name, x in zip(call.outputs, results))


def _varying(x: Array) -> frozenset[str]:
    """The axes of a shard_map over which an array's type says that it varies."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset(getattr(kind, "vma", ()) if manual is None else manual.varying)


def _vary(x: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - _varying(x)))
    if not missing:
        return x
    pcast = getattr(jax.lax, "pcast", None)
    return pcast(x, missing, to="varying") if pcast else jax.lax.pvary(x, missing)


def same_axes(tensors: dict[str, Array]) -> dict[str, Array]:
    """Inside shard_map all arrays vary over the axes over which one does. Going back, JAX sums what did not."""
    axes = frozenset[str]().union(*map(_varying, tensors.values()))
    return {name: _vary(x, axes) for name, x in tensors.items()} if axes else tensors


def call(described: Described, part: Part, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The results of a call, wherever its arrays are."""
    plain = all(isinstance(size, int) and size for shape in described.shapes for size in shape)
    if jax.device_count() == 1 or not plain:  # exported for any size; empty
        return part(dict(zip(described.inputs, arrays)), 0, 0)
    if jax.sharding.get_abstract_mesh().manual_axes:
        axes = _varying(arrays[0])
        return tuple(_vary(x, axes) for x in part(dict(zip(described.inputs, arrays)), 0, 0))
    mesh = _explicit_mesh(arrays)
    if mesh is not None:
        return like_inputs(described, arrays, _explicit(described, mesh, part, arrays))
    return _partitioned(described, part)(*arrays)
