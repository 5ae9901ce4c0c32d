# SPDX-License-Identifier: Apache-2.0
"""Calls whose arrays lie in the CPU's memory and which run on a Vulkan device: copied there, computed, copied back.

Used by _api.py for device="vulkan". The library's own device and memory (tessera/vulkan.h) are all that is needed.
"""
from __future__ import annotations

import ctypes
from typing import Any, Iterable, Optional

from . import _abi, _call
from ._arrays import SIZES
from ._call import View

VULKAN = 7  # DLPack's number, and the C ABI's

_lib = _abi.lib
for _name, _arguments in {"allocate": [ctypes.c_int32, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)],
                          "free": [ctypes.c_int32, ctypes.c_void_p],
                          "upload": [ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t],
                          "download": [ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]}.items():
    getattr(_lib, f"tessera_vulkan_{_name}").argtypes = _arguments


def check_device(device: Optional[str], stream: Optional[int]) -> bool:
    """Whether a call is to run on a Vulkan device."""
    if device is None:
        return False
    if device != "vulkan":
        raise ValueError(f"device: is {device!r}; must be None, which is where the arrays are, or 'vulkan'")
    if stream is not None:
        raise ValueError(f"stream: is {stream}; a call with device='vulkan' returns when its work is done")
    return True


class _Memory:
    """The bytes that a view reaches over, on the device."""

    def __init__(self, view: View) -> None:
        size = SIZES[view.type]
        reach = [(count - 1) * step * size for count, step in zip(view.shape, view.strides)]
        empty = 0 in view.shape
        low, high = (0, 0) if empty else (sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + size)
        self._host, self._bytes = view.pointer + low, high - low
        self._data = ctypes.c_void_p()
        _abi.check(_lib.tessera_vulkan_allocate(0, self._bytes, ctypes.byref(self._data)))
        try:
            _abi.check(_lib.tessera_vulkan_upload(0, self._data, self._host, self._bytes))
        except BaseException:
            self.free()
            raise
        self.view = view._replace(pointer=(self._data.value or 0) - low, device_type=VULKAN, device_id=0)

    def download(self) -> None:
        _abi.check(_lib.tessera_vulkan_download(0, self._host, self._data, self._bytes))

    def free(self) -> None:
        _lib.tessera_vulkan_free(0, self._data)


def run(views: dict[str, View], settings: Any, seed: tuple[int, int], written: Iterable[str]) -> None:
    """The call over copies of the views on the device; those that it writes come back."""
    for name, view in views.items():
        if view.device_type != _abi.CPU:
            raise ValueError(f"{name}: is not in the CPU's memory; device='vulkan' copies arrays from there")
    copies: dict[str, _Memory] = {}
    workspace: list[ctypes.c_void_p] = []

    def allocate(size: int) -> int:
        workspace.append(ctypes.c_void_p())
        _abi.check(_lib.tessera_vulkan_allocate(0, size, ctypes.byref(workspace[0])))
        return workspace[0].value or 0

    try:
        for name, view in views.items():
            copies[name] = _Memory(view)
        _call.run({name: copy.view for name, copy in copies.items()}, settings, seed, 0, allocate)
        for name in written:
            copies[name].download()
    finally:
        for copy in copies.values():
            copy.free()
        for data in workspace:
            _lib.tessera_vulkan_free(0, data)
