"""The tasks in a worker's hands: where they came from, where their results go, which rollouts are under way.

Carriers alone. Neighbour: worker.py takes them, works on them and lets them go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gspo.common.streams.inbox import Delivery, Inbox
from gspo.generation.outbox import Outbox
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto.rollout_pb2 import GroupTask


@dataclass(frozen=True)
class TaskSource:
    """One stream of tasks and where its results go."""

    inbox: Inbox
    outbox: Outbox
    rollouts: str
    scored: str
    group_size: int  # rollouts of a task, at most
    segment_tokens: int | None = None  # of a rollout in one step, while others wait


@dataclass
class LeasedTask:
    """One task in this worker's hands."""

    source: TaskSource
    delivery: Delivery
    task: GroupTask
    num_running: int  # its rollouts that take room
    in_flight: dict[int, InFlightRollout] = field(default_factory=dict)
    pauses: bool = False  # what of it has used up its tokens of this step waits for a later one

    def rollouts(self) -> Iterator[tuple[Inbox, Delivery, InFlightRollout]]:
        """Every rollout under way, with what is needed to save it."""
        for rollout in self.in_flight.values():
            yield self.source.inbox, self.delivery, rollout


def num_failed_attempts(attempt: int, unfinished: Iterable[InFlightRollout]) -> int:
    """Times that a task was handed out since a holder last saved something: one that did has not failed."""
    return attempt - max((rollout.state.delivery for rollout in unfinished), default=0)
