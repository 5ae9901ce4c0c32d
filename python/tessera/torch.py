"""Attention for PyTorch: differentiable in q, k, v, bias, sinks and through LSE; with torch.compile and autocast.

Two operators, tessera::forward and tessera::backward, with fake and autograd implementations; `attention` is the
function to call. Kernels run on the tensors' device and its current stream, with workspace from PyTorch's allocator.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Optional, Sequence

import torch
from torch import Tensor

from . import _abi, _call
from ._abi import CPU, CUDA
from ._call import View
from ._options import Parsed, Settings, parse

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import AttentionOptions

_TYPES = {torch.float64: _abi.F64, torch.float32: _abi.F32, torch.float16: _abi.F16, torch.bfloat16: _abi.BF16,
          torch.int32: _abi.I32, torch.int64: _abi.I64, torch.uint8: _abi.U8, torch.bool: _abi.U8}

# Arguments of both operators after q, k, v. Those of the C ABI, in its order; kernel and threads are of its execution.
_OPTIONAL = ("bias", "mask", "slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "rng")
_SETTINGS = """float scale, float softcap, bool causal, int alignment, SymInt diagonal_offset, SymInt window_left,
    SymInt window_right, float dropout, SymInt row0, SymInt col0, SymInt head0, SymInt batch0, SymInt max_seqlen_q,
    SymInt max_seqlen_k, bool accumulate, bool deterministic, str? kernel, int threads"""
_COMMON = ", ".join(f"Tensor? {name}" for name in _OPTIONAL) + ", int seed, int seed_offset, " + _SETTINGS
_INPUTS = ("q", "k", "v", *_OPTIONAL)
_NO_TENSORS = (None,) * len(_OPTIONAL)
_TENSORS = len(_INPUTS)  # of the forward operator's arguments, those that are tensors
_CU_SEQLENS_Q, _SEQUSED_Q = _INPUTS.index("cu_seqlens_q"), _INPUTS.index("seqused_q")
_FORWARD = (*_INPUTS, "o", "lse")
_BACKWARD = (*_INPUTS, "o", "lse", "d_o", "d_lse")  # and then the gradients that are wanted
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
_INPUT_OF_GRADIENT = (0, 1, 2, 3, 6)  # where q, k, v, bias and sinks stand among the tensors


# --- what the operators do -------------------------------------------------------------------------------------------

def _view(name: str, t: Tensor) -> View:
    code = _TYPES.get(t.dtype)
    if code is None:
        raise TypeError(f"{name}: has type {t.dtype}; must be one of {', '.join(str(d) for d in _TYPES)}")
    if t.is_cuda:
        return View(t.data_ptr(), code, CUDA, t.get_device(), t.shape, t.stride())
    return View(t.data_ptr(), code, CPU, 0, t.shape, t.stride())


def _rows(t: Tensor) -> Tensor:
    """The library reads rows whose numbers lie side by side. A gradient that comes from a sum has strides of 0."""
    strides = t.stride()
    return t if not strides or strides[-1] == 1 or t.shape[-1] == 1 else t.contiguous()


def _tensors(arguments: Sequence[Any]) -> tuple[Optional[Tensor], ...]:
    """Of the forward operator's arguments, those that are tensors, q, k and v with rows that the library can read."""
    q, k, v = arguments[:3]
    return (_rows(q), _rows(k), _rows(v), *arguments[3:_TENSORS])


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The same without an object in between, where this PyTorch has it.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def _run(names: tuple[str, ...], tensors: Sequence[Optional[Tensor]], results: Sequence[Tensor],
         settings: tuple[Any, ...]) -> None:
    """Names are those of the tensors, then of the results, which are contiguous and follow from the tensors.

    Settings begin with the seeds. All of this is paid for in every call, so it looks at each tensor once.
    """
    others = settings[2:]
    question: list[Any] = [names, others]
    pointers, bits = [], 0
    for t in tensors:
        if t is None:
            question.append(None)
            continue
        pointer = t.data_ptr()
        pointers.append(pointer)
        bits |= pointer
        question += (t.dtype, t.get_device(), t.shape, t.stride())
    for t in results:
        pointers.append(t.data_ptr())
    question.append(bits % _call.ALIGNMENT)  # a plan asks for what all pointers have in common

    def ask() -> tuple[dict[str, View], Settings]:
        views = {name: _view(name, t) for name, t in zip(names, (*tensors, *results)) if t is not None}
        return views, Settings(*others)

    q = tensors[0]
    assert q is not None
    key, seeds = tuple(question), (settings[0] % 2**64, settings[1] % 2**64)
    if not q.is_cuda:
        _call.answer(key, pointers, ask, seeds)
        return
    workspace = []

    def allocate(size: int) -> int:
        workspace.append(torch.empty(size, dtype=torch.uint8, device=q.device))
        return int(workspace[0].data_ptr())

    _call.answer(key, pointers, ask, seeds, _raw_stream(q.get_device()), allocate)


