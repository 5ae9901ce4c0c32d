#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench_test.py LIBRARY: how bench/ measures (order, warm-ups, power), and the tables that are made of it.

A fake module takes the place of PyTorch, lists of figures that of timers, a script that of nvidia-smi. Python's
standard library only.
"""
import contextlib
import io
import os
import shutil
import stat
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else ROOT / "build/src/libtessera.so"
for folder in ("bench", "python", "tools"):
    sys.path.insert(0, str(ROOT / folder))
sys.dont_write_bytecode = True
os.environ["TESSERA_LIBRARY"] = str(LIBRARY)
TORCH = types.ModuleType("torch")
sys.modules["torch"] = TORCH

import benchmarks  # noqa: E402: tools/benchmarks.py
import contenders  # noqa: E402
import peers  # noqa: E402
import power  # noqa: E402
import tables  # noqa: E402
import torch_tables  # noqa: E402
from tessera import _measure, _rounds  # noqa: E402


class ThroughPyTorch(unittest.TestCase):
    def row(self, which, ours, cudnn, fa2, **more):
        return {"dim": 64, "causal": True, "tokens": 512, "pass": which,
                "seconds": {"tessera": ours, "sdpa cudnn": cudnn, "sdpa flash": fa2}, **more}

    def test_table_and_margins(self):
        rows = [self.row("forward", 2e-5, 4e-5, 6e-5), self.row("forward+backward", 2e-4, 3e-4, 2.02e-4)]
        self.assertEqual(torch_tables.times(rows), (
            ["D", "mask", "N", "forward", "cuDNN", "FA2", "forward+backward", "cuDNN", "FA2"],
            [[64, "causal", 512, "0.02", "0.04", "0.06", "0.2", "0.3", "0.202"]]))
        cudnn, fa2 = torch_tables.margins(rows)
        self.assertIn("cuDNN takes 1.50 to 1.50 times as long, 1.50 in", cudnn)
        self.assertTrue(cudnn.endswith(": nowhere."))
        self.assertTrue(fa2.endswith(": D = 64, causal, 512 (1.01)."))

    def test_ratios_within_rounds_come_first(self):
        rows = [self.row("forward+backward", 1, 2, 2, over_tessera={"sdpa cudnn": [1, 1.04, 2], "sdpa flash": [1, 3, 4]})]
        cudnn, fa2 = torch_tables.margins(rows)
        self.assertTrue(cudnn.endswith(": D = 64, causal, 512 (1.04)."))
        self.assertIn("FA2 takes 3.00 to 3.00", fa2)


class Rounds(unittest.TestCase):
    def test_order(self):
        self.assertEqual([_rounds.turns("abc", n) for n in range(5)],
                         [list("abc"), list("cba"), list("bca"), list("acb"), list("cab")])
        self.assertEqual(_rounds.turns("abc", 6), list("abc"))
        self.assertEqual([_rounds.turns("ab", n) for n in range(2)], [list("ab"), list("ba")])
        self.assertEqual(_rounds.turns([], 3), [])

    def test_each_neighbour_comes_first(self):
        rounds = [_rounds.turns("abcd", n) for n in range(8)]
        follows = {pair for order in rounds for pair in zip(order, order[1:])}
        neighbours = {("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")}
        self.assertEqual(follows, neighbours | {(y, x) for x, y in neighbours})

    def test_turns_are_warmed_up_and_timed(self):
        asked = []

        class Fake:
            def __init__(self, name):
                self.name = name

            def seconds(self, budget):
                asked.append((self.name, budget))
                return float(len(asked))

        times = _rounds.take_turns({name: Fake(name) for name in "ab"}, _rounds.Pace(2, 0.5, 0.25))
        self.assertEqual(asked, [(name, budget) for name in "abba" for budget in (0.5, 0.25)])
        self.assertEqual(times, {"a": [2, 8], "b": [4, 6]})  # warm-ups are not kept
        asked.clear()
        _rounds.take_turns({"a": Fake("a")}, _rounds.Pace(1, 0.0, 0.25))
        self.assertEqual(asked, [("a", 0.25)])

    def test_turns_on_a_gpu_are_long_enough(self):
        self.assertGreaterEqual(min(_rounds.GPU_PACE.warm, _rounds.GPU_PACE.timed), 80e-3)
        self.assertGreaterEqual(min(peers.IN_TURN[:2]), 80e-3)
        self.assertGreaterEqual(peers.SUSTAINED[1], 1)

    def test_bursts_last_as_long_as_they_should(self):
        now = [0.0]
        with mock.patch.object(_measure.time, "perf_counter", lambda: now[0]):
            burst = _measure.Burst(lambda: now.__setitem__(0, now[0] + 3e-3), "cpu")
            begin = now[0]
            self.assertAlmostEqual(burst.seconds(80e-3), 3e-3)
        self.assertAlmostEqual(now[0] - begin, 27 * 3e-3)

    def test_measure_takes_the_median_of_the_rounds(self):
        now, lengths = [0.0], iter([1.0] * 4 + [1.0, 5.0, 2.0])

        def call():
            now[0] += next(lengths)

        with mock.patch.object(_measure.time, "perf_counter", lambda: now[0]):
            self.assertEqual(_measure.measure({"a": call}, "cpu", _rounds.Pace(3, 0.0, 0.1)), {"a": 2.0})


class Power(unittest.TestCase):
    SCRIPT = """#!/bin/sh
