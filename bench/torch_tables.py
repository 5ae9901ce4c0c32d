# SPDX-License-Identifier: Apache-2.0
"""Tables of what `python -m tessera.bench` measures. Used by tools/benchmarks.py, which writes them into the documents;
needs only Python.

A row is a point and a pass: `seconds` of each contender, medians, and where the program kept them `over_tessera`: a
quartile, the median and a quartile of how many times as long as ours another takes.
"""
import statistics

PEERS = {"cuDNN": "sdpa cudnn", "FA2": "sdpa flash"}
LEVEL = 1.05  # times as long as ours: less is no margin


def point(row):
    return row["dim"], "causal" if row["causal"] else "full", row["tokens"]


def times(rows):
    """Heads and cells: milliseconds of both passes."""
    found = {}
    for row in rows:
        cells = [f"{row['seconds'][who] * 1e3:.3g}" for who in ("tessera", *PEERS.values())]
        found.setdefault(point(row), []).extend(cells)
    passes = dict.fromkeys(row["pass"] for row in rows)
    return (["D", "mask", "N", *(head for which in passes for head in (which, *PEERS))],
            [[*key, *cells] for key, cells in found.items()])


def ratio(row, who):
    known = row.get("over_tessera", {}).get(who)
    return known[1] if known else row["seconds"][who] / row["seconds"]["tessera"]


def margins(rows):
    """A sentence for each peer: how much longer it takes with the backward pass, and where it does not."""
    lines = []
    for head, who in PEERS.items():
        found = {point(row): ratio(row, who) for row in rows if row["pass"] == "forward+backward"}
        level = [f"D = {dim}, {mask}, {tokens} ({value:.2f})" for (dim, mask, tokens), value in found.items()
                 if value < LEVEL]
        lines.append(f"With the backward pass {head} takes {min(found.values()):.2f} to {max(found.values()):.2f} times as "
                     f"long, {statistics.geometric_mean(found.values()):.2f} in the geometric mean; below {LEVEL}, level or "
                     f"faster than Tessera: {'; '.join(level) or 'nowhere'}.")
    return lines
