"""The faults of a round, their targets and pauses, from a seed alone, so that a seed repeats a schedule.

It injects nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# The names of each kind of process.
Processes = Mapping[str, tuple[str, ...]]
PROCESSES: Processes = {
    "coordinator": ("coordinator-0",),
    "generation": ("generation-0", "generation-1"),
    "reward": ("reward-0", "reward-1"),
    "learner": ("learner-0",),
    "redis": ("redis",),
}
REDIS, ALL = "redis", "all"
STOP_S, CUT_S, FULL_S, HANG_S, CLOCK_S, SLOW_S, LOST_S = 35.0, 8.0, 8.0, 5.0, 8.0, 30.0, 5.0
# How far the wall clock moves.
CLOCK_MOVES_S = {"clock back": -3600.0, "clock forward": 3600.0}
_LONGEST_PAUSE_S = 1.5


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: A verb and its object, such as a kind of process.
        targets: The processes that it strikes.
        lasts_s: Its duration; 0 for an instant.
        pause_s: Time after the recovery from the fault before.
    """

    kind: str
    targets: tuple[str, ...]
    lasts_s: float
    pause_s: float

    @property
    def verb(self) -> str:
        """The first word of its kind."""
        return self.kind.partition(" ")[0]


def services(processes: Processes) -> tuple[str, ...]:
    """The names of all processes but Redis."""
    return tuple(name for kind, names in processes.items() if kind != REDIS for name in names)


def kinds(processes: Processes = PROCESSES, *, cuts: bool = True, disks: bool = True) -> list[str]:
    """Every kind of fault; only root can cut a network, and fill or stop a disk of its own."""
    always = [f"{verb} {process}" for verb in ("kill", "stop") for process in processes]
    always += [
        f"{verb} {process}" for verb in ("drop replies", "close client") for process in processes if process != REDIS
    ]
    always += ["stop all", "flush redis", "corrupt push", "hang reward", *CLOCK_MOVES_S]
    return always + ["cut network"] * cuts + ["fill disk", "slow disk"] * disks


def round_of(seed: int, number: int, among: list[str], processes: Processes = PROCESSES) -> list[Fault]:
    """Each kind once, in an order and against targets that follow from seed and round."""
    drawn = random.Random(f"{seed}:{number}")
    order = drawn.sample(among, len(among))
    return [_fault(kind, drawn, processes) for kind in order]


def _fault(kind: str, drawn: random.Random, processes: Processes) -> Fault:
    verb, _, thing = kind.partition(" ")
    process = thing.rpartition(" ")[2]

    def any_of(names: tuple[str, ...]) -> tuple[str, ...]:
        return (drawn.choice(names),)

    draws: dict[str, Callable[[], tuple[tuple[str, ...], float]]] = {
        "kill": lambda: (any_of(processes[process]), 0.0),
        "stop": lambda: ((ALL,) if process == ALL else any_of(processes[process]), STOP_S),
        "flush": lambda: ((REDIS,), 0.0),
        "corrupt": lambda: (any_of(processes["generation"]), 0.0),
        "hang": lambda: ((), HANG_S),
        "clock": lambda: (any_of(services(processes)), CLOCK_S),
        "drop": lambda: (any_of(processes[process]), LOST_S),
        "close": lambda: (any_of(processes[process]), LOST_S),
        "cut": lambda: (drawn.choice(_pairs(processes)), CUT_S),
        "fill": lambda: ((), FULL_S),
        "slow": lambda: ((), SLOW_S),
    }
    targets, lasts_s = draws[verb]()
    return Fault(kind, targets, lasts_s, drawn.uniform(0.0, _LONGEST_PAUSE_S))


def _pairs(processes: Processes) -> list[tuple[str, str]]:
    """The pairs with a connection, which a cut parts."""
    (learner,), (coordinator,) = processes["learner"], processes["coordinator"]
    pushes = [(learner, generator) for generator in processes["generation"]]
    return [*pushes, (coordinator, learner), *((name, REDIS) for name in services(processes))]
