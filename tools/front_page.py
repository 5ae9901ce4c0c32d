#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the two pictures of the README's first screen, docs/pictures/tiles.svg and speed.svg.

Usage: python3 tools/front_page.py            writes them
       python3 tools/front_page.py --check    only says whether they are up to date; tests/tree_test.py calls it

tiles.svg is one head of 16 tokens in real numbers, the first problem of docs/tiles, halfway through the forward pass.
speed.svg shows figures of bench/results/ with date and machine, peers in the same run; docs/benchmarks.md has the method.
"""
import json
import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES, RESULTS = ROOT / "docs" / "pictures", ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT / "bench"))
from tables import points  # noqa: E402: bench/ is no package

INK, FAINT, GRID, PAPER = "#22303c", "#66737d", "#dde1e4", "#fcfcfa"
BLUE, ORANGE, GREEN, VIOLET, ROSE, GREY = "#2f6ba8", "#c9701a", "#3a8a5f", "#7453a6", "#b1436a", "#7d8890"


class Sheet:
    """A sheet of paper with a light background of its own, so that it can be read on a dark page too."""

    def __init__(self, width, height, title):
        self.lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                      f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
                      f"<title>{title}</title>"]
        self.rect(0, 0, width, height, PAPER, rx=8)

    def rect(self, x, y, w, h, fill, opacity=1.0, stroke="none", line=1.0, dash="", rx=0.0):
        extra = (f' fill-opacity="{opacity:.2f}"' if opacity < 1 else "") + (f' rx="{rx:g}"' if rx else "")
        extra += f' stroke="{stroke}" stroke-width="{line:g}"' if stroke != "none" else ""
        extra += f' stroke-dasharray="{dash}"' if dash else ""
        self.lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}"{extra}/>')

    def path(self, points, stroke, width=2.0):
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.lines.append(f'<polyline points="{steps}" fill="none" stroke="{stroke}" stroke-width="{width:g}" '
                          'stroke-linejoin="round"/>')

    def dot(self, x, y, fill, radius=3.2):
        self.lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>')

    def text(self, x, y, words, fill=INK, size=13, anchor="start", bold=False):
        weight = ' font-weight="bold"' if bold else ""
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.lines.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" text-anchor="{anchor}"{weight}>'
                          f"{words}</text>")

    def svg(self):
        return "\n".join([*self.lines, "</svg>", ""])


# --- tiles.svg -------------------------------------------------------------------------------------------------------

N, D, TILE = 16, 4, 4


def numbers(seed):
    """The integers of the page's generator (docs/tiles/problem.js, mulberry32)."""
    state, mask = seed * 0x9E3779B9 & 0xFFFFFFFF, 0xFFFFFFFF
    while True:
        state = state + 0x6D2B79F5 & mask
        t = (state ^ state >> 15) * (1 | state) & mask
        t = (t + ((t ^ t >> 7) * (61 | t) & mask) & mask) ^ t
        yield (t ^ t >> 14) & mask


def attention():
    """Q, K, V, S, P and O of the page's first problem: causal, one head."""
    source = numbers(1)
    Q, K, V = ([[((next(source) >> 8) % 17 - 8) / 4 for _ in range(D)] for _ in range(N)] for _ in range(3))
    dot = lambda a, b: sum(x * y for x, y in zip(a, b))
    S = [[dot(Q[i], K[j]) / math.sqrt(D) if j <= i else -math.inf for j in range(N)] for i in range(N)]
    P = []
    for row in S:
        top = max(row)
        terms = [math.exp(s - top) for s in row]
        P.append([t / sum(terms) for t in terms])
    O = [[sum(P[i][j] * V[j][d] for j in range(N)) for d in range(D)] for i in range(N)]
    return Q, K, V, S, P, O


def strength(value, most):
    return 0.08 + 0.85 * min(1.0, abs(value) / most)


def cells(sheet, x, y, matrix, cell, hue, most, across=None, down=True):
    """Numbers as small squares: their own hue where positive, grey where negative."""
    across = across or cell
    for i, row in enumerate(matrix):
        for d, value in enumerate(row):
            if value is None or value == -math.inf:
                continue
            at = (x + d * across, y + i * cell, across, cell) if down else (x + i * cell, y + d * across, cell, across)
            sheet.rect(at[0], at[1], at[2] - 0.8, at[3] - 0.8, hue if value >= 0 else GREY, strength(value, most))


