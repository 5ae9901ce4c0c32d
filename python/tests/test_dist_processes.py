# SPDX-License-Identifier: Apache-2.0
"""tessera.dist: processes over gloo and over mpi4py against one process; what their transports refuse and survive."""
import concurrent.futures
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tessera
import tessera.dist
from conftest import relative_error
from test_dist import ENDS, HEADS, LENGTHS, both_passes, numbers, on_threads, one_process, whole


def run_process(launcher, mode, ranks, folder):
    """This file as a program, one process for each rank; their arrays, by rank."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1",
                       OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1",
                       OMPI_MCA_mpi_yield_when_idle="1", OMPI_MCA_btl_vader_single_copy_mechanism="none",
                       OMPI_MCA_plm_rsh_agent="false", PYTHONPATH=os.pathsep.join(
                           [str(Path(tessera.__file__).parents[1]), str(Path(__file__).parent)]))
    program = [sys.executable, __file__, mode, str(ranks), str(folder)]
    if launcher:
        commands = [["timeout", "-k", "5", "300", *launcher, "-n", str(ranks), *program]]
    else:
        commands = [[*program, str(rank)] for rank in range(ranks)]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  stdin=subprocess.DEVNULL) for command in commands]
    told = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(told)
    return [np.load(folder / f"{rank}.npz") for rank in range(ranks)]


def judge(results, ranks):
    """Both schemes against one process, and the segments' bits against one rank's."""
    o, lse, gradients = one_process(causal=True)
    for name, segment in (("ring", 0), ("gather", 32)):
        partition = tessera.dist.Partition(LENGTHS, ranks, align=32)
        got = whole(partition, [[result[f"{name}{i}"] for i in range(5)] for result in results])
        for x, exact in zip(got, (o, lse.T, gradients.dq, gradients.dk, gradients.dv)):
            assert relative_error(x, exact) < 2e-6
        if segment:
            alone = tessera.dist.Partition(LENGTHS, 1, align=32)
            one = whole(alone, on_threads(1, lambda c: both_passes(c, alone, segment=segment, causal=True)))
            for x, expected in zip(got, one):
                np.testing.assert_array_equal(x, expected)
    return len(results)


@pytest.mark.parametrize("fails", [False, True])
def test_a_message_is_let_go_before_it_is_done(fails):
    """Else gloo's object dies in a thread while the process ends, which aborts it."""
    from tessera._dist_transports import _Waiting
    gone = []

    class Work:
        def wait(self):
            time.sleep(0.02)
            if fails:
                raise RuntimeError("no such peer")

        def __del__(self):
            time.sleep(0.05)
            gone.append(True)

    waiting = _Waiting(Work())
    while not waiting.done and waiting.error is None:
        time.sleep(1e-3)
    assert gone == [True] and waiting.done != fails
    assert str(waiting.error) == ("no such peer" if fails else "None")


def test_a_store_that_does_not_answer():
    """Its process was stopped: others' deadlines go on. Afterwards it tells."""
    from tessera._dist_transports import TorchTransport
    answers = threading.Event()

    class Store:
        def check(self, keys):
            return answers.wait(30)

        def get(self, key):
            return b"rank 1: out of memory"

    transport = TorchTransport.__new__(TorchTransport)
    transport._store, transport._key, transport._asked, transport._next_look = Store(), "failed", None, 0.0
    begin = time.monotonic()
    assert transport.notice() is None and transport.notice() is None
    with pytest.raises(concurrent.futures.TimeoutError):
        transport.fail("no answer")
    assert time.monotonic() - begin < 1
    answers.set()
    while (heard := transport.notice()) is None:
        assert time.monotonic() - begin < 20
    assert heard == "rank 1: out of memory"


@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo(ranks, tmp_path):
    pytest.importorskip("torch")
    results = run_process([], "gloo", ranks, tmp_path)
    assert judge(results, ranks) == ranks
    # Training: each rank's loss summed, and gradients of shards, are those of one process.
    for result in results:
        assert result["autograd"] < 1e-5 and str(result["told"]) == "causal differs: rank 0 has 1, rank 1 has 0"
        assert result["again"] < 2e-6  # a new communicator of the same group works


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_mpi_without_time(timeout):
    with pytest.raises(ValueError, match=f"timeout: is {timeout}; must be a positive number of seconds"):
        tessera.dist.from_mpi(object(), timeout)


