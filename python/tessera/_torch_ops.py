# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators tessera::forward and tessera::backward: what they do, their autograd and fake implementations.

Kernels run on the tensors' device and its current stream, with workspace from PyTorch's allocator. Used by torch.py,
whose `attention` is the function to call, and by bench.py.
"""
from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Callable, Iterable, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from . import _abi, _call
from ._abi import CPU, CUDA
from ._call import Call, Question, View
from ._options import Settings

_TYPES = {torch.float64: _abi.F64, torch.float32: _abi.F32, torch.float16: _abi.F16, torch.bfloat16: _abi.BF16,
          torch.int32: _abi.I32, torch.int64: _abi.I64, torch.uint8: _abi.U8, torch.bool: _abi.U8,
          torch.int8: _abi.I8, torch.float8_e4m3fn: _abi.E4M3}

KERNEL = "kernel_name"  # of operators: torch.compile calls one function with their arguments and a `kernel` of its own

# Arguments of both operators after q, k and v, with the names of the C ABI. PyTorch passes them up to the last that is
# not its default, and each costs time, so the usual ones come first. No plan depends on the seeds, which come last.
_BEFORE = {"bool causal": False, "bool deterministic": True, "float? scale": None, "SymInt window_left": -1,
           "SymInt window_right": -1, "float softcap": 0.0}
OPTIONAL = ("cu_seqlens_q", "cu_seqlens_k", "bias", "mask", "slopes", "sinks", "seqused_q", "seqused_k", "rng",
            "block_table", "v_block_table", "page_indptr", "page_indices", "leftpad_k", "k_scale", "v_scale",
            "qv", "tree_mask", "positions")
_AFTER = {"SymInt max_seqlen_q": -1, "SymInt max_seqlen_k": -1, "float dropout": 0.0, "int alignment": 0,
          "SymInt diagonal_offset": 0, "SymInt row0": 0, "SymInt col0": 0, "SymInt head0": 0, "SymInt batch0": 0,
          f"str? {KERNEL}": None, "int threads": 0}
_DEFAULTS = {**_BEFORE, **{f"Tensor? {name}": None for name in OPTIONAL}, **_AFTER, "int seed": 0,
             "int seed_offset": 0}
PLACES = {name.split()[-1]: place for place, name in enumerate(_DEFAULTS)}
VALUES = list(_DEFAULTS.values())
INPUTS = ("q", "k", "v", *OPTIONAL)
FORWARD = "Tensor q, Tensor k, Tensor v, " + ", ".join(f"{name}={value}" for name, value in _DEFAULTS.items())
BACKWARD = "Tensor d_o, Tensor? d_lse, Tensor o, Tensor lse, bool[] wanted, " + FORWARD

# Where they stand after q, k and v: settings, tensors, settings, seeds.
_OPTIONAL_FIRST = len(_BEFORE)
_OPTIONAL_END = _OPTIONAL_FIRST + len(OPTIONAL)
_SEEDS = _OPTIONAL_END + len(_AFTER)
# Tensors whose gradient attention does not give, by their keywords, and what to do about it.
_FIXED = {"alibi_slopes": (PLACES["slopes"], "pass alibi_slopes.detach(), or the same scores as a bias"),
          **{name: (PLACES[name], f"pass {name}.detach()") for name in ("k_scale", "v_scale", "qv")}}
_SETTINGS = [name.split()[-1].replace(KERNEL, "kernel") for name in (*_BEFORE, *_AFTER)]

RESULTS = "o", "lse"
GRADIENTS = {"d" + name: INPUTS.index(name) for name in ("q", "k", "v", "bias", "sinks")}  # and whose, by its place
_SAVED_AND_GRADIENTS = *RESULTS, "d_o", "d_lse", *GRADIENTS


# --- what the operators do -------------------------------------------------------------------------------------------

def view(name: str, t: Tensor) -> View:
    code = _TYPES.get(t.dtype)
    if code is None:
        raise TypeError(f"{name}: has type {t.dtype}; must be one of {', '.join(str(d) for d in _TYPES)}")
    if t.is_cuda:
        return View(t.data_ptr(), code, CUDA, t.get_device(), t.shape, t.stride())
    if t.device.type != "cpu":
        raise TypeError(f"{name}: is on {t.device}; must be on cpu or cuda")
    return View(t.data_ptr(), code, CPU, 0, t.shape, t.stride())


def _has_rows(t: Tensor) -> bool:
    """The library reads rows whose numbers lie side by side. A gradient that comes from a sum has strides of 0."""
    return t.dim() == 0 or t.stride(-1) == 1 or t.shape[-1] == 1


def rows(t: Tensor) -> Tensor:
    return t if _has_rows(t) else t.contiguous()


def sort_arguments(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[int, int]]:
    """Optional tensors, settings and seeds: of an operator's arguments after q, k and v, as many as PyTorch passes."""
    seed, seed_offset, *_ = *arguments[_SEEDS:], 0, 0
    return (arguments[_OPTIONAL_FIRST:_OPTIONAL_END], arguments[:_OPTIONAL_FIRST] + arguments[_OPTIONAL_END:_SEEDS],
            (seed % 2**64, seed_offset % 2**64))


