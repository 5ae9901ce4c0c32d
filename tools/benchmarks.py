#!/usr/bin/env python3
"""Regenerates the tables of docs/benchmarks.md: runs `tessera bench` and `tessera demo`, replaces what lies between the
markers.

Usage: python3 tools/benchmarks.py [PROGRAM [THREADS]]          PROGRAM defaults to build/cli/tessera, THREADS to 2
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"


def run(program, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "figures.json"
        subprocess.run([program, *arguments, "--json", str(path)], stdout=subprocess.DEVNULL, check=True)
        return json.loads(path.read_text())


def replace(text, name, lines):
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def time_text(seconds):
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size_text(size):
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"


def machine_line(figures, load):
    machine = figures["machine"]
    name = machine.get("cpu") or machine.get("processor") or "unknown processor"
    text = f"{name}, load of the machine before the run {load:.1f}."
    if load > 0.5:
        text += " **Provisional: other programs were running; times, and to a lesser degree shares, are disturbed.**"
    return text


def bench_table(figures, load):
    lines = [f"{machine_line(figures, load)} {figures['threads']} threads; registers alone reach "
             f"{figures['fma_gflops']:.0f} GF/s.", "",
             "| type | N | D | pass | mask | time | GF/s | of FMA | vs full |",
             "|---|---:|---:|---|---|---:|---:|---:|---:|"]
    for row in figures["rows"]:
        speedup = f"{row['speedup_over_full']:.2f}" if "speedup_over_full" in row else ""
        mask = "causal" if row["causal"] else "full"
        lines.append(f"| {row['type']} | {row['N']} | {row['D']} | {row['pass']} | {mask} "
                     f"| {time_text(row['seconds'])} | {row['gflops']:.0f} | {row['of_fma']:.2f} | {speedup} |")
    return lines


def demo_table(figures, load):
    real = figures["realistic"]
    lines = [f"{machine_line(figures, load)} {real['threads']} threads.", "",
             "| pass | Tessera | unfused | speed-up | Tessera, extra memory | unfused, extra memory |",
             "|---|---:|---:|---:|---:|---:|"]
    for name in ["forward", "backward"]:
        ours, plain = real["tessera"], real["unfused"]
        lines.append(f"| {name} | {time_text(ours[name + '_seconds'])} | {time_text(plain[name + '_seconds'])} "
                     f"| {plain[name + '_seconds'] / ours[name + '_seconds']:.2f} | {size_text(ours[name + '_bytes'])} "
                     f"| {size_text(plain[name + '_bytes'])} |")
    return lines


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "build" / "cli" / "tessera")
    threads = sys.argv[2] if len(sys.argv) > 2 else "2"
    load = os.getloadavg()[0]
    demo = demo_table(run(program, "demo", "--threads", threads), load)
    bench = bench_table(run(program, "bench", "--suite", "cpu", "--threads", threads), load)
    PAGE.write_text(replace(replace(PAGE.read_text(), "bench", bench), "demo", demo))


if __name__ == "__main__":
    main()
