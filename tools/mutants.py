#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Do the tests notice? Applies each fault of tools/mutants/*.toml to a copy of the tree, one at a time, rebuilds what
# the test named beside it needs, and expects that test to fail. Usage: tools/mutants.py [--check | --list] [NAME...]
# Called by `make mutants`, and with --check by tests/tree_test.py; Python's standard library only. See docs/testing.md.
import argparse
import filecmp
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build-mutants"
TREE, BUILD = WORK / "tree", WORK / "build"
COPIED = ["CMakeLists.txt", "cmake", "include", "src", "cases", "tests", "cli", "bench", "examples",
          "python/native"]
JOBS = str(os.cpu_count() or 1)
TEST_SECONDS = 300
SKIPPED = 77  # the status of a program whose tests are all skipped: tests/support/main.hpp


def read_list():
    mutants = []
    for path in sorted((ROOT / "tools/mutants").glob("*.toml")):
        mutants += tomllib.loads(path.read_text())["mutant"]
    return mutants


def known_tests():
    """Names of test programs, and of GoogleTest tests without parameters, by their text: nothing is built for it."""
    registered = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.cmake"))
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.cpp"))
    tests = re.findall(r"^TEST(?:_F)?\((\w+), (\w+)\)", written, re.M)
    return set(re.findall(r"\b\w+_test\b", registered)), [f"{suite}.{name}" for suite, name in tests]


def text_errors(mutants):
    """A fault must fit the tree: every field is given, its old text is there exactly once, and so is its test."""
    programs, tests = known_tests()
    for m in mutants:
        missing = {"name", "file", "old", "new", "test", "why"} - m.keys()
        if missing:
            yield f"{m.get('name', m)}: lacks {', '.join(sorted(missing))}"
            continue
        path = ROOT / m["file"]
        found = path.read_text().count(m["old"]) if path.is_file() else 0
        if found != 1:
            yield f"{m['name']}: its old text is {found} times in {m['file']}; must be once: {m['old']}"
        if m["old"] == m["new"]:
            yield f"{m['name']}: changes nothing"
        program, _, chosen = m["test"].partition(":")
        if program not in programs:
            yield f"{m['name']}: there is no test program {program}"
        elif re.fullmatch(r"\w+\.[\w*]+", chosen) and not fnmatch.filter(tests, chosen):
            yield f"{m['name']}: there is no test {chosen}"
    names = [m["name"] for m in mutants if "name" in m]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"{name}: is there twice"


def copy_tree():
    """Brings the copy up to date. Files that are the same keep their times, so that builds stay incremental."""
    wanted = set()
    for top in COPIED:
        source = ROOT / top
        for path in [source] if source.is_file() else sorted(source.rglob("*")):
            if not path.is_file() or "__pycache__" in path.parts:
                continue
            target = TREE / path.relative_to(ROOT)
            wanted.add(target)
            if not target.exists() or not filecmp.cmp(path, target, shallow=False):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
                shutil.copymode(path, target)
    for path in [p for p in TREE.rglob("*") if p.is_file() and p not in wanted]:
        path.unlink()


def run(command, seconds=None, **more):
    """Exit status and output; a command that takes too long is ended with all its children: status None."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                          start_new_session=True, **more) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output


def build(targets):
    status, output = run(["cmake", "--build", BUILD, "-j", JOBS, "--target", *targets])
    return status == 0, output


def target_of(test):
    return test.split(":")[0]


def run_test(test):
    """`executable` or `executable:GoogleTest filter`."""
    name, _, chosen = test.partition(":")
    command = [BUILD / "tests" / name]
    if name != "c_api_test":
        command += ["--gtest_brief=1", "--gtest_fail_fast", f"--gtest_filter={chosen or '*'}"]
    return run(command, TEST_SECONDS)


def judge(m):
    """("killed" | "survived" | "not judged" | "not built", remark)"""
    path = TREE / m["file"]
    original = path.read_text()
    path.write_text(original.replace(m["old"], m["new"]))
    try:
        built, output = build([target_of(m["test"])])
        if not built:
            return "not built", output[-2000:]
        status, output = run_test(m["test"])
        if status == SKIPPED or status == 0 and "[  SKIPPED ]" in output:
            return "not judged", "tests are skipped on this machine, and no other fails"
        if status == 0:
            return "survived", ""
        return "killed", "took too long" if status is None else f"signal {-status}" if status < 0 else ""
    finally:
        path.write_text(original)  # with a new time, so that the next build sees it


def baseline(mutants):
    """Every test that a fault names passes on the tree as it is, or is skipped; otherwise its failure would mean
    nothing."""
    targets = sorted({target_of(m["test"]) for m in mutants})
    built, output = build(targets)
    if not built:
        sys.exit("the tree itself does not build:\n" + output[-4000:])
    for test in sorted({m["test"] for m in mutants}):
        status, output = run_test(test)
        if status not in (0, SKIPPED):
            sys.exit(f"{test} fails without any fault:\n{output[-4000:]}")
        if " 0 tests" in output:
            sys.exit(f"{test} selects no test")


def main():
    parser = argparse.ArgumentParser(description="Applies deliberate faults, one at a time; a test must notice each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--check", action="store_true", help="only check that the faults fit the tree; builds nothing")
    parser.add_argument("--list", action="store_true", help="show the faults and the tests that must notice them")
    arguments = parser.parse_args()

    mutants = read_list()
    errors = list(text_errors(mutants))
    unknown = set(arguments.names) - {m.get("name") for m in mutants}
    errors += [f"{name}: is not in the list" for name in sorted(unknown)]
    if errors:
        sys.exit("\n".join(errors))
    if arguments.check:
        return 0
    if arguments.names:
        mutants = [m for m in mutants if m["name"] in arguments.names]
    if arguments.list:
        for m in mutants:
            print(f"{m['name']:32} {m['test']:44} {m['why']}")
        return 0

    begin = time.monotonic()
    copy_tree()
    # Optimised little: building takes longer than running. Warnings would speak of the faults.
    status, output = run(["cmake", "-S", TREE, "-B", BUILD, "-G", "Ninja", "-DTESSERA_CLI=OFF",
                          "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DCMAKE_CXX_FLAGS=-w",
                          "-DTESSERA_QUICK_BUILD=ON"])
    if status != 0:
        sys.exit(output)
    baseline(mutants)
    print(f"{len(mutants)} faults; the tests pass without them ({time.monotonic() - begin:.0f} s)", flush=True)

    verdicts = []
    for m in mutants:
        start = time.monotonic()
        verdict, remark = judge(m)
        verdicts.append(verdict)
        print(f"{verdict:10} {m['name']:32} {m['test']:44} {time.monotonic() - start:5.0f} s  {remark}", flush=True)
    killed = verdicts.count("killed")
    print(f"{killed} of {len(mutants)} faults noticed, in {(time.monotonic() - begin) / 60:.0f} minutes")
    return 0 if killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
