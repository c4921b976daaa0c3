"""What the learner waited for before a step: read from the journey of the rollout that came last.

A batch is complete when its last rollout is; so each moment of the wait belongs to the station at which that rollout
was then. Not a clock: every time is the stations' own, in Unix seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gspo.common.telemetry.step_time import REWARD_PREFIX
from gspo_proto.rollout_pb2 import ScoredRollout


@dataclass(frozen=True)
class RolloutTimeline:
    """When a rollout passed which station, and the reward function that took longest on it."""

    group: int
    number: int
    issued: float
    started: float
    finished: float
    taken: float
    scored: float
    function: str


@dataclass(frozen=True)
class StepWait:
    """A wait of the learner, and what else happened that may have held up the issue of groups.

    Attributes:
        live: When the learner's version was first served by a generator; it frees slots.
        evaluated: When the last evaluation was recorded; before the first step it holds back the issue.
    """

    began: float
    ended: float
    live: float
    evaluated: float


class RolloutTimelines:
    """The timelines of the rollouts that wait for their step."""

    def __init__(self) -> None:
        self._of_group: dict[int, list[RolloutTimeline]] = defaultdict(list)

    def add(self, scored: ScoredRollout) -> None:
        """A rollout came in."""
        rollout, score = scored.rollout, scored.score
        function = max(score.seconds, key=lambda name: score.seconds[name], default="")
        self._of_group[rollout.group].append(
            RolloutTimeline(
                group=rollout.group,
                number=rollout.number,
                issued=rollout.issued_unix_s,
                started=rollout.started_unix_s,
                finished=rollout.finished_unix_s,
                taken=score.taken_unix_s,
                scored=score.scored_unix_s,
                function=function,
            )
        )

    def take(self, groups: Iterable[int]) -> list[RolloutTimeline]:
        """The timelines of groups that have ended; they are forgotten."""
        return [journey for group in groups for journey in self._of_group.pop(group, [])]


def seconds_waited(timelines: Iterable[RolloutTimeline], wait: StepWait) -> dict[str, float]:
    """Seconds of the wait by figure; they add up to its length.

    The last rollout was first not issued (a push or an evaluation held that up, or nobody had issued it yet), then
    queued, then generated, then scored, then on its way to the learner.
    """
    last = max(timelines, key=lambda journey: journey.scored, default=None)
    if last is None:
        return {"wait_intake_s": wait.ended - wait.began}
    until = (
        ("wait_push_s", min(wait.live, last.issued)),
        ("wait_evaluation_s", min(wait.evaluated, last.issued)),
        ("wait_issue_s", last.issued),
        ("wait_queue_s", last.started),
        ("wait_generation_s", last.finished),
        ("wait_reward_s", last.scored),
        ("wait_intake_s", wait.ended),
    )
    found, at = {}, wait.began
    for name, end in until:
        reached = max(at, min(end, wait.ended))
        found[name], at = reached - at, reached
    if last.function:
        found[f"{REWARD_PREFIX}{last.function}_s"] = found["wait_reward_s"]
    return found
