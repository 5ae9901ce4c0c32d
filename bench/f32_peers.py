#!/usr/bin/env python3
"""Tessera and PyTorch's memory-efficient attention in f32, in turn, in one process, on one GPU.

    python3 bench/f32_peers.py [--library build/src/libtessera.so] [--kernel NAME] [--json FILE]

Both read the same numbers, each in the memory layout that it takes without a copy: PyTorch's kernel takes views
[B,H,N,D] of contiguous [B,N,H,D] tensors, which is also what Tessera calls contiguous. Time is measured with CUDA
events on PyTorch's stream: warm-up, then rounds of all contenders in turn, medians. PyTorch's backward pass alone is
torch.autograd.grad over a kept graph; Tessera's is its backward call. Errors are relative (Frobenius) against the same
formulas in float64 by PyTorch on the GPU, at a smaller N. Needs PyTorch with CUDA; Tessera is called through its C ABI.
"""
import argparse
import ctypes
import json
import math
import statistics
import sys

BATCH, HEADS, TOKENS, DIMS = 2, 16, 4096, (64, 128)
ERROR_TOKENS = 1024
WARM_UP, ROUNDS, SHORTEST_BURST = 3, 25, 5e-3  # calls, measurements, seconds that a measurement lasts at least


# --- Tessera's C ABI: include/tessera/tessera.h ----------------------------------------------------------------------

F32, DEVICE_CUDA = 1, 2


class Tensor(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("data", ctypes.c_void_p), ("type", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 4), ("strides", ctypes.c_int64 * 4)]


def struct_of_tensors(name, fields):
    """A struct that is its size and then pointers to tensors; NULL means: not given."""
    pointers = [(field, ctypes.POINTER(Tensor)) for field in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": [("size", ctypes.c_size_t), *pointers]})


Inputs = struct_of_tensors("Inputs", "q k v bias mask slopes sinks cu_seqlens_q cu_seqlens_k seqused_q seqused_k rng")
Outputs = struct_of_tensors("Outputs", "o lse")
Saved = struct_of_tensors("Saved", "o lse d_o d_lse")
Gradients = struct_of_tensors("Gradients", "dq dk dv dbias dsinks")


class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("scale", ctypes.c_double), ("softcap", ctypes.c_double),
                ("causal", ctypes.c_int32), ("alignment", ctypes.c_int32), ("diagonal_offset", ctypes.c_int64),
                ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64), ("dropout", ctypes.c_double),
                ("seed", ctypes.c_uint64), ("seed_offset", ctypes.c_uint64), ("row0", ctypes.c_int64),
                ("col0", ctypes.c_int64), ("head0", ctypes.c_int64), ("batch0", ctypes.c_int64),
                ("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64), ("accumulate", ctypes.c_int32),
                ("deterministic", ctypes.c_int32)]


class Execution(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("stream", ctypes.c_void_p), ("threads", ctypes.c_int32), ("reserved", ctypes.c_int32),
                ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_size_t), ("kernel", ctypes.c_char_p)]


INITIALISERS = {Tensor: "tensor", Inputs: "inputs", Outputs: "outputs", Saved: "saved", Gradients: "gradients",
                Options: "options", Execution: "execution"}


class Library:
    def __init__(self, path):
        self.handle = ctypes.CDLL(path)
        self.handle.tessera_last_error.restype = ctypes.c_char_p
        self.handle.tessera_plan_kernel.restype = ctypes.c_char_p
        self.handle.tessera_plan_workspace_size.restype = ctypes.c_size_t
        for function in ("plan_kernel", "plan_workspace_size"):
            getattr(self.handle, "tessera_" + function).argtypes = [ctypes.c_void_p]

    def make(self, struct, **fields):
        made = struct()
        getattr(self.handle, f"tessera_{INITIALISERS[struct]}_init")(ctypes.byref(made))
        if made.size != ctypes.sizeof(struct):
            sys.exit(f"f32_peers.py: tessera_{INITIALISERS[struct]} has {made.size} bytes in this library but "
                     f"{ctypes.sizeof(struct)} in this script; one of them is older than the other")
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def check(self, status):
        if status != 0:
            sys.exit("f32_peers.py: tessera: " + self.handle.tessera_last_error().decode())


