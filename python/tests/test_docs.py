# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/python.md, README.md and python/README.md: each block of Python is run, alone."""
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks():
    for name in ("docs/python.md", "README.md", "python/README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 2
            yield pytest.param(match[1], name, line, id=f"{name}:{line}")


def test_there_are_examples():
    assert len(list(blocks())) >= 8


@pytest.mark.parametrize("code, name, line", list(blocks()))
def test_example(code, name, line, monkeypatch):
    for package in ("torch", "jax", "transformers"):
        if re.search(rf"^(import|from) (tessera\.)?{package}\b", code, re.MULTILINE):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
    if '"cuda"' in code:
        import torch
        if not torch.cuda.is_available():
            pytest.skip("PyTorch finds no GPU")
    module = types.ModuleType("example")  # some PyTorch's compiler looks for the module that a function is from
    monkeypatch.setitem(sys.modules, "example", module)
    exec(compile("\n" * (line - 1) + code, name, "exec"), module.__dict__)
