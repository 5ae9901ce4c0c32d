#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tree_test.py [COMPILER]: the tree keeps its shape. Include directions, self-contained headers, file lengths, licence
# and comment at the top, no loose ends, a test's sentence for every sentence of the checks, a reason for every folder
# of tests, documents that name what is there, figures that are up to date, mutants that fit. Python's standard library
# only. Run by ctest. Implements docs/testing.md, "Rules of the tree".
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = sys.argv[1] if len(sys.argv) > 1 else "c++"
MAX_LINES = 450
MADE = {"vulkan/vulkan.h", "vulkan/layout_check.hpp", "vulkan/spirv.hpp"}  # Vulkan's own, and made by the build

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
SOURCE_ENDINGS, PAGE_ENDINGS = {".cpp", ".hpp", ".c", ".h", ".cuh", ".cu"}, {".js", ".css"}
TEXT_FOLDERS = ["include", "src", "cases", "cli", "tests", "fuzz", "examples", "bench", "tools", "cmake", "packaging",
                "python", "docs"]
LICENCE = "SPDX-License-Identifier: Apache-2.0"
COMMENTED_ENDINGS = SOURCE_ENDINGS | PAGE_ENDINGS | {".py", ".sh", ".cmake"}

failures = []


def fail(path, line, message):
    where = path.relative_to(ROOT) if isinstance(path, Path) else path
    failures.append(f"{where}{f':{line}' if line else ''}: {message}")


def files(endings, *folders):
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in endings and path.is_file() and "__pycache__" not in path.parts:
                yield path


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


def comment_at_the_top(lines):
    """The lines of the comment with which a file begins, a docstring included, behind shebang and licence."""
    start = 1 if lines and lines[0].startswith("#!") else 0
    start += 1 if lines[start:] and LICENCE in lines[start] else 0
    if lines[start:] and lines[start].startswith('"""'):
        return [line for line in lines[start:] if line.strip()][:2]
    top = []
    for line in lines[start:]:
        if not line.startswith(("//", "/*", " *", "# ")):
            break
        top.append(line)
    return top


def check_licence():
    """Every source file says its licence in its first line, or behind its shebang, as SPDX asks."""
    marks = {**dict.fromkeys(SOURCE_ENDINGS | {".js"}, "// {}"), **dict.fromkeys([".c", ".h", ".css"], "/* {} */")}
    checked = 0
    for path in [*files(COMMENTED_ENDINGS | {".txt", ".in"}, *TEXT_FOLDERS), ROOT / "CMakeLists.txt", ROOT / "Makefile"]:
        if path.suffix == ".txt" and path.name != "CMakeLists.txt":
            continue
        checked += 1
        lines = [line for line in path.read_text().splitlines()[:2] if not line.startswith("#!")]
        expected = marks.get(path.suffix, "# {}").format(LICENCE)
        if lines[:1] != [expected]:
            fail(path, 1, f'must begin with the line "{expected}"')
    if checked < 600:
        fail("tests/tree_test.py", 0, f"found only {checked} source files; has the tree moved?")


