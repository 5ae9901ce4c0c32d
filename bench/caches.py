# SPDX-License-Identifier: Apache-2.0
"""Attention over caches of keys and values, and contenders that compute it: Tessera through its C ABI, PyTorch's
operators, FlashAttention-3, and a kernel that only reads. Used by decode_peers.py; contenders.py has those of training.
"""
import ctypes
import importlib
import math
import sys
import types
from pathlib import Path
from typing import NamedTuple, Optional

import contenders
from contenders import Cudnn, Flash2, torch


class Decoding(NamedTuple):
    """Queries over the caches of a batch. Of MLA, a key and its value are 576 numbers, of which the first 512 are the
    value. Page size 0 stands for a contiguous cache; with lengths, `keys` is the longest."""
    part: str
    batch: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dim_v: Optional[int] = None
    queries: int = 1
    kv: str = "bf16"  # "e4m3": a scale for each head; "e4m3 token": for each key and head
    pages: tuple = (0,)
    lengths: Optional[tuple] = None
    latent: bool = False
    causal: bool = False  # bottom right; prompts only: peers differ about where the diagonal lies
    kernel: Optional[str] = None  # of Tessera, in place of the program's

    def tokens(self):
        return sum(self.lengths) if self.lengths else self.batch * self.keys

    def bytes(self):
        """Of K and V, each read once, and of their scales."""
        width = self.dim + (self.dim_v or self.dim)  # of MLA, 64 + 512
        scales = 8 if self.kv == "e4m3 token" else 0
        return self.tokens() * self.kv_heads * (width * (2 if self.kv == "bf16" else 1) + scales)

    def row(self):
        row = {"kind": "decode", "part": self.part, "B": self.batch, "keys": self.keys, "Hq": self.heads,
               "Hk": self.kv_heads, "D": self.dim, "Nq": self.queries, "kv": self.kv}
        more = {"Dv": self.dim_v, "lengths": self.lengths and "ragged", "latent": self.latent or None,
                "tokens": self.tokens() if self.lengths else None}
        return {**row, **{name: value for name, value in more.items() if value is not None}}


