# SPDX-License-Identifier: Apache-2.0
"""Attention over several ranks, each of which holds some rows of every array: local rows in, local rows out.

    communicator = tessera.dist.from_torch()                            # or from_mpi(comm)
    partition = tessera.dist.Partition([tokens], communicator.size)     # who holds which rows
    sharing = tessera.dist.Sharing(communicator, partition)
    o = tessera.dist.attention(q, k, v, sharing, causal=True)           # q [T,Hq,D]: this rank's rows

Arrays are NumPy's or PyTorch's, in the CPU's memory; of PyTorch's tensors `attention` is differentiable. Every call is
made by all ranks. What it means: docs/scale_out.md.
"""
from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Iterable, NamedTuple, Optional, Sequence

from . import _abi, _call
from . import _dist_abi as abi
from ._abi import CommunicationError, check, integer, lib
from ._api import Gradients
from ._arrays import library_of, maker, type_code, view
from ._convert import optional, type_name
from ._dist_abi import Message, Transport
from ._dist_transports import MpiTransport, TorchTransport
from ._options import Parsed, parse, require_seed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import AttentionOptions

__all__ = ["CommunicationError", "Communicator", "Decoder", "Message", "Partition", "Sharing", "Span", "Transport", "attention",
           "backward", "forward", "from_mpi", "from_torch", "threads"]


class Span(NamedTuple):
    """Rows begin to end of a sequence."""
    sequence: int
    begin: int
    end: int


class Partition:
    """Which rows of some sequences each rank holds. The same on every rank: a pure function of its arguments.

    lengths   of the sequences, each with as many queries as keys; 0 is legal
    ranks     how many
    kind      "zigzag" (two chunks of every sequence, even under a causal mask), "contiguous", or "balanced" (equal work
              under the mask of `options`: causal, window, alignment)
    slices    ranks of a node, which share its heads out (Ulysses); divides ranks
    align     cuts lie on its multiples, or at the end of a sequence
    spans     instead of kind and align: of each rank its spans (sequence, begin, end), in the order of its arrays; some
              may be without rows (begin = end)
    """

    def __init__(self, lengths: Sequence[int], ranks: int, kind: str = "zigzag", *, slices: int = 1, align: int = 128,
                 spans: Optional[Sequence[Iterable[tuple[int, int, int]]]] = None,
                 **options: Unpack[AttentionOptions]) -> None:
        if kind not in abi.KINDS:
            raise ValueError(f"kind: is {kind!r}; must be one of {', '.join(abi.KINDS)}")
        self.lengths = tuple(integer("lengths", n) for n in lengths)
        self.ranks, self.slices = integer("ranks", ranks, 32), integer("slices", slices, 32)
        held = (ctypes.c_int64 * len(self.lengths))(*self.lengths)
        mask = _call.options(parse(options).settings)
        args = abi.make(abi.PartitionArgs, lengths=held, sequences=len(self.lengths), kind=abi.KINDS[kind],
                        ranks=self.ranks, slices=self.slices, align=align, options=ctypes.pointer(mask))
        made = ctypes.c_void_p()
        if spans is None:
            check(lib.tessera_partition_make(ctypes.byref(args), ctypes.byref(made)))
        else:
            given = [[Span(*span) for span in of] for of in spans]
            if len(given) != self.ranks:
                raise ValueError(f"spans: are those of {len(given)} ranks; must be of {self.ranks}")
            flat = [abi.CSpan(*(integer("spans", x) for x in span)) for of in given for span in of]
            counts = (ctypes.c_int64 * len(given))(*map(len, given))
            check(lib.tessera_partition_from_spans(ctypes.byref(args), (abi.CSpan * len(flat))(*flat), counts,
                                                   ctypes.byref(made)))
        self._handle = abi.Handle(made.value, lib.tessera_partition_destroy)

    def rows(self, rank: int) -> int:
        """How many rows a rank holds."""
        return int(lib.tessera_partition_rows(self._handle.pointer, rank))

    def spans(self, rank: int) -> list[Span]:
        """A rank's rows, in the order in which its arrays hold them."""
        count = ctypes.c_int64()
        first = lib.tessera_partition_spans(self._handle.pointer, rank, ctypes.byref(count))
        return [Span(first[i].sequence, first[i].begin, first[i].end) for i in range(count.value)]

    def _slices(self, rank: int) -> list[slice]:
        """Where they are among all rows, one sequence after another."""
        begins = [sum(self.lengths[:b]) for b in range(len(self.lengths))]
        return [slice(begins[s.sequence] + s.begin, begins[s.sequence] + s.end) for s in self.spans(rank)]

    def shard(self, array: Any, rank: int, dim: int = 0) -> Any:
        """A rank's rows of an array of all tokens, which are its dimension `dim`. A copy; differentiable in PyTorch."""
        before = (slice(None),) * (dim % array.ndim)
        parts = [array[(*before, rows)] for rows in self._slices(rank)] or [array[(*before, slice(0, 0))]]
        if library_of(array) == "torch":
            import torch
            return torch.cat(parts, dim)
        import numpy
        return numpy.concatenate(parts, dim)

    def unshard(self, shards: Sequence[Any], dim: int = 0) -> Any:
        """The array of all tokens, from the shards of all ranks."""
        if len(shards) != self.ranks:
            raise ValueError(f"shards: are {len(shards)}; must be those of {self.ranks} ranks")
        shape = list(shards[0].shape)
        before = (slice(None),) * (dim % len(shape))
        shape[dim] = sum(self.lengths)
        if library_of(shards[0]) == "torch":
            import torch
            whole: Any = torch.empty(shape, dtype=shards[0].dtype)
        else:
            import numpy
            whole = numpy.empty(shape, shards[0].dtype)
        for rank, shard in enumerate(shards):
            at = 0
            for rows in self._slices(rank):
                end = at + rows.stop - rows.start
                whole[(*before, rows)] = shard[(*before, slice(at, end))]
                at = end
        return whole


