# SPDX-License-Identifier: Apache-2.0
"""Children that are forked while other threads call: none hangs, whatever those threads were doing."""
import os
import signal
import threading

import numpy as np
import numpy.testing  # here: a child would wait for another thread that is importing it

import tessera
from tessera import _call


def runs_in_child(body):
    child = os.fork()
    if child == 0:
        signal.alarm(200)  # ends a child that hangs
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def ask(tokens):
    x = np.full((1, tokens, 1, 4), 0.5, np.float32)
    o, lse = tessera.forward(x, x, x, threads=2)
    np.testing.assert_allclose(o, x, rtol=1e-6)


def test_the_lock_of_another_thread_is_not_waited_for():
    held, release = threading.Event(), threading.Event()

    def holder():
        with _call.questions._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=holder)
    thread.start()
    held.wait()
    try:
        assert runs_in_child(lambda: ask(4321))  # a new question, which takes the lock
    finally:
        release.set()
        thread.join()


def test_forks_while_threads_ask():
    stop = threading.Event()

    def asker(seed):
        tokens = seed
        while not stop.is_set():
            tokens = (7 * tokens + 3) % 397
            ask(1 + tokens)

    threads = [threading.Thread(target=asker, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        hung = [n for n in range(60) if not runs_in_child(lambda n=n: ask(1000 + n))]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not hung