def in_order(given: dict[str, Any]) -> list[Any]:
    """An operator's arguments after q, k and v, up to the last that is given, as PyTorch would pass them."""
    if not given:
        return []
    places = [PLACES[name] for name in given]
    arguments = VALUES[:max(places) + 1]
    for place, value in zip(places, given.values()):
        arguments[place] = value
    return arguments


def find(kind: tuple[Any, ...], tensors: Sequence[Optional[Tensor]]) -> tuple[Question, list[int]]:
    """The question that these tensors ask, and their addresses. Paid for in every call: looks at each tensor once."""
    key: list[Any] = [kind]
    pointers, bits = [], 0
    for t in tensors:
        if t is None:
            key.append(None)
        else:
            pointer = t.data_ptr()
            pointers.append(pointer)
            bits |= pointer
            key += t.dtype, t.get_device(), t.shape, t.stride()
    key += bits % _call.ALIGNMENT, torch.get_num_threads()  # a plan asks for what all pointers have in common
    return _call.questions.find(tuple(key)), pointers


def _find_usual(kind: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Question, list[int]]:
    """The same for three tensors, spelled out: this is most of what a call costs."""
    pointers = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    key = (kind, q.dtype, q.get_device(), q.shape, q.stride(), k.dtype, k.get_device(), k.shape, k.stride(),
           v.dtype, v.get_device(), v.shape, v.stride(), (pointers[0] | pointers[1] | pointers[2]) % _call.ALIGNMENT,
           torch.get_num_threads())
    return _call.questions.find(key), pointers


def _find_usual_backward(kind: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                         d_o: Tensor) -> tuple[Question, list[int]]:
    pointers = [q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), lse.data_ptr(), d_o.data_ptr()]
    bits = pointers[0] | pointers[1] | pointers[2] | pointers[3] | pointers[4] | pointers[5]
    key = (kind, q.dtype, q.get_device(), q.shape, q.stride(), k.dtype, k.get_device(), k.shape, k.stride(),
           v.dtype, v.get_device(), v.shape, v.stride(), o.dtype, o.get_device(), o.shape, o.stride(),
           lse.dtype, lse.get_device(), lse.shape, lse.stride(), d_o.dtype, d_o.get_device(), d_o.shape, d_o.stride(),
           bits % _call.ALIGNMENT, torch.get_num_threads())
    return _call.questions.find(key), pointers


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The same without an object in between, where this PyTorch has it.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def plan(settings: tuple[Any, ...], inputs: Sequence[Any], names: Sequence[str],
          others: Sequence[Optional[Tensor]]) -> Call:
    """For the inputs, and the others with these names."""
    given = {name: value for name, value in zip(_SETTINGS, settings) if value is not None}
    if not given.get("threads"):
        given["threads"] = torch.get_num_threads()
    tensors = *zip(INPUTS, inputs), *zip(names, others)
    return _call.plan({name: view(name, t) for name, t in tensors if t is not None}, Settings(**given))


