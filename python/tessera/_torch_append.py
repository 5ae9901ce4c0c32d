# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operator tessera::append, with a fake implementation, and the function to call.

The caches, q_out and status are written; no gradient flows through them. Used by torch.py.
"""
from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import _append
from ._torch_ops import library, require_one_device, view

_WRITTEN = dict(zip(_append.WRITTEN, "abcdef"))  # the schema's names of what is written
_NEEDED = ("k_new", "v_new", "k", "v")
_OPTIONAL = ("seqused_k", "cu_seqlens_new", "block_table", "v_block_table", "page_indptr", "page_indices", "slots",
             "rotary_cos", "rotary_sin", "positions", "q", "q_out", "q_positions", "status", "k_scale",
             "v_scale")
_NAMES = (*_NEEDED, *_OPTIONAL)


def _parameter(name: str) -> str:
    kind = f"Tensor({_WRITTEN[name]}!)" if name in _WRITTEN else "Tensor"
    return f"{kind}? {name}=None" if name in _OPTIONAL else f"{kind} {name}"


SCHEMA = ", ".join(map(_parameter, _NAMES)) + ", bool interleaved=False, int threads=0"


def _given(tensors: tuple[Any, ...]) -> dict[str, Tensor]:
    return {name: t for name, t in zip(_NAMES, tensors) if t is not None}


def _run(*arguments: Any) -> None:
    interleaved, threads, *_ = *arguments[len(_NAMES):], False, 0
    given = _given(arguments[:len(_NAMES)])
    k = given["k"]
    stream = torch.cuda.current_stream(k.device).cuda_stream if k.is_cuda else 0
    _append.run({name: view(name, t) for name, t in given.items()}, interleaved, threads or torch.get_num_threads(),
                stream)
    written = [t for name, t in given.items() if _append.is_written(name, t) and not t.is_inference()]
    torch.autograd.graph.increment_version(written)  # so that a backward pass that needs the old numbers is refused


def _fake(*arguments: Any) -> None:
    given = _given(arguments[:len(_NAMES)])
    require_one_device(tuple(given), tuple(given.values()))


library.define(f"append({SCHEMA}) -> ()")
for _device in ("CPU", "CUDA"):
    library.impl("append", _run, _device)
library.impl("append", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("tessera::append", _fake, lib=library)


def append(k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, *, interleaved: bool = False, threads: int = 0,
           **tensors: Optional[Tensor]) -> Optional[Tensor]:
    """tessera.append for PyTorch's tensors, by the operator tessera::append, which torch.compile knows.

    No gradient flows into the caches or out of them.
    """
    given: dict[str, Any] = {"k_new": k_new, "v_new": v_new, "k": k, "v": v,
                             **{name: t for name, t in tensors.items() if t is not None}}
    for name, t in given.items():
        if name not in _NAMES:
            raise TypeError(f"{name}: is no argument of append; there are {', '.join(_NAMES)}, interleaved, threads")
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: is a {type(t).__name__}; must be a PyTorch tensor")
        written = _append.is_written(name, t)
        if (written and not torch.compiler.is_compiling() and t.is_inference()
                and not torch.is_inference_mode_enabled()):
            raise ValueError(f"{name}: is a tensor of inference mode; it can be written in that mode only")
        if written and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: requires a gradient; what is written to a cache has none, use torch.no_grad()")
    given = _append.converted(given)
    if "q" in given and "q_out" not in given:
        given["q_out"] = torch.empty_like(given["q"], memory_format=torch.contiguous_format, requires_grad=False)
    torch.ops.tessera.append(**given, interleaved=interleaved, threads=threads)
    return given.get("q_out")
