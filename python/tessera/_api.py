# SPDX-License-Identifier: Apache-2.0
"""The package's functions for arrays of any library: attention, forward, backward, merge, dropout_mask, plan, info."""
from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Iterable, Literal, NamedTuple, Optional, Sequence, overload

from . import _abi, _call
from ._arrays import contiguous, is_of_xla, library_of, maker, view
from ._call import View
from ._convert import optional, rows, type_name
from ._options import Parsed, gradient_names, has_padding, parse, require_seed, swaps_heads

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import AttentionOptions, Layout

PAGE_OUTSIDE_POOL = 1  # A bit of `status`: a table entry in use was no page of the pool, and its keys counted as zeros
BEYOND_BOUNDS = 2  # A bit of `status`, on GPUs: a length was cut, or a row of append left out

Array = Any  # numpy.ndarray, torch.Tensor, jax.Array, cupy.ndarray, or anything else that speaks DLPack


class Gradients(NamedTuple):
    """What `backward` returns: arrays like q, k, v, bias and sinks; None where not asked for."""
    dq: Optional[Array]
    dk: Optional[Array]
    dv: Optional[Array]
    dbias: Optional[Array]
    dsinks: Optional[Array]


class Plan(NamedTuple):
    """How a call would be answered: the kernel's name, its workspace in bytes, and lines for people."""
    kernel: str
    workspace_size: int
    description: str


_HAVE_HEADS = {"q", "k", "v", "qv", "o", "d_o", "dq", "dk", "dv"}  # [..., tokens, heads, dim], or the other way round


def _swap(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes[:-3], sizes[-2], sizes[-3], sizes[-1]) if len(sizes) > 2 else sizes


def _swapped(seen: View) -> View:
    return seen._replace(shape=_swap(seen.shape), strides=_swap(seen.strides))


