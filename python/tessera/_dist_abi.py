# SPDX-License-Identifier: Apache-2.0
"""The C ABI of several ranks in ctypes: include/tessera/dist.h, struct by struct. Used by dist.py alone."""
from __future__ import annotations

import ctypes
import weakref
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint8, c_void_p
from typing import Any, NamedTuple, Protocol

from ._abi import Options, check, integer, lib

SENTENCE_BYTES = 512
RING, GATHER = 0, 1
KINDS = {"zigzag": 0, "contiguous": 1, "balanced": 2}
SCHEMES = {"ring": RING, "gather": GATHER}
COMMUNICATION_ERROR = 6


class CSpan(ctypes.Structure):
    _fields_ = [("sequence", c_int64), ("begin", c_int64), ("end", c_int64)]


class PartitionArgs(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("lengths", POINTER(c_int64)), ("sequences", c_int64), ("kind", c_int32),
                ("ranks", c_int32), ("slices", c_int32), ("reserved", c_int32), ("align", c_int64),
                ("options", POINTER(Options))]


class CMessage(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_size_t), ("peer", c_int32), ("send", c_int32)]


START = CFUNCTYPE(c_int, c_void_p, POINTER(CMessage), c_int64, c_void_p)
TEST = CFUNCTYPE(c_int, c_void_p, POINTER(c_uint8), c_int64, c_void_p)
NOTICE = CFUNCTYPE(c_int32, c_void_p, c_void_p)
FAIL = CFUNCTYPE(None, c_void_p, c_char_p)


class CTransport(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("context", c_void_p), ("rank", c_int32), ("ranks", c_int32), ("start", START),
                ("test", TEST), ("notice", NOTICE), ("fail", FAIL), ("destroy", c_void_p),
                ("own_thread", c_int32), ("reserved", c_int32)]


class DistArgs(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("communicator", c_void_p), ("partition", c_void_p), ("query_heads", c_int64),
                ("key_heads", c_int64), ("head_dim", c_int64), ("value_dim", c_int64), ("type", c_int32),
                ("scheme", c_int32), ("segment", c_int64), ("timeout", c_double)]


class DecoderArgs(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("communicator", c_void_p), ("query_heads", c_int64), ("key_heads", c_int64),
                ("head_dim", c_int64), ("value_dim", c_int64), ("type", c_int32), ("groups", c_int32),
                ("block", c_int64), ("timeout", c_double)]


for _name, _result, _arguments in [
        ("decoder_make", c_int, [c_void_p] * 4), ("decoder_destroy", None, [c_void_p]),
        ("decoder_place", c_int32, [c_void_p, c_int64, POINTER(c_int64)]),
        ("decoder_rows", c_int64, [c_void_p, c_int64, c_int32]),
        ("decoder_forward", c_int, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p]),
        ("partition_make", c_int, [c_void_p] * 2), ("partition_from_spans", c_int, [c_void_p] * 4),
        ("partition_destroy", None, [c_void_p]), ("partition_rows", c_int64, [c_void_p, c_int32]),
        ("partition_spans", POINTER(CSpan), [c_void_p, c_int32, POINTER(c_int64)]),
        ("communicator_make", c_int, [c_void_p] * 2), ("communicator_threads", c_int, [c_int32, c_void_p]),
        ("communicator_destroy", None, [c_void_p]), ("communicator_rank", c_int32, [c_void_p]),
        ("communicator_size", c_int32, [c_void_p]), ("dist_plan_make", c_int, [c_void_p] * 4),
        ("dist_plan_destroy", None, [c_void_p]), ("dist_plan_describe", c_char_p, [c_void_p]),
        ("dist_forward", c_int, [c_void_p] * 4), ("dist_backward", c_int, [c_void_p] * 5)]:
    _function = getattr(lib, "tessera_" + _name)
    _function.restype, _function.argtypes = _result, _arguments

_INIT = {PartitionArgs: "partition_args", CTransport: "transport", DistArgs: "dist_args", DecoderArgs: "decoder_args"}


