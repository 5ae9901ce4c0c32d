"""Planned calls: the C structs of one question, filled in once and run many times.

A front end describes its arrays as Views and calls `run`. Everything but pointers, stream, workspace and seeds belongs
to the question; calls with the same question share a plan, which is kept for a while.
"""
from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from typing import Any, Callable, NamedTuple, Optional

from . import _abi
from ._abi import CPU, MAX_NDIM, check, lib, make
from ._options import Settings

KEPT_CALLS = 64  # plans that are remembered
ALIGNMENT = 16  # what a plan asks of a pointer: this many bytes at most


class View(NamedTuple):
    """An array as the C ABI sees it. Strides count elements."""
    pointer: int
    type: int
    device_type: int
    device_id: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


# Bytes on the device, as a pointer; the front end keeps the memory alive until the call returns.
Allocate = Callable[[int], int]


def tensor(name: str, view: View) -> _abi.Tensor:
    if len(view.shape) > MAX_NDIM:
        raise ValueError(f"{name}: has {len(view.shape)} dimensions; tensors have 1 to {MAX_NDIM}")
    made: _abi.Tensor = make(_abi.Tensor, data=view.pointer, type=view.type, ndim=len(view.shape),
                             device_type=view.device_type, device_id=view.device_id)
    made.shape[:len(view.shape)] = view.shape
    made.strides[:len(view.shape)] = view.strides
    return made


def _options(settings: Settings) -> _abi.Options:
    fields = settings._asdict()
    del fields["kernel"], fields["threads"]
    made: _abi.Options = make(_abi.Options, **fields)
    return made


class Call:
    """One question: its structs, its plan, and what the plan says of itself."""

    def __init__(self, views: dict[str, View], settings: Settings, device: tuple[int, int]) -> None:
        backward = "d_o" in views
        groups = (_abi.Inputs, _abi.Saved, _abi.Gradients) if backward else (_abi.Inputs, _abi.Outputs)
        self.tensors = {name: tensor(name, view) for name, view in views.items()}
        self._structs = [make(group, **{name: ctypes.pointer(self.tensors[name])
                                        for name, _ in group._fields_ if name in self.tensors}) for group in groups]
        self._options = _options(settings)
        self._execution = make(_abi.Execution, device_type=device[0], device_id=device[1], threads=settings.threads,
                               kernel=settings.kernel.encode() if settings.kernel else None)
        self._references = [ctypes.byref(s) for s in (*self._structs, self._options, self._execution)]
        self._run = lib.tessera_plan_run_backward if backward else lib.tessera_plan_run_forward
        self._plan = ctypes.c_void_p()
        make_plan = lib.tessera_plan_backward if backward else lib.tessera_plan_forward
        check(make_plan(*self._references, ctypes.byref(self._plan)))
        # Not when the process ends: a GPU's driver may be gone by then.
        weakref.finalize(self, lib.tessera_plan_destroy, self._plan).atexit = False
        self.workspace_size: int = lib.tessera_plan_workspace_size(self._plan)

    @property
    def kernel(self) -> str:
        return str(lib.tessera_plan_kernel(self._plan).decode())

    @property
    def description(self) -> str:
        return str(lib.tessera_plan_describe(self._plan).decode())

    def run(self, views: dict[str, View], seed: tuple[int, int], stream: int, workspace: int) -> None:
        for made, view in zip(self.tensors.values(), views.values()):
            made.data = view.pointer
        self._options.seed, self._options.seed_offset = seed
        self._execution.stream = stream
        self._execution.workspace = workspace
        self._execution.workspace_bytes = self.workspace_size if workspace else 0
        check(self._run(self._plan, *self._references))


class _Idle:
    """Calls that nobody runs at the moment, the one that was used last at the end.

    A Call's structs are written to when it runs, so whoever runs one takes it out of here. Shared by all threads: those
    of other runtimes (XLA's) exist for Python only while they call it, so nothing could be kept for each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: OrderedDict[Any, Call] = OrderedDict()

    def take(self, key: Any) -> Optional[Call]:
        with self._lock:
            return self.calls.pop(key, None)

    def give(self, key: Any, call: Call) -> None:
        with self._lock:
            self.calls[key] = call
            dropped = self.calls.popitem(last=False) if len(self.calls) > KEPT_CALLS else None
        del dropped  # its plan is destroyed outside the lock


idle = _Idle()


def take(views: dict[str, View], settings: Settings) -> tuple[Any, Call]:
    """The call for these arrays, an earlier one with the same question or a new one, and the key to give it back."""
    key = (settings, *[(name, view[0] % ALIGNMENT, view[1:]) for name, view in views.items()])
    call = idle.take(key)
    if call is None:
        q = views["q"]
        call = Call(views, settings, (q.device_type, q.device_id))
    return key, call


def run(views: dict[str, View], settings: Settings, seed: tuple[int, int], stream: int = 0,
        allocate: Optional[Allocate] = None) -> None:
    """Plans where needed and runs. On the CPU the library brings its own workspace."""
    key, call = take(views, settings)
    try:
        workspace = 0
        if call.workspace_size and views["q"].device_type != CPU and allocate is not None:
            workspace = allocate(call.workspace_size)
        call.run(views, seed, stream, workspace)
    finally:
        idle.give(key, call)
