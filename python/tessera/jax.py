"""Attention for JAX, eagerly and inside jit, on CPU and CUDA: XLA calls the library through its FFI; a custom VJP.

Nothing of JAX is needed to build the package: _xla_ffi.py holds our own declarations. Call `attention`.
"""
from __future__ import annotations

import contextlib
import functools
import json
import math
from typing import TYPE_CHECKING, Any, Iterable, Literal, Mapping, NamedTuple, Optional, Union, overload

import jax
import jax.numpy as jnp

from . import _abi, _call, _xla_ffi
from ._arrays import contiguous, type_code
from ._convert import optional, refuse_masked, type_name
from ._options import GRADIENTS, Settings, gradient_names, has_padding, parse, require_seed, swaps_heads

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import AttentionOptions, Layout

Array = Any


class _Question(NamedTuple):
    """What of a call is known when it is traced."""
    settings: Settings
    seed: int
    seed_offset: int


# --- the handler: what XLA calls -------------------------------------------------------------------------------------

class _Names(NamedTuple):
    inputs: list[str]
    outputs: list[str]
    settings: Settings
    seed: tuple[int, int]


@functools.lru_cache(maxsize=256)
def _read(attribute: str) -> _Names:
    fields = json.loads(attribute)
    return _Names(fields["inputs"], fields["outputs"], Settings(*fields["settings"]), tuple(fields["seed"]))


def _seeds(view: _call.View) -> _call.View:
    """rng as the library reads it, int64 [2]: JAX often has no integers of 64 bits, so four words of 32 serve too."""
    return view._replace(type=_abi.I64, shape=(2,), strides=(1,)) if view.type == _abi.I32 else view


def _handle(arguments: _xla_ffi.Arguments) -> None:
    names = _read(arguments.attribute)
    views = dict(zip(names.inputs, arguments.inputs))
    views.update(zip(names.outputs, arguments.outputs))  # in place of those that were filled beforehand: same memory
    if "rng" in views:
        views["rng"] = _seeds(views["rng"])
    context = arguments.context
    stream = 0 if views["q"].device_type == _abi.CPU else context.stream()
    _call.run(views, names.settings, names.seed, stream, context.allocate)


_TARGET = "tessera_attention"
_HANDLERS = {platform: _xla_ffi.handler(_handle, device)
             for platform, device in (("cpu", _abi.CPU), ("CUDA", _abi.CUDA))}
for _platform, _pointer in _HANDLERS.items():
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_pointer), platform=_platform)


@functools.lru_cache(maxsize=256)
def _check(settings: Settings, arrays: tuple[tuple[str, tuple[int, ...], str], ...]) -> None:
    """Raises what the library has to say of a call when it is traced: XLA makes errors of its own of a handler's.

    Planned for the CPU, which has the same rules: where the call will run is not known yet.
    """
    if not all(isinstance(size, int) for _, shape, _ in arrays for size in shape):
        return  # exported for any size
    views = {name: _call.View(0, type_code(name, "int32" if dtype == "uint32" else dtype), _abi.CPU, 0, shape,
                              contiguous(shape)) for name, shape, dtype in arrays}
    if "rng" in views:
        views["rng"] = _seeds(views["rng"])
    with contextlib.suppress(NotImplementedError):  # a GPU may have a kernel for it
        _call.plan(views, settings)


def _ffi_call(question: _Question, inputs: dict[str, Array], outputs: dict[str, Any],
              filled: dict[str, Array]) -> tuple[Array, ...]:
    """One call of the library from XLA's side. `filled`: arrays in whose memory outputs of that name are written."""
    _check(question.settings, tuple((name, tuple(x.shape), str(x.dtype)) for name, x in {**inputs, **outputs}.items()))
    attribute = json.dumps({"inputs": [*inputs, *filled], "outputs": [*outputs], "settings": question.settings,
                            "seed": [question.seed, question.seed_offset]})
    aliases = {len(inputs) + n: list(outputs).index(name) for n, name in enumerate(filled)}
    call = jax.ffi.ffi_call(_TARGET, tuple(outputs.values()), vmap_method="sequential", input_output_aliases=aliases)
    return tuple(call(*inputs.values(), *filled.values(), call=attribute))


# --- differentiation -------------------------------------------------------------------------------------------------

def _forward(question: _Question, tensors: dict[str, Array]) -> tuple[Array, Array]:
    q, v = tensors["q"], tensors["v"]
    if q.ndim < 3 or v.ndim < 1:
        raise ValueError(f"q: has shape {list(q.shape)}; must be [batch, tokens, heads, dim] or [tokens, heads, dim]")
    lse_type = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    outputs = {"o": jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
               "lse": jax.ShapeDtypeStruct((*q.shape[:-3], q.shape[-2], q.shape[-3]), lse_type)}
    filled = {}
    if has_padding(tensors):
        filled = {name: jnp.full(outputs[name].shape, value, outputs[name].dtype)
                  for name, value in (("o", 0), ("lse", -math.inf))}
    o, lse = _ffi_call(question, tensors, outputs, filled)
    return o, lse


