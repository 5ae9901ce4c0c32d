# SPDX-License-Identifier: Apache-2.0
"""XLA's FFI in ctypes: our own declarations of what of its C API (xla/ffi/api/c_api.h, versions 0.1 to 0.4) we use.

`handler` turns a Python function over buffers into a function pointer that XLA calls. Used by jax.py. Needs no JAX.
"""
from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any, Callable, NamedTuple, Optional

from . import _abi
from ._arrays import contiguous
from ._call import View

MAJOR, MINORS = 0, (1, 2, 3, 4)  # of the C API; what these declarations are known to fit
_METADATA, _EXECUTE = 1, 3  # XLA_FFI_Extension_Metadata, XLA_FFI_ExecutionStage_EXECUTE
_INVALID_ARGUMENT, _INTERNAL = 3, 13  # XLA_FFI_Error_Code

# XLA_FFI_DataType
TYPES = {1: _abi.U8, 2: _abi.I8, 4: _abi.I32, 5: _abi.I64, 6: _abi.U8, 8: _abi.I32, 10: _abi.F16, 11: _abi.F32, 12: _abi.F64,
         16: _abi.BF16, 20: _abi.E4M3}


def _struct(name: str, *fields: tuple[str, Any]) -> Any:
    """A struct that begins as XLA's do: with its size and a chain of extensions."""
    return type(name, (ctypes.Structure,), {"_fields_": [("struct_size", c_size_t), ("extension", c_void_p), *fields]})


class _Extension(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", c_void_p)]


_Version = _struct("Version", ("major", c_int), ("minor", c_int))


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", POINTER(_Metadata))]


_FUNCTIONS = ("error_create error_message error_destroy register stream_get type_register context_get state_set "
              "state_get memory_allocate memory_free pool_schedule pool_threads future_create future_available "
              "future_error run_id device_ordinal")
_Api = _struct("Api", ("version", _Version), ("internal", c_void_p), *((f, c_void_p) for f in _FUNCTIONS.split()))
_Buffer = _struct("Buffer", ("type", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64)))
_Buffers = _struct("Buffers", ("size", c_int64), ("types", POINTER(c_int)), ("items", POINTER(POINTER(_Buffer))))


class _ByteSpan(ctypes.Structure):
    _fields_ = [("pointer", c_void_p), ("length", c_size_t)]

    def text(self) -> str:
        return ctypes.string_at(self.pointer, self.length).decode()


_Attributes = _struct("Attributes", ("size", c_int64), ("types", POINTER(c_int)),
                      ("names", POINTER(POINTER(_ByteSpan))), ("items", POINTER(POINTER(_ByteSpan))))
_Frame = _struct("Frame", ("api", POINTER(_Api)), ("context", c_void_p), ("stage", c_int), ("arguments", _Buffers),
                 ("results", _Buffers), ("attributes", _Attributes))
_ErrorCreate = _struct("ErrorCreate", ("message", c_char_p), ("code", c_int))
# The code is told since version 0.4; before, it is room that nobody writes to.
_ErrorMessage = _struct("ErrorMessage", ("error", c_void_p), ("message", c_char_p), ("code", c_int))
_StreamGet = _struct("StreamGet", ("context", c_void_p), ("stream", c_void_p))
_Allocate = _struct("Allocate", ("context", c_void_p), ("size", c_size_t), ("alignment", c_size_t), ("data", c_void_p))
_Free = _struct("Free", ("context", c_void_p), ("size", c_size_t), ("data", c_void_p))
_OrdinalGet = _struct("OrdinalGet", ("context", c_void_p), ("ordinal", c_int32))

_Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))
_Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)  # every function of the API: a struct in, an error or NULL out