def _run(question: Question, pointers: list[int], settings: tuple[Any, ...], seed: tuple[int, int],
         inputs: Sequence[Any], names: Sequence[str], others: Sequence[Optional[Tensor]]) -> None:
    """On the inputs' device. The pointers are those of the inputs and the others, which have these names, in order."""
    try:
        call = question.idle.pop()
    except IndexError:
        call = plan(settings, inputs, names, others)
    try:
        q = inputs[0]
        if not q.is_cuda:
            call.run(pointers, seed)
            return
        workspace = q.new_empty(call.workspace_size, dtype=torch.uint8) if call.workspace_size else None
        call.run(pointers, seed, _raw_stream(q.get_device()), 0 if workspace is None else workspace.data_ptr())
    finally:
        question.idle.append(call)


class _Outputs(NamedTuple):
    """What a forward pass returns."""
    o_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    lse_type: torch.dtype
    padded: bool  # there may be rows that belong to no sequence

    def make(self, q: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = q.new_empty(*self.o_shape), q.new_empty(*self.lse_shape, dtype=self.lse_type)  # a tuple takes longer
        return (o.zero_(), lse.fill_(-math.inf)) if self.padded else (o, lse)


def outputs(q: Tensor, v: Tensor, optional: Sequence[Optional[Tensor]]) -> _Outputs:
    for name, t in (("q", q), ("v", v)):
        if t.dim() < 3:
            raise ValueError(f"{name}: has shape {list(t.shape)}; must be [batch, tokens, heads, dim] or "
                             "[tokens, heads, dim]")
    given = {name for name, t in zip(OPTIONAL, optional) if t is not None}
    return _Outputs((*q.shape[:-1], v.shape[-1]), (*q.shape[:-3], q.shape[-2], q.shape[-3]),
                    torch.float64 if q.dtype == torch.float64 else torch.float32,
                    not given.isdisjoint(("cu_seqlens_q", "seqused_q")))


_READY, _COPY = "ready", "copy"  # notes: whether the library can read all rows as they lie


def run_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    optional: tuple[Any, ...] = ()
    settings, seed = arguments, _call.NO_SEED
    if len(arguments) > _OPTIONAL_FIRST:
        optional, settings, seed = sort_arguments(arguments)
    inputs = (q, k, v, *optional)
    question, pointers = find(settings, inputs) if optional else _find_usual(settings, q, k, v)
    note = question.note
    if note is None:
        note = question.note = outputs(q, v, optional) if _has_rows(q) and _has_rows(k) and _has_rows(v) else _COPY
    if note is _COPY:
        return run_forward(rows(q), rows(k), rows(v), *arguments)
    o, lse = note.make(q)
    pointers += o.data_ptr(), lse.data_ptr()
    _run(question, pointers, settings, seed, inputs, RESULTS, (o, lse))
    return o, lse


def require_one_device(names: Sequence[str], tensors: Sequence[Optional[Tensor]]) -> None:
    """For fake tensors, which no plan sees. PyTorch takes a call with a single one on `meta` for fake, and what is made
    for the others would never be filled in."""
    device = tensors[0].device  # type: ignore[union-attr]
    for name, t in zip(names, tensors):
        if t is not None and t.device != device:
            raise ValueError(f"{name}: is on {t.device} but {names[0]} is on {device}; all tensors must be on one device")


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    optional = sort_arguments(arguments)[0]
    require_one_device(INPUTS, (q, k, v, *optional))
    return outputs(q, v, optional).make(q)


def _empty_gradients(inputs: Sequence[Any], wanted: Sequence[bool]) -> list[Optional[Tensor]]:
    """Contiguous, in the shape of each input; None where not wanted."""
    return [torch.empty_like(inputs[place], memory_format=torch.contiguous_format) if want else None
            for place, want in zip(GRADIENTS.values(), wanted)]


def run_backward(d_o: Tensor, d_lse: Optional[Tensor], o: Tensor, lse: Tensor, wanted: Sequence[bool], q: Tensor,
                 k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients that are wanted, of dq, dk, dv, dbias and dsinks."""
    optional: tuple[Any, ...] = ()
    settings, seed = arguments, _call.NO_SEED
    if len(arguments) > _OPTIONAL_FIRST:
        optional, settings, seed = sort_arguments(arguments)
    inputs, saved = (q, k, v, *optional), (o, lse, d_o, d_lse)
    kind = ("backward", *wanted, *settings)
    if optional or d_lse is not None:
        question, pointers = find(kind, inputs + saved)
    else:
        question, pointers = _find_usual_backward(kind, q, k, v, o, lse, d_o)
    if question.note is None:
        question.note = _READY if all(map(_has_rows, (d_o, q, k, v))) else _COPY
    if question.note is _COPY:
        return run_backward(rows(d_o), d_lse, o, lse, wanted, rows(q), rows(k), rows(v), *arguments)
    gradients = _empty_gradients(inputs, wanted)
    results = [gradient for gradient in gradients if gradient is not None]
    if results:
        pointers += [gradient.data_ptr() for gradient in results]
        _run(question, pointers, settings, seed, inputs, _SAVED_AND_GRADIENTS, (*saved, *gradients))
    return results


def _backward_fake(d_o: Tensor, d_lse: Optional[Tensor], o: Tensor, lse: Tensor, wanted: Sequence[bool], q: Tensor,
                   k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = q, k, v, *sort_arguments(arguments)[0]
    require_one_device((*INPUTS[:len(inputs)], *RESULTS, "d_o", "d_lse"), (*inputs, o, lse, d_o, d_lse))
    gradients = _empty_gradients(inputs, wanted)
    return [gradient for gradient in gradients if gradient is not None]


# --- a shorter way ---------------------------------------------------------------------------------------------------
# PyTorch's way to a function in Python and back takes longer than the function. Where nothing stands on that way but
# autograd, which `attention` looks after itself, it is left out.

def _key_bits(*names: str) -> int:
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


_OF_THREADS: Optional[int] = None
try:  # Dispatch keys that are always there; modes, transforms, tracers, subclasses and lazy negation have others.
    _OF_THREADS = _key_bits("BackendSelect", "ADInplaceOrView")
    _OF_TENSORS = _key_bits("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU",
                            "AutocastCUDA")
    _keys_of_thread, _keys_of_tensor = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_keys
    _profiler_enabled = torch._C._autograd._profiler_enabled
except AttributeError:  # a PyTorch without these functions
    _OF_THREADS = None


def unobserved(arguments: Iterable[Any]) -> bool:
    """Whether nobody could tell a call of the operator with these arguments from one of its function."""
    if _OF_THREADS is None or _keys_of_thread().raw_repr() & ~_OF_THREADS or _profiler_enabled():
        return False
    for x in arguments:
        if isinstance(x, Tensor) and _keys_of_tensor(x).raw_repr() & ~_OF_TENSORS:
            return False
    return True


# --- differentiation -------------------------------------------------------------------------------------------------
# Kernels at PyTorch's Autograd key, written out: those that torch.library.register_autograd makes cost ten times more,
# and none of torch.func's transforms passes through them. Their functions are of one level, as those are that torch.func
# makes of an autograd.Function: a kernel is called once for each transform, and what it calls leads to the next.

def needs_gradient(arguments: Iterable[Any]) -> bool:
    if torch.is_grad_enabled():
        for x in arguments:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return bool(forward_ad._current_level >= 0)  # forward mode: autograd.Function looks for tangents, and refuses them


def _below_autograd(operator: Any, arguments: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _next_level(operator: Any, arguments: Sequence[Any]) -> Any:
    """From an autograd.Function, which turns gradients off: an outer transform of torch.func may want them."""
    with torch.enable_grad():
        return _below_autograd(operator, arguments)


@functools.lru_cache(maxsize=None)
def _wanted(needs: tuple[bool, ...]) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Which of the gradients are wanted, and where they stand among an operator's arguments, which need them or not."""
    of_tensors = needs[:3] + needs[3 + _OPTIONAL_FIRST:]
    wanted = tuple(place < len(of_tensors) and of_tensors[place] for place in GRADIENTS.values())
    places = itertools.compress(GRADIENTS.values(), wanted)
    return wanted, tuple(place if place < 3 else place + _OPTIONAL_FIRST for place in places)


def _in_places(count: int, places: Sequence[int], gradients: Sequence[Tensor]) -> tuple[Optional[Tensor], ...]:
    results: list[Optional[Tensor]] = [None] * count
    for place, gradient in zip(places, gradients):
        results[place] = gradient
    return tuple(results)


class Attention(_SingleLevelFunction):
    """At the Autograd key of tessera::forward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        o, lse = _next_level(forward_operator, (q, k, v, *arguments))
        Attention.save(ctx, o, lse, q, k, v, arguments)
        return o, lse

    @staticmethod
    def save(ctx: Any, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, arguments: tuple[Any, ...]) -> None:
        for name, (place, instead) in _FIXED.items():
            if len(arguments) > place and ctx.needs_input_grad[3 + place]:
                raise NotImplementedError(f"{name}: requires a gradient, which attention does not give; {instead}")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(o, lse, q, k, v, *arguments[_OPTIONAL_FIRST:_OPTIONAL_END])
        ctx.settings = arguments[:_OPTIONAL_FIRST], arguments[_OPTIONAL_END:]

    @staticmethod
    def backward(ctx: Any, d_o: Optional[Tensor], d_lse: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        needs = ctx.needs_input_grad
        wanted, places = _wanted(needs)
        if (d_o is None and d_lse is None) or not places:
            return (None,) * len(needs)
        o, lse, q, k, v, *optional = ctx.saved_tensors
        before, after = ctx.settings
        d_o = torch.zeros_like(o) if d_o is None else d_o
        arguments = d_o, d_lse, o, lse, wanted, q, k, v, *before, *optional, *after
        if torch.is_grad_enabled():  # the gradients are to be differentiated themselves
            gradients = backward_operator(*arguments)
        else:
            gradients = _below_autograd(backward_operator, arguments)
        return _in_places(len(needs), places, gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError("tessera: derivatives of attention in forward mode are not there; use backward mode")


class _Unobserved(Attention):
    """The same for a call that nobody observes, past the dispatcher. Whoever has come to observe by the time of the
    backward pass sees an operator there."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        o, lse = run_forward(q, k, v, *arguments)
        Attention.save(ctx, o, lse, q, k, v, arguments)
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: Optional[Tensor], d_lse: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        needs = ctx.needs_input_grad
        wanted, places = _wanted(needs)
        saved = ctx.saved_tensors
        if d_o is None or not places or torch.is_grad_enabled() or not unobserved((d_o, d_lse, *saved)):
            return Attention.backward(ctx, d_o, d_lse)
        o, lse, q, k, v, *optional = saved
        before, after = ctx.settings
        return _in_places(len(needs), places,
                          run_backward(d_o, d_lse, o, lse, wanted, q, k, v, *before, *optional, *after))


differentiable_forward: Callable[..., tuple[Tensor, Tensor]] = _Unobserved.apply  # type: ignore[attr-defined]


class _Gradients(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_next_level(backward_operator, arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("tessera: second derivatives of attention are not there; its gradients cannot be "
                                  "differentiated again")

    jvp = backward


# --- registration ----------------------------------------------------------------------------------------------------

def register(library: Any, name: str, parameters: str, results: str, function: Callable[..., Any],
             differentiable: type[_SingleLevelFunction]) -> Any:
    """Defines an operator that runs `function`, and returns it."""
    library.define(f"{name}({parameters}) -> {results}")
    operator = getattr(getattr(torch.ops, library.ns), name).default

    def at_autograd(*arguments: Any) -> Any:
        if not needs_gradient(arguments):
            return _below_autograd(operator, arguments)
        if not torch._C._are_functorch_transforms_active():
            return differentiable.apply(*arguments)
        with enable_single_level_autograd_function():
            return differentiable.apply(*arguments)

    for device in ("CPU", "CUDA"):
        library.impl(name, function, device)
    library.impl(name, at_autograd, "Autograd")
    return operator


# torch.compile keeps compiled calls on disk by these names: once released, other arguments need other names.
library = torch.library.Library("tessera", "DEF")  # type: ignore[no-untyped-call]
forward_operator = register(library, "forward", FORWARD, "(Tensor, Tensor)", run_forward, Attention)
backward_operator = register(library, "backward", BACKWARD, "Tensor[]", run_backward, _Gradients)
torch.library.register_fake("tessera::forward", _forward_fake, lib=library)
torch.library.register_fake("tessera::backward", _backward_fake, lib=library)