class Communicator:
    """Moves messages between ranks, over any Transport. Used by one thread at a time.

    After a failure it refuses every call: make a new one, together with the ranks that are left.
    """

    def __init__(self, transport: Transport) -> None:
        self._handle, self._keep = abi.communicator(transport)
        self._plans: dict[Any, _Plan] = {}

    @property
    def rank(self) -> int:
        """This end's number, from 0 on."""
        return int(lib.tessera_communicator_rank(self._handle.pointer))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return int(lib.tessera_communicator_size(self._handle.pointer))


def from_torch(group: Any = None) -> Communicator:
    """Over a process group of torch.distributed (None: the default one) that moves tensors of the CPU: gloo.

    Made by all ranks of the group, in the same order as others. Messages are isend and irecv with a tag of their own;
    word of failures goes through the group's store.
    """
    return Communicator(TorchTransport(group))


def from_mpi(comm: Any = None, timeout: float = 300.0) -> Communicator:
    """Over a communicator of mpi4py (None: COMM_WORLD), of which two duplicates are made, by all its ranks together.

    All calls are made by one thread. A call of MPI that never returns hangs the rank. After a failure MPI_Finalize may
    never return: end by comm.Abort() or os._exit().
    """
    if comm is None:
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
    return Communicator(MpiTransport(comm, timeout))


def threads(ranks: int) -> list[Communicator]:
    """Ranks that are threads of this process, for tests and first steps: one communicator for each."""
    made = (ctypes.c_void_p * max(integer("ranks", ranks, 32), 1))()
    check(lib.tessera_communicator_threads(ranks, made))
    all_ranks = []
    for pointer in made:
        one = Communicator.__new__(Communicator)
        one._handle, one._keep, one._plans = abi.Handle(pointer, lib.tessera_communicator_destroy), None, {}
        all_ranks.append(one)
    return all_ranks


