# SPDX-License-Identifier: Apache-2.0
"""The C ABI in ctypes: include/tessera/tessera.h, struct by struct. Loads the library, turns statuses into exceptions.

Used by _call.py and _api.py; nothing else of the package sees ctypes structs.
"""
from __future__ import annotations

import ctypes
import operator
import os
import re
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

F64, F32, F16, BF16, E4M3, I32, I64, U8, I8 = 0, 1, 2, 3, 4, 6, 7, 8, 9
CPU, CUDA = 1, 2  # DLPack's device codes
DEFAULT_SCALE = 1.7976931348623157e308  # stands for 1/sqrt(D)
MAX_NDIM = 4


class Tensor(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("data", c_void_p), ("type", c_int32), ("ndim", c_int32),
                ("device_type", c_int32), ("device_id", c_int32), ("shape", c_int64 * MAX_NDIM),
                ("strides", c_int64 * MAX_NDIM)]


class _Tensors(ctypes.Structure):
    """A struct that is its size and then pointers to tensors; NULL means: not given."""


def _pointers(names: str) -> list[tuple[str, Any]]:
    return [("size", c_size_t), *((name, POINTER(Tensor)) for name in names.split())]


class Inputs(_Tensors):
    _fields_ = _pointers("q k v bias mask slopes sinks cu_seqlens_q cu_seqlens_k seqused_q seqused_k rng "
                         "block_table v_block_table page_indptr page_indices leftpad_k state_o state_m state_l "
                         "seq_row0 seq_col0 seq_batch0 k_scale v_scale qv "
                         "tree_mask positions")


class Outputs(_Tensors):
    _fields_ = _pointers("o lse status state_o state_m state_l")


class AppendArgs(_Tensors):
    _fields_ = [*_pointers("k_new v_new k v cu_seqlens_new seqused_k block_table v_block_table page_indptr page_indices "
                           "slots rotary_cos rotary_sin positions q q_out q_positions status"),
                ("interleaved", c_int32), ("reserved", c_int32), *_pointers("k_scale v_scale")[1:]]


class Saved(_Tensors):
    _fields_ = _pointers("o lse d_o d_lse")


class Gradients(_Tensors):
    _fields_ = _pointers("dq dk dv dbias dsinks")


class Options(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("scale", c_double), ("softcap", c_double), ("causal", c_int32),
                ("alignment", c_int32), ("diagonal_offset", c_int64), ("window_left", c_int64),
                ("window_right", c_int64), ("dropout", c_double), ("seed", c_uint64), ("seed_offset", c_uint64),
                ("row0", c_int64), ("col0", c_int64), ("head0", c_int64), ("batch0", c_int64),
                ("max_seqlen_q", c_int64), ("max_seqlen_k", c_int64), ("accumulate", c_int32),
                ("deterministic", c_int32), ("part_invariant", c_int32), ("reserved", c_int32),
                ("segment_rows", c_int64)]


class Execution(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("device_type", c_int32), ("device_id", c_int32), ("stream", c_void_p),
                ("threads", c_int32), ("sm_margin", c_int32), ("workspace", c_void_p),
                ("workspace_bytes", c_size_t), ("kernel", c_char_p)]


_STRUCTS = {Tensor: "tensor", Inputs: "inputs", Outputs: "outputs", AppendArgs: "append_args", Saved: "saved",
            Gradients: "gradients",
            Options: "options", Execution: "execution"}


def _load() -> ctypes.CDLL:
    """The library that $TESSERA_LIBRARY names, else the one beside this file."""
    path = os.environ.get("TESSERA_LIBRARY") or str(Path(__file__).with_name("libtessera.so"))
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"tessera: {error}; install the package with `pip install .`, or let TESSERA_LIBRARY name "
                          "a libtessera.so") from None


def _read_defaults() -> dict[type, bytes]:
    """What each _init function writes. A library with other structs than these is refused before any call."""
    defaults: dict[type, bytes] = {}
    for struct, name in _STRUCTS.items():
        room = ctypes.create_string_buffer(4096)  # more than any version's struct
        getattr(lib, f"tessera_{name}_init")(room)
        size = c_size_t.from_buffer(room).value
        if size != ctypes.sizeof(struct):
            raise ImportError(f"tessera: tessera_{name} has {size} bytes in {lib._name} but {ctypes.sizeof(struct)} in "
                              "this package; package and library must be of one version")
        defaults[struct] = room.raw[:size]
    return defaults


