#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tessera and PyTorch's memory-efficient attention in f32, interleaved in one process on one GPU.

    python3 bench/f32_peers.py [--library build/src/libtessera.so] [--kernel NAME] [--json FILE]

Both read the same numbers, each in the memory layout that it takes without a copy: PyTorch's kernel takes views
[B,H,N,D] of contiguous [B,N,H,D] tensors, which is also what Tessera calls contiguous. Time is measured with CUDA
events on PyTorch's stream, in rounds with a warm-up before each turn (python/tessera/_rounds.py); medians. PyTorch's
backward pass alone is torch.autograd.grad over a kept graph; Tessera's is its backward call. Errors are relative
(Frobenius) against the same formulas in float64 by PyTorch on the GPU, at a smaller N. Needs PyTorch with CUDA; Tessera
is called through its C ABI.
"""
import argparse
import itertools

import contenders
from contenders import Data, Differentiated, Problem, Tessera, exact, results_of, torch

BATCH, HEADS, TOKENS, DIMS = 2, 16, 4096, (64, 128)
ERROR_TOKENS = 1024


class Efficient(Differentiated):
    def attention(self, q, k, v):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q, k, v)), is_causal=self.data.problem.causal).transpose(1, 2)


def problems(tokens):
    """Of both head dims and masks, each with the name of its mask."""
    for dim, causal in itertools.product(DIMS, (False, True)):
        yield Problem("f32", BATCH, tokens, HEADS, dim, causal, dtype="float32"), "causal" if causal else "full"


def measure_speed(kernel):
    from tessera._measure import measure
    print(f"B={BATCH} H={HEADS} N={TOKENS}, f32, contiguous [B,N,H,D]\n")
    print(f"{'D':>4}  {'pass':8}  {'mask':6}  {'kernel':10}  {'tessera':>10}  {'TFLOP/s':>8}  {'torch':>10}  "
          f"{'TFLOP/s':>8}  {'ratio':>6}")
    rows = []
    for problem, mask in problems(TOKENS):
        data = Data(problem, problem.dim + problem.causal)
        solvers = {"tessera": Tessera(data, kernel=kernel), "torch": Efficient(data)}
        for backward in (False, True):
            for solver in solvers.values():
                results_of(solver, backward)  # O and LSE for the backward pass, PyTorch's graph
            times = measure({name: solver.backward if backward else solver.forward for name, solver in solvers.items()},
                            contenders.DEVICE)
            rate = {name: problem.operations(backward) / t / 1e12 for name, t in times.items()}
            row = {"D": problem.dim, "pass": "backward" if backward else "forward", "causal": problem.causal,
                   "kernel": solvers["tessera"].planned(backward).kernel, "seconds": times, "tflops": rate,
                   "ratio": times["torch"] / times["tessera"]}
            rows.append(row)
            print(f"{problem.dim:>4}  {row['pass']:8}  {mask:6}  {row['kernel']:10}  "
                  f"{times['tessera'] * 1e3:>7.3f} ms  {rate['tessera']:>8.1f}  {times['torch'] * 1e3:>7.3f} ms  "
                  f"{rate['torch']:>8.1f}  {row['ratio']:>5.2f}x", flush=True)
    worst = min(rows, key=lambda row: row["ratio"])
    print(f"\nratio: PyTorch's time over Tessera's; the smallest is {worst['ratio']:.2f} "
          f"(D={worst['D']} {worst['pass']} {'causal' if worst['causal'] else 'full'}), at least 1 wanted: "
          f"{'met' if worst['ratio'] >= 1 else 'NOT met'}")
    return rows


def measure_errors(kernel):
    names = ("o", "dq", "dk", "dv")
    print(f"\nrelative error against float64, N={ERROR_TOKENS}\n")
    print(f"{'D':>4}  {'mask':6}  {'library':8}  " + "  ".join(f"{name:>9}" for name in names))
    rows = []
    for problem, mask in problems(ERROR_TOKENS):
        data = Data(problem, problem.dim + problem.causal)
        wanted = exact(data, torch.float64)
        for name, solver in (("tessera", Tessera(data, kernel=kernel)), ("torch", Efficient(data))):
            results = [*results_of(solver, False), *results_of(solver, True)]
            errors = {t: float((x.double() - y).norm() / y.norm()) for t, x, y in zip(names, results, wanted)}
            rows.append({"D": problem.dim, "causal": problem.causal, "library": name, "relative_errors": errors})
            print(f"{problem.dim:>4}  {mask:6}  {name:8}  "
                  + "  ".join(f"{errors[t]:>9.2e}" for t in names), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/src/libtessera.so", help="Tessera's shared library")
    parser.add_argument("--kernel", help="force one of Tessera's kernels, as `tessera info` names it")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    contenders.open_library(arguments.library)
    from tessera._measure import require_places, write_report
    require_places(arguments.json)
    torch.backends.cuda.matmul.allow_tf32 = False
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "B": BATCH, "H": HEADS, "N": TOKENS}
    print(f"{report['gpu']}, PyTorch {report['torch']}, memory-efficient attention")
    report["speed"] = measure_speed(arguments.kernel)
    report["errors"] = measure_errors(arguments.kernel)
    write_report(arguments.json, report)


if __name__ == "__main__":
    main()
