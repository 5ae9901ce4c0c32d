# SPDX-License-Identifier: Apache-2.0
"""bench/decode_peers.py on the CPU, with PyTorch: every part finds its results right, and notices wrong ones."""
import json
import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Runs the program; gives the rows of its JSON file."""
    if not BENCH.is_dir():
        pytest.skip("bench/ is not here")
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setitem(os.environ, "TESSERA_LIBRARY", os.environ.get("TESSERA_LIBRARY", ""))
    import decode_peers
    import tessera._abi

    def run(*words):
        report = tmp_path / "decode.json"
        monkeypatch.setattr(sys, "argv", ["decode_peers.py", "--library", tessera._abi.lib._name, "--dry", "--json",
                                          str(report), *words])
        decode_peers.main()
        return json.loads(report.read_text())

    yield run
    decode_peers.contenders.DEVICE = "cuda"


def test_every_part_runs_and_is_right(program, capsys):
    rows = program()
    points = [row for row in rows if row["kind"] == "decode"]
    assert {row["part"] for row in points} == {"bars", "kv8", "queries", "mla", "append", "prefill", "ragged"}
    assert [row for row in points if "error" in row] == []
    assert {row["peer"] for row in points if row["part"] == "bars"} == {
        "tessera", "tessera page 1", "tessera page 16", "tessera page 64", "tessera page 256", "read"}
    assert all(row["difference"] < 1e-2 and row["us"] > 0 for row in points)
    assert "0 points did not begin" in capsys.readouterr().out


def test_wrong_results_have_no_figure(program, monkeypatch):
    import caches
    exact = caches.Cache.exact
    monkeypatch.setattr(caches.Cache, "exact", lambda self, b, page: exact(self, b, 16))
    rows = {row["peer"]: row for row in program("--parts", "ragged") if row["kind"] == "decode"}
    assert "us" in rows["tessera page 16"]
    assert rows["tessera"]["error"].startswith("wrong: O of sequence 0 differs by") and "us" not in rows["tessera"]
