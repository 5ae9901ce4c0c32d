# SPDX-License-Identifier: Apache-2.0
"""What MkDocs does besides turning docs/ into pages: adds the reference (reference.py) and the documents of the tree's
root, mends links that lead out of docs/, and lets the interactive page link to pages. Named by mkdocs.yml.
"""
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).resolve().parent))
import reference  # noqa: E402: tools/site is no package

ROOT = reference.ROOT
# Documents of the root, and the pages that they become.
ROOT_PAGES = {"README.md": "getting_started.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
              "SECURITY.md": "security.md"}
TILES = "tiles/index.html"


def on_files(files, config):
    made = {"c": reference.c_reference, "cpp": reference.cpp_reference, "python": reference.python_reference}
    pages = {f"reference/{name}.md": make() for name, make in made.items()}
    pages |= {page: (ROOT / name).read_text() for name, page in ROOT_PAGES.items() if (ROOT / name).exists()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def mended(target, folder):
    """A link of a document in `folder` of the tree, as a link from its page; None if it leads to a file that is no page."""
    name, _, fragment = target.partition("#")
    if not name or re.match(r"\w+:", target):
        return target
    found = (ROOT / folder / name).resolve().relative_to(ROOT).as_posix()
    fragment = f"#{fragment}" if fragment else ""
    if found in ROOT_PAGES:
        found = f"docs/{ROOT_PAGES[found]}"
    if not found.startswith("docs/"):
        return None
    return "/" + found.removeprefix("docs/") + fragment  # from the root of the site


def on_page_markdown(markdown, page, config, files):
    source = page.file.src_uri
    if source.startswith("reference/"):
        return markdown
    in_root = {new: old for old, new in ROOT_PAGES.items()}
    folder = "." if source in in_root else (Path("docs") / source).parent.as_posix()

    def link(match):
        mark, words, target = match[1], match[2], mended(match[3], folder)
        if target is None:
            return words  # a source file: the site has no page for it
        if target.startswith("/"):
            target = "../" * source.count("/") + target[1:]
        return f"{mark}[{words}]({target})"
    parts = re.split(r"(^```.*?^```\n)", markdown, flags=re.M | re.S)
    return "".join(part if index % 2 else re.sub(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", link, part)
                   for index, part in enumerate(parts))


def on_post_build(config):
    page = Path(config["site_dir"]) / TILES
    page.write_text(re.sub(r'href="(\.\./[\w/]+)\.md', r'href="\1.html', page.read_text()))
