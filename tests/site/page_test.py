#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# page_test.py TESSERA ADDRESS FOLDER: the page docs/tiles as a reader meets it, in a headless Chromium: the numbers on
# the screen are the library's, keys and sliders step, the address keeps the settings, nothing is wider than a phone,
# light and dark can be read. ADDRESS is a file or http address of its index.html; screenshots go to FOLDER.
# Run by `make site-test`; ends with status 77 where there is no Chromium. Implements docs/testing.md, "Pages".
import sys
import tempfile
from pathlib import Path

from browser import Browser, find_browser
from library import flat_answers, run_library

PROGRAM, ADDRESS, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
failures, checks = [], 0

SETTINGS = ["", "n=13&br=3&bc=5&causal=0&left=4&right=2&lengths=5%2C0%2C8&heads=4%2F2&d=3", "seed=identity&br=2&bc=2"]

# All numbers of a table on the screen, and the whole state behind it.
CELLS = "Array.from(document.querySelectorAll('#chip table[data-name=\"%s\"] td'), x => Number(x.dataset.value))"
CASE = """(() => {
  const plain = (x) => typeof x === "number" ? x : Array.from(x, plain);
  const values = (o) => Object.fromEntries(Object.entries(o).map(([k, v]) => [k, plain(v)]));
  const { problem, inputs } = Tiles.page.current();
  return { problem, inputs: values(inputs), answers: values(Tiles.answers(problem, inputs)) };
})()"""
WHERE = """(() => { const { step, steps } = Tiles.page.current();
  return { kind: step.kind, h: step.h, kv: step.kv, begin: step.sequence.begin, I: step.I, J: step.J, index: step.index,
           steps, traffic: step.traffic.every }; })()"""


def expect(condition, sentence):
    global checks
    checks += 1
    if not condition:
        failures.append(sentence)


def close(a, b, room):
    return len(a) == len(b) and all(abs(x - y) <= room * (1 + abs(y)) for x, y in zip(a, b))


def rows_of(flat, heads, width, head, first, count):
    """Rows of one head of a flat [token][head][width]."""
    return [flat[((first + t) * heads + head) * width + e] for t in range(count) for e in range(width)]


def check_numbers(browser):
    """Every tile of O, dK and dV that the page writes, and dQ after its last addition, as they stand on the screen."""
    for settings in SETTINGS:
        for pass_name in ["forward", "backward"]:
            browser.open(f"{ADDRESS}#{settings}&pass={pass_name}")
            case = browser.ask(CASE)
            problem, page = case["problem"], flat_answers(case["answers"])
            with tempfile.TemporaryDirectory() as folder:
                library = run_library(PROGRAM, case, Path(folder), "<f8")
            for tensor, values in page.items():
                expect(close(values, library[tensor], 1e-12), f"{settings}: {tensor} is not the library's")
            d, last_dq, read = problem["d"], {}, 0
            while True:
                where = browser.ask(WHERE)
                written = {"write-o": [("O", "o", "I", "hq", "h")],
                           "write-kv": [("dK", "dk", "J", "hk", "kv"), ("dV", "dv", "J", "hk", "kv")]}
                for name, tensor, tile, heads, head in written.get(where["kind"], []):
                    shown = browser.ask(CELLS % name)
                    wanted = rows_of(library[tensor], problem[heads], d, where[head],
                                     where["begin"] + where[tile]["begin"], where[tile]["size"])
                    expect(close(shown, wanted, 1e-12), f"{settings}: {name} on the screen at step {where['index']}")
                    read += 1
                if where["kind"] == "dq":
                    first = where["begin"] + where["I"]["begin"]
                    last_dq[where["h"], first, where["I"]["size"]] = browser.ask(CELLS % "dQ")
                if where["index"] == where["steps"] - 1:
                    break
                browser.press("ArrowRight")
            for (head, first, count), shown in last_dq.items():
                wanted = rows_of(library["dq"], problem["hq"], d, head, first, count)
                expect(close(shown, wanted, 1e-12), f"{settings}: dQ of head {head} from token {first}")
                read += 1
            expect(read > 0, f"{settings}: no tile was read from the screen")
            counted = browser.ask("Number(document.querySelector('#traffic output').dataset.bytes)")
            expect(counted == sum(where["traffic"].values()), f"{settings}: the screen says {counted} bytes")


