# SPDX-License-Identifier: Apache-2.0
"""Autograd of attention over several ranks. Used by dist.py, whose `attention` is the function to call."""
from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import dist


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], bias: Optional[Tensor],
                sharing: dist.Sharing, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        o, lse = dist.forward(q, k, v, sharing, **_with(options, sinks, bias))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, bias, o, lse)
        ctx.sharing, ctx.options = sharing, options
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: Optional[Tensor], d_lse: Optional[Tensor]) -> Any:
        q, k, v, sinks, bias, o, lse = ctx.saved_tensors
        d_o = torch.zeros_like(o) if d_o is None else d_o
        gradients = dist.backward(d_o, q, k, v, o, lse, ctx.sharing, d_lse=d_lse, dbias=ctx.needs_input_grad[4],
                                  **_with(ctx.options, sinks, bias))
        dsinks = None if gradients.dsinks is None else gradients.dsinks.to(sinks.dtype)
        dbias = None if gradients.dbias is None else gradients.dbias.to(bias.dtype)
        return gradients.dq, gradients.dk, gradients.dv, dsinks, dbias, None, None


def _with(options: dict[str, Any], sinks: Optional[Tensor], bias: Optional[Tensor]) -> dict[str, Any]:
    return {**options, **({} if sinks is None else {"sinks": sinks}), **({} if bias is None else {"bias": bias})}


def differentiable(q: Tensor, k: Tensor, v: Tensor, sharing: dist.Sharing, options: dict[str, Any]
                   ) -> tuple[Tensor, Tensor]:
    slopes = options.get("alibi_slopes")
    if isinstance(slopes, Tensor) and slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "alibi_slopes: requires a gradient, which attention over several ranks does not give")
    sinks, bias = options.pop("sinks", None), options.pop("bias", None)
    o, lse = _Attention.apply(q, k, v, sinks, bias, sharing, options)
    return o, lse