def draw_tiles():
    Q, K, V, S, P, O = attention()
    sheet = Sheet(940, 400, "Unfused attention, and attention tile by tile")
    # Unfused: two matrices in memory.
    sheet.text(36, 40, "Unfused", bold=True, size=17)
    sheet.text(36, 60, "S and P, N x N each, are written to memory and read.", FAINT)
    cell, top = 10.2, 96
    for x, name, matrix, most in [(36, "S", S, 6), (236, "P", P, 1)]:
        sheet.rect(x - 3, top - 3, N * cell + 6, N * cell + 6, "none", stroke=ROSE, line=1.4, rx=3)
        cells(sheet, x, top, matrix, cell, ROSE, most)
        sheet.text(x, top - 10, name, ROSE, 14, bold=True)
    sheet.text(36, 296, "16 N² bytes of scores go through memory in f32,", INK)
    sheet.text(36, 315, "28 N² more in the backward pass.", INK)
    sheet.text(36, 343, "N = 16,384: 2 GiB for S and P of one head.", FAINT)
    # Tile by tile, at query tile 2 and key tile 0.
    left, top, cell, strip = 556, 148, 13.6, 12.0
    sheet.text(470, 40, "Tessera", bold=True, size=17)
    sheet.text(470, 60, "One tile of scores exists at a time, in fast memory.", FAINT)
    cells(sheet, left, 78, K, cell, ORANGE, 2, strip * 0.62, down=False)
    cells(sheet, left, 112, V, cell, GREEN, 2, strip * 0.62, down=False)
    cells(sheet, left - 4 * strip - 12, top, Q, cell, BLUE, 2, strip)
    right = left + N * cell + 12
    sheet.rect(right, top, 4 * strip, N * cell, "#eef0f1")
    cells(sheet, right, top, O[:8], cell, VIOLET, 2, strip)
    sheet.rect(left, top, N * cell, N * cell, "none", stroke="#aab3ba", dash="2 4")
    for i in range(0, N, TILE):
        for j in range(0, i + 1, TILE):
            done = i < 8
            sheet.rect(left + j * cell, top + i * cell, TILE * cell, TILE * cell, ROSE, 0.22 if done else 0.05, "#c4cad0", 0.8)
    current = [[P[8 + i][j] / max(P[8 + i][:4]) for j in range(4)] for i in range(4)]
    cells(sheet, left, top + 8 * cell, current, cell, ROSE, 1)
    for x, y, w, h, hue in [(left, top + 8 * cell, 4 * cell, 4 * cell, ROSE), (left, 78, 4 * cell, 4 * strip * 0.62, ORANGE),
                            (left, 112, 4 * cell, 4 * strip * 0.62, GREEN),
                            (left - 4 * strip - 12, top + 8 * cell, 4 * strip, 4 * cell, BLUE)]:
        sheet.rect(x - 1, y - 1, w + 1, h + 1, "none", stroke=hue, line=2.4, rx=2)
    for x, y, name, hue, anchor in [(left - 10, 98, "K", ORANGE, "end"), (left - 10, 132, "V", GREEN, "end"),
                                    (left - 2 * strip - 12, top - 7, "Q", BLUE, "middle"),
                                    (right + 2 * strip, top - 7, "O", VIOLET, "middle")]:
        sheet.text(x, y, name, hue, 14, anchor, bold=True)
    for row, (hue, opacity, words) in enumerate([(ROSE, 0.22, "done"), (ROSE, 0.9, "now"), (ROSE, 0.05, "to come")]):
        sheet.rect(866, 176 + 24 * row, 13, 13, hue, opacity, "#c4cad0", 0.8)
        sheet.text(886, 187 + 24 * row, words, FAINT, 12)
    sheet.text(866, 262, "empty tiles", FAINT, 12)
    sheet.text(866, 278, "are never", FAINT, 12)
    sheet.text(866, 294, "visited", FAINT, 12)
    return sheet.svg()


# --- speed.svg -------------------------------------------------------------------------------------------------------

CONTENDERS = [("tessera", "Tessera", BLUE, 3.2), ("fa3", "FlashAttention-3", ORANGE, 1.8), ("cudnn", "cuDNN", GREEN, 1.8),
              ("fa2", "FlashAttention-2", GREY, 1.8)]


