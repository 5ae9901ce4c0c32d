# SPDX-License-Identifier: Apache-2.0
"""The keyword arguments that every front end shares, and what they become: Settings for the C ABI, and tensors.

Used by _api.py, torch.py, jax.py and flash_attn.py.
"""
from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable, Iterable, Literal, Mapping, NamedTuple, Optional, TypedDict, Union

from ._abi import DEFAULT_SCALE, integer

ALIGNMENTS = {"bottom_right": 0, "top_left": 1}
OFFSET = 2


Layout = Literal["bnhd", "bhnd"]  # of q, k, v, O and their gradients: whether tokens or heads come first


def swaps_heads(layout: str) -> bool:
    if layout not in ("bnhd", "bhnd"):
        raise ValueError(f"layout: is {layout!r}; must be 'bnhd' (tokens before heads) or 'bhnd' (heads before tokens)")
    return layout == "bhnd"


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `attention`, `forward`, `backward` and `plan`. All are optional.

    causal            hide keys after the diagonal j = i + off
    alignment         where that diagonal lies: "bottom_right" (off = Nk - Nq, as in FlashAttention; the default),
                      "top_left" (off = 0, as PyTorch's is_causal), or off itself
    window            (left, right), inclusive distances from the diagonal; None or -1: no bound
    scale             factor of q . k; default 1/sqrt(D)
    softcap           s becomes softcap * tanh(s / softcap); 0 or None: off
    alibi_slopes      f32 [Hq] or [B,Hq]
    bias              [B|1,Hq|1,Nq|1,Nk|1] or [Nq,Nk], q's type or f32, added to the scores
    mask              same shapes, bool or uint8: true means visible
    sinks             f32 [Hq]: a logit per head that takes part in the softmax and has no value
    dropout_p         probability of dropping, in [0, 1)
    seed, seed_offset of dropout: integers of 64 bits; the mask is a function of them and of the element's position
    rng               int64 [2] on the device: seed and offset, instead of the integers
    cu_seqlens_q/_k   int32 [B+1]: packed sequences; q is then [Tq,Hq,D], k [Tk,Hk,D], v [Tk,Hk,Dv], LSE [Hq,Tq]
    seqused_q/_k      int32 [B]: how much of each sequence counts
    max_seqlen_q/_k   upper bounds for packed sequences, and of paged keys; they never change a bit
    block_table       int32 [B,entries]: the pages of each sequence. k is then a pool [pages,page_size,Hk,D], v
                      [pages,page_size,Hk,Dv], and seqused_k the lengths. Without gradients
    v_block_table     the same for v, where its pages are not k's
    page_indptr, page_indices   int32 [B+1], [n], instead of block_table: sequence b has the pages
                      page_indices[page_indptr[b]:page_indptr[b + 1]]
    leftpad_k         int32 [B]: places of the pages before the first key; seqused_k counts them
    k_scale, v_scale  f32: an element of k, or v, means scale times number. [1], [Hk], [B,Hk], or one for each key and head:
                      [B,Nk,Hk], packed [1,Tk,Hk], paged [pages,page_size,Hk]; a fourth size of ceil(D/128), or of
                      Dv: one for each 128 dims. k and v may then have types of their own,
                      float8_e4m3fn and int8 among them. Without gradients
    qv                [B,Nq,Hq,Dv], packed [Tq,Hq,Dv], q's type: scores are scale * (q.k + qv.v), as MLA's caches need
                      them; scale is then 1/sqrt(D + Dv) by default. Without gradients
    tree_mask         a tree of draft tokens, whose keys are the last Nq of each sequence: which of these a query sees. Bits
                      of int32 [B,Nq,words], packed [Tq,words], or bool [B,Nq,Nq], packed [Tq,most]: true means seen.
                      It stands in place of causal there. Without gradients
    positions         int32 [B,Nq], packed [Tq]: the key beside which each query stands, for causal, window and ALiBi.
                      Without gradients
    row0, col0, head0, batch0   position of the first query, key, head and sequence in a larger whole, within 2**48 of 0
    deterministic     False: a GPU may add up dQ, dK and dV in any order, which can be faster; their bits may vary
    kernel            name of a kernel to force, as `tessera.info()` lists them
    threads           of the CPU; 0: all that the process may use

    Integers of other types than int32 and floating-point numbers of other types than f32 are converted.
    """
    causal: bool
    alignment: Union[Literal["bottom_right", "top_left"], int]
    window: Optional[tuple[Optional[int], Optional[int]]]
    scale: Optional[float]
    softcap: Optional[float]
    alibi_slopes: Any
    bias: Any
    mask: Any
    sinks: Any
    dropout_p: float
    seed: Optional[int]
    seed_offset: int
    rng: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    max_seqlen_q: Optional[int]
    max_seqlen_k: Optional[int]
    block_table: Any
    v_block_table: Any
    page_indptr: Any
    page_indices: Any
    leftpad_k: Any
    k_scale: Any
    v_scale: Any
    qv: Any
    tree_mask: Any
    positions: Any
    row0: int
    col0: int
    head0: int
    batch0: int
    deterministic: bool
    kernel: Optional[str]
    threads: int


# Keyword of each optional tensor, and its name in the C ABI.
TENSORS = {"bias": "bias", "mask": "mask", "alibi_slopes": "slopes", "sinks": "sinks", "cu_seqlens_q": "cu_seqlens_q",
           "cu_seqlens_k": "cu_seqlens_k", "seqused_q": "seqused_q", "seqused_k": "seqused_k", "rng": "rng",
           **{name: name for name in ("block_table", "v_block_table", "page_indptr", "page_indices", "leftpad_k",
                                      "k_scale", "v_scale", "qv", "tree_mask", "positions")}}


KEYWORDS = {ours: name for name, ours in TENSORS.items()}  # and back


class Settings(NamedTuple):
    """tessera_options without the seeds, which no plan depends on, and what of tessera_execution a plan depends on."""
    scale: float = DEFAULT_SCALE
    softcap: float = 0.0
    causal: int = 0
    alignment: int = 0
    diagonal_offset: int = 0
    window_left: int = -1
    window_right: int = -1
    dropout: float = 0.0
    row0: int = 0
    col0: int = 0
    head0: int = 0
    batch0: int = 0
    max_seqlen_q: int = -1
    max_seqlen_k: int = -1
    accumulate: int = 0
    deterministic: int = 1
    kernel: Optional[str] = None
    threads: int = 0


class Parsed(NamedTuple):
    settings: Settings
    tensors: dict[str, Any]  # by their names in the C ABI; those that are given
    seed: Optional[int]
    seed_offset: int


def _differentiated(value: Any) -> bool:
    """Whether a tensor of PyTorch's is to be differentiated, in either mode: as a number it would lose that."""
    if isinstance(value, (int, float)) or not hasattr(value, "requires_grad"):  # torch.compile knows no attributes of numbers
        return False
    torch = sys.modules["torch"]
    if value.requires_grad and torch.is_grad_enabled():
        return True
    forward = torch.autograd.forward_ad
    return forward._current_level >= 0 and forward.unpack_dual(value).tangent is not None


def number(name: str, value: Any) -> float:
    if _differentiated(value):
        raise NotImplementedError(f"{name}: requires a gradient, which attention does not give; pass a number")
    try:
        if not isinstance(value, (str, bytes, bytearray)):  # float() would read them
            return float(value)
    except OverflowError:
        raise ValueError(f"{name}: is an integer beyond the range of floating-point numbers") from None
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name}: is {value!r}; must be a number")


