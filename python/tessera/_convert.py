# SPDX-License-Identifier: Apache-2.0
"""What is harmless to convert before a call, and what is not: types and shapes of the optional arrays, rows in memory.

The rules are here once, by names of types, for arrays of any library. Used by _api.py, _append.py, torch.py and jax.py.
"""
from __future__ import annotations

import sys
from typing import Any, Optional

from ._options import KEYWORDS

_LENGTHS = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table", "v_block_table", "page_indptr",
            "page_indices", "leftpad_k", "cu_seqlens_new", "positions", "q_positions"}
_FLOATS = {"float64", "float32", "float16", "bfloat16"}
_ROWS = {"q", "k", "v", "qv", "o", "d_o", "k_new", "v_new"}  # read row by row: the numbers of each lie side by side


def refuse_masked(name: str, array: Any) -> None:
    if hasattr(array, "filled") and type(array).__module__.startswith("numpy"):  # what its mask hides would be read
        raise TypeError(f"{KEYWORDS.get(name, name)}: is a masked array; must be a plain one, as numpy.ma.filled makes")


def wanted_type(name: str, dtype: str, q_dtype: str) -> Optional[str]:
    """The type that the library reads, for an array that has another with the same meaning."""
    if name in _LENGTHS:
        return "int32" if dtype != "int32" and dtype.startswith(("int", "uint")) else None
    if name in ("k_scale", "v_scale"):
        return "float32" if dtype in _FLOATS and dtype != "float32" else None
    if name in ("slopes", "sinks"):
        same = dtype == "float32" or dtype == q_dtype == "float64"
    elif name == "bias":
        same = dtype in ("float32", q_dtype)
    else:
        return None
    return "float32" if dtype in _FLOATS and not same else None


def type_name(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


_BITS = [*(1 << bit for bit in range(31)), -(1 << 31)]  # of a word, the last with its sign


def _tree_words(mask: Any) -> Any:
    """Booleans [..., n] as int32 [..., ceil(n / 32)]: bit t % 32 of word t / 32 is number t."""
    count = mask.shape[-1]
    words, rest = (count + 31) // 32, -count % 32
    if type(mask).__module__.startswith("torch"):
        torch = sys.modules["torch"]
        weights = torch.tensor(_BITS, dtype=torch.int32, device=mask.device)
        bits, kind = torch.nn.functional.pad(mask, (0, rest)), torch.int32
    else:
        library = sys.modules["numpy"] if type(mask).__module__.startswith("numpy") else sys.modules["jax"].numpy
        weights, kind = library.asarray(_BITS, dtype="int32"), "int32"
        bits = library.pad(mask, [(0, 0)] * (len(mask.shape) - 1) + [(0, rest)])
    return (bits.reshape(*mask.shape[:-1], words, 32) * weights).sum(-1, dtype=kind)  # bits never carry


def _tree(mask: Any) -> Any:
    """A tree as the library reads it. Words without a sign hold the same bits."""
    dtype = type_name(mask)
    if dtype == "bool" and len(mask.shape) > 0:
        return _tree_words(mask)
    if dtype == "uint32":
        return mask.view(sys.modules["torch"].int32 if type(mask).__module__.startswith("torch") else "int32")
    return mask


def optional(name: str, array: Any, q_dtype: str) -> Any:
    """An optional array as the library reads it: lengths in int32, numbers in f32, masks and biases [1,1,Nq,Nk].

    Lengths beyond 32 bits become the largest there are, which is as far beyond every tensor.
    """
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        return array  # refused by name where it is looked at
    refuse_masked(name, array)
    if name == "tree_mask":
        return _tree(array)
    if name in ("bias", "mask") and len(array.shape) == 2:
        array = array[None, None]
    elif name in ("bias", "mask") and len(array.shape) != 4:
        raise ValueError(f"{name}: has shape {[*array.shape]}; must be [batch|1, heads|1, queries|1, keys|1] or "
                         "[queries, keys]")
    dtype = type_name(array)
    wanted = wanted_type(name, dtype, q_dtype)
    if wanted is None:
        return array
    if dtype in ("int64", "uint64", "uint32"):
        array = array.clip(-2**31 if dtype == "int64" else 0, 2**31 - 1)
    if type(array).__module__.startswith("torch"):
        return array.to(getattr(sys.modules["torch"], wanted))
    return array.astype(wanted) if hasattr(array, "astype") else array


def is_strided(tensor: Any) -> bool:
    """Whether one of PyTorch's lies in memory as its strides say: nested and sparse ones do not."""
    return not tensor.is_nested and tensor.layout == sys.modules["torch"].strided


def rows(name: str, array: Any) -> Any:
    """A copy where numbers of a row do not lie side by side, as in Fortran's order."""
    if name not in _ROWS:
        return array
    library = type(array).__module__.partition(".")[0]
    if library in ("numpy", "cupy") and getattr(array, "strides", ()) and array.strides[-1] != array.itemsize:
        return array.copy(order="C") if array.shape[-1] > 1 else array
    if library == "torch" and is_strided(array) and array.dim() and array.stride(-1) != 1 and array.shape[-1] > 1:
        return array.contiguous() if array.numel() else array.new_empty(array.shape)  # as _torch_calls.rows
    return array