class Sharing(NamedTuple):
    """How a problem is shared out; the same on every rank, but for the communicator.

    scheme   "gather": keys arrive in ascending order and stay. "ring": they pass by, least memory
    segment  S: results have the same bits on any number of ranks whose cuts lie on multiples of S; 0: no such promise
    timeout  seconds that a rank waits for another
    """
    communicator: Communicator
    partition: Partition
    scheme: str = "gather"
    segment: int = 0
    timeout: float = 300.0


_MOST_PLANS = 16  # of a communicator: documents of other lengths need another plan, perhaps in each step of a training


def _execution(parsed: Parsed) -> Any:
    kernel = parsed.settings.kernel
    return _abi.make(_abi.Execution, threads=parsed.settings.threads,
                     kernel=None if kernel is None else _abi.text("kernel", kernel))


class _Plan:
    """A plan of the library's, made together with all ranks."""

    def __init__(self, sharing: Sharing, shapes: tuple[int, ...], code: int, parsed: Parsed) -> None:
        if sharing.scheme not in abi.SCHEMES:
            raise ValueError(f"scheme: is {sharing.scheme!r}; must be one of {', '.join(abi.SCHEMES)}")
        query_heads, key_heads, head_dim, value_dim = shapes
        args = abi.make(abi.DistArgs, communicator=sharing.communicator._handle.pointer,
                        partition=sharing.partition._handle.pointer, query_heads=query_heads, key_heads=key_heads,
                        head_dim=head_dim, value_dim=value_dim, type=code, scheme=abi.SCHEMES[sharing.scheme],
                        segment=sharing.segment, timeout=float(sharing.timeout))
        self.options = _call.options(parsed.settings)
        execution = _execution(parsed)
        made = ctypes.c_void_p()
        check(lib.tessera_dist_plan_make(ctypes.byref(args), ctypes.byref(self.options), ctypes.byref(execution),
                                         ctypes.byref(made)))
        self.handle = abi.Handle(made.value, lib.tessera_dist_plan_destroy)


def _plan(sharing: Sharing, q: _call.View, k: _call.View, v: _call.View, parsed: Parsed) -> _Plan:
    """Kept with the communicator, the last few: the same question is asked once. It is the same on every rank, as are those
    before it, so all find it or none."""
    for name, seen in (("q", q), ("k", k), ("v", v)):
        if len(seen.shape) != 3:
            raise ValueError(f"{name}: has shape {[*seen.shape]}; must be [rows, heads, dim]")
    shapes = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
    key = sharing[1:], shapes, q.type, parsed.settings  # a partition is equal to itself alone
    plans = sharing.communicator._plans
    plan = plans.pop(key, None) or _Plan(sharing, shapes, q.type, parsed)
    plans[key] = plan
    if len(plans) > _MOST_PLANS:
        del plans[next(iter(plans))]
    return plan


class _Tensors:
    """Arrays of one call as structs of the C ABI."""

    def __init__(self) -> None:
        self._keep: list[Any] = []
        self.tensors: dict[str, _abi.Tensor] = {}
        self.views: dict[str, _call.View] = {}

    def add(self, name: str, array: Any) -> None:
        if array is not None:
            self._keep.append(array)
            self.views[name] = view(name, array, 0, self._keep)
            self.tensors[name] = _call.tensor(name, self.views[name])

    def struct(self, kind: type) -> Any:
        fields = [name for name, _ in kind._fields_ if name in self.tensors]  # type: ignore[attr-defined]
        return ctypes.byref(_abi.make(kind, **{name: ctypes.pointer(self.tensors[name]) for name in fields}))


