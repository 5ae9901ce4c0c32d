# SPDX-License-Identifier: Apache-2.0
"""Planned calls: the C structs of one question, filled in once and run many times.

A front end describes its arrays as Views and calls `run`; one that tells questions apart by itself calls `find`, then
`answer`.
Everything but pointers, stream, workspace and seeds belongs to the question; calls with the same question share a plan,
which is kept for a while.
"""
from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from typing import Any, Callable, Iterable, NamedTuple, Optional

from . import _abi, _native
from ._abi import CPU, MAX_NDIM, check, integer, lib, make, text
from ._options import Settings

KEPT_QUESTIONS = 64
NO_SEED = (0, 0)  # nor offset: the defaults
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
    made.shape[:len(view.shape)] = [integer(f"{name}'s size", size) for size in view.shape]
    made.strides[:len(view.shape)] = [integer(f"{name}'s stride", stride) for stride in view.strides]
    return made


def options(settings: Settings) -> _abi.Options:
    fields = settings._asdict()
    del fields["kernel"], fields["threads"]
    made: _abi.Options = make(_abi.Options, **fields)
    return made


class Call:
    """One question: its structs, its plan, and what the plan says of itself."""

    def __init__(self, views: dict[str, View], settings: Settings, device: tuple[int, int]) -> None:
        backward = "d_o" in views
        self.on_cpu = device[0] == CPU
        groups = (_abi.Inputs, _abi.Saved, _abi.Gradients) if backward else (_abi.Inputs, _abi.Outputs)
        self.tensors = {name: tensor(name, view) for name, view in views.items()}
        self._places = list(self.tensors.values())
        self._structs = [make(group, **{name: ctypes.pointer(self.tensors[name])
                                        for name, _ in group._fields_ if name in self.tensors}) for group in groups]
        self._options = options(settings)
        self._execution = make(_abi.Execution, device_type=device[0], device_id=device[1], threads=settings.threads,
                               kernel=None if settings.kernel is None else text("kernel", settings.kernel))
        self._seed = NO_SEED  # as in the options
        self._run = lib.tessera_plan_run_backward if backward else lib.tessera_plan_run_forward
        self._plan = ctypes.c_void_p()
        structs = [ctypes.c_void_p(ctypes.addressof(s)) for s in (*self._structs, self._options, self._execution)]
        make_plan = lib.tessera_plan_backward if backward else lib.tessera_plan_forward
        check(make_plan(*structs, ctypes.byref(self._plan)))
        self._arguments = (self._plan, *structs)
        # Not when the process ends: a GPU's driver may be gone by then.
        weakref.finalize(self, lib.tessera_plan_destroy, self._plan).atexit = False
        self.workspace_size: int = lib.tessera_plan_workspace_size(self._plan)
        self._execution.workspace_bytes = self.workspace_size
        self._prepared = _native.prepare(self._run, self._plan, [*self._structs, self._options, self._execution],
                                         self._places)
        self.prepared = ctypes.addressof(self._prepared)  # for _native's run

    @property
    def kernel(self) -> str:
        return str(lib.tessera_plan_kernel(self._plan).decode())

    @property
    def description(self) -> str:
        return str(lib.tessera_plan_describe(self._plan).decode())

    def set_seed(self, seed: tuple[int, int]) -> None:
        if seed is not self._seed and seed != self._seed:
            self._options.seed, self._options.seed_offset = self._seed = seed

    def run(self, pointers: Iterable[int], seed: tuple[int, int], stream: int = 0, workspace: int = 0) -> None:
        """The pointers are those of the views that the call was made of, in their order."""
        for made, pointer in zip(self._places, pointers):
            made.data = pointer
        self.set_seed(seed)
        execution = self._execution
        execution.stream, execution.workspace = stream, workspace
        status = self._run(*self._arguments)
        if status:
            check(status)


class Question:
    """The calls of one question that nobody runs at the moment.

    A Call's structs are written to when it runs, so whoever runs one takes it out of here: `pop` and `append` of a list
    need no lock. Shared by all threads: those of other runtimes (XLA's) exist for Python only while they call it, so
    nothing could be kept for each.
    """

    def __init__(self) -> None:
        self.idle: list[Call] = []
        self.last_use = 0
        self.note: Any = None  # what a front end wants to know again when it is asked this
        self.quick: Optional[tuple[Any, ...]] = None  # what calls.c answers it with


class _Questions:
    """The questions that were asked last."""

    def __init__(self) -> None:
        self.clock = itertools.count()
        self.kept: dict[Any, Question] = {}
        self._make_lock()
        os.register_at_fork(after_in_child=self._make_lock)  # a thread that the child does not have may hold the old one

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def find(self, key: Any) -> Question:
        """Two questions must not have the same key."""
        question = self.kept.get(key)
        if question is None:
            question = self._remember(key)
        question.last_use = next(self.clock)
        return question

    def _remember(self, key: Any) -> Question:
        dropped = None
        with self._lock:
            if len(self.kept) >= KEPT_QUESTIONS and key not in self.kept:
                dropped = self.kept.pop(min(self.kept, key=lambda k: self.kept[k].last_use))
            question = self.kept.setdefault(key, Question())
        del dropped  # its plans are destroyed outside the lock
        return question


questions = _Questions()


def key_of(views: dict[str, View], settings: Settings) -> Any:
    return settings, *[(name, view[0] % ALIGNMENT, view[1:]) for name, view in views.items()]


def plan(views: dict[str, View], settings: Settings) -> Call:
    """A call for these views, as yet nobody else's."""
    return Call(views, settings, (views["q"].device_type, views["q"].device_id))


def answer(question: Question, pointers: Iterable[int], ask: Callable[[], tuple[dict[str, View], Settings]],
           seed: tuple[int, int], stream: int = 0, allocate: Optional[Allocate] = None) -> None:
    """Runs a question's plan over the pointers; without one, plans for what `ask` tells, which has those pointers.

    On the CPU the library brings its own workspace.
    """
    idle = question.idle
    try:
        call = idle.pop()
    except IndexError:  # a new question, or all its calls are running in other threads
        call = plan(*ask())
    try:
        workspace = 0
        if allocate is not None and call.workspace_size and not call.on_cpu:
            workspace = allocate(call.workspace_size)
        call.run(pointers, seed, stream, workspace)
    finally:
        idle.append(call)


def run(views: dict[str, View], settings: Settings, seed: tuple[int, int], stream: int = 0,
        allocate: Optional[Allocate] = None) -> None:
    """Plans where needed and runs."""
    answer(questions.find(key_of(views, settings)), [view.pointer for view in views.values()],
           lambda: (views, settings), seed, stream, allocate)