class Cache:
    """Inputs of a problem. The pages of any size are the same memory, handed out in a shuffled order."""

    def __init__(self, problem, seed):
        self.problem, self.generator = problem, torch.Generator(contenders.DEVICE).manual_seed(seed)
        p, random = problem, self._random
        self.scales, self.qv = {}, None
        if p.latent:
            both, self.q = random(p.batch, p.keys, 1, p.dim_v + p.dim), random(p.batch, p.queries, p.heads, p.dim)
            self.k, self.v = both[..., p.dim_v:], both[..., :p.dim_v]
            self.qv = random(p.batch, p.queries, p.heads, p.dim_v)
            return
        self.q = random(p.batch, p.queries, p.heads, p.dim)
        self.k, self.v = (random(p.batch, p.keys, p.kv_heads, dim) for dim in (p.dim, p.dim_v or p.dim))
        if p.kv != "bf16":
            self.k, self.v = (t.to(torch.float8_e4m3fn) for t in (self.k, self.v))
            shape = (p.batch, p.keys, p.kv_heads) if p.kv == "e4m3 token" else (p.kv_heads,)
            self.scales = {name: 0.5 + torch.rand(shape, device=contenders.DEVICE, generator=self.generator)
                           for name in ("k_scale", "v_scale")}

    def _random(self, *shape):
        return torch.randn(shape, device=contenders.DEVICE, dtype=torch.bfloat16, generator=self.generator)

    def lengths(self):
        """Used keys of each sequence, int32 [B]."""
        lengths = self.problem.lengths or (self.problem.keys,) * self.problem.batch
        return torch.tensor(lengths, dtype=torch.int32, device=contenders.DEVICE)

    def in_pages(self, size):
        """k, v, scales and the table, int32 [B, pages of a sequence]: every page has its owner, at random."""
        p = self.problem
        paged = lambda t: t.unflatten(1, (-1, size)).flatten(0, 1)
        count = p.batch * p.keys // size
        generator = torch.Generator().manual_seed(size)  # of the processor: one order of pages on every device
        table = torch.randperm(count, generator=generator).int().view(p.batch, -1).to(contenders.DEVICE)
        scales = {name: paged(t) if t.dim() == 3 else t for name, t in self.scales.items()}
        return paged(self.k), paged(self.v), scales, table

    def sequence(self, b, page):
        """K and V of a sequence in f32, [keys,Hk,D], as a contender with such pages sees them."""
        k, v, scales = self.k[b], self.v[b], {name: t if t.dim() == 1 else t[b] for name, t in self.scales.items()}
        if page:
            k, v, scales, table = self.in_pages(page)
            own = table[b].long()
            k, v = k[own].flatten(0, 1), v[own].flatten(0, 1)
            scales = {name: t if t.dim() == 1 else t[own].flatten(0, 1) for name, t in scales.items()}
        n = self.problem.lengths[b] if self.problem.lengths else self.problem.keys
        of_rows = lambda scale: scale[:, None] if scale.dim() == 1 else scale[:n, :, None]
        wide = lambda t, name: t[:n].float() * (of_rows(scales[name]) if name in scales else 1)
        return wide(k, "k_scale"), wide(v, "v_scale")

    def exact(self, b, page):
        """O of one sequence, [Nq,Hq,Dv], by PyTorch's operations in f32."""
        p = self.problem
        k, v = self.sequence(b, page)
        q = self.q[b].float()
        if p.latent:
            q, k = torch.cat((self.qv[b].float(), q), -1), torch.cat((v, k), -1)
        q = q.unflatten(1, (p.kv_heads, -1))  # [Nq,Hk,G,D]
        scores = torch.einsum("qhgd,khd->hgqk", q, k) / math.sqrt(q.shape[-1])
        if p.causal:
            i, j = torch.arange(q.shape[0], device=q.device), torch.arange(k.shape[0], device=q.device)
            scores = scores.masked_fill(j[None, :] > i[:, None] + k.shape[0] - q.shape[0], -math.inf)
        return torch.einsum("hgqk,khd->qhgd", torch.softmax(scores, -1), v).flatten(1, 2)

    def for_peers(self):
        """As contenders.py's classes take it: contiguous, or packed where lengths differ."""
        p, data = self.problem, types.SimpleNamespace()
        data.problem = types.SimpleNamespace(window=None, lengths=p.lengths, causal=p.causal)
        data.q, data.k, data.v = self.q, self.k, self.v
        data.sequences = (None, None, p.queries, p.keys)
        if p.lengths:
            data.q = self.q.flatten(0, 1)
            data.k, data.v = (torch.cat([t[b, :n] for b, n in enumerate(p.lengths)]) for t in (self.k, self.v))
            ends = lambda lengths: torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)],
                                                dtype=torch.int32, device=contenders.DEVICE)
            data.sequences = (ends((p.queries,) * p.batch), ends(p.lengths), p.queries, p.keys)
        data.d_o = data.q  # there is no backward pass
        return data


# --- contenders: each is made over one cache; calling it enqueues, and gives O as [B,Nq,Hq,Dv] -----------------------

class Ours:
    """A plan of Tessera's. All plans of a contender share one workspace, as the layers of a model do."""

    def __init__(self, cache, kernel, page, shared):
        from tessera._measure import PlannedPass
        from tessera._options import Settings
        p = cache.problem
        k, v, scales, tensors = cache.k, cache.v, cache.scales, {}
        if page:
            k, v, scales, tensors["block_table"] = cache.in_pages(page)
        if page or p.lengths:
            tensors["seqused_k"] = cache.lengths()
        if cache.qv is not None:
            tensors["qv"] = cache.qv
        self.o = torch.full((p.batch, p.queries, p.heads, p.dim_v or p.dim), math.nan, dtype=cache.q.dtype,
                            device=cache.q.device)
        settings = Settings(causal=int(p.causal), kernel=kernel, **({"max_seqlen_k": p.keys} if page else {}))
        self.planned = PlannedPass(settings, workspace=shared.get("workspace"), q=cache.q, k=k, v=v, o=self.o,
                                   **tensors, **scales)
        shared["workspace"] = self.planned.workspace
        self.kernel = self.planned.kernel

    def __call__(self):
        self.planned()
        return self.o