def _seed(name: str, value: Any) -> int:
    return integer(name, value, unsigned=True)


Fields = dict[str, Any]


def flag(name: str, value: Any) -> bool:
    """True, False, 0, 1, and NumPy's and PyTorch's of them; not whatever Python takes for true, as 'False' is."""
    is_flag = isinstance(value, bool)
    if not is_flag:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of arrays with several elements
            is_flag = bool(value == 0) or bool(value == 1)
    if not is_flag:
        raise TypeError(f"{name}: is {value!r}; must be True or False")
    return bool(value)


def _flag_field(fields: Fields, name: str, value: Any) -> None:
    fields[name] = int(flag(name, value))


def _integer_field(fields: Fields, name: str, value: Any) -> None:
    fields[name] = integer(name, value)


def _threads_field(fields: Fields, name: str, value: Any) -> None:
    fields[name] = integer(name, value, 32)


def _number_field(fields: Fields, name: str, value: Any) -> None:
    fields[name] = number(name, value)


def _dropout_field(fields: Fields, name: str, value: Any) -> None:
    fields["dropout"] = number(name, value)


def _alignment_fields(fields: Fields, name: str, value: Any) -> None:
    if not isinstance(value, str):
        fields["alignment"], fields["diagonal_offset"] = OFFSET, integer(name, value)
    elif value in ALIGNMENTS:
        fields["alignment"] = ALIGNMENTS[value]
    else:
        raise ValueError(f"alignment: is '{value}'; must be 'bottom_right', 'top_left' or an integer")