def check_keys(browser):
    browser.open(ADDRESS)
    step = "Tiles.page.current().step.index"
    browser.press("ArrowRight"), browser.press("ArrowRight"), browser.press("ArrowLeft")
    expect(browser.ask(step) == 1, "two steps on and one back should be step 1")
    expect(browser.ask("location.hash") == "#step=2", "the address should keep the step")
    browser.press("ArrowRight", shift=True), browser.press("ArrowRight", shift=True)
    kind = browser.ask("Tiles.page.current().step.kind")
    expect(kind == "load-k" and browser.ask(step) == 8, "Shift should go to a tile")
    browser.press("End")
    expect(browser.ask(f"{step} === Tiles.page.current().steps - 1"), "End should lead to the last step")
    browser.press("Home")
    expect(browser.ask(step) == 0, "Home should lead to the first step")
    browser.press("b")
    expect(browser.ask("Tiles.page.state.pass") == "backward", "b should switch to the backward pass")
    browser.press("f"), browser.press("r")
    expect(browser.ask("Tiles.page.state.row") == 1, "r should follow the next row")
    browser.ask("{ const s = document.getElementById('step'); s.value = 7; s.dispatchEvent(new Event('input')); }")
    expect(browser.ask(step) == 7, "the slider should lead to its step")
    browser.ask("document.getElementById('speed').value = 60")
    browser.press(" ")
    moved = browser.ask(f"new Promise(r => setTimeout(() => r({step}), 900))")
    browser.press(" ")
    stopped = browser.ask(step)
    still = browser.ask(f"new Promise(r => setTimeout(() => r({step}), 300))")
    expect(moved > 8, f"space should play; after a while step is {moved}")
    expect(still == stopped, "space should pause")
    for _ in range(40):  # everything that can be used can be reached by Tab
        browser.press("Tab")
    reached = browser.ask("document.activeElement !== document.body")
    expect(reached, "Tab should reach the controls")
    unnamed = browser.ask("""Array.from(document.querySelectorAll('button, input, select')).filter(x =>
        !(x.labels?.length || x.getAttribute('aria-label') || x.textContent.trim())).map(x => x.id)""")
    expect(unnamed == [], f"controls without a name: {unnamed}")


def check_settings(browser):
    """Controls change the problem; what is out of range is brought into it."""
    browser.open(ADDRESS)
    for control, value, event, expression, wanted in [
            ("n", "20", "input", "problem.n", 20), ("br", "5", "input", "problem.br", 5),
            ("bc", "2", "input", "problem.bc", 2), ("d", "3", "input", "problem.d", 3),
            ("left", "2", "change", "problem.left", 2), ("heads", "4/2", "change", "problem.hk", 2),
            ("lengths", "5 99", "input", "problem.sequences.map(s => s.length).join()", "5,15"),
            ("seed", "identity", "change", "problem.n", 4)]:
        browser.ask(f"{{ const x = document.getElementById('{control}'); x.value = '{value}';"
                    f" x.dispatchEvent(new Event('{event}')); }}")
        found = browser.ask(f"Tiles.page.current().{expression}")
        expect(found == wanted, f"{control} = {value}: {expression} is {found}, not {wanted}")
    browser.open(f"{ADDRESS}#n=999&br=-3&d=zebra&heads=7%2F2&step=100000")
    found = browser.ask("(({ n, br, d, hq }) => [n, br, d, hq])(Tiles.page.current().problem)")
    expect(found == [32, 1, 4, 1], f"an address out of range gives {found}")
    browser.open(f"{ADDRESS}#n=32&left=20&right=31&seed=42&lengths=9&heads=4%2F2")
    shown = browser.ask("['left', 'right', 'seed', 'heads'].map(x => document.getElementById(x).value).join(' ')")
    expect(shown == "20 31 42 4/2", f"the controls show {shown} for an address with other values")
    summary = browser.ask("document.getElementById('summary').textContent")
    expect(summary == "Forward, 32 tokens, tiles 4 × 4, causal, window 20/31, 2 sequences, heads 4/2", summary)


