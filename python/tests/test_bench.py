"""python -m tessera.bench: a small comparison on the CPU, its table, JSON and picture; the host's time per call."""
import json

import pytest

pytest.importorskip("torch")

from tessera import bench  # noqa: E402

SMALL = ["--device", "cpu", "--dtype", "float32", "--batch", "1", "--heads", "1", "--dims", "16"]


def test_comparison(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tessera._measure.SHORTEST_BURST", 1e-5)
    picture = tmp_path / "speed.png"
    draw = ["--png", str(picture)]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        draw = []
    bench.main([*SMALL, "--tokens", "16", "32", "--json", str(tmp_path / "speed.json"), *draw])
    report = json.loads((tmp_path / "speed.json").read_text())
    assert len(report["rows"]) == 2 * 2 * 2  # lengths, masks, passes
    for row in report["rows"]:
        assert {"tessera", "sdpa math"} <= set(row["seconds"]) and all(t > 0 for t in row["seconds"].values())
    assert not draw or picture.read_bytes().startswith(b"\x89PNG")
    assert "N=32     D=16   causal  forward+backward" in capsys.readouterr().out


def test_overhead(capsys):
    bench.main([*SMALL, "--overhead"])
    assert "tessera::forward" in capsys.readouterr().out


def test_operations():
    assert bench._operations(2, 3, 10, 4, causal=False, backward=False) == 4 * 2 * 3 * 100 * 4
    assert bench._operations(2, 3, 10, 4, causal=True, backward=True) == 4 * 2 * 3 * 100 * 4 / 2 * 3.5
