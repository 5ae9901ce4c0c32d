# SPDX-License-Identifier: Apache-2.0
"""bench/parts.py on the CPU, with PyTorch: ranges of keys have the bits of one call, which is right, and wrong ones are
noticed."""
import json
import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def program(monkeypatch):
    if not BENCH.is_dir():
        pytest.skip("bench/ is not here")
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setitem(os.environ, "TESSERA_LIBRARY", os.environ.get("TESSERA_LIBRARY", ""))
    import parts
    yield parts
    parts.contenders.DEVICE = "cuda"


def test_every_entry_runs_and_is_right(program, monkeypatch, tmp_path):
    import tessera._abi
    report = tmp_path / "parts.json"
    monkeypatch.setattr(sys, "argv", ["parts.py", "--library", tessera._abi.lib._name, "--dry", "--json", str(report)])
    program.main()
    rows = json.loads(report.read_text())
    assert {row["entry"] for row in rows} == {"one call", "one call, invariant", "ranges of 768", "ranges of 384",
                                              "ranges of 768, any cut"}
    assert {row["causal"] for row in rows} == {True, False}
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in rows)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_are_the_last_rows(program, causal):
    q, k, v = (torch.randn(1, n, 2, 64).bfloat16() for n in (192, 576, 576))
    forward = program.Forward(q, k, v, int(causal), 192, 1)
    forward()
    mask = torch.ones(192, 576, dtype=torch.bool).tril(576 - 192) if causal else None
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2).double() for t in (q, k, v)),
                                                             attn_mask=mask).transpose(1, 2)
    assert float((forward.o.double() - exact).norm() / exact.norm()) < 1e-2


class Given:
    def __init__(self, o):
        self.o = o

    def __call__(self):
        pass


def test_wrong_results_end_the_program(program):
    o = torch.randn(1, 64, 1, 64).bfloat16()
    entries = {"one call": (Given(o), 0), "one call, invariant": (Given(o), 0), "ranges of 192": (Given(o.clone()), 192)}
    program.require_right(entries)
    o[0, 5, 0, 7] = torch.nextafter(o[0, 5, 0, 7], torch.tensor(9.0).bfloat16())
    with pytest.raises(SystemExit, match="O of ranges of 192 has not the bits of one call"):
        program.require_right(entries)
    entries["ranges of 192, any cut"] = entries.pop("ranges of 192")
    program.require_right(entries)
    entries["ranges of 192, any cut"] = Given(o + 1), 192
    with pytest.raises(SystemExit, match="O of ranges of 192, any cut differs by"):
        program.require_right(entries)
