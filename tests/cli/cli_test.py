#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Tests of the `tessera` program as a user meets it: results, exit status, one-sentence errors, no stray files.
# Usage: cli_test.py PATH-TO-TESSERA [unittest arguments]. Registered by tests/cli/tests.cmake.
# Uses nothing but Python's standard library; the expected numbers are computed here, in float64.
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import unittest

from cli_case import SLOW, TESSERA, Case, tessera
from npy_arrays import Array, attention


class Run(Case):
    def check_types(self, descr, flags, out_descr, tolerance):
        arguments = self.files(descr=descr)
        result = tessera("run", *arguments, "--do", self.path("do.npy"), "--causal", *flags)
        self.assertEqual(result.returncode, 0, result.stderr)
        expected = attention(*self.arrays, lambda i, j: j <= i)
        for name in ("o", "lse", "dq", "dk", "dv"):
            got = Array.load(os.path.join(self.out, name + ".npy"))
            self.assertEqual(got.shape, (1, 2, 5) if name == "lse" else (1, 5, 2, 3))
            self.assertEqual(got.descr, "<f8" if descr == "<f8" else "<f4" if name == "lse" else out_descr)
            self.assert_close(got.values, expected[name], tolerance)
        self.assertEqual(sorted(os.listdir(self.out)), ["dk.npy", "dq.npy", "dv.npy", "lse.npy", "o.npy"])

    def test_f32(self):
        self.check_types("<f4", [], "<f4", 2e-6)

    def test_f16(self):
        self.check_types("<f2", [], "<f2", 1e-2)

    def test_f16_with_f32_out(self):
        self.check_types("<f2", ["--f32-out"], "<f4", 5e-3)

    def test_f64_is_the_reference(self):
        self.check_types("<f8", [], "<f8", 1e-13)

    def test_bf16_travels_in_f4(self):
        self.check_types("<f4", ["--type", "bf16"], "<f4", 6e-2)
        for value in Array.load(os.path.join(self.out, "o.npy")).values:
            self.assertEqual(struct.pack("<f", value)[:2], b"\0\0", "a bf16 value has 16 zero bits in f32")

    def test_every_kernel_that_is_here(self):
        for kernel in ("reference", "sse4", "avx2", "avx512"):
            result = tessera("run", *self.files(), "--do", self.path("do.npy"), "--kernel", kernel, "--threads", 2)
            if result.returncode == 0:
                o = Array.load(os.path.join(self.out, "o.npy"))
                self.assert_close(o.values, attention(*self.arrays, lambda i, j: True)["o"], 2e-6)
            else:
                self.assert_sentence(result, 1, kernel)

    def test_layout_bhnd_is_a_view(self):
        shape = (1, 5, 2, 3)
        tessera("run", *self.files(shape), "--do", self.path("do.npy"), "--window", "1,0")
        plain = {n: Array.load(os.path.join(self.out, n + ".npy")).values for n in ("o", "dk", "lse")}
        swap = lambda x, a, b: [x[(i * b + j) * 3 + d] for j in range(b) for i in range(a) for d in range(3)]
        for name, array in zip(("q", "k", "v", "do"), self.arrays):
            self.save(name, Array((1, 2, 5, 3), swap(array.values, 5, 2)))
        arguments = ["--" + n + "=" + self.path(n + ".npy") for n in ("q", "k", "v", "do")]
        result = tessera("run", *arguments, "--layout", "bhnd", "--window", "1,0", "--out", self.path("bhnd"))
        self.assertEqual(result.returncode, 0, result.stderr)
        for name in ("o", "dk", "lse"):
            got = Array.load(self.path("bhnd/" + name + ".npy"))
            self.assertEqual(got.shape, (1, 2, 5) if name == "lse" else (1, 2, 5, 3))
            values = got.values if name == "lse" else swap(got.values, 2, 5)
            self.assertEqual(values, plain[name])

    def test_optional_arrays_and_their_gradients(self):
        arguments = self.files() + ["--do", self.path("do.npy")]
        arguments += ["--bias", self.save("bias", Array.normal((1, 1, 5, 5), 7))]
        visible = [j <= i for i in range(5) for j in range(5)]
        arguments += ["--mask", self.save("mask", Array((1, 1, 5, 5), visible, "|b1"))]
        arguments += ["--slopes", self.save("slopes", Array((2,), [0.5, 0.25]))]
        arguments += ["--sinks", self.save("sinks", Array((2,), [0.1, -0.2]))]
        arguments += ["--dlse", self.save("dlse", Array.normal((1, 2, 5), 9))]
        arguments += ["--rng", self.save("rng", Array((2,), [3, 4], "<i8")), "--dropout", "0.25", "--softcap", "5"]
        result = tessera("run", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(Array.load(os.path.join(self.out, "dbias.npy")).shape, (1, 1, 5, 5))
        self.assertEqual(Array.load(os.path.join(self.out, "dsinks.npy")).shape, (2,))
        both = {n: Array.load(os.path.join(self.out, n + ".npy")).values for n in ("dq", "dbias")}
        result = tessera("run", *arguments[:-2], "--softcap", "5", "--gradients", "dq,dbias", "--out", self.path("few"))
        self.assert_sentence(result, 2)  # --out twice
        arguments[arguments.index("--out") + 1] = self.path("few")
        self.assertEqual(tessera("run", *arguments, "--gradients", "dq,dbias").returncode, 0)
        self.assertEqual(sorted(os.listdir(self.path("few"))), ["dbias.npy", "dq.npy", "lse.npy", "o.npy"])
        for name, values in both.items():
            self.assertEqual(Array.load(self.path("few/" + name + ".npy")).values, values)

    def test_packed_sequences(self):
        arguments = self.files(shape=(9, 2, 3)) + ["--do", self.path("do.npy")]
        lengths = self.save("cu", Array((4,), [0, 4, 4, 9], "<i8"))
        result = tessera("run", *arguments, "--cu-seqlens-q", lengths, "--cu-seqlens-k", lengths)
        self.assertEqual(result.returncode, 0, result.stderr)
        got = Array.load(os.path.join(self.out, "dv.npy"))
        parts = [Array((1, 5, 2, 3), a.values[4 * 6 :]) for a in self.arrays]
        self.assert_close(got.values[4 * 6 :], attention(*parts, lambda i, j: True)["dv"], 2e-6)
        self.assertEqual(Array.load(os.path.join(self.out, "lse.npy")).shape, (2, 9))

    def test_accumulate_adds_to_the_folder(self):
        arguments = self.files() + ["--do", self.path("do.npy"), "--accumulate"]
        self.assertEqual(tessera("run", *arguments).returncode, 0)
        once = Array.load(os.path.join(self.out, "dq.npy")).values
        self.assertEqual(tessera("run", *arguments).returncode, 0)
        self.assert_close(Array.load(os.path.join(self.out, "dq.npy")).values, [2 * x for x in once], 1e-6)

    def test_json_and_files_in_a_new_folder(self):
        arguments = self.files() + ["--json", self.path("run.json")]
        arguments[arguments.index("--out") + 1] = self.path("deep/er")
        self.assertEqual(tessera("run", *arguments).returncode, 0)
        with open(self.path("run.json")) as file:
            self.assertGreater(json.load(file)["forward"]["seconds"], 0)
        self.assertEqual(sorted(os.listdir(self.path("deep/er"))), ["lse.npy", "o.npy"])

    def test_empty_arrays(self):
        self.files()
        empty = self.save("empty", Array((1, 0, 2, 3), []))
        result = tessera("run", "--q", self.path("q.npy"), "--k", empty, "--v", empty, "--out", self.out)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(set(Array.load(os.path.join(self.out, "o.npy")).values), {0.0})
        self.assertEqual(set(Array.load(os.path.join(self.out, "lse.npy")).values), {-math.inf})


class Errors(Case):
    def test_files(self):
        arguments = self.files()
        q = arguments.index("--q") + 1
        for name, content, part in (
            ("missing", None, "no such file"),
            ("text", b"hello, this is not an array", "not a .npy file"),
            ("short", b"\x93NUM", "too short"),
        ):
            if content is not None:
                with open(self.path(name), "wb") as out:
                    out.write(content)
            arguments[q] = self.path(name)
            self.assert_failed_cleanly(part, *arguments)
        with open(self.path("q.npy"), "rb") as file:
            content = file.read()
        for length in (len(content) - 1, 60, 9):
            with open(self.path("cut.npy"), "wb") as out:
                out.write(content[:length])
            arguments[q] = self.path("cut.npy")
            self.assert_failed_cleanly("cut.npy", *arguments)

    def test_shapes_types_and_options(self):
        arguments = self.files()
        wrong = self.save("wrong", Array.normal((1, 5, 2, 4), 1))
        three = self.save("three", Array.normal((5, 2, 3), 1))
        whole = self.save("whole", Array((1, 5, 2, 3), range(30), "<i4"))
        line = self.save("line", Array.normal((7,), 1))
        for flags, part in (
            (["--k", wrong], "k: head_dim is 4"),
            (["--q", three], "q: has shape [5,2,3]"),
            (["--q", line], "q: has shape [7]"),
            (["--v", whole], "v: has type i32"),
            (["--q", whole], "q: has type i32"),
            (["--do", wrong], "d_o: has shape"),
            (["--mask", three], "mask"),
            (["--sinks", line], "sinks: has shape [7]"),
            (["--softcap=-1"], "softcap: is -1"),
            (["--dropout", "1.5"], "dropout: is 1.5"),
            (["--window", "-2,0"], "window_left"),
            (["--kernel", "magic"], "kernel: is 'magic'"),
            (["--type", "f64", "--kernel", "sse4"], "sse4"),
            (["--dlse", line], "needs --do"),
            (["--cu-seqlens-q", whole], "cu_seqlens"),
        ):
            changed = list(arguments)
            for flag, value in zip(flags[::2], flags[1::2]):
                if flag in changed:
                    changed[changed.index(flag) + 1] = value
                else:
                    changed += [flag, value]
            self.assert_failed_cleanly(part, *changed, *(flags if len(flags) == 1 else []))

    def test_lengths_beyond_32_bits(self):
        arguments = self.files(shape=(9, 2, 3))
        lengths = self.save("cu", Array((2,), [0, 2**40], "<i8"))
        self.assert_failed_cleanly("32 bits", *arguments, "--cu-seqlens-q", lengths, "--cu-seqlens-k", lengths)

    def test_folders_that_cannot_be_written(self):
        arguments = self.files()
        arguments[arguments.index("--out") + 1] = self.path("q.npy")
        self.assert_failed_cleanly("not a folder", *arguments)
        arguments[arguments.index("--out") + 1] = self.path("q.npy/below")
        self.assert_failed_cleanly("q.npy", *arguments)
        os.makedirs(self.path("out/o.npy"))
        arguments[arguments.index(self.path("q.npy/below"))] = self.out
        self.assert_failed_cleanly("it is a folder", *arguments)
        self.assertEqual(os.listdir(self.out), ["o.npy"])

    def test_json_that_cannot_be_written(self):
        arguments = self.files()
        self.assert_failed_cleanly("cannot write", *arguments, "--json", self.path("nowhere/x.json"))

    def test_earlier_results_survive_an_error(self):
        arguments = self.files()
        self.assertEqual(tessera("run", *arguments).returncode, 0)
        before = Array.load(os.path.join(self.out, "o.npy")).values
        self.assert_failed_cleanly("softcap", *arguments, "--softcap=-1")
        self.assertEqual(Array.load(os.path.join(self.out, "o.npy")).values, before)
        self.assertEqual(sorted(os.listdir(self.out)), ["lse.npy", "o.npy"])

    def test_numbers_that_do_not_fit(self):
        """CLI11 alone would take the largest number, or 0 for nothing."""
        most, least = 2**64 - 1, -2**63
        for flag, value in (("--seed", most + 1), ("--seed", least - 1), ("--row0", 2**63), ("--row0", least - 1),
                            ("--window", f"{2**63},0"), ("--max-seqlen-q", 2**64), ("--nq", 10**30),
                            ("--q-shape", f"1,{2**64 + 3},1,8"), ("--seed", ""), ("--nq", "")):
            text = next(part for part in str(value).split(",") if part == "" or abs(int(part)) > 1000)
            self.assert_sentence(tessera("plan", flag, value), 2, f"{flag}: '{text}' is not an integer of 64 bits")
        self.assert_sentence(tessera("plan", "--dropout", ""), 2, "--dropout: '' is not a number")
        for value in (most, least, -1, 0):
            self.assertEqual(tessera("plan", "--dropout", "0.5", "--seed", value).returncode, 0)

    def test_flags_without_effect(self):
        shape = "plan --q-shape 1,64,8,64"
        for line, flag in ((f"{shape} --nq 3", "--nq"), ("plan --k-shape 1,64,8,64 --kv-heads 2", "--kv-heads"),
                           ("check --count 3", "--count"), ("check --case square_f32 --seed 5", "--seed"),
                           ("check --case square_f32 --suite all", "--suite"),
                           ("check --list --json x.json", "--json")):
            self.assert_sentence(tessera(*line.split()), 1, f"tessera: {flag}: is ")
        for keys, sentence in (("2,64,8,64", "batch is 2 but q has 1"), ("1,64,8,32", "head_dim is 32 but q has 64")):
            self.assert_sentence(tessera(*shape.split(), "--k-shape", keys), 1, f"k: {sentence}")
        self.assertIn("Nq=5 Nk=0", tessera("plan", "--nq", "5", "--nk", "0", "--pass", "forward").stdout)

    def test_usage(self):
        for line in (
            "nonsense",
            "--nonsense",
            "run",
            "run --q",
            "run --out x",
            "check --suite nonsense",
            "check --count 0",
            "check --count many",
            "bench --threads=-1",
            "bench --repeat 0",
            "plan --type f8",
            "plan --window 3",
            "plan --q-shape 1,2,3",
            "demo extra",
            "info --json",
        ):
            self.assert_sentence(tessera(*line.split()), 2, "--help")


class Commands(Case):
    def test_help(self):
        self.assertIn("Examples:", tessera("--help").stdout)
        ranks = [f"dist {name}" for name in ("plan", "check", "bits", "faults", "measure", "simulate")]
        for command in ("demo", "run", "check", "bench", "plan", "info", "pack", "dist", *ranks):
            *group, name = command.split()
            result = tessera(*group, name, "--help")
            self.assertEqual(result.returncode, 0)
            self.assertIn("Examples:", result.stdout)
            self.assertEqual("--json" in result.stdout, name != "dist")
            self.assertEqual(result.stderr, "")
            self.assertIn(name, tessera(*group, "--help").stdout)
        self.assertEqual(tessera().returncode, 2)
        self.assertRegex(tessera("--version").stdout, r"^tessera \d+\.\d+\.\d+\n$")

    def load_json(self, *arguments):
        path = self.path("x.json")
        result = tessera(*arguments, "--json", path)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(result.stderr, "", "nothing but results in a pipe")
        with open(path) as file:
            return json.load(file), result.stdout

    def test_info(self):
        machine, text = self.load_json("info")
        self.assertGreaterEqual(machine["threads"], 1)
        for word in ("version", "processor", "kernels", "reference", "GPU", "NVRTC", "packed", "cache"):
            self.assertIn(word, text)

    def test_instruction_sets_may_be_hidden(self):
        if os.uname().machine != "x86_64":
            self.skipTest("these are the names of x86-64")

        def told(limit, *arguments):
            return tessera(*arguments, env={**os.environ, "TESSERA_ISA": limit})

        def sets(limit):
            return re.search(r"^isa +(.*)$", told(limit, "info").stdout, re.M)[1]

        ascending = ["sse4", "avx2", "avx512", "avx512bf16", "amx"]
        for limit in ascending:
            left = [name for name in sets("").split() if name in ascending[:ascending.index(limit) + 1]]
            self.assertEqual(sets(limit), " ".join(left) + ", limited by TESSERA_ISA=" + limit)
        plan = told("sse4", "plan", "--pass", "forward").stdout
        self.assertRegex(plan, r"kernel +sse4\n")
        self.assertRegex(plan, r"not avx2 +refused: TESSERA_ISA is sse4, which hides it\n")
        rule = "TESSERA_ISA: is 'avx'; must be empty or one of sse4, avx2, avx512, avx512bf16, amx"
        self.assertEqual(sets("avx"), "none: " + rule)
        self.assert_sentence(told("avx", "plan"), 1, rule)

    def test_plan(self):
        shape = ["--q-shape", "2,256,6,64", "--kv-heads", "2"]
        plans, text = self.load_json("plan", *shape, "--causal", "--with", "bias,sinks")
        self.assertEqual(set(plans), {"forward", "backward"})
        for part in ("forward", "backward", "kernel", "workspace"):
            self.assertIn(part, text)
        forced, text = self.load_json("plan", "--kernel", "reference", "--type", "f64", "--pass", "forward")
        self.assertEqual(forced["forward"]["kernel"], "reference")
        self.assert_sentence(tessera("plan", "--heads", "8", "--kv-heads", "3"), 1, "multiple")
        part = ["plan", *shape, "--with", "state_in,state_out", "--part-invariant", "--segment-rows", "4096"]
        text = tessera(*part).stdout
        self.assertIn("from a state, to a state, part-invariant in segments of 4096 queries", text)
        self.assertIn("the bits of any cut at multiples of these tiles", text)
        self.assert_sentence(tessera(*part, "--device", "cuda"), 1,
                             "the call is a part (from a state, to a state, part-invariant in segments of 4096")
        self.assert_sentence(tessera("plan", "--sm-margin", "2"), 1, "only GPUs have multiprocessors")
        cache = ["plan", *shape, "--type", "bf16", "--kv-type", "e4m3", "--with", "scales,qv,tree,positions"]
        text = tessera(*cache, "--pass", "forward").stdout
        for part in ("bf16, K e4m3, scales of K per sequence and head, V e4m3", "Qv", "a tree mask of", "positions"):
            self.assertIn(part, text)
        self.assert_sentence(tessera(*cache), 1, "qv: is given; there is no backward pass with it")
        self.assert_sentence(tessera(*cache, "--pass", "forward", "--device", "cuda"), 1,
                             "k or v has another type than q, or scales; this kernel takes neither")

    def test_check(self):
        caches, _ = self.load_json("check", "--suite", "random_caches", "--seed", "11", "--count", "2")
        self.assertEqual((caches["passed"], caches["failed"], caches["seed"]), (2, 0, 11))
        report, text = self.load_json("check", "--suite", "random", "--seed", "11", "--count", "3")
        self.assertEqual((report["passed"], report["failed"], len(report["cases"])), (3, 0, 3))
        self.assertIn("3 passed, 0 failed", text)
        for case in report["cases"]:
            self.assertIn("tessera check --suite random --seed", case["repeat"])
            for output in case["outputs"]:
                self.assertLessEqual(output["error"], output["allowed"] + output["underflow"])
        self.assertEqual(report["underflowed"], 0)
        self.assertNotIn("underflow", text)
        report, text = self.load_json("check", "--case", "underflow_sinks_f32")
        self.assertEqual((report["passed"], report["underflowed"]), (1, 1))
        self.assertIn("1 case is within the rule only by its underflow term", text)
        name = tessera("check", "--suite", "regular", "--list").stdout.split()[0]
        report, _ = self.load_json("check", "--case", name)
        self.assertEqual(report["cases"][0]["name"], name)
        self.assert_sentence(tessera("check", "--case", "nonsense"), 1, "nonsense")
        self.assert_sentence(tessera("check", "--suite", "random", "--kernel", "magic"), 1, "kernel: is 'magic'")

    def test_bench(self):
        report, text = self.load_json("bench", "--suite", "tiny", "--repeat", "3", "--threads", "2")
        self.assertEqual(len(report["rows"]), 4)
        for row in report["rows"]:
            self.assertGreater(row["gflops"], 0)
            self.assertGreater(row["fma_gflops"], 0)
        self.assertIn("of FMA", text)

    # The figures of ancestor B's inputs, computed in float64 (docs/numerics.md).
    CORNERS = {
        "Q": "0.680375 0.823295 -0.444451 0.499542 0.168977 -0.74905 0.461459 0.841829 0.0648819",
        "K": "-0.211234 -0.604897 0.10794 -0.262673 -0.511175 0.586941 -0.343251 0.369513 -0.824713",
        "V": "0.566198 -0.329554 -0.0452059 -0.411679 -0.69522 -0.671796 0.480877 0.306261 -0.479006",
        "O": "0.016065 -0.0290427 -0.027025 0.011394 -0.00482534 -0.03082 0.0286616 -0.0218805 -0.0718517",
        "dQ": "0.00946975 0.00569055 0.0007855 -0.00670553 -0.00763953 -0.0156887 -0.00887811 0.0160615 0.0198677",
        "dK": "0.00480869 -0.00776059 -0.00402077 0.0102126 0.0126519 0.0243553 0.00513837 0.0136316 0.0141893",
        "dV": "-0.0712795 -0.0072766 -0.00910687 -0.0345493 -0.0283635 0.00945967 -0.0471181 0.000656005 -0.015904",
    }

    def test_demo_prints_the_right_corners(self):
        report, text = self.load_json("demo", "--small")
        for name, figures in self.CORNERS.items():
            got = [x for row in report["small"]["corners"][name] for x in row]
            expected = [float(x) for x in figures.split()]
            self.assert_close(got, expected, 1e-6)  # six digits were printed
        for figure in self.CORNERS["Q"].split() + self.CORNERS["V"].split():
            self.assertIn(" " + figure, text)
        self.assertRegex(text, r"Latency .*forward .*backward .*total ")
        for name in ("O", "LSE", "dQ", "dK", "dV"):
            self.assertLess(report["small"]["errors"][name]["relative"], 1e-5)

    @unittest.skipIf(SLOW, "measures speed")
    def test_demo_compares_with_unfused(self):
        report, text = self.load_json("demo")
        realistic = report["realistic"]
        self.assertEqual((realistic["heads"], realistic["tokens"], realistic["dim"]), (8, 4096, 64))
        if "unfused" in realistic:  # a machine with little memory leaves it out, and says so
            self.assertGreater(realistic["unfused"]["backward_bytes"], 8 * 4096 * 4096 * 4)
            self.assertLess(realistic["tessera"]["backward_bytes"], 8 * 4096 * 4096)
            self.assertLess(realistic["largest_difference"], 1e-4)
            self.assertIn("speed-up", text)


class Terminal(Case):
    # Long enough for the line to appear, and for a pipe to show that it does not.
    LONG = ["bench", "--suite", "tiny", "--repeat", "60"]

    def test_progress_on_a_terminal(self):
        try:
            primary, secondary = pty.openpty()
        except OSError as error:
            self.skipTest(f"no pseudo-terminals here: {error}")
        process = subprocess.Popen([TESSERA, *self.LONG], stdout=subprocess.DEVNULL, stderr=secondary)
        os.close(secondary)
        seen = b""
        while True:
            try:
                part = os.read(primary, 4096)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            seen += part
        os.close(primary)
        self.assertEqual(process.wait(), 0)
        self.assertRegex(seen.decode(), r"\[#*\.*\] +\d+ %  0:0\d")
        self.assertTrue(seen.endswith(b"\r\x1b[K"), "the line is cleared at the end")
        self.assertNotIn(b"\n", seen)

    def test_no_progress_in_a_pipe(self):
        result = tessera(*self.LONG)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertNotIn("\r", result.stdout)


if __name__ == "__main__":
    del sys.argv[1]  # cli_case has read it
    unittest.main()
