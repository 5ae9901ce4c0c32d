# SPDX-License-Identifier: Apache-2.0
"""From PyTorch's tensors to a plan that runs: how they are looked at, which question they ask, who could observe a call.

Paid for in every call, so each tensor is looked at once: in C where that is possible (_native.py). Used by
_torch_ops.py.
"""
from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Union

import torch
from torch import Tensor

from . import _abi, _call, _native
from ._abi import CPU, CUDA
from ._call import Call, Question, View

_TYPES = {torch.float64: _abi.F64, torch.float32: _abi.F32, torch.float16: _abi.F16, torch.bfloat16: _abi.BF16,
          torch.int32: _abi.I32, torch.int64: _abi.I64, torch.uint8: _abi.U8, torch.bool: _abi.U8,
          torch.int8: _abi.I8, torch.float8_e4m3fn: _abi.E4M3}


def view(name: str, t: Tensor) -> View:
    code = _TYPES.get(t.dtype)
    if code is None:
        raise TypeError(f"{name}: has type {t.dtype}; must be one of {', '.join(str(d) for d in _TYPES)}")
    if t.is_cuda:
        return View(t.data_ptr(), code, CUDA, t.get_device(), t.shape, t.stride())
    if t.device.type != "cpu":
        raise TypeError(f"{name}: is on {t.device}; must be on cpu or cuda")
    return View(t.data_ptr(), code, CPU, 0, t.shape, t.stride())


def has_rows(t: Tensor) -> bool:
    """The library reads rows whose numbers lie side by side. A gradient that comes from a sum has strides of 0."""
    return t.dim() == 0 or t.stride(-1) == 1 or t.shape[-1] == 1


def rows(t: Tensor) -> Tensor:
    if has_rows(t):
        return t
    return t.contiguous() if t.numel() else t.new_empty(t.shape)  # without numbers all is contiguous to PyTorch


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The same without an object in between, where this PyTorch has it.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


# --- looking at tensors ----------------------------------------------------------------------------------------------

# What of a question's key is theirs, and their addresses: bytes from C, otherwise a tuple and a list of integers.
Look = tuple[Any, Union[bytes, list[int]]]
_functions = _native.load(Tensor, torch.empty_like, torch.empty, _raw_stream, _call.questions.kept,
                          _call.questions.clock)
in_c = _functions is not None
_describe: Callable[..., Any] = _functions.describe if _functions else lambda *tensors: None
_run_native: Optional[Callable[..., int]] = _functions.run if _functions else None
_answer: Optional[Callable[..., Any]] = _functions.answer if _functions else None


def _look_slowly(tensors: Sequence[Optional[Tensor]]) -> Look:
    key: list[Any] = []
    pointers, bits = [], 0
    for t in tensors:
        if t is None:
            key.append(None)
        else:
            pointer = t.data_ptr()
            pointers.append(pointer)
            bits |= pointer
            key += t.dtype, t.get_device(), t.shape, t.stride()
    key.append(bits % _call.ALIGNMENT)  # a plan asks for what all pointers have in common
    return tuple(key), pointers


def look(tensors: Sequence[Optional[Tensor]]) -> Look:
    return _describe(*tensors) or _look_slowly(tensors)


# PyTorch's way to a function in Python and back takes longer than the function. Where nothing stands on that way but
# autograd, which `attention` looks after itself, it is left out.

def _key_bits(*names: str) -> int:
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


_OTHERS_OF_THREADS: Optional[int] = None
try:  # Dispatch keys that are always there; modes, transforms, tracers, subclasses and lazy negation have others.
    _OTHERS_OF_THREADS = ~_key_bits("BackendSelect", "ADInplaceOrView")
    _OTHERS_OF_TENSORS = ~_key_bits("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU",
                                    "AutocastCUDA")
    _keys_of_thread, _keys_of_tensor = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_keys
    _profiler_enabled = torch._C._autograd._profiler_enabled
except AttributeError:  # a PyTorch without these functions
    _OTHERS_OF_THREADS = None


def look_unobserved(*tensors: Optional[Tensor]) -> Optional[Look]:
    """None if somebody could tell a call of an operator with these tensors from one of its function."""
    if _OTHERS_OF_THREADS is None or _keys_of_thread().raw_repr() & _OTHERS_OF_THREADS or _profiler_enabled():
        return None
    seen: Optional[Look] = _describe(*tensors)  # in C: plain tensors alone, which have none of the other keys
    if seen is None:
        for t in tensors:
            if t is not None and _keys_of_tensor(t).raw_repr() & _OTHERS_OF_TENSORS:
                return None
        seen = _look_slowly(tensors)
    return seen


# --- questions -------------------------------------------------------------------------------------------------------

def find(kind: tuple[Any, ...], seen: Look) -> Question:
    """The question that tensors ask which look so; the kind is everything else that a plan depends on."""
    return _call.questions.find((kind, seen[0], torch.get_num_threads()))


def answer_unobserved(kind: tuple[Any, ...], tensors: tuple[Optional[Tensor], ...]) -> Optional[tuple[Any, ...]]:
    """The results of a question that was answered before, all in C; None if somebody could tell a call of an operator
    from it, if the question has nothing `quick`, or where that way is not there."""
    if (_answer is None or _OTHERS_OF_THREADS is None or _keys_of_thread().raw_repr() & _OTHERS_OF_THREADS
            or _profiler_enabled()):
        return None
    results: Any = _answer(kind, torch.get_num_threads(), tensors)
    if type(results) is int:
        _abi.check(results)
    return results  # type: ignore[no-any-return]


def sized(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """A maker of such a tensor, for `shorten`."""
    return shape, {"dtype": dtype, "device": device}


def shorten(question: Question, call: Call, first: Tensor, makers: Sequence[Any]) -> None:
    """Lets C answer from now on, with tensors on the device of the first. A result's maker is the place of the tensor
    that it is like, or what `sized` gives, or None for a result that is None. The call has no seed."""
    device = workspace = None
    if not call.on_cpu:
        device = first.get_device()
        if call.workspace_size:
            workspace = sized((call.workspace_size,), torch.uint8, first.device)
    question.quick = (question.idle, device, workspace, *makers)


def run(question: Question, call: Call, seen: Look, results: Sequence[Tensor], seed: tuple[int, int]) -> None:
    """On the tensors' device, with a call that the question then has again. Results come after the tensors seen."""
    try:
        stream = workspace = 0
        if not call.on_cpu:
            first = results[0]
            stream = _raw_stream(first.get_device())
            if call.workspace_size:
                room = first.new_empty(call.workspace_size, dtype=torch.uint8)
                workspace = room.data_ptr()
        addresses = seen[1]
        if type(addresses) is bytes:
            call.set_seed(seed)
            status = _run_native(call.prepared, addresses, stream, workspace, *results)  # type: ignore[misc]
            if status:
                _abi.check(status)
        else:
            call.run([*addresses, *[t.data_ptr() for t in results]], seed, stream, workspace)
    finally:
        question.idle.append(call)
