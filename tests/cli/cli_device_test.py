#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Tests of the `tessera` program where it runs on a GPU, and where there is none: `run --device cuda` on the fake driver
# of tests/fake, which keeps what is copied to it and computes nothing; all commands on a Vulkan device; what is
# said without a driver; places that cannot be written, noticed before work begins.
# Usage: cli_device_test.py PATH-TO-TESSERA FAKE-DRIVER FAKE-COMPILER [unittest arguments]. Registered by
# tests/cli/tests.cmake. Uses nothing but Python's standard library. Implements docs/testing.md.
import json
import os
import sys
import unittest

from cli_case import Case, tessera
from npy_arrays import Array

DRIVER, COMPILER = map(os.path.abspath, sys.argv[2:4])
DRIVER_MISSING = "the NVIDIA driver is missing: libcuda.so.1 could not be opened"


def on_fake_gpu(*arguments, **options):
    """The program with a driver and a compiler of GPUs that are not there; the first of them is a T4."""
    places = {"LD_LIBRARY_PATH": os.path.dirname(DRIVER), "TESSERA_NVRTC": COMPILER, "TESSERA_CACHE": ""}
    return tessera(*arguments, env={**os.environ, **places}, **options)


class Gpu(Case):
    def load(self, name):
        return Array.load(os.path.join(self.out, name + ".npy"))

    def earlier(self, shapes):
        """Gradients of an earlier run in the folder of results, to be added to."""
        os.makedirs(self.out)
        made = {name: Array.normal(shape, 70 + n) for n, (name, shape) in enumerate(shapes.items())}
        for name, array in made.items():
            array.save(os.path.join(self.out, name + ".npy"))
        return made

    def test_arrays_travel_to_the_gpu_and_back(self):
        """The fake GPU adds nothing to the gradients, so what comes back is what went there, to the bit."""
        arguments = [*self.files(), "--do", self.path("do.npy"), "--accumulate", "--device", "cuda"]
        made = self.earlier({name: (1, 5, 2, 3) for name in ("dq", "dk", "dv")})
        result = on_fake_gpu("run", *arguments)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertRegex(result.stdout, r"forward +\S+ \w+  kernel vector\nbackward +\S+ \w+  kernel vector\n")
        for name, array in made.items():
            self.assertEqual(self.load(name).values, array.values, name)
        self.assertEqual(self.load("o").shape, (1, 5, 2, 3))
        self.assertEqual(self.load("lse").shape, (1, 2, 5))

    def test_every_kind_of_input(self):
        """All that may be given has its place on the device: the library refuses tensors of two devices."""
        arguments = self.files()
        extra = {"bias": Array.normal((1, 2, 5, 5), 5), "mask": Array((1, 1, 5, 5), [1] * 25, "|u1"),
                 "slopes": Array.normal((2,), 6), "sinks": Array.normal((2,), 7), "dlse": Array.normal((1, 2, 5), 8),
                 "seqused-q": Array((1,), [4], "<i4"), "seqused-k": Array((1,), [3], "<i8"),
                 "rng": Array((2,), [1, 2], "<i8"), "do": Array.normal((1, 5, 2, 3), 9)}
        for name, array in extra.items():
            arguments += ["--" + name, self.save(name, array)]
        result = on_fake_gpu("run", *arguments, "--dropout", 0.5, "--device", "cuda")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        names = ["dbias.npy", "dk.npy", "dq.npy", "dsinks.npy", "dv.npy", "lse.npy", "o.npy"]
        self.assertEqual(sorted(os.listdir(self.out)), names)

    def test_packed_half_precision_heads_first(self):
        lengths = self.save("cu", Array((3,), [0, 4, 9], "<i8"))
        packed = ["--cu-seqlens-q", lengths, "--cu-seqlens-k", lengths]
        self.assertEqual(on_fake_gpu("run", *self.files((9, 2, 8), "<f2"), *packed, "--device", "cuda").returncode, 0)
        self.assertEqual((self.load("o").shape, self.load("o").descr), ((9, 2, 8), "<f2"))
        result = on_fake_gpu("run", *self.files((1, 2, 5, 8)), "--layout", "bhnd", "--device", "cuda")
        self.assertEqual((result.returncode, self.load("lse").shape), (0, (1, 2, 5)))

    def test_what_gpus_do_not_take(self):
        arguments = self.files(descr="<f8")
        before = sorted(os.listdir(self.folder))
        self.assert_sentence(on_fake_gpu("run", *arguments, "--device", "cuda"), 1, "f64")
        self.assertEqual(sorted(os.listdir(self.folder)), before)