def _begin(q: Any, k: Any, v: Any, sharing: Sharing, options: Any) -> tuple[_Tensors, _Plan, Any, Parsed]:
    parsed = parse(options)
    seed, offset = require_seed(parsed)
    arrays = _Tensors()
    for name, array in (("q", q), ("k", k), ("v", v)):
        arrays.add(name, array)
    for name, array in parsed.tensors.items():
        arrays.add(name, optional(name, array, type_name(q)))
    plan = _plan(sharing, arrays.views["q"], arrays.views["k"], arrays.views["v"], parsed)
    now = _abi.Options.from_buffer_copy(plan.options)
    now.seed, now.seed_offset = seed, offset
    return arrays, plan, ctypes.byref(now), parsed


def forward(q: Any, k: Any, v: Any, sharing: Sharing, **options: Unpack[AttentionOptions]) -> tuple[Any, Any]:
    """O [T,Hq,Dv] and LSE [Hq,T] of this rank's T rows: q [T,Hq,D], k [T,Hk,D], v [T,Hk,Dv], in the order of its spans.

    Options are those of tessera.attention, in positions of whole sequences: causal, alignment, window, scale, softcap,
    dropout_p with seed and seed_offset, threads; and alibi_slopes, sinks, and by this rank's query rows bias and mask
    [1,Hq|1,T|1,M|1], M at least the longest sequence.
    """
    arrays, plan, now, _ = _begin(q, k, v, sharing, options)
    (rows, heads, _), value_dim = arrays.views["q"].shape, arrays.views["v"].shape[2]
    made = maker(q)
    o, lse = made.make((rows, heads, value_dim), arrays.views["q"].type), made.make((heads, rows), _abi.F32)
    arrays.add("o", o)
    arrays.add("lse", lse)
    check(lib.tessera_dist_forward(plan.handle.pointer, arrays.struct(_abi.Inputs), arrays.struct(_abi.Outputs), now))
    return o, lse


def backward(d_o: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, sharing: Sharing, *, d_lse: Any = None,
             dbias: bool = False, **options: Unpack[AttentionOptions]) -> Gradients:
    """Gradients of this rank's rows: dq, dk, dv, and with `sinks` dsinks, the sum over all ranks on every rank.

    With dbias=True, on all ranks, that of a bias too, which must have every row, and every head where slices share them.
    """
    arrays, plan, now, parsed = _begin(q, k, v, sharing, options)
    for name, array in (("o", o), ("lse", lse), ("d_o", d_o), ("d_lse", d_lse)):
        arrays.add(name, array)
    made = maker(q)
    results = {"d" + name: made.make(arrays.views[name].shape, arrays.views[name].type) for name in ("q", "k", "v")}
    if "sinks" in parsed.tensors:
        results["dsinks"] = made.make((arrays.views["q"].shape[1],), _abi.F32)
    if dbias:
        if "bias" not in parsed.tensors:
            raise ValueError("dbias: is True without a bias")
        results["dbias"] = made.make(arrays.views["bias"].shape, arrays.views["bias"].type)
    for name, array in results.items():
        arrays.add(name, array)
    check(lib.tessera_dist_backward(plan.handle.pointer, arrays.struct(_abi.Inputs), arrays.struct(_abi.Saved),
                                    arrays.struct(_abi.Gradients), now))
    return Gradients(results["dq"], results["dk"], results["dv"], results.get("dbias"),
                     results.get("dsinks"))


