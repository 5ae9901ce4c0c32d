#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tools/gpu_tests.py on a folder of small programs in the place of GPU tests: some pass, fail, hang, are skipped, or do
# not begin in time. Registered in tests/tree/tests.cmake; Python's standard library only.
import contextlib
import importlib.util
import io
import json
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "tools/gpu_tests.py")
gpu_tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_tests)

LIST = 'if [ "$1" = --gtest_list_tests ]; then echo Suite.; for n in $(seq {}); do echo "  Test$n"; done; exit 0; fi'


class Runs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = Path(folder.name)

    def write(self, name, commands, tests=2, place="tests"):
        """A program of so many tests, that runs shell commands; None: one that finds no GPU."""
        program = self.build / place / name
        program.parent.mkdir(exist_ok=True)
        lines = "exit 77" if tests is None else LIST.format(tests) + "\n" + commands
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)

    def run_tool(self, *words):
        """Status, rows by name, and what was printed."""
        report = self.build / "rows.json"
        with contextlib.redirect_stdout(io.StringIO()) as text:
            status = gpu_tests.main([str(self.build), "--json", str(report), "--jobs", "2", *words])
        return status, {row["name"]: row for row in json.loads(report.read_text())}, text.getvalue()

    def test_every_test_runs_in_one_shard(self):
        self.write("gpu_a_test", 'echo "$GTEST_SHARD_INDEX of $GTEST_TOTAL_SHARDS" >> "$0.ran"', tests=9)
        self.write("gpu_b_test", 'echo "$GTEST_SHARD_INDEX of $GTEST_TOTAL_SHARDS" >> "$0.ran"', tests=1)
        status, rows, text = self.run_tool("--without", "benches")
        self.assertEqual((status, rows["gpu_a_test"]["ok"], rows["gpu_b_test"]["ok"]), (0, 4, 1))
        ran = lambda name: sorted((self.build / "tests" / (name + ".ran")).read_text().splitlines())
        self.assertEqual(ran("gpu_a_test"), [f"{n} of 4" for n in range(4)])
        self.assertEqual(ran("gpu_b_test"), ["0 of 1"])
        self.assertRegex(text, r"gpu_a_test +4 +4 +0 +0 +0 +0 ")

    def test_failures_are_named(self):
        self.write("gpu_a_test", 'if [ $GTEST_SHARD_INDEX = 1 ]; then echo "[  FAILED  ] Suite.Test2, where 3"; exit 1; fi')
        self.write("gpu_b_test", "exit 0")
        self.write("gpu_c_test", "echo words; echo last words; exit 2", tests=1)
        status, rows, text = self.run_tool("--without", "benches")
        self.assertEqual((status, rows["gpu_a_test"]["ok"], rows["gpu_a_test"]["failed"]), (1, 1, 1))
        self.assertEqual(rows["gpu_c_test"]["failures"], ["last words"])
        self.assertEqual(rows["gpu_a_test"]["failures"], ["Suite.Test2"])
        self.assertIn("    failed: Suite.Test2", text)
        self.assertIn("Suite.Test2", (self.build / "gpu_tests/gpu_a_test.1.log").read_text())

    def test_what_hangs_is_stopped_with_its_children(self):
        self.write("gpu_a_test", "(sleep 2; touch $0.child) & sleep 60", tests=1)
        self.write("gpu_b_test", "exit 0", tests=1)
        begin = time.monotonic()
        status, rows, _ = self.run_tool("--without", "benches", "--shard-timeout", "0.5")
        self.assertLess(time.monotonic() - begin, 30)
        self.assertEqual((status, rows["gpu_a_test"]["stopped"], rows["gpu_b_test"]["ok"]), (1, 1, 1))
        time.sleep(2)
        self.assertFalse((self.build / "tests/gpu_a_test.child").exists())

    def test_the_limit_leaves_the_less_important(self):
        self.write("gpu_ptx_test", "touch $0.ran", tests=4)
        self.write("gpu_cases_test", "sleep 60", tests=2)
        status, rows, text = self.run_tool("--limit", "1", "--without", "benches")
        self.assertEqual((rows["gpu_cases_test"]["stopped"], rows["gpu_ptx_test"]["not begun"]), (2, 4))
        self.assertFalse((self.build / "tests/gpu_ptx_test.ran").exists())
        self.assertEqual((status, list(rows)), (1, ["gpu_cases_test", "gpu_ptx_test"]))

    def test_without_a_gpu_nothing_runs(self):
        self.write("gpu_a_test", "", tests=None)
        self.write("tessera", "touch $0.ran", place="cli")
        status, rows, _ = self.run_tool()
        self.assertEqual((status, list(rows), rows["gpu_a_test"]["skipped"]), (77, ["gpu_a_test"], 1))
        self.write("gpu_a_test", "exit 77", tests=3)  # lists them, but runs none
        status, rows, _ = self.run_tool()
        self.assertEqual((status, list(rows), rows["gpu_a_test"]["skipped"]), (77, ["gpu_a_test"], 3))
        self.assertFalse((self.build / "cli/tessera.ran").exists())

    def test_benchmarks_come_alone_and_last(self):
        self.write("gpu_a_test", "exit 0", tests=3)
        self.write("tessera", 'echo "$2 $3" >> $0.ran; ls "$(dirname $0)/../gpu_tests" >> $0.ran', place="cli")
        status, rows, _ = self.run_tool("--without", "peers,sustained,errors,ladder,turns,vulkan,mma,calls")
        self.assertEqual((status, list(rows)), (0, ["gpu_a_test", "bench decode", "bench gpu"]))
        ran = (self.build / "cli/tessera.ran").read_text()
        self.assertEqual([line for line in ran.splitlines() if line.startswith("--suite")], ["--suite decode", "--suite gpu"])
        self.assertIn("gpu_a_test.2.log", ran.partition("--suite gpu")[0])

    def test_each_tile_of_vulkan_has_a_benchmark_of_its_own(self):
        self.write("tessera", 'echo "$2 $3 tile $TESSERA_VULKAN_TILE $*" >> $0.ran', place="cli")
        status, rows, _ = self.run_tool("--only", "vulkan")
        ran = (self.build / "cli/tessera.ran").read_text().splitlines()
        self.assertEqual((status, len(rows), len(set(ran))), (0, 7, 7))
        for begin in ("--device vulkan tile 16x16x4x32x8 ", "--device vulkan tile  bench", "--suite gpu tile  bench"):
            self.assertEqual(sum(line.startswith(begin) for line in ran), 1, begin)

    def test_vulkan_runs_where_it_has_a_gpu(self):
        for name in ("vulkan_cases_test", "vulkan_faults_test", "gpu_a_test"):
            self.write(name, "exit 0")
        for device, more in (("vulkan:0 NVIDIA H200, Vulkan 1.4.312", ["vulkan_cases_test"]), ("none: no loader", []),
                             ("vulkan:0 llvmpipe (LLVM 15.0.6, 256 bits), Vulkan 1.3.230", [])):
            self.write("tessera", f"echo 'GPU     none'; echo 'Vulkan  {device}'", place="cli")
            self.assertEqual(list(self.run_tool("--without", "benches")[1]), ["gpu_a_test", *more])

    def test_mma_runs_with_the_tiles_of_every_class(self):
        self.write("gpu_mma_test", 'echo "tests $TESSERA_TILES" >> $0.ran', tests=1)
        with mock.patch.object(gpu_tests.sys, "executable", "/bin/true"):
            status, rows, _ = self.run_tool("--only", "mma", "--without", "check")
            found = gpu_tests.bench_jobs(self.build, self.build, gpu_tests.parse_arguments(["--only", "bench mma"]))
        ran = (self.build / "tests/gpu_mma_test.ran").read_text().splitlines()
        self.assertEqual(sorted(ran), ["tests ", "tests sm_75", "tests sm_80", "tests sm_89"])
        self.assertEqual([job.environment.get("TESSERA_TILES") for job in found], [None, "sm_80", "sm_89", "sm_75"])
        self.assertEqual((status, list(rows)), (0, ["gpu_mma_test", "gpu_mma_test sm_80", "gpu_mma_test sm_89",
                                                    "gpu_mma_test sm_75", "bench mma", "bench mma sm_75",
                                                    "bench mma sm_80", "bench mma sm_89"]))

    def test_python_comes_first_and_jax_leaves_memory(self):
        self.write("gpu_cases_test", "exit 0")
        self.write("libtessera.so", "", place="src")
        arguments = gpu_tests.parse_arguments([str(self.build), "--shard-timeout", "7"])
        with mock.patch.object(gpu_tests.importlib.util, "find_spec", lambda name: name):
            jobs, skipped, _ = gpu_tests.test_jobs(arguments.build, arguments)
        names = [job.name for job in jobs]
        self.assertEqual((jobs[0].timeout, names[-1], skipped), (14, "gpu_cases_test", []))
        self.assertIn("python torch", names[:-2])  # one of several
        self.assertTrue(all(name.startswith("python ") for name in names[:-2]))
        self.assertEqual(jobs[0].environment["XLA_PYTHON_CLIENT_PREALLOCATE"], "false")

    def test_what_cannot_be_listed_is_a_failure_of_its_own(self):
        self.write("gpu_a_test", "exit 0", tests=1)
        (self.build / "tests/gpu_b_test").write_text("#!/bin/sh\nexit 3\n")
        (self.build / "tests/gpu_b_test").chmod(0o755)
        status, rows, _ = self.run_tool("--without", "benches")
        self.assertEqual((status, rows["gpu_a_test"]["ok"], rows["gpu_b_test"]["failed"]), (1, 1, 1))
        self.assertIn("--gtest_list_tests ends with status 3", rows["gpu_b_test"]["failures"][0])

    def test_another_run_goes_on_where_one_ended(self):
        self.write("gpu_a_test", 'echo $GTEST_SHARD_INDEX >> $0.ran; [ -e $0.good ] || [ $GTEST_SHARD_INDEX = 0 ]', 3)
        ran = self.build / "tests/gpu_a_test.ran"
        words = ("--without", "benches", "--resume", str(self.build / "rows.json"))
        status, rows, _ = self.run_tool(*words)
        self.assertEqual((status, rows["gpu_a_test"]["passed"], sorted(ran.read_text().split())), (1, [0], list("012")))
        self.assertEqual(len(rows["gpu_a_test"]["tails"]), 0)  # they have said nothing
        ran.unlink()
        (self.build / "tests/gpu_a_test.good").touch()
        status, rows, _ = self.run_tool(*words)
        self.assertEqual((status, rows["gpu_a_test"]["ok"], sorted(ran.read_text().split())), (0, 3, list("12")))
        self.assertEqual(sorted(rows["gpu_a_test"]["passed"]), [0, 1, 2])

    def test_what_ends_it_early_loses_no_rows(self):
        self.write("gpu_decode_test", "exit 0", tests=1)
        waits = "while [ -e $0 ]; do sleep 0.1; done"  # who is left behind by SIGKILL ends with the folder
        self.write("gpu_mma_test", f"(sleep 1.5; touch $0.child) & echo words; {waits}", tests=1)
        rows, archive = self.build / "rows.json", self.build / "logs.tar.gz"
        command = [sys.executable, str(ROOT / "tools/gpu_tests.py"), str(self.build), "--json", str(rows), "--jobs",
                   "1", "--without", "benches,check", "--archive", str(archive)]
        for number in (signal.SIGTERM, signal.SIGKILL):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                begin = time.monotonic()
                while not rows.exists() and time.monotonic() - begin < 20:
                    time.sleep(0.05)
                self.assertEqual(json.loads(rows.read_text())[0]["passed"], [0])
                if number == signal.SIGTERM:
                    log = self.build / "gpu_tests/gpu_mma_test.0.log"
                    while not (log.exists() and log.read_text()) and time.monotonic() - begin < 20:
                        time.sleep(0.05)
                process.send_signal(number)
                text = process.stdout.read()
            found = {row["name"]: row for row in json.loads(rows.read_text())}
            self.assertEqual(found["gpu_decode_test"]["passed"], [0])
            if number == signal.SIGTERM:
                self.assertEqual((process.returncode, found["gpu_mma_test"]["stopped"]), (1, 1))
                self.assertEqual(found["gpu_mma_test"]["tails"], ["words\n"])
                self.assertRegex(text, r"gpu_mma_test sm_75 +1 +0 +0 +0 +0 +1 ")
                time.sleep(1.6)
                self.assertFalse((self.build / "tests/gpu_mma_test.child").exists())
                with tarfile.open(archive) as logs:
                    self.assertIn("gpu_tests/gpu_decode_test.0.log", logs.getnames())
            rows.unlink()

    def test_small_tests_run_under_compute_sanitizer(self):
        self.write("gpu_decode_test", "exit 0", tests=1)
        self.write("compute-sanitizer", 'echo "$2 $TESSERA_TEST_REPETITIONS $*" >> $0.ran; '
                   'if [ $2 = racecheck ]; then echo "========= RACECHECK SUMMARY: 2 hazards"; exit 99; fi', place="tools")
        path = {"PATH": str(self.build / "tools") + ":/usr/bin:/bin", "CUDA_HOME": "/nowhere"}
        with mock.patch.dict(gpu_tests.os.environ, path):
            status, rows, _ = self.run_tool("--only", "check decode")
        self.assertEqual(status, 1)
        self.assertEqual([rows[name + "check decode"]["ok"] for name in ("mem", "race", "sync")], [1, 0, 1])
        self.assertEqual(rows["racecheck decode"]["failures"], ["RACECHECK SUMMARY: 2 hazards"])
        ran = sorted((self.build / "tools/compute-sanitizer.ran").read_text().splitlines())
        self.assertEqual([line.partition(" --")[0] for line in ran], ["memcheck 2", "racecheck 2", "synccheck 2"])
        self.assertIn("gpu_decode_test --gtest_filter=*GpuDecodePages", ran[0])

    def test_filters_of_compute_sanitizer_name_tests(self):
        for program, tests in gpu_tests.SANITIZED.values():
            text = (ROOT / f"tests/gpu/{program}.cpp").read_text()
            for one in tests.split(":"):
                suite, name = one.split("/")[0].strip("*").split(".")
                self.assertRegex(text, rf"TEST(_P|_F)?\({suite}, {name.strip('*')}")

    def test_benchmarks_get_their_own_limits(self):
        self.write("libtessera.so", "", place="src")
        python = self.build / "python"
        python.write_text('#!/bin/sh\necho "$*" >> "$0.ran"\necho "left for want of time: D=64 full N=512"\n')
        python.chmod(0o755)
        words = ("--only", "bench peers,bench errors", "--bench-share", "1")
        with mock.patch.object(gpu_tests.sys, "executable", str(python)):
            status, rows, _ = self.run_tool(*words, "--limit", "400")
            self.assertEqual((status, rows["bench peers"]["stopped"], rows["bench errors"]["stopped"]), (1, 1, 1))
            limits = list(map(int, re.findall(r"--limit (\d+)", python.with_suffix(".ran").read_text())))
            self.assertTrue(330 <= limits[0] <= 340 and limits[1] == 153, limits)
            status, rows, _ = self.run_tool(*words, "--limit", "44")
        self.assertEqual([row["not begun"] for row in rows.values()], [1, 1])

    def test_only(self):
        self.write("gpu_a_test", "exit 0")
        self.write("gpu_decode_test", "exit 0")
        self.assertEqual(list(self.run_tool("--only", "gpu_decode")[1]), ["gpu_decode_test"])
        with self.assertRaisesRegex(SystemExit, "there is no program"):
            self.run_tool("--only", "none")


if __name__ == "__main__":
    unittest.main()