class _Views:
    """Arrays of one call, as Views. Owns whatever they need to stay valid."""

    def __init__(self, arrays: dict[str, Array], stream: int, heads_first: bool) -> None:
        self._keep: list[Any] = []
        self._heads_first = heads_first
        self.views: dict[str, View] = {}
        for name, array in arrays.items():
            self.add(name, array, stream)

    def _swaps(self, name: str) -> bool:
        return self._heads_first and name in _HAVE_HEADS

    def add(self, name: str, array: Array, stream: int) -> Array:
        array = rows(name, array)
        self._keep.append(array)
        seen = view(name, array, stream, self._keep)
        self.views[name] = _swapped(seen) if self._swaps(name) else seen
        return array

    def shape(self, name: str, seen: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an array that will be seen in that one."""
        return _swap(seen) if self._swaps(name) else seen

    def imagine(self, name: str, seen: tuple[int, ...], code: int) -> None:
        """An array beside q that nobody has made."""
        q, shape = self.views["q"], self.shape(name, seen)
        made = View(0, code, q.device_type, q.device_id, shape, contiguous(shape))
        self.views[name] = _swapped(made) if self._swaps(name) else made


def _lse_shape(q: View) -> tuple[int, ...]:
    """[B,Hq,Nq], or [Hq,Tq] of packed input. A q with a wrong number of dimensions is refused by the library."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3]) if len(q.shape) >= 3 else q.shape


def _lse_type(q: View) -> int:
    return _abi.F64 if q.type == _abi.F64 else _abi.F32


def _inputs(q: Array, k: Array, v: Array, parsed: Parsed) -> dict[str, Array]:
    q_type = type_name(q) if hasattr(q, "dtype") else ""
    return {"q": q, "k": k, "v": v, **{name: optional(name, x, q_type) for name, x in parsed.tensors.items()}}


def _refuse_stream(stream: Optional[int]) -> None:
    if stream is not None:
        raise ValueError(f"stream: is {stream}; JAX runs its calls on streams of its own")


def _checked_stream(stream: Optional[int]) -> Optional[int]:
    return None if stream is None else _abi.integer("stream", stream, signed=False, unsigned=True)


def _on_vulkan(device: str, q: Array, stream: Optional[int]) -> bool:
    from . import _vulkan
    if library_of(q) != "numpy":
        raise TypeError(f"device: is {device!r} but q is of {library_of(q)}; must be NumPy's there")
    return _vulkan.check_device(device, stream)


def _is_writable(array: Array) -> bool:
    return library_of(array) != "jax" and getattr(getattr(array, "flags", None), "writeable", True)


def _run(made: Any, views: dict[str, View], parsed: Parsed, seed: tuple[int, int], stream: int,
         on_vulkan: Iterable[str] = ()) -> None:
    """on_vulkan: what the call writes, if it runs on a Vulkan device."""
    if on_vulkan:
        from . import _vulkan
        _vulkan.run(views, parsed.settings, seed, on_vulkan)
        return
    workspace = []

    def allocate(size: int) -> int:
        workspace.append(made.make((size,), _abi.U8))
        return view("workspace", workspace[0], stream, []).pointer

    _call.run(views, parsed.settings, seed, stream, allocate)


def forward(q: Array, k: Array, v: Array, *, layout: Layout = "bnhd", stream: Optional[int] = None,
            status: Optional[Array] = None, device: Optional[str] = None,
            **options: Unpack[AttentionOptions]) -> tuple[Array, Array]:
    """Attention's output and LSE: (O [B,Nq,Hq,Dv] in q's type, LSE [B,Hq,Nq] in f32).

    q [B,Nq,Hq,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv] with Hq a multiple of Hk; with cu_seqlens_q and cu_seqlens_k
    q [Tq,Hq,D], k [Tk,Hk,D], v [Tk,Hk,Dv], O [Tq,Hq,Dv], LSE [Hq,Tq]. f32, f16 or bf16; f64 by the reference kernel.
    With layout="bhnd" heads come before tokens in q, k, v and O: [B,Hq,Nq,D], or [Hq,Tq,D].
    Any strides, but the last dimension's is 1. LSE is the natural logarithm. A row that sees no
    key, or lies beyond its sequence's length, has O = 0 and LSE = -inf.
    Options: AttentionOptions. The results are arrays of q's library, on q's device. On a GPU the call enqueues on the
    library's current stream there, or on `stream`, a CUstream as an integer, and returns. Work that still writes q, k
    or v must be ordered before it; arrays that come through DLPack see to that themselves. JAX has streams of its own.
    `status`, int32 [1], goes with a page table: the call sets bit 0 of it (PAGE_OUTSIDE_POOL) where a table entry in
    use is no page of the pool, so that its keys counted as zeros, and clears none.
    device="vulkan" copies arrays of the CPU's memory to the first Vulkan device, computes there, and copies the results
    back.
    """
    vulkan = device is not None and _on_vulkan(device, q, stream)
    if status is not None and (is_of_xla(q) or not _is_writable(status)):
        raise ValueError("status: cannot be written; must be a writable array, and q none of JAX's in jit or on a GPU")
    if is_of_xla(q):
        _refuse_stream(stream)
        from . import jax as jax_front
        o, lse = jax_front.attention(q, k, v, return_lse=True, layout=layout, **options)
        return o, lse
    parsed = parse(options)
    seed = require_seed(parsed)
    made = maker(q, _checked_stream(stream))
    stream = made.stream
    given = {**_inputs(q, k, v, parsed), **({} if status is None else {"status": status})}
    arrays = _Views(given, stream, swaps_heads(layout))
    like = arrays.views["q"]
    padded = has_padding(parsed.tensors)
    o_shape = (*like.shape[:-1], *arrays.views["v"].shape[-1:])
    o = arrays.add("o", made.make(arrays.shape("o", o_shape), like.type, 0 if padded else None), stream)
    lse = arrays.add("lse", made.make(_lse_shape(like), _lse_type(like), -math.inf if padded else None), stream)
    _run(made, arrays.views, parsed, seed, stream, ("o", "lse") if vulkan else ())
    return o, lse


@overload
def attention(q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, layout: Layout = "bnhd",
              device: Optional[str] = None, **options: Unpack[AttentionOptions]) -> Array: ...


@overload
def attention(q: Array, k: Array, v: Array, *, return_lse: Literal[True], layout: Layout = "bnhd",
              device: Optional[str] = None, **options: Unpack[AttentionOptions]) -> tuple[Array, Array]: ...


@overload
def attention(q: Array, k: Array, v: Array, *, return_lse: bool, layout: Layout = "bnhd",
              device: Optional[str] = None, **options: Unpack[AttentionOptions]) -> Any: ...


def attention(q: Array, k: Array, v: Array, *, return_lse: bool = False, layout: Layout = "bnhd",
              device: Optional[str] = None, **options: Unpack[AttentionOptions]) -> Any:
    """Exact attention: O [B,Nq,Hq,Dv], or (O, LSE [B,Hq,Nq]) with return_lse.

    Shapes, layouts, types and options are those of `forward`. PyTorch tensors go to tessera.torch.attention and JAX
    arrays to tessera.jax.attention, which are differentiable; device="vulkan" takes neither. See `forward`.
    """
    library = library_of(q)
    if device is not None:
        o, lse = forward(q, k, v, layout=layout, device=device, **options)
        return (o, lse) if return_lse else o
    if library == "torch":
        from . import torch as torch_front
        return torch_front.attention(q, k, v, return_lse=return_lse, layout=layout, **options)
    if library == "jax":
        from . import jax as jax_front
        return jax_front.attention(q, k, v, return_lse=return_lse, layout=layout, **options)
    o, lse = forward(q, k, v, layout=layout, **options)
    return (o, lse) if return_lse else o


def backward(d_o: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, d_lse: Optional[Array] = None,
             gradients: Iterable[str] = ("dq", "dk", "dv"), layout: Layout = "bnhd", stream: Optional[int] = None,
             device: Optional[str] = None, **options: Unpack[AttentionOptions]) -> Gradients:
    """Gradients of attention, for the gradients d_o [B,Nq,Hq,Dv] and d_lse [B,Hq,Nq] (f32, optional) of its results.

    o and lse are those of `forward` with the same options, or of a merge. `gradients` names what is computed, of dq,
    dk, dv, dbias and dsinks; each has the shape and type of its input. `layout` is theirs, d_o's and o's too;
    `device` is as in `forward`.
    """
    vulkan = device is not None and _on_vulkan(device, q, stream)
    parsed = parse(options)
    inputs = _inputs(q, k, v, parsed)
    gradients = gradient_names(gradients, inputs)
    if is_of_xla(q):
        _refuse_stream(stream)
        from . import jax as jax_front
        ours = jax_front.backward(d_o, q, k, v, o, lse, d_lse=d_lse, gradients=gradients, layout=layout,
                                  **options)
        return Gradients(**{name: ours.get(name) for name in Gradients._fields})
    seed = require_seed(parsed)
    made = maker(q, _checked_stream(stream))
    stream = made.stream
    saved = {"o": o, "lse": lse, "d_o": d_o, **({} if d_lse is None else {"d_lse": d_lse})}
    arrays = _Views({**inputs, **saved}, stream, swaps_heads(layout))
    results: dict[str, Optional[Array]] = dict.fromkeys(Gradients._fields)
    for name in Gradients._fields:
        if name in gradients:
            source = arrays.views[name[1:]]
            results[name] = arrays.add(name, made.make(arrays.shape(name, source.shape), source.type), stream)
    _run(made, arrays.views, parsed, seed, stream, gradients if vulkan else ())
    return Gradients(**results)


def merge(partials: Iterable[tuple[Array, Array]], *, threads: int = 0) -> tuple[Array, Array]:
    """Partial results (O, LSE) over disjoint sets of keys become that of their union.

    O [B,Nq,Hq,Dv] or [Tq,Hq,Dv], LSE f32 [B,Hq,Nq] or [Hq,Tq]; all of one shape, in f32, f16 or bf16.
    """
    partials = list(partials)
    if not partials:
        raise ValueError("partials: is empty; merging needs at least one partial result")
    for i, part in enumerate(partials):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise TypeError(f"partials[{i}]: is a {type(part).__name__}; must be a pair (O, LSE)")
    made = maker(partials[0][0])
    keep: list[Any] = []
    views = [(view(f"partials[{i}].o", o, made.stream, keep), view(f"partials[{i}].lse", lse, made.stream, keep))
             for i, (o, lse) in enumerate(partials)]
    o, lse = (made.make(part.shape, part.type) for part in views[0])
    views.append((view("merged.o", o, made.stream, keep), view("merged.lse", lse, made.stream, keep)))
    structs = (_abi.Outputs * len(views))()
    for struct, (part_o, part_lse) in zip(structs, views):
        tensors = _call.tensor("o", part_o), _call.tensor("lse", part_lse)
        keep.extend(tensors)
        struct.size = ctypes.sizeof(_abi.Outputs)
        struct.o, struct.lse = (ctypes.pointer(t) for t in tensors)
    execution = _abi.make(_abi.Execution, threads=threads, stream=made.stream or None)
    _abi.check(_abi.lib.tessera_merge(structs, len(partials), ctypes.byref(structs[len(partials)]),
                                      ctypes.byref(execution)))
    return o, lse


def dropout_mask(shape: Sequence[int], *, dropout_p: float, seed: int, seed_offset: int = 0, row0: int = 0,
                 col0: int = 0, head0: int = 0, batch0: int = 0) -> Array:
    """The mask that dropout uses in both passes, as a NumPy array: uint8 [B,Hq,Nq,Nk], 1 where kept."""
    import numpy
    mask = numpy.empty(tuple(shape), numpy.uint8)
    struct = _call.tensor("mask", view("mask", mask, 0, []))
    parsed = parse({"dropout_p": dropout_p, "seed": seed, "seed_offset": seed_offset, "row0": row0, "col0": col0,
                    "head0": head0, "batch0": batch0})
    options = _call.options(parsed.settings)
    options.seed, options.seed_offset = (number % 2**64 for number in require_seed(parsed))
    _abi.check(_abi.lib.tessera_dropout_mask(ctypes.byref(struct), None, ctypes.byref(options), None))
    return mask


def plan(q: Array, k: Array, v: Array, *, backward: bool = False, layout: Layout = "bnhd",
         **options: Unpack[AttentionOptions]) -> Plan:
    """How `forward`, or `backward` for dq, dk and dv, would be run with these arrays. Nothing is computed."""
    parsed = parse(options)
    stream = 0 if library_of(q) == "jax" else maker(q).stream
    arrays = _Views(_inputs(q, k, v, parsed), stream, swaps_heads(layout))
    seen = arrays.views["q"]
    o_shape = (*seen.shape[:-1], *arrays.views["v"].shape[-1:])
    arrays.imagine("o", o_shape, seen.type)
    arrays.imagine("lse", _lse_shape(seen), _lse_type(seen))
    if backward:
        arrays.imagine("d_o", o_shape, seen.type)
        for name in ("q", "k", "v"):
            arrays.imagine("d" + name, arrays.views[name].shape, arrays.views[name].type)
    call = _call.plan(arrays.views, parsed.settings)
    return Plan(call.kernel, call.workspace_size, call.description)


def info() -> str:
    """A few lines for people: processor, instruction sets, kernels, GPUs, compiler of GPU kernels."""
    return str(_abi.lib.tessera_info().decode())
