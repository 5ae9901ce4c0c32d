# SPDX-License-Identifier: Apache-2.0
"""Attention for JAX, eagerly and inside jit, on CPU and CUDA: XLA calls the library through its FFI; a custom VJP.

Nothing of JAX is needed to build the package: _xla_ffi.py holds our own declarations. Call `attention`, or
`dot_product_attention` in place of jax.nn's.
"""
from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
from typing import TYPE_CHECKING, Any, Iterable, Literal, Mapping, NamedTuple, Optional, Union, overload

import jax
import jax.numpy as jnp

from . import _abi, _call, _jax_sharding, _xla_ffi
from ._arrays import contiguous, type_code
from ._convert import optional, refuse_masked, type_name
from ._options import GRADIENTS, TENSORS, Settings, gradient_names, has_padding, parse, require_seed, swaps_heads

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import AttentionOptions, Layout

if jax.__version_info__ < (0, 7):  # whose custom_partitioning knows less
    raise ImportError(f"tessera.jax: JAX is {jax.__version__}; must be 0.7 or later (Python 3.11 or later)")

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


def _struct(name: str, inputs: Mapping[str, Array]) -> Any:
    """Shape and type of an output."""
    q = inputs["q"]
    if name == "o":
        return jax.ShapeDtypeStruct((*q.shape[:-1], inputs["v"].shape[-1]), q.dtype)
    if name == "lse":
        lse_type = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
        return jax.ShapeDtypeStruct((*q.shape[:-3], q.shape[-2], q.shape[-3]), lse_type)
    return jax.ShapeDtypeStruct(inputs[name[1:]].shape, inputs[name[1:]].dtype)  # a gradient


class _Part(NamedTuple):
    """One call of the library from XLA's side, over whole arrays or one device's parts of them."""
    question: _Question
    outputs: tuple[str, ...]

    def __call__(self, inputs: dict[str, Array], batch0: int, head0: int) -> tuple[Array, ...]:
        settings = self.question.settings
        settings = settings._replace(batch0=settings.batch0 + batch0, head0=settings.head0 + head0)
        structs = [_struct(name, inputs) for name in self.outputs]
        filled: dict[str, Array] = {}  # arrays in whose memory outputs of that name are written
        if "o" in self.outputs and has_padding(inputs):
            filled = {name: jnp.full(struct.shape, value, struct.dtype)
                      for name, struct, value in zip(self.outputs, structs, (0, -math.inf))}
        attribute = json.dumps({"inputs": [*inputs, *filled], "outputs": self.outputs, "settings": settings,
                                "seed": [self.question.seed, self.question.seed_offset]})
        aliases = {len(inputs) + n: self.outputs.index(name) for n, name in enumerate(filled)}
        call = jax.ffi.ffi_call(_TARGET, tuple(structs), vmap_method="sequential", input_output_aliases=aliases)
        return tuple(call(*inputs.values(), *filled.values(), call=attribute))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def _call_library(question: _Question, inputs: dict[str, Array], outputs: tuple[str, ...]) -> tuple[Array, ...]:
    structs = [_struct(name, inputs) for name in outputs]
    arrays = {**inputs, **dict(zip(outputs, structs))}
    shapes = tuple(tuple(x.shape) for x in arrays.values())
    _check(question.settings, tuple((name, shape, str(x.dtype)) for (name, x), shape in zip(arrays.items(), shapes)))
    described = _jax_sharding.Described(tuple(inputs), outputs, shapes, question.settings.dropout > 0)
    return _jax_sharding.call(described, _Part(question, outputs), tuple(inputs.values()))


@_call_library.defjvp
def _refuse_to_differentiate(*arguments: Any) -> Any:
    """Of calls that _differentiable makes, in both passes. First derivatives do not come here: it has its own rule."""
    raise NotImplementedError("tessera: second derivatives of attention are not there; its gradients cannot be "
                              "differentiated again")


# --- differentiation -------------------------------------------------------------------------------------------------

def _forward(question: _Question, tensors: dict[str, Array]) -> tuple[Array, Array]:
    q, v = tensors["q"], tensors["v"]
    if q.ndim < 3 or v.ndim < 1:
        raise ValueError(f"q: has shape {list(q.shape)}; must be [batch, tokens, heads, dim] or [tokens, heads, dim]")
    o, lse = _call_library(question, tensors, ("o", "lse"))
    return o, lse


_differentiable = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_attention = jax.jit(_differentiable, static_argnums=0)  # shard_map wants what has symbolic zeros inside a jit


