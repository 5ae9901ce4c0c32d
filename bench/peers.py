#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tessera beside cuDNN, FlashAttention-2 and FlashAttention-3: speed, energy, errors, in one process on one GPU.

    python3 bench/peers.py [--passes forward,backward] [--suite grid|extras|step|all] [--limit SECONDS] [--json FILE]
    python3 bench/peers.py --sustained [--limit SECONDS] [--json FILE]
    python3 bench/peers.py --errors [--json FILE]

cuDNN and FlashAttention-2 are PyTorch's, called as operators; FlashAttention-3 takes part if flash_attn_interface can
be imported, FlexAttention with --flex. Tessera is called through its C ABI: `tessera` is what the planner chooses,
`tessera-fast` the same without the promise of equal bits where that is another kernel, `tessera:NAME` a kernel that
--kernel forces (NAME-fast: without that promise), `tessera@NAME` another build that --beside names. All read the same
random numbers as [B,N,H,D] tensors. Results are compared first, cuDNN's with PyTorch's plain operations, the others'
with cuDNN's; a contender that differs gets no figure.

In every round each contender is warmed up and then timed, and the order changes between rounds (python/tessera/
_rounds.py); medians count. The L2 cache is flushed between launches, and up to N = 1024, and for packed sequences,
calls are captured in CUDA graphs so that no host time counts. With --sustained each contender runs alone for a second
or more, without flushes, while nvidia-smi reads clocks and power. TFLOP/s are 4 B H N N D / time forward, half of that
when causal, 2.5 times that backward. Forward, cuDNN writes no LSE, as in inference with PyTorch; the others always do.
--limit begins no further point after so many seconds, and says what is left. --type is that of all inputs; --errors
has both.
"""
import argparse
import datetime
import importlib
import itertools
import re
import statistics
import sys
import time

import contenders
from contenders import (Cudnn, Data, Flash2, Flash3, Flex, Problem, Tessera, exact, first_heads, first_line, results_of,
                        torch)
from power import Meter
from tables import load_cell, load_table, speed_table, sum_text

TOKENS, HIDDEN = 16384, 2048  # of every point of the grid: batch x length, heads x head dim
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
GRAPHS_UP_TO = 1024
# Points of the grid for --sustained: head dim, causal, length.
ALONE = ((64, False, 2048), (64, False, 8192), (64, True, 4096), (64, True, 16384),
         (128, False, 2048), (128, False, 8192), (128, True, 4096), (128, True, 16384),
         (256, False, 2048), (256, False, 8192), (256, True, 4096), (256, True, 16384))
# Seconds of warm-up and of measurement in each round, and how many rounds: in turn, and with --sustained.
IN_TURN, SUSTAINED = (0.08, 0.08, 4), (0.25, 1.2, 1)
# How far a result may lie from another's: relative, in the Frobenius norm, where two correct ones differ by about 3e-3;
# and each row of D numbers, relative to its own norm plus the mean of all rows', so that one row that is missing shows.
LARGEST_DIFFERENCE, LARGEST_OF_A_ROW = 1e-2, 0.25


def grid(arguments):
    return [Problem("grid", TOKENS // n, n, HIDDEN // dim, dim, causal)
            for dim in arguments.dims for causal in arguments.masks for n in arguments.tokens
            if not arguments.sustained or (dim, causal, n) in ALONE]


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


def problems(arguments):
    """Those of the suites that were asked for."""
    found = [*(grid(arguments) if arguments.suite in ("grid", "all") else []),
             *(extras(arguments) if arguments.suite in ("extras", "all") else [])]
    return [problem._replace(dtype=arguments.type) for problem in found]


def choose(arguments):
    """The contenders of a run: name, and a factory that takes a set of inputs."""
    peers = {"cudnn": Cudnn, "fa2": Flash2}
    try:
        importlib.import_module("flash_attn_interface")
        peers["fa3"] = Flash3
    except Exception as error:  # whatever goes wrong inside a foreign module
        print(f"left out: fa3: {first_line(error)}", flush=True)
    if arguments.flex:
        peers["flex"] = Flex
    ours = {}
    for suffix, package in {"": "tessera", **arguments.packages}.items():
        if arguments.kernel:
            ours.update({f"tessera:{name}{suffix}": lambda data, name=name, package=package: Tessera(
                data, kernel=name.removesuffix("-fast"), deterministic=not name.endswith("-fast"), package=package)
                for name in arguments.kernel})
        else:
            ours["tessera" + suffix] = lambda data, package=package: Tessera(data, package=package)
            ours["tessera-fast" + suffix] = lambda data, package=package: Tessera(data, deterministic=False,
                                                                                  package=package)
    unknown = set(arguments.without) - {*ours, *peers, "fa3", "flex"}
    if unknown:
        sys.exit(f"--without: {', '.join(sorted(unknown))}: contenders are {', '.join([*ours, *peers])}")
    return {name: make for name, make in {**ours, **peers}.items() if name not in arguments.without}


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


def has_no_second_mode(data, solver, backward):
    """Whether a contender in any order gets the plan of the default: texts differ at most in what they say about other
    kernels."""
    if not isinstance(solver, Tessera) or solver.settings.deterministic:
        return False
    default = Tessera(data, kernel=solver.settings.kernel, package=solver.package)
    plans = [[line for line in x.planned(backward).description.splitlines() if not line.startswith("not ")]
             for x in (solver, default)]
    return plans[0] == plans[1]


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
            if has_no_second_mode(sets[0], solvers[0], backward):
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


def calls_of(made, backward):
    return {name: [solver.backward if backward else solver.forward for solver in solvers]
            for name, solvers in made.items()}


def measure_pass(problem, sets, found, backward, arguments):
    """{name: (TFLOP/s of each round, notes)}, and {name: the sentence why it has none}."""
    from tessera._measure import measure_cold
    made, notes, refused = make_and_check(sets, found, backward)
    graphs = problem.tokens <= GRAPHS_UP_TO or problem.lengths is not None
    times, methods = measure_cold(calls_of(made, backward), graphs, arguments.pace)
    work = problem.operations(backward) / 1e12
    rates = {name: ([work / t for t in times[name]], {**notes[name], "timing": methods[name]}) for name in made}
    return rates, refused


def each_pass(arguments):
    """The passes that were asked for: as rows name them, and whether backward. Autograd is on for the latter alone."""
    for short, backward in (("fwd", False), ("bwd", True)):
        if ("backward" if backward else "forward") in arguments.passes:
            with torch.set_grad_enabled(backward):
                yield short, backward


def measure_problem(problem, found, arguments):
    """A row for each contender, with the keys fwd and bwd (TFLOP/s) of the passes that were asked for."""
    sets = [Data(problem, seed) for seed in range(2)]  # one set of the grid's is three times an H200's L2 cache
    rows = {}
    for short, backward in each_pass(arguments):
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


def measure_alone(problem, found, arguments, meter):
    """A row for each contender, pass and round: TFLOP/s of a second or more without pauses, clocks, power, energy."""
    from tessera._measure import Burst
    from tessera._rounds import turns
    sets = [Data(problem, 0)]
    for short, backward in each_pass(arguments):
        made, notes, refused = make_and_check(sets, found, backward)
        bursts = {name: Burst(call, contenders.DEVICE) for name, (call,) in calls_of(made, backward).items()}
        work = problem.operations(backward) / 1e12
        for number, name in [(n, name) for n in range(arguments.pace.rounds) for name in turns(list(bursts), n)]:
            bursts[name].seconds(arguments.pace.warm)
            begin = time.monotonic()
            rate = work / bursts[name].seconds(arguments.pace.timed)
            load = meter and meter.load(begin, time.monotonic())
            row = {**problem.row(), "kind": "sustained", "pass": short, "peer": name, "round": number,
                   "tflops": round(rate, 1), **notes[name]}
            if load:
                row.update(mhz=round(load.mhz), watts=round(load.watts, 1), j_per_tflop=round(load.watts / rate, 4),
                           samples=load.samples)
            print(f"{problem.title():28} {short}  {name:20} {load_cell(row)}", flush=True)
            yield row
        for name, sentence in refused.items():
            print(f"{problem.title():28} {short}  {name}: {sentence}", flush=True)


def measure_until(end, problems, rows_of, put):
    """The rows of problem after problem, none begun after `end` of time.monotonic; what is left."""
    left = list(problems)
    while left and time.monotonic() < end:
        for row in rows_of(left.pop(0)):
            put(row)
    if left:
        print(f"left for want of time: {', '.join(problem.title() for problem in left)}", flush=True)
    return left


def measure_step(found, arguments, put):
    """Milliseconds of one training step, forward and backward, by bursts of calls: what the host does counts."""
    from tessera._measure import measure
    problem = Problem("step", 4, 4096, 16, 128, True)
    data = [Data(problem, 0)]
    made, notes, refused = make_and_check(data, found, True)

    def step(name, solver):
        forward = solver.forward if name.startswith("tessera") else solver.prepare  # what keeps all that backward needs
        return lambda: (forward(), solver.backward())

    times = measure({name: step(name, solver) for name, (solver,) in made.items()}, contenders.DEVICE, arguments.pace)
    work = (problem.operations(False) + problem.operations(True)) / 1e12
    for name, t in times.items():
        put({**problem.row(), "kind": "step", "peer": name, "ms": round(t * 1e3, 4), "tflops": round(work / t, 1),
             **notes[name]})
        print(f"{problem.title()} B=4 H=16: {name} {t * 1e3:.3f} ms, {work / t:.0f} TFLOP/s", flush=True)
    for name, sentence in refused.items():
        print(f"step: {name}: {sentence}", flush=True)


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS_OF = ("o", "dq", "dk", "dv")


def errors_of(make, data, wanted, passes):
    """Relative errors by tensor, and the sentences of refusals by pass."""
    errors, refused = {}, {}
    for backward, which, tensors in ((False, "fwd", slice(0, 1)), (True, "bwd", slice(1, 4))):
        if ("backward" if backward else "forward") not in passes:
            continue
        try:
            solver = make(data)
            if has_no_second_mode(data, solver, backward):
                continue
            for tensor, x, y in zip(ERRORS_OF[tensors], results_of(solver, backward), wanted[tensors]):
                errors[tensor] = float((x.double() - y).norm() / y.norm())
        except Exception as error:  # a refusal: of this problem, on this machine
            refused[which + "_error"] = first_line(error)
    return errors, refused


def measure_errors(found, arguments, put, end):
    """Relative errors (Frobenius) of O, dQ, dK and dV against float64, B=2 H=8 N=2048; no point begins after `end` of
    time.monotonic."""
    print("| type | data | D | mask | who | " + " | ".join(ERRORS_OF) + " |\n" + "|---" * (5 + len(ERRORS_OF)) + "|")
    worst = {}
    left = list(itertools.product(("bfloat16", "float16"), (False, True), arguments.dims, arguments.masks))
    while left and time.monotonic() < end:
        dtype, outliers, dim, causal = left.pop(0)
        data = Data(Problem("errors", 2, 2048, 8, dim, causal, dtype=dtype), dim, outliers)
        wanted = exact(data, torch.float64)
        title = f"{dtype} | {'outlier' if outliers else 'gauss'} | {dim} | {'causal' if causal else 'full'}"
        line = lambda who, form, values: print(f"| {title} | {who} | " + " | ".join(
            format(values[t], form) if t in values else "" for t in ERRORS_OF) + " |", flush=True)
        errors = {}
        for name, make in found.items():
            errors[name], refused = errors_of(make, data, wanted, arguments.passes)
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
    if left:
        print(f"left for want of time: {len(left)} points of the errors", flush=True)


# --- the program -----------------------------------------------------------------------------------------------------

def parse_arguments():
    words = lambda text: text.split(",")
    numbers = lambda text: [int(word) for word in words(text)]
    masks = lambda text: [{"full": False, "causal": True}[word] for word in words(text)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/src/libtessera.so", help="Tessera's shared library")
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=LIBRARY",
                        help="another build of it, in the same rounds; may be repeated")
    parser.add_argument("--kernel", action="append", help="force this kernel of Tessera's; may be repeated; NAME-fast: "
                        "without the promise of equal bits")
    parser.add_argument("--without", type=words, default=[], help="contenders to leave out: fa2,tessera-fast@NAME")
    parser.add_argument("--passes", type=words, default=["forward", "backward"], help="forward,backward")
    parser.add_argument("--dims", type=numbers, default=[64, 128, 256], help="of the grid: 64,128,256")
    parser.add_argument("--masks", type=masks, default=[False, True], help="full,causal")
    parser.add_argument("--tokens", type=numbers, default=list(LENGTHS), help="lengths; the batch has 16384 tokens")
    parser.add_argument("--suite", choices=["grid", "extras", "step", "all"], default="grid",
                        help="step: forward and backward together, host time included; all: everything")
    parser.add_argument("--type", choices=["bfloat16", "float16"], default="bfloat16", help="of all inputs (bfloat16)")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, where there is a window (compiles)")
    parser.add_argument("--sustained", action="store_true",
                        help="each contender alone, with clocks and power; twelve points of the grid, or all extras")
    parser.add_argument("--errors", action="store_true", help="measure errors against float64 instead of speed")
    for name, index, kind, what in (("warm", 0, float, "seconds of warm-up of each contender in each round"),
                                    ("seconds", 1, float, "seconds of measurement of each contender in each round"),
                                    ("rounds", 2, int, "rounds")):
        parser.add_argument(f"--{name}", type=kind, help=f"{what} ({IN_TURN[index]}; --sustained: {SUSTAINED[index]})")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no point begins")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    arguments = parser.parse_args()
    for name, default in zip(("warm", "seconds", "rounds"), SUSTAINED if arguments.sustained else IN_TURN):
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if any(n < 1 or TOKENS % n for n in arguments.tokens):
        parser.error(f"--tokens: must be divisors of {TOKENS}")
    if set(arguments.passes) - {"forward", "backward"}:
        parser.error("--passes: must be forward, backward or both")
    if not all(re.fullmatch(r"[A-Za-z]\w*=.+", text) for text in arguments.beside):
        parser.error("--beside: must be NAME=LIBRARY, with a name of letters, digits and underscores")
    if arguments.sustained and arguments.suite in ("step", "all"):
        parser.error("--sustained: goes with --suite grid or extras")
    return arguments


def describe_machine(arguments):
    return {"kind": "machine", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
            "command": " ".join(["bench/peers.py", *sys.argv[1:]]), "date": datetime.date.today().isoformat(),
            **{name: getattr(arguments, name) for name in ("rounds", "warm", "seconds", "sustained")}}


def measure_product(arguments):
    """TFLOP/s of a large product of matrices: what this card can reach."""
    from tessera._measure import measure_cold
    a, b = (torch.randn(8192, 8192, device=contenders.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    times, _ = measure_cold({"matmul": [lambda: a @ b]}, False, arguments.pace)
    rate = 2 * 8192**3 / statistics.median(times["matmul"]) / 1e12
    print(f"a product of matrices of 8192 x 8192 in bf16: {rate:.1f} TFLOP/s", flush=True)
    return {"kind": "ceiling", "what": "matmul8192 bf16", "tflops": round(rate, 1)}


def open_meter():
    """Of PyTorch's GPU; None where there is no nvidia-smi."""
    uuid = str(torch.cuda.get_device_properties(contenders.DEVICE).uuid)
    try:
        return Meter(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except OSError as error:
        print(f"clocks and power are left out: nvidia-smi: {error}", flush=True)
        return None


def main():
    arguments = parse_arguments()
    contenders.open_library(arguments.library)
    arguments.packages = {f"@{name}": contenders.open_beside(name, path)
                          for name, _, path in (text.partition("=") for text in arguments.beside)}
    from tessera._rounds import Pace
    arguments.pace = Pace(arguments.rounds, arguments.warm, arguments.seconds)
    begin, (rows, put) = time.monotonic(), contenders.open_report(arguments.json)

    put(describe_machine(arguments))
    print(" ".join(f"{key}={value}" for key, value in rows[0].items()), flush=True)
    found = choose(arguments)
    if arguments.errors:
        measure_errors(found, arguments, put, begin + arguments.limit)
        return
    meter = open_meter() if arguments.sustained else None
    put(measure_product(arguments))
    rows_of = (lambda problem: measure_alone(problem, found, arguments, meter)) if arguments.sustained else (
        lambda problem: measure_problem(problem, found, arguments))
    left = measure_until(begin + arguments.limit, problems(arguments), rows_of, put)
    if meter:
        meter.close()
    if arguments.suite in ("step", "all") and not left:
        measure_step(found, arguments, put)
    if arguments.sustained:
        print("\nTFLOP/s, MHz, W, J/TFLOP\n\n" + "\n".join(load_table(rows)), flush=True)
    for short in () if arguments.sustained else ("fwd", "bwd"):
        if any(short in row for row in rows):
            lines, sums = speed_table(rows, short)
            print(f"\n{'forward' if short == 'fwd' else 'backward'}, TFLOP/s\n\n" + "\n".join(lines) + "\n")
            for row in sums:
                put(row)
                print(sum_text(row), flush=True)
    print(f"\n{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
