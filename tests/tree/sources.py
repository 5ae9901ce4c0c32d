# SPDX-License-Identifier: Apache-2.0
# Rules of the tree about the text of source files: licence, comment at the top, lengths, a test for every refusal,
# the environment, the C ABI. Called by tests/tree_test.py.
import re

from tree.files import COMMENTED_ENDINGS, PAGE_ENDINGS, ROOT, SOURCE_ENDINGS, fail, files

MAX_LINES = 450
TEXT_FOLDERS = ["include", "src", "cases", "cli", "tests", "fuzz", "examples", "bench", "tools", "cmake", "packaging",
                "python", "docs"]
LICENCE = "SPDX-License-Identifier: Apache-2.0"


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
    """Every source file says its licence in its first line, or behind its shebang or doctype, as SPDX asks."""
    marks = {**dict.fromkeys(SOURCE_ENDINGS | {".js"}, "// {}"), **dict.fromkeys([".c", ".h", ".css", ".map"], "/* {} */"),
             ".html": "<!-- {} -->"}
    root = [ROOT / name for name in ("CMakeLists.txt", "Makefile", "CITATION.cff", "mkdocs.yml", "pyproject.toml")]
    checked = 0
    for path in [*files(COMMENTED_ENDINGS | {".txt", ".in", ".toml", ".map", ".dict", ".html"}, *TEXT_FOLDERS), *root]:
        if path.suffix == ".txt" and path.name != "CMakeLists.txt":
            continue
        checked += 1
        lines = [line for line in path.read_text().splitlines()[:2] if not line.startswith(("#!", "<!DOCTYPE"))]
        expected = marks.get(path.suffix, "# {}").format(LICENCE)
        if lines[:1] != [expected]:
            fail(path, 1, f'must begin with the line "{expected}"')
    if checked < 600:
        fail("tests/tree/sources.py", 0, f"found only {checked} source files; has the tree moved?")


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
                 "src/api/dist_api.cpp", "src/api/dist_rules.hpp", "src/api/nccl.cpp", "src/dist/attention.cpp"]:
        for line, statement in statements((ROOT / name).read_text()):
            rules += 1
            for piece in literals(statement):
                if " " in piece.strip() and not any(piece in sentence for sentence in expected):
                    fail(name, line, f'no test expects the sentence with "{piece}"')
    if rules < 50:
        fail("tests/tree/sources.py", 0, f"found only {rules} rules; has the way of refusing changed?")


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
