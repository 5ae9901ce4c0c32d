#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# What `tessera` leaves on disk when paths clash, output is refused, system calls fail or it is killed: all files or none.
# Usage: cli_files_test.py PATH-TO-TESSERA PATH-TO-FAILING-CALLS [unittest arguments]. Registered by tests/cli/tests.cmake;
# of its groups, Faults and Kills need the failing calls.
# Implements docs/tour.md, "Files that are written". Uses nothing but Python's standard library.
import errno
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import unittest

from cli_case import TESSERA, Case, tessera
from npy_arrays import Array

FAILING_CALLS = os.path.abspath(sys.argv[2])
JOURNAL = ".tessera-journal"


def content_of(folder):
    """Everything below a folder: names, and bytes of files."""
    found = {}
    for base, folders, names in os.walk(folder):
        for name in folders:
            found[os.path.relpath(os.path.join(base, name), folder)] = None
        for name in names:
            path = os.path.join(base, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, folder)] = file.read()
            else:
                found[os.path.relpath(path, folder)] = "no file"
    return found


class Places(Case):
    def assert_refused(self, part, *arguments):
        before = content_of(self.folder)
        self.assert_sentence(tessera("run", *arguments), 1, part)
        self.assertEqual(content_of(self.folder), before)

    def test_json_in_the_place_of_a_result(self):
        arguments = self.files()
        os.mkdir(self.out)
        os.symlink(self.out, self.path("link"))
        for spelling in ("out/o.npy", "out/./o.npy", "out/../out/o.npy", "link/o.npy"):
            self.assert_refused("which is the place of o.npy; every output must have a place of its own", *arguments,
                                "--json", self.path(spelling))
        self.assertEqual(tessera("run", *arguments).returncode, 0)
        os.symlink("out/lse.npy", self.path("x.json"))
        self.assert_refused("is the place of lse.npy", *arguments, "--json", self.path("x.json"))

    def test_two_results_in_one_place(self):
        arguments = self.files()
        self.assertEqual(tessera("run", *arguments).returncode, 0)
        os.unlink(self.path("out/lse.npy"))
        os.symlink("o.npy", self.path("out/lse.npy"))
        self.assert_refused("lse.npy: is ", *arguments)

    def test_an_output_in_the_place_of_an_input(self):
        arguments = self.files()
        self.assert_refused("--json: is ", *arguments, "--json", self.path("v.npy"))
        os.mkdir(self.out)
        for name in ("q", "k", "v"):
            moved = list(arguments)
            os.rename(self.path(name + ".npy"), self.path("out/o.npy"))
            moved[moved.index("--" + name) + 1] = self.path("out/../out/o.npy")
            self.assert_refused(f"which is the file of --{name}; an output must not replace an input", *moved)
            os.rename(self.path("out/o.npy"), self.path(name + ".npy"))
        slopes = self.save("out/lse", Array((2,), [0.5, 0.25]))
        self.assert_refused("the file of --slopes", *arguments, "--slopes", slopes)

    def test_another_name_of_an_input_is_another_place(self):
        arguments = self.files()
        os.mkdir(self.out)
        os.link(self.path("q.npy"), self.path("out/o.npy"))
        self.assertEqual(tessera("run", *arguments).returncode, 0)
        self.assertEqual(Array.load(self.path("q.npy")).values, list(self.arrays[0].values))
        self.assertNotEqual(Array.load(self.path("out/o.npy")).values, list(self.arrays[0].values))

    def test_pack(self):
        result = tessera("pack", "--out", self.path("x"), "--json", self.path("./x"), "--dims", "64", "--types", "f32")
        self.assert_sentence(result, 1, "--json: is ")
        self.assertEqual(os.listdir(self.folder), [])

    def test_journals_of_others_lead_nowhere(self):
        arguments = self.files()
        self.assertEqual(tessera("run", *arguments).returncode, 0)
        journal = os.path.join(self.out, JOURNAL)
        inode = os.stat(self.path("q.npy")).st_ino
        for content in (b"", b"nonsense", b"o.npy\0tessera-1-1\0",
                        b"../q.npy\0tessera-1-1\0%d\0" % inode, b"o.npy\0../../q\x001\0"):
            with open(journal, "wb") as file:
                file.write(content)
            self.assert_refused("its file .tessera-journal is not this user's, or damaged", *arguments)
        os.unlink(journal)
        os.mkdir(journal)
        self.assert_refused("its file .tessera-journal", *arguments)
        os.rmdir(journal)
        os.mkfifo(journal)
        self.assert_refused("its file .tessera-journal", *arguments)

    def test_somebody_elses_files_are_not_leftovers(self):
        arguments = self.files()
        os.mkdir(self.out)
        for name in (".o.npy.mine.old", ".o.npy.tessera-x.tmp", ".other.npy.tessera-1-1.tmp", ".o.npy.tessera-1-1.tmp"):
            with open(os.path.join(self.out, name), "w") as file:
                file.write(name)
        self.assertEqual(tessera("run", *arguments).returncode, 0)
        self.assertEqual(sorted(os.listdir(self.out)), [".o.npy.mine.old", ".o.npy.tessera-x.tmp",
                                                        ".other.npy.tessera-1-1.tmp", "lse.npy", "o.npy"])

    def test_two_runs_at_once_do_not_mix(self):
        one = self.files()
        self.assertEqual(tessera("run", *one).returncode, 0)
        two = list(one)
        two[two.index("--q") + 1] = self.path("v.npy")
        results = []
        for arguments in (one, two):
            self.assertEqual(tessera("run", *arguments).returncode, 0)
            results.append(content_of(self.out))
        self.assertNotEqual(*results)
        for _ in range(5):
            runs = [subprocess.Popen([TESSERA, "run", *a], stdout=subprocess.DEVNULL) for a in (one, two, one, two)]
            self.assertEqual([run.wait() for run in runs], [0] * 4)
            self.assertIn(content_of(self.out), results)