# The least contrast of text with what is behind it, by WCAG's formula, over the parts of the page that hold text.
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
                            return Array.from(canvas.getImageData(0, 0, 1, 1).data); };
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, part, k) => sum + part * linear(colour[k] / 255), 0);
  const behind = (x) => {
    const colour = rgb(getComputedStyle(x).backgroundColor);
    return colour[3] > 250 || !x.parentElement ? colour : behind(x.parentElement);
  };
  let least = 99, where = "";
  for (const x of document.querySelectorAll("h1, h2, p, td, label, legend, summary, output, .legend, caption, th")) {
    if (!x.textContent.trim() || x.closest(".absent, :disabled") || !x.checkVisibility()) continue;
    const [a, b] = [light(rgb(getComputedStyle(x).color)), light(behind(x))].sort((p, q) => q - p);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < least) (least = contrast), (where = `${x.tagName} ${x.className} ${x.textContent.slice(0, 30)}`);
  }
  return [least, where];
})()"""


def check_looks(browser):
    FOLDER.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for width, phone in [(1360, False), (375, True)]:
        for dark in [False, True]:
            for pass_name, step in [("forward", 17), ("backward", 45)]:
                browser.open(f"{ADDRESS}#pass={pass_name}&step={step}", width, 900, dark, phone)
                name = f"{'phone' if phone else 'desktop'}-{'dark' if dark else 'light'}-{pass_name}"
                pictures[name] = browser.screenshot(FOLDER / f"{name}.png")
                wide = browser.ask("document.documentElement.scrollWidth")
                expect(wide <= width, f"{name}: the page is {wide} pixels wide")
                least, where = browser.ask(CONTRAST)
                expect(least >= 4.5, f"{name}: contrast {least:.2f} at {where}")
    for width in [1360, 375]:  # tiles as large as they get
        for pass_name, step in [("forward", 17), ("backward", 45)]:
            browser.open(f"{ADDRESS}#n=32&d=8&br=8&bc=8&pass={pass_name}&step={step}", width, 900, phone=width < 500)
            wide = browser.ask("Array.from(document.querySelectorAll('#chip td'))"
                               ".filter(x => x.scrollWidth > x.clientWidth + 1).length")
            expect(wide == 0, f"{pass_name}, {width} pixels: {wide} numbers are wider than their places")
    expect(len(set(pictures.values())) == len(pictures), "two of the screenshots are the same")
    expect(all(len(p) > 20000 for p in pictures.values()), "a screenshot is all but empty")
    browser.open(ADDRESS)
    before = browser.screenshot()
    browser.press("d")
    expect(before != browser.screenshot(), "d should switch to dark")
    expect(browser.ask("document.documentElement.dataset.theme") == "dark", "d should say so")


def check_pictures(browser):
    """A state looks the same however it was reached, and unlike its neighbours."""
    for problem in ["pass=forward", "pass=backward", "pass=forward&n=20&causal=1&heads=4%2F2&lengths=5+15"]:
        def picture(step, key=None, slider=None, address=f"{ADDRESS}#{problem}"):
            browser.open(f"{address}&step={step}")
            if key:
                browser.press(key)
            if slider:
                browser.ask(f"{{ const s = document.getElementById('step'); s.value = {slider};"
                            " s.dispatchEvent(new Event('input')); }")
            return browser.screenshot()

        wanted = picture(30)
        for way in [(29, "ArrowRight"), (31, "ArrowLeft"), (1, None, 29)]:
            differs = browser.difference(wanted, picture(*way))
            expect(differs < 20, f"{problem}: step 30 has {differs} other pixels when reached by {way}")
        for step in [29, 31]:
            differs = browser.difference(wanted, picture(step))
            expect(differs > 200, f"{problem}: step {step} has only {differs} other pixels than step 30")


def main():
    program = find_browser()
    if not program:
        print("skipped: there is no Chromium on the path")
        return 77
    browser = Browser(program)
    try:
        for check in [check_numbers, check_keys, check_settings, check_looks, check_pictures]:
            before = len(failures)
            check(browser)
            found = len(failures) - before
            print(f"{check.__name__}: {f'{found} failures' if found else 'ok'}", flush=True)
        failures.extend(f"the browser complains: {text}" for text in browser.complaints)
    finally:
        browser.close()
    print(f"{checks} checks", *failures, sep="\n")
    return 1 if failures or checks < 100 else 0


sys.exit(main())