def _window_fields(fields: Fields, name: str, value: Any) -> None:
    try:
        left, right = value
    except (TypeError, ValueError):
        raise TypeError(f"window: is {value!r}; must be a pair (left, right)") from None
    fields["window_left"] = -1 if left is None else integer("window's left", left)
    fields["window_right"] = -1 if right is None else integer("window's right", right)


def _kernel_field(fields: Fields, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"kernel: is {value!r}; must be a kernel's name")
    fields[name] = value


# What each keyword that is neither a tensor nor a seed puts into the fields of Settings.
_SETTINGS: dict[str, Callable[[Fields, str, Any], None]] = {
    "causal": _flag_field, "deterministic": _flag_field, "alignment": _alignment_fields, "window": _window_fields,
    "scale": _number_field, "softcap": _number_field, "dropout_p": _dropout_field, "kernel": _kernel_field,
    "threads": _threads_field,
    **dict.fromkeys(("row0", "col0", "head0", "batch0", "max_seqlen_q", "max_seqlen_k"), _integer_field),
}
_NONE_IS_DEFAULT = {"scale", "softcap", "window", "kernel", "max_seqlen_q", "max_seqlen_k", "seed", *TENSORS}


# In SDPA, flash-attn, jax.nn and xformers (docs/coming_from.md).
_NAMES_ELSEWHERE = {"is_causal": "causal", "attn_mask": "mask, or bias if it is added,", "attn_bias": "bias",
                    "dropout": "dropout_p", "p": "dropout_p", "softmax_scale": "scale", "sm_scale": "scale",
                    "window_size": "window", "local_window_size": "window", "cache_seqlens": "seqused_k",
                    "key_value_seq_lengths": "seqused_k", "query_seq_lengths": "seqused_q",
                    "return_attn_probs": "return_lse", "return_softmax_lse": "return_lse", "return_residual": "return_lse",
                    "k_descale": "k_scale", "v_descale": "v_scale"}


def sort(options: Mapping[str, Any]) -> tuple[Fields, dict[str, Any], dict[str, int]]:
    """Keyword arguments by what they become: fields of Settings, tensors by their names in the C ABI, seeds.

    Holds what is given. Values are judged by the library; here only what has no place in its structs.
    """
    fields: Fields = {}
    tensors: dict[str, Any] = {}
    seeds: dict[str, int] = {}
    for name, value in options.items():
        if value is None and name in _NONE_IS_DEFAULT:
            continue
        if name in _SETTINGS:
            _SETTINGS[name](fields, name, value)
        elif name in TENSORS:
            tensors[TENSORS[name]] = value
        elif name in ("seed", "seed_offset"):
            seeds[name] = _seed(name, value)
        elif name in _NAMES_ELSEWHERE:
            raise TypeError(f"{name}: is no option of attention; it is called {_NAMES_ELSEWHERE[name]} here")
        else:
            known = ", ".join(AttentionOptions.__annotations__)
            raise TypeError(f"{name}: is no option of attention; there are {known}")
    return fields, tensors, seeds


def parse(options: Mapping[str, Any]) -> Parsed:
    """The same with a value for every setting."""
    fields, tensors, seeds = sort(options)
    return Parsed(Settings(**fields), tensors, seeds.get("seed"), seeds.get("seed_offset", 0))


GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks"}  # of which tensor


def gradient_names(gradients: Iterable[str], tensors: Mapping[str, Any]) -> tuple[str, ...]:
    """Read once, so that a generator will do. Each must be known, and its tensor be given."""
    if not isinstance(gradients, Iterable):
        raise TypeError(f"gradients: is {gradients!r}; must be names of {', '.join(GRADIENTS.values())}")
    names = (gradients,) if isinstance(gradients, str) else tuple(gradients)
    for name in names:
        if name not in GRADIENTS.values():
            raise ValueError(f"gradients: holds {name!r}; must be of {', '.join(GRADIENTS.values())}")
        if name[1:] not in tensors:
            raise ValueError(f"gradients: holds '{name}' but {name[1:]} is not given; nothing to differentiate")
    return names


def has_padding(tensors: dict[str, Any]) -> bool:
    """Whether rows of O and LSE may belong to no sequence: the library leaves those as they are."""
    return "cu_seqlens_q" in tensors or "seqused_q" in tensors


def require_seed(parsed: Parsed) -> tuple[int, int]:
    """Seed and offset for front ends that keep no random state of their own."""
    if parsed.settings.dropout > 0 and parsed.seed is None and "rng" not in parsed.tensors:
        raise ValueError("seed: is missing; dropout needs a seed (or rng), since the same call gives the same mask")
    return parsed.seed or 0, parsed.seed_offset
