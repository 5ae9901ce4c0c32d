# SPDX-License-Identifier: Apache-2.0
# Rules of the tree about headers: who may include whom, and each compiles alone. Called by tests/tree_test.py;
# docs/architecture.md has the map.
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

from tree.files import ROOT, SOURCE_ENDINGS, fail, files

# Who may include whom. A file belongs to the longest prefix; "std" stands for system headers, "hwy" for Highway.
MATH = ["src/math"]
PUBLIC = ["include/tessera"]
CORE = MATH + PUBLIC + ["src/core", "std"]
CASES = PUBLIC + ["cases", "std"] + ["src/cuda"]  # memory of GPUs; src/cuda knows nothing of attention
MAY_INCLUDE = {
    "include/tessera": PUBLIC + ["std"],
    "src/math": MATH,  # text for devices too: not even the standard library
    "src/core": CORE,
    "src/reference": CORE + ["src/reference"],
    "src/cpu": CORE + ["src/cpu", "hwy"],
    "src/dist": MATH + PUBLIC + ["src/dist", "std"],  # above the library: it calls what every user may call
    "src/mpi": PUBLIC + ["src/mpi", "std"],  # a library of its own
    "src/cuda": CORE + ["src/cuda"],  # driver and compiler; knows nothing of attention
    # The judge looks at results through the public door, so that it cannot share the library's mistakes.
    "cases": CASES,
    "cli": CASES + CORE + ["cli", "src/api", "src/dist"],
    "examples": PUBLIC + ["std", "examples"],
    "bench": CASES + ["bench"],
    "fuzz": CASES + CORE + ["cli", "fuzz"],
}
# The GPU layer, and the families that live on it: host files beside device code (kernel/), which sees shared text and
# nothing of the host. Families do not see each other; src/api/kernels.cpp is the only file that lists them.
MAY_INCLUDE["src/gpu"] = CORE + ["src/cuda", "src/gpu"]
MAY_INCLUDE["src/gpu/kernel"] = MATH + ["src/gpu", "src/gpu/kernel"]
for folder in sorted((ROOT / "src").iterdir()):
    name = f"src/{folder.name}"
    if folder.is_dir() and folder.name != "api" and name not in MAY_INCLUDE:
        device = [f"{name}/{part}" for part in ("kernel", "tile", "ptx") if (folder / part).is_dir()]
        MAY_INCLUDE[name] = MAY_INCLUDE["src/gpu"] + [name]
        for part in device:
            MAY_INCLUDE[part] = MAY_INCLUDE["src/gpu/kernel"] + [name, *device]
inside = {p for group, may in MAY_INCLUDE.items() if group.startswith("src/") for p in [group, *may]}
MAY_INCLUDE["src/api"] = sorted(inside - {"hwy", "src/mpi"} | {"src/api"})
MAY_INCLUDE["tests"] = CASES + MAY_INCLUDE["src/api"] + ["src/mpi", "cli", "tests"]
INCLUDE_ROOTS = ["include", "src", "."]


def sources():
    return files(SOURCE_ENDINGS, "include", "src", "cases", "cli", "tests", "fuzz", "examples", "bench")


def home(path):
    """The entry of MAY_INCLUDE that a file of the tree belongs to."""
    name = path.relative_to(ROOT).as_posix()
    fitting = [prefix for prefix in MAY_INCLUDE if name.startswith(prefix + "/")]
    return max(fitting, key=len) if fitting else None


def target_of(include, quoted, path):
    """What an include leads to: a prefix of the tree, "hwy", or "std"."""
    if include.startswith("hwy/"):
        return "hwy"
    if quoted or include.startswith("tessera/"):
        for base in INCLUDE_ROOTS:
            found = ROOT / base / include
            if found.is_file():
                return home(found.resolve())
        if (path.parent / include).is_file():
            return home((path.parent / include).resolve())
    return "std"


def check_includes():
    for path in sources():
        group = home(path)
        if group is None:
            fail(path, 0, "belongs to no folder that this test knows; add it to MAY_INCLUDE")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*#\s*include\s+(["<])([^">]+)[">]', line)
            if not match:
                continue
            target = target_of(match[2], match[1] == '"', path)
            if target not in MAY_INCLUDE[group]:
                fail(path, number, f"{group} must not include {match[2]} ({target})")


def included_as(header):
    base = ROOT / "include" if header.is_relative_to(ROOT / "include") else ROOT / "src"
    return header.relative_to(base).as_posix()


def compiles_alone(compiler, header):
    standard, language = ("c99", "c") if header.suffix == ".h" else ("c++20", "c++")
    command = [compiler, "-x", language, f"-std={standard}", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
               "-I", ROOT / "include", "-I", ROOT / "src", "-"]
    done = subprocess.run(command, input=f'#include "{included_as(header)}"\n', capture_output=True, text=True)
    if done.returncode:
        fail(header, 0, "does not compile alone:\n" + done.stderr)


def check_headers(compiler):
    """Every header compiles alone, and bears being included again. The build has shown the first of those that some
    source file includes before anything else."""
    headers = [h for h in files({".h", ".hpp"}, "include", "src")
               if "src/cpu/kernel/" not in h.as_posix()  # parts of a target region
               and h.name not in ["region.hpp", "score_rule.hpp"]]  # included inside namespaces
    compiled = (ROOT / "src/CMakeLists.txt").read_text()
    first = set()
    for path in files({".cpp"}, "src"):
        include = re.search(r'^#\s*include ["<]([^">]+)', path.read_text(), re.M)
        if include and path.relative_to(ROOT / "src").as_posix() in compiled:
            first.add(include[1])
    for header in headers:
        guard = r"^#pragma once$" if header.suffix == ".hpp" else r"^#ifndef (\w+)\n#define \1$"
        if not re.search(guard, header.read_text(), re.M):
            fail(header, 0, "has no guard against being included again")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda header: compiles_alone(compiler, header),
                      [h for h in headers if included_as(h) not in first]))