class Printing(Case):
    COMMANDS = (["--help"], ["--version"], ["run", "--help"], ["info"], ["plan"], ["pack", "--list"],
                ["check", "--suite", "regular", "--list"], ["demo", "--small"],
                ["check", "--suite", "random", "--count", "1"], ["bench", "--suite", "tiny", "--repeat", "1"])

    def assert_told(self, arguments, part, **options):
        """The reason is known where the last of what was printed was refused, and not only an earlier part."""
        result = subprocess.run([TESSERA, *arguments], stderr=subprocess.PIPE, text=True, **options)
        self.assert_sentence(result, 1, "cannot write to standard output: " + part)

    def test_a_full_disk(self):
        with open("/dev/full", "w") as full:
            for arguments in self.COMMANDS:
                self.assert_told(arguments, "", stdout=full)

    def test_no_standard_output(self):
        for arguments in self.COMMANDS:
            self.assert_told(arguments, "", preexec_fn=lambda: os.close(1))

    def test_json_to_a_full_disk(self):
        self.assert_sentence(tessera("info", "--json", "/dev/full"), 1, "cannot write /dev/full: No space left")

    def test_a_run_that_cannot_tell_changes_nothing(self):
        arguments = self.files() + ["--do", self.path("do.npy"), "--accumulate"]
        before = content_of(self.folder)
        for _ in range(2):
            reader, pipe = os.pipe()
            os.close(reader)
            self.assert_told(["run", *arguments], "Broken pipe", stdout=pipe)
            os.close(pipe)
            with open("/dev/full", "w") as full:
                self.assert_told(["run", *arguments], "No space left on device", stdout=full)
            self.assert_told(["run", *arguments], "Bad file descriptor", preexec_fn=lambda: os.close(1))
            result = tessera("run", *arguments, "--json", "/dev/full")
            self.assert_sentence(result, 1, "cannot write /dev/full: No space left")
            self.assertEqual(content_of(self.folder), before)
            self.assertEqual(tessera("run", *arguments).returncode, 0)
            before = content_of(self.folder)


    def test_files_beyond_their_size_limit(self):
        arguments = self.files(shape=(1, 50, 2, 30)) + ["--do", self.path("do.npy")]
        before = content_of(self.folder)
        result = tessera("run", *arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)))
        self.assert_sentence(result, 1, "File too large")
        self.assertEqual(content_of(self.folder), before)


class Privileges(Case):
    def privileged_copy(self):
        """The program with more rights than whoever starts it, or a reason why there is none here."""
        with open("/proc/self/status") as status:
            if re.search(r"^NoNewPrivs:\s*1", status.read(), re.M):
                self.skipTest("this process and its children cannot gain rights")
        if os.statvfs(self.folder).f_flag & os.ST_NOSUID:
            self.skipTest("the folder for temporary files gives no rights (nosuid)")
        copy = shutil.copy(TESSERA, self.path("privileged"))
        others = [group for group in os.getgroups() if group != os.getegid()]
        if os.geteuid() == 0:
            os.chown(copy, 65534, -1)
            os.chmod(copy, 0o4755)
        elif others:
            os.chown(copy, -1, others[0])
            os.chmod(copy, 0o2755)
        else:
            self.skipTest("neither root nor in a second group")
        return copy

    def test_the_environment_is_not_believed(self):
        copy = self.privileged_copy()
        places = {"TESSERA_NVRTC": self.path("nvrtc.so"), "TESSERA_PACK": self.path("pack"),
                  "TESSERA_CACHE": self.path("cache")}
        tell = lambda program: subprocess.run([program, "info"], capture_output=True, text=True,
                                              env={**os.environ, **places}).stdout
        for place in places.values():
            self.assertIn(place, tell(TESSERA))
            self.assertNotIn(place, tell(copy))
        self.assertIn("cache      none: ", tell(copy))