def _empty_outputs(tensors: tuple[Optional[Tensor], ...]) -> tuple[Tensor, Tensor]:
    q, v = tensors[0], tensors[2]
    assert q is not None and v is not None
    for name, t in (("q", q), ("v", v)):
        if t.dim() < 3:
            raise ValueError(f"{name}: has shape {list(t.shape)}; must be [batch, tokens, heads, dim] or "
                             "[tokens, heads, dim]")
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_type = torch.float64 if q.dtype == torch.float64 else torch.float32
    return o, q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=lse_type)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors = _tensors(arguments)
    o, lse = _empty_outputs(tensors)
    if tensors[_CU_SEQLENS_Q] is not None or tensors[_SEQUSED_Q] is not None:  # rows that belong to no sequence
        o.zero_()
        lse.fill_(-math.inf)
    _run(_FORWARD, tensors, (o, lse), arguments[_TENSORS:])
    return o, lse


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(arguments[:_TENSORS])


def _empty_gradients(tensors: tuple[Optional[Tensor], ...], wanted: list[bool]) -> tuple[Tensor, ...]:
    """Contiguous, in the shape of each input; without elements where not wanted, since operators return tensors."""
    q = tensors[0]
    assert q is not None
    inputs = [tensors[i] for i in _INPUT_OF_GRADIENT]
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) if want and t is not None else q.new_empty(0)
                 for want, t in zip(wanted, inputs))


def _backward(d_o: Tensor, d_lse: Optional[Tensor], o: Tensor, lse: Tensor, wanted: list[bool],
              *arguments: Any) -> tuple[Tensor, ...]:
    tensors = _tensors(arguments)
    gradients = _empty_gradients(tensors, wanted)
    if not any(wanted):
        return gradients
    names = [name for name, want in zip(GRADIENTS, wanted) if want]
    results = [gradient for gradient, want in zip(gradients, wanted) if want]
    _run((*_BACKWARD, *names), (*tensors, o, lse, _rows(d_o), d_lse), results, arguments[_TENSORS:])
    return gradients


def _backward_fake(d_o: Tensor, d_lse: Optional[Tensor], o: Tensor, lse: Tensor, wanted: list[bool],
                   *arguments: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(arguments[:_TENSORS], wanted)


# --- registration ----------------------------------------------------------------------------------------------------

def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.settings = inputs[_TENSORS:]


def _differentiate(ctx: Any, d_o: Optional[Tensor], d_lse: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
    *tensors, o, lse = ctx.saved_tensors
    wanted = [bool(ctx.needs_input_grad[i]) for i in _INPUT_OF_GRADIENT]
    results: list[Optional[Tensor]] = [None] * (_TENSORS + len(ctx.settings))
    if (d_o is None and d_lse is None) or not any(wanted):
        return tuple(results)
    d_o = torch.zeros_like(o) if d_o is None else d_o
    gradients = _backward_operator(d_o, d_lse, o, lse, wanted, *tensors, *ctx.settings)
    for place, gradient, want in zip(_INPUT_OF_GRADIENT, gradients, wanted):
        if want:
            results[place] = gradient
    return tuple(results)


def _refuse(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError("tessera: second derivatives of attention are not there; its gradients cannot be "
                              "differentiated again")


_library = torch.library.Library("tessera", "DEF")
_library.define(f"forward(Tensor q, Tensor k, Tensor v, {_COMMON}) -> (Tensor, Tensor)")
_library.define("backward(Tensor d_o, Tensor? d_lse, Tensor o, Tensor lse, bool[] wanted, Tensor q, Tensor k, "
                f"Tensor v, {_COMMON}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
for _device in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _device)
    _library.impl("backward", _backward, _device)
torch.library.register_fake("tessera::forward", _forward_fake, lib=_library)
torch.library.register_fake("tessera::backward", _backward_fake, lib=_library)
torch.library.register_autograd("tessera::forward", _differentiate, setup_context=_save_for_backward, lib=_library)
torch.library.register_autograd("tessera::backward", _refuse, lib=_library)

_forward_operator, _backward_operator = torch.ops.tessera.forward.default, torch.ops.tessera.backward.default


# --- the function to call --------------------------------------------------------------------------------------------

def _signed(value: int) -> int:
    """Operators take integers of 64 bits with a sign."""
    return (value + 2**63) % 2**64 - 2**63


def _autocast(q: Tensor, k: Tensor, v: Tensor, parsed: Parsed) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast q, k and v take its type, and so does a 16-bit bias."""
    kind = "cuda" if q.is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    bias = parsed.tensors.get("bias")
    if bias is not None and bias.dtype != torch.float32:
        parsed.tensors["bias"] = bias.to(dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[AttentionOptions]) -> Any:
    """Exact attention: O [B,Nq,Hq,Dv] in q's type, or (O, LSE f32 [B,Hq,Nq]) with return_lse.

    q [B,Nq,Hq,D], k [B,Nk,Hk,D], v [B,Nk,Hk,Dv]; packed with cu_seqlens: q [Tq,Hq,D], ..., O [Tq,Hq,Dv], LSE [Hq,Tq].
    Options: tessera.AttentionOptions. With dropout and neither seed nor rng, the mask's seed is drawn from PyTorch's
    generator of the device. Rows whose last stride is not 1 are copied, everything else is used as it lies.
    """
    parsed = parse(dict(options))
    tensors = parsed.tensors
    if parsed.settings.dropout > 0 and parsed.seed is None and "rng" not in tensors:
        tensors["rng"] = torch.randint(-2**63, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    q, k, v = _autocast(q, k, v, parsed)
    optional = [tensors.get(name) for name in _OPTIONAL] if tensors else _NO_TENSORS
    o, lse = _forward_operator(q, k, v, *optional, _signed(parsed.seed or 0), _signed(parsed.seed_offset),
                               *parsed.settings)
    return (o, lse) if return_lse else o
