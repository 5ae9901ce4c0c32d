"""Recorded figures that Tessera has to beat on an H200, for machines where FlashAttention-3 is not installed. Imported
by peers.py and by tools/benchmarks.py; needs nothing but Python."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

# FlashAttention-3's speed over cuDNN's at each length of LENGTHS, (forward, backward). From runs of both in one process
# on an H200: CUDA 13.0, PyTorch 2.11, cuDNN 9.19, FlashAttention-3 of August 2026 built with nvcc 13.0; geometric mean
# of two or three runs, at N = 512 the best of them.
FA3_TO_CUDNN = {
    (64, False): ((0.85, 0.89, 1.03, 1.08, 1.22, 1.13), (1.19, 1.16, 1.14, 1.17, 1.16, 1.17)),
    (64, True): ((0.80, 0.89, 1.07, 1.08, 1.15, 1.15), (1.18, 1.21, 1.27, 1.24, 1.25, 1.24)),
    (128, False): ((0.98, 1.04, 1.13, 1.11, 1.19, 1.08), (1.07, 1.07, 1.06, 1.04, 1.11, 1.13)),
    (128, True): ((0.89, 1.05, 1.21, 1.21, 1.21, 1.19), (1.06, 1.12, 1.13, 1.10, 1.09, 1.13)),
    (256, False): ((1.01, 1.07, 1.06, 1.06, 1.13, 1.09), (1.24, 1.23, 1.16, 1.13, 1.29, 1.28)),
    (256, True): ((0.87, 1.08, 1.12, 1.13, 1.22, 1.17), (1.12, 1.14, 1.17, 1.14, 1.12, 1.20)),
}


def bar(row, rates, short):
    """The figure to beat: cuDNN's or FlashAttention-3's, or the best peer's outside the grid."""
    peers = [rate for name, rate in rates.items() if not name.startswith("tessera")]
    if row["kind"] == "train" and "cudnn" in rates and "fa3" not in rates and row["N"] in LENGTHS:
        ratios = FA3_TO_CUDNN.get((row["D"], row["causal"]))
        if ratios:
            peers.append(rates["cudnn"] * ratios[short == "bwd"][LENGTHS.index(row["N"])])
    return max(peers, default=None)
