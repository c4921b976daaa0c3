"""The faults of a round, their targets and pauses, from a seed alone, so that a seed repeats a schedule.

It injects nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

GENERATORS, SCORERS = ("generation-0", "generation-1"), ("reward-0", "reward-1")
# The names of each kind of process.
PROCESSES = {
    "coordinator": ("coordinator-0",),
    "generation": GENERATORS,
    "reward": SCORERS,
    "learner": ("learner-0",),
    "redis": ("redis",),
}
SERVICES = tuple(name for kind, names in PROCESSES.items() if kind != "redis" for name in names)
# The pairs with a connection, which a cut parts.
PAIRS = (
    *(("learner-0", generator) for generator in GENERATORS),
    ("coordinator-0", "learner-0"),
    *((name, "redis") for name in SERVICES),
)
STOP_S, CUT_S, FULL_S, HANG_S, CLOCK_S = 20.0, 8.0, 8.0, 5.0, 8.0
CLOCK_BACK_S = 600.0
_LONGEST_PAUSE_S = 1.5


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: A verb and its object; for `kill` and `stop`, a kind of process.
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


def kinds(*, cuts: bool = True, disks: bool = True) -> list[str]:
    """Every kind of fault; only root can cut a network and fill a disk of its own."""
    always = [f"{verb} {process}" for verb in ("kill", "stop") for process in PROCESSES]
    always += ["flush redis", "corrupt push", "hang reward", "clock back"]
    return always + ["cut network"] * cuts + ["fill disk"] * disks


def round_of(seed: int, number: int, among: list[str]) -> list[Fault]:
    """Each kind once, in an order and against targets that follow from seed and round."""
    drawn = random.Random(f"{seed}:{number}")
    order = drawn.sample(among, len(among))
    return [_fault(kind, drawn) for kind in order]


def _fault(kind: str, drawn: random.Random) -> Fault:
    verb, _, process = kind.partition(" ")
    draws: dict[str, Callable[[], tuple[tuple[str, ...], float]]] = {
        "kill": lambda: ((drawn.choice(PROCESSES[process]),), 0.0),
        "stop": lambda: ((drawn.choice(PROCESSES[process]),), STOP_S),
        "flush": lambda: (("redis",), 0.0),
        "corrupt": lambda: ((drawn.choice(GENERATORS),), 0.0),
        "hang": lambda: ((), HANG_S),
        "clock": lambda: ((drawn.choice(SERVICES),), CLOCK_S),
        "cut": lambda: (drawn.choice(PAIRS), CUT_S),
        "fill": lambda: ((), FULL_S),
    }
    targets, lasts_s = draws[verb]()
    return Fault(kind, targets, lasts_s, drawn.uniform(0.0, _LONGEST_PAUSE_S))
