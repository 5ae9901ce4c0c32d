# SPDX-License-Identifier: Apache-2.0
# The files of the tree and the list of what is wrong with them, for the rules beside this file (tests/tree_test.py).
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE_ENDINGS, PAGE_ENDINGS = {".cpp", ".hpp", ".c", ".h", ".cuh", ".cu"}, {".js", ".css"}
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