@pytest.mark.parametrize("ranks", [2, 4])
def test_mpi4py(ranks, tmp_path):
    pytest.importorskip("mpi4py")
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    assert judge(run_process(["mpirun"], "mpi", ranks, tmp_path), ranks) == ranks


def numpy_passes(communicator, ranks):
    partition = tessera.dist.Partition(LENGTHS, ranks, align=32)
    arrays = {}
    for name, segment in (("ring", 0), ("gather", 32)):
        passes = both_passes(communicator, partition, name, segment, causal=True)
        arrays.update({f"{name}{i}": passes[i] for i in range(5)})
    return arrays


def autograd_error(communicator, ranks):
    """The largest error of a shard's output and gradients, of tensors, against one process."""
    import torch
    partition = tessera.dist.Partition(LENGTHS, ranks, align=32)
    sharing = tessera.dist.Sharing(communicator, partition, "ring", timeout=60)
    sinks = [torch.linspace(-1, 1, HEADS, requires_grad=True) for _ in range(2)]
    q, k, v, d_o = map(torch.from_numpy, numbers())
    all_rows = [x.clone().requires_grad_() for x in (q, k, v)]
    mine = [partition.shard(x, communicator.rank).requires_grad_() for x in (q, k, v)]
    weights = partition.shard(d_o, communicator.rank)
    from tessera.torch import attention
    ends = torch.from_numpy(ENDS)
    (attention(*all_rows, causal=True, sinks=sinks[0], cu_seqlens_q=ends, cu_seqlens_k=ends) * d_o).sum().backward()
    o, lse = tessera.dist.attention(*mine, sharing, causal=True, sinks=sinks[1], return_lse=True)
    assert lse.shape == (HEADS, partition.rows(communicator.rank))
    (o * weights).sum().backward()
    errors = [relative_error(x.grad, partition.shard(y.grad, communicator.rank)) for x, y in zip(mine, all_rows)]
    return max(*errors, relative_error(sinks[1].grad, sinks[0].grad))


def gloo_rank(ranks, folder, rank):
    import torch.distributed as distributed
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    communicator = tessera.dist.from_torch()
    arrays = numpy_passes(communicator, ranks)
    arrays["autograd"] = autograd_error(communicator, ranks)
    partition = tessera.dist.Partition(LENGTHS, ranks)
    try:
        both_passes(communicator, partition, causal=rank != 1)
    except tessera.dist.CommunicationError as error:
        arrays["told"] = str(error)
    o = both_passes(tessera.dist.from_torch(distributed.group.WORLD), partition, causal=True)[0]
    arrays["again"] = relative_error(o, partition.shard(one_process(causal=True)[0], rank))
    np.savez(folder / f"{rank}.npz", **arrays)
    distributed.barrier()
    distributed.destroy_process_group()


def mpi_rank(ranks, folder):
    from mpi4py import MPI
    communicator = tessera.dist.from_mpi(MPI.COMM_WORLD, timeout=60)
    np.savez(folder / f"{communicator.rank}.npz", **numpy_passes(communicator, ranks))
    rank = communicator.rank
    between = MPI.COMM_WORLD.Split(rank % 2).Create_intercomm(0, MPI.COMM_WORLD, 1 - rank % 2)
    with pytest.raises(ValueError, match="comm: is an intercommunicator"):
        tessera.dist.from_mpi(between)
    partition = tessera.dist.Partition(LENGTHS, ranks)
    child = os.fork()
    if child == 0:
        with pytest.raises(tessera.dist.CommunicationError, match="was made before this process was forked"):
            both_passes(communicator, partition)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    MPI.Finalize()
    with pytest.raises(tessera.dist.CommunicationError, match="MPI has been finalised"):
        both_passes(communicator, partition)


if __name__ == "__main__":
    if sys.argv[1] == "gloo":
        gloo_rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        mpi_rank(int(sys.argv[2]), Path(sys.argv[3]))
