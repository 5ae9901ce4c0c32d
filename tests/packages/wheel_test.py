#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A wheel as its users meet it: installed by pip into fresh environments of every Python that is given, and used there
without a compiler.

    wheel_test.py WHEEL --work FOLDER [--packages "numpy torch"] [PYTHON...]

Without PYTHON it takes every python3.10, python3.11, ... on the PATH. In each environment the package is imported before
anything else is installed, since it promises to need nothing; then come the packages, and use_wheel.py computes. Its
PATH is the environment's own folder. pip fetches the packages. Run by `make test-wheel`.
"""
import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent / "use_wheel.py"
OLDEST = (3, 10)  # pyproject.toml, requires-python
IMPORT_ALONE = ("import sys, tessera; assert 'numpy' not in sys.modules; "
                "packed = [line for line in tessera.info().splitlines() if line.startswith('packed')]; "
                "print('imported without NumPy: ' + tessera.__version__, *packed, sep='\\n')")


def version(python):
    """(3, 13, 0) of a Python that can make environments; None of another. A name on the PATH may be a wrapper's only."""
    question = "import sys, venv, ensurepip; print(*sys.version_info[:3])"
    try:
        done = subprocess.run([python, "-I", "-c", question], capture_output=True, text=True)
    except OSError:
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def pythons(named):
    """[(python, version)] of those named, or of all on the PATH. A named one that does not work is an error."""
    if not named:
        on_path = [shutil.which(f"python3.{minor}") for minor in range(OLDEST[1], 30)]
        return [(p, version(p)) for p in on_path if p and version(p)]
    for python in named:
        if (version(python) or ()) < OLDEST:
            sys.exit(f"wheel_test: {python}: is no Python from {OLDEST[0]}.{OLDEST[1]} on that can make environments")
    return [(python, version(python)) for python in named]


def run(command, folder, path):
    """Runs a command with nothing of this process's environment but what finds a home and a proxy for pip."""
    kept = {name: value for name, value in os.environ.items()
            if name in ("HOME", "LANG", "TMPDIR") or name.startswith("PIP_") or name.lower().endswith("_proxy")}
    done = subprocess.run([str(part) for part in command], cwd=folder, env={**kept, "PATH": path},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout)
        sys.exit(f"wheel_test: ended with {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout.strip()


def check(python, wheel, packages, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run([python, "-m", "venv", folder / "venv"], folder, os.environ["PATH"])
    bin_folder = folder / "venv" / "bin"
    inside, path = bin_folder / "python", str(bin_folder)
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--only-binary", ":all:"]
    run([*pip, "--no-deps", wheel], folder, path)
    print("   ", run([inside, "-I", "-c", IMPORT_ALONE], folder, path).replace("\n", "\n    "))
    if packages:
        run([*pip, *packages], folder, path)
    print("   ", run([inside, "-I", "-W", "error", PROGRAM], folder, path).replace("\n", "\n    "), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--work", type=Path, required=True, help="folder for the environments; they are made anew")
    parser.add_argument("--packages", default="numpy", help="what is installed beside the wheel")
    given = parser.parse_intermixed_args()
    found = pythons(given.pythons)
    if not found:
        sys.exit("wheel_test: no python3.10 or later is on the PATH; name one")
    for python, number in found:
        name = ".".join(map(str, number))
        print(f"Python {name}, {given.wheel.name}", flush=True)
        check(python, given.wheel.resolve(), given.packages.split(), given.work.resolve() / name)
    print(f"wheel_test: {len(found)} environments, all ok")


main()
