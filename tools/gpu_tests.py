#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs what needs a GPU within a time limit: the tests of tests/gpu in shards side by side, the Python tests with the
mark gpu, a few small tests under compute-sanitizer, then benchmarks, one at a time. Ends with a table of what ran, what
passed and what did not begin.

    python3 tools/gpu_tests.py [BUILD] [--limit SECONDS] [--jobs N] [--only WORD,...] [--json FILE]
    python3 tools/gpu_tests.py build --without benches --limit 900
    python3 tools/gpu_tests.py build --json rows.json --resume rows.json --archive logs.tar.gz

Most important first: what has waited longest for a GPU. Every shard has a time limit of its own, the Python tests
twice that, every benchmark its own; tests end in time for the benchmarks' share of the limit (--bench-share). Rows are
written whenever a shard has ended, so whatever ends this program loses none; SIGTERM ends it with its table. --resume
leaves out what an earlier run's rows say has passed: several short runs are as good as a long one. BUILD needs nothing
but the programs: neither CMake nor ctest. Logs and the benchmarks' reports go to BUILD/gpu_tests/, and as one file to
--archive. Exit status: 0 all passed, 1 something failed, was stopped or did not begin, 77 nothing could run. Python's
standard library only. See docs/testing.md.
"""
import argparse
import concurrent.futures
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77
# Of jobs, by name or by its first word; what is named nowhere comes behind, by name.
FIRST = ("gpu_decode_test", "gpu_append_test", "python", "gpu_mma_test", "memcheck", "racecheck", "synccheck",
         "gpu_cases_test", "gpu_invariance_test", "gpu_memory_test", "gpu_sizes_test", "gpu_mma_test sm_80",
         "gpu_mma_test sm_89", "gpu_mma_test sm_75", "gpu_calls_test", "gpu_ptx_test", "gpu_hopper_test",
         "gpu_hopper_backward_test")
# In order and in any order: what the order costs. docs/experiments.md, "Turns passed on by blocks".
TURNS = ("mma_one_pass", "mma_one_pass-fast")
# Classes of mma's tiles that no GPU here has by itself: src/mma/tiles.hpp.
MMA_TILES = ("sm_80", "sm_89", "sm_75")
VULKAN_TILES = ("8x8x4x64x8", "16x16x4x32x16", "16x16x4x32x8", "8x16x8x32x8", "16x16x8x32x16")
# Small tests of a program for compute-sanitizer, under which everything takes many times as long: kernels that have
# changed since they ran under it. The Hopper kernels' reports are told of in docs/testing.md.
SANITIZED = {"decode": ("gpu_decode_test", "*GpuDecodePages.HaveTheBits*/2:Decode.EntriesOutside*:Decode.AGraph*"),
             "append": ("gpu_append_test", "*GpuServing.*"),
             "mma": ("gpu_mma_test", "*GpuMmaTurns.*/6:*GpuMmaCompany.*/1:*GpuMmaCompany.*/3")}
SANITIZERS = ("memcheck", "racecheck", "synccheck")
LIMIT = "LIMIT"  # in a benchmark's command: the seconds after which it begins no further point


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
    tail: str = ""  # of its log, unless all is well


def tests_of(program, environment):
    """How many tests a GoogleTest program has; None: it cannot run here, and says so by its status."""
    done = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, env=environment, timeout=120)
    if done.returncode == SKIPPED:
        return None
    if done.returncode:
        raise RuntimeError(f"{program}: --gtest_list_tests ends with status {done.returncode}")
    return sum(line.startswith("  ") for line in done.stdout.splitlines())


def rank(name):
    key = name if name in FIRST else name.split()[0]
    return (FIRST.index(key) if key in FIRST else len(FIRST), name)


def tiles_of(name):
    """What a job's name says of tiles, as an environment."""
    program, *tile = name.removeprefix("bench ").split()
    variable = {"vulkan": "TESSERA_VULKAN_TILE", "mma": "TESSERA_TILES", "gpu_mma_test": "TESSERA_TILES"}.get(program)
    return {variable: tile[0]} if variable and tile else {}


def wanted(name, arguments):
    return ((not arguments.only or any(word in name for word in arguments.only))
            and not any(word in name for word in arguments.without))


