# SPDX-License-Identifier: Apache-2.0
# Rules of the tree about documents: every link, file, section and name that they hold is there, and every folder of
# tests has its line. Called by tests/tree_test.py.
import re
import sys

from tree.files import COMMENTED_ENDINGS, ROOT, fail, files

MADE = {"vulkan/vulkan.h", "vulkan/layout_check.hpp", "vulkan/spirv.hpp"}  # Vulkan's own, and made by the build
SPAN = re.compile(r"`([^`\n]+)`")
ENDINGS = "cpp|hpp|cuh|c|h|py|sh|md|cmake|txt|toml|json|map"
FILE_NAME = re.compile(rf"[\w./-]*\w\.(?:{ENDINGS})")


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
        fail("tests/tree/documents.py", 0, f"found only {links} links; has their form changed?")


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


def check_first_screen():
    """The README begins with a sentence, a picture, a plot, when to use it and when not, then the two commands."""
    text = (ROOT / "README.md").read_text()
    parts = ["Exact attention", "](docs/pictures/tiles.svg)", "](docs/pictures/speed.svg)", "| use it when |", "make demo ",
             "make test ", "\n## "]
    places = [text.find(part) for part in parts]
    if -1 in places or places != sorted(places):
        fail("README.md", 0, f"does not begin with {', '.join(parts[:-1])}, in this order")


def check_description():
    """What the Python package says of itself where packages are listed has no link or picture that is broken there."""
    name = re.search(r'^readme = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if not target.startswith("https://"):
                fail(ROOT / name, number, f"links to {target}, which is in the tree alone")


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
        fail("tests/tree/documents.py", 0, f"found only {references} references; has their form changed?")


def check_reference():
    """Every heading of the site's reference has words under it: a comment of the headers, or a docstring."""
    sys.path.insert(0, str(ROOT / "tools/site"))
    import reference
    for page in [reference.c_reference(), reference.cpp_reference(), reference.python_reference()]:
        headings = re.split(r"^####? `", page, flags=re.M)[1:]
        for name, _, text in [heading.partition("`\n") for heading in headings]:
            prose = re.sub(r"^## .*", "", re.sub(r"^```(?!text).*?^```", "", text, flags=re.M | re.S), flags=re.M | re.S)
            if not prose.strip():
                fail("tools/site/reference.py", 0, f"finds no words about {name}: a comment, or a docstring")
        if len(headings) < 30:
            fail("tools/site/reference.py", 0, f"finds only {len(headings)} names on a page; has their form changed?")


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
        fail("tests/tree/documents.py", 0, f"found only {identifiers} identifiers in docs/tour.md; has its form changed?")
