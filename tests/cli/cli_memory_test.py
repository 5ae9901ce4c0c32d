#!/usr/bin/env python3
# `tessera` when memory runs out: every allocation of a command fails in turn, alone and with all that follow. It ends with
# status 1 and one sentence, or as ever where it can do without; nothing is half written, nothing is killed by a signal.
# Usage: cli_memory_test.py PATH-TO-TESSERA PATH-TO-FAILING-MEMORY [unittest arguments]. Registered by tests/cli/tests.cmake.
import os
import re
import subprocess
import sys
import unittest

from cli_case import TESSERA, Case

FAILING_MEMORY = os.path.abspath(sys.argv[2])


def plain(info):
    """Without what stands in parentheses: the loader's own words, which are fewer when memory is short."""
    return re.sub(r"\([^)]*\)", "", info)


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
                 "TESSERA_NVRTC": "/nowhere/libnvrtc.so"})  # the real one ends a process in which it cannot allocate
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
    def check(self, *arguments, expected, clean, last=None):
        """expected(said): what a run leaves when nothing failed; clean(): removes it; last: only so many allocations."""
        server = Server(self.folder, *arguments)
        self.addCleanup(server.close)
        status, failed, said = server.run(0, False)
        self.assertEqual((status, failed), (0, False), said)
        whole, seen = expected(said), 0
        for all_after in (False, True):
            n = 1 if last is None else max(1, count_allocations(server) - last)
            while True:
                clean()
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
                n += 1
        self.assertGreater(seen, 100, "hardly any allocation was needed")

    def written(self, _):
        found = {}
        for name in sorted(os.listdir(self.out)):
            with open(os.path.join(self.out, name), "rb") as file:
                found[name] = file.read()
        return found

    def remove(self):
        for name in os.listdir(self.out) if os.path.exists(self.out) else ():
            os.unlink(os.path.join(self.out, name))
        if os.path.exists(self.out):
            os.rmdir(self.out)

    def test_run(self):
        arguments = self.files()
        self.check("run", *arguments, "--do", self.path("do.npy"), "--threads", "2", expected=self.written,
                   clean=self.remove)

    def test_info(self):
        self.check("info", expected=plain, clean=lambda: None)

    def test_other_commands(self):
        """What is theirs comes last; before it they read the command line, as `run` does."""
        for arguments in (["plan", "--nq", "64", "--with", "bias"], ["pack", "--list", "--dims", "64", "--types", "f32"]):
            self.check(*arguments, expected=plain, clean=lambda: None, last=300)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
