#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# cli_dist_test.py TESSERA: `tessera dist` from outside: schedules checked, bits of ranks as threads, simulated machines.
# Run by ctest.
import json
import pathlib
import re
import sys
import unittest

from cli_case import Case, tessera


class Dist(Case):
    def test_check(self):
        for scheme in ("gather", "ring"):
            result = tessera("dist", "check", "--ranks", "2,3,16", "--scheme", scheme)
            self.assertEqual(result.returncode, 0, result)
            lines = result.stdout.splitlines()
            self.assertEqual(len(lines), 6)
            for line in lines:
                self.assertRegex(line, rf"^{scheme}, (for|back)ward, \d+ ranks: covered once, matched, slots safe, "
                                       r"balance (1\.000|0\.99\d)$")

    def test_bits(self):
        result = tessera("dist", "bits", "--ranks", "1,2,4", "--tokens", 256, "--segment", 32)
        self.assertEqual(result.returncode, 0, result)
        self.assertTrue(result.stdout.endswith("O LSE dQ dK dV: same\n"), result.stdout)
        hashes = {tuple(re.findall(r"\w{16}", line)) for line in result.stdout.splitlines()[:-1]}
        self.assertEqual(len(hashes), 1)
        self.assertEqual(len(hashes.pop()), 5)
        ring = tessera("dist", "bits", "--ranks", "1,2", "--tokens", 256, "--segment", 32, "--scheme", "ring")
        self.assertEqual(ring.returncode, 0, ring)
        self.assertTrue(ring.stdout.endswith("differ (expected of a ring)\n"), ring.stdout)

    def test_plan(self):
        path = self.path("plan.json")
        result = tessera("dist", "plan", "--tokens", "4096", "--ranks", "4", "--json", path)
        self.assertEqual(result.returncode, 0, result)
        self.assertIn("balance of work 1.000 forward, 1.000 backward\n", result.stdout)
        with open(path) as file:
            rows = json.load(file)["rows"]
        self.assertEqual([row["rows"] for row in rows], [1024] * 4)
        # Under a causal mask rank r needs the first chunks up to its last one, and has two of them.
        chunk = 512 * 8 * 256 * 2
        self.assertEqual([row["forward_received"] for row in rows], [chunk * (8 - r - 2) for r in range(4)])
        self.assertEqual(sum(row["forward_sent"] for row in rows), sum(row["forward_received"] for row in rows))
        packed = tessera("dist", "plan", "--tokens", "5000,300,70000", "--ranks", "6", "--partition", "balanced",
                         "--slices", 2, "--scheme", "ring", "--window-left", 1000)
        self.assertEqual(packed.returncode, 0, packed)
        self.assertRegex(packed.stdout, r"^6 ranks, ring, balanced, 2 slices, 32 and 8 heads of 128, 16 bits\n")
        self.assertRegex(packed.stdout, r"balance of work (1\.000|0\.9\d\d) forward")
        self.assert_sentence(tessera("dist", "plan", "--ranks", 6, "--slices", 4), 1,
                             "--slices: is 4; must divide the 6 ranks, and be at most the 8 key heads.")

    def test_faults(self):
        result = tessera("dist", "faults")
        self.assertEqual(result.returncode, 0, result)
        self.assertTrue(result.stdout.endswith(
            "32 faults, every live rank answered within deadline + 1 s, outputs untouched, 0 hangs\n"), result.stdout)
        self.assertIn("D                  4 ranks answered", result.stdout)
        self.assertIn(": D differs: rank 0 has 16, rank 3 has 8\n", result.stdout)

    def test_simulate(self):
        path = self.path("rows.json")
        result = tessera("dist", "simulate", "--tokens", 65536, "--ranks", "8,16", "--json", path)
        self.assertEqual(result.returncode, 0, result)
        self.assertTrue(result.stdout.startswith("Simulated, not measured: "), result.stdout)
        with open(path) as file:
            rows = json.load(file)["rows"]
        self.assertEqual(len(rows), 8)  # one or eight slices, ring or gather
        for row in rows:
            self.assertGreater(row["forward_efficiency"], 0)
            self.assertLessEqual(row["forward_efficiency"], 1)

    def test_simulate_with_measured_calls(self):
        path, rows = self.path("times.txt"), self.path("rows.json")

        def simulated(text):
            with open(path, "w") as file:
                file.write(text)
            return tessera("dist", "simulate", "--tokens", 65536, "--ranks", 8, "--slices", 1, "--times", path, "--json",
                           rows)
        # 65536 tokens on 8 ranks: a rank has 4.4 TFLOP or so in a few calls, far beyond the largest measured one.
        result = simulated("# pass GFLOP us\nforward 1000 2000\nforward 100 300\n\nbackward 100 400\n")
        self.assertEqual(result.returncode, 0, result)
        self.assertTrue(result.stdout.startswith(f"Simulated with the call times of {path}: 500 and 250 TFLOP/s at best"),
                        result.stdout)
        with open(rows) as file:
            ring = json.load(file)["rows"][0]
        pairs, flops = 65536 * 65537 / 2, 2 * 32 * 256
        self.assertGreater(ring["forward_seconds"], pairs * flops / 8 / 500e12)
        self.assertLess(ring["forward_seconds"], 1.5 * pairs * flops / 8 / 500e12)
        self.assert_sentence(simulated("forward 1 2\n"), 1, f"--times: {path} has no line that begins with backward.")
        self.assert_sentence(simulated("forward 1\n"), 1, f"--times: line 1 of {path} is 'forward 1'; must be forward or "
                             "backward, GFLOP of a call, and its microseconds, both positive.")
        self.assert_sentence(simulated("backward 1 5\nforward 1 5\nforward 2 4\n"), 1, "a larger call must not be shorter.")
        for flag in ("--forward", "--backward", "--call"):
            self.assert_sentence(tessera("dist", "simulate", "--times", path, flag, 3), 1,
                                 f"{flag}: is given beside --times, which says it too; give one of them.")
        self.assert_sentence(tessera("dist", "simulate", "--times", "/nowhere/at/all"), 1,
                             "--times: /nowhere/at/all cannot be read.")

    def test_tables_of_the_document(self):
        """docs/scale_out.md has what the simulator says of 1M tokens, by rates and by an H200's calls."""
        docs = pathlib.Path(__file__).resolve().parents[2] / "docs"
        cells = r"\| 1M \| (\d+) " + r"\| (?:Ulysses: )?([.\d]+) / ([.\d]+) \((\d+) / (\d+)%\) " * 3
        last = r"\| (?:([.\d]+) / ([.\d]+) \((\d+) / (\d+)%\)|the same) \|"
        rows = re.findall(cells + last, (docs / "scale_out.md").read_text())
        self.assertEqual(len(rows), 6)
        for table, times in ((rows[:3], []), (rows[3:], ["--times", docs / "results/h200-calls.txt"])):
            tessera("dist", "simulate", "--tokens", 1048576, *times, "--json", self.path("rows.json"))
            with open(self.path("rows.json")) as file:
                found = json.load(file)["rows"]
            for ranks, *cells in table:
                four = [x for x in found if x["ranks"] == int(ranks)]
                self.assertEqual(len(four), 4)
                for x, said in zip(four, (cells[n:n + 4] for n in (0, 4, 8, 12))):
                    for kind, seconds, share in (("forward", said[0], said[2]), ("backward", said[1], said[3])):
                        if seconds:
                            self.assertAlmostEqual(float(seconds) / x[f"{kind}_seconds"], 1, delta=0.006, msg=(x, said))
                            self.assertEqual(int(share), round(100 * x[f"{kind}_efficiency"]), (x, said))

    def test_measure(self):
        times, rows = self.path("times.txt"), self.path("rows.json")
        result = tessera("dist", "measure", "--tokens", "128,64", "--heads", 4, "--kv-heads", 2, "--dim", 32, "--slices", 2,
                         "--out", times, "--json", rows)
        self.assertEqual(result.returncode, 0, result)
        with open(rows) as file:
            found = json.load(file)["rows"]
        self.assertEqual([row["pass"] for row in found], ["forward", "backward"] * 2)
        # Two heads of 32 dims: 4 and 10 operations for each pair, head and dim.
        flops = [each * 2 * 32 * n * n * 1e-9 for n in (64, 128) for each in (4, 10)]
        for row, gflop in zip(found, flops):
            self.assertAlmostEqual(row["gflop"], gflop, places=9)
            self.assertGreater(row["us"], 0)
        with open(times) as file:
            lines = file.read().splitlines()
        self.assertRegex(lines[0], r"^# CPU, \d+ threads, 2 query and 1 key heads of 32, bf16: ")
        self.assertEqual([line.split()[0] for line in lines[1:]], ["forward", "backward"] * 2)
        simulated = tessera("dist", "simulate", "--tokens", 4096, "--ranks", 4, "--slices", 2, "--times", times)
        self.assertEqual(simulated.returncode, 0, simulated)
        self.assert_sentence(tessera("dist", "measure", "--slices", 9), 1, "at most the 8 key heads.")
        self.assert_sentence(tessera("dist", "measure", "--out", "/nowhere/at/all"), 1, "/nowhere")
        self.assert_sentence(tessera("dist", "faults", "--json", "/nowhere/at/all"), 1, "/nowhere")
        self.assert_sentence(tessera("dist", "measure", "--out", times, "--json", times), 1, "--out")

    def test_refusals(self):
        self.assert_sentence(tessera("dist"), 2, "--help")
        self.assert_sentence(tessera("dist", "dance"), 2, "--help")
        self.assert_sentence(tessera("dist", "check", "--ranks", "0"), 2,
                             "--ranks: 0 is not a number from 1 to 1048576 (see `tessera dist check --help`).")
        self.assert_sentence(tessera("dist", "plan", "--scheme", "ring", "--segment", 128), 1,
                             "segment: is 128; a ring's bits depend on the number of ranks, so it must be 0 there")
        # 2 in 32 bits, and more bytes than 64 bits count.
        self.assert_sentence(tessera("dist", "plan", "--ranks", "4294967298"), 2, "--ranks: 4294967298 is not a number")
        self.assert_sentence(tessera("dist", "plan", "--tokens", 2**48), 1,
                             "--tokens: are 281474976710656 in all; Q must not be larger than 2^56 bytes.")
        for flag, value in (("--link", "-1"), ("--latency", "nan"), ("--forward", "0")):
            self.assert_sentence(tessera("dist", "simulate", flag, value), 2, f"{flag}: {value} is not a number from 0")
        self.assert_sentence(tessera("dist", "simulate", "--ranks", 8, "--slices", 3), 1,
                             "--slices: is 3; must divide the 8 ranks, and be at most the 8 key heads.")
        self.assert_sentence(tessera("dist", "bits", "--json", "/nowhere/x.json"), 1, "cannot write into /nowhere")

    def test_each_command_has_its_own_flags(self):
        own = {"plan": "--ranks --tokens --scheme --segment --partition --full --window-left --window-right --align "
                       "--heads --kv-heads --dim --slices",
               "check": "--ranks --tokens --scheme --align", "bits": "--ranks --tokens --scheme --segment",
               "faults": "--timeout", "measure": "--tokens --device --out --heads --kv-heads --dim --slices",
               "simulate": "--ranks --tokens --align --heads --kv-heads --dim --slices --forward --backward --times --call "
                           "--link --node-link --latency"}
        every = {flag for flags in own.values() for flag in flags.split()}
        for command, flags in own.items():
            told = tessera("dist", command, "--help").stdout
            self.assertEqual(set(re.findall(r"^  (--[a-z-]+)", told, re.M)), {*flags.split(), "--json"}, command)
            for flag in every - set(flags.split()):
                self.assert_sentence(tessera("dist", command, flag, *[1] * (flag != "--full")), 2, flag)


if __name__ == "__main__":
    del sys.argv[1:2]  # read by cli_case
    unittest.main()
