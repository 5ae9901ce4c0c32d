# SPDX-License-Identifier: Apache-2.0
"""Autograd of attention over several ranks. Used by dist.py, whose `attention` is the function to call."""
from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import dist


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor],
                sharing: dist.Sharing, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        with_sinks = options if sinks is None else {**options, "sinks": sinks}
        o, lse = dist.forward(q, k, v, sharing, **with_sinks)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.sharing, ctx.options = sharing, options
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: Optional[Tensor], d_lse: Optional[Tensor]) -> Any:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        d_o = torch.zeros_like(o) if d_o is None else d_o
        with_sinks = ctx.options if sinks is None else {**ctx.options, "sinks": sinks}
        gradients = dist.backward(d_o, q, k, v, o, lse, ctx.sharing, d_lse=d_lse, **with_sinks)
        dsinks = None if gradients.dsinks is None else gradients.dsinks.to(sinks.dtype)
        return gradients.dq, gradients.dk, gradients.dv, dsinks, None, None


def differentiable(q: Tensor, k: Tensor, v: Tensor, sharing: dist.Sharing, options: dict[str, Any]
                   ) -> tuple[Tensor, Tensor]:
    for name in ("bias", "alibi_slopes"):
        given = options.get(name)
        if isinstance(given, Tensor) and given.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: requires a gradient, which attention over several ranks does not give")
    sinks = options.pop("sinks", None)
    o, lse = _Attention.apply(q, k, v, sinks, sharing, options)
    return o, lse