def program_jobs(program, environment, arguments):
    """Shards of a GoogleTest program; the name alone if it cannot run here, and what is wrong if it does not say so."""
    names = [name for name in (program.name, *(f"{program.name} {tile}" for tile in MMA_TILES
                                               if program.name == "gpu_mma_test")) if wanted(name, arguments)]
    if not names:
        return []
    try:
        count = tests_of(program, environment)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return [Done(Job(program.name, 0, 1, (), {}, 0), "failed", 0.0, (str(error),))]
    if count is None:
        return [program.name]
    shards = min(count or 1, 2 * arguments.jobs)
    return [Job(name, n, shards, (str(program), "--gtest_brief=1"),
                {**environment, **tiles_of(name), "GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(n)},
                arguments.shard_timeout) for name in names for n in range(shards)]


def python_jobs(build, environment, arguments):
    """The files of Python tests in which the mark gpu stands, one process each."""
    tests, library = ROOT / "python/tests", build / "src/libtessera.so"
    files = [path for path in sorted(tests.glob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    named = [(f"python {path.stem.removeprefix('test_')}", path) for path in files]
    named = [(name, path) for name, path in named if wanted(name, arguments)]
    if not named or not library.exists():
        return []
    if not all(importlib.util.find_spec(module) for module in ("pytest", "torch")):
        return ["python"]
    environment = {**environment, "TESSERA_LIBRARY": str(library), "PYTHONPATH": str(ROOT / "python"),
                   "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # JAX leaves the other tests their memory
    return [Job(name, 0, 1, (sys.executable, "-m", "pytest", "-v", "-m", "gpu", str(path)), environment,
                2 * arguments.shard_timeout) for name, path in named]


def sanitizer_jobs(build, environment, arguments):
    """A process for each of SANITIZED and each tool; their names where there is no compute-sanitizer."""
    folders = (f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin", "/usr/local/cuda/compute-sanitizer")
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *folders)))
    found = []
    for which in SANITIZERS:
        for what, (program, tests) in SANITIZED.items():
            path = build / "tests" / program
            if not path.exists() or not wanted(f"{which} {what}", arguments):
                continue
            found.append(Job(f"{which} {what}", 0, 1, (tool, "--tool", which, "--error-exitcode", "99", "--print-limit",
                                                       "5", str(path), f"--gtest_filter={tests}"),
                             {**environment, "TESSERA_LINEINFO": "1", "TESSERA_TEST_REPETITIONS": "2"},
                             arguments.shard_timeout) if tool else f"{which} {what}")
    return found


def has_vulkan_gpu(build):
    """Whether the first Vulkan device is a GPU: Mesa has drivers that run on the processor."""
    try:
        told = subprocess.run([build / "cli/tessera", "info"], capture_output=True, text=True, timeout=120).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return re.search(r"^Vulkan +vulkan:0 (?!llvmpipe|SwiftShader)", told, re.M) is not None


def vulkan_tests(build):
    """All but those on a Vulkan that is not there."""
    found = [path for path in build.glob("tests/vulkan_*_test") if path.name != "vulkan_faults_test"]
    return found if found and has_vulkan_gpu(build) else []


def test_jobs(build, arguments):
    """Shards of every program build/tests/gpu_*_test and of Vulkan's, the Python tests and compute-sanitizer's; names
    of what is skipped whole; and what could not even be listed."""
    environment = {**os.environ, "TESSERA_CACHE": str(build / "gpu_kernels")}
    programs = sorted([*build.glob("tests/gpu_*_test"), *vulkan_tests(build)])
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        lists = list(pool.map(lambda program: program_jobs(program, environment, arguments), programs))
    if not any(isinstance(x, str) for x in sum(lists, [])):  # else there is no GPU
        lists.append(sanitizer_jobs(build, environment, arguments))
    found = sum([*lists, python_jobs(build, environment, arguments)], [])
    of = lambda kind: [x for x in found if isinstance(x, kind)]
    return sorted(of(Job), key=lambda job: rank(job.name)), of(str), of(Done)


def bench_jobs(build, logs, arguments):
    """Benchmarks, the most wanted first, with the seconds that each gets at most. Those with a limit of their own end
    by themselves before that, with their tables."""
    tessera, python, library = str(build / "cli/tessera"), sys.executable, str(build / "src/libtessera.so")
    file = lambda name: str(logs / f"{name.replace(' ', '_')}.json")

    def peers(name, seconds, *words):
        return (f"bench {name}", seconds, (python, str(ROOT / "bench/peers.py"), "--library", library, "--limit", LIMIT,
                                           "--json", file(name), *words))

    def ours(name, seconds, *words):
        return f"bench {name}", seconds, (tessera, "bench", *words, "--json", file(name))

    kernels = lambda *names: tuple(word for name in names for word in ("--kernel", name))
    found = [ours("decode", 120, "--suite", "decode"),
             ("bench decode_peers", 300, (python, str(ROOT / "bench/decode_peers.py"), "--library", library,
                                          "--reading", str(build / "bench/libtessera_reading.so"), "--queue",
                                          "--limit", LIMIT, "--json", file("decode_peers"))),
             peers("turns", 240, "--passes", "backward", "--without", "cudnn,fa3", *kernels(*TURNS)),
             peers("peers", 420),
             peers("sustained", 300, "--sustained"),
             peers("errors", 180, "--errors"),
             peers("mma", 150, "--without", "cudnn,fa3", "--passes", "forward", *kernels("mma", "vector")),
             *(peers(f"mma {tile}", 150, "--without", "cudnn,fa3", *kernels("mma"),
                     *(("--type", "float16") if tile == "sm_75" else ())) for tile in MMA_TILES),  # sm_75 has no bf16
             *(ours(f"vulkan {tile}", 60, "--device", "vulkan", "--suite", "gpu", "--kernel", "vk_tiled")
               for tile in VULKAN_TILES),
             ours("vulkan_matrix", 60, "--device", "vulkan", "--suite", "gpu", "--kernel", "vk_matrix"),
             ours("vulkan_beside_cuda", 60, "--suite", "gpu", "--kernel", "vector_fma"),
             ("bench calls", 120, (tessera, "dist", "measure", "--device", "cuda", "--slices", "8", "--out",
                                   str(logs / "calls.txt"))),
             ours("gpu", 120, "--suite", "gpu"),
             ours("ladder", 120, "--suite", "ladder")]
    environment = {**os.environ, "TESSERA_CACHE": str(build / "gpu_kernels")}
    if "benches" in arguments.without:
        return []
    return [Job(name, 0, 1, command, {**environment, **tiles_of(name)}, seconds) for name, seconds, command in found
            if wanted(name, arguments)]


# --- processes

LEAST = 45.0  # seconds: a benchmark with a limit of its own that has fewer would only begin
LAST_POINT = 0.85  # of a benchmark's time: no point begins after that
# Of this session, with which it ends; older Pythons can only give it one of its own.
OWN_GROUP = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
stopping = threading.Event()
running = set()  # processes


def end_group(process):
    """The process and what it may have left. One that not even SIGKILL ends (in the driver, say) is not waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        pass


def run(job, logs, seconds):
    """The process in a group of its own, which ends with it; its output in a file."""
    log = logs / f"{job.name.replace(' ', '_')}.{job.shard}.log"
    command = [f"{seconds * LAST_POINT:.0f}" if word == LIMIT else word for word in job.command]
    begin = time.monotonic()
    with open(log, "w", encoding="utf-8") as out:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                       env=job.environment, **OWN_GROUP)
        except OSError as error:
            out.write(f"{error}\n")
            return Done(job, "failed", 0.0, (str(error),))
        running.add(process)
        try:
            if stopping.is_set():  # since the caller looked
                end_group(process)
            status = process.wait(timeout=seconds)
            word = {0: "ok", SKIPPED: "skipped", 5: "skipped" if job.name.startswith("python") else "failed"}.get(
                status, "failed")
        except subprocess.TimeoutExpired:
            word = "stopped"
        end_group(process)
        running.discard(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    failures = re.findall(r"^(?:\[  FAILED  \]|FAILED) ([^\s,]+)", text, re.M)
    failures += re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: (?!0 ).*)", text, re.M)
    if word == "ok" and (left := re.search(r"^left for want of time.*|.*; [1-9]\d* points did not begin", text, re.M)):
        word, failures = "stopped", [left[0]]
    if stopping.is_set() and word == "failed":
        word = "stopped"
    if word == "failed" and not failures:
        failures = text.strip().splitlines()[-1:]  # its last words
    return Done(job, word, time.monotonic() - begin, tuple(dict.fromkeys(failures)),
                "" if word in ("ok", "skipped") else text[-2000:])


def run_all(jobs, workers, end, logs, note):
    """In their order, so many at a time, until `end`, a time of time.monotonic. What is left did not begin. `note` is
    called with each that has ended."""

    def turn(job):
        left = end - time.monotonic()
        if stopping.is_set() or left <= (LEAST if LIMIT in job.command else 0):
            return Done(job, "not begun", 0.0)
        return run(job, logs, min(job.timeout, left))

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for future in concurrent.futures.as_completed([pool.submit(turn, job) for job in jobs]):
            note(future.result())


# --- results

def summary(done, skipped):
    """A row for each name, in the order of importance: counts of shards by what became of them, which have passed, and
    the ends of a few logs."""
    new = lambda name, shards, skipped: {"name": name, "shards": shards, "ok": 0, "failed": 0, "stopped": 0,
                                         "skipped": skipped, "not begun": 0, "seconds": 0.0, "failures": [],
                                         "passed": [], "tails": []}
    rows = {name: new(name, 0, 1) for name in skipped}
    for x in done:
        row = rows.setdefault(x.job.name, new(x.job.name, x.job.shards, 0))
        row[x.status] += 1
        row["seconds"] = round(row["seconds"] + x.seconds, 1)
        row["failures"] += [name for name in x.failures if name not in row["failures"]]
        row["passed"] += [x.job.shard] if x.status == "ok" else []
        row["tails"] += [x.tail] if x.tail and len(row["tails"]) < 3 else []
    return sorted(rows.values(), key=lambda row: (row["name"].startswith("bench"), rank(row["name"])))


def passed_before(path):
    """(name, shards, shard) of what has passed by the rows of an earlier run; of none, if the file is not there yet."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else []
    return {(row["name"], row["shards"], shard) for row in rows for shard in row["passed"]}


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


def write_whole(path, write):
    """A file that is there whole, or as it was before."""
    new = path.with_name(path.name + ".new")
    write(new)
    new.replace(path)


class Results:
    """What has ended so far: printed if it is not well, and written to the files that were asked for."""

    def __init__(self, skipped, logs, arguments):
        self.done, self.skipped, self.logs, self.arguments = [], skipped, logs, arguments

    def note(self, x):
        self.done.append(x)
        if x.status not in ("ok", "not begun"):
            print(f"{x.job.name}.{x.job.shard}: {x.status} after {x.seconds:.0f} s " + " ".join(x.failures), flush=True)
        if x.status != "not begun":
            self.save_rows()
        if x.job.name.startswith("bench") and x.status != "not begun":
            self.save_archive()

    def rows(self):
        return summary(self.done, self.skipped)

    def save_rows(self):
        if self.arguments.json:
            text = json.dumps(self.rows(), indent=1) + "\n"
            write_whole(self.arguments.json, lambda new: new.write_text(text, encoding="utf-8"))

    def save_archive(self):
        def write(new):
            with tarfile.open(new, "w:gz") as archive:
                archive.add(self.logs, self.logs.name)

        if self.arguments.archive:
            write_whole(self.arguments.archive, write)


# --- the program

class Arguments(NamedTuple):
    build: Path
    limit: float
    jobs: int
    shard_timeout: float
    bench_share: float
    only: tuple
    without: tuple
    json: Optional[Path]
    resume: Optional[Path]
    archive: Optional[Path]


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
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table's rows to this file, as they come")
    parser.add_argument("--resume", metavar="FILE", type=Path, help="rows of an earlier run: what passed is left out")
    parser.add_argument("--archive", metavar="FILE", type=Path, help="write all logs to this .tar.gz, after the tests "
                        "and after each benchmark")
    found = Arguments(**vars(parser.parse_args(words)))
    if found.jobs < 1 or found.limit <= 0 or not 0 <= found.bench_share <= 1:
        parser.error("--jobs must be 1 or more, --limit above 0, --bench-share from 0 to 1")
    return found


def stop(*_):
    stopping.set()
    for process in list(running):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def main(words=None):
    arguments = parse_arguments(words)
    stopping.clear()
    begin, logs = time.monotonic(), arguments.build / "gpu_tests"
    logs.mkdir(parents=True, exist_ok=True)
    before = passed_before(arguments.resume)
    jobs, skipped, unlisted = test_jobs(arguments.build, arguments)
    benches = bench_jobs(arguments.build, logs, arguments)
    if not jobs and not skipped and not unlisted and not benches:
        sys.exit(f"{arguments.build}: there is no program tests/gpu_*_test; build it, or name another folder")
    if skipped and not jobs:
        benches = []  # there is no GPU
    results = Results(skipped, logs, arguments)
    is_new = lambda job: (job.name, job.shards, job.shard) not in before
    results.done = [*unlisted, *(Done(job, "ok", 0.0) for job in [*jobs, *benches] if not is_new(job))]
    jobs, benches = list(filter(is_new, jobs)), list(filter(is_new, benches))
    share = arguments.bench_share if benches else 0
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    run_all(jobs, arguments.jobs, begin + arguments.limit * (1 - share), logs, results.note)
    results.save_archive()
    if results.done and all(x.status == "skipped" for x in results.done):
        benches = []  # there is no GPU
    run_all(benches, 1, begin + arguments.limit, logs, results.note)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    results.save_rows()
    rows = results.rows()
    print("\n" + table(rows) + f"\n\n{time.monotonic() - begin:.0f} s; logs in {logs}", flush=True)
    results.save_archive()
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
