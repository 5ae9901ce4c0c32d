#!/usr/bin/env python3
"""Tessera beside cuDNN, FlashAttention-2 and FlashAttention-3: speed and errors, interleaved in one process on one GPU.

    python3 bench/peers.py [--passes forward,backward] [--suite grid|extras|step|all] [--json FILE]
    python3 bench/peers.py --errors [--json FILE]

cuDNN and FlashAttention-2 are PyTorch's, called as operators; FlashAttention-3 takes part if flash_attn_interface can
be imported, FlexAttention with --flex. Tessera is called through its C ABI: `tessera` is what the planner chooses,
`tessera-fast` the same without the promise of equal bits where that is another kernel, `tessera:NAME` a kernel that
--kernel forces. All read the same random numbers as [B,N,H,D] tensors. Results are compared first, cuDNN's with
PyTorch's plain operations, the others' with cuDNN's; a contender that differs gets no figure. Rounds are interleaved,
medians count; the L2 cache is flushed between launches, and up to N = 1024, and for packed sequences, calls are
captured in CUDA graphs so that no host time counts. TFLOP/s are 4 B H N N D / time forward, half of that when causal,
2.5 times that backward. Forward, cuDNN writes no LSE, as in inference with PyTorch; the others always do. The figures
to beat are cuDNN's, measured, and those of FlashAttention-3, measured or else estimated (flash3.py).
"""
import argparse
import importlib
import itertools
import json
import statistics
import sys
from pathlib import Path

import contenders
from contenders import (Cudnn, Data, Flash2, Flash3, Flex, Problem, Tessera, exact, first_heads, first_line, results_of,
                        torch)
from flash3 import LENGTHS, bar

TOKENS, HIDDEN = 16384, 2048  # of every point of the grid: batch x length, heads x head dim
GRAPHS_UP_TO = 1024
# How far a result may lie from another's: relative, in the Frobenius norm, where two correct ones differ by about 3e-3;
# and each row of D numbers, relative to its own norm plus the mean of all rows', so that one row that is missing shows.
LARGEST_DIFFERENCE, LARGEST_OF_A_ROW = 1e-2, 0.25


