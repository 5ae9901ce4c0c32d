# SPDX-License-Identifier: Apache-2.0
"""Every line of docs/coming_from.md: the call there and the call here give the same numbers."""
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_close

PAGE = Path(__file__).resolve().parents[2] / "docs/coming_from.md"
B, NQ, NK, H, D = 2, 5, 10, 4, 8


def lines():
    names = ""
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1):
        names = match[1] if (match := re.fullmatch(r"<!-- names: (.*) -->", line)) else names
        if row := re.fullmatch(r"\| `(.*)` \| `(.*)` \|", line):
            yield pytest.param(names, row[1], row[2], id=f"line {number}: {row[2]}")


def test_there_are_lines():
    assert len(list(lines())) >= 30


def arrays():
    rng = np.random.default_rng(11)
    made = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in {
        "q": (B, NQ, H, D), "k": (B, NK, H, D), "v": (B, NK, H, D), "k2": (B, NK, 2, D), "v2": (B, NK, 2, D),
        "qkv": (B, NQ, 3, H, D), "kv": (B, NK, 2, H, D), "packed_q": (10, H, D), "packed_k": (10, H, D),
        "packed_v": (10, H, D), "q1": (B, 1, H, D), "k_cache": (B, 16, H, D), "v_cache": (B, 16, H, D),
        "bias": (NQ, NK), "bias4": (B, H, NQ, NK)}.items()}
    made["slopes"] = rng.random(H, dtype=np.float32)
    made["keep"], made["keep4"] = (rng.random(s) < 0.8 for s in ((NQ, NK), (B, H, NQ, NK)))
    made["keep"][:, 0] = made["keep4"][..., 0] = True
    made["ends"], made["lengths"] = np.array([0, 4, 10], np.int32), np.array([10, 3], np.int32)
    made.update({name.upper(): np.ascontiguousarray(made[name].swapaxes(1, 2)) for name in ("q", "k", "v", "k2", "v2")})
    return made


@pytest.mark.parametrize("names, there, here", list(lines()))
def test_line(names, there, here):
    library = "jax" if "jax" in names else "torch"
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if library == "torch":
        import torch
        namespace = {name: torch.from_numpy(x) for name, x in arrays().items()}
    else:
        import jax.numpy as jnp
        namespace = {name: jnp.asarray(x) for name, x in arrays().items()}
    exec(names, namespace)
    expected, got = (np.asarray(eval(code, namespace), np.float64) for code in (there, here))
    assert np.linalg.norm(expected) > 0.1
    assert_close(got, expected, factor=3)
