# SPDX-License-Identifier: Apache-2.0
"""The library python/native/calls.c: tensors read and plans run in C, without the interpreter and without ctypes.

It lies beside libtessera.so. Where it does not, or where PyTorch has no C interface for DLPack, as older versions, calls
go another way and take longer; nothing else differs.
"""
from __future__ import annotations

import ctypes
import sys
from ctypes import c_int64, c_void_p, py_object
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

from . import _abi

FILE = "libtessera_python.so"
MAX_TENSORS = 40  # of calls.c


class Prepared(ctypes.Structure):
    """Of a plan: what calls.c's Prepared is."""
    _fields_ = [("run", c_void_p), ("arguments", c_void_p * 6), ("stream", c_void_p), ("workspace", c_void_p),
                ("count", c_int64), ("data", c_void_p * MAX_TENSORS)]


def address(struct: ctypes.Structure, field: str = "") -> int:
    return ctypes.addressof(struct) + (getattr(type(struct), field).offset if field else 0)


def prepare(run: Any, plan: c_void_p, structs: list[Any], tensors: list[_abi.Tensor]) -> Prepared:
    """The structs are a plan's, in its order, the last its tessera_execution. The caller keeps all of them."""
    made = Prepared(run=ctypes.cast(run, c_void_p), stream=address(structs[-1], "stream"),
                    workspace=address(structs[-1], "workspace"), count=len(tensors))
    made.arguments[:1 + len(structs)] = [plan.value, *map(address, structs)]
    made.data[:len(tensors)] = [address(t, "data") for t in tensors]
    return made


class Functions(NamedTuple):
    """calls.c's, for PyTorch's tensors."""
    describe: Callable[..., Optional[tuple[bytes, bytes]]]
    run: Callable[..., int]
    answer: Callable[..., Any]


def load(tensor_type: Any, *used: Any) -> Optional[Functions]:
    """None where they cannot be had. Used are torch.empty_like, torch.empty, what gives a GPU's current stream, the
    questions that are kept, and their clock."""
    exchange = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
    path = Path(_abi.lib._name).with_name(FILE)
    if exchange is None or "/" not in _abi.lib._name or not path.is_file() or "t" in sys.abiflags:
        return None  # "t": a Python without the lock that these functions count on
    library = ctypes.PyDLL(str(path))
    size = c_int64.in_dll(library, "tessera_python_prepared_size").value
    if size != ctypes.sizeof(Prepared):
        raise ImportError(f"tessera: {path} has calls of {size} bytes but this package of {ctypes.sizeof(Prepared)}; "
                          "package and library must be of one version")
    functions = library.tessera_python_functions
    functions.argtypes, functions.restype = [py_object] * 8, py_object
    loaded: Optional[tuple[Any, ...]] = functions(exchange, tensor_type, tensor_type.is_neg, *used)
    return Functions(*loaded) if loaded else None