class TesseraPass:
    """One pass, planned once. Tensors are PyTorch's, seen as [B,N,H,D] and LSE as [B,H,N]."""

    def __init__(self, library, torch, results, options, kernel, **tensors):
        self.library, self.backward = library, "dq" in results
        self.kept = {name: self.view(t) for name, t in {**tensors, **results}.items()}  # the structs point to them
        pick = lambda names: {name: ctypes.pointer(self.kept[name]) for name in names.split()}
        self.inputs = library.make(Inputs, **pick("q k v"))
        self.options = library.make(Options, **options)
        stream = torch.cuda.current_stream()
        self.execution = library.make(Execution, device_type=DEVICE_CUDA, device_id=stream.device.index or 0,
                                      stream=stream.cuda_stream, kernel=kernel.encode() if kernel else None)
        if self.backward:
            self.written = (library.make(Saved, **pick("o lse d_o")), library.make(Gradients, **pick("dq dk dv")))
        else:
            self.written = (library.make(Outputs, **pick("o lse")),)
        self.plan = ctypes.c_void_p()
        library.check(self.function("plan")(*self.arguments(), ctypes.byref(self.plan)))
        size = library.handle.tessera_plan_workspace_size(self.plan)
        self.workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        self.execution.workspace, self.execution.workspace_bytes = self.workspace.data_ptr(), size
        self.kernel = library.handle.tessera_plan_kernel(self.plan).decode()

    def view(self, t):
        return self.library.make(Tensor, data=t.data_ptr(), type=F32, ndim=t.dim(), device_type=DEVICE_CUDA,
                                 device_id=t.device.index or 0, shape=(ctypes.c_int64 * 4)(*t.shape),
                                 strides=(ctypes.c_int64 * 4)(*t.stride()))

    def function(self, what):
        return getattr(self.library.handle, f"tessera_{what}_{'backward' if self.backward else 'forward'}")

    def arguments(self):
        return [ctypes.byref(x) for x in (self.inputs, *self.written, self.options, self.execution)]

    def __call__(self):
        self.library.check(self.function("plan_run")(self.plan, *self.arguments()))


# --- problems --------------------------------------------------------------------------------------------------------

