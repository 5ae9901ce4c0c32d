#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# mpi_test.py PROGRAM check|faults|gpu: the ranks of mpi_ranks under mpirun. `check`: 1, 2, 3, 4 and 8 of them, every
# scheme, bit by bit as on threads. `faults`: the last of four is killed, stopped, absent, late, sends nonsense or is
# inside a call of MPI that never returns, and every live rank must answer in time, in words, with its outputs as they
# were. With both thread levels of MPI: see docs/scale_out.md, "Failure". `gpu`: 4 of gpu_mpi_ranks, which share a GPU.
import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys

PROGRAM, MODE = sys.argv[1], sys.argv[2]
TIMEOUT = 2.0  # as in mpi_ranks.cpp
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                   OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_mpi_yield_when_idle="1",
                   OMPI_MCA_btl_vader_single_copy_mechanism="none", OMPI_MCA_plm_rsh_agent="false")


def mpirun(ranks, *arguments, speakers=None, options=(), limit=60):
    """Status, and standard output and error of all ranks. They are ended when so many have answered, or else when the
    launcher outlives its limit: a hang."""
    command = ["timeout", "-k", "5", str(limit), "mpirun", *options, "-n", str(ranks), PROGRAM, *arguments]
    text, here, speaking = "", [], set()
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        for line in run.stdout:
            text += line
            here += [int(process) for process in re.findall(r"^here: rank \d, process (\d+)$", line)]
            speaking |= set(re.findall(r"^fault \w+: rank (\d), ", line)) & (speakers or set())
            if speakers and speaking == speakers:
                for process in here:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                here = []
    return run.returncode, text


def check():
    wrong = 0
    for ranks in (1, 2, 3, 4, 8):
        status, text = mpirun(ranks, "single" if ranks in (1, 3) else "serialized", "check")
        lines = re.findall(r"^check: rank \d+, (\d+) outputs compared, (\d+) wrong$", text, re.M)
        good = len(lines) == ranks and all(int(n) > 20 and w == "0" for n, w in lines) and status == 0
        compared = sum(int(n) for n, _ in lines)
        print(f"dist: {ranks} ranks over MPI, {compared} outputs, {'0' if good else 'some'} wrong")
        if not good:
            wrong += 1
            print(text)
    return wrong


def gpu():
    status, text = mpirun(4, "--gtest_color=no", limit=300)  # kernels are compiled first
    if status == 77:  # as every test ends that finds no GPU
        print(re.search(r"^no GPU to test.*", text, re.M)[0])
        sys.exit(status)
    good = status == 0 and len(re.findall(r"^\[  PASSED  \] 1 test\.$", text, re.M)) == 4
    print(f"gpu: 4 ranks over MPI share a GPU, {'as on threads' if good else 'NOT as on threads'}")
    if not good:
        print(f"status {status}\n{text}")
    return not good


# What every live rank must say, the last one too where it lives. Where it is heard of at once, `AT_ONCE`.
FAULTS = {
    "kill": (r"no answer within 2 s from ranks? \d", False),
    "stop": (r"no answer within 2 s from ranks? \d", False),
    "absent": (r"no answer within 2 s from ranks? (\d, )*3", False),
    "link": (r"no answer within 2 s from ranks? \d", True),
    "late": (r"fine", True),
    "differ": (r"D differs: rank 0 has 16, rank 3 has 8", True),
    "throw": (r"(rank 3: )?the network is down", True),
    "corrupt": (r"(rank \d: )?a message from rank 3 in step 1 arrived damaged, or belongs to another call", True),
    "wrong_size": (r"(rank \d: )?a message from rank 3 has \d+ bytes; \d+ were expected", True),
    "hang": (r"no answer within 2 s from ranks? \d|a call of the transport has not returned within 2 s", True),
    "hang_connecting": (r"no answer within 2 s from (ranks? \d|all ranks of the MPI communicator)", True),
    "hang_telling": (r"(rank 3: )?the network is down|no answer within 2 s from ranks? \d", True),
}
SINGLE = {"stop", "link", "throw", "corrupt"}  # the others with a thread of the communicator's own
AT_ONCE = {"differ", "throw", "corrupt", "wrong_size"}


def misfortune(fault):
    live = set("0123" if FAULTS[fault][1] else "012")
    return mpirun(4, "single" if fault in SINGLE else "serialized", fault, speakers=live,
                  options=["--enable-recovery"])  # or the first to end would end all


def judged(fault, status, text):
    """The live ranks' answers, how long the machine ran other programs instead of a rank, and whether the answers are
    all there, right and in time. A rank that does not run cannot answer, nor can those that wait for it: such time is
    not counted."""
    sentence, victim_answers = FAULTS[fault]
    lines = re.findall(rf"^fault {fault}: rank (\d), ([\d.]+) s, starved [\d.]+ s, outputs (\w+): (.*)$", text, re.M)
    starved = sum(float(seconds) for seconds in re.findall(r", starved ([\d.]+) s", text))
    if fault == "hang" and not re.search(r"^fault hang: rank 3, .*: a call of the transport has not returned", text, re.M):
        return lines, starved, False
    limit = (0 if fault in AT_ONCE else TIMEOUT) + 1 + starved
    outputs = "written" if fault == "late" else "untouched"
    live = [line for line in lines if victim_answers or line[0] != "3"]
    good = len(live) == (4 if victim_answers else 3) and all(
        re.search(sentence, said) and float(seconds) < limit and state == outputs
        for _, seconds, state, said in live) and status != 124
    return live, starved, good


def faults():
    wrong = 0
    with concurrent.futures.ThreadPoolExecutor(3) as pool:  # they wait for most of their time
        answers = dict(zip(FAULTS, pool.map(misfortune, FAULTS)))
    for fault, (status, text) in answers.items():
        live, starved, good = judged(fault, status, text)
        slowest = max((float(line[1]) for line in live), default=0)
        print(f"{fault}: {len(live)} ranks answered, the last after {slowest:.2f} s, {starved:.2f} s without a processor: "
              f"{live[0][3] if live else 'nothing'}")
        if not good:
            wrong += 1
            print(f"status {status}\n{text}")
    print(f"{len(FAULTS)} faults, {wrong} wrong" if wrong else
          f"{len(FAULTS)} faults, every live rank answered within deadline + 1 s, outputs untouched, 0 hangs")
    return wrong


if not os.path.exists(PROGRAM) or not shutil.which("mpirun"):
    print("skipped: there is no MPI here (Debian: libopenmpi-dev, openmpi-bin), or the build did not find it")
    sys.exit(77)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
sys.exit(1 if {"check": check, "faults": faults, "gpu": gpu}[MODE]() else 0)