def draw_lines(sheet, x, width, title, found):
    """TFLOP/s over N of each contender at D = 128, causal."""
    y, height, most = 96, 208, 700
    here = sorted(((row["N"], rates) for row, rates in found if row["what"] == "grid" and row["D"] == 128
                   and row["causal"]), key=lambda point: point[0])
    place = lambda index, rate: (x + width * index / (len(here) - 1), y + height * (1 - rate / most))
    sheet.text(x, 78, title, INK, 13, bold=True)
    for rate in range(0, most + 1, 100):
        sheet.rect(x, place(0, rate)[1], width, 0.6, GRID)
        if rate % 200 == 0:
            sheet.text(x - 6, place(0, rate)[1] + 4, str(rate), FAINT, 11, "end")
    for index, (n, _) in enumerate(here):
        sheet.text(place(index, 0)[0], y + height + 17, str(n) if n < 1024 else f"{n // 1024}K", FAINT, 11, "middle")
    for name, _, hue, line in reversed(CONTENDERS):
        spots = [place(index, rates[name]) for index, (_, rates) in enumerate(here) if name in rates]
        sheet.path(spots, hue, line)
        for spot in spots:
            sheet.dot(*spot, hue, 2.2 if line < 3 else 3.2)


def draw_bars(sheet, x, width, figures):
    """PyTorch's time over Tessera's: geometric means of each type and pass."""
    groups = {}
    for row in figures["rows"]:
        if "ratio" in row and row["pass"] != "decode":
            groups.setdefault((row["type"], row["pass"]), []).append(row["ratio"])
    most, top = 4.5, 104
    for tick in range(0, 5):
        sheet.rect(x + width * tick / most, top - 6, 0.6, 200, INK if tick == 1 else GRID)
        sheet.text(x + width * tick / most, top + 210, f"{tick}x", FAINT, 11, "middle")
    for index, ((kind, which), ratios) in enumerate(groups.items()):
        mean, y = statistics.geometric_mean(ratios), top + 33 * index
        sheet.rect(x, y, width * mean / most, 20, BLUE, 0.85, rx=2)
        sheet.text(x - 8, y + 14, f"{kind} {which}", INK, 12, "end")
        sheet.text(x + width * mean / most + 6, y + 14, f"{mean:.2f}", INK, 12, bold=True)


def draw_speed():
    forward, backward = (json.loads((RESULTS / f"h200-{name}.json").read_text()) for name in ("forward", "backward"))
    processor = json.loads((RESULTS / "xeon-cpu-peers-16.json").read_text())
    sheet = Sheet(940, 400, "Speed beside peers")
    machine = forward[0]
    sheet.text(36, 36, f"{machine['gpu']}, bf16, D = 128, causal, 16,384 tokens: TFLOP/s over sequence length", INK, 14, bold=True)
    sheet.text(36, 54, f"{machine['date']}, all in one process, taking turns; medians of {machine['rounds']} rounds. "
               "Tessera sums in a fixed order.", FAINT, 11.5)
    draw_lines(sheet, 66, 236, "forward", points(forward, "fwd"))
    draw_lines(sheet, 344, 236, "backward", points(backward, "bwd"))
    for x, (_, words, hue, line) in zip([66, 164, 316, 412], CONTENDERS):
        sheet.rect(x, 349, 20, line, hue)
        sheet.text(x + 26, 355, words, INK, 12)
    sheet.text(640, 78, f"Intel Xeon, {processor['threads']} cores", INK, 13, bold=True)
    draw_bars(sheet, 724, 176, processor)
    sheet.text(640, 338, f"PyTorch {processor['torch'].split('+')[0]}'s time over Tessera's, same run;", FAINT, 11.5)
    sheet.text(640, 354, "geometric means; a virtual machine that", FAINT, 11.5)
    sheet.text(640, 370, "others share", FAINT, 11.5)
    return sheet.svg()


def main():
    stale = []
    for name, draw in [("tiles.svg", draw_tiles), ("speed.svg", draw_speed)]:
        path, text = PICTURES / name, draw()
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(f"docs/pictures/{name} is out of date: python3 tools/front_page.py draws it")
    print("\n".join(stale))
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