echo "$@" > "$(dirname "$0")/arguments"
echo "1000, [N/A]"
while :; do echo "1500, 690.5"; echo "1700, 700.5"; sleep 0.01; done
"""

    def test_meter(self):
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "nvidia-smi"
            program.write_text(self.SCRIPT)
            program.chmod(program.stat().st_mode | stat.S_IEXEC)
            with mock.patch.dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}"):
                begin = time.monotonic()
                meter = power.Meter("GPU-1234")
                while not (load := meter.load(begin, time.monotonic())) or load.samples < 8:
                    time.sleep(0.01)
                meter.close()
            self.assertIn("-i GPU-1234", (Path(folder) / "arguments").read_text())
        self.assertTrue(1500 < load.mhz < 1700 and 690.5 < load.watts < 700.5, load)
        self.assertIsNone(meter.load(begin - 2, begin - 1))

    def test_no_nvidia_smi(self):
        with mock.patch.dict(os.environ, PATH=""), self.assertRaises(OSError):
            power.Meter("0")


def arguments_of(*words):
    with mock.patch.object(sys, "argv", ["peers.py", *words]):
        return peers.parse_arguments()


def refusal_of(*words):
    with contextlib.redirect_stderr(io.StringIO()) as text, contextlib.suppress(SystemExit):
        arguments_of(*words)
    return text.getvalue()


class Program(unittest.TestCase):
    def choose(self, *words, modules=()):
        arguments = arguments_of(*words)
        arguments.packages = {f"@{text.partition('=')[0]}": "tessera" for text in arguments.beside}
        with mock.patch.dict(sys.modules, {name: types.ModuleType(name) for name in modules}), \
                contextlib.redirect_stdout(io.StringIO()) as text:
            return list(peers.choose(arguments)), text.getvalue()

    def test_contenders(self):
        names, text = self.choose()
        self.assertEqual(names, ["tessera", "tessera-fast", "cudnn", "fa2"])
        self.assertIn("left out: fa3: No module named 'flash_attn_interface'", text)
        names, text = self.choose(modules=["flash_attn_interface"])
        self.assertEqual((names, text), (["tessera", "tessera-fast", "cudnn", "fa2", "fa3"], ""))
        names, _ = self.choose("--beside", "before=x.so", "--without", "fa2,tessera-fast@before,fa3")
        self.assertEqual(names, ["tessera", "tessera-fast", "tessera@before", "cudnn"])
        names, _ = self.choose("--beside", "before=x.so", "--kernel", "hopper", "--without", "fa2")
        self.assertEqual(names, ["tessera:hopper", "tessera:hopper@before", "cudnn"])
        names, _ = self.choose("--kernel", "mma_one_pass", "--kernel", "mma_one_pass-fast", "--without", "fa2,cudnn")
        self.assertEqual(names, ["tessera:mma_one_pass", "tessera:mma_one_pass-fast"])
        forced = types.SimpleNamespace(kernel=["a", "b-fast"], packages={}, flex=False, without=[])
        with mock.patch.object(peers, "Tessera") as made, contextlib.redirect_stdout(io.StringIO()):
            found = peers.choose(forced)
            found["tessera:a"](None), found["tessera:b-fast"](None)
        self.assertEqual([(call.kwargs["kernel"], call.kwargs["deterministic"]) for call in made.call_args_list],
                         [("a", True), ("b", False)])
        with self.assertRaisesRegex(SystemExit, "--without: fa9: contenders are tessera, tessera-fast, cudnn, fa2"):
            self.choose("--without", "fa9")

    def test_pace(self):
        pace = lambda arguments: (arguments.warm, arguments.seconds, arguments.rounds)
        self.assertEqual(pace(arguments_of()), peers.IN_TURN)
        self.assertEqual(pace(arguments_of("--sustained")), peers.SUSTAINED)
        self.assertEqual(pace(arguments_of("--rounds", "2", "--warm", "0")), (0.0, 0.08, 2))

    def test_problems(self):
        self.assertEqual(len(peers.grid(arguments_of())), 36)
        alone = peers.grid(arguments_of("--sustained"))
        self.assertEqual([(x.dim, x.causal, x.tokens) for x in alone], list(peers.ALONE))
        self.assertEqual(len(alone), 12)

    def test_limit(self):
        self.assertEqual(arguments_of().limit, float("inf"))
        now, rows = [10.0], []

        def rows_of(problem):
            now[0] += 2
            yield problem.tokens

        with mock.patch.object(peers.time, "monotonic", lambda: now[0]), \
                contextlib.redirect_stdout(io.StringIO()) as text:
            left = peers.measure_until(10 + arguments_of("--limit", "2.5").limit,
                                       peers.grid(arguments_of("--tokens", "512,1024"))[:3], rows_of, rows.append)
        self.assertEqual((rows, [x.tokens for x in left]), ([512, 1024], [512]))
        self.assertEqual(text.getvalue(), "left for want of time: D=64 causal N=512\n")

    def test_errors_have_the_limit_too(self):
        rows = []
        with contextlib.redirect_stdout(io.StringIO()) as text:
            peers.measure_errors({}, arguments_of("--errors"), rows.append, time.monotonic() - 1)
        self.assertEqual((rows, text.getvalue().splitlines()[-1]), ([], "left for want of time: 24 points of the errors"))

    def test_type(self):
        self.assertEqual({x.dtype for x in peers.problems(arguments_of("--suite", "all"))}, {"bfloat16"})
        self.assertEqual({x.dtype for x in peers.problems(arguments_of("--type", "float16"))}, {"float16"})

    def test_refusals(self):
        self.assertIn("--beside: must be NAME=LIBRARY", refusal_of("--beside", "x.so"))
        self.assertIn("--sustained: goes with --suite grid or extras", refusal_of("--sustained", "--suite", "step"))

    def test_two_builds(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copy(LIBRARY, folder)
            alias = contenders.open_beside("before", copy)
            abi, other = sys.modules["tessera._abi"], sys.modules[f"{alias}._abi"]
        self.assertEqual((abi.lib._name, other.lib._name), (str(LIBRARY), copy))
        self.assertNotEqual(abi.lib._handle, other.lib._handle)
        with self.assertRaisesRegex(SystemExit, "--beside none: .*none.so"):
            contenders.open_beside("none", "none.so")


def row(peer, n=512, what="grid", **figures):
    return {"kind": "train", "what": what, "D": 64, "causal": True, "N": n, "peer": peer, **figures}


SPEEDS = [row("tessera", fwd=500.0), row("tessera@before", fwd=400.0), row("cudnn", fwd=450.0), row("fa3", fwd=480.0),
          row("tessera", 1024, fwd=600.0), row("tessera@before", 1024, fwd=625.0), row("cudnn", 1024, fwd=300.0),
          row("fa3", 1024, fwd_error="no")]
MACHINE = {"kind": "machine", "gpu": "GPU", "torch": "2.11.0+x", "cuda": "13.0", "cudnn": 91900, "command": "c"}
WARM = {**MACHINE, "date": "2026-11-16", "rounds": 2, "warm": 0.08, "seconds": 0.1, "sustained": False}


class Tables(unittest.TestCase):
    def test_speed(self):
        lines, sums = tables.speed_table(SPEEDS, "fwd")
        self.assertEqual(lines[0], "| problem | tessera | tessera@before | cudnn | fa3 | tessera / cudnn | tessera / fa3 "
                                   "| tessera / best peer | tessera / tessera@before |")
        self.assertEqual(lines[2:], ["| D=64 causal N=512 | 500 | 400 | 450 | 480 | 1.111 | 1.042 | 1.042 | 1.250 |",
                                     "| D=64 causal N=1024 | 600 | 625 | 300 |  | 2.000 |  | 2.000 | 0.960 |"])
        self.assertEqual([(x["over"], x["points"], x["at_least_1"], x["least"], x["where"]) for x in sums],
                         [("cudnn", 2, 2, 1.1111, "D=64 causal N=512"), ("fa3", 1, 1, 1.0417, "D=64 causal N=512"),
                          ("best peer", 2, 2, 1.0417, "D=64 causal N=512"),
                          ("tessera@before", 2, 1, 0.96, "D=64 causal N=1024")])
        self.assertEqual(tables.sum_text(sums[3]), "fwd: tessera / tessera@before, grid: geometric mean 1.095, least "
                                                   "0.960 (D=64 causal N=1024), 1 of 2 points at 1 or above")

    def test_who_has_no_fa3_sees_no_column(self):
        lines, _ = tables.speed_table([x for x in SPEEDS if x["peer"] not in ("fa3", "tessera@before")], "fwd")
        self.assertEqual(lines[0], "| problem | tessera | cudnn | tessera / cudnn | tessera / best peer |")

    def test_sustained(self):
        figures = {"tflops": 500.4, "mhz": 1500, "watts": 690.0, "j_per_tflop": 1.3789}
        rows = [row("tessera", **{**figures, "kind": "sustained", "pass": "bwd"}),
                row("tessera", **{**figures, "tflops": 510.0, "kind": "sustained", "pass": "bwd"}),
                row("cudnn", **{"tflops": 400.0, "kind": "sustained", "pass": "bwd"})]
        self.assertEqual(tables.load_table(rows)[2:], ["| backward | D=64 causal N=512 | 500, 1500, 690, 1.379; 510, "
                                                       "1500, 690, 1.379 | 400 |"])
        with mock.patch.object(benchmarks, "load", lambda name: [{**WARM, "sustained": True}, *rows]):
            lines = benchmarks.sustained_table("x.json")
        self.assertTrue(lines[0].endswith("timed for 100 ms in each, alone."), lines[0])
        self.assertEqual(lines[2], "| pass | D | mask | N | Tessera | cuDNN |")

    def page(self, rows):
        with mock.patch.object(benchmarks, "load", lambda name: rows):
            return benchmarks.peers_table("x.json", "fwd")

    def test_page(self):
        lines = self.page([WARM, *SPEEDS])
        self.assertEqual(lines[0], "GPU, CUDA 13.0, PyTorch 2.11.0, cuDNN 9.19: `c`. Measured on 2026-11-16, 2 rounds, each "
                                   "contender warmed up for 80 ms and timed for 100 ms in each, the order reversed in "
                                   "the second round.")
        four = self.page([{**WARM, "rounds": 4}, *SPEEDS])
        self.assertIn("the order rotated and reversed between rounds.", four[0])
        self.assertEqual(lines[2], "| D | mask | N | Tessera | cuDNN | FA3 | before | over cuDNN | over the better of cuDNN "
                                   "and FA3 | over before |")
        self.assertEqual(lines[4], "| 64 | causal | 512 | 500 | 450 | 480 | 400 | 1.11 | 1.04 | 1.25 |")
        self.assertIn("Over before: geometric mean 1.095, least 0.960; 1 of 2 points at 1 or above.", lines[-1])

    def test_page_without_fa3(self):
        lines = self.page([MACHINE, *(x for x in SPEEDS if x["peer"] in ("tessera", "cudnn"))])
        self.assertIn("Taken without a warm-up before each timing", lines[0])
        self.assertEqual(lines[2], "| D | mask | N | Tessera | cuDNN | over cuDNN |")

    def test_parts(self):
        whole = {"kind": "parts", "D": 64, "causal": True, "range": 0, "ms": 15.0, "ratios": [1, 1]}
        rows = [{**whole, "entry": "one call", "ratio": 1.0, "ratio_invariant": 0.99},
                {**whole, "entry": "one call, invariant", "ratio": 1.01, "ratio_invariant": 1.0, "ratios": [1.0, 1.02]},
                {**whole, "entry": "ranges of 16416", "range": 16416, "ratio": 1.03, "ratio_invariant": 1.02},
                {**whole, "entry": "ranges of 8256", "range": 8256, "ratio": 1.2, "ratio_invariant": 1.19, "ratios": [1.32]},
                {**whole, "entry": "ranges of 16416, any cut", "range": 16416, "ratio": 1.0, "ratio_invariant": 0.99}]
        with mock.patch.object(benchmarks, "load", lambda name: rows):
            lines = benchmarks.parts_table("x.json")
        self.assertEqual(lines[0], "| D | mask | one call, ms | invariant | ranges of 16k | ranges of 8k | "
                                   "ranges of 16k, any cut | rounds scatter |")
        self.assertEqual(lines[2], "| 64 | causal | 15.00 | 1.010 | 1.030 | 1.200 | 1.000 | 10 % |")
        self.assertIn("1.000 to 1.030 times one call; the bar is 1.01, which 1 of 2 meet.", lines[-1])
        self.assertIn("1.020 to 1.020 times one invariant call.", lines[-1])


if __name__ == "__main__":
    unittest.main()
