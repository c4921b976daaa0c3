"""What strikes, whom, and after which pause: from a seed alone, so that a seed repeats a schedule.

It strikes nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

GENERATORS, SCORERS = ("generation-0", "generation-1"), ("reward-0", "reward-1")
# Of each kind of process, its names.
PROCESSES = {
    "coordinator": ("coordinator-0",),
    "generation": GENERATORS,
    "reward": SCORERS,
    "learner": ("learner-0",),
    "redis": ("redis",),
}
# Who talks to whom: the pairs that a cut parts.
PAIRS = (
    *(("learner-0", generator) for generator in GENERATORS),
    ("coordinator-0", "learner-0"),
    *((name, "redis") for names in list(PROCESSES.values())[:-1] for name in names),
)
CLOCKS = tuple(name for names in list(PROCESSES.values())[:-1] for name in names)
STOP_S, CUT_S, FULL_S, HANG_S, CLOCK_S = 20.0, 8.0, 8.0, 5.0, 8.0
CLOCK_BACK_S = 600.0
_LONGEST_PAUSE_S = 1.5


@dataclass(frozen=True)
class Fault:
    """One strike.

    Attributes:
        kind: What happens; `kill` and `stop` with the kind of process behind a space.
        targets: The processes that it is about.
        lasts_s: How long it lasts, where it does.
        pause_s: After the recovery from the one before.
    """

    kind: str
    targets: tuple[str, ...]
    lasts_s: float
    pause_s: float


def kinds(*, cuts: bool = True, disks: bool = True) -> list[str]:
    """Every kind of strike; without what only root can do where that is left out."""
    found = [f"{verb} {process}" for verb in ("kill", "stop") for process in PROCESSES]
    found += ["flush redis", "corrupt push", "hang reward", "clock back"]
    return found + ["cut network"] * cuts + ["fill disk"] * disks


def round_of(seed: int, number: int, among: list[str]) -> list[Fault]:
    """Each kind once, in an order and against targets that follow from seed and round."""
    drawn = random.Random(f"{seed}:{number}")
    order = drawn.sample(among, len(among))
    return [_strike(kind, drawn) for kind in order]


def _strike(kind: str, drawn: random.Random) -> Fault:
    verb, _, of = kind.partition(" ")
    targets, lasts_s = {
        "kill": lambda: ((drawn.choice(PROCESSES[of]),), 0.0),
        "stop": lambda: ((drawn.choice(PROCESSES[of]),), STOP_S),
        "flush": lambda: (("redis",), 0.0),
        "corrupt": lambda: ((drawn.choice(GENERATORS),), 0.0),
        "hang": lambda: ((), HANG_S),
        "clock": lambda: ((drawn.choice(CLOCKS),), CLOCK_S),
        "cut": lambda: (drawn.choice(PAIRS), CUT_S),
        "fill": lambda: ((), FULL_S),
    }[verb]()
    return Fault(kind, targets, lasts_s, drawn.uniform(0.0, _LONGEST_PAUSE_S))
