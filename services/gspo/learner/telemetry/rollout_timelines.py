"""The causes of the learner's wait before a step, by the timeline of the rollout that came last.

A batch is complete when its last rollout is. So each moment of the wait belongs to the stage of that rollout at the
time. Every time was taken by the service of that stage, in Unix seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gspo.common.telemetry.step_time import REWARD_PREFIX
from gspo_proto.rollout_pb2 import ScoredRollout


@dataclass(frozen=True)
class RolloutTimeline:
    """When a rollout passed each stage, and the reward function that took longest on it."""

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
    """A wait of the learner, and two events that may have delayed the issue of groups.

    Attributes:
        live: When the learner's version was first served by a generator; it frees slots.
        evaluated: When the last evaluation was recorded; before the first step it delays the issue.
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
        """The timelines of groups that have ended; they are removed."""
        return [timeline for group in groups for timeline in self._of_group.pop(group, [])]


def seconds_waited(timelines: Iterable[RolloutTimeline], wait: StepWait) -> dict[str, float]:
    """Seconds of the wait by metric; they add up to its length.

    The last rollout was at first not issued: a push or an evaluation delayed that, or nothing did. Then it was queued,
    generated, scored, and on its way to the learner.
    """
    last = max(timelines, key=lambda timeline: timeline.scored, default=None)
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
    seconds, begin = {}, wait.began
    for name, stage_end in until:
        end = max(begin, min(stage_end, wait.ended))
        seconds[name], begin = end - begin, end
    if last.function:
        seconds[f"{REWARD_PREFIX}{last.function}_s"] = seconds["wait_reward_s"]
    return seconds
