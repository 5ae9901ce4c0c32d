# SPDX-License-Identifier: Apache-2.0
"""Attention of DTensors that are divided by batch or heads: each rank attends with its parts, and nothing is sent.

How q is divided decides. Of tensors that every rank has whole, each takes what belongs to its part of q, and their
gradients are partial sums. What is refused is refused on every rank, so that none waits for another. Used by torch.py.
"""
from __future__ import annotations

import functools
import itertools
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import torch
from torch import Tensor

from ._options import KEYWORDS
from ._roles import BATCH, HEADS, KV_HEADS, OTHER, Described

Attend = Callable[[Tensor, Tensor, Tensor, dict[str, Any]], Sequence[Tensor]]
Ints = tuple[int, ...]
Flags = tuple[bool, ...]


def divided(tensors: Iterable[Any]) -> bool:
    """Whether there is a DTensor among them. Their module takes long to import, and only its tensors have a mesh."""
    return any(isinstance(t, Tensor) and hasattr(t, "device_mesh") for t in tensors)


# --- who has what: of the ranks of a mesh with these sizes, the one that is `at` ---------------------------------------

class Range(NamedTuple):
    begin: int
    end: int


def part_of(count: int, sizes: Ints, splits: Flags, at: Ints) -> Range:
    """A rank's part of a dimension, which these dimensions of the mesh split one after the other."""
    begin = 0
    for size, split, place in zip(sizes, splits, at):
        if split:
            part = -(-count // size)
            skipped = min(place * part, count)
            begin, count = begin + skipped, min(part, count - skipped)
    return Range(begin, begin + count)


def key_heads(heads: Range, group: int) -> Range:
    """Heads of k for heads of q, of which so many share one."""
    return Range(heads.begin // group, max(heads.begin // group, -(-heads.end // group)))


@functools.lru_cache(maxsize=256)
def has_groups(heads: int, group: int, sizes: Ints, splits: Flags) -> bool:
    """Whether each rank has whole groups of heads, or a part of one."""
    for at in itertools.product(*map(range, sizes)):
        own = part_of(heads, sizes, splits, at)
        keys = key_heads(own, group)
        if own.begin < own.end and keys.end - keys.begin > 1 and (own.begin % group or own.end % group):
            return False
    return True


@functools.lru_cache(maxsize=256)
def covers(count: int, splits: Flags, wanted: int, wanted_splits: Flags, group: int, sizes: Ints) -> bool:
    """Whether each rank's part of a dimension has what goes with its part of q's: one for `group` of q's."""
    for at in itertools.product(*map(range, sizes)):
        has, needs = part_of(count, sizes, splits, at), part_of(wanted, sizes, wanted_splits, at)
        keys = key_heads(needs, group)
        if needs.begin < needs.end and not has.begin <= keys.begin <= keys.end <= has.end:
            return False
    return True


# --- a call ----------------------------------------------------------------------------------------------------------

def _spoken(name: str) -> str:
    return KEYWORDS.get(name, name)


def _inner_first(t: Tensor) -> list[int]:
    """Dimensions by their strides, of equal ones the last first. Sorted by hand: torch.compile cannot sort by symbols."""
    order: list[int] = []
    for dim in reversed(range(t.dim())):
        place = len(order)
        while place and t.stride(order[place - 1]) > t.stride(dim):
            place -= 1
        order.insert(place, dim)
    return order


class _Division:
    """How q's placements divide a call over its mesh."""

    def __init__(self, q: Any, call: Described) -> None:
        if not divided((q,)):
            raise TypeError("q: is a plain tensor beside DTensors; q, k and v must all be DTensors")
        self.call, self.mesh = call, q.device_mesh
        if self.mesh.get_coordinate() is None:
            raise ValueError("q: is on a mesh without this rank; only ranks of the mesh can attend")
        self.at = tuple(self.mesh.get_coordinate())
        self.sizes = tuple(self.mesh.size(place) for place in range(self.mesh.ndim))
        self.roles = [self._role_of(placement, place) for place, placement in enumerate(q.placements)]
        counts = call.counts
        self.group = max(counts[HEADS] // max(counts[KV_HEADS], 1), 1)
        if not has_groups(counts[HEADS], self.group, self.sizes, self._splits(HEADS)):
            raise ValueError(f"q: has {counts[HEADS]} heads, of which {self.group} share one of k, and is divided so that "
                             "some rank would have parts of several groups; it must have whole groups, or a part of one")

    def _where(self, place: int) -> str:
        names = self.mesh.mesh_dim_names
        return f"mesh dimension {names[place]!r}" if names else f"mesh dimension {place}"

    def _role_of(self, placement: Any, place: int) -> str:
        """By what q is divided there."""
        from torch.distributed.tensor import Replicate, Shard
        if isinstance(placement, Replicate) or self.sizes[place] == 1:
            return OTHER
        role = self.call.roles("q")[placement.dim] if type(placement) is Shard else OTHER
        if role == OTHER:
            raise ValueError(f"q: is {placement} on {self._where(place)}; DTensors must be divided by batch or heads, or "
                             "be Replicate(). For tokens on several ranks there is tessera.dist")
        return role

    def _splits(self, role: str) -> Flags:
        return tuple(role == its for its in self.roles)

    def part(self, role: str) -> Range:
        """This rank's part of q's batch or heads."""
        return part_of(self.call.counts[role], self.sizes, self._splits(role), self.at)

    def local(self, name: str, t: Any) -> Tensor:
        """What this rank's part of q needs of a tensor."""
        roles = [HEADS if role == KV_HEADS else role for role in self.call.roles(name)]
        placements: Sequence[Any] = ()
        if divided((t,)):
            if t.device_mesh != self.mesh:
                raise ValueError(f"{_spoken(name)}: is on another mesh than q; all DTensors must be on one")
            placements = t.placements
            t = t.to_local(grad_placements=self._of_gradient(name, placements, roles))
        elif name in ("k", "v"):
            raise TypeError(f"{name}: is a plain tensor beside DTensors; q, k and v must all be DTensors")
        elif t.requires_grad and torch.is_grad_enabled():
            raise TypeError(f"{_spoken(name)}: is a plain tensor that requires a gradient beside DTensors; distribute it, "
                            "so that the gradient is a DTensor too")
        for dim, role in enumerate(roles):
            if role != OTHER:
                t = self._narrowed(name, t, dim, role, tuple(getattr(p, "dim", None) == dim for p in placements))
        return t  # type: ignore[no-any-return]

    def _of_gradient(self, name: str, placements: Sequence[Any], roles: Sequence[str]) -> list[Any]:
        from torch.distributed.tensor import Partial, Replicate, Shard
        result: list[Any] = []
        for place, (placement, role) in enumerate(zip(placements, self.roles)):
            dims = [dim for dim, its in enumerate(roles) if its == role != OTHER]
            if isinstance(placement, Replicate) or self.sizes[place] == 1:
                result.append(Replicate() if role == OTHER else Partial())
            elif type(placement) is Shard and placement.dim in dims:
                result.append(placement)
            else:
                rule = " or ".join([f"Shard(dim={dim})" for dim in dims] + ["Replicate()"])
                raise ValueError(f"{_spoken(name)}: is {placement} on {self._where(place)}; must be {rule} where q is "
                                 f"{'whole' if role == OTHER else 'divided by ' + ('batch' if role == BATCH else 'heads')}")
        return result

    def _narrowed(self, name: str, t: Tensor, dim: int, role: str, splits: Flags) -> Tensor:
        count, whole = self.call.shape(name)[dim], self.call.counts[role]
        group = self.group if self.call.roles(name)[dim] == KV_HEADS else 1
        if not covers(count, splits, whole, self._splits(role), group, self.sizes):
            raise ValueError(f"{_spoken(name)}: has {count} in dimension {dim}, divided so that some rank would lack what "
                             "its part of q needs; divide both evenly, or leave it whole")
        has, needs = part_of(count, self.sizes, splits, self.at), key_heads(self.part(role), group)
        if needs == has:
            return t
        return t.narrow(dim, min(max(needs.begin - has.begin, 0), t.shape[dim]), needs.end - needs.begin)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A result as a DTensor, its dimensions in the order in memory that this rank's part has."""
        from torch.distributed.tensor import DTensor, Replicate, Shard
        roles, shape = self.call.roles(name), self.call.shape(name)
        placements = [Replicate() if role == OTHER else Shard(roles.index(role)) for role in self.roles]
        stride, step = [0] * part.dim(), 1
        for dim in _inner_first(part):
            stride[dim], step = step, step * max(shape[dim], 1)
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=torch.Size(shape),
                                  stride=tuple(stride))

    def same_seeds(self, rng: Tensor) -> Tensor:
        """Those that the mesh's first rank has drawn."""
        for place in range(self.mesh.ndim):
            if torch.compiler.is_compiling():  # which cannot trace what writes to rng
                from torch.distributed._functional_collectives import broadcast
                rng = broadcast(rng, 0, (self.mesh, place))
            else:
                group = self.mesh.get_group(place)
                torch.distributed.broadcast(rng, torch.distributed.get_global_rank(group, 0), group)
        return rng


def attend(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], drawn: bool, attend_local: Attend
           ) -> tuple[Tensor, Tensor]:
    """O and LSE, as DTensors. `given`: an operator's other arguments by their names; `drawn`: whether rng is our own."""
    tensors = {"q": q, "k": k, "v": v, **{name: t for name, t in given.items() if isinstance(t, Tensor)}}
    results = {"o": (*q.shape[:-1], v.shape[-1]), "lse": (*q.shape[:-3], q.shape[-2], q.shape[-3])}
    shapes = *(tuple(t.shape) for t in tensors.values()), *results.values()
    division = _Division(q, Described(tuple(tensors), tuple(results), shapes, given.get("dropout", 0) > 0))
    local = {name: division.local(name, t) for name, t in tensors.items()}
    if drawn:
        local["rng"] = division.same_seeds(local["rng"])
    given = {**given, **local}
    if division.call.positions:  # a part has the dropout mask of its place in the whole
        for name, role in (("batch0", BATCH), ("head0", HEADS)):
            given[name] = given.get(name, 0) + division.part(role).begin
    o, lse = attend_local(*(given.pop(name) for name in ("q", "k", "v")), given)
    return division.whole("o", o), division.whole("lse", lse)