class Replacing(Case):
    """Runs with --accumulate into a folder that holds results, and into one that is not there yet."""

    BASE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # thousands of fsyncs, for which a disk takes long

    def setUp(self):
        super().setUp()
        self.folder = os.path.realpath(self.folder)
        self.out = self.path("work/out")
        self.arguments = ["run", *self.files(), "--do", self.path("do.npy"), "--accumulate", "--threads", "1"]
        self.report = self.path("happened")
        self.states = [{}]
        os.mkdir(self.path("work"))
        for _ in range(3):
            self.assertEqual(tessera(*self.arguments).returncode, 0)
            self.states.append(content_of(self.path("work")))

    def restore(self, state):
        shutil.rmtree(self.path("work"))
        os.mkdir(self.path("work"))
        for name, content in sorted(self.states[state].items()):
            if content is None:
                os.mkdir(self.path("work/" + name))
            else:
                with open(self.path("work/" + name), "wb") as file:
                    file.write(content)

    def run_with_fault(self, kind, n, error, *more):
        """The result, and whether the moment came."""
        if os.path.exists(self.report):
            os.unlink(self.report)
        environment = {**os.environ, "LD_PRELOAD": FAILING_CALLS, "FAILING_CALL": f"{kind}:{n}:{error}",
                       "FAILING_CALL_UNDER": self.path("work"), "FAILING_CALL_REPORT": self.report}
        result = tessera(*self.arguments, *more, env=environment)
        return result, os.path.exists(self.report)


def a_test_for_each(*kinds):
    """Gives a class a test for each kind of system call."""
    def extend(tests):
        for kind in kinds:
            setattr(tests, f"test_{kind}", lambda self, kind=kind: self.check_kind(kind))
        return tests
    return extend


@a_test_for_each("open", "write", "short", "fsync", "close", "rename", "link", "mkdir", "flock")
class Faults(Replacing):
    # Of these some are survived: what only keeps others out, keeps the old version or frees a descriptor.
    SURVIVED = {"flock", "link", "close", "short", "open"}

    def check_kind(self, kind):
        failures = survivals = 0
        for state in (0, 1):
            for n in range(1, 1000):
                self.restore(state)
                os.mkdir(self.path("work/elsewhere"))
                before = content_of(self.path("work"))
                result, happened = self.run_with_fault(kind, n, (errno.ENOSPC, errno.EIO)[n % 2], "--json",
                                                       self.path("work/elsewhere/run.json"))
                after, where = content_of(self.path("work")), f"{kind}, call {n}: {result}"
                if result.returncode == 0:
                    json.loads(after.pop("elsewhere/run.json"))
                    self.assertEqual(after, {**self.states[state + 1], "elsewhere": None}, where)
                    if not happened:
                        break
                    survivals += 1
                else:
                    self.assert_sentence(result, 1, "cannot ")
                    self.assertEqual(after, before, where)
                    failures += 1
        self.assertGreater(failures + survivals, 0, "no call of this kind was made")
        self.assertTrue(survivals == 0 or kind in self.SURVIVED, survivals)
        self.assertTrue(failures > 0 or kind in self.SURVIVED)


@a_test_for_each("open", "write", "fsync", "close", "rename", "link", "unlink")
class Kills(Replacing):
    """Killed before any system call: the next run finds everything as before, or everything done, and leaves no trace."""

    def check_kind(self, kind):
        kills = 0
        for state in (0, 1):
            for n in range(1, 1000):
                self.restore(state)
                result, happened = self.run_with_fault(kind, n, 0)
                if not happened:
                    self.assertEqual(result.returncode, 0, result)
                    break
                self.assertEqual(result.returncode, -signal.SIGKILL, result)
                kills += 1
                left, where = content_of(self.path("work")), f"{kind}, call {n}"
                visible = {name: x for name, x in left.items() if not os.path.basename(name).startswith(".")}
                done = visible == self.states[state + 1] and "out/" + JOURNAL not in left
                if not done and "out/" + JOURNAL not in left:
                    self.assertEqual({k: x for k, x in visible.items() if x is not None},
                                     {k: x for k, x in self.states[state].items() if x is not None}, where)
                self.assertEqual(tessera(*self.arguments).returncode, 0, where)
                self.assertEqual(content_of(self.path("work")), self.states[state + (2 if done else 1)], where)
        self.assertGreater(kills, 0)


if __name__ == "__main__":
    del sys.argv[1:3]  # read above and by cli_case
    ran = unittest.main(exit=False).result
    if not ran.wasSuccessful() or ran.testsRun == 0:
        sys.exit(1)
    sys.exit(77 if len(ran.skipped) == ran.testsRun else 0)  # which ctest shows as skipped