class Decoder:
    """Decoding: few queries, the same on every rank, over caches that are dealt to the ranks in blocks of keys.

    Made by all ranks together. Block j of a sequence's keys belongs to group j % groups, and group g lies on rank
    g % ranks. Results have the same bits on any number of ranks.

    heads, kv_heads, head_dim, value_dim   of the queries and the caches; value_dim is head_dim by default
    dtype     of q: "float32", "float16" or "bfloat16"
    options   of tessera.attention: causal, window, softcap, scale, threads
    """

    def __init__(self, communicator: Communicator, heads: int, kv_heads: int, head_dim: int,
                 value_dim: Optional[int] = None, dtype: str = "float32", *, block: int = 4096, groups: int = 64,
                 timeout: float = 300.0, **options: Unpack[AttentionOptions]) -> None:
        parsed = parse(options)
        if parsed.tensors:
            raise ValueError(f"{next(iter(parsed.tensors))}: is given; sinks and alibi_slopes go with each call")
        self._communicator, self._value_dim = communicator, head_dim if value_dim is None else value_dim
        args = abi.make(abi.DecoderArgs, communicator=communicator._handle.pointer, query_heads=heads,
                        key_heads=kv_heads, head_dim=head_dim, value_dim=self._value_dim,
                        type=type_code("dtype", str(dtype).removeprefix("torch.")), groups=groups, block=block,
                        timeout=float(timeout))
        given = _call.options(parsed.settings)
        execution = _execution(parsed)
        made = ctypes.c_void_p()
        check(lib.tessera_decoder_make(ctypes.byref(args), ctypes.byref(given), ctypes.byref(execution),
                                       ctypes.byref(made)))
        self._handle = abi.Handle(made.value, lib.tessera_decoder_destroy)

    def place(self, position: int) -> tuple[int, int]:
        """The rank that has the key at this position of a sequence, and its row in that rank's cache."""
        row = ctypes.c_int64()
        rank = lib.tessera_decoder_place(self._handle.pointer, integer("position", position), ctypes.byref(row))
        return int(rank), row.value

    def rows(self, length: int, rank: Optional[int] = None) -> int:
        """Rows, whole blocks, that a rank's cache (None: this one's) needs for a sequence of so many keys."""
        return int(lib.tessera_decoder_rows(self._handle.pointer, integer("length", length),
                                            self._communicator.rank if rank is None else rank))

    def forward(self, q: Any, k: Any, v: Any, lengths: Sequence[int], *, sinks: Any = None, alibi_slopes: Any = None,
                block_table: Any = None) -> tuple[Any, Any]:
        """O [B,Nq,Hq,Dv] and LSE [B,Hq,Nq], on every rank: q [B,Nq,Hq,D], the last positions of sequences with so many
        keys; k [B,rows,Hk,D] and v [B,rows,Hk,Dv] are this rank's, or pages of them with a block_table."""
        arrays = _Tensors()
        for name, array in (("q", q), ("k", k), ("v", v), ("sinks", sinks), ("slopes", alibi_slopes),
                            ("block_table", block_table)):
            arrays.add(name, array if array is None else optional(name, array, type_name(q)))
        shape = arrays.views["q"].shape
        if len(shape) != 4:
            raise ValueError(f"q: has shape {[*shape]}; must be [batch, queries, heads, dim]")
        made = maker(q)
        o, lse = made.make((*shape[:3], self._value_dim), arrays.views["q"].type), \
            made.make((shape[0], shape[2], shape[1]), _abi.F32)
        arrays.add("o", o)
        arrays.add("lse", lse)
        keys = [integer("lengths", n) for n in lengths]
        check(lib.tessera_decoder_forward(self._handle.pointer, arrays.struct(_abi.Inputs),
                                          (ctypes.c_int64 * len(keys))(*keys), len(keys), arrays.struct(_abi.Outputs)))
        return o, lse


def attention(q: Any, k: Any, v: Any, sharing: Sharing, *, return_lse: bool = False,
              **options: Unpack[AttentionOptions]) -> Any:
    """O of this rank's rows, or (O, LSE): `forward`, of PyTorch's tensors differentiable in q, k, v, sinks, through LSE.

    All ranks must run the backward pass too, and several of them in the same order. A gradient of the sinks is the sum
    over all ranks, on every rank: do not sum it again.
    """
    if library_of(q) == "torch":
        from ._torch_dist import differentiable
        o, lse = differentiable(q, k, v, sharing, dict(options))
    else:
        o, lse = forward(q, k, v, sharing, **options)
    return (o, lse) if return_lse else o