_attention = jax.custom_vjp(_forward, nondiff_argnums=(0,))


def _save(question: _Question, primals: dict[str, Any]) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    """Keeps the inputs, the results, and (as the keys of a dict, which tracing keeps) which gradients are wanted."""
    tensors = {name: p.value for name, p in primals.items()}
    wanted = {name: None for name, p in primals.items() if p.perturbed and name in GRADIENTS}
    o, lse = _forward(question, tensors)
    return (o, lse), (tensors, o, lse, wanted)


def _gradients(question: _Question, tensors: dict[str, Array], saved: dict[str, Array],
               wanted: Iterable[str]) -> dict[str, Array]:
    """Those of the wanted tensors, by the tensors' names."""
    like = {GRADIENTS[name]: jax.ShapeDtypeStruct(tensors[name].shape, tensors[name].dtype) for name in wanted}
    return dict(zip(wanted, _ffi_call(question, {**tensors, **saved}, like, {})))


def _differentiate(question: _Question, saved: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[dict[str, Any]]:
    tensors, o, lse, wanted = saved
    gradients: dict[str, Any] = dict.fromkeys(tensors)
    is_zero = [isinstance(c, jax.custom_derivatives.SymbolicZero) for c in cotangents]
    if not wanted or all(is_zero):
        return (gradients,)
    results = {"o": o, "lse": lse, "d_o": jnp.zeros_like(o) if is_zero[0] else cotangents[0]}
    if not is_zero[1]:
        results["d_lse"] = cotangents[1]
    return ({**gradients, **_gradients(question, tensors, results, wanted)},)


_attention.defvjp(_save, _differentiate, symbolic_zeros=True)


# --- the function to call --------------------------------------------------------------------------------------------

def _array(name: str, x: Any, q_type: str) -> Array:
    refuse_masked(name, x)
    return jnp.asarray(optional(name, x, q_type))


def _ask(q: Array, k: Array, v: Array, options: Mapping[str, Any]) -> tuple[_Question, dict[str, Array]]:
    parsed = parse(options)
    tensors = {"q": q, "k": k, "v": v, **parsed.tensors}
    q_type = type_name(q) if hasattr(q, "dtype") else ""
    return (_Question(parsed.settings, *require_seed(parsed)), {name: _array(name, x, q_type) for name, x in tensors.items()})


def _swap_heads(layout: Layout, *arrays: Array) -> tuple[Array, ...]:
    """[..., tokens, heads, dim] from the layout's order, or back."""
    if not swaps_heads(layout):
        return arrays
    return tuple(jnp.swapaxes(x, -3, -2) if jnp.ndim(x) > 2 else x for x in arrays)


@overload
def attention(q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, layout: Layout = "bnhd",
              **options: Unpack[AttentionOptions]) -> jax.Array: ...


@overload
def attention(q: Array, k: Array, v: Array, *, return_lse: Literal[True], layout: Layout = "bnhd",
              **options: Unpack[AttentionOptions]) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(q: Array, k: Array, v: Array, *, return_lse: bool, layout: Layout = "bnhd",
              **options: Unpack[AttentionOptions]) -> Union[jax.Array, tuple[jax.Array, jax.Array]]: ...


def attention(q: Array, k: Array, v: Array, *, return_lse: bool = False, layout: Layout = "bnhd",
              **options: Unpack[AttentionOptions]) -> Union[jax.Array, tuple[jax.Array, jax.Array]]:
    """Exact attention: O [B,Nq,Hq,Dv] in q's type, or (O, LSE f32 [B,Hq,Nq]) with return_lse.

    q [B,Nq,Hq,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv]; packed with cu_seqlens: q [Tq,Hq,D], ..., O [Tq,Hq,Dv], LSE [Hq,Tq].
    With layout="bhnd" heads come before tokens in q, k, v and O, and XLA transposes them. Options:
    tessera.AttentionOptions; all but the arrays are static under jit. Differentiable in q, k, v, bias, sinks and through
    LSE. For dropout under jit give `rng`: uint32 [4] (seed and offset, low words first) or int64 [2].
    """
    q, k, v = _swap_heads(layout, q, k, v)
    o, lse = _attention(*_ask(q, k, v, options))
    (o,) = _swap_heads(layout, o)
    return (o, lse) if return_lse else o


def backward(d_o: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, d_lse: Optional[Array] = None,
             gradients: Iterable[str] = ("dq", "dk", "dv"), layout: Layout = "bnhd",
             **options: Unpack[AttentionOptions]) -> dict[str, Array]:
    """tessera.backward for arrays on a GPU and inside jit: the gradients that are named, by their names."""
    d_o, q, k, v, o = _swap_heads(layout, d_o, q, k, v, o)
    saved = {"o": o, "lse": lse, "d_o": d_o, **({} if d_lse is None else {"d_lse": d_lse})}
    question, tensors = _ask(q, k, v, options)
    results = _gradients(question, tensors, saved, [name[1:] for name in gradient_names(gradients, tensors)])
    return {GRADIENTS[name]: _swap_heads(layout, gradient)[0] if name in "qkv" else gradient
            for name, gradient in results.items()}
