# SPDX-License-Identifier: Apache-2.0
"""Rounds in which contenders take turns: who comes when, the warm-up of a turn and its length. Needs only Python.

A GPU at its power limit passes its temperature and clocks on from one contender to the next. So every turn begins with
a warm-up that does not count, and the order changes from round to round.
"""
from __future__ import annotations

from typing import NamedTuple, Protocol, Sequence, TypeVar

Item = TypeVar("Item")


class Pace(NamedTuple):
    """How many rounds, and the seconds of each contender's warm-up and measurement in each of them."""
    rounds: int
    warm: float
    timed: float


GPU_PACE = Pace(rounds=4, warm=80e-3, timed=80e-3)
# Of calls that take the host longer than the GPU: its state, unlike a GPU's, drifts over seconds and not within a turn.
HOST_PACE = Pace(rounds=20, warm=12e-3, timed=20e-3)
CPU_PACE = Pace(rounds=15, warm=0.0, timed=5e-3)


class Timer(Protocol):
    def seconds(self, budget: float) -> float:
        """Seconds of one call, from as many as take at least about `budget` seconds."""


def turns(names: Sequence[Item], number: int) -> list[Item]:
    """The order of one round: every odd round is the one before it reversed, every second round rotates by one."""
    first = number // 2 % len(names) if names else 0
    order = [*names[first:], *names[:first]]
    return order[::-1] if number % 2 else order


def take_turns(timers: dict[str, Timer], pace: Pace) -> dict[str, list[float]]:
    """Seconds of each contender's call in each round."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(pace.rounds):
        for name in turns(list(timers), number):
            if pace.warm > 0:
                timers[name].seconds(pace.warm)
            times[name].append(timers[name].seconds(pace.timed))
    return times
