#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# pages_test.py SITE SCREENSHOTS: the documentation site as it was built (`make site`). Every link and every picture of
# every page leads somewhere, fragments included; nothing is fetched from other places; the reference holds every public
# name; and in a headless Chromium the pages open without a complaint, on a phone too, and search finds what it should.
# Run by `make site-test`. Without Chromium the part in the browser is skipped, and says so.
# Implements docs/testing.md, "Pages".
import functools
import http.server
import re
import sys
import threading
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

from browser import Browser, find_browser

ROOT = Path(__file__).resolve().parent.parent.parent
SITE, SCREENSHOTS = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
failures = []


class Page(HTMLParser):
    """Addresses that a page uses, with whether the browser fetches them by itself, and names that can be linked to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.names = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.names |= {given[key] for key in ("id", "name") if given.get(key)}
        for key in ("href", "src"):
            fetched = key == "src" or tag == "link" and given.get("rel") in ("stylesheet", "icon")
            if given.get(key):
                self.links.append((given[key], fetched))


def check_links():
    pages = {path: Page(path) for path in sorted(SITE.rglob("*.html"))}
    links = 0
    for path, page in pages.items():
        for target, fetched in page.links:
            parts = urllib.parse.urlsplit(target)
            name = path.relative_to(SITE)
            if parts.scheme in ("http", "https") or parts.netloc:
                if fetched:
                    failures.append(f"{name} fetches {target} from another place")
            elif parts.scheme == "" and path.name != "404.html":  # whose links begin at the server's root
                links += 1
                found = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
                found = found / "index.html" if found.is_dir() else found
                fragment = urllib.parse.unquote(parts.fragment)
                if not found.exists():
                    failures.append(f"{name} links to {target}, which is not there")
                elif fragment and found in pages and fragment not in pages[found].names and "=" not in fragment:
                    failures.append(f"{name} links to {target}, which has no such place")
    if len(pages) < 20 or links < 500:
        failures.append(f"found only {len(pages)} pages and {links} links")
    return f"{len(pages)} pages, {links} links"


def public_names():
    """{page: names} that the reference must have headings for."""
    header = "".join(path.read_text() for path in (ROOT / "include/tessera").glob("*.h"))
    python = {module: (ROOT / "python/tessera" / path).read_text() for module, path in (
        ("tessera", "__init__.py"), ("tessera.torch", "torch.py"), ("tessera.jax", "jax.py"), ("tessera.dist", "dist.py"),
        ("tessera.transformers", "transformers.py"), ("tessera.flash_attn", "flash_attn/__init__.py"),
        ("tessera.flash_attn.bert_padding", "flash_attn/bert_padding.py"),
        ("tessera.flash_attn.layers.rotary", "flash_attn/layers/rotary.py"),
        ("tessera.flash_attn_interface", "flash_attn_interface.py"),
        ("tessera.flash_attn.cute.interface", "flash_attn/cute/interface.py"))}
    types = "".join(path.read_text() for path in (ROOT / "include/tessera").iterdir())
    offered = {}
    for module, text in python.items():
        listed = re.search(r"__all__ = \[(.*?)\]", text, re.S)
        names = re.findall(r'"(\w+)"', listed[1]) if listed else re.findall(r"^(?:def|class) (\w+)", text, re.M)
        offered[module] = [name for name in names if name[0] != "_"]
    types = re.sub(r"^namespace detail \{.*?^\}  // namespace detail$", "", types, flags=re.M | re.S)
    return {"c": {*re.findall(r"TESSERA_API[^;(]*?\b(tessera_\w+)\(", header),
                  *re.findall(r"^typedef (?:struct|enum) (\w+)", header, re.M)},
            "cpp": {*re.findall(r"^(?:struct|class|enum class) (\w+)", types, re.M), "default_scale",
                    *re.findall(r"^inline [\w:]+ (\w+)\(", types, re.M)},
            "python": {f"{module}.{name}" for module, names in offered.items() for name in names}}


def check_reference():
    count = 0
    for page, names in public_names().items():
        text = (SITE / "reference" / f"{page}.html").read_text()
        headings = set(re.findall(r"<h3[^>]*><code>([^<]+)</code>", text))
        failures.extend(f"reference/{page}.html has no heading for {name}" for name in sorted(names - headings))
        if "detail::" in text or "TESSERA_API" in text:
            failures.append(f"reference/{page}.html shows what is not for users")
        count += len(names)
    return f"{count} names"


SEARCH = """(async () => {
  const wait = (ms) => new Promise((r) => setTimeout(r, ms));
  const input = document.querySelector("input.md-search__input");
  document.querySelector("#__search").checked = true;
  input.focus();
  input.value = "online softmax";
  for (let tries = 0; tries < 100; ++tries) {
    input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
    input.dispatchEvent(new Event("input", { bubbles: true }));
    await wait(200);
    const found = Array.from(document.querySelectorAll(".md-search-result__link"), (x) => x.getAttribute("href"));
    if (found.length) return found;
  }
  return [];
})()"""


# Whether the page's ground is nearer to white than to black.
BRIGHT = """(() => {
  const canvas = document.createElement("canvas").getContext("2d");
  canvas.fillStyle = getComputedStyle(document.body).backgroundColor;
  canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data.slice(0, 3).reduce((a, b) => a + b) > 384;
})()"""


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and says nothing."""

    def log_message(self, *_):
        pass


def check_browser(program):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address, browser = f"http://127.0.0.1:{server.server_port}", Browser(program)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    try:
        pages = ["index.html", "algorithm.html", "reference/c.html", "reference/python.html", "getting_started.html",
                 "benchmarks.html", "tiles/index.html"]
        for page in pages:
            for width, dark in [(1400, False), (375, True)]:
                browser.open(f"{address}/{page}", width, 900, dark, phone=width < 500)
                kind = f"{page.removesuffix('.html').replace('/', '-')}-{'dark' if dark else 'light'}"
                browser.screenshot(SCREENSHOTS / f"site-{kind}.png")
                bright = browser.ask(BRIGHT)
                if bright != (not dark):
                    failures.append(f"{page} is {'bright' if bright else 'dark'} where {kind} was asked for")
                wide = browser.ask("document.documentElement.scrollWidth")
                if wide > width:
                    failures.append(f"{page} is {wide} pixels wide on a screen of {width}")
                broken = browser.ask("""Array.from(document.images).filter(x => x.complete && !x.naturalWidth)
                    .map(x => x.src)""")
                failures.extend(f"{page} shows a broken picture: {source}" for source in broken)
        browser.open(f"{address}/index.html")
        found = browser.ask(SEARCH)
        if not any("algorithm.html" in link for link in found):
            failures.append(f"a search for `online softmax` finds {found}")
        failures.extend(f"the browser complains: {text}" for text in browser.complaints)
    finally:
        browser.close()
        server.shutdown()
    return f"{len(pages)} pages in light and dark, search"


def main():
    program = find_browser()
    for check in [check_links, check_reference, *([functools.partial(check_browser, program)] if program else [])]:
        before = len(failures)
        what = check()
        name = getattr(check, "__name__", "check_browser")
        print(f"{name}: {what}: {f'{len(failures) - before} failures' if len(failures) > before else 'ok'}", flush=True)
    if not program:
        print("check_browser: skipped, there is no Chromium on the path")
    print(*failures, sep="\n")
    return 1 if failures else 0


sys.exit(main())
