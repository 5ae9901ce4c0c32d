# SPDX-License-Identifier: Apache-2.0
"""Clocks and power of a GPU while something runs on it, by nvidia-smi in a process beside this one. Used by peers.py;
needs only Python and nvidia-smi.

A GPU at its power limit is as fast as it spends energy sparingly, so that joules per operation are the figure to lower.
"""
import os
import statistics
import subprocess
import threading
import time
from typing import NamedTuple

MILLISECONDS = 20  # between two samples


class Load(NamedTuple):
    """Means over a span of time, and of how many samples."""
    mhz: float
    watts: float
    samples: int


class Meter:
    """Samples from its creation to `close`. A terminal takes them: into a pipe nvidia-smi would write in large blocks."""

    def __init__(self, gpu):
        """The GPU is named as `nvidia-smi -i` wants it; raises OSError where there is no nvidia-smi."""
        self._samples = []  # seconds of time.monotonic, MHz, watts
        self._master, terminal = os.openpty()
        try:
            self._process = subprocess.Popen(
                ["nvidia-smi", "-i", str(gpu), "--query-gpu=clocks.sm,power.draw.instant",
                 "--format=csv,noheader,nounits", "-lms", str(MILLISECONDS)], stdout=terminal, stderr=terminal)
        except OSError:
            os.close(self._master)
            raise
        finally:
            os.close(terminal)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        rest = b""
        while True:
            try:
                part = os.read(self._master, 4096)
            except OSError:  # the process is gone, and its side of the terminal with it
                return
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                try:
                    mhz, watts = (float(word) for word in line.split(b","))
                except ValueError:  # a sentence, or a figure that this GPU does not have
                    continue
                self._samples.append((time.monotonic(), mhz, watts))

    def load(self, begin, end):
        """The load between two times of time.monotonic; None without a sample."""
        found = [sample[1:] for sample in self._samples if begin <= sample[0] <= end]
        return Load(*(statistics.fmean(values) for values in zip(*found)), len(found)) if found else None

    def close(self):
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        os.close(self._master)
