"""The keyword arguments that every front end shares, and what they become: Settings for the C ABI, and tensors.

Used by _api.py, torch.py, jax.py and flash_attn.py.
"""
from __future__ import annotations

import operator
from typing import Any, Callable, Literal, NamedTuple, Optional, TypedDict, Union

from ._abi import DEFAULT_SCALE

ALIGNMENTS = {"bottom_right": 0, "top_left": 1}
OFFSET = 2


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `attention`, `forward`, `backward` and `plan`. All are optional.

    causal            hide keys after the diagonal j = i + off
    alignment         where that diagonal lies: "bottom_right" (off = Nk - Nq, as in FlashAttention; the default),
                      "top_left" (off = 0, as PyTorch's is_causal), or off itself
    window            (left, right), inclusive distances from the diagonal; None or -1: no bound
    scale             factor of q . k; default 1/sqrt(D)
    softcap           s becomes softcap * tanh(s / softcap); 0: off
    alibi_slopes      f32 [Hq] or [B,Hq]
    bias              [B|1,Hq|1,Nq|1,Nk|1], q's type or f32, added to the scores
    mask              same shapes, bool or uint8: true means visible
    sinks             f32 [Hq]: a logit per head that takes part in the softmax and has no value
    dropout_p         probability of dropping, in [0, 1)
    seed, seed_offset of dropout: integers of 64 bits; the mask is a function of them and of the element's position
    rng               int64 [2] on the device: seed and offset, instead of the integers
    cu_seqlens_q/_k   int32 [B+1]: packed sequences; q is then [Tq,Hq,D], k [Tk,Hk,D], v [Tk,Hk,Dv], LSE [Hq,Tq]
    seqused_q/_k      int32 [B]: how much of each sequence counts
    max_seqlen_q/_k   upper bounds for packed sequences; they never change a bit
    row0, col0, head0, batch0   position of the first query, key, head and sequence in a larger whole
    deterministic     False allows a faster kernel whose bits may vary between runs
    kernel            name of a kernel to force, as `tessera.info()` lists them
    threads           of the CPU; 0: all that the process may use
    """
    causal: bool
    alignment: Union[Literal["bottom_right", "top_left"], int]
    window: Optional[tuple[Optional[int], Optional[int]]]
    scale: Optional[float]
    softcap: float
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
    row0: int
    col0: int
    head0: int
    batch0: int
    deterministic: bool
    kernel: Optional[str]
    threads: int


# Keyword of each optional tensor, and its name in the C ABI.
TENSORS = {"bias": "bias", "mask": "mask", "alibi_slopes": "slopes", "sinks": "sinks", "cu_seqlens_q": "cu_seqlens_q",
           "cu_seqlens_k": "cu_seqlens_k", "seqused_q": "seqused_q", "seqused_k": "seqused_k", "rng": "rng"}


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


_DEFAULTS = Settings()


class Parsed(NamedTuple):
    settings: Settings
    tensors: dict[str, Any]  # by their names in the C ABI; those that are given
    seed: Optional[int]
    seed_offset: int


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: is {value!r}; must be an integer") from None


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: is {value!r}; must be a number") from None


def _alignment(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        if value not in ALIGNMENTS:
            raise ValueError(f"alignment: is '{value}'; must be 'bottom_right', 'top_left' or an integer")
        return ALIGNMENTS[value], 0
    return OFFSET, _integer("alignment", value)


def _window(value: Any) -> tuple[int, int]:
    if value is None:
        return -1, -1
    try:
        left, right = value
    except (TypeError, ValueError):
        raise TypeError(f"window: is {value!r}; must be a pair (left, right)") from None
    return (-1 if left is None else _integer("window's left", left),
            -1 if right is None else _integer("window's right", right))


def _number_of(field: str) -> Callable[[str, Any], dict[str, Any]]:
    return lambda name, value: {field: _number(name, value)}


def _integer_of(name: str, value: Any) -> dict[str, Any]:
    return {name: _integer(name, value)}


def _optional(convert: Callable[[str, Any], dict[str, Any]]) -> Callable[[str, Any], dict[str, Any]]:
    """None means the default, as for tensors."""
    return lambda name, value: {} if value is None else convert(name, value)


# What each keyword that is neither a tensor nor a seed puts into the Settings.
_SETTINGS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "causal": lambda name, value: {name: int(bool(value))},
    "deterministic": lambda name, value: {name: int(bool(value))},
    "alignment": lambda name, value: dict(zip(("alignment", "diagonal_offset"), _alignment(value))),
    "window": lambda name, value: dict(zip(("window_left", "window_right"), _window(value))),
    "scale": _optional(_number_of("scale")),
    "softcap": _number_of("softcap"),
    "dropout_p": _number_of("dropout"),
    **dict.fromkeys(("row0", "col0", "head0", "batch0", "threads"), _integer_of),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), _optional(_integer_of)),
    "kernel": lambda name, value: {name: value},
}


def parse(options: dict[str, Any]) -> Parsed:
    """Sorts keyword arguments. Values are judged by the library; here only what has no place in its structs."""
    tensors: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    seed, seed_offset = None, 0
    for name, value in options.items():
        if name in _SETTINGS:
            fields.update(_SETTINGS[name](name, value))
        elif name in TENSORS:
            if value is not None:
                tensors[TENSORS[name]] = value
        elif name == "seed":
            seed = None if value is None else _integer(name, value)
        elif name == "seed_offset":
            seed_offset = _integer(name, value)
        else:
            known = ", ".join(AttentionOptions.__annotations__)
            raise TypeError(f"{name}: is no option of attention; there are {known}")
    return Parsed(Settings(**fields) if fields else _DEFAULTS, tensors, seed, seed_offset)


def has_padding(tensors: dict[str, Any]) -> bool:
    """Whether rows of O and LSE may belong to no sequence: the library leaves those as they are."""
    return "cu_seqlens_q" in tensors or "seqused_q" in tensors


def require_seed(parsed: Parsed) -> tuple[int, int]:
    """Seed and offset for front ends that keep no random state of their own."""
    if parsed.settings.dropout > 0 and parsed.seed is None and "rng" not in parsed.tensors:
        raise ValueError("seed: is missing; dropout needs a seed (or rng), since the same call gives the same mask")
    return parsed.seed or 0, parsed.seed_offset