class Vulkan(Case):
    def setUp(self):
        super().setUp()
        line = [line for line in tessera("info").stdout.splitlines() if line.startswith("Vulkan ")][0]
        if "none: " in line:
            self.skipTest(line)
        self.device = line[len("Vulkan"):].split(";")[0].strip()

    def report(self, *arguments):
        result = tessera(*arguments, "--device", "vulkan", "--json", self.path("report.json"))
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        with open(self.path("report.json")) as file:
            return json.load(file), result.stdout

    def test_bench(self):
        report, text = self.report("bench", "--suite", "tiny", "--repeat", "1")
        self.assertEqual((report["gpu"], text.splitlines()[0]), (self.device, self.device))
        self.assertEqual({(row["kernel"], row["pass"], row["causal"]) for row in report["rows"]},
                         {(kernel, way, causal) for kernel in ("vk_tiled", "vk_naive")
                          for way in ("forward", "backward") for causal in (False, True)})
        for row in report["rows"]:
            operations = 4 * row["N"] ** 2 * row["D"] * (2.5 if row["pass"] == "backward" else 1)
            rate = operations / (2 if row["causal"] else 1) / row["seconds"]
            self.assertAlmostEqual(row["tflops"] * 1e12 / rate, 1, places=6)
            self.assertLess(1e-6, row["seconds"])  # not even an empty submission is faster
            self.assertIn(f" {row['tflops']:.3g} ", text)
        self.assertIn("from a call to its fence", text)

    def test_demo(self):
        report, text = self.report("demo", "--small")
        self.assertEqual(report["device"], self.device)
        self.assertIn("On a Vulkan device: " + self.device, text)
        for name in ("O", "LSE", "dQ", "dK", "dV"):
            self.assertLess(report["small"]["errors"][name]["relative"], 1e-5)
            self.assertGreater(report["small"]["errors"][name]["relative"], 0)
        self.assertGreater(report["small"]["seconds"]["forward"], 1e-6)

    def test_run_gives_what_the_cpu_gives(self):
        found = {}
        for device, kernel in (("vulkan", "kernel vk_tiled\n"), ("cpu", "kernel ")):
            result = tessera("run", *self.files(), "--do", self.path("do.npy"), "--causal", "--device", device)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            self.assertEqual(result.stdout.count(kernel), 2)
            found[device] = {name: Array.load(os.path.join(self.out, name + ".npy"))
                             for name in ("o", "lse", "dq", "dk", "dv")}
        for name, ours in found["vulkan"].items():
            self.assertEqual(ours.shape, found["cpu"][name].shape)
            self.assert_close(ours.values, found["cpu"][name].values, 1e-5)

    def test_check(self):
        result = tessera("check", "--device", "vulkan", "--case", "causal_f32")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("causal_f32 (vk_tiled)", result.stdout)
        self.assertIn("1 passed, 0 failed, 0 skipped", result.stdout)

    def test_suites_of_other_devices(self):
        for suite in ("cpu", "scaling", "decode", "first-call"):
            self.assert_sentence(tessera("bench", "--device", "vulkan", "--suite", suite), 1,
                                 f"bench --suite {suite} does not run on --device vulkan; tiny, ladder and gpu do.")
        self.assert_sentence(tessera("bench", "--device", "vulkan", "--kernel", "avx2"), 1, "kernel: is 'avx2'")