def _save(question: _Question, primals: dict[str, Any]) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    """Keeps the inputs, the results, and (as the keys of a dict, which tracing keeps) which gradients are wanted."""
    if "slopes" in primals and primals["slopes"].perturbed:
        raise NotImplementedError("alibi_slopes: are to be differentiated, but attention gives them no gradient; pass "
                                  "jax.lax.stop_gradient(alibi_slopes), or the same scores as a bias")
    for name in ("k_scale", "v_scale", "qv"):
        if name in primals and primals[name].perturbed:
            raise NotImplementedError(f"{name}: is to be differentiated, but attention gives it no gradient; pass "
                                      f"jax.lax.stop_gradient({name})")
    tensors = {name: p.value for name, p in primals.items()}
    wanted = {name: None for name, p in primals.items() if p.perturbed and name in GRADIENTS}
    o, lse = _forward(question, tensors)
    return (o, lse), (tensors, o, lse, wanted)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _gradients(question: _Question, tensors: dict[str, Array], saved: dict[str, Array],
               wanted: tuple[str, ...]) -> dict[str, Array]:
    """Those of the wanted tensors, by the tensors' names."""
    outputs = tuple(GRADIENTS[name] for name in wanted)
    return dict(zip(wanted, _call_library(question, {**tensors, **saved}, outputs)))


