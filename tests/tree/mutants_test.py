#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Verdicts of tools/mutants.py on small programs in the place of tests: one that fails, passes, is skipped whole or in
# part, or does not build. Registered in tests/tree/tests.cmake; Python's standard library only.
import importlib.util
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools/mutants.py")
mutants = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutants)

FAULT = {"name": "fault", "file": "source.txt", "old": "right", "new": "wrong", "test": "fake_test:Some.*"}
SKIPS = "echo '[  SKIPPED ] 2 tests.'; "


class Verdicts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        mutants.TREE = mutants.BUILD = Path(folder.name)
        mutants.build = lambda targets: (True, "")
        self.source = mutants.TREE / "source.txt"
        self.source.write_text("right")
        self.program = mutants.BUILD / "tests/fake_test"
        self.program.parent.mkdir()

    def write_program(self, with_fault, without="exit 0"):
        """Shell commands, for the tree with the fault and without."""
        self.program.write_text(f"#!/bin/sh\nif grep -q wrong {self.source}; then {with_fault}; fi\n{without}\n")
        self.program.chmod(0o755)

    def verdict(self, with_fault):
        self.write_program(with_fault)
        verdict, _ = mutants.judge(FAULT)
        self.assertEqual(self.source.read_text(), "right", "the fault stays")
        return verdict

    def test_a_test_that_fails_notices(self):
        self.assertEqual(self.verdict("exit 1"), "killed")
        self.assertEqual(self.verdict("kill -9 $$"), "killed")

    def test_a_test_that_passes_does_not(self):
        self.assertEqual(self.verdict("exit 0"), "survived")

    def test_a_skipped_test_says_nothing(self):
        self.assertEqual(self.verdict(SKIPS + "exit 77"), "not judged")
        self.assertEqual(self.verdict(SKIPS + "exit 0"), "not judged")
        self.assertEqual(self.verdict(SKIPS + "exit 1"), "killed")

    def test_a_fault_that_does_not_build(self):
        mutants.build = lambda targets: (False, "error")
        self.assertEqual(self.verdict("exit 1"), "not built")

    def test_tests_pass_or_are_skipped_without_the_fault(self):
        for status in (0, 77):
            self.write_program("exit 1", f"exit {status}")
            mutants.baseline([FAULT])
        self.write_program("exit 1", "exit 1")
        with self.assertRaisesRegex(SystemExit, "fails without any fault"):
            mutants.baseline([FAULT])


if __name__ == "__main__":
    unittest.main()
