# SPDX-License-Identifier: Apache-2.0
"""What the dimensions of a call's tensors count, for calls that are divided over several devices by batch or heads.

Used by _jax_sharding.py and _torch_dtensor.py.
"""
from __future__ import annotations

from typing import NamedTuple

BATCH, HEADS, KV_HEADS, OTHER = "b", "h", "g", ""
_QUERIES, _KEYS, _SCALES = {"q", "qv", "o", "d_o", "dq"}, {"k", "v", "dk", "dv"}, {"k_scale", "v_scale"}
_PER_SEQUENCE = {"seqused_q", "seqused_k", "leftpad_k", "block_table", "v_block_table"}


class Described(NamedTuple):
    """Everything about a call that is known when it is traced."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of both
    positions: bool  # whether results depend on the place of a sequence and a head in the whole

    @property
    def names(self) -> tuple[str, ...]:
        return self.inputs + self.outputs

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[self.names.index(name)]

    @property
    def counts(self) -> dict[str, int]:
        """Of sequences (1 where they are packed), heads, and heads of keys."""
        q = self.shape("q")
        split = len(q) == 4 and not {"cu_seqlens_q", "cu_seqlens_k", "page_indptr"} & set(self.inputs)
        return {BATCH: q[0] if split else 1, HEADS: q[-2], KV_HEADS: self.shape("k")[-2]}

    def roles(self, name: str) -> list[str]:
        """What each dimension of a tensor counts."""
        shape, counts = self.shape(name), self.counts
        paged = "block_table" in self.inputs
        roles = [OTHER] * len(shape)
        if name in _QUERIES:
            roles[-2] = HEADS
        elif name in _KEYS:
            roles[-2] = KV_HEADS
        elif name in ("lse", "d_lse"):
            roles[-2] = HEADS
        elif name in ("bias", "mask", "dbias"):
            roles[1] = HEADS if shape[1] > 1 else OTHER
        elif name in ("slopes", "sinks", "dsinks"):
            roles[-1] = HEADS
        elif name in _SCALES:  # [1], [Hk], [B,Hk], [.,.,Hk], [.,.,Hk,D/128]
            place = min(len(shape), 3) - 1
            roles[place] = KV_HEADS if shape[place] == counts[KV_HEADS] else OTHER
        of_pages = paged and (name in _KEYS or (name in _SCALES and len(shape) > 2))
        begins = name in _PER_SEQUENCE or (len(shape) > 1 and name != "rng" and not of_pages)
        if begins and counts[BATCH] > 1 and shape[0] == counts[BATCH] and roles[0] == OTHER:
            roles[0] = BATCH
        return roles