def check_text():
    for path in files(COMMENTED_ENDINGS, *TEXT_FOLDERS):
        lines = path.read_text().splitlines()
        if len(lines) > MAX_LINES:
            fail(path, 0, f"has {len(lines)} lines; at most {MAX_LINES}")
        top = comment_at_the_top(lines)
        if len(top) < (2 if path.suffix == ".hpp" else 1):
            fail(path, 1, "must begin with a comment: what it holds, who includes it, which document it implements")
        for number, line in enumerate(lines, 1):
            if re.search(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b", line):
                fail(path, number, "holds a loose end")
            if len(line) > 120 and path.suffix in SOURCE_ENDINGS | PAGE_ENDINGS:
                fail(path, number, f"has {len(line)} columns; at most 120")
            if line != line.rstrip() or "\t" in line:
                fail(path, number, "holds a tab or ends in white space")


def compiles_alone(header):
    standard, language = ("c99", "c") if header.suffix == ".h" else ("c++20", "c++")
    command = [COMPILER, "-x", language, f"-std={standard}", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
               "-I", ROOT / "include", "-I", ROOT / "src", "-"]
    done = subprocess.run(command, input=f'#include "{included_as(header)}"\n', capture_output=True, text=True)
    if done.returncode:
        fail(header, 0, "does not compile alone:\n" + done.stderr)


def included_as(header):
    base = ROOT / "include" if header.is_relative_to(ROOT / "include") else ROOT / "src"
    return header.relative_to(base).as_posix()


def check_headers():
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
        list(pool.map(compiles_alone, [h for h in headers if included_as(h) not in first]))


def literals(text):
    """String literals, neighbours joined as the compiler joins them."""
    joined, previous_end = [], None
    for match in re.finditer(r'"((?:[^"\\\n]|\\.)*)"', text):
        value = match[1].replace('\\"', '"')
        if previous_end is not None and not text[previous_end:match.start()].strip():
            joined[-1] += value
        else:
            joined.append(value)
        previous_end = match.end()
    return joined


def statements(text):
    """The refusals of a file: (line, text) from `invalid(` or `throw Failure(` to the semicolon outside strings."""
    for match in re.finditer(r"\b(invalid\(|throw Failure\()", text):
        rest = re.match(r'(?:"(?:[^"\\\n]|\\.)*"|[^";])*;', text[match.start():])
        yield text.count("\n", 0, match.start()) + 1, rest[0]


def check_sentences():
    """Every sentence with which a check refuses is expected, word for word, by a row of the tests."""
    expected = [s for path in files(SOURCE_ENDINGS, "tests") for s in literals(path.read_text())]
    rules = 0
    for name in ["src/core/rules.cpp", "src/core/overlap.cpp", "src/core/check.cpp", "src/core/check_run.cpp",
                 "src/core/check_pages.cpp", "src/core/append.cpp",
                 "src/api/attention.cpp", "src/api/structs.hpp", "src/api/structs.cpp", "src/api/c_api.cpp",
                 "src/api/dist_api.cpp", "src/api/nccl.cpp", "src/dist/attention.cpp"]:
        for line, statement in statements((ROOT / name).read_text()):
            rules += 1
            for piece in literals(statement):
                if " " in piece.strip() and not any(piece in sentence for sentence in expected):
                    fail(name, line, f'no test expects the sentence with "{piece}"')
    if rules < 50:
        fail("tests/tree_test.py", 0, f"found only {rules} rules; has the way of refusing changed?")


def check_environment():
    """Variables are read where a privileged program's are left alone, by names that stand in the document's table."""
    table = re.search(r"## Environment variables\n(.*?)\n## ", (ROOT / "docs/architecture.md").read_text(), re.S)
    documented = set(re.findall(r"^\| `(\w+)`", table[1] if table else "", re.M))
    read = set()
    for path in files(SOURCE_ENDINGS, "include", "src", "cli"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"getenv\(", line) and path != ROOT / "src/core/environment.cpp":
                fail(path, number, "reads the environment by itself; call environment() of core/environment.hpp")
            for name in re.findall(r"\benvironment\(([^)]*)\)", line):
                if name.startswith("const char*"):
                    continue
                read.add(name.strip('"'))
                if name.strip('"') not in documented:
                    fail(path, number, f"reads {name}, which docs/architecture.md, Environment variables, does not list")
    for path in files({".py"}, "python/tessera"):
        for name in re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", path.read_text()):
            read.add(name)
            if name not in documented:
                fail(path, 0, f"reads {name}, which docs/architecture.md, Environment variables, does not list")
    for name in sorted(documented - read):
        fail("docs/architecture.md", 0, f"lists the variable {name}, which nobody reads")


# What cannot throw: they read what a plan or a thread already holds. Nor do those that fill in or destroy a struct.
NEVER_THROW = {"tessera_communicator_rank", "tessera_communicator_size", "tessera_decoder_place",
               "tessera_decoder_rows", "tessera_dist_plan_describe", "tessera_fail", "tessera_last_error",
               "tessera_partition_ranks", "tessera_partition_rows", "tessera_partition_spans", "tessera_plan_describe",
               "tessera_plan_kernel", "tessera_plan_key_tile", "tessera_plan_query_tile", "tessera_plan_workspace_size",
               "tessera_version"}
C_ABI = {"tessera.h": "src/api/c_api.cpp", "dlpack.h": "src/api/dlpack.cpp", "dist.h": "src/api/dist_api.cpp",
         "vulkan.h": "src/api/vulkan.cpp", "nccl.h": "src/api/nccl.cpp"}


def check_c_abi():
    """No exception leaves the C ABI, header by header: every function goes through guarded(), or is known to throw nothing."""
    for header, source in C_ABI.items():
        declared = set(re.findall(r"TESSERA_API[^;(]*?\b(tessera_\w+)\(", (ROOT / "include/tessera" / header).read_text()))
        block = "\n" + (ROOT / source).read_text().partition('extern "C" ')[2].partition('}  // extern "C"')[0]
        bodies = dict(re.findall(r"^[a-z][^;{}]*?\b(tessera_\w+)\([^{;]*\) (\{.*?\})(?=\n(?:[a-z}]|\n|\Z))", block, re.M | re.S))
        for name in sorted(declared - bodies.keys()):
            fail(source, 0, f"{name} was not found; is it defined in another way?")
        for name in sorted(declared & bodies.keys()):
            if "guarded" not in bodies[name] and name not in NEVER_THROW and not name.endswith(("_init", "_destroy")):
                fail(source, 0, f"{name} lets exceptions out; see guarded()")


def check_test_folders():
    """Every test lies in a folder, and docs/testing.md says of every folder what belongs there."""
    section = re.search(r"## The folders of tests/\n(.*?)\n#", (ROOT / "docs/testing.md").read_text(), re.S)
    documented = set(re.findall(r"^- `tests/(\w+)`:", section[1] if section else "", re.M))
    tracked = {p for p in (ROOT / "tests").iterdir() if p.name != "__pycache__"}
    folders = {p.name for p in tracked if p.is_dir()}
    for name in sorted(folders ^ documented):
        fail(f"tests/{name}", 0, 'is a folder without a line in docs/testing.md, "The folders of tests/", or a line '
                                 "without a folder")
    for path in sorted(tracked):
        if path.is_file() and path.name not in {"CMakeLists.txt", "tree_test.py"}:
            fail(path, 0, "lies in no folder of tests/")


def anchors(text):
    """The fragments that lead to the headings of a document, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_links():
    """Every link inside the documents leads to a file, and to a heading in it."""
    links = 0
    for path in [*ROOT.glob("*.md"), *files({".md"}, "docs")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for target in re.findall(r"\]\(([^)\s]+)\)", line):
                if re.match(r"\w+:", target):
                    continue
                links += 1
                name, _, fragment = target.partition("#")
                found = (path.parent / name).resolve() if name else path
                if not found.exists():
                    fail(path, number, f"links to {target}, which is not there")
                elif fragment and fragment not in anchors(found.read_text()):
                    fail(path, number, f"links to {target}; {found.name} has no such heading")
    if links < 50:
        fail("tests/tree_test.py", 0, f"found only {links} links; has their form changed?")


def check_index():
    """docs/index.md leads to every document, and to the page of moving tiles; mkdocs.yml too."""
    index, site = (ROOT / "docs/index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for path in [*files({".md"}, "docs"), ROOT / "docs/tiles/index.html"]:
        name = path.relative_to(ROOT / "docs").as_posix()
        if name == "index.md":
            continue
        if f"]({name}" not in index:
            fail("docs/index.md", 0, f"does not lead to {name}")
        if f": {name}\n" not in site:
            fail("mkdocs.yml", 0, f"has no entry for {name} under nav")


def check_versions():
    """The version is the same everywhere (docs/versions.md)."""
    found = {}
    for name, pattern in [("CMakeLists.txt", r"project\(tessera VERSION (\S+)"), ("pyproject.toml", r'^version = "(.*)"'),
                          ("CITATION.cff", r"^version: (.*)"),
                          ("packaging/vcpkg/tessera/vcpkg.json", r'"version": "(.*)"'), ("include/tessera/tessera.h", None)]:
        text = (ROOT / name).read_text()
        parts = re.findall(r"#define TESSERA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text)
        found[name] = ".".join(parts) if pattern is None else re.search(pattern, text, re.M)[1]
    if len(set(found.values())) != 1:
        fail("docs/versions.md", 0, f"the version differs: {found}")


SPAN = re.compile(r"`([^`\n]+)`")
ENDINGS = "cpp|hpp|cuh|c|h|py|sh|md|cmake|txt|toml|json|map"
FILE_NAME = re.compile(rf"[\w./-]*\w\.(?:{ENDINGS})")


def check_named_files():
    """Every file that a document or a comment names by its path, from the root, src/ or include/, is there."""
    known = {p.name for root in (ROOT, ROOT / "src") for p in root.iterdir() if p.is_dir()}
    sources = files(COMMENTED_ENDINGS | {".txt", ".toml", ".md"}, "include", "src", "cases", "cli", "tests", "fuzz",
                    "python", "bench", "examples", "tools", "cmake", "docs")
    for path in [*ROOT.glob("*.md"), *sources]:
        places = [ROOT, ROOT / "src", ROOT / "include", ROOT / "tests", ROOT / "python", path.parent]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in re.findall(rf"(?<![\w./-])((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:{ENDINGS}))\b", line):
                new = "two_pass" in name if path.name == "adding_a_kernel.md" else name in MADE  # by reader or build
                if name.split("/")[0] in known and not new and not any((place / name).exists() for place in places):
                    fail(path, number, f"names {name}, which is not there")


def check_references():
    """Every section of a document that a comment names, by file and title, is a heading or a bold term there."""
    references, titles = 0, {}
    for path in files({".md"}, "docs"):
        text = path.read_text()
        found = re.findall(r"^#+ (.*)", text, re.M) + re.findall(r"\*\*(.+?)\*\*", text)
        titles[path.name] = {re.sub(r"[`.]", "", title) for title in found}
    for path in files(COMMENTED_ENDINGS | {".txt"}, "include", "src", "cases", "cli", "tests", "fuzz", "bench", "tools"):
        text = re.sub(r"\n\s*(?://|#|\*)\s?", " ", path.read_text())
        for name, first, more in re.findall(r'docs/(\w+\.md), "([^"]+)"((?: and "[^"]+")*)', text):
            for title in [first, *re.findall(r'"([^"]+)"', more)]:
                references += 1
                if not any(known.startswith(title) for known in titles.get(name, ())):
                    fail(path, 0, f'refers to docs/{name}, "{title}", which is no section there')
    if references < 50:
        fail("tests/tree_test.py", 0, f"found only {references} references; has their form changed?")


def check_tour():
    """Each part of docs/tour.md names files that exist, and identifiers that stand in one of those files. A file is
    named by its path, or by its name alone if it lies in a folder, or beside a file, that the part has named before."""
    path, identifiers = ROOT / "docs/tour.md", 0
    for part in re.split(r"^(?=#+ )", re.sub(r"^```.*?^```\n", "", path.read_text(), flags=re.M | re.S), flags=re.M):
        title, named = part.partition("\n")[0], []
        spans = SPAN.findall(part)
        for span in [span for span in spans if FILE_NAME.fullmatch(span) or span.endswith("/")]:
            folders = [ROOT] if "/" in span else [other if other.is_dir() else other.parent for other in named]
            found = [folder / span for folder in folders if (folder / span).exists()]
            if not found:
                fail(path, 0, f"{title}: names {span}, which is not there")
            named += found[:1]
        text = "\n".join(p.read_text() for p in named if p.is_file())
        for span in spans:
            if re.fullmatch(r"[A-Za-z_][\w:]*", span):
                identifiers += 1
                if not re.search(rf"\b{span.split('::')[-1]}\b", text):
                    fail(path, 0, f"{title}: names {span}, which is in none of the files that this part names")
        for count in re.findall(r"\b\d+ lines\b", part):
            fail(path, 0, f"{title}: counts lines ({count}), which soon is wrong")
    if identifiers < 60:
        fail("tests/tree_test.py", 0, f"found only {identifiers} identifiers in docs/tour.md; has its form changed?")


def check_results():
    """docs/results/, the headline tables and the README's pictures are what bench/results/ gives."""
    for tool in ["tools/benchmarks.py", "tools/front_page.py"]:
        done = subprocess.run([sys.executable, "-B", ROOT / tool, "--check"], capture_output=True, text=True)
        if done.returncode:
            fail(f"{tool} --check", 0, (done.stdout + done.stderr).strip())


def check_mutants():
    """Every deliberate fault of tools/mutants/ still fits the tree: its text is there, and the test that it names."""
    done = subprocess.run([sys.executable, "-B", ROOT / "tools/mutants.py", "--check"], capture_output=True, text=True)
    if done.returncode:
        fail("tools/mutants.py --check", 0, (done.stdout + done.stderr).strip())


def check_commits():
    """Commits that are not on main yet have a subject of at most 65 characters and a body (CONTRIBUTING.md)."""
    command = ["git", "-C", ROOT, "log", "--no-merges", "--format=%h%x01%s%x01%b%x02", "main..HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return  # no git
    for commit in done.stdout.split("\x02") if done.returncode == 0 else []:  # else: no repository, or no main in it
        if commit.strip():
            name, subject, body = commit.strip().split("\x01")
            if len(subject) > 65:
                fail(f"commit {name}", 0, f"its subject has {len(subject)} characters; at most 65")
            if not body.strip():
                fail(f"commit {name}", 0, f'"{subject}" has no body that says why')


def main():
    for check in [check_includes, check_licence, check_text, check_headers, check_sentences, check_environment,
                  check_c_abi, check_test_folders, check_links, check_index, check_versions, check_named_files,
                  check_references, check_tour, check_results, check_mutants, check_commits]:
        before = len(failures)
        check()
        print(f"{check.__name__}: {'ok' if len(failures) == before else f'{len(failures) - before} failures'}")
    print("\n".join(failures))
    return 1 if failures else 0


sys.exit(main())
