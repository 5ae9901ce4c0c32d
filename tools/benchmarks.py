#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of the documents: docs/results/MACHINE.md, and the tables of docs/benchmarks.md and docs/python.md
that stand between marks, from bench/results/*.json.

Usage: python3 tools/benchmarks.py                                   writes the pages
       python3 tools/benchmarks.py --check                           only says whether they are up to date
       python3 tools/benchmarks.py --measure MACHINE [PROGRAM [THREADS]]
                                                                     first runs `tessera bench` and `tessera demo` and
                                                                     keeps their figures as MACHINE-bench.json and
                                                                     MACHINE-demo.json; PROGRAM defaults to
                                                                     build/cli/tessera, THREADS to 2
"""
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGES = ROOT / "bench" / "results", ROOT / "docs" / "results"
sys.path.insert(0, str(ROOT / "bench"))
import decode_tables  # noqa: E402: bench/ is no package
import torch_tables  # noqa: E402
from tables import PASSES, bar, build_of, is_ours, load_cell, points  # noqa: E402

def load(name):
    return json.loads((RESULTS / name).read_text())


def table(heads, rows):
    """Lines of a table; columns of numbers are flush right."""
    rows = [[str(cell) for cell in row] for row in rows]
    numbers = [all(re.fullmatch(r"[-.\de]*( [a-zA-Z]+)?( [(/].*)?", row[n]) for row in rows) for n in range(len(heads))]
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return [line(heads), "|" + "|".join("---:" if number else "---" for number in numbers) + "|", *map(line, rows)]


def mask_text(causal):
    return "causal" if causal else "full"


def time_text(seconds):
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size_text(size):
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"


def version(figures):
    return figures["torch"].split("+")[0]


def geometric_mean(values):
    return statistics.geometric_mean(list(values))


# --- bench/peers.py --------------------------------------------------------------------------------------------------

def peers_machine(figures, timed=True):
    """Where the figures come from and, if they are times, how they were taken."""
    machine = figures[0]
    cudnn = f"{machine['cudnn'] // 10000}.{machine['cudnn'] // 100 % 100}"
    how = ""
    if timed and "warm" in machine:
        how = (f" Measured on {machine['date']}, {machine['rounds']} round{'s' if machine['rounds'] > 1 else ''}, each "
               f"contender warmed up for {machine['warm'] * 1e3:.0f} ms and timed for {machine['seconds'] * 1e3:.0f} ms "
               "in each")
        changes = "rotated and reversed between rounds" if machine["rounds"] > 2 else "reversed in the second round"
        how += ", alone." if machine["sustained"] else f", the order {changes}."
    elif timed:
        how = " Taken without a warm-up before each timing, on older kernels: too high (benchmarks.md says by how much)."
    return [f"{machine['gpu']}, CUDA {machine['cuda']}, PyTorch {version(machine)}, cuDNN {cudnn}: "
            f"`{machine['command']}`.{how}", ""]


# Columns: heading, contender. Other builds of ours follow under their own names.
CONTENDERS = {"Tessera": "tessera", "any order": "tessera-fast", "cuDNN": "cudnn", "FA3": "fa3", "FA2": "fa2",
              "FlexAttention": "flex"}


def contenders_of(names):
    """{heading: contender} of those that are there, in the order of the tables."""
    builds = {name.removeprefix("tessera").replace("-fast", "any order ").replace("@", ""): name
              for name in names if is_ours(name) and build_of(name)}
    return {**{head: who for head, who in CONTENDERS.items() if who in names}, **builds}


def mean_sentence(what, ratios):
    return (f"{what} geometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}; "
            f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)} points at 1 or above.")


def peers_table(name, short):
    """Every point of one pass, with ratios to cuDNN, to the best peer (of the grid, where FlashAttention-3 is among
    them) and to other builds."""
    figures = load(name)
    found = points(figures, short)
    extras = any(row["what"] != "grid" for row, _ in found)
    heads = contenders_of({who for _, rates in found for who in rates})
    over = {"over cuDNN": lambda rates: rates.get("cudnn")}
    if extras or "FA3" in heads:
        over["over the best peer" if extras else "over the better of cuDNN and FA3"] = bar
    builds = {head: who for head, who in heads.items() if build_of(who) and "fast" not in who}
    over.update({f"over {head}": lambda rates, who=who: rates.get(who) for head, who in builds.items()})
    rows, ratios = [], {head: [] for head in over}
    for row, rates in found:
        dims = row["what"].removeprefix("dims ") if row["what"].startswith("dims ") else row["D"]
        cells = [f"{rates[who]:.0f}" if who in rates else "" for who in heads.values()]
        for head, other in over.items():
            ratio = rates["tessera"] / other(rates) if other(rates) else None
            ratios[head] += [ratio] if ratio else []
            cells.append(f"{ratio:.2f}" if ratio else "")
        rows.append([*([row["what"]] if extras else []), dims, mask_text(row["causal"]), row["N"], *cells])
    columns = [*(["problem"] if extras else []), "D", "mask", "N", *heads, *over]
    return [*peers_machine(figures), *table(columns, rows), "",
            " ".join(mean_sentence(head[0].upper() + head[1:] + ":", values) for head, values in ratios.items())]


def sustained_table(name):
    """Each contender alone: TFLOP/s, MHz, W, J/TFLOP; several rounds follow each other in a cell."""
    figures = load(name)
    found = {}
    for row in figures:
        if row["kind"] == "sustained":
            key = (PASSES[row["pass"]], row["D"], mask_text(row["causal"]), row["N"])
            found.setdefault(key, {}).setdefault(row["peer"], []).append(load_cell(row))
    heads = contenders_of({who for cells in found.values() for who in cells})
    rows = [[*key, *("; ".join(cells.get(who, [])) for who in heads.values())] for key, cells in found.items()]
    return [*peers_machine(figures), *table(["pass", "D", "mask", "N", *heads], rows)]


def step_table(name):
    figures = load(name)
    steps = [row for row in figures if row["kind"] == "step"]
    shape = steps[0]
    rows = [[row["peer"], f"{row['ms']:.2f}", f"{row['tflops']:.0f}"] for row in steps]
    return [*peers_machine(figures),
            f"B={shape['B']} H={shape['H']} N={shape['N']} D={shape['D']} {mask_text(shape['causal'])}:", "",
            *table(["who", "ms", "TFLOP/s"], rows)]


def errors_table(name):
    figures = load(name)
    tensors = ("o", "dq", "dk", "dv")
    rows = [[row["type"], row["data"], row["D"], mask_text(row["causal"]), row["peer"],
             *(f"{row[tensor]:.2e}" if tensor in row else "" for tensor in tensors)]
            for row in figures if row["kind"] == "errors" and row["peer"] != "tessera-fast"]
    worst = [row for row in figures if row["kind"] == "summary" and row["peer"] == "tessera"]
    return [*peers_machine(figures, timed=False), *table(["type", "data", "D", "mask", "who", "O", "dQ", "dK", "dV"], rows), "",
            "Tessera's error over the least of the peers', at most: "
            + ", ".join(f"{row['tensor']} {row['largest_ratio']:.3f}" for row in worst) + "."]


def parts_table(name):
    """bench/parts.py: each way to cut the keys, times as long as one call."""
    found = {}
    for row in load(name):
        found.setdefault((row["D"], mask_text(row["causal"])), []).append(row)
    rows, bare, invariant = [], [], []
    for key, (one, *others) in found.items():
        long = [row for row in others if row["range"] >= 16384]
        bare += [row["ratio"] for row in long]
        invariant += [row["ratio_invariant"] for row in long if "any cut" not in row["entry"]]
        scatter = max(abs(ratio / row["ratio"] - 1) for row in others for ratio in row["ratios"])
        rows.append([*key, f"{one['ms']:.2f}", *(f"{row['ratio']:.3f}" for row in others), f"{scatter * 100:.0f} %"])
    kinds = [re.sub(r"ranges of (\d+)", lambda match: f"ranges of {int(match[1]) // 1024}k",
                    row["entry"].removeprefix("one call, ")) for row in next(iter(found.values()))[1:]]
    return [*table(["D", "mask", "one call, ms", *kinds, "rounds scatter"], rows), "",
            f"Ranges of 16k keys: {min(bare):.3f} to {max(bare):.3f} times one call; the bar is 1.01, which "
            f"{sum(ratio <= 1.01 for ratio in bare)} of {len(bare)} meet. With `part_invariant` they take "
            f"{min(invariant):.3f} to {max(invariant):.3f} times one invariant call."]


def decode_page(name):
    """Every part of bench/decode_peers.py, then the bars."""
    figures = load(name)
    parts = dict.fromkeys(part for part, _ in decode_tables.points(figures))
    lines = peers_machine(figures)
    for part in parts:
        lines += [f"Part `{part}`:", "", *decode_tables.speed_table(figures, part), ""]
    verdicts = [row for row in figures if row["kind"] == "verdict"]
    left = sum(row["kind"] == "left" for row in figures)
    return [*lines, "Bars, and what was missed:", "", *decode_tables.verdict_table(verdicts),
            *(["", f"{left} points did not begin."] if left else [])]


# --- tessera.bench, bench/cpu_peers.py -------------------------------------------------------------------------------

def torch_table(name):
    figures = load(name)
    return [f"{figures['machine']}, PyTorch {version(figures)}, {figures['dtype']}, B = {figures['batch']}, "
            f"H = {figures['heads']}, {figures.get('date', 'older')}: `python3 -m tessera.bench`. Milliseconds a call:", "",
            *table(*torch_tables.times(figures["rows"]))]


def torch_margins(name):
    return [*torch_table(name), "", *torch_tables.margins(load(name)["rows"])]


def cpu_peers_table(name):
    figures = load(name)
    products, decoding = {}, []
    for row in figures["rows"]:
        if row["pass"] == "decode":
            rates = [f"{row['gbytes'][who]:.1f}" for who in ("tessera", "torch", "read")]
            decoding.append([row["type"], row["shape"], *rates, f"{row['ratio']:.2f}", f"{row['of_read']:.2f}"])
        else:
            rates = [f"{row['gflops'][who]:.0f}" for who in ("tessera", "torch")]
            products.setdefault((row["type"], row["shape"]), []).extend([*rates, f"{row['ratio']:.2f}"])
    heads = ["type", "N, D", "forward", "PyTorch", "ratio", "backward", "PyTorch", "ratio"]
    verdicts = [[row["what"], f"{row['value']:.2f}", f"{row['wanted']:.2f}", "yes" if row["met"] else "no"]
                for row in figures["verdicts"]]
    return [f"PyTorch {version(figures)} ({figures['capability']}), {figures['threads']} threads, B = 1, load before "
            f"the run {figures['load_before']:.1f}. GFLOP/s, and PyTorch's time over Tessera's:", "",
            *table(heads, [[*key, *cells] for key, cells in products.items()]), "", "Decoding, one query, GB/s:", "",
            *table(["type", "one query", "Tessera", "PyTorch", "reading alone", "ratio", "of reading"], decoding), "",
            "Geometric means of the ratios beside what is wanted:", "",
            *table(["group", "measured", "wanted", "met"], verdicts)]


# --- tessera bench, tessera demo, and tables of which only the print was kept ----------------------------------------

def machine_line(figures):
    machine, load_before = figures["machine"], figures["load_before"]
    name = machine.get("cpu") or machine.get("processor") or "unknown processor"
    text = f"{name}, load of the machine before the run {load_before:.1f}."
    if load_before > 0.5:
        text += " **Provisional: other programs were running; times, and to a lesser degree shares, are disturbed.**"
    return text


def bench_rows(figures, wanted=lambda row: True):
    return [[row["type"], row["N"], row["D"], row["pass"], mask_text(row["causal"]), time_text(row["seconds"]),
             f"{row['gflops']:.0f}", f"{row['of_fma']:.2f}",
             f"{row['speedup_over_full']:.2f}" if "speedup_over_full" in row else ""]
            for row in figures["rows"] if wanted(row)]


def bench_table(name, wanted=lambda row: True):
    figures = load(name)
    rows = bench_rows(figures, wanted)
    heads = ["type", "N", "D", "pass", "mask", "time", "GF/s", "of FMA", "vs full"]
    return [f"{machine_line(figures)} {figures['threads']} threads; FMA peak {figures['fma_gflops']:.0f} GF/s.", "",
            *table(heads, rows)]


def demo_table(name):
    figures = load(name)
    real = figures["realistic"]
    ours, plain = real["tessera"], real["unfused"]
    rows = [[which, time_text(ours[which + "_seconds"]), time_text(plain[which + "_seconds"]),
             f"{plain[which + '_seconds'] / ours[which + '_seconds']:.2f}", size_text(ours[which + "_bytes"]),
             size_text(plain[which + "_bytes"])] for which in ("forward", "backward")]
    heads = ["pass", "Tessera", "unfused", "speed-up", "Tessera, extra memory", "unfused, extra memory"]
    return [f"{machine_line(figures)} {real['threads']} threads.", "", *table(heads, rows)]


def printed_table(name):
    figures = load(name)
    return [f"{figures['machine']}: `{figures['command']}`", "", *table(figures["columns"], figures["rows"])]


# --- the pages -------------------------------------------------------------------------------------------------------

# Of each machine: its title, and its sections: heading, sentences, the function that writes the table, its arguments.
MACHINES = {
    "h200": ("NVIDIA H200", [
        ("Forward", "bf16, 16,384 tokens, hidden size 2048, TFLOP/s.", peers_table, "h200-forward.json", "fwd"),
        ("Forward, other shapes", "cuDNN's packed figures are not the tensor cores' speed: something in that call "
         "takes milliseconds.", peers_table, "h200-extras.json", "fwd"),
        ("Backward", "\"Any order\" is `deterministic = false`, where that is another kernel.", peers_table,
         "h200-backward.json", "bwd"),
        ("Backward, other shapes", "cuDNN had no packed backward pass here.", peers_table, "h200-backward-extras.json",
         "bwd"),
        ("Alone for a second", "TFLOP/s, MHz, W and J/TFLOP of calls without pauses or flushes. A card at its power limit "
         "is as fast as it spends energy sparingly.", sustained_table, "h200-sustained.json"),
        ("A training step", "Forward and backward through the C ABI, host time included.", step_table,
         "h200-step.json"),
        ("Decoding", "Microseconds of a call over caches beyond the L2 cache, from CUDA graphs; \"reading\" is a kernel "
         "that reads the same bytes and does nothing else. Of the kernels before wide tiles and clusters: \"tessera\" is "
         "`decode_queue`, \"direct\" `decode_direct`; [experiments.md](../experiments.md#decoding-on-the-h200) has what "
         "those changed.", decode_page, "h200-decode.json"),
        ("Errors", "Relative, in the Frobenius norm, against float64, B=2 H=8 N=2048.", errors_table,
         "h200-errors.json"),
        ("A carried state", "Forward over ranges of the keys, one call after the other, beside one call: 16,384 queries, "
         "65,536 keys, 2048 / D heads, bf16. \"Invariant\" is one call with `part_invariant`, which the ranges have too, but "
         "for \"any cut\"; the last column says how far single rounds are off. "
         "`bench/parts.py --ranges 16384,8192` on 2026-11-18, CUDA 13.0, PyTorch 2.11.", parts_table, "h200-parts.json"),
        ("Through PyTorch", "By autograd, with all that the host does, before tensors were read in C.", torch_table,
         "h200-torch.json"),
        ("Through PyTorch, short sequences", "What they mean is in [python.md](../python.md#speed).", torch_table,
         "h200-torch-short.json"),
        ("The ladder", "B=2 H=8 N=4096, TFLOP/s, and in brackets the speed-up over `naive`. `tiled` adds with atomics "
         "in its backward pass (`deterministic = false`).", printed_table, "h200-ladder.json"),
        ("The kernel vector", "B=2 H=16 N=4096, full / causal, TFLOP/s, of an earlier build than the ladder's.",
         printed_table, "h200-gpu.json"),
        ("f32 beside PyTorch", "The kernel `vector` beside PyTorch's memory-efficient attention, B=2 H=16 N=4096.",
         printed_table, "h200-f32.json"),
        ("f32 errors", "Relative to float64, N=1024.", printed_table, "h200-f32-errors.json"),
    ]),
    "xeon": ("Intel Xeon with AMX", [
        ("The floor", "2 of 16 virtual cores of a shared host.", printed_table, "xeon-bench.json"),
        ("Beside PyTorch, 2 threads", "", cpu_peers_table, "xeon-cpu-peers.json"),
        ("Beside PyTorch, 16 threads", "", cpu_peers_table, "xeon-cpu-peers-16.json"),
        ("Beside PyTorch, 16 threads, another day", "", cpu_peers_table, "xeon-cpu-peers-16-quiet.json"),
    ]),
    "epyc": ("AMD EPYC without AMX", [
        ("tessera bench", "From before the kernel `avx512bf16`: f16 and bf16 are widened to f32.", bench_table,
         "epyc-bench.json"),
        ("tessera demo", "8 heads, 4096 tokens, D = 64, causal, f32, beside plain attention in the same program.",
         demo_table, "epyc-demo.json"),
        ("Beside PyTorch, f32", "GFLOP/s, and PyTorch's time over Tessera's.", printed_table,
         "epyc-cpu-peers-f32.json"),
        ("Decoding beside PyTorch, f32", "PyTorch's time over Tessera's, and the share of reading alone.",
         printed_table, "epyc-decode.json"),
        ("Beside PyTorch, bf16", "The same, by dot products.", printed_table, "epyc-cpu-peers-bf16.json"),
        ("Beside plain attention", "How many times as fast Tessera is as *rows*, one query row at a time, and *blas*, "
         "two calls of OpenBLAS with a softmax between them. Backward, *blas* keeps P, N x N numbers for every head, and "
         "so has four products where Tessera has five.", printed_table, "epyc-baselines.json"),
    ]),
}


def page(machine):
    title, sections = MACHINES[machine]
    lines = [f"# {title}", "", "Written by `tools/benchmarks.py` from `bench/results/`; the method is in "
             "[benchmarks.md](../benchmarks.md)."]
    for heading, sentences, write, *arguments in sections:
        if not (RESULTS / arguments[0]).exists():
            continue
        lines += ["", f"## {heading}", "", *([sentences, ""] if sentences else []), *write(*arguments), "",
                  f"[{arguments[0]}](../../bench/results/{arguments[0]})"]
        figures = load(arguments[0])
        if isinstance(figures, dict) and "note" in figures:
            lines[-1] += f". {figures['note']}"
    return "\n".join(lines) + "\n"


def hopper_headline():
    """Per head dim and mask: the longest sequence's rates, and the geometric means over all lengths."""
    rows, heads = {}, ["D", "mask"]
    for name, short in (("h200-forward.json", "fwd"), ("h200-backward.json", "bwd")):
        found = points(load(name), short)
        peers = [who for who in ("cudnn", "fa3", "fa2") if any(who in rates for _, rates in found)]
        over = {"over cuDNN": lambda rates: rates["cudnn"], **({"over the best": bar} if "fa3" in peers else {})}
        heads += [PASSES[short], *(head for head, who in CONTENDERS.items() if who in peers), *over]
        groups = {}
        for row, rates in found:
            groups.setdefault((row["D"], mask_text(row["causal"])), []).append((row, rates))
        for key, members in groups.items():
            _, last = max(members, key=lambda point: point[0]["N"])
            means = [geometric_mean(rates["tessera"] / other(rates) for _, rates in members) for other in over.values()]
            rows.setdefault(key, []).extend([*(f"{last[who]:.0f}" for who in ("tessera", *peers)),
                                             *(f"{value:.2f}" for value in means)])
    return table(heads, [[*key, *cells] for key, cells in rows.items()])


def cpu_headline():
    """Geometric means of the ratios to PyTorch, and what is wanted."""
    runs = {"2 threads": load("xeon-cpu-peers.json"), "16 threads": load("xeon-cpu-peers-16.json")}
    heads, rows = ["group"], {}
    for title, figures in runs.items():
        heads += [f"{title}, wanted", "measured"]
        for verdict in figures["verdicts"]:
            what = "least of all rows" if verdict["what"].startswith("worst") else verdict["what"]
            rows.setdefault(what, []).extend([f"{verdict['wanted']:.2f}", f"{verdict['value']:.2f}"])
    return table(heads, [[what, *cells] for what, cells in rows.items()])


BLOCKS = {
    ROOT / "docs" / "benchmarks.md": {
        "hopper": hopper_headline,
        "cpu": cpu_headline,
        "bench": lambda: bench_table("epyc-bench.json", lambda row: row["type"] == "f32" and row["N"] == 2048),
        "demo": lambda: demo_table("epyc-demo.json"),
    },
    ROOT / "docs" / "python.md": {"short": lambda: torch_margins("h200-torch-short.json")},
}


def filled(text, blocks):
    """A document with its blocks filled in anew."""
    for name, write in blocks.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = before + begin + "\n" + "\n".join(write()) + "\n" + end + rest.split(end)[1]
    return text


def pages():
    """{path: text} of everything that this program writes."""
    used = {section[3] for _, sections in MACHINES.values() for section in sections}
    unused = sorted({path.name for path in RESULTS.iterdir()} - used)
    if unused:  # a file that is missing makes its page differ
        sys.exit(f"tools/benchmarks.py has no section for these of bench/results/: {unused}")
    return {**{path: filled(path.read_text(), blocks) for path, blocks in BLOCKS.items()},
            **{PAGES / f"{name}.md": page(name) for name in MACHINES}}


def measure(machine, program, threads):
    for command, more in (("bench", ["--suite", "cpu"]), ("demo", [])):
        load_before = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "figures.json"
            subprocess.run([program, command, *more, "--threads", threads, "--json", str(path)], check=True,
                           stdout=subprocess.DEVNULL)
            figures = {"load_before": load_before, **json.loads(path.read_text())}
        (RESULTS / f"{machine}-{command}.json").write_text(json.dumps(figures, indent=1) + "\n")


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--measure"] and 2 <= len(arguments) <= 4:
        defaults = [str(ROOT / "build" / "cli" / "tessera"), "2"]
        measure(arguments[1], *arguments[2:], *defaults[len(arguments) - 2:])
    elif arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    stale += [path for path in sorted(PAGES.glob("*.md")) if path not in pages()]
    if arguments == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what bench/results/ gives: run python3 tools/benchmarks.py")
        return 1 if stale else 0
    PAGES.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
