#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Regenerates the tables of docs/numerics.md: runs `tessera check` and replaces what lies between the markers.

Usage: python3 tools/numerics.py [PROGRAM]          PROGRAM defaults to build/cli/tessera
Exit status 1 if a case failed; the tables are written all the same, and say so.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "numerics.md"
SUITES = [["--suite", "regular"], ["--suite", "features"], ["--suite", "corner"],
          ["--suite", "random", "--seed", "1", "--count", "500"]]
LONG = ["f32_2048x64", "f16_2048x64", "bf16_2048x64", "f32_2048x128_causal", "f16_2048x128_causal",
        "bf16_2048x128_causal"]
OUTPUTS = ["o", "lse", "dq", "dk", "dv", "dbias", "dsinks"]
NAMES = dict(o="O", lse="LSE", dq="dQ", dk="dK", dv="dV", dbias="dBias", dsinks="dSink")


def check(program, arguments):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "report.json"
        run = subprocess.run([program, "check", *arguments, "--json", str(path)], stdout=subprocess.DEVNULL)
        if not path.exists():
            sys.exit(f"{program} check {' '.join(arguments)} wrote no report (exit status {run.returncode})")
        return json.loads(path.read_text())


def share(output):
    """Of the allowed error; what underflow explains is not counted."""
    rest = output["error"] - output["underflow"]
    return rest / output["allowed"] if rest > 0 and output["allowed"] > 0 else 0.0


def worst_table(reports):
    worst, count = {}, {}
    for report in reports:
        for case in report["cases"]:
            for output in case["outputs"]:
                key = (OUTPUTS.index(output["name"]), ["f32", "f16", "bf16", "f64"].index(output["type"]))
                count[key] = count.get(key, 0) + 1
                if key not in worst or share(output) > share(worst[key][0]):
                    worst[key] = (output, case["name"])
    lines = ["| output | type | compared | worst error / allowed | in case |", "|---|---|---:|---:|---|"]
    for key in sorted(worst):
        output, case = worst[key]
        lines.append(f"| {NAMES[output['name']]} | {output['type']} | {count[key]} | {share(output):.2f} | `{case}` |")
    return lines


def long_table(reports):
    lines = ["| case | output | error / norm | model / norm | error / model |", "|---|---|---:|---:|---:|"]
    for report in reports:
        case = report["cases"][0]
        for output in case["outputs"]:
            if output["name"] == "lse":
                continue  # judged element by element, not by norms
            lines.append(f"| `{case['name']}` | {NAMES[output['name']]} | {output['error'] / output['norm']:.1e} "
                         f"| {output['model_error'] / output['norm']:.1e} "
                         f"| {output['error'] / output['model_error']:.2f} |")
    return lines


def replace(text, name, lines):
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "build" / "cli" / "tessera")
    suites = [check(program, arguments) for arguments in SUITES]
    long_runs = [check(program, ["--case", name]) for name in LONG]
    ran = [case for report in suites for case in report["cases"]]
    failed = [case for case in ran if not case["ok"]]
    kernels = sorted({case["kernel"] for case in ran if case["kernel"]})
    summary = [f"Kernel {', '.join(kernels)}; {len(ran)} cases, {len(failed)} failed."]
    if failed:
        summary += ["", "**Failed:** " + ", ".join(f"`{case['name']}`" for case in failed)]
    text = PAGE.read_text()
    text = replace(text, "worst", summary + [""] + worst_table(suites))
    text = replace(text, "long", long_table(long_runs))
    PAGE.write_text(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
