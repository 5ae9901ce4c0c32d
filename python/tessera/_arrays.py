# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries: how they are seen (no copies), and how new ones are made in the caller's own library.

NumPy arrays and PyTorch tensors are read by their attributes, every other library's through DLPack. Used by _api.py.
"""
from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any, Callable, NamedTuple, Optional, Sequence

from . import _abi
from ._abi import CPU, CUDA
from ._call import View
from ._convert import is_strided, refuse_masked

TYPE_NAMES = {"float64": _abi.F64, "float32": _abi.F32, "float16": _abi.F16, "bfloat16": _abi.BF16,
              "int32": _abi.I32, "int64": _abi.I64, "uint8": _abi.U8, "bool": _abi.U8, "int8": _abi.I8,
              "float8_e4m3fn": _abi.E4M3}
_NAMES = {code: name for name, code in TYPE_NAMES.items() if name != "bool"}
SIZES = {_abi.F64: 8, _abi.F32: 4, _abi.F16: 2, _abi.BF16: 2, _abi.I32: 4, _abi.I64: 8, _abi.U8: 1,
          _abi.I8: 1, _abi.E4M3: 1}


def library_of(array: Any) -> str:
    """The top-level package of an array's type: 'numpy', 'torch', 'jax', 'cupy', ..."""
    name = type(array).__module__.partition(".")[0]
    return "jax" if name == "jaxlib" else name


def type_code(name: str, dtype: str) -> int:
    code = TYPE_NAMES.get(dtype)
    if code is None:
        raise TypeError(f"{name}: has type {dtype}; must be one of {', '.join(TYPE_NAMES)}")
    return code


# --- views -----------------------------------------------------------------------------------------------------------

def _numpy_view(name: str, array: Any) -> View:
    refuse_masked(name, array)
    code = type_code(name, array.dtype.name)
    size = SIZES[code]
    if not array.dtype.isnative:
        raise TypeError(f"{name}: has type {array.dtype!r} in the byte order of another machine")
    if any(step % size for step, count in zip(array.strides, array.shape) if count > 1):
        raise ValueError(f"{name}: has strides of {array.strides} bytes; must be multiples of its elements' {size}")
    strides = tuple(step // size for step in array.strides) if array.size else contiguous(array.shape)
    return View(array.__array_interface__["data"][0], code, CPU, 0, array.shape, strides)


def _torch_view(name: str, array: Any) -> View:
    if array.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name}: is on {array.device}; must be on cpu or cuda")
    if not is_strided(array):
        raise TypeError(f"{name}: is nested or sparse ({array.layout}); must be a tensor with strides. "
                        "tessera.torch.attention takes jagged ones")
    if array.is_neg():
        raise ValueError(f"{name}: is a view whose sign PyTorch would change later; must be resolved, as resolve_neg() "
                         "does")
    cuda = array.device.type == "cuda"
    return View(array.data_ptr(), type_code(name, str(array.dtype).removeprefix("torch.")), CUDA if cuda else CPU,
                array.get_device() if cuda else 0, tuple(array.shape), array.stride())


class _DLTensor(ctypes.Structure):
    """DLPack's DLTensor, with which a DLManagedTensor begins."""
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


# DLPack's (code, bits) of a number.
_DLPACK_TYPES = {(2, 64): _abi.F64, (2, 32): _abi.F32, (2, 16): _abi.F16, (4, 16): _abi.BF16, (0, 32): _abi.I32,
                 (0, 64): _abi.I64, (1, 8): _abi.U8, (6, 8): _abi.U8,
                 (0, 8): _abi.I8, (10, 8): _abi.E4M3}
_CPU_LIKE, _CUDA_LIKE = (1, 3), (2, 13)  # plain, and pinned or managed

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for count in reversed(shape):
        strides.append(step)
        step *= max(count, 1)
    return tuple(reversed(strides))


def _dlpack_view(name: str, array: Any, stream: int, keep: list[Any]) -> View:
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        raise TypeError(f"{name}: is a {type(array).__name__}; must be an array that speaks DLPack")
    device_type, device_id = (int(x) for x in array.__dlpack_device__())
    if device_type not in _CPU_LIKE + _CUDA_LIKE:
        raise TypeError(f"{name}: is on a device of DLPack's kind {device_type}; must be on cpu or cuda")
    # DLPack writes 1 for CUDA's legacy default stream; on the CPU there are none.
    capsule = array.__dlpack__(stream=stream or 1) if device_type in _CUDA_LIKE else array.__dlpack__()
    keep.append(capsule)  # not consumed: the memory is released when the capsule dies, after the call
    t = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    code = _DLPACK_TYPES.get((t.code, t.bits))
    if code is None or t.lanes != 1:
        raise TypeError(f"{name}: has DLPack's type (code {t.code}, bits {t.bits}, lanes {t.lanes}); must be one of "
                        f"{', '.join(TYPE_NAMES)}")
    shape = tuple(t.shape[:t.ndim])
    strides = tuple(t.strides[:t.ndim]) if t.strides and 0 not in shape else contiguous(shape)
    device_type = CPU if device_type in _CPU_LIKE else CUDA
    return View((t.data or 0) + t.byte_offset, code, device_type, device_id, shape, strides)


