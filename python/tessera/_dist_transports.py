# SPDX-License-Identifier: Apache-2.0
"""Messages over torch.distributed (gloo) and over mpi4py. Used by dist.py."""
from __future__ import annotations

import os
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any, Callable, Optional

from ._dist_abi import Message

_MOST_BYTES = 1 << 30  # of one MPI message, whose counts are ints
_NOTICE_BYTES = 512
_OPEN: list[Any] = []  # requests that a failure left open, with their memory: MPI may still write to it


class _Waiting:
    """A message of gloo's, whose completion can only be waited for: a thread does.

    The thread lets go of gloo's object before it says so. That object takes Python's lock back when it dies, and a process
    that is about to end, having heard that all is done, would be aborted for it.
    """

    def __init__(self, work: Any) -> None:
        self.done = False
        self.error: Optional[BaseException] = None
        self._work: Any = work
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        error: Optional[BaseException] = None
        try:
            self._work.wait()
        except BaseException as raised:
            error = raised.with_traceback(None)  # which has the object, too
        self._work = None
        self.error, self.done = error, error is None


def _aside(body: Callable[[], Any]) -> Future[Any]:
    """What a body returns or raises, from a thread that is left behind if it never does."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(body())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


class TorchTransport:
    """send and recv of a process group that moves tensors of the CPU. Word of failures goes through its store."""

    _made: Any = weakref.WeakKeyDictionary()  # by group: how many, so that each has messages and keys of its own

    def __init__(self, group: Any) -> None:
        import torch
        from torch import distributed
        from torch.distributed import distributed_c10d

        if not distributed.is_available() or not distributed.is_initialized():
            raise ValueError("group: torch.distributed is not initialised; call init_process_group first")
        group = distributed.group.WORLD if group is None else group
        if distributed.get_rank(group) < 0:
            raise ValueError("group: this process is none of its ranks")
        backend = distributed.get_backend_config(group) if hasattr(distributed, "get_backend_config") else \
            distributed.get_backend(group)
        if "gloo" not in str(backend):
            raise ValueError(f"group: has the backend {backend}; must have gloo, which moves the CPU's memory")
        self._torch, self._distributed, self._group = torch, distributed, group
        self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)
        number = TorchTransport._made.get(group, 0)
        TorchTransport._made[group] = number + 1
        self._tag = 7_300_000 + number
        self._store = distributed_c10d._get_process_group_store(group)
        self._key = f"tessera/{number}/failed"
        self._waiting: list[_Waiting] = []
        self._asked: Optional[Future[Any]] = None
        self._next_look = 0.0

    def start(self, group: list[Message]) -> None:
        self._waiting = []
        for message in group:
            memory = self._torch.frombuffer(message.memory, dtype=self._torch.uint8)
            peer = self._distributed.get_global_rank(self._group, message.peer)
            call = self._distributed.isend if message.send else self._distributed.irecv
            self._waiting.append(_Waiting(call(memory, peer, group=self._group, tag=self._tag)))

    def test(self) -> list[bool]:
        for waiting in self._waiting:
            if waiting.error is not None:
                raise RuntimeError(f"torch.distributed: {str(waiting.error).splitlines()[0]}")
        return [waiting.done for waiting in self._waiting]

    # The store is another process's: while that one is stopped, nothing answers for half an hour.

    def notice(self) -> Optional[str]:
        if self._asked is None and time.monotonic() >= self._next_look:
            self._asked = _aside(self._look)
        if self._asked is None or not self._asked.done():
            return None
        answer, self._asked = self._asked, None
        self._next_look = time.monotonic() + 0.02  # a question to the store takes about 0.1 ms
        heard: Optional[str] = answer.result()
        return heard

    def _look(self) -> Optional[str]:
        return self._store.get(self._key).decode() if self._store.check([self._key]) else None

    def fail(self, sentence: str) -> None:
        def tell() -> None:
            if not self._store.check([self._key]):
                self._store.set(self._key, sentence)

        _aside(tell).result(0.15)


class MpiTransport:
    """mpi4py's communicator: two duplicates of it, one for rows and one for word of failures."""

    def __init__(self, comm: Any, timeout: float) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout: is {timeout:g}; must be a positive number of seconds")
        from mpi4py import MPI
        if comm == MPI.COMM_NULL:
            raise ValueError("comm: is COMM_NULL")
        if comm.Is_inter():
            raise ValueError("comm: is an intercommunicator; must be of one group (Intercomm.Merge)")
        self._mpi, self._process = MPI, os.getpid()
        (self._rows, first), (self._control, second) = comm.Idup(), comm.Idup()
        end = time.monotonic() + timeout
        while not MPI.Request.Testall([first, second]):
            if time.monotonic() > end:
                raise RuntimeError(f"no answer within {timeout:g} s from all ranks of the MPI communicator")
            time.sleep(1e-4)
        for made in (self._rows, self._control):
            made.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.ranks = self._rows.Get_rank(), self._rows.Get_size()
        self._parts: list[tuple[int, Any, int]] = []  # message, request, bytes expected
        self._count = 0
        self._word = bytearray(_NOTICE_BYTES)
        self._listening = self._control.Irecv([self._word, MPI.BYTE], source=MPI.ANY_SOURCE, tag=2)
        self._heard: Optional[str] = None
        self._sending: list[Any] = []
        self._failed = False

    def _gone(self) -> Optional[str]:
        """Why there is no MPI here any more, which would end the process, or in a forked child take the parent's messages."""
        if self._mpi.Is_finalized():
            return "communicator: MPI has been finalised since it was made"
        if self._process != os.getpid():
            return "communicator: was made before this process was forked, and MPI is the parent's"
        return None

    def start(self, group: list[Message]) -> None:
        if gone := self._gone():
            raise RuntimeError(gone)
        self._parts, self._count = [], len(group)
        for i, message in enumerate(group):
            memory = memoryview(message.memory).cast("B")
            for at in range(0, len(memory), _MOST_BYTES):
                part = memory[at:at + _MOST_BYTES]
                call = self._rows.Isend if message.send else self._rows.Irecv
                request = call([part, self._mpi.BYTE], message.peer, tag=1)
                self._parts.append((i, request, 0 if message.send else len(part)))

    def test(self) -> list[bool]:
        done = [True] * self._count
        left = []
        for i, request, expected in self._parts:
            status = self._mpi.Status()
            if not request.Test(status):
                done[i] = False
                left.append((i, request, expected))
            elif expected and status.Get_count(self._mpi.BYTE) != expected:
                raise RuntimeError(f"a message from rank {status.Get_source()} has {status.Get_count(self._mpi.BYTE)} "
                                   f"bytes; {expected} were expected")
        self._parts = left
        return done

    def notice(self) -> Optional[str]:
        if self._heard is None and not self._gone() and self._listening.Test():
            self._heard = self._word.split(b"\0")[0].decode(errors="replace")
        return self._heard

    def fail(self, sentence: str) -> None:
        self._failed = True
        if self._gone():
            return
        text = sentence.encode()[:_NOTICE_BYTES - 1].ljust(_NOTICE_BYTES, b"\0")
        for r in range(self.ranks):
            if r != self.rank:
                self._sending.append((text, self._control.Isend([text, self._mpi.BYTE], r, tag=2)))
        for _ in range(100):
            for _, request in self._sending:
                request.Test()

    def __del__(self) -> None:
        if not getattr(self, "_listening", None) or self._failed or self._heard is not None or self._gone():
            _OPEN.append((getattr(self, "_word", None), getattr(self, "_listening", None), getattr(self, "_parts", None),
                          getattr(self, "_sending", None)))
            return
        self._listening.Cancel()
        self._listening.Wait()
        self._rows.Free()
        self._control.Free()
