# SPDX-License-Identifier: Apache-2.0
"""Attention problems and contenders that solve them: Tessera through its C ABI, PyTorch's operators, FlashAttention-3.

Used by the programs beside this file. Tessera's package loads its library when it is imported, hence only after
`open_library`.
"""
import copy
import importlib
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple, Optional

try:
    import torch
except ImportError as error:
    sys.exit(f"PyTorch is needed: {error}")

DEVICE = "cuda"
PACKAGE = Path(__file__).resolve().parents[1] / "python" / "tessera"


def open_library(path):
    """Tessera's shared library, for the Python package of this repository."""
    sys.path.insert(0, str(PACKAGE.parent))
    os.environ["TESSERA_LIBRARY"] = str(Path(path).resolve())
    try:
        importlib.import_module("tessera")
    except ImportError as error:
        sys.exit(f"{error}; --library names it")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU")


def open_report(path):
    """Rows of results, and a function that adds one. The file, if one is named, then holds all of them so far."""
    from tessera._measure import require_places
    require_places(path)
    rows = []

    def put(row):
        rows.append(row)
        if path:
            lines = ",\n".join(json.dumps(row) for row in rows)
            Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")

    return rows, put


def open_beside(name, path):
    """Another build of the library: the package once more, under the name that is returned."""
    alias = f"tessera_{name}"
    os.environ["TESSERA_LIBRARY"] = str(Path(path).resolve())
    spec = importlib.util.spec_from_file_location(alias, PACKAGE / "__init__.py",
                                                  submodule_search_locations=[str(PACKAGE)])
    module = sys.modules[alias] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        sys.exit(f"--beside {name}: {error}")
    return alias


# --- problems --------------------------------------------------------------------------------------------------------

class Problem(NamedTuple):
    """A shape and a mask. With lengths it is one packed batch, and tokens is their sum."""
    what: str
    batch: int
    tokens: int
    heads: int
    dim: int
    causal: bool
    kv_heads: Optional[int] = None
    dim_v: Optional[int] = None
    window: Optional[int] = None  # keys before the diagonal that are seen; with causal
    lengths: Optional[tuple] = None
    dtype: str = "bfloat16"

    def pairs(self):
        """Of queries and keys that see each other, in one head; a causal mask leaves half, by convention."""
        if self.window is not None:
            return self.batch * sum(min(i, self.window) + 1 for i in range(self.tokens))
        whole = sum(n * n for n in self.lengths) if self.lengths else self.batch * self.tokens**2
        return whole / (2 if self.causal else 1)

    def operations(self, backward):
        dim_v = self.dim_v or self.dim
        return 2 * self.heads * self.pairs() * (3 * self.dim + 2 * dim_v if backward else self.dim + dim_v)

    def row(self):
        row = {"kind": "train" if self.what == "grid" else "extra", "what": self.what, "D": self.dim,
               "causal": self.causal, "N": self.tokens, "B": self.batch, "H": self.heads}
        more = {"Dv": self.dim_v, "Hk": self.kv_heads, "window": self.window, "lengths": self.lengths}
        return {**row, **{name: value for name, value in more.items() if value is not None}}

    def title(self):
        return (f"{'' if self.what == 'grid' else self.what + ' '}D={self.dim} {'causal' if self.causal else 'full'} "
                f"N={self.tokens}")


class Data:
    """Inputs of a problem, [B,N,H,D], or [T,H,D] of packed sequences with cu_seqlens."""

    def __init__(self, problem, seed, outliers=False):
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def make(heads, dim):
            shape = (*([] if problem.lengths else [problem.batch]), problem.tokens, heads, dim)
            x = torch.randn(shape, device=DEVICE, dtype=torch.float32, generator=generator)
            if outliers:
                chosen = torch.rand(shape, device=DEVICE, generator=generator) < 0.001
                x += 10 * torch.randn(shape, device=DEVICE, generator=generator) * chosen
            return x.to(getattr(torch, problem.dtype))

        self.problem = problem
        kv_heads, dim_v = problem.kv_heads or problem.heads, problem.dim_v or problem.dim
        self.q, self.k = make(problem.heads, problem.dim), make(kv_heads, problem.dim)
        self.v, self.d_o = make(kv_heads, dim_v), make(problem.heads, dim_v)
        self.cu_seqlens, self.longest = None, problem.tokens
        if problem.lengths:
            ends = [sum(problem.lengths[:i]) for i in range(len(problem.lengths) + 1)]
            self.cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
            self.longest = max(problem.lengths)
        self.sequences = (self.cu_seqlens, self.cu_seqlens, self.longest, self.longest)

    def first_heads(self):
        """The part of the first sequence's (of packed ones: all sequences') first KV head and its query heads."""
        part = copy.copy(self)
        part.q, part.k, part.v, part.d_o = first_heads(self.problem, (self.q, self.k, self.v, self.d_o), "qkkq")
        return part


