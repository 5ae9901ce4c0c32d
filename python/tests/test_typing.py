# SPDX-License-Identifier: Apache-2.0
"""What a type checker sees: `return_lse` decides what `attention` returns. Needs mypy."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tessera

pytest.importorskip("mypy")

TORCH = """
import torch
import tessera
import tessera.torch
from typing_extensions import assert_type
x = torch.ones(1, 2, 3, 4)
flag = bool(x.numel())
assert_type(tessera.torch.attention(x, x, x), torch.Tensor)
assert_type(tessera.torch.attention(x, x, x, return_lse=False, causal=True), torch.Tensor)
assert_type(tessera.torch.attention(x, x, x, return_lse=True, layout="bhnd"), tuple[torch.Tensor, torch.Tensor])
assert_type(tessera.torch.attention(x, x, x, return_lse=flag), torch.Tensor | tuple[torch.Tensor, torch.Tensor])
assert_type(tessera.torch.scaled_dot_product_attention(x, x, x, is_causal=True), torch.Tensor)
o, lse = tessera.attention(x, x, x, return_lse=True)
"""
JAX = """
import jax
import jax.numpy as jnp
import tessera.jax
from typing_extensions import assert_type
x = jnp.ones((1, 2, 3, 4))
assert_type(tessera.jax.attention(x, x, x), jax.Array)
assert_type(tessera.jax.attention(x, x, x, return_lse=True), tuple[jax.Array, jax.Array])
"""
WRONG = "layout='nhbd'", "causal='yes'", "is_causal=True"


def check(code, tmp_path):
    """mypy's complaints about a file that uses the package."""
    file = tmp_path / "uses.py"
    file.write_text(code, encoding="utf-8")
    package = Path(tessera.__file__).parents[1]
    environment = dict(os.environ)
    if "site-packages" not in package.parts:  # there mypy finds it by itself
        environment["MYPYPATH"] = str(package)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path.parent / "mypy"),
               "--python-version", "3.10", str(file)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path).stdout


@pytest.mark.parametrize("package, code", [("torch", TORCH), ("jax", JAX)])
def test_results_have_types(tmp_path, package, code):
    pytest.importorskip(package)
    assert check(code, tmp_path) == "Success: no issues found in 1 source file\n"


def test_options_have_types(tmp_path):
    lines = [f"tessera.attention(1, 1, 1, {wrong})" for wrong in WRONG]
    told = check("\n".join(["import tessera", *lines]), tmp_path)
    for line, wrong in enumerate(WRONG, 2):
        assert f"uses.py:{line}: error: No overload variant" in told, (wrong, told)
