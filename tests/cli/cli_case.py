# SPDX-License-Identifier: Apache-2.0
# What the tests of the `tessera` program share: running it, a folder for each test, and the look of a failure.
# Imported by cli_test.py, cli_files_test.py and cli_memory_test.py. Uses nothing but Python's standard library.
import os
import subprocess
import sys
import tempfile
import unittest

from npy_arrays import Array

TESSERA = os.path.abspath(sys.argv[1])
SLOW = bool(os.environ.get("TESSERA_SANITIZE"))  # sanitizers: skip what only measures speed


def tessera(*arguments, **options):
    return subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, timeout=500, **options)


class Case(unittest.TestCase):
    BASE = None  # the folder for temporary files, if not the usual one

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tessera_cli_", dir=self.BASE)
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.out = self.path("out")

    def path(self, name):
        return os.path.join(self.folder, name)

    def save(self, name, array):
        return array.save(self.path(name + ".npy"))

    def files(self, shape=(1, 5, 2, 3), descr="<f4"):
        """Flags for random q, k, v of one shape."""
        self.arrays = [Array.normal(shape, seed, descr) for seed in range(4)]
        paths = [self.save(name, array) for name, array in zip(("q", "k", "v", "do"), self.arrays)]
        return ["--q", paths[0], "--k", paths[1], "--v", paths[2], "--out", self.out]

    def assert_sentence(self, result, status, part=""):
        self.assertEqual(result.returncode, status, result)
        self.assertTrue(result.stderr.startswith("tessera: "), result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertIn(part, result.stderr)

    def assert_failed_cleanly(self, part, *arguments, status=1):
        """One sentence, and not a single new file or folder."""
        before = sorted(os.listdir(self.folder))
        self.assert_sentence(tessera("run", *arguments), status, part)
        self.assertEqual(sorted(os.listdir(self.folder)), before)

    def assert_close(self, got, expected, tolerance):
        self.assertEqual(len(got), len(expected))
        for g, e in zip(got, expected):
            self.assertAlmostEqual(g, e, delta=tolerance)
