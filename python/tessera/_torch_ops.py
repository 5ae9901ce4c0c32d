# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators tessera::forward and tessera::backward: what they do, their autograd and fake implementations.

Kernels run on the tensors' device and its current stream, with workspace from PyTorch's allocator (_torch_calls.py).
Used by torch.py, whose `attention` is the function to call, and by bench.py.
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

from . import _call
from ._call import Call
from ._options import Settings
from ._torch_calls import (Look, answer_unobserved, find, has_rows, look, look_unobserved, rows, run, shorten, sized,
                           view)

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
_FIXED = {"alibi_slopes": (INPUTS.index("slopes"), "pass alibi_slopes.detach(), or the same scores as a bias"),
          **{name: (INPUTS.index(name), f"pass {name}.detach()") for name in ("k_scale", "v_scale", "qv")}}
_SETTINGS = [name.split()[-1].replace(KERNEL, "kernel") for name in (*_BEFORE, *_AFTER)]

RESULTS = "o", "lse"
GRADIENTS = {"d" + name: INPUTS.index(name) for name in ("q", "k", "v", "bias", "sinks")}  # and whose, by its place
_SAVED = *RESULTS, "d_o", "d_lse"


# --- what the operators do -------------------------------------------------------------------------------------------

def sort_arguments(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[int, int]]:
    """Optional tensors, settings and seeds: of an operator's arguments after q, k and v, as many as PyTorch passes."""
    seed, seed_offset, *_ = *arguments[_SEEDS:], 0, 0
    return (arguments[_OPTIONAL_FIRST:_OPTIONAL_END], arguments[:_OPTIONAL_FIRST] + arguments[_OPTIONAL_END:_SEEDS],
            (seed % 2**64, seed_offset % 2**64))


def in_order(given: dict[str, Any]) -> tuple[Any, ...]:
    """An operator's arguments after q, k and v, up to the last that is given, as PyTorch would pass them."""
    if not given:
        return ()
    if len(given) == 1 and "causal" in given:  # the first of them
        return (given["causal"],)
    places = [PLACES[name] for name in given]
    arguments = VALUES[:max(places) + 1]
    for place, value in zip(places, given.values()):
        arguments[place] = value
    return tuple(arguments)


def plan(settings: tuple[Any, ...], inputs: Sequence[Any], names: Sequence[str],
          others: Sequence[Optional[Tensor]]) -> Call:
    """For the inputs, and the others with these names."""
    given = {name: value for name, value in zip(_SETTINGS, settings) if value is not None}
    if not given.get("threads"):
        given["threads"] = torch.get_num_threads()
    tensors = *zip(INPUTS, inputs), *zip(names, others)
    return _call.plan({name: view(name, t) for name, t in tensors if t is not None}, Settings(**given))


def _is_like(t: Tensor, shape: Optional[tuple[int, ...]]) -> bool:
    """Whether empty_like gives what new_empty would of this shape."""
    return t.shape == shape and torch.empty_like(t).stride() == t.new_empty(*shape).stride()


class _Outputs(NamedTuple):
    """What a forward pass returns."""
    o_shape: Optional[tuple[int, ...]]  # None: q's
    lse_shape: tuple[int, ...]
    lse_type: torch.dtype
    padded: bool  # there may be rows that belong to no sequence

    def make(self, q: Tensor) -> tuple[Tensor, Tensor]:
        o_shape, lse_shape, lse_type, padded = self
        o = torch.empty_like(q) if o_shape is None else q.new_empty(*o_shape)  # a tuple takes longer, empty_like less
        lse = q.new_empty(*lse_shape, dtype=lse_type)
        return (o.zero_(), lse.fill_(-math.inf)) if padded else (o, lse)

    def makers(self, q: Tensor) -> tuple[Any, ...]:
        """The same for `shorten`, where nothing is padded."""
        return (0 if self.o_shape is None else sized(self.o_shape, q.dtype, q.device),
                sized(self.lse_shape, self.lse_type, q.device))


def outputs(q: Tensor, v: Tensor, optional: Sequence[Optional[Tensor]]) -> _Outputs:
    for name, t in (("q", q), ("v", v)):
        if t.dim() < 3:
            raise ValueError(f"{name}: has shape {list(t.shape)}; must be [batch, tokens, heads, dim] or "
                             "[tokens, heads, dim]")
    given = {name for name, t in zip(OPTIONAL, optional) if t is not None}
    return _Outputs((*q.shape[:-1], v.shape[-1]), (*q.shape[:-3], q.shape[-2], q.shape[-3]),
                    torch.float64 if q.dtype == torch.float64 else torch.float32,
                    not given.isdisjoint(("cu_seqlens_q", "seqused_q")))


_COPY = "copy"  # a note: the library cannot read all rows as they lie


def _note(q: Tensor, k: Tensor, v: Tensor, optional: Sequence[Optional[Tensor]]) -> Any:
    if not (has_rows(q) and has_rows(k) and has_rows(v)):
        return _COPY
    note = outputs(q, v, optional)
    return note._replace(o_shape=None) if _is_like(q, note.o_shape) else note