class OfPyTorch:
    """cuDNN or FlashAttention-2, as PyTorch's operators."""

    def __init__(self, kind, cache):
        p = cache.problem
        if p.kv != "bf16" or p.latent:
            raise NotImplementedError("takes no cache of 8 bits, and no head dim of 576")
        if p.causal:
            raise NotImplementedError("PyTorch's operators have their diagonals in other places")
        self.shape = (p.batch, p.queries, p.heads, p.dim_v or p.dim)
        self.solver = kind(cache.for_peers())

    def __call__(self):
        return self.solver.forward().reshape(self.shape)


class Flash3:
    """FlashAttention-3 with packed heads. Where its build lacks them, they are had by asking for two splits or more."""

    def __init__(self, cache, page, splits):
        importlib.import_module("flash_attn_interface")
        p = cache.problem
        if p.kv != "bf16" or p.latent:
            raise NotImplementedError("takes no cache of 8 bits with queries of 16, and is not asked for MLA")
        self.q, self.k, self.v = cache.q, cache.k, cache.v
        self.how = {"is_causal": p.causal, "pack_gqa": True, "num_splits": splits}
        if page:
            self.k, self.v, _, self.how["page_table"] = cache.in_pages(page)
        if page or p.lengths:
            self.how["seqused_k"] = cache.lengths()

    def __call__(self):
        return torch.ops.flash_attn_3.fwd(self.q, self.k, self.v, **self.how)[0]


class Reading:
    """Reads what the others read of K and V: all of a contiguous cache, or as many bytes of it as are in use."""

    def __init__(self, cache, library):
        p = cache.problem
        self.library, self.keep = library, cache
        size = 1 if p.kv != "bf16" else 2
        share = p.tokens() / (p.batch * p.keys)
        count = lambda width: int(p.batch * p.keys * share) * p.kv_heads * width * size // 16 * 16
        self.ranges = [(cache.k.data_ptr(), count(p.dim)), (cache.v.data_ptr(), count(p.dim_v or p.dim))]
        if p.latent:
            self.ranges = [(cache.v.data_ptr(), count(p.dim_v + p.dim)), (0, 0)]
        self.found = torch.zeros(1, dtype=torch.int32, device=contenders.DEVICE)

    def __call__(self):
        self.library(self.ranges, self.found)


class Append:
    """One new token of each sequence goes to its page, rotated: Tessera's append, through its C ABI."""

    def __init__(self, cache, page):
        from tessera import _append
        from tessera._arrays import view
        p = cache.problem
        new = [cache._random(p.batch, p.queries, p.kv_heads, p.dim) for _ in range(2)]
        k, v, _, table = cache.in_pages(page)
        angles = torch.rand(p.keys, p.dim // 2, device=contenders.DEVICE, generator=cache.generator)
        q_out = torch.empty_like(cache.q)
        tensors = {"k_new": new[0], "v_new": new[1], "k": k, "v": v, "seqused_k": cache.lengths(),
                   "block_table": table, "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "q": cache.q,
                   "q_out": q_out}
        self.views = {name: view(name, t, 0, []) for name, t in tensors.items()}
        self.keep, self.run = (tensors, cache), _append.run
        self.stream = torch.cuda.current_stream if cache.q.is_cuda else None

    def __call__(self):
        self.run(self.views, False, 1, self.stream().cuda_stream if self.stream else 0)

    def check(self):
        """Raises where the last place of a cache does not hold the token. Values are not rotated."""
        self()
        given, p = self.keep[0], self.keep[1].problem
        page = given["v"].shape[1]
        last = given["v"][given["block_table"][:, p.keys // page - 1].long(), page - 1]
        if not torch.equal(last, given["v_new"][:, -1]):
            raise ArithmeticError("wrong: the cache does not hold what was appended")


def open_reading(path):
    """The function that reads two ranges on PyTorch's current stream."""
    try:
        function = ctypes.CDLL(str(Path(path).resolve())).tessera_read
    except OSError as error:
        sys.exit(f"{error}; --reading names it")
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, pointer, integer, pointer, integer, pointer, ctypes.c_char_p,
                         ctypes.c_size_t]
    reason = ctypes.create_string_buffer(400)

    def read(ranges, found):
        (first, first_bytes), (second, second_bytes) = ranges
        stream = torch.cuda.current_stream().cuda_stream
        if function(found.device.index or 0, stream, first, first_bytes, second, second_bytes, found.data_ptr(),
                    reason, len(reason)):
            raise RuntimeError(reason.value.decode())

    return read