def view(name: str, array: Any, stream: int, keep: list[Any]) -> View:
    """How the library will see an array. `keep` must live until the call is over."""
    library = library_of(array)
    if library == "numpy" and hasattr(array, "__array_interface__"):
        return _numpy_view(name, array)
    if library == "torch" and hasattr(array, "data_ptr"):
        return _torch_view(name, array)
    return _dlpack_view(name, array, stream, keep)


# --- new arrays ------------------------------------------------------------------------------------------------------

class Maker(NamedTuple):
    """Makes arrays beside an existing one, on the stream on which the call will run."""
    make: Callable[..., Any]  # (shape, type code, value=None): filled with a value, or with anything
    stream: int


def _numpy_type(code: int) -> Any:
    if code == _abi.BF16:
        import ml_dtypes  # a bfloat16 array came in, so its type's package is there
        return ml_dtypes.bfloat16
    return _NAMES[code]


def _numpy_maker(stream: Optional[int]) -> Maker:
    import numpy

    def make(shape: Sequence[int], code: int, value: Optional[float] = None) -> Any:
        dtype = _numpy_type(code)
        return numpy.empty(shape, dtype) if value is None else numpy.full(shape, value, dtype)
    return Maker(make, stream or 0)


# PyTorch and CuPy hand memory out again in the order of the stream that was current when they made an array: arrays of
# a call on another stream are made there.

def _torch_maker(array: Any, stream: Optional[int]) -> Maker:
    torch = sys.modules["torch"]
    scope: Callable[[], Any] = contextlib.nullcontext
    if array.is_cuda and stream is not None:
        scope = lambda: torch.cuda.stream(torch.cuda.ExternalStream(stream, device=array.device))  # noqa: E731
    elif array.is_cuda:
        stream = torch.cuda.current_stream(array.device).cuda_stream

    def make(shape: Sequence[int], code: int, value: Optional[float] = None) -> Any:
        with scope():
            made = torch.empty(shape, dtype=getattr(torch, _NAMES[code]), device=array.device)
            return made if value is None else made.fill_(value)
    return Maker(make, stream or 0)


def _cupy_maker(array: Any, stream: Optional[int]) -> Maker:
    cupy = sys.modules["cupy"]
    scope: Callable[[], Any] = contextlib.nullcontext
    if stream is None:
        stream = cupy.cuda.get_current_stream(array.device.id).ptr
    else:
        scope = lambda: cupy.cuda.ExternalStream(stream, array.device.id)  # noqa: E731

    def make(shape: Sequence[int], code: int, value: Optional[float] = None) -> Any:
        dtype = _numpy_type(code)
        with array.device, scope():
            return cupy.empty(shape, dtype) if value is None else cupy.full(shape, value, dtype)
    return Maker(make, stream or 0)


def is_of_xla(array: Any) -> bool:
    """Whether only XLA may touch this array's memory: JAX keeps its streams on a GPU to itself, and inside jit there is
    no memory yet. tessera.jax is for those."""
    if library_of(array) != "jax":
        return False
    import jax
    return isinstance(array, jax.core.Tracer) or array.__dlpack_device__()[0] not in _CPU_LIKE


def _jax_maker(array: Any) -> Maker:
    import jax

    def make(shape: Sequence[int], code: int, value: Optional[float] = None) -> Any:
        made = jax.numpy.full(shape, value or 0, _NAMES[code], device=array.device)
        return made.block_until_ready()  # ours alone until the call returns, so that it may be written
    return Maker(make, 0)


def maker(array: Any, stream: Optional[int] = None) -> Maker:
    """Makes arrays for a call on this stream, or else on the array's library's current one."""
    library = library_of(array)
    if library == "torch":
        return _torch_maker(array, stream)
    if library == "jax":
        return _jax_maker(array)
    if library == "cupy":
        return _cupy_maker(array, stream)
    if library != "numpy" and hasattr(array, "__dlpack_device__") and int(array.__dlpack_device__()[0]) in _CUDA_LIKE:
        raise TypeError(f"q: is a {type(array).__module__}.{type(array).__name__} on a GPU; outputs can be made as "
                        "torch, cupy or jax arrays there")
    return _numpy_maker(stream)
