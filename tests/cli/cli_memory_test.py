#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# `tessera` when memory runs out: every allocation of a command fails in turn, alone and with all that follow. It ends with
# status 1 and one sentence, or as ever where it can do without; nothing is half written, nothing is killed by a signal.
# Usage: cli_memory_test.py PATH-TO-TESSERA PATH-TO-FAILING-MEMORY [unittest arguments]. Registered by tests/cli/tests.cmake.
import json
import os
import re
import shutil
import subprocess
import sys
import unittest

from cli_case import TESSERA, Case

FAILING_MEMORY = os.path.abspath(sys.argv[2])


def plain(info):
    """Without what stands in parentheses: the loader's own words, which are fewer when memory is short."""
    return re.sub(r"\([^)]*\)", "", info)


def exact(said):
    return said


def without_seconds(value):
    """The figures of --json, but those that differ from run to run."""
    if isinstance(value, list):
        return [without_seconds(one) for one in value]
    if isinstance(value, dict):
        return {key: without_seconds(one) for key, one in value.items() if key != "seconds"}
    return value


class Server:
    """A program whose main() is run by failing_memory.c, once for each order."""

    def __init__(self, folder, *arguments):
        orders, self.orders = os.pipe()
        answers, write_answers = os.pipe()
        first = max(orders, write_answers, 50)  # two descriptors beside each other
        os.dup2(orders, first, inheritable=True)
        os.dup2(write_answers, first + 1, inheritable=True)
        self.answers = os.fdopen(answers)
        self.said = open(os.path.join(folder, "said"), "w+", opener=lambda p, f: os.open(p, f | os.O_APPEND))
        self.program = subprocess.Popen(
            [TESSERA, *arguments], stdout=self.said, stderr=self.said, pass_fds=(first, first + 1),
            env={**os.environ, "LD_PRELOAD": FAILING_MEMORY, "FAILING_MEMORY": str(first),
                 "TESSERA_NVRTC": "/nowhere/libnvrtc.so",  # the real one ends a process in which it cannot allocate
                 "TESSERA_VULKAN": "/nowhere/libvulkan.so.1"})  # the real one takes it for a driver that does not fit
        for descriptor in (orders, write_answers, first, first + 1):
            os.close(descriptor)

    def run(self, n, all_after):
        """Status as from waitpid, whether an allocation failed, and what was printed."""
        self.said.truncate(0)
        os.write(self.orders, f"{n} {int(all_after)}\n".encode())
        status, failed = map(int, self.answers.readline().split())
        self.said.seek(0)
        return status, bool(failed), self.said.read()

    def close(self):
        os.close(self.orders)
        self.program.wait()
        self.answers.close(), self.said.close()


def count_allocations(server):
    most = 1
    while server.run(most, True)[1]:
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if server.run(middle, True)[1] else (least, middle)
    return least


class Memory(Case):
    def check(self, *arguments, expected, last=None, stride=1):
        """expected(said): what a run leaves when nothing failed. last: only so many allocations. stride: of these one
        of so many."""
        server = Server(self.folder, *arguments)
        self.addCleanup(server.close)
        status, failed, said = server.run(0, False)
        self.assertEqual((status, failed), (0, False), said)
        whole, tried, seen = expected(said), 0, 0
        for all_after in (False, True):
            n = 1 if last is None else max(1, count_allocations(server) - last)
            while True:
                self.remove()
                tried += 1
                status, failed, said = server.run(n, all_after)
                where = f"allocation {n}{' and all that follow' if all_after else ''}: status {status}, {said}"
                if status == 0:
                    self.assertEqual(expected(said), whole, where)
                else:
                    self.assertEqual(status, 1 << 8, where)
                    lines = said.splitlines()
                    self.assertTrue(lines and lines[-1].startswith("tessera: "), where)
                    self.assertNotIn("tessera: ", "\n".join(lines[:-1]), where)
                    self.assertFalse(os.path.exists(self.out), where)
                    seen += 1
                if not failed:
                    break
                n += stride
        self.assertGreater(tried, 100)
        self.assertGreater(seen, tried / 2, "hardly any allocation was needed")

    def written(self, _):
        found = {}
        for name in sorted(os.listdir(self.out)):
            with open(os.path.join(self.out, name), "rb") as file:
                found[name] = file.read()
            if name.endswith(".json"):
                found[name] = without_seconds(json.loads(found[name]))
        return found

    def figures(self, _):
        """Of --json, when the file is all that a command writes."""
        with open(self.out) as file:
            return without_seconds(json.loads(plain(file.read())))

    def remove(self):
        if os.path.isdir(self.out):
            shutil.rmtree(self.out)
        elif os.path.exists(self.out):
            os.unlink(self.out)

    def test_run(self):
        """Most of its allocations read the command line, as those of `info` do, which all fail there."""
        arguments = self.files()
        self.check("run", *arguments, "--do", self.path("do.npy"), "--threads", "2", "--json",
                   os.path.join(self.out, "figures.json"), expected=self.written, stride=3)

    def test_info(self):
        self.check("info", expected=plain)

    def test_other_commands(self):
        """What is theirs comes last; before it they read the command line, as `run` does."""
        for arguments in (["plan", "--nq", "64", "--with", "bias"], ["pack", "--list", "--dims", "64", "--types", "f32"]):
            self.check(*arguments, expected=plain, last=300)

    def test_figures(self):
        """JSON comes last of all. A case of `check` that runs out of memory is one that fails, so it is left out here."""
        for arguments in (["info"], ["plan", "--nq", "64"], ["pack", "--list", "--dims", "64", "--types", "f32"],
                          ["check", "--suite", "random", "--seed", "2", "--count", "1", "--threads", "1"]):
            self.check(*arguments, "--json", self.out, expected=self.figures, last=120)

    def test_help(self):
        """Whole or not at all, although streams would end it where memory runs out."""
        for arguments in (["--help"], ["run", "--help"], ["--version"]):
            self.check(*arguments, expected=exact, last=250)
        self.check("check", "--list", expected=exact, last=1500, stride=11)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