class Problem:
    """Inputs of one shape and mask, and both libraries' passes over them."""

    def __init__(self, torch, library, tokens, dim, causal, kernel):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        make = torch.Generator(device="cuda").manual_seed(dim + causal)
        normal = lambda: torch.randn(BATCH, tokens, HEADS, dim, device="cuda", generator=make)
        self.q, self.k, self.v, self.d_o = normal(), normal(), normal(), normal()
        self.causal = causal
        empty = lambda: torch.empty_like(self.q)
        self.results = {"o": empty(), "lse": torch.empty(BATCH, HEADS, tokens, device="cuda"),
                        "dq": empty(), "dk": empty(), "dv": empty()}
        inputs = {"q": self.q, "k": self.k, "v": self.v}
        pick = lambda names: {name: self.results[name] for name in names.split()}
        options = {"causal": int(causal)}
        self.tessera_forward = TesseraPass(library, torch, pick("o lse"), options, kernel, **inputs)
        self.tessera_backward = TesseraPass(library, torch, pick("dq dk dv"), options, kernel, d_o=self.d_o,
                                            **pick("o lse"), **inputs)

        heads_first = [t.transpose(1, 2).detach().requires_grad_() for t in (self.q, self.k, self.v)]
        d_o = self.d_o.transpose(1, 2)

        def attention():
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal)

        def forward():
            with torch.no_grad():
                self.peer_o = attention()

        self.peer_forward = forward
        graph = attention()  # keeps what its backward pass needs
        self.peer_backward = lambda: torch.autograd.grad(graph, heads_first, d_o, retain_graph=True)

    def run_all(self):
        """Results of both, as {library: {tensor: [B,N,H,D]}}."""
        self.tessera_forward()
        self.tessera_backward()
        self.peer_forward()
        peer = [self.peer_o, *self.peer_backward()]
        names = ("o", "dq", "dk", "dv")
        return {"tessera": {name: self.results[name] for name in names},
                "torch": {name: t.transpose(1, 2) for name, t in zip(names, peer)}}

    def exact(self, torch):
        """The same in float64, by PyTorch, from matrix products and a softmax."""
        q, k, v = (t.transpose(1, 2).double().requires_grad_() for t in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        o = torch.softmax(scores, -1) @ v
        gradients = torch.autograd.grad(o, (q, k, v), self.d_o.transpose(1, 2).double())
        return {name: t.detach().transpose(1, 2) for name, t in zip(("o", "dq", "dk", "dv"), (o, *gradients))}


def measure(torch, calls):
    """Median seconds of each call, by CUDA events, in rounds of all of them in turn."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def seconds(call, count):
        start.record()
        for _ in range(count):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3 / count

    for call in calls.values():
        seconds(call, WARM_UP)
    counts = {name: max(1, round(SHORTEST_BURST / seconds(call, 1))) for name, call in calls.items()}
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(seconds(call, counts[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def measure_speed(torch, library, kernel):
    print(f"B={BATCH} H={HEADS} N={TOKENS}, f32, contiguous [B,N,H,D]\n")
    print(f"{'D':>4}  {'pass':8}  {'mask':6}  {'kernel':10}  {'tessera':>10}  {'TFLOP/s':>8}  {'torch':>10}  "
          f"{'TFLOP/s':>8}  {'ratio':>6}")
    rows = []
    for dim in DIMS:
        for causal in (False, True):
            problem = Problem(torch, library, TOKENS, dim, causal, kernel)
            problem.run_all()  # O and LSE for Tessera's backward pass
            for backward in (False, True):
                ours = problem.tessera_backward if backward else problem.tessera_forward
                peer = problem.peer_backward if backward else problem.peer_forward
                times = measure(torch, {"tessera": ours, "torch": peer})
                operations = (2.5 if backward else 1) * 4 * BATCH * HEADS * TOKENS * TOKENS * dim / (2 if causal else 1)
                rate = {name: operations / t / 1e12 for name, t in times.items()}
                row = {"D": dim, "pass": "backward" if backward else "forward", "causal": causal,
                       "kernel": ours.kernel, "seconds": times, "tflops": rate,
                       "ratio": times["torch"] / times["tessera"]}
                rows.append(row)
                print(f"{dim:>4}  {row['pass']:8}  {'causal' if causal else 'full':6}  {row['kernel']:10}  "
                      f"{times['tessera'] * 1e3:>7.3f} ms  {rate['tessera']:>8.1f}  {times['torch'] * 1e3:>7.3f} ms  "
                      f"{rate['torch']:>8.1f}  {row['ratio']:>5.2f}x", flush=True)
            del problem, ours, peer
            torch.cuda.empty_cache()
    worst = min(rows, key=lambda row: row["ratio"])
    print(f"\nratio: PyTorch's time over Tessera's; the smallest is {worst['ratio']:.2f} "
          f"(D={worst['D']} {worst['pass']} {'causal' if worst['causal'] else 'full'}), at least 1 wanted: "
          f"{'met' if worst['ratio'] >= 1 else 'NOT met'}")
    return rows


def measure_errors(torch, library, kernel):
    print(f"\nrelative error against float64, N={ERROR_TOKENS}\n")
    print(f"{'D':>4}  {'mask':6}  {'library':8}  " + "  ".join(f"{name:>9}" for name in ("o", "dq", "dk", "dv")))
    rows = []
    for dim in DIMS:
        for causal in (False, True):
            problem = Problem(torch, library, ERROR_TOKENS, dim, causal, kernel)
            results, exact = problem.run_all(), problem.exact(torch)
            torch.cuda.synchronize()
            for name, tensors in results.items():
                errors = {t: float((tensors[t].double() - exact[t]).norm() / exact[t].norm()) for t in exact}
                rows.append({"D": dim, "causal": causal, "library": name, "relative_errors": errors})
                print(f"{dim:>4}  {'causal' if causal else 'full':6}  {name:8}  " +
                      "  ".join(f"{errors[t]:>9.2e}" for t in ("o", "dq", "dk", "dv")))
            del problem, results, exact
            torch.cuda.empty_cache()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/src/libtessera.so", help="Tessera's shared library")
    parser.add_argument("--kernel", help="force one of Tessera's kernels, as `tessera info` names it")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        sys.exit(f"f32_peers.py: PyTorch is needed: {error}")
    if not torch.cuda.is_available():
        sys.exit("f32_peers.py: PyTorch finds no GPU")
    try:
        library = Library(arguments.library)
    except OSError as error:
        sys.exit(f"f32_peers.py: {error}; --library names Tessera's shared library")
    torch.backends.cuda.matmul.allow_tf32 = False
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "B": BATCH, "H": HEADS, "N": TOKENS}
    print(f"{report['gpu']}, PyTorch {report['torch']}, memory-efficient attention")
    report["speed"] = measure_speed(torch, library, arguments.kernel)
    report["errors"] = measure_errors(torch, library, arguments.kernel)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump(report, out, indent=2)
            out.write("\n")


if __name__ == "__main__":
    main()
