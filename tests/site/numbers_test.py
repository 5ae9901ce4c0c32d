#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# numbers_test.py TESSERA: what the page docs/tiles computes is what the library computes. The page's own scripts run in
# node, the library by `tessera run` on the same inputs: float64 against the reference kernel, f32 against the kernel
# that calls get. Masks are the library's too: with V = the identity, O is P, which is 0 where a key is not visible.
# Run by ctest; ends with status 77, which ctest shows as skipped, where there is no node. Implements docs/testing.md,
# "Pages".
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from library import flat_answers, run_library

PROGRAM = sys.argv[1]
ENGINE = Path(__file__).with_name("engine.js")
F32 = 2.0**-24


def settings_list():
    """The page's beginning, its presets, every kind of option, ragged tiles, and random mixtures of all."""
    yield {}
    yield {"seed": "identity", "causal": False, "br": 2, "bc": 2}
    yield {"n": 1, "d": 1, "br": 8, "bc": 8, "causal": False}
    yield {"n": 13, "br": 3, "bc": 5, "causal": False, "left": 4, "right": 2, "lengths": "5, 0, 8", "heads": "4/2",
           "d": 3}
    yield {"n": 32, "d": 8, "br": 8, "bc": 8, "left": 9, "right": 3, "causal": False, "seed": 3}
    yield {"n": 24, "br": 4, "bc": 8, "left": 0, "lengths": "7 9", "heads": "4/1", "seed": 5}
    yield {"n": 9, "left": 0, "right": 0, "causal": False, "lengths": "0 9 0"}
    source = random.Random(7)
    for heads in ["1/1", "2/2", "2/1", "4/2", "4/1"] * 3:
        n = source.randint(1, 32)
        cuts = [source.randint(0, n) for _ in range(source.randint(0, 3))]
        yield {"n": n, "d": source.randint(1, 8), "br": source.randint(1, 8), "bc": source.randint(1, 8),
               "causal": source.random() < 0.5, "left": source.choice([-1, 0, 1, 5, 20]),
               "right": source.choice([-1, 0, 2, 9]), "lengths": " ".join(map(str, cuts)), "heads": heads,
               "seed": source.randint(1, 99)}


def check(case, folder):
    """Failures of one setting, as sentences."""
    problem = case["problem"]
    name = {key: problem[key] for key in ["n", "d", "br", "bc", "causal", "left", "right", "hq", "hk", "seed"]}
    name["lengths"] = [s["length"] for s in problem["sequences"]]
    page = flat_answers(case["answers"])
    # Between float64 and float64 the order of sums differs. Between f32 and float64, sums of up to 4 * 32 * 8 terms of
    # size 4 at most are rounded once a term, at the worst.
    for which, other, room in [("without tiles", flat_answers(case["direct"]), 1e-12),
                               ("the library in float64", run_library(PROGRAM, case, folder, "<f8"), 1e-12),
                               ("the library in f32", run_library(PROGRAM, case, folder, "<f4"), 256 * F32)]:
        for tensor, values in page.items():
            most = max((abs(a - b) / (1 + abs(b)) for a, b in zip(values, other[tensor], strict=True)), default=0)
            if not most <= room:
                yield f"{name}: {tensor} differs from {which} by {most:.2e}; {room:.2e} is allowed"
    probabilities = run_library(PROGRAM, case, folder, "<f8", values_are_identity=True)["o"]
    seen = [int(p != 0) for p in probabilities]
    expected = [bit for row in case["mask"] for _ in range(problem["hq"]) for bit in row]
    if seen != expected:
        yield f"{name}: the page's mask is not the library's"
    if case["wrong"]:
        yield f"{name}: tiles of the wrong class: {case['wrong'][:3]}"
    for which, found in case["passes"].items():
        if found["traffic"] != found["counted"]:
            yield f"{name}: {which}: the steps moved {found['traffic']}, the count says {found['counted']}"
        squares = 4 * problem["hq"] * sum(s["length"] ** 2 for s in problem["sequences"])
        moved = sum(found["unfused"]["every"].get(x, 0) for x in ["S", "P", "dP", "dS"])
        wanted = (4 if which == "forward" else 7) * squares  # docs/algorithm.md, "Cost": 16 N^2 bytes forward
        if not math.isclose(moved, wanted):
            yield f"{name}: {which}: unfused attention moves {moved} bytes of scores; {wanted} are right"


def main():
    node = shutil.which("node")
    if not node:
        print("skipped: there is no node on the path")
        return 77
    settings = list(settings_list())
    with tempfile.TemporaryDirectory(prefix="tessera-tiles-") as name:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps(settings))
        done = subprocess.run([node, ENGINE, folder / "settings.json"], capture_output=True, text=True)
        if done.returncode:
            print(done.stderr)
            return 1
        cases = json.loads(done.stdout)
        failures = [sentence for case in cases for sentence in check(case, folder)]
    print(f"{len(cases)} settings, {len(failures)} failures", *failures, sep="\n")
    return 1 if failures or len(cases) < 20 else 0


sys.exit(main())