class WithoutVulkan(Case):
    """A machine without Vulkan's loader: one sentence, before anything is read or computed."""

    def test_commands_say_so(self):
        missing = self.path("libvulkan.so.1")
        reason = f"there is no Vulkan: {missing} could not be opened"
        for command in ("bench", "bench --suite tiny", "bench --suite gpu", "demo", "check",
                        "run --q no.npy --k no.npy --v no.npy"):
            result = tessera(*command.split(), "--device", "vulkan", env={**os.environ, "TESSERA_VULKAN": missing})
            self.assert_sentence(result, 1, "--device vulkan needs a Vulkan device: " + reason)
            self.assertEqual(result.stdout, "")
        result = tessera("plan", "--device", "vulkan", env={**os.environ, "TESSERA_VULKAN": missing})
        self.assert_sentence(result, 1, "vk_tiled, vk_naive: " + reason)
        result = tessera("info", env={**os.environ, "TESSERA_VULKAN": missing})
        self.assertIn("none: " + reason, result.stdout)
        self.assertEqual(os.listdir(self.folder), [])


class Without(Case):
    """A machine without a driver. Where there is one, nothing of this can be seen."""

    def setUp(self):
        super().setUp()
        if "GPU        none: " + DRIVER_MISSING not in tessera("info").stdout:
            self.skipTest("this machine has an NVIDIA driver")

    def test_run_says_so_before_it_reads(self):
        sentence = "tessera: run --device cuda needs a GPU: " + DRIVER_MISSING
        result = tessera("run", "--q", "no.npy", "--k", "no.npy", "--v", "no.npy", "--device", "cuda")
        self.assert_sentence(result, 1, sentence)

    def test_check_says_so_before_its_cases(self):
        sentence = "tessera: check --device cuda needs a GPU: " + DRIVER_MISSING
        self.assert_sentence(tessera("check", "--device", "cuda"), 1, sentence)

    def test_a_plan_says_it_once_for_all_kernels(self):
        result = tessera("plan", "--device", "cuda")
        self.assert_sentence(result, 1, "no kernel can run this: decode_direct, ")
        self.assertEqual(result.stderr.count(DRIVER_MISSING), 1, result.stderr)
        self.assertNotIn("avx2", result.stderr)  # kernels of other devices have nothing to say


class Places(Case):
    def test_a_report_that_cannot_be_written_is_noticed_first(self):
        """Before anything is measured or printed, and without a file."""
        for command in (["bench", "--suite", "tiny"], ["demo"], ["check", "--suite", "all"],
                        ["pack", "--out", self.path("a.pack")]):
            for place, part in ((self.path("none/report.json"), "cannot write into " + self.path("none")),
                                (self.folder, "it is a folder")):
                result = tessera(*command, "--json", place)
                self.assert_sentence(result, 1, part)
                self.assertEqual(result.stdout, "", command)
        self.assert_sentence(tessera("pack", "--out", self.path("none/a.pack")), 1, self.path("none"))
        self.assertEqual(os.listdir(self.folder), [])

    def test_a_report_that_can_be_written_is_not_touched_first(self):
        with open(self.path("report.json"), "w") as out:
            out.write("earlier")
        self.assert_sentence(tessera("check", "--case", "nonsense", "--json", self.path("report.json")), 1, "nonsense")
        self.assert_sentence(tessera("check", "--kernel", "magic", "--json", self.path("report.json")), 1, "magic")
        with open(self.path("report.json")) as file:
            self.assertEqual(file.read(), "earlier")
        self.assertEqual(os.listdir(self.folder), ["report.json"])

    def test_results_have_a_folder_of_their_own(self):
        arguments = self.files()
        del arguments[arguments.index("--out"):]
        result = tessera("run", *arguments, cwd=self.folder)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("wrote results/o.npy", result.stdout)
        self.assertEqual(sorted(os.listdir(self.path("results"))), ["lse.npy", "o.npy"])


if __name__ == "__main__":
    del sys.argv[1:4]  # read above and by cli_case
    ran = unittest.main(exit=False).result
    if not ran.wasSuccessful() or ran.testsRun == 0:
        sys.exit(1)
    sys.exit(77 if len(ran.skipped) == ran.testsRun else 0)  # which ctest shows as skipped
