# SPDX-License-Identifier: Apache-2.0
"""Tables of what peers.py measures: points, the figure to beat, ratios. Used by peers.py, which prints them, and by
tools/benchmarks.py, which writes them into the documents; needs only Python.

A row is what peers.py keeps of one contender at one point, with TFLOP/s under `fwd` or `bwd`. Contenders whose names
begin with `tessera` are ours: `tessera`, `tessera-fast` in any order, `tessera:KERNEL`, and behind an @ the name of
another build.
"""
import statistics

PASSES = {"fwd": "forward", "bwd": "backward"}


def is_ours(name):
    return name.startswith("tessera")


def build_of(name):
    """The name of another build of ours, or None."""
    return name.partition("@")[2] or None


def points(rows, short):
    """[(a row, {contender: TFLOP/s})] of one pass, a point each."""
    found = {}
    for row in rows:
        if short in row:
            found.setdefault((row["what"], row["D"], row["causal"], row["N"]), (row, {}))[1][row["peer"]] = row[short]
    return list(found.values())


def bar(rates):
    """The figure to beat: the best peer's that was measured, or None."""
    return max((rate for name, rate in rates.items() if not is_ours(name)), default=None)


def title(row):
    what = "" if row["what"] == "grid" else row["what"] + " "
    return f"{what}D={row['D']} {'causal' if row['causal'] else 'full'} N={row['N']}"


def markdown(heads, rows):
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(heads), "|---" * len(heads) + "|", *map(line, rows)]


def compared(name, names):
    """What a contender of ours stands beside: cuDNN, FlashAttention-3, the best peer; and the same in other builds."""
    if build_of(name):
        return []
    others = [other for other in names if is_ours(other) and build_of(other) and other.partition("@")[0] == name]
    return [*(peer for peer in ("cudnn", "fa3") if peer in names), "best peer", *others]


def speed_table(rows, short):
    """Lines of a table of one pass, and rows that sum up the ratios: of each pair, the geometric mean and the least."""
    found = points(rows, short)
    names = list(dict.fromkeys(name for _, rates in found for name in rates))
    pairs = [(name, other) for name in names if is_ours(name) for other in compared(name, names)]
    lines, ratios = [], {}
    for row, rates in found:
        cells = [f"{rates[name]:.0f}" if name in rates else "" for name in names]
        for name, other in pairs:
            against = bar(rates) if other == "best peer" else rates.get(other)
            ratio = rates[name] / against if name in rates and against else None
            cells.append(f"{ratio:.3f}" if ratio else "")
            if ratio:
                suite = "grid" if row["what"] == "grid" else "extras"
                ratios.setdefault((name, other, suite), {})[title(row)] = ratio
        lines.append([title(row), *cells])
    sums = []
    for (name, other, suite), values in ratios.items():
        least = min(values, key=values.get)
        sums.append({"kind": "summary", "pass": short, "peer": name, "over": other, "suite": suite,
                     "geometric_mean": round(statistics.geometric_mean(values.values()), 4),
                     "least": round(values[least], 4), "where": least, "points": len(values),
                     "at_least_1": sum(ratio >= 1 for ratio in values.values())})
    return markdown(["problem", *names, *(f"{name} / {other}" for name, other in pairs)], lines), sums


def sum_text(row):
    return (f"{row['pass']}: {row['peer']} / {row['over']}, {row['suite']}: geometric mean {row['geometric_mean']:.3f}, "
            f"least {row['least']:.3f} ({row['where']}), {row['at_least_1']} of {row['points']} points at 1 or above")


def load_cell(row):
    """TFLOP/s, MHz, W and J/TFLOP of one contender that ran alone; only the first where nothing measured the rest."""
    rate = f"{row['tflops']:.0f}"
    return f"{rate}, {row['mhz']:.0f}, {row['watts']:.0f}, {row['j_per_tflop']:.3f}" if "mhz" in row else rate


def load_table(rows):
    """Lines of the table of --sustained; several rounds of a contender follow each other in its cell."""
    found, names = {}, []
    for row in rows:
        if row["kind"] == "sustained":
            cells = found.setdefault((PASSES[row["pass"]], title(row)), {})
            cells.setdefault(row["peer"], []).append(load_cell(row))
            names += [row["peer"]] if row["peer"] not in names else []
    return markdown(["pass", "problem", *names],
                    [[*key, *("; ".join(cells.get(name, [])) for name in names)] for key, cells in found.items()])