def make(struct: type[ctypes.Structure], **fields: Any) -> Any:
    """A struct with the library's defaults, then the given fields. Integers that do not fit raise."""
    made: Any = struct()
    getattr(lib, f"tessera_{_INIT[struct]}_init")(ctypes.byref(made))
    if made.size != ctypes.sizeof(struct):
        raise ImportError(f"tessera: tessera_{_INIT[struct]} has {made.size} bytes in {lib._name} but "
                          f"{ctypes.sizeof(struct)} in this package; package and library must be of one version")
    bits = {name: 8 * ctypes.sizeof(kind) for name, kind, *_ in struct._fields_
            if kind in (c_int32, c_int64)}
    for name, value in fields.items():
        setattr(made, name, integer(name, value, bits[name]) if name in bits else value)
    return made


class Handle:
    """An opaque pointer of the library's, destroyed with its last owner."""

    def __init__(self, pointer: int | None, destroy: Any) -> None:
        self.pointer = c_void_p(pointer)
        weakref.finalize(self, destroy, self.pointer).atexit = False


class Message(NamedTuple):
    """One end of a message: `memory` is what is sent, or room for what is received, and supports the buffer protocol."""
    peer: int
    send: bool
    memory: Any


class Transport(Protocol):
    """How messages travel: what tessera_transport's functions do, in Python. None of them may wait.

    `start` begins a group of messages, at most one for each peer and direction; the group before is complete. `test`
    says of each message of the group whether it is complete. `notice` returns the sentence of another rank that has
    failed, or None. `fail` tells the others, and gives up what is under way. What they raise becomes the rank's error.
    """
    rank: int
    ranks: int

    def start(self, group: list[Message]) -> None: ...
    def test(self) -> list[bool]: ...
    def notice(self) -> str | None: ...
    def fail(self, sentence: str) -> None: ...


def _put(address: int, sentence: str) -> None:
    text = sentence.encode(errors="replace")[:SENTENCE_BYTES - 1] + b"\0"
    ctypes.memmove(address, text, len(text))


def _bytes_at(message: CMessage) -> Any:
    return (c_uint8 * message.bytes).from_address(message.data)


def communicator(transport: Transport) -> tuple[Handle, Any]:
    """The library's communicator, and the callbacks, which must live as long as anybody uses it."""

    def told(address: int, body: Any) -> int:
        try:
            body()
        except MemoryError:
            return 3
        except BaseException as error:  # of a callback: there is nobody above to catch it
            _put(address, str(error) or type(error).__name__)
            return COMMUNICATION_ERROR
        return 0

    def start(_: Any, group: Any, count: int, sentence: int) -> int:
        return told(sentence, lambda: transport.start(
            [Message(group[i].peer, bool(group[i].send), _bytes_at(group[i])) for i in range(count)]))

    def test(_: Any, done: Any, count: int, sentence: int) -> int:
        def body() -> None:
            for i, complete in enumerate(transport.test()[:count]):
                if complete:
                    done[i] = 1
        return told(sentence, body)

    def notice(_: Any, sentence: int) -> int:
        try:
            heard = transport.notice()
        except BaseException as error:  # whoever could tell is gone
            heard = str(error) or type(error).__name__
        if heard is None:
            return 0
        _put(sentence, heard)
        return 1

    def fail(_: Any, sentence: bytes) -> None:
        try:
            transport.fail(sentence.decode(errors="replace"))
        except BaseException:  # the others will run into their time-out
            pass

    callbacks = START(start), TEST(test), NOTICE(notice), FAIL(fail)
    given = make(CTransport, rank=transport.rank, ranks=transport.ranks, start=callbacks[0], test=callbacks[1],
                 notice=callbacks[2], fail=callbacks[3])
    made = c_void_p()
    check(lib.tessera_communicator_make(ctypes.byref(given), ctypes.byref(made)))
    return Handle(made.value, lib.tessera_communicator_destroy), (callbacks, transport)
