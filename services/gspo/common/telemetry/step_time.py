"""What a step's time went into: the causes, and which of a step's figures each is made of.

It measures nothing: the learner does, and writes the figures down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Cause -> figures of a step that add up to it. What the learner waited for is told by the rollout that came last.
CAUSES: dict[str, tuple[str, ...]] = {
    "issue": ("wait_issue_s",),
    "queue": ("wait_queue_s",),
    "generation": ("wait_generation_s",),
    "reward": ("wait_reward_s",),
    "intake": ("wait_intake_s",),
    "training": ("train_s",),
    "push": ("wait_push_s", "publish_s"),
    "evaluation": ("wait_evaluation_s", "hold_s"),
    "checkpoint": ("checkpoint_s",),
    "log": ("log_s", "record_s"),
}
IN_WORDS = {
    "issue": "waiting for groups to be issued",
    "queue": "waiting for a generator to be free",
    "generation": "waiting for rollouts to be generated",
    "reward": "waiting for rewards",
    "intake": "waiting for scored rollouts to come in",
    "training": "training",
    "push": "publishing and pushing the version",
    "evaluation": "waiting for an evaluation",
    "checkpoint": "writing a checkpoint",
    "log": "writing the log",
}
_WAITED = tuple(name for names in CAUSES.values() for name in names if name.startswith("wait_"))
# Before the name of a function: the part of wait_reward_s in which it was the slowest.
REWARD_PREFIX = "wait_reward_by_"


@dataclass(frozen=True)
class Share:
    """One cause in one or more steps."""

    cause: str
    seconds: float
    share: float

    @property
    def in_words(self) -> str:
        """What the learner did or waited for."""
        return IN_WORDS[self.cause]


def seconds_by_cause(figures: Mapping[str, float]) -> dict[str, float]:
    """Seconds of one step by cause, in the order of CAUSES, those that took none too.

    A step of an older log does not say what it waited for: all of its wait counts as generation.
    """
    found = {cause: sum(figures.get(name, 0.0) for name in names) for cause, names in CAUSES.items()}
    if not any(name in figures for name in _WAITED):
        found["generation"] += figures.get("wait_s", 0.0)
    return found


def shares(*steps: Mapping[str, float]) -> list[Share]:
    """The causes of the given steps' time, the largest first; those that took no time are left out."""
    totals = dict.fromkeys(CAUSES, 0.0)
    for figures in steps:
        for cause, seconds in seconds_by_cause(figures).items():
            totals[cause] += seconds
    all_s = sum(totals.values())
    found = [Share(cause, seconds, seconds / all_s) for cause, seconds in totals.items() if seconds > 0]
    return sorted(found, key=lambda share: -share.seconds)


def seconds_by_function(*steps: Mapping[str, float]) -> dict[str, float]:
    """Seconds of waiting for rewards by the function that was waited for, the longest first."""
    found: dict[str, float] = {}
    for figures in steps:
        for name, seconds in figures.items():
            if name.startswith(REWARD_PREFIX):
                function = name.removeprefix(REWARD_PREFIX).removesuffix("_s")
                found[function] = found.get(function, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))
