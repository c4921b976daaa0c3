"""The time of a step by cause, from the step's figures, which the learner measures; and a time in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Cause(NamedTuple):
    """Figures of a step that add up to one cause of its time, and the learner's work or wait in words."""

    figures: tuple[str, ...]
    in_words: str


# The rollout that came last decides the cause of the learner's wait.
CAUSES: dict[str, Cause] = {
    "issue": Cause(("wait_issue_s",), "waiting for groups to be issued"),
    "queue": Cause(("wait_queue_s",), "waiting for a free generator or agent"),
    "generation": Cause(("wait_generation_s",), "waiting for rollouts to end"),
    "reward": Cause(("wait_reward_s",), "waiting for rewards"),
    "intake": Cause(("wait_intake_s",), "waiting for scored rollouts to come in"),
    "training": Cause(("train_s", "probe_s", "clip_split_s"), "training"),
    "shift": Cause(("shift_s",), "handing shared GPUs over"),
    "push": Cause(("wait_push_s", "publish_s"), "making and pushing the version"),
    "evaluation": Cause(("wait_evaluation_s", "hold_s"), "waiting for an evaluation"),
    "checkpoint": Cause(("checkpoint_s",), "writing a checkpoint"),
    "log": Cause(("log_s", "record_s"), "writing the log"),
}
# Figures of work beside the learner's own; they are no part of a step's time.
BESIDE = {
    "version_beside_s": "making the version of the step before, beside training",
    "checkpoint_beside_s": "writing a checkpoint, beside training",
}
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
        """The learner's work or wait, in words."""
        return CAUSES[self.cause].in_words


def seconds_by_cause(figures: Mapping[str, float]) -> dict[str, float]:
    """Seconds of one step by cause, in the order of CAUSES, also causes without time."""
    return {cause: sum(figures.get(name, 0.0) for name in names) for cause, (names, _) in CAUSES.items()}


def shares(*steps: Mapping[str, float]) -> list[Share]:
    """The causes of the steps' time, the largest first, without those that took no time."""
    totals = dict.fromkeys(CAUSES, 0.0)
    for figures in steps:
        for cause, seconds in seconds_by_cause(figures).items():
            totals[cause] += seconds
    all_s = sum(totals.values())
    step_shares = [Share(cause, seconds, seconds / all_s) for cause, seconds in totals.items() if seconds > 0]
    return sorted(step_shares, key=lambda share: -share.seconds)


def overlapped_seconds(*steps: Mapping[str, float]) -> dict[str, float]:
    """Mean seconds a step of the work beside the learner's own, in words; without work that took no time."""
    means = {words: sum(step.get(name, 0.0) for step in steps) / len(steps) for name, words in BESIDE.items() if steps}
    return {words: seconds for words, seconds in means.items() if seconds > 0}


def seconds_by_function(*steps: Mapping[str, float]) -> dict[str, float]:
    """Seconds of waiting for rewards by the function that was waited for, the longest first."""
    by_function: dict[str, float] = {}
    for figures in steps:
        for name, seconds in figures.items():
            if name.startswith(REWARD_PREFIX):
                function = name.removeprefix(REWARD_PREFIX).removesuffix("_s")
                by_function[function] = by_function.get(function, 0.0) + seconds
    return dict(sorted(by_function.items(), key=lambda item: -item[1]))


def duration(seconds: float) -> str:
    """'42 s', '3 min 5 s', '2 h 10 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
