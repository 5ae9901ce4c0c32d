#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tree_test.py [COMPILER]: the tree keeps its shape. Include directions, self-contained headers, file lengths, licence
# and comment at the top, no loose ends, a test's sentence for every sentence of the checks, a reason for every folder
# of tests, documents that name what is there, figures that are up to date, mutants that fit. The rules themselves are in
# tests/tree/. Python's standard library only. Run by ctest. Implements docs/testing.md, "Rules of the tree".
import subprocess
import sys
from functools import partial

sys.dont_write_bytecode = True
from tree import documents, includes, sources
from tree.files import ROOT, fail, failures

COMPILER = sys.argv[1] if len(sys.argv) > 1 else "c++"


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


RULES = [includes.check_includes, sources.check_licence, sources.check_text, partial(includes.check_headers, COMPILER),
         sources.check_sentences, sources.check_environment, sources.check_c_abi, documents.check_test_folders,
         documents.check_links, documents.check_index, documents.check_first_screen, documents.check_description,
         documents.check_versions, documents.check_named_files, documents.check_references, documents.check_reference,
         documents.check_tour, check_results, check_mutants, check_commits]


def main():
    for rule in RULES:
        before = len(failures)
        rule()
        name = getattr(rule, "func", rule).__name__
        print(f"{name}: {'ok' if len(failures) == before else f'{len(failures) - before} failures'}")
    print("\n".join(failures))
    return 1 if failures else 0


sys.exit(main())
