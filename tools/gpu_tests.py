#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what needs a GPU within a time limit: the tests of tests/gpu in shards side by side, the Python tests with the
mark gpu, then benchmarks, one at a time. Ends with a table of what ran, what passed and what did not begin.

    python3 tools/gpu_tests.py [BUILD] [--limit SECONDS] [--jobs N] [--only WORD,...] [--json FILE]
    python3 tools/gpu_tests.py build --without benches --limit 900
    python3 tools/gpu_tests.py build --only decode,append

Most important first: what has waited longest for a GPU. Every shard has a time limit of its own, the Python tests twice
that, and tests end in time for the benchmarks' share of the limit (--bench-share). BUILD needs nothing but the
programs: neither CMake nor ctest. Logs go to BUILD/gpu_tests/. Exit status: 0 all passed, 1 something failed, was
stopped or did not begin, 77 nothing could run. Python's standard library only. See docs/testing.md.
"""
import argparse
import concurrent.futures
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77
# Of programs and of benchmarks; what is named nowhere comes behind, by name.
FIRST = ("gpu_decode_test", "gpu_mma_test", "python", "gpu_cases_test", "gpu_invariance_test", "gpu_memory_test",
         "gpu_sizes_test", "gpu_append_test", "gpu_calls_test", "gpu_ptx_test", "gpu_hopper_test",
         "gpu_hopper_backward_test")
# What has variants that wait to be measured: docs/experiments.md.
TURNS = ("mma_one_pass", "mma_one_pass_block", "mma_one_pass_two", "mma_one_pass-fast")
# Classes of mma's tiles that no GPU here has by itself: src/mma/tiles.hpp.
MMA_TILES = ("sm_80", "sm_89", "sm_75")
VULKAN_TILES = ("8x8x4x64x8", "16x16x4x32x16", "16x16x4x32x8", "8x16x8x32x8", "16x16x8x32x16")


class Job(NamedTuple):
    """One process: a shard of a program, or a benchmark."""
    name: str
    shard: int
    shards: int
    command: tuple
    environment: dict
    timeout: float


class Done(NamedTuple):
    job: Job
    status: str  # ok, failed, stopped (at its time limit), skipped, not begun
    seconds: float
    failures: tuple = ()


def tests_of(program, environment):
    """How many tests a GoogleTest program has; None: it cannot run here, and says so by its status."""
    done = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, env=environment, timeout=120)
    if done.returncode == SKIPPED:
        return None
    if done.returncode:
        raise RuntimeError(f"{program}: --gtest_list_tests ends with status {done.returncode}")
    return sum(line.startswith("  ") for line in done.stdout.splitlines())


def rank(name):
    program = name.split()[0]
    return (FIRST.index(program) if program in FIRST else len(FIRST), name)


def tiles_of(name):
    """What a job's name says of tiles, as an environment."""
    program, *tile = name.removeprefix("bench ").split()
    variable = {"vulkan": "TESSERA_VULKAN_TILE", "mma": "TESSERA_TILES", "gpu_mma_test": "TESSERA_TILES"}.get(program)
    return {variable: tile[0]} if variable and tile else {}


def wanted(name, arguments):
    return ((not arguments.only or any(word in name for word in arguments.only))
            and not any(word in name for word in arguments.without))


def has_vulkan_gpu(build):
    """Whether the first Vulkan device is a GPU: Mesa has drivers that run on the processor."""
    try:
        told = subprocess.run([build / "cli/tessera", "info"], capture_output=True, text=True, timeout=120).stdout
    except OSError:
        return False
    return re.search(r"^Vulkan +vulkan:0 (?!llvmpipe|SwiftShader)", told, re.M) is not None


def vulkan_tests(build):
    """All but those on a Vulkan that is not there."""
    found = [path for path in build.glob("tests/vulkan_*_test") if path.name != "vulkan_faults_test"]
    return found if found and has_vulkan_gpu(build) else []