def run_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return forward_of(look((q, k, v, *arguments[_OPTIONAL_FIRST:_OPTIONAL_END])), q, k, v, arguments)


def forward_of(seen: Look, q: Tensor, k: Tensor, v: Tensor, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """What tessera::forward does, for tensors that were looked at."""
    optional: tuple[Any, ...] = ()
    settings, seed = arguments, _call.NO_SEED
    if len(arguments) > _OPTIONAL_FIRST:
        optional, settings, seed = sort_arguments(arguments)
    question = find(settings, seen)
    note = question.note
    if note is None:
        note = question.note = _note(q, k, v, optional)
    if note is _COPY:
        return run_forward(rows(q), rows(k), rows(v), *arguments)
    results = note.make(q)
    try:
        call = question.idle.pop()
    except IndexError:  # a new question, or all its calls are running in other threads
        call = plan(settings, (q, k, v, *optional), RESULTS, results)
    run(question, call, seen, results, seed)
    if question.quick is None and len(arguments) <= _OPTIONAL_FIRST:
        shorten(question, call, q, note.makers(q))
    return results


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


class _Shapes(NamedTuple):
    """Of the gradients that are wanted, and whose they are, by its place. None: that tensor's own."""
    shapes: list[tuple[int, Optional[tuple[int, ...]]]]

    def make(self, inputs: Sequence[Any]) -> list[Tensor]:
        return [torch.empty_like(inputs[place]) if shape is None else inputs[place].new_empty(*shape)
                for place, shape in self.shapes]

    def makers(self, inputs: Sequence[Any]) -> list[Any]:
        """The same for `shorten`, as _Unobserved.backward returns them: of its first argument, and of q, k and v."""
        found: list[Any] = [None] * 4
        for place, shape in self.shapes:
            t = inputs[place]
            found[1 + place] = place if shape is None else sized(shape, t.dtype, t.device)
        return found


def _shapes(inputs: Sequence[Any], wanted: Sequence[bool]) -> _Shapes:
    return _Shapes([(place, tuple(inputs[place].shape)) for place in itertools.compress(GRADIENTS.values(), wanted)])


def run_backward(d_o: Tensor, d_lse: Optional[Tensor], o: Tensor, lse: Tensor, wanted: Sequence[bool], q: Tensor,
                 k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients that are wanted, of dq, dk, dv, dbias and dsinks."""
    tensors = q, k, v, *arguments[_OPTIONAL_FIRST:_OPTIONAL_END], o, lse, d_o, d_lse
    return backward_of(look(tensors), tensors, tuple(wanted), arguments)


def backward_of(seen: Look, tensors: tuple[Any, ...], wanted: tuple[bool, ...], arguments: tuple[Any, ...]
                ) -> list[Tensor]:
    """What tessera::backward does, for tensors that were looked at: inputs, O, LSE, dO, dLSE or None."""
    settings, seed = arguments, _call.NO_SEED
    if len(arguments) > _OPTIONAL_FIRST:
        _, settings, seed = sort_arguments(arguments)
    question = find((wanted, settings), seen)
    note = question.note
    if note is None:
        note = _COPY
        if has_rows(tensors[-2]) and all(map(has_rows, tensors[:3])):
            shapes = _shapes(tensors, wanted).shapes
            note = _Shapes([(place, None if _is_like(tensors[place], shape) else shape) for place, shape in shapes])
        question.note = note
    if note is _COPY:
        q, k, v, *between, d_o, d_lse = tensors
        copied = rows(q), rows(k), rows(v), *between, rows(d_o), d_lse
        return backward_of(look(copied), copied, wanted, arguments)
    results: list[Tensor] = note.make(tensors)
    if not results:
        return results
    try:
        call = question.idle.pop()
    except IndexError:
        gradients = dict(zip(itertools.compress(GRADIENTS, wanted), results))
        call = plan(settings, tensors[:-4], (*_SAVED, *gradients), (*tensors[-4:], *gradients.values()))
    run(question, call, seen, results, seed)
    if question.quick is None and len(arguments) <= _OPTIONAL_FIRST:
        shorten(question, call, tensors[0], note.makers(tensors))
    return results


def _backward_fake(d_o: Tensor, d_lse: Optional[Tensor], o: Tensor, lse: Tensor, wanted: Sequence[bool], q: Tensor,
                   k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = q, k, v, *sort_arguments(arguments)[0]
    require_one_device((*INPUTS[:len(inputs)], *_SAVED), (*inputs, o, lse, d_o, d_lse))
    return _shapes(inputs, wanted).make(inputs)


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
    """Which of the gradients are wanted, and whose they are, by its place: of the inputs, which need them or not."""
    wanted = tuple(place < len(needs) and needs[place] for place in GRADIENTS.values())
    return wanted, tuple(itertools.compress(GRADIENTS.values(), wanted))


def _in_places(count: int, places: Iterable[int], gradients: Sequence[Tensor]) -> list[Optional[Tensor]]:
    results: list[Optional[Tensor]] = [None] * count
    for place, gradient in zip(places, gradients):
        results[place] = gradient
    return results


def _save(ctx: Any, needs: tuple[bool, ...], tensors: tuple[Any, ...]) -> None:
    """The inputs, of which some need gradients, then O and LSE."""
    if len(needs) > 3:
        for name, (place, instead) in _FIXED.items():
            if len(needs) > place and needs[place]:
                raise NotImplementedError(f"{name}: requires a gradient, which attention does not give; {instead}")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _gradients(needs: tuple[bool, ...], arguments: tuple[Any, ...], saved: Sequence[Any], d_o: Optional[Tensor],
               d_lse: Optional[Tensor]) -> list[Tensor]:
    """Those that are wanted, by the operator, whose arguments after q, k and v these are."""
    wanted, places = _wanted(needs)
    if (d_o is None and d_lse is None) or not places:
        return []
    q, k, v, *optional, o, lse = saved
    before, after = arguments[:_OPTIONAL_FIRST], arguments[_OPTIONAL_END:]
    d_o = torch.zeros_like(o) if d_o is None else d_o
    operands = d_o, d_lse, o, lse, wanted, q, k, v, *before, *optional, *after
    if torch.is_grad_enabled():  # the gradients are to be differentiated themselves
        return backward_operator(*operands)  # type: ignore[no-any-return]
    return _below_autograd(backward_operator, operands)  # type: ignore[no-any-return]


class Attention(_SingleLevelFunction):
    """At the Autograd key of tessera::forward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        o, lse = _next_level(forward_operator, (q, k, v, *arguments))
        needs, after = ctx.needs_input_grad, 3 + _OPTIONAL_FIRST
        ctx.arguments, ctx.needs = arguments, needs[:3] + needs[after:after + len(OPTIONAL)]
        _save(ctx, ctx.needs, (q, k, v, *arguments[_OPTIONAL_FIRST:_OPTIONAL_END], o, lse))
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: Optional[Tensor], d_lse: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        gradients = _gradients(ctx.needs, ctx.arguments, ctx.saved_tensors, d_o, d_lse)
        places = (place if place < 3 else place + _OPTIONAL_FIRST for place in _wanted(ctx.needs)[1])
        return tuple(_in_places(len(ctx.needs_input_grad), places, gradients))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError("tessera: derivatives of attention in forward mode are not there; use backward mode")


class _Unobserved(_SingleLevelFunction):
    """The same for a call that nobody observes, past the dispatcher; O alone unless LSE is wanted too. Whoever has come
    to observe by the time of the backward pass sees an operator there."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Optional[tuple[Tensor, Tensor]], Optional[Look], tuple[Any, ...], bool],
                *inputs: Any) -> Any:
        """The results are there, or else the tensors were looked at."""
        results, seen, ctx.arguments, both = call
        if results is None:
            q, k, v, *_ = inputs
            results = forward_of(seen, q, k, v, ctx.arguments)  # type: ignore[arg-type]
        _save(ctx, ctx.needs_input_grad[1:], inputs + results)
        return results if both else results[0]

    @staticmethod
    def backward(ctx: Any, d_o: Optional[Tensor], d_lse: Optional[Tensor] = None) -> tuple[Optional[Tensor], ...]:
        needs = ctx.needs_input_grad[1:]
        wanted, places = _wanted(needs)
        saved = ctx.saved_tensors  # once: what a hook has made of them may be there only once
        gradients = None
        if d_o is not None and places and not torch.is_grad_enabled():
            tensors = *saved, d_o, d_lse
            if len(needs) == 3:  # then C has what this method returns
                quick = answer_unobserved((wanted, ctx.arguments), tensors)
                if quick is not None:
                    return quick
            seen = look_unobserved(*tensors)
            if seen is not None:
                gradients = backward_of(seen, tensors, wanted, ctx.arguments)
        if gradients is None:
            gradients = _gradients(needs, ctx.arguments, saved, d_o, d_lse)
        return None, *_in_places(len(needs), places, gradients)

    jvp = Attention.jvp


# The engine calls this method of a node. PyTorch's looks for `backward` again in each call, and does no more.
_node: Any = getattr(_Unobserved, "_backward_cls", None)
if _node is not None:
    _node.apply = _Unobserved.backward


def attend_unobserved(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], lse: bool) -> Optional[Sequence[Any]]:
    """O, and LSE where it is wanted, as tessera::forward gives them with its other arguments by their names, past the
    dispatcher; None where somebody could tell."""
    arguments = in_order(given)
    inputs: tuple[Any, ...] = q, k, v
    found = seen = None
    if len(arguments) > _OPTIONAL_FIRST:
        inputs = (*inputs, *arguments[_OPTIONAL_FIRST:_OPTIONAL_END])
    else:
        found = answer_unobserved(arguments, inputs)
    if found is None:
        seen = look_unobserved(*inputs)
        if seen is None:
            return None
    if not needs_gradient(inputs):
        return found or forward_of(seen, q, k, v, arguments)  # type: ignore[arg-type]
    results = _Unobserved.apply((found, seen, arguments, lse), *inputs)
    return results if lse else (results, None)


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