class Context:
    """What a handler may ask XLA for while it runs."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self._api = frame.api.contents
        self._memory: list[tuple[int, int]] = []

    def _call(self, function: str, struct: Any, **fields: Any) -> Any:
        arguments = struct(struct_size=ctypes.sizeof(struct), **fields)
        # A newer function than this runtime's API lies beyond its struct.
        if getattr(_Api, function).offset >= self._api.struct_size:
            raise NotImplementedError(f"XLA's FFI of version {version_of(self._api)} has no {function}")
        error = _Function(getattr(self._api, function))(ctypes.addressof(arguments))
        if error:
            told = _ErrorMessage(struct_size=ctypes.sizeof(_ErrorMessage), error=error)
            _Function(self._api.error_message)(ctypes.addressof(told))
            sentence = told.message.decode()
            _Function(self._api.error_destroy)(ctypes.addressof(told))  # its arguments begin as told does
            raise RuntimeError(f"XLA's {function}: {sentence}")
        return arguments

    def stream(self) -> int:
        return self._call("stream_get", _StreamGet, context=self._frame.context).stream or 0

    def device_id(self) -> int:
        return int(self._call("device_ordinal", _OrdinalGet, context=self._frame.context).ordinal)

    def allocate(self, size: int) -> int:
        data = self._call("memory_allocate", _Allocate, context=self._frame.context, size=size, alignment=16).data
        self._memory.append((size, data))
        return int(data)

    def free(self) -> None:
        """Gives memory back in the stream's order: what has been enqueued may still use it."""
        for size, data in self._memory:
            self._call("memory_free", _Free, context=self._frame.context, size=size, data=data)


class Arguments(NamedTuple):
    context: Context
    inputs: list[View]
    outputs: list[View]
    attribute: str  # the one that our calls have


def version_of(api: Any) -> str:
    return f"{api.version.major}.{api.version.minor}"


def _buffers(items: Any, device_type: int, device_id: int) -> list[View]:
    views = []
    for n in range(items.size):
        buffer = items.items[n].contents
        shape = tuple(buffer.dims[:buffer.rank])
        views.append(View(buffer.data or 0, TYPES[buffer.type], device_type, device_id, shape, contiguous(shape)))
    return views


def _tell_metadata(frame: Any, extension: int) -> None:
    """XLA asks which API a handler was built for: the runtime's own where we know it, else our newest, which XLA may
    still support. Runtimes that do not say theirs here are the oldest."""
    metadata = ctypes.cast(extension, POINTER(_MetadataExtension)).contents.metadata.contents
    metadata.version.major, metadata.version.minor = MAJOR, MINORS[-1] if frame.api else MINORS[0]
    if frame.api:
        runtime = frame.api.contents.version
        if runtime.major == MAJOR and runtime.minor in MINORS:
            metadata.version.minor = runtime.minor
    metadata.traits = 0


def handler(function: Callable[[Arguments], None], device_type: int) -> Any:
    """A function pointer for XLA. The result must live as long as XLA may call it."""

    def call(frame_pointer: Any) -> Optional[int]:
        frame = frame_pointer.contents
        if frame.extension:
            extension = ctypes.cast(frame.extension, POINTER(_Extension)).contents
            if extension.type == _METADATA:
                _tell_metadata(frame, frame.extension)
                return None
        if frame.stage != _EXECUTE:
            return None
        context = Context(frame)
        try:
            device_id = 0 if device_type == _abi.CPU else context.device_id()
            try:
                function(Arguments(context, _buffers(frame.arguments, device_type, device_id),
                                   _buffers(frame.results, device_type, device_id),
                                   frame.attributes.items[0].contents.text()))
            finally:
                context.free()
            return None
        except Exception as error:  # whatever it is, XLA must hear of it: nothing may pass through its frames
            code = _INVALID_ARGUMENT if isinstance(error, (ValueError, TypeError)) else _INTERNAL
            made = _ErrorCreate(struct_size=ctypes.sizeof(_ErrorCreate), message=str(error).encode(), code=code)
            returned: int = _Function(frame.api.contents.error_create)(ctypes.addressof(made))
            return returned
    return _Handler(call)