def _differentiate(question: _Question, saved: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[dict[str, Any]]:
    tensors, o, lse, wanted = saved
    gradients: dict[str, Any] = dict.fromkeys(tensors)
    is_zero = [isinstance(c, jax.custom_derivatives.SymbolicZero) for c in cotangents]
    if not wanted or all(is_zero):
        return (gradients,)
    results = {"o": o, "lse": lse, "d_o": jnp.zeros_like(o) if is_zero[0] else cotangents[0]}
    if not is_zero[1]:
        results["d_lse"] = cotangents[1]
    return ({**gradients, **_gradients(question, tensors, results, tuple(wanted))},)


_differentiable.defvjp(_save, _differentiate, symbolic_zeros=True)


# --- the function to call --------------------------------------------------------------------------------------------

def _words(rng: Array) -> Array:
    """A key of jax.random as the handler reads it: a seed of two words, or seed and offset of four. It reads 16 bytes."""
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        if rng.shape:
            raise ValueError(f"rng: has shape {list(rng.shape)}; must be one key of jax.random")
        rng = jax.random.key_data(rng)
    if rng.shape == (2,) and rng.dtype == jnp.uint32:
        rng = jnp.concatenate([rng, jnp.zeros(2, rng.dtype)])
    if (rng.dtype, rng.shape) not in ((jnp.uint32, (4,)), (jnp.int32, (4,)), (jnp.int64, (2,))):
        raise ValueError(f"rng: is {rng.dtype} {list(rng.shape)}; must be a key of jax.random, uint32 [4] (seed and offset, "
                         "low words first) or int64 [2]")
    return rng


def _array(name: str, x: Any, q_type: str) -> Array:
    refuse_masked(name, x)
    x = jnp.asarray(optional(name, x, q_type))
    return _words(x) if name == "rng" else x


def _ask(q: Array, k: Array, v: Array, options: Mapping[str, Any]) -> tuple[_Question, dict[str, Array]]:
    if jnp.issubdtype(getattr(options.get("seed"), "dtype", int), jax.dtypes.prng_key):
        raise TypeError("seed: is a key of jax.random; pass it as rng")
    for name, value in options.items():
        if isinstance(value, jax.core.Tracer) and name not in TENSORS:
            instead = "pass rng, which is an array" if name.startswith("seed") else "name it in jit's static_argnames"
            raise TypeError(f"{name}: is traced; must be known when the call is compiled: {instead}")
    parsed = parse(options)
    tensors = {"q": q, "k": k, "v": v, **parsed.tensors}
    q_type = type_name(q) if hasattr(q, "dtype") else ""
    arrays = {name: _array(name, x, q_type) for name, x in tensors.items()}
    return _Question(parsed.settings, *require_seed(parsed)), _jax_sharding.same_axes(arrays)


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
    tessera.AttentionOptions; all but the arrays are static under jit. Differentiable in q, k, v, bias, sinks and
    through LSE. For dropout under jit give `rng`: a key of jax.random, uint32 [4] (seed and offset, low words first) or
    int64 [2]. Arrays that are sharded over batch or heads stay so.
    """
    q, k, v = _swap_heads(layout, q, k, v)
    if options.get("qv") is not None:
        (options["qv"],) = _swap_heads(layout, options["qv"])
    o, lse = _attention(*_ask(q, k, v, options))
    (o,) = _swap_heads(layout, o)
    return (o, lse) if return_lse else o


_NAMES_OF_JAX_NN = {"q": "query", "k": "key", "v": "value", "causal": "is_causal",
                    "seqused_q": "query_seq_lengths", "seqused_k": "key_value_seq_lengths",
                    "window": "local_window_size"}


def _is_negative(side: Any) -> bool:
    """What is no whole number is refused where windows are read."""
    try:
        return operator.index(side) < 0
    except TypeError:
        return False


def _at_most(name: str, lengths: Any, count: int) -> Array:
    """From 0 to count, as jax.nn reads other lengths: it compares positions with them."""
    refuse_masked(name, lengths)
    lengths = jnp.asarray(optional(name, lengths, ""))
    return jnp.clip(lengths, 0, count) if lengths.dtype == jnp.int32 else lengths


def dot_product_attention(query: Array, key: Array, value: Array, bias: Optional[Array] = None,
                          mask: Optional[Array] = None, *, scale: Optional[float] = None, is_causal: bool = False,
                          query_seq_lengths: Optional[Array] = None, key_value_seq_lengths: Optional[Array] = None,
                          local_window_size: Union[int, tuple[int, int], None] = None,
                          implementation: Optional[str] = None, return_residual: bool = False
                          ) -> Union[jax.Array, tuple[jax.Array, jax.Array]]:
    """jax.nn.dot_product_attention, with its arguments, shapes and meaning, by `attention`.

    query [B,T,N,H], key and value [B,S,K,H], all with or without B; bias and mask broadcast to [B,N,T,S]. Query i sees
    the keys up to i with is_causal, from i - left to i + right with local_window_size. With return_residual LSE comes
    too, [B,T,N] in key's type and without a gradient. Queries that see no key give 0, where jax.nn averages the values.
    """
    if implementation is not None:
        raise ValueError(f"implementation: is {implementation!r}; must be None: XLA's and cuDNN's are jax.nn's")
    q, k, v = (jnp.asarray(x) for x in (query, key, value))
    whole = q.ndim > 3
    options: dict[str, Any] = {"scale": scale, "causal": is_causal, "alignment": "top_left"}
    for name, tokens, lengths in (("seqused_q", q, query_seq_lengths), ("seqused_k", k, key_value_seq_lengths)):
        if lengths is not None and tokens.ndim > 2:
            options[name] = _at_most(name, lengths, tokens.shape[-3])
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None:
            x = jnp.asarray(x)
            options[name] = x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x
    if local_window_size is not None:
        both = isinstance(local_window_size, int)
        window: Any = (local_window_size, local_window_size) if both else local_window_size
        window = tuple(window) if isinstance(window, Iterable) else window
        if isinstance(window, tuple) and any(map(_is_negative, window)):
            raise ValueError(f"local_window_size: is {local_window_size}; must be 0 or more on each side")
        options["window"] = window
    try:
        o, lse = attention(*(x[None] if x.ndim == 3 else x for x in (q, k, v)), return_lse=True, **options)
    except (TypeError, ValueError) as error:
        raise _abi.renamed(error, _NAMES_OF_JAX_NN) from None
    o = o if whole else o[0]
    if not return_residual:
        return o
    residual = jax.lax.stop_gradient(lse.swapaxes(1, 2).astype(k.dtype))
    return o, residual if whole else residual[0]


def backward(d_o: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, d_lse: Optional[Array] = None,
             gradients: Iterable[str] = ("dq", "dk", "dv"), layout: Layout = "bnhd",
             **options: Unpack[AttentionOptions]) -> dict[str, Array]:
    """tessera.backward for arrays on a GPU and inside jit: the gradients that are named, by their names."""
    d_o, q, k, v, o = _swap_heads(layout, d_o, q, k, v, o)
    saved = {"o": o, "lse": lse, "d_o": d_o, **({} if d_lse is None else {"d_lse": d_lse})}
    question, tensors = _ask(q, k, v, options)
    results = _gradients(question, tensors, saved, tuple(name[1:] for name in gradient_names(gradients, tensors)))
    return {GRADIENTS[name]: _swap_heads(layout, gradient)[0] if name in "qkv" else gradient
            for name, gradient in results.items()}
