# SPDX-License-Identifier: Apache-2.0
"""python -m tessera.bench: a small comparison, its table, JSON, picture; the host's time per call; how it measures."""
import json

import pytest

torch = pytest.importorskip("torch")

import tessera.torch  # noqa: E402
from tessera import _measure, bench  # noqa: E402
from tessera._options import Settings  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = ["--dtype", "float32", "--batch", "1", "--heads", "1", "--dims", "16"]


@pytest.mark.parametrize("device", DEVICES)
def test_comparison(tmp_path, capsys, monkeypatch, device):
    for name in ("_measure.CPU_PACE", "_measure.GPU_PACE", "bench.HOST_PACE"):
        monkeypatch.setattr(f"tessera.{name}", _measure.Pace(2, 1e-5, 1e-5))
    picture = tmp_path / "speed.png"
    draw = ["--png", str(picture)]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        draw = []
    bench.main([*SMALL, "--device", device, "--tokens", "16", "32", "--json", str(tmp_path / "speed.json"), *draw])
    report = json.loads((tmp_path / "speed.json").read_text())
    assert len(report["rows"]) == 2 * 2 * 2  # lengths, masks, passes
    for row in report["rows"]:
        assert {"tessera", "sdpa math"} <= set(row["seconds"]) and all(t > 0 for t in row["seconds"].values())
        assert set(row["over_tessera"]) == set(row["seconds"]) - {"tessera"} and row["rounds"] == 2
        assert all(low <= row["seconds"][name] <= high for name, (low, high) in row["quartiles"].items())
    assert not draw or picture.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("tokens"))
    row = next(line for line in lines if line.startswith("    32   16  causal  forward+backward"))
    assert row[:header.index("tessera") + len("tessera")].endswith(")")  # a figure in each column
    quartiles, ratios = lines[lines.index(row) + 1:lines.index(row) + 3]
    assert quartiles.split()[0] == "quartiles" and " to " in quartiles
    assert ratios.split()[:3] == ["over", "tessera", "-"] and ratios.endswith(")")


def test_ratios_fit_their_columns():
    assert bench._ratio_text(_measure.Spread(0.983, 1.2345, 9.994)) == "1.23 (0.98-9.99)"
    assert bench._ratio_text(_measure.Spread(10.04, 123.45, 999.4)) == "123 (10-999)"


def test_ratios_are_of_rounds():
    """What drifts from round to round is in both, and gone from their ratio."""
    drift = [1.0, 3.0, 2.0, 5.0]
    times = {"tessera": drift, "other": [1.25 * t for t in drift], "third": [2.0, 6.0, 6.0, 20.0]}
    assert _measure.compared(times, "tessera") == {"other": (1.25, 1.25, 1.25), "third": (2.0, 2.5, 3.25)}
    assert _measure.spread([4.0]) == (4.0, 4.0, 4.0)


def test_short_turns_lie_close_together():
    """All eight points of two lengths within 90 seconds, each contender of five first and last equally often."""
    pace = bench.HOST_PACE
    assert 2 * 8 * 5 * pace.rounds * (pace.warm + pace.timed) < 60
    assert pace.rounds % (2 * 5) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_overhead(capsys, device):
    dtype = "bfloat16" if device == "cuda" else "float32"  # GPUs have no FlashAttention for f32
    bench.main([*SMALL, "--device", device, "--dtype", dtype, "--overhead"])
    printed = capsys.readouterr().out
    for name in ("empty operator", "tessera::forward", "tessera.torch.attention", "and its gradients", "empty Function",
                 "sdpa flash's"):
        assert name in printed
    assert ("tensors read in C" in printed) == hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


@pytest.mark.parametrize("way", [[], ["--overhead"]])
def test_places_are_looked_at_first(tmp_path, capsys, way):
    """Nothing is measured or printed, and no file is touched."""
    earlier = tmp_path / "earlier.json"
    earlier.write_text("{}")
    for name, place in (("--json", tmp_path / "none/speed.json"), ("--json", tmp_path), ("--png", tmp_path / "none/speed.png")):
        with pytest.raises(SystemExit, match=f"^cannot write {place}: (No such file|Is a directory)"):
            bench.main([*SMALL, "--device", "cpu", *way, name, str(place)])
    _measure.require_places(str(earlier), str(tmp_path / "new.json"), None)
    assert earlier.read_text() == "{}" and [*tmp_path.iterdir()] == [earlier]
    assert capsys.readouterr().out == ""


def test_operations():
    assert bench._operations(2, 3, 10, 4, causal=False, backward=False) == 4 * 2 * 3 * 100 * 4
    assert bench._operations(2, 3, 10, 4, causal=True, backward=True) == 4 * 2 * 3 * 100 * 4 / 2 * 3.5


@pytest.mark.parametrize("device", DEVICES)
def test_planned_pass(device):
    q, k, v = (torch.randn(2, 40, 3, 16, device=device, requires_grad=True) for _ in range(3))
    expected, expected_lse = tessera.torch.attention(q, k, v, causal=True, return_lse=True)
    o, lse = torch.empty_like(expected), torch.empty_like(expected_lse)
    forward = _measure.PlannedPass(Settings(causal=1), q=q, k=k, v=v, o=o, lse=lse)
    assert forward.kernel and forward.description
    forward()
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)
    d_o, gradients = torch.randn_like(o), [torch.empty_like(x) for x in (q, k, v)]
    named = dict(zip(("dq", "dk", "dv"), gradients))
    _measure.PlannedPass(Settings(causal=1), q=q, k=k, v=v, o=o, lse=lse, d_o=d_o, **named)()
    for x, y in zip(gradients, torch.autograd.grad(expected, (q, k, v), d_o)):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_cold_measurements(graphs):
    """A matrix product of 64 times the work takes longer, also on a GPU that others use: the best of ten rounds counts."""
    small, large = (torch.randn(n, n, device="cuda") for n in (1024, 4096))
    calls = {"small": [lambda: small @ small] * 2, "large": [lambda: large @ large]}
    times, methods = _measure.measure_cold(calls, graphs, _measure.Pace(10, 1e-3, 1e-3))
    assert set(methods.values()) == {"graph" if graphs else "flushed"}
    assert all(len(values) == 10 and min(values) > 0 for values in times.values())
    assert 2 * min(times["small"]) < min(times["large"])
