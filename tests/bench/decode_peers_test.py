#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""decode_peers_test.py LIBRARY: what bench/decode_peers.py measures, how it judges it, and its tables.

A fake module takes the place of PyTorch, whose part python/tests/test_decode_peers.py tests. Python's standard library
only.
"""
import contextlib
import io
import os
import sys
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
sys.modules["torch"] = types.ModuleType("torch")

import benchmarks  # noqa: E402: tools/benchmarks.py
import decode_peers  # noqa: E402
import decode_tables  # noqa: E402
from caches import Decoding, open_reading  # noqa: E402


def arguments_of(*words):
    with mock.patch.object(sys, "argv", ["decode_peers.py", *words]):
        return decode_peers.parse_arguments()


def refusal_of(*words):
    with contextlib.redirect_stderr(io.StringIO()) as text, contextlib.suppress(SystemExit):
        arguments_of(*words)
    return text.getvalue()


class Program(unittest.TestCase):
    def test_every_bar_is_a_point(self):
        points = decode_peers.problems(arguments_of("--parts", "bars,kv8"))
        found = {(p.kv, p.batch, p.keys): p for p in points}
        self.assertLessEqual(set(decode_tables.MICROSECONDS), set(found))
        for place in decode_tables.MICROSECONDS:
            p = found[place]
            self.assertEqual((p.heads, p.kv_heads, p.dim, p.queries), (32, 8, 128, 1))
            self.assertEqual(decode_tables.bar_of({**p.row(), "peer": "tessera"}), decode_tables.MICROSECONDS[place])
            self.assertIsNone(decode_tables.bar_of({**p.row(), "peer": "tessera page 16"}))

    def test_grid(self):
        points = decode_peers.problems(arguments_of("--parts", "grid"))
        self.assertEqual(len({p for p in points if p.dim == 128 and p.heads == 32 and p.kv_heads == 8}),
                         sum(b * n * 4096 <= 60e9 for b in decode_peers.BATCHES for n in decode_peers.KEYS))
        self.assertEqual({(p.heads, p.kv_heads) for p in points}, set(decode_peers.HEADS))
        one = decode_peers.problems(arguments_of("--parts", "grid", "--heads", "64/4", "--dims", "64", "--batches", "2",
                                                 "--keys", "512"))
        self.assertEqual(one, [Decoding("grid", 2, 512, 64, 4, 64)])

    def test_what_is_measured_first_has_bars(self):
        points = decode_peers.problems(arguments_of())
        self.assertEqual([points[0].part, points[-1].part], ["bars", "ragged"])
        self.assertTrue(all(p.keys % max(p.pages) == 0 if any(p.pages) else True for p in points))

    def test_bytes(self):
        self.assertEqual(Decoding("x", 1, 1024).bytes(), 4 << 20)
        self.assertEqual(Decoding("x", 1, 1024, kv="e4m3").bytes(), 2 << 20)
        self.assertEqual(Decoding("x", 1, 1024, kv="e4m3 token").bytes(), (2 << 20) + 1024 * 8 * 8)
        self.assertEqual(Decoding("x", 2, 100, 16, 1, 64, 512, latent=True).bytes(), 200 * 1152)
        self.assertEqual(Decoding("x", 2, 256, lengths=(256, 1)).bytes(), 257 * 4096)

    def test_turns_are_long_enough(self):
        arguments = arguments_of()
        self.assertGreaterEqual(min(arguments.warm, arguments.seconds), 80e-3)
        self.assertGreaterEqual(decode_peers.GRAPH_CALLS, 48)

    def test_refusals(self):
        self.assertIn("--parts: bar: parts are bars, kv8", refusal_of("--parts", "bar"))
        self.assertIn("--heads: must be pairs such as 32/8", refusal_of("--heads", "8/32"))
        with self.assertRaisesRegex(SystemExit, "none.so.*--reading names it"):
            open_reading("none.so")

    def test_limit(self):
        measured = []

        def measure(problem, arguments):
            measured.append(problem)
            return [{**problem.row(), "peer": "tessera", "error": "x"}]

        with mock.patch.multiple(decode_peers, measure_point=measure, open_reading=mock.DEFAULT,
                                 describe_machine=lambda arguments: {"kind": "machine"}, peers_of=lambda arguments: {}), \
                mock.patch.object(decode_peers.contenders, "open_library"), \
                mock.patch.object(sys, "argv", ["x", "--parts", "bars", "--limit", "2.5"]), \
                mock.patch.object(decode_peers.time, "monotonic", iter(range(100)).__next__), \
                contextlib.redirect_stdout(io.StringIO()) as text:
            decode_peers.main()
        self.assertEqual(len(measured), 2)
        self.assertIn("; 6 points did not begin", text.getvalue())


def row(peer, us, part="bars", keys=8192, **more):
    return {"kind": "decode", "part": part, "B": 1, "keys": keys, "Hq": 32, "Hk": 8, "D": 128, "Nq": 1, "kv": "bf16",
            "peer": peer, "us": us, "tbytes": 33.554432 / us, **more}


ROWS = [row("tessera", 12.8, host_us=5.5), row("tessera page 1", 14.0), row("tessera page 16", 13.5),
        row("cudnn", 15.4), row("fa2", 22.5), row("read", 9.8), row("tessera", 10.0, keys=4096, host_us=6.5),
        row("cudnn", 9.0, keys=4096), row("fa2", 1, keys=4096, error="no")]
del ROWS[-1]["us"]


class Tables(unittest.TestCase):
    def test_verdicts(self):
        found = {(x["what"], x["where"]): (x["value"], x["wanted"], x["met"]) for x in decode_tables.verdicts(ROWS)}
        long, short = "B=1 8192 keys 32/8 D=128", "B=1 4096 keys 32/8 D=128"
        self.assertEqual(found, {
            ("us", long): (12.8, 13, True), ("us", short): (10.0, 9.5, False),
            ("page 1, time over contiguous", long): (1.094, 1.10, True),
            ("page 16, time over contiguous", long): (1.055, 1.03, False),
            ("best peer's time over ours", long): (1.203, 1, True),
            ("best peer's time over ours", short): (0.9, 1, False),
            ("host us of a call, Python's included", long): (5.5, 6, True),
            ("host us of a call, Python's included", short): (6.5, 6, False)})

    def test_every_name_is_read(self):
        arguments = arguments_of("--queue", "--parts", ",".join(decode_peers.PARTS))
        arguments.peers, arguments.read = dict.fromkeys(("cudnn", "fa2", "fa3", "fa3 split")), True
        names = set()
        for problem in decode_peers.problems(arguments):
            made = decode_peers.makers(problem, arguments)
            names.update(made)
            for name, (_, page) in made.items():
                self.assertEqual(decode_tables.page_of(name), 0 if problem.part == "append" else page, name)
                self.assertEqual(decode_tables.contiguous(name) != name, decode_tables.page_of(name) > 0, name)
            decode_tables.verdicts([{**problem.row(), "peer": name, "us": 1.0, "tbytes": 1.0} for name in made])
        self.assertLessEqual({"tessera queue", "tessera page 1 queue", "tessera page 256", "fa3 split", "read"}, names)

    def test_the_queue(self):
        """Pages of a kernel are held against its own time over a contiguous cache."""
        rows = [row("tessera", 12.0), row("tessera page 1", 13.0), row("tessera page 1 queue", 11.0)]
        one = ("page 1, time over contiguous", 1.083, True)
        told = lambda rows: [(x["what"], x["value"], x["met"]) for x in decode_tables.verdicts(rows) if x["what"] != "us"]
        self.assertEqual(told(rows), [one])
        self.assertEqual(told([*rows, row("tessera queue", 9.0)]),
                         [one, ("page 1 queue, time over contiguous", 1.222, False)])

    def test_other_parts(self):
        prefill = [{**row(name, us, "prefill"), "Nq": 2048} for name, us in (("tessera", 100.0), ("tessera page 16", 104.0))]
        self.assertEqual([(x["what"], x["value"], x["met"]) for x in decode_tables.verdicts(prefill)],
                         [("page 16, speed over contiguous", 0.962, False)])
        append = [row("tessera", 2.9, "append")]
        self.assertEqual([(x["what"], x["wanted"], x["met"]) for x in decode_tables.verdicts(append)], [("us", 3, True)])
        latent = [{**row("tessera", 8.0, "mla", latent=True), "Hq": 16, "tbytes": 4.2}]
        self.assertEqual([(x["what"], x["wanted"], x["met"]) for x in decode_tables.verdicts(latent)],
                         [("TB/s", 4.1, True)])

    def test_table(self):
        lines = decode_tables.speed_table(ROWS, "bars")
        self.assertEqual(lines[0], "| problem | tessera us | tessera page 1 us | tessera page 16 us | cudnn us | fa2 us | "
                                   "reading us | TB/s | of reading | best peer / tessera | bar us | met |")
        self.assertEqual(lines[2:], ["| B=1 8192 keys 32/8 D=128 | 12.8 | 14.0 | 13.5 | 15.4 | 22.5 | 9.8 | 2.62 | 0.766 | "
                                     "1.203 | 13 | yes |",
                                     "| B=1 4096 keys 32/8 D=128 | 10.0 |  |  | 9.0 |  |  | 3.36 |  | 0.900 | 9.5 | no |"])

    def test_page(self):
        machine = {"kind": "machine", "gpu": "GPU", "torch": "2.11.0+x", "cuda": "13.0", "cudnn": 91900, "command": "c",
                   "date": "2026-11-18", "rounds": 4, "warm": 0.08, "seconds": 0.08, "sustained": False}
        figures = [machine, *ROWS, *decode_tables.verdicts(ROWS), {**ROWS[0], "kind": "left"}]
        with mock.patch.object(benchmarks, "load", lambda name: figures):
            lines = benchmarks.decode_page("x.json")
        self.assertTrue(lines[0].startswith("GPU, CUDA 13.0, PyTorch 2.11.0, cuDNN 9.19: `c`."))
        self.assertIn("Part `bars`:", lines)
        self.assertIn("| us | 1 | 2 |", lines)
        self.assertIn("| us | B=1 4096 keys 32/8 D=128 | 10 | 9.5 |", lines)
        self.assertEqual(lines[-1], "1 points did not begin.")
        self.assertEqual(decode_tables.verdict_table([])[-1], "Nothing was missed.")


if __name__ == "__main__":
    unittest.main()