lib = _load()
for _name, _result, _arguments in [
        ("last_error", c_char_p, []), ("info", c_char_p, []), ("version", c_int, []),
        ("plan_kernel", c_char_p, [c_void_p]), ("plan_describe", c_char_p, [c_void_p]),
        ("plan_workspace_size", c_size_t, [c_void_p]), ("plan_destroy", None, [c_void_p]),
        ("plan_forward", c_int, [c_void_p] * 5), ("plan_backward", c_int, [c_void_p] * 6),
        ("plan_run_forward", c_int, [c_void_p] * 5), ("plan_run_backward", c_int, [c_void_p] * 6),
        ("merge", c_int, [c_void_p, c_int64, c_void_p, c_void_p]), ("dropout_mask", c_int, [c_void_p] * 4),
        ("append", c_int, [c_void_p] * 2)]:
    _function = getattr(lib, "tessera_" + _name)
    _function.restype, _function.argtypes = _result, _arguments
_DEFAULTS = _read_defaults()


class CommunicationError(RuntimeError):
    """Over several ranks: another one failed, differs or did not answer in time. The communicator is of no more use."""


_EXCEPTIONS: dict[int, type[Exception]] = {1: ValueError, 2: NotImplementedError, 3: MemoryError, 6: CommunicationError}


def integer(name: str, value: Any, bits: int = 64, *, signed: bool = True, unsigned: bool = False) -> int:
    """The value as an integer that fits its place: ctypes would cut off what does not."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: is {value!r}; must be an integer") from None
    low, high = -(1 << bits - 1) if signed else 0, 1 << (bits if unsigned else bits - 1)
    if not low <= number < high:
        shown = str(number) if number.bit_length() < 256 else f"an integer of {number.bit_length()} bits"
        raise ValueError(f"{name}: is {shown}; must be an integer of {bits} bits{'' if signed else ', 0 or more'}")
    return number


def text(name: str, value: str) -> bytes:
    """The value as C reads it: to the first zero, so there must be none before the end."""
    if "\0" in value:
        raise ValueError(f"{name}: is {value!r}; must not hold the character of code 0")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: is {value!r}; must be text that UTF-8 can hold") from None


_WHOLE: dict[str, Any] = {"signed": False, "unsigned": True}
_INTEGERS: dict[Any, dict[str, Any]] = {c_int32: {"bits": 32}, c_int64: {}, c_uint64: _WHOLE, c_size_t: _WHOLE,
                                        c_void_p: _WHOLE}
_PLACES = {struct: {name: _INTEGERS[kind] for name, kind in struct._fields_ if kind in _INTEGERS}
           for struct in _STRUCTS}  # type: ignore[attr-defined]


def make(struct: type, **fields: Any) -> Any:
    """A struct with the library's defaults, then the given fields. Integers that do not fit raise."""
    made = struct.from_buffer_copy(_DEFAULTS[struct])  # type: ignore[attr-defined]
    places = _PLACES[struct]
    for name, value in fields.items():
        setattr(made, name, integer(name, value, **places[name]) if name in places and value is not None else value)
    return made


# Keywords of Python whose names in the C ABI are others: a sentence begins with the argument that it is about.
_CALLERS_NAMES = {"slopes": "alibi_slopes", "dropout": "dropout_p", "window_left": "window's left",
                  "window_right": "window's right", "diagonal_offset": "alignment"}


def in_callers_words(sentence: str) -> str:
    """A sentence of the library as the rule looks from Python."""
    name, colon, rest = sentence.partition(":")
    if name == "mask":
        rest = rest.replace("must be u8", "must be bool or uint8")
    return _CALLERS_NAMES.get(name, name) + colon + rest


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """The same refusal in the words of a function that has other names for its arguments."""
    words = "|".join(map(re.escape, names))
    return type(error)(re.sub(rf"\b({words})\b", lambda match: names[match[0]], str(error)))


def check(status: int) -> None:
    """Raises the exception of a failed call, with the library's sentence."""
    if status:
        raise _EXCEPTIONS.get(status, RuntimeError)(in_callers_words(lib.tessera_last_error().decode()))


def version() -> str:
    number = lib.tessera_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
