# SPDX-License-Identifier: Apache-2.0
"""What PyTorch may ask of the operators besides computing: torch.func.vmap's batching rules, and counts of FLOPs.

Importing it registers both. Used by torch.py.
"""
from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from . import _torch_ops as ops

_FORWARD = "q", "k", "v", *ops.PLACES
_BACKWARD = "d_o", "d_lse", "o", "lse", "wanted", *_FORWARD  # the operators' arguments


# --- vmap ------------------------------------------------------------------------------------------------------------
# The mapped dimension joins the batch: the library is batch-invariant, so one call over both gives the bits of one call
# after another. Where the tensors have no batch, or a result is a sum over it, the calls are made one after another.

class _Mapped(NamedTuple):
    """An operator's tensor, its mapped dimension in front where it has one."""
    tensor: Tensor
    mapped: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """As one of the calls sees it."""
        return tuple(self.tensor.shape[self.mapped:])

    def in_front(self, count: int) -> Tensor:
        return self.tensor if self.mapped else self.tensor.expand(count, *self.tensor.shape)

    def of_call(self, n: int) -> Tensor:
        return self.tensor[n] if self.mapped else self.tensor


def _fold(name: str, x: _Mapped, count: int, batch: int, whole: bool) -> Tensor:
    """The tensor for `count` * `batch` sequences; `whole`: even if it may have one row for all of them."""
    if name in ("bias", "mask"):
        if x.shape[0] == 1 and not x.mapped and not whole:
            return x.tensor
        return x.in_front(count).expand(count, batch, *x.shape[1:]).flatten(0, 1)
    if name == "slopes" and len(x.shape) == 1:
        return x.tensor.repeat_interleave(batch, 0) if x.mapped else x.tensor
    if name in ("sinks", "rng"):
        return x.tensor
    return x.in_front(count).flatten(0, 1)


def _folds(tensors: dict[str, _Mapped], dropout: float, wanted: set[str]) -> bool:
    packed = "cu_seqlens_q", "cu_seqlens_k", "block_table", "page_indptr", "k_scale", "v_scale"
    if dropout > 0 or not tensors.keys().isdisjoint(packed) or len(tensors["q"].shape) != 4:
        return False  # dropout's mask depends on the place in the batch
    if "dsinks" in wanted or ("sinks" in tensors and tensors["sinks"].mapped):
        return False
    return "dbias" not in wanted or tensors["bias"].shape[0] == tensors["q"].shape[0]


def _map(operator: Any, names: Sequence[str], count: int, in_dims: Sequence[Optional[int]],
         arguments: Sequence[Any]) -> list[Tensor]:
    """The operator's results, with the mapped dimension in front."""
    given = dict(zip(names, arguments))
    tensors = {name: _Mapped(x if dim is None else x.movedim(dim, 0), dim is not None)
               for (name, x), dim in zip(given.items(), in_dims) if isinstance(x, Tensor)}
    wanted = set(itertools.compress(ops.GRADIENTS, given.get("wanted", ())))
    if _folds(tensors, given.get("dropout", 0.0), wanted):
        batch = tensors["q"].shape[0]
        given.update({name: _fold(name, x, count, batch, "d" + name in wanted) for name, x in tensors.items()})
        return [result.unflatten(0, (count, batch)) for result in operator(*given.values())]
    calls = [operator(*{**given, **{name: x.of_call(n) for name, x in tensors.items()}}.values())
             for n in range(count)]
    return [torch.stack(results) for results in zip(*calls)]


def _map_forward(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    return tuple(_map(ops.forward_operator, _FORWARD, info.batch_size, in_dims, arguments)), (0, 0)


def _map_backward(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    results = _map(ops.backward_operator, _BACKWARD, info.batch_size, in_dims, arguments)
    return results, [0] * len(results)


_BATCHED = torch._C._dispatch_key_parse("Batched")


def _map_batched_gradients(*arguments: Any) -> list[Tensor]:
    """torch.autograd.grad(is_grads_batched=True) and jacobian(vectorize=True): an older vmap, whose tensors are its own.

    It maps backward passes only, and would otherwise ask for a rule at the key Batched.
    """
    level = torch._C._vmapmode_increment_nesting() - 1  # the one way to ask for it
    torch._C._vmapmode_decrement_nesting()
    mapped = [isinstance(x, Tensor) and torch._C._dispatch_keys(x).has(_BATCHED)
              for x in arguments]
    plain = [torch._remove_batch_dim(x, level, 1, 0) if batched else x for x, batched in zip(arguments, mapped)]
    count = plain[mapped.index(True)].shape[0]
    results = _map(ops.backward_operator, _BACKWARD, count, [0 if batched else None for batched in mapped], plain)
    return [torch._add_batch_dim(result, 0, level) for result in results]


torch.library.register_vmap("tessera::forward", _map_forward, lib=ops.library)
torch.library.register_vmap("tessera::backward", _map_backward, lib=ops.library)
ops.library.impl("backward", _map_batched_gradients, "Batched")


# --- floating-point operations ---------------------------------------------------------------------------------------
# As PyTorch counts its own scaled_dot_product_attention: products of matrices alone, whatever a mask hides. Lengths of
# sequences count as they are, where their numbers are there to be read.

def _lengths(ends: Optional[Tensor], used: Optional[Tensor], batch: int, most: int) -> list[int]:
    for lengths in (used, None if ends is None else ends.diff()):
        if lengths is not None and lengths.device.type != "meta" and not isinstance(lengths, FakeTensor):
            return [int(length) for length in lengths.tolist()]
    return [most] * batch


def _scores(q: Tensor, k: Tensor, arguments: Sequence[Any]) -> int:
    """How many there are, in all heads."""
    given = dict(zip(_FORWARD[3:], arguments))
    ends_q, ends_k, table = (given.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table"))
    batch = q.shape[0] if ends_q is None else ends_q.shape[0] - 1
    most_q, most_k = q.shape[-3], k.shape[-3] * (1 if table is None else table.shape[1])
    most_q, most_k = (most if bound < 0 else min(most, bound) for most, bound in
                      ((most_q, given.get("max_seqlen_q", -1)), (most_k, given.get("max_seqlen_k", -1))))
    lengths = zip(_lengths(ends_q, given.get("seqused_q"), batch, most_q),
                  _lengths(ends_k, given.get("seqused_k"), batch, most_k))
    return int(q.shape[-2] * sum(nq * nk for nq, nk in lengths))


@register_flop_formula(torch.ops.tessera.forward, get_raw=True)  # type: ignore[untyped-decorator]
def forward_flops(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, out_val: Any = None) -> int:
    products = 1 + (len(arguments) > ops.PLACES["qv"] and arguments[ops.PLACES["qv"]] is not None)  # with v
    return 2 * _scores(q, k, arguments) * (q.shape[-1] + products * v.shape[-1])


@register_flop_formula(torch.ops.tessera.backward, get_raw=True)  # type: ignore[untyped-decorator]
def backward_flops(d_o: Tensor, d_lse: Optional[Tensor], o: Tensor, lse: Tensor, wanted: Sequence[bool], q: Tensor,
                   k: Tensor, v: Tensor, *arguments: Any, out_val: Any = None) -> int:
    """S again; dP = dO V^T for all but dV; then dV = P^T dO, dQ = dS K, dK = dS^T Q."""
    dq, dk, dv, *others = wanted
    dims = q.shape[-1] * (1 + dq + dk) + v.shape[-1] * (dv + any((dq, dk, *others)))
    return 2 * _scores(q, k, arguments) * dims