def test_jobs(build, arguments):
    """Shards of every program build/tests/gpu_*_test and of Vulkan's, the Python tests; and names of what is skipped."""
    environment = {**os.environ, "TESSERA_CACHE": str(build / "gpu_kernels")}
    jobs, skipped = [], []
    programs = [*build.glob("tests/gpu_*_test"), *vulkan_tests(build)]
    for program in sorted(programs, key=lambda path: rank(path.name)):
        if not wanted(program.name, arguments):
            continue
        count = tests_of(program, environment)
        shards = min(count or 1, 2 * arguments.jobs)
        if count is None:
            skipped.append(program.name)
            continue
        names = [program.name, *(f"{program.name} {tile}" for tile in MMA_TILES if program.name == "gpu_mma_test")]
        jobs += [Job(name, n, shards, (str(program), "--gtest_brief=1"),
                     {**environment, **tiles_of(name), "GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(n)},
                     arguments.shard_timeout) for name in names for n in range(shards)]
    tests, library = ROOT / "python/tests", build / "src/libtessera.so"
    if wanted("python", arguments) and library.exists():
        if all(importlib.util.find_spec(module) for module in ("pytest", "torch")):
            jobs.append(Job("python", 0, 1, (sys.executable, "-m", "pytest", "-v", "-m", "gpu", str(tests)),
                            {**environment, "TESSERA_LIBRARY": str(library), "PYTHONPATH": str(ROOT / "python"),
                             "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # JAX leaves the other tests their memory
                            2 * arguments.shard_timeout))
        else:
            skipped.append("python")
    return sorted(jobs, key=lambda job: rank(job.name)), skipped


def bench_jobs(build, logs, arguments):
    """Benchmarks, the most wanted first. Each gets what is left of the time, decode_peers half of the benchmarks' share:
    it begins no point after that, and still prints its tables."""
    tessera, python = str(build / "cli/tessera"), sys.executable
    report = lambda name: ("--json", str(logs / f"{name}.json"))
    found = [("bench decode", (tessera, "bench", "--suite", "decode", *report("decode"))),
             ("bench decode_peers", (python, str(ROOT / "bench/decode_peers.py"), "--library",
                                     str(build / "src/libtessera.so"), "--reading",
                                     str(build / "bench/libtessera_reading.so"), "--direct", "--limit",
                                     str(arguments.limit * arguments.bench_share / 2), *report("decode_peers"))),
             ("bench turns", (python, str(ROOT / "bench/peers.py"), "--library", str(build / "src/libtessera.so"),
                              "--passes", "backward", "--without", "cudnn,fa3", *report("turns"),
                              *(word for name in TURNS for word in ("--kernel", name)))),
             *((f"bench vulkan {tile}", (tessera, "bench", "--device", "vulkan", "--suite", "gpu", "--kernel", "vk_tiled",
                                         *report(f"vulkan_{tile}"))) for tile in VULKAN_TILES),
             ("bench vulkan_matrix", (tessera, "bench", "--device", "vulkan", "--suite", "gpu", "--kernel", "vk_matrix",
                                      *report("vulkan_matrix"))),
             ("bench vulkan_beside_cuda", (tessera, "bench", "--suite", "gpu", "--kernel", "vector_fma",
                                           *report("vulkan_beside_cuda"))),
             *((f"bench mma {tile}".rstrip(), (python, str(ROOT / "bench/peers.py"), "--library",
                                              str(build / "src/libtessera.so"), "--without", "cudnn,fa3", "--kernel",
                                              "mma", "--kernel", "vector", "--passes", "forward", "--limit", "120",
                                              *report(f"mma_{tile}".rstrip("_"))))
               for tile in ("", *MMA_TILES[:2])),  # sm_75 has no bf16
             ("bench calls", (tessera, "dist", "measure", "--device", "cuda", "--slices", "8", "--out",
                              str(logs / "calls.txt"))),
             ("bench gpu", (tessera, "bench", "--suite", "gpu", *report("gpu"))),
             ("bench ladder", (tessera, "bench", "--suite", "ladder", *report("ladder")))]
    environment = {**os.environ, "TESSERA_CACHE": str(build / "gpu_kernels")}
    if "benches" in arguments.without:
        return []
    return [Job(name, 0, 1, command, {**environment, **tiles_of(name)}, float("inf")) for name, command in found
            if wanted(name, arguments)]


def run(job, logs, seconds):
    """The process in a group of its own, which ends with it; its output in a file."""
    log = logs / f"{job.name.replace(' ', '_')}.{job.shard}.log"
    begin = time.monotonic()
    with open(log, "w", encoding="utf-8") as out:
        try:
            process = subprocess.Popen(job.command, stdout=out, stderr=subprocess.STDOUT, env=job.environment,
                                       start_new_session=True)
        except OSError as error:
            out.write(f"{error}\n")
            return Done(job, "failed", 0.0, (str(error),))
        try:
            status = process.wait(timeout=seconds if seconds != float("inf") else None)
            word = {0: "ok", SKIPPED: "skipped", 5: "skipped" if job.name == "python" else "failed"}.get(status, "failed")
        except subprocess.TimeoutExpired:
            word = "stopped"
        try:
            os.killpg(process.pid, signal.SIGKILL)  # what it may have left
        except ProcessLookupError:
            pass
        process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    failures = tuple(dict.fromkeys(re.findall(r"^(?:\[  FAILED  \]|FAILED) ([^\s,]+)", text, re.M)))
    return Done(job, word, time.monotonic() - begin, failures)


def run_all(jobs, workers, end, logs, say):
    """In their order, so many at a time, until `end`, a time of time.monotonic. What is left did not begin."""
    done = []

    def turn(job):
        left = end - time.monotonic()
        if left <= 0:
            return Done(job, "not begun", 0.0)
        return run(job, logs, min(job.timeout, left))

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for future in concurrent.futures.as_completed([pool.submit(turn, job) for job in jobs]):
            done.append(future.result())
            if done[-1].status not in ("ok", "not begun"):
                say(f"{done[-1].job.name}.{done[-1].job.shard}: {done[-1].status} after {done[-1].seconds:.0f} s "
                    + " ".join(done[-1].failures))
    return done


def summary(done, skipped):
    """A row for each name, in the order of importance: counts of shards by what became of them."""
    rows = {name: {"name": name, "shards": 0, "ok": 0, "failed": 0, "stopped": 0, "skipped": 1, "not begun": 0,
                   "seconds": 0.0, "failures": []} for name in skipped}
    for x in done:
        row = rows.setdefault(x.job.name, {"name": x.job.name, "shards": x.job.shards, "ok": 0, "failed": 0,
                                           "stopped": 0, "skipped": 0, "not begun": 0, "seconds": 0.0, "failures": []})
        row[x.status] += 1
        row["seconds"] = round(row["seconds"] + x.seconds, 1)
        row["failures"] += [name for name in x.failures if name not in row["failures"]]
    return sorted(rows.values(), key=lambda row: (row["name"].startswith("bench"), rank(row["name"])))


def table(rows):
    heads = ("shards", "ok", "failed", "stopped", "skipped", "not begun", "seconds")
    lines = [f"{'':28}" + "".join(f"{head:>11}" for head in heads)]
    for row in rows:
        lines.append(f"{row['name']:28}" + "".join(f"{row[head]:>11}" for head in heads))
        lines += [f"    failed: {name}" for name in row["failures"]]
    return "\n".join(lines)


def exit_status(rows):
    if any(row["failed"] or row["stopped"] or row["not begun"] for row in rows) or not rows:
        return 1
    return 0 if any(row["ok"] for row in rows) else SKIPPED


class Arguments(NamedTuple):
    build: Path
    limit: float
    jobs: int
    shard_timeout: float
    bench_share: float
    only: tuple
    without: tuple
    json: Optional[str]


def parse_arguments(words=None):
    split = lambda text: tuple(text.split(","))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", nargs="?", default=ROOT / "build", type=lambda text: Path(text).resolve())
    parser.add_argument("--limit", type=float, default=1500, help="seconds for all of it (1500)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="shards side by side (all processors)")
    parser.add_argument("--shard-timeout", type=float, default=300, help="seconds of a shard (300); Python: twice that")
    parser.add_argument("--bench-share", type=float, default=0.4, help="of the limit, for benchmarks (0.4)")
    parser.add_argument("--only", type=split, default=(), help="words; names that contain one: decode,append")
    parser.add_argument("--without", type=split, default=(), help="the same, left out; benches: all benchmarks")
    parser.add_argument("--json", metavar="FILE", help="write the table's rows to this file")
    found = Arguments(**vars(parser.parse_args(words)))
    if found.jobs < 1 or found.limit <= 0 or not 0 <= found.bench_share < 1:
        parser.error("--jobs must be 1 or more, --limit above 0, --bench-share from 0 to below 1")
    return found


def main(words=None):
    arguments = parse_arguments(words)
    begin, logs = time.monotonic(), arguments.build / "gpu_tests"
    logs.mkdir(parents=True, exist_ok=True)
    say = lambda text: print(text, flush=True)
    jobs, skipped = test_jobs(arguments.build, arguments)
    benches = bench_jobs(arguments.build, logs, arguments)
    if not jobs and not skipped and not benches:
        sys.exit(f"{arguments.build}: there is no program tests/gpu_*_test; build it, or name another folder")
    if skipped and not jobs:
        benches = []  # there is no GPU
    share = arguments.bench_share if benches else 0
    done = run_all(jobs, arguments.jobs, begin + arguments.limit * (1 - share), logs, say)
    done += run_all(benches, 1, begin + arguments.limit, logs, say)
    rows = summary(done, skipped)
    say("\n" + table(rows) + f"\n\n{time.monotonic() - begin:.0f} s; logs in {logs}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
