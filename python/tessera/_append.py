# SPDX-License-Identifier: Apache-2.0
"""append for arrays of any library: new keys and values go to a cache, in place. And the call of the C ABI itself.

Used by __init__.py, and by _torch_append.py, whose operator makes the same call.
"""
from __future__ import annotations

import ctypes
from typing import Any, Mapping, Optional

from . import _abi, _call
from ._arrays import library_of, maker, view
from ._call import View
from ._convert import optional, rows

Array = Any

WRITTEN = ("k", "v", "q_out", "status", "k_scale", "v_scale")


def is_written(name: str, array: Array) -> bool:
    """Scales are written where there is one for each row."""
    return name in WRITTEN and (not name.endswith("_scale") or len(array.shape) >= 3)


def converted(given: Mapping[str, Array]) -> dict[str, Array]:
    """As the library reads them; what is written stays as it lies."""
    return {name: array if is_written(name, array) else optional(name, rows(name, array), "") for name, array in given.items()}


def run(views: Mapping[str, View], interleaved: bool, threads: int, stream: int) -> None:
    """The views by their names in the C ABI. On a GPU the call is enqueued on `stream`, a CUstream."""
    tensors = {name: ctypes.pointer(_call.tensor(name, view)) for name, view in views.items()}
    args = _abi.make(_abi.AppendArgs, interleaved=int(interleaved), **tensors)
    execution = _abi.make(_abi.Execution, threads=threads, stream=stream or None)
    _abi.check(_abi.lib.tessera_append(ctypes.byref(args), ctypes.byref(execution)))


def append(k_new: Array, v_new: Array, k: Array, v: Array, *, seqused_k: Optional[Array] = None,
           cu_seqlens_new: Optional[Array] = None, block_table: Optional[Array] = None,
           v_block_table: Optional[Array] = None, page_indptr: Optional[Array] = None,
           page_indices: Optional[Array] = None, slots: Optional[Array] = None, rotary_cos: Optional[Array] = None,
           rotary_sin: Optional[Array] = None, positions: Optional[Array] = None, interleaved: bool = False,
           q: Optional[Array] = None, q_out: Optional[Array] = None, q_positions: Optional[Array] = None,
           status: Optional[Array] = None, k_scale: Optional[Array] = None, v_scale: Optional[Array] = None,
           threads: int = 0) -> Optional[Array]:
    """Writes new keys, rotated, and values to a cache, in place; returns the rotated q, if one is given.

    k_new [B,n,Hk,D] and v_new [B,n,Hk,Dv], or [T,Hk,D] and [T,Hk,Dv] with cu_seqlens_new or slots. k and v are the cache:
    [pages,page_size,Hk,D] with block_table, page_indptr and page_indices, or slots (int32 or int64, one for each token;
    negative ones are skipped), else [B,capacity,Hk,D]. seqused_k int32 [B] counts the new tokens, and goes to the
    attention call that follows. rotary_cos and rotary_sin [positions,R/2] rotate keys and q in f32, in pairs that lie R/2
    dims apart, or are neighbours with `interleaved`, at the places of the tokens or at `positions`, int32. q [B,Nq,Hq,D]
    or [T,Hq,D] goes to q_out, a new array unless given. k_scale and v_scale divide what is stored: f32 [1], [Hk] or [B,Hk]
    are read; of a float8_e4m3fn or int8 cache, [pages,page_size,Hk] or [B,capacity,Hk] are written, one for each row.
    `status` as in `forward`. See docs/algorithm.md, "Append".
    """
    given: dict[str, Any] = {
        "k_new": k_new, "v_new": v_new, "k": k, "v": v, "seqused_k": seqused_k, "cu_seqlens_new": cu_seqlens_new,
        "block_table": block_table, "v_block_table": v_block_table, "page_indptr": page_indptr,
        "page_indices": page_indices, "slots": slots, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin,
        "positions": positions, "q": q, "q_out": q_out, "q_positions": q_positions, "status": status,
        "k_scale": k_scale, "v_scale": v_scale}
    given = {name: array for name, array in given.items() if array is not None}
    if library_of(k) == "torch":
        from . import torch as torch_front
        return torch_front.append(**given, interleaved=interleaved, threads=threads)
    for name, array in given.items():
        if is_written(name, array) and (library_of(array) == "jax"
                                        or not getattr(getattr(array, "flags", None), "writeable", True)):
            raise ValueError(f"{name}: cannot be written; must be a writable array, and none of JAX's")
    given = converted(given)
    keep: list[Any] = []
    stream = maker(k).stream
    views = {name: view(name, array, stream, keep) for name, array in given.items()}
    if q is not None and q_out is None:
        given["q_out"] = maker(q).make(views["q"].shape, views["q"].type)
        views["q_out"] = view("q_out", given["q_out"], stream, keep)
    run(views, interleaved, _abi.integer("threads", threads, 32), stream)
    return given.get("q_out")
