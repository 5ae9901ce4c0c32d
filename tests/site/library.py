# SPDX-License-Identifier: Apache-2.0
# The library beside the page docs/tiles: `tessera run` on the page's inputs, and its results as flat lists.
# Imported by tests/site/numbers_test.py and page_test.py. Python's standard library only.
import itertools
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))
from npy_arrays import Array  # noqa: E402: tests/cli is no package

GRADIENTS = ["dQ", "dK", "dV"]


def flat(x):
    return itertools.chain.from_iterable(map(flat, x)) if isinstance(x, list) else [x]


def by_token(heads):
    """[head][token][d] as the library has it, [token][head][d]."""
    return [[head[t] for head in heads] for t in range(len(heads[0]))]


def packed(heads, descr):
    rows = by_token(heads)
    return Array((len(rows), len(heads), len(rows[0][0])), flat(rows), descr)


def run_library(program, case, folder, descr, values_are_identity=False):
    """Results of `tessera run` as flat lists: o, lse, dq, dk, dv; with V = the identity, o alone."""
    problem, inputs = case["problem"], dict(case["inputs"])
    if values_are_identity:
        n = problem["n"]
        identity = [[float(i == j) for j in range(n)] for i in range(n)]
        inputs["V"] = [identity] * problem["hk"]
    starts = [0, *itertools.accumulate(s["length"] for s in problem["sequences"])]
    lengths = Array((len(starts),), starts, "<i4").save(folder / "cu.npy")
    command = [program, "run", "--cu-seqlens-q", lengths, "--cu-seqlens-k", lengths, "--out", folder / "out",
               "--window", f"{problem['left']},{problem['right']}"]
    names = ["Q", "K", "V"] + ([] if values_are_identity else ["dO"])
    for name in names:
        command += [f"--{name.lower()}", packed(inputs[name], descr).save(folder / f"{name}.npy")]
    if problem["causal"]:
        command.append("--causal")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{problem}: tessera run failed: {done.stderr}")
    names = ["o"] if values_are_identity else ["o", "lse", "dq", "dk", "dv"]
    return {name: Array.load(folder / "out" / f"{name}.npy").values for name in names}


def flat_answers(answers):
    """What the page computed, in the order of run_library's results."""
    return {"o": list(flat(by_token(answers["O"]))), "lse": list(flat(answers["LSE"])),
            **{name.lower(): list(flat(by_token(answers[name]))) for name in GRADIENTS}}