def grid(arguments):
    return [Problem("grid", TOKENS // n, n, HIDDEN // dim, dim, causal)
            for dim in arguments.dims for causal in arguments.masks for n in arguments.tokens]


def extras(arguments):
    lengths = (6000, 3500, 2700, 1800, 1100, 700, 384, 200)
    found = []
    for causal in arguments.masks:
        for n in [n for n in (1024, 4096, 16384) if n in arguments.tokens]:
            found += [Problem("dim 96", TOKENS // n, n, 16, 96, causal),
                      Problem("dims 192/128", TOKENS // n, n, 16, 192, causal, dim_v=128),
                      Problem("heads 32/8", TOKENS // n, n, 32, 128, causal, kv_heads=8)]
        for dim in (64, 128):
            found.append(Problem("packed", 1, sum(lengths), HIDDEN // dim, dim, causal, lengths=lengths))
    if True in arguments.masks:
        found += [Problem("window 1024", 1, TOKENS, HIDDEN // dim, dim, True, window=1024) for dim in (64, 128)]
    return found


def choose(arguments):
    """The contenders of a run: name, and a factory that takes a set of inputs."""
    found = {"cudnn": Cudnn, "fa2": Flash2}
    try:
        importlib.import_module("flash_attn_interface")
        found["fa3"] = Flash3
    except Exception as error:  # whatever goes wrong inside a foreign module
        print(f"left out: fa3: {first_line(error)}", flush=True)
    if arguments.flex:
        found["flex"] = Flex
    if not arguments.kernel:
        return {"tessera": Tessera, "tessera-fast": lambda data: Tessera(data, deterministic=False), **found}
    return {**{f"tessera:{name}": lambda data, name=name: Tessera(data, kernel=name) for name in arguments.kernel},
            **found}


# --- speed -----------------------------------------------------------------------------------------------------------

def check(results, wanted, whose):
    """The largest relative difference; raises where one is too large, or no number."""
    largest = 0.0
    for name, x, y in zip(("dQ", "dK", "dV") if len(wanted) > 1 else ("O",), results, wanted):
        x, y = x.float(), y.float()
        whole = float((x - y).norm() / y.norm())
        sizes = y.norm(dim=-1)
        row = float(((x - y).norm(dim=-1) / (sizes + sizes.mean())).max())
        if not (whole <= LARGEST_DIFFERENCE and row <= LARGEST_OF_A_ROW):
            raise ArithmeticError(f"wrong: {name} differs from {whose} by {whole:.2g}, a row by {row:.2g}")
        largest = max(largest, whole)
    return largest


def has_no_second_mode(name, data, solver, backward):
    """Whether tessera-fast gets the same plan as tessera: texts differ at most in what they say about other kernels."""
    plans = [[line for line in x.planned(backward).description.splitlines() if not line.startswith("not ")]
             for x in ((solver, Tessera(data)) if name == "tessera-fast" else ())]
    return name == "tessera-fast" and plans[0] == plans[1]


def make_and_check(sets, found, backward):
    """Each contender over each set of inputs, and notes for its row; or the sentence why it does not take part.

    The first heads of a peer's result are compared with the exact result, all other results with that peer's.
    """
    made, notes, refused, wanted = {}, {}, {}, None
    problem = sets[0].problem
    for name in sorted(found, key=lambda name: name.startswith("tessera")):  # a peer's result is the wanted one
        ours = name.startswith("tessera")
        try:
            solvers = [found[name](data) for data in sets]
            note = {"kernel": solvers[0].planned(backward).kernel} if ours else {}
            if has_no_second_mode(name, sets[0], solvers[0], backward):
                continue
            results = [results_of(solver, backward) for solver in solvers][0]
            if wanted is None:
                part = exact(sets[0].first_heads(), torch.float32)
                kinds = "qkk" if backward else "q"
                check(first_heads(problem, results, kinds), part[1:] if backward else part[:1], "the exact result")
                whose, wanted = name, results
            note["difference"] = check(results, wanted, whose)
            made[name], notes[name] = solvers, note
        except Exception as error:  # a refusal: of this problem, on this machine
            refused[name] = first_line(error)
    return {name: made[name] for name in found if name in made}, notes, refused


def measure_pass(problem, sets, found, backward, arguments):
    """{name: (TFLOP/s of each round, notes)}, and {name: the sentence why it has none}."""
    from tessera._measure import measure_cold
    made, notes, refused = make_and_check(sets, found, backward)
    calls = {name: [solver.backward if backward else solver.forward for solver in solvers]
             for name, solvers in made.items()}
    graphs = problem.tokens <= GRAPHS_UP_TO or problem.lengths is not None
    times, methods = measure_cold(calls, graphs, arguments.rounds, arguments.seconds)
    work = problem.operations(backward) / 1e12
    rates = {name: ([work / t for t in times[name]], {**notes[name], "timing": methods[name]}) for name in calls}
    return rates, refused


def measure_problem(problem, found, arguments):
    """A row for each contender, with the keys fwd and bwd (TFLOP/s) of the passes that were asked for."""
    sets = [Data(problem, seed) for seed in range(2)]  # one set of the grid's is three times an H200's L2 cache
    rows = {}
    for backward in (False, True):
        short = "bwd" if backward else "fwd"
        if ("backward" if backward else "forward") not in arguments.passes:
            continue
        with torch.set_grad_enabled(backward):
            rates, refused = measure_pass(problem, sets, found, backward, arguments)
        for name, (values, notes) in rates.items():
            row = rows.setdefault(name, {**problem.row(), "peer": name})
            row[short] = round(statistics.median(values), 1)
            row[short + "_range"] = [round(min(values), 1), round(max(values), 1)]
            row.update({f"{short}_{key}": value for key, value in notes.items()})
        for name, sentence in refused.items():
            rows.setdefault(name, {**problem.row(), "peer": name})[short + "_error"] = sentence
        print(f"{problem.title():28} {short}  " + "  ".join(f"{name} {rows[name][short]:.0f}" for name in rates)
              + "".join(f"  {name}: {sentence}" for name, sentence in refused.items()), flush=True)
    return list(rows.values())


def summarize(rows, short, put):
    """Prints the table of one pass and how Tessera stands in it; the latter becomes rows, too."""
    points = {}
    for row in rows:
        if short in row:
            key = (row["what"], row["D"], row["causal"], row["N"])
            points.setdefault(key, (row, {}))[1][row["peer"]] = row[short]
    names = list(dict.fromkeys(name for _, rates in points.values() for name in rates))
    ours = [name for name in names if name.startswith("tessera")]
    heads = ["problem", *names, "bar", *(f"{name} / {other}" for name in ours for other in ("cudnn", "bar"))]
    print(f"\n{'forward' if short == 'fwd' else 'backward'}, TFLOP/s\n\n| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    ratios = {name: {} for name in [*ours, *(["the faster of both"] if "tessera-fast" in ours else [])]}
    for (what, dim, causal, n), (row, rates) in points.items():
        best = bar(row, rates, short)
        cells = [f"{rates[name]:.0f}" if name in rates else "" for name in names] + [f"{best:.0f}" if best else ""]
        for name in ours:
            for other in (rates.get("cudnn"), best):
                cells.append(f"{rates[name] / other:.3f}" if name in rates and other else "")
        title = f"{'' if what == 'grid' else what + ' '}D={dim} {'causal' if causal else 'full'} N={n}"
        print(f"| {title} | " + " | ".join(cells) + " |")
        for name in ratios:
            rate = rates.get(name) or max((rates[x] for x in ours if x in rates), default=None)
            if rate and best and (name in rates or name not in ours):
                ratios[name][what != "grid", title] = rate / best
    print()
    for name, found in ratios.items():
        for extra in (False, True):
            values = {title: ratio for (is_extra, title), ratio in found.items() if is_extra == extra}
            if values:
                least = min(values, key=values.get)
                row = {"kind": "summary", "pass": short, "peer": name, "suite": "extras" if extra else "grid",
                       "geometric_mean": round(statistics.geometric_mean(values.values()), 4),
                       "least": round(values[least], 4), "where": least}
                put(row)
                print(f"{short}: {name} / bar, {row['suite']}: geometric mean {row['geometric_mean']:.3f}, least "
                      f"{row['least']:.3f} ({least}), {sum(v >= 1 for v in values.values())} of {len(values)} points "
                      "at 1 or above", flush=True)


def measure_step(found, put):
    """Milliseconds of one training step, forward and backward, by bursts of calls: what the host does counts."""
    from tessera._measure import measure
    problem = Problem("step", 4, 4096, 16, 128, True)
    data = [Data(problem, 0)]
    made, notes, refused = make_and_check(data, found, True)

    def step(name, solver):
        forward = solver.forward if name.startswith("tessera") else solver.prepare  # what keeps all that backward needs
        return lambda: (forward(), solver.backward())

    times = measure({name: step(name, solver) for name, (solver,) in made.items()}, contenders.DEVICE)
    work = (problem.operations(False) + problem.operations(True)) / 1e12
    for name, t in times.items():
        put({**problem.row(), "kind": "step", "peer": name, "ms": round(t * 1e3, 4), "tflops": round(work / t, 1),
             **notes[name]})
        print(f"{problem.title()} B=4 H=16: {name} {t * 1e3:.3f} ms, {work / t:.0f} TFLOP/s", flush=True)
    for name, sentence in refused.items():
        print(f"step: {name}: {sentence}", flush=True)


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS_OF = ("o", "dq", "dk", "dv")


def errors_of(name, make, data, wanted, passes):
    """Relative errors by tensor, and the sentences of refusals by pass."""
    errors, refused = {}, {}
    for backward, which, tensors in ((False, "fwd", slice(0, 1)), (True, "bwd", slice(1, 4))):
        if ("backward" if backward else "forward") not in passes:
            continue
        try:
            solver = make(data)
            if has_no_second_mode(name, data, solver, backward):
                continue
            for tensor, x, y in zip(ERRORS_OF[tensors], results_of(solver, backward), wanted[tensors]):
                errors[tensor] = float((x.double() - y).norm() / y.norm())
        except Exception as error:  # a refusal: of this problem, on this machine
            refused[which + "_error"] = first_line(error)
    return errors, refused


def measure_errors(found, arguments, put):
    """Relative errors (Frobenius) of O, dQ, dK and dV against float64, B=2 H=8 N=2048."""
    print("| type | data | D | mask | who | " + " | ".join(ERRORS_OF) + " |\n" + "|---" * (5 + len(ERRORS_OF)) + "|")
    worst = {}
    for dtype, outliers, dim, causal in itertools.product(("bfloat16", "float16"), (False, True), arguments.dims,
                                                          arguments.masks):
        data = Data(Problem("errors", 2, 2048, 8, dim, causal, dtype=dtype), dim, outliers)
        wanted = exact(data, torch.float64)
        title = f"{dtype} | {'outlier' if outliers else 'gauss'} | {dim} | {'causal' if causal else 'full'}"
        line = lambda who, form, values: print(f"| {title} | {who} | " + " | ".join(
            format(values[t], form) if t in values else "" for t in ERRORS_OF) + " |", flush=True)
        errors = {}
        for name, make in found.items():
            errors[name], refused = errors_of(name, make, data, wanted, arguments.passes)
            if errors[name] or refused:
                put({"kind": "errors", "peer": name, "type": dtype, "data": "outlier" if outliers else "gauss",
                     "D": dim, "causal": causal, **errors[name], **refused})
                line(name, ".3e", errors[name])
        peers = [values for name, values in errors.items() if not name.startswith("tessera")]
        least = {t: min(values[t] for values in peers if t in values) for t in ERRORS_OF if any(t in p for p in peers)}
        for name, values in errors.items():
            if name.startswith("tessera") and values:
                ratios = {t: value / least[t] for t, value in values.items() if t in least}
                line(f"{name} / least", ".3f", ratios)
                for t, ratio in ratios.items():
                    worst[name, t] = max(worst.get((name, t), (0.0, "")), (ratio, title.replace(" |", "")))
    for (name, t), (ratio, where) in worst.items():
        put({"kind": "summary", "peer": name, "tensor": t, "largest_ratio": round(ratio, 4), "where": where})
        print(f"{name}: {t} has at most {ratio:.3f} times the error of the best peer ({where})")


# --- the program -----------------------------------------------------------------------------------------------------

def parse_arguments():
    words = lambda text: text.split(",")
    numbers = lambda text: [int(word) for word in words(text)]
    masks = lambda text: [{"full": False, "causal": True}[word] for word in words(text)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/src/libtessera.so", help="Tessera's shared library")
    parser.add_argument("--kernel", action="append", help="force this kernel of Tessera's; may be repeated")
    parser.add_argument("--passes", type=words, default=["forward", "backward"], help="forward,backward")
    parser.add_argument("--dims", type=numbers, default=[64, 128, 256], help="of the grid: 64,128,256")
    parser.add_argument("--masks", type=masks, default=[False, True], help="full,causal")
    parser.add_argument("--tokens", type=numbers, default=list(LENGTHS), help="lengths; the batch has 16384 tokens")
    parser.add_argument("--suite", choices=["grid", "extras", "step", "all"], default="grid",
                        help="step: forward and backward together, host time included; all: everything")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, where there is a window (compiles)")
    parser.add_argument("--errors", action="store_true", help="measure errors against float64 instead of speed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.02, help="of each contender in each round")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    arguments = parser.parse_args()
    if any(n < 1 or TOKENS % n for n in arguments.tokens):
        parser.error(f"--tokens: must be divisors of {TOKENS}")
    if set(arguments.passes) - {"forward", "backward"}:
        parser.error("--passes: must be forward, backward or both")
    return arguments


def main():
    arguments = parse_arguments()
    contenders.open_library(arguments.library)
    from tessera._measure import measure_cold
    rows = []

    def put(row):
        rows.append(row)
        if arguments.json:
            lines = ",\n".join(json.dumps(row) for row in rows)
            Path(arguments.json).write_text(f"[\n{lines}\n]\n", encoding="utf-8")

    put({"kind": "machine", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
         "cudnn": torch.backends.cudnn.version(), "command": " ".join(["bench/peers.py", *sys.argv[1:]]),
         "rounds": arguments.rounds, "seconds": arguments.seconds})
    print(" ".join(f"{key}={value}" for key, value in rows[0].items()), flush=True)
    found = choose(arguments)
    if arguments.errors:
        measure_errors(found, arguments, put)
        return
    a, b = (torch.randn(8192, 8192, device=contenders.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    times, _ = measure_cold({"matmul": [lambda: a @ b]}, False, arguments.rounds, arguments.seconds)
    put({"kind": "ceiling", "what": "matmul8192 bf16", "tflops": round(2 * 8192**3 / statistics.median(
        times["matmul"]) / 1e12, 1)})
    print(f"a product of matrices of 8192 x 8192 in bf16: {rows[-1]['tflops']} TFLOP/s", flush=True)
    problems = grid(arguments) if arguments.suite in ("grid", "all") else []
    problems += extras(arguments) if arguments.suite in ("extras", "all") else []
    for problem in problems:
        for row in measure_problem(problem, found, arguments):
            put(row)
    if arguments.suite in ("step", "all"):
        measure_step(found, put)
    for short in ("fwd", "bwd"):
        if any(short in row for row in rows):
            summarize(rows[:], short, put)


if __name__ == "__main__":
    main()
