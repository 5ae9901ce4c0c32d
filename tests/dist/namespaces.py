#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# namespaces.py PROGRAMS check|measure: ranks as processes in network namespaces of their own, over TCP on links with a
# limited rate. `check`: the results are those of threads, bit by bit. `measure`, by hand: how much of the transfers the
# work hides, and how far the simulator is from the clock (PROGRAMS/dist_mpi_overlap). Needs the rights to make
# namespaces; all traffic stays inside those made here. Implements docs/scale_out.md, "Overlap".
import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

NAME = f"tessera-{os.getpid()}"  # of namespaces; links are named inside them
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                   OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_mpi_yield_when_idle="1", OMPI_MCA_btl="self,tcp",
                   OMPI_MCA_btl_tcp_if_include="10.77.0.0/24", OMPI_MCA_oob_tcp_if_include="10.77.0.0/24",
                   OMPI_MCA_pml="ob1", OMPI_MCA_hwloc_base_binding_policy="none")


FIRST = False  # ranks are run before all other programs


class NotPermitted(Exception):
    pass


def command(text, check=True):
    done = subprocess.run(text.split(), capture_output=True, text=True)
    if check and done.returncode != 0:
        raise NotPermitted(f"`{text}`: {done.stderr.strip() or done.returncode}")
    return done.stdout


def limit_rate(namespace, device, megabits):
    """Every packet that leaves through the device: a token bucket, with a burst of a few milliseconds."""
    burst = max(64, megabits * 1000 // 8 * 4 // 1000)  # kB in 4 ms
    command(f"ip netns exec {namespace} tc qdisc replace dev {device} root tbf rate {megabits}mbit burst {burst}kb "
            "latency 400ms")


@contextlib.contextmanager
def nodes(count, megabits):
    """A hub with a bridge, and namespaces with one link to it each. Gives the agent by which mpirun reaches them."""
    made, agent = [], None
    try:
        hub = f"{NAME}-hub"
        for namespace in [hub] + [f"{NAME}-{i}" for i in range(1, count + 1)]:
            command(f"ip netns add {namespace}")
            made.append(namespace)
            command(f"ip -n {namespace} link set lo up")
        command(f"ip -n {hub} link add bridge type bridge")
        command(f"ip -n {hub} addr add 10.77.0.254/24 dev bridge")
        command(f"ip -n {hub} link set bridge up")
        for i in range(1, count + 1):
            command(f"ip -n {hub} link add port{i} type veth peer name rows netns {NAME}-{i}")
            command(f"ip -n {hub} link set port{i} master bridge up")
            command(f"ip -n {NAME}-{i} addr add 10.77.0.{i}/24 dev rows")
            command(f"ip -n {NAME}-{i} link set rows up")
            limit_rate(hub, f"port{i}", megabits)
            limit_rate(f"{NAME}-{i}", "rows", megabits)
        with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as file:
            file.write(f'#!/bin/sh\nnode=${{1##*.}}; shift\nexec ip netns exec {NAME}-$node unshare --uts '
                       'sh -c "hostname node$node; $*"\n')
            agent = file.name
        os.chmod(agent, 0o700)
        yield hub, agent
    finally:
        for namespace in reversed(made):
            command(f"ip netns del {namespace}", check=False)
        if agent:
            os.remove(agent)


def mpirun(place, count, arguments, limit=60):
    hub, agent = place
    hosts = ",".join(f"10.77.0.{i}" for i in range(1, count + 1))
    full = ["timeout", "-k", "5", str(limit), "ip", "netns", "exec", hub, "mpirun", "--mca", "plm_rsh_agent", agent,
            "--host", hosts, "-n", str(count), *arguments]
    done = subprocess.run(full, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def check(programs):
    for count, megabits in ((2, 400), (3, 2000)):
        with nodes(count, megabits) as place:
            status, text = mpirun(place, count, [f"{programs}/dist_mpi_ranks", "serialized", "check"], 120)
        lines = re.findall(r"^check: rank \d+, (\d+) outputs compared, (\d+) wrong$", text, re.M)
        good = len(lines) == count and all(int(n) > 20 and w == "0" for n, w in lines) and status == 0
        print(f"dist: {count} ranks in namespaces at {megabits} Mbit/s, {sum(int(n) for n, _ in lines)} outputs, "
              f"{'0' if good else 'some'} wrong")
        if not good:
            print(f"status {status}\n{text}")
            return 1
    return 0


def overlap(programs, place, count, scheme, direction, tokens, turns):
    first = ["chrt", "--rr", "1"] if FIRST else []
    arguments = [f"{programs}/dist_mpi_overlap", scheme, direction, str(tokens), str(turns)]
    status, text = mpirun(place, count, first + arguments, 600)
    found = re.search(r"^\{.*\}$", text, re.M)
    if status != 0 or not found:
        raise RuntimeError(f"status {status}\n{text}")
    return json.loads(found[0])


def measure(programs, count, schemes, direction, tokens, turns):
    """Links whose messages alone take 0.6 times as long as the work alone."""
    for scheme in schemes:
        with nodes(count, 1000) as place:
            free = overlap(programs, place, count, scheme, direction, tokens, 3)
        megabits = max(10, round(1000 * free["messages"] / (0.6 * free["work"])))
        with nodes(count, megabits) as place:
            row = overlap(programs, place, count, scheme, direction, tokens, turns)
        print(f"{scheme} {direction}, {count} ranks, {tokens} tokens, {megabits} Mbit/s: work {row['work']:.3f} s, messages "
              f"{row['messages']:.3f} s, together {row['together']:.3f} s; hidden {100 * row['hidden']:.0f}%, simulated / "
              f"measured {row['simulated_over_measured']:.3f} (medians of {turns}); ranks had "
              f"{100 * row['processor_share']:.0f}% of a processor each", flush=True)
        if row["processor_share"] < 0.9 * min(1, os.cpu_count() / count):
            print("  other programs had the processors: no figures to keep")
    return 0


def main():
    global FIRST
    parser = argparse.ArgumentParser()
    parser.add_argument("programs")
    parser.add_argument("mode", choices=("check", "measure"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schemes", nargs="+", choices=("gather", "ring"), default=("gather", "ring"))
    parser.add_argument("--direction", choices=("forward", "backward"), default="forward")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--first", action="store_true", help="before all other programs, for these few seconds")
    arguments = parser.parse_args()
    FIRST = arguments.first
    missing = [tool for tool in ("ip", "tc", "unshare", "mpirun") if not shutil.which(tool)]
    if missing or not os.path.exists(f"{arguments.programs}/dist_mpi_ranks"):
        print(f"skipped: there is no {missing[0] if missing else 'program over MPI'} here")
        return 77
    try:
        if arguments.mode == "check":
            return check(arguments.programs)
        return measure(arguments.programs, arguments.ranks, arguments.schemes, arguments.direction, arguments.tokens,
                       arguments.turns)
    except NotPermitted as reason:
        print(f"skipped: network namespaces are not permitted here ({reason})")
        return 77


sys.exit(main())