def first_heads(problem, tensors, kinds):
    """Of each tensor, which has the heads of q or of k as kinds says, the part that Data.first_heads names."""
    heads = {"q": problem.heads // (problem.kv_heads or problem.heads), "k": 1}
    parts = [t[..., :heads[kind], :] for t, kind in zip(tensors, kinds)]
    return parts if problem.lengths else [t[:1] for t in parts]


def exact_sequences(problem, q, k, v, d_o, dtype):
    """O, dQ, dK, dV of sequences of one length, from matrix products and a softmax."""
    q, k, v = (t.transpose(1, 2).to(dtype).requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        wide_k, wide_v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ wide_k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        i = torch.arange(q.shape[2], device=q.device)
        distance = i[:, None] - i[None, :]
        hidden = distance < (0 if problem.causal else -q.shape[2])
        if problem.window is not None:
            hidden |= distance > problem.window
        o = torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ wide_v
        gradients = torch.autograd.grad(o, (q, k, v), d_o.transpose(1, 2).to(dtype))
    return [t.detach().transpose(1, 2) for t in (o, *gradients)]


def exact(data, dtype):
    """O, dQ, dK, dV in this type by PyTorch's own operations, in the layout of the inputs."""
    inputs = (data.q, data.k, data.v, data.d_o)
    if not data.problem.lengths:
        return exact_sequences(data.problem, *inputs, dtype)
    ends = data.cu_seqlens.tolist()
    parts = [exact_sequences(data.problem, *(t[None, a:b] for t in inputs), dtype) for a, b in zip(ends, ends[1:])]
    return [torch.cat([t[0] for t in tensors]) for tensors in zip(*parts)]


# --- contenders ------------------------------------------------------------------------------------------------------
# Each is made over one set of inputs. forward() gives O; prepare() does what the backward pass builds on, and
# backward() gives dQ, dK, dV; all in the layout of the inputs.

class Tessera:
    def __init__(self, data, kernel=None, deterministic=True, package="tessera"):
        self.package = package
        self.planned_pass = importlib.import_module(f"{package}._measure").PlannedPass
        settings = importlib.import_module(f"{package}._options").Settings
        problem, q = data.problem, data.q
        self.settings = settings(causal=int(problem.causal), kernel=kernel, deterministic=int(deterministic),
                                 **({} if problem.window is None else {"window_left": problem.window}),
                                 **({"max_seqlen_q": data.longest, "max_seqlen_k": data.longest}
                                    if problem.lengths else {}))
        self.inputs = {"q": q, "k": data.k, "v": data.v}
        if problem.lengths:
            self.inputs.update(cu_seqlens_q=data.cu_seqlens, cu_seqlens_k=data.cu_seqlens)
        nan = lambda *like, **how: torch.full(like, math.nan, device=q.device, **how)  # poison: unwritten elements show
        self.o = nan(*q.shape[:-1], data.v.shape[-1], dtype=q.dtype)
        self.lse = nan(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32)
        self.d_o = data.d_o
        self.passes = {}

    def planned(self, backward):
        """The pass, planned lazily, at its first use."""
        if backward not in self.passes:
            results = {"o": self.o, "lse": self.lse}
            if backward:
                self.gradients = [torch.full_like(self.inputs[name], math.nan) for name in "qkv"]
                results.update(d_o=self.d_o, **dict(zip(("dq", "dk", "dv"), self.gradients)))
            self.passes[backward] = self.planned_pass(self.settings, **self.inputs, **results)
        return self.passes[backward]

    def forward(self):
        self.planned(False)()
        return self.o

    def prepare(self):
        # O and LSE from the planner's choice: a kernel that is forced may exist for the backward pass alone.
        self.planned_pass(self.settings._replace(kernel=None), **self.inputs, o=self.o, lse=self.lse)()

    def backward(self):
        self.planned(True)()
        return self.gradients


class Cudnn:
    def __init__(self, data):
        if data.problem.window is not None:
            raise NotImplementedError("PyTorch gives cuDNN no window")
        heads_first = lambda t: t if data.problem.lengths else t.transpose(1, 2)
        self.data, self.back = data, heads_first
        self.q, self.k, self.v, self.d_o = (heads_first(t) for t in (data.q, data.k, data.v, data.d_o))

    def _forward(self, lse):
        return torch.ops.aten._cudnn_attention_forward(self.q, self.k, self.v, None, *self.data.sequences, lse, 0.0,
                                                       self.data.problem.causal)

    def forward(self):
        return self.back(self._forward(False)[0])

    def prepare(self):
        o, lse, *_, seed, offset, _ = self._forward(True)
        self.saved = (o, lse, seed, offset)

    def backward(self):
        gradients = torch.ops.aten._cudnn_attention_backward(self.d_o, self.q, self.k, self.v, *self.saved, None,
                                                             *self.data.sequences, 0.0, self.data.problem.causal)
        return [self.back(t) for t in gradients]


class Flash2:
    def __init__(self, data):
        self.data, window = data, data.problem.window
        self.window = {} if window is None else {"window_size_left": window, "window_size_right": 0}

    def _forward(self):
        data = self.data
        return torch.ops.aten._flash_attention_forward(data.q, data.k, data.v, *data.sequences, 0.0,
                                                       data.problem.causal, False, **self.window)

    def forward(self):
        return self._forward()[0]

    def prepare(self):
        self.saved = self._forward()

    def backward(self):
        data, (o, lse, rng, unused, _) = self.data, self.saved
        return list(torch.ops.aten._flash_attention_backward(data.d_o, data.q, data.k, data.v, o, lse, *data.sequences,
                                                             0.0, data.problem.causal, rng, unused, **self.window))


class Differentiated:
    """A function of q, k, v that PyTorch differentiates; its graph is kept for the backward pass alone."""

    def __init__(self, data):
        self.data = data
        self.leaves = [t.detach().requires_grad_() for t in (data.q, data.k, data.v)]

    def forward(self):
        with torch.no_grad():
            return self.attention(self.data.q, self.data.k, self.data.v)

    def prepare(self):
        self.saved = self.attention(*self.leaves)

    def backward(self):
        return list(torch.autograd.grad(self.saved, self.leaves, self.data.d_o, retain_graph=True))


class Flash3:
    """FlashAttention-3 by its operators, as flash_attn_interface registers them: no autograd around a launch."""

    def __init__(self, data):
        importlib.import_module("flash_attn_interface")
        self.data, window = data, data.problem.window
        self.how = {"is_causal": data.problem.causal}
        if window is not None:
            self.how.update(window_size_left=window, window_size_right=0)
        if data.problem.lengths:
            self.how.update(cu_seqlens_q=data.cu_seqlens, cu_seqlens_k=data.cu_seqlens, max_seqlen_q=data.longest,
                            max_seqlen_k=data.longest)

    def forward(self):
        return self._forward()[0]

    def _forward(self):
        return torch.ops.flash_attn_3.fwd(self.data.q, self.data.k, self.data.v, num_splits=1, **self.how)

    def prepare(self):
        self.saved = self._forward()[:2]
        self.gradients = [torch.empty_like(t) for t in (self.data.q, self.data.k, self.data.v)]

    def backward(self):
        data = self.data
        torch.ops.flash_attn_3.bwd(data.d_o, data.q, data.k, data.v, *self.saved, *self.gradients, **self.how)
        return self.gradients


class Flex(Differentiated):
    compiled = None

    def __init__(self, data):
        super().__init__(data)
        from torch.nn.attention import flex_attention as flex
        window = data.problem.window
        if window is None:
            raise NotImplementedError("is measured with a window only")
        Flex.compiled = Flex.compiled or torch.compile(flex.flex_attention)
        self.mask = flex.create_block_mask(lambda b, h, i, j: (j <= i) & (i - j <= window), None, None,
                                           data.problem.tokens, data.problem.tokens, device=DEVICE)

    def attention(self, q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return Flex.compiled(q, k, v, block_mask=self.mask).transpose(1, 2)


def results_of(contender, backward):
    """[O], or [dQ, dK, dV]."""
    if not backward:
        return [contender.forward()]
    contender.prepare()
    return contender.backward()


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
