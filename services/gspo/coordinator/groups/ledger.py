"""Settles groups: slots, traces, metrics and Redis follow the learner's events and its own account.

slots.py has the rules of the slots; task_writer.py removes the entries.
"""

from __future__ import annotations

from collections.abc import Iterable

from gspo.common.streams.messages import word_of
from gspo.common.telemetry import metrics
from gspo.coordinator.groups.slots import TRAINED, Slots
from gspo.coordinator.groups.spans import GroupTraces
from gspo.coordinator.groups.task_writer import TaskWriter
from gspo_proto.learner_pb2 import ProgressReply
from gspo_proto.rollout_pb2 import SettledGroup, Settlement, StepDone


class GroupLedger:
    """The groups that are settled, and those among them whose entries are still in Redis."""

    def __init__(self, slots: Slots, writer: TaskWriter, traces: GroupTraces) -> None:
        self._slots, self._writer, self._traces = slots, writer, traces
        self._closed: list[int] = []
        self._sweep = False

    def on_step(self, step: StepDone) -> None:
        """The groups of a step are trained."""
        has_copies = any(entry.has_copies for group in step.groups if (entry := self._slots.open.get(group)))
        closed = self._slots.train(step.groups, step.version)
        self._traces.trained(closed, step.version)
        self._close(closed, TRAINED, sweep=has_copies)

    def on_settled(self, groups: Iterable[SettledGroup]) -> None:
        """Groups ended without being trained."""
        for group in groups:
            settlement = word_of(Settlement, group.settlement)
            closed = self._slots.settle([group.group], settlement)
            self._traces.ended(closed, settlement)
            self._close(closed, settlement, sweep=True)

    def on_live(self, version: int) -> None:
        """A generator serves a version."""
        self._slots.go_live(version)
        self._traces.live(version)

    def on_progress(self, reply: ProgressReply) -> None:
        """Take over the learner's own account, which includes settlements whose events were lost."""
        ranges = [(part.first, part.last) for part in reply.settled]
        closed = self._slots.reconcile(ranges, reply.version, reply.live_version, dict(reply.counts))
        self._traces.ended(closed, "reconciled")
        self._closed += closed
        self._sweep |= bool(closed)

    def sweep(self) -> None:
        """Have the next `remove_closed` remove every leftover task of a settled group."""
        self._sweep = True

    async def remove_closed(self) -> None:
        """Remove the entries of settled groups from Redis."""
        groups, self._closed = self._closed, []
        # The tasks first: a generator with such a task could save a rollout under a key that was removed already.
        if self._sweep:
            self._sweep = False
            await self._writer.remove_leftover_tasks()
        await self._writer.remove_settled(groups)

    def _close(self, groups: list[int], settlement: str, *, sweep: bool) -> None:
        metrics.GROUPS_SETTLED.labels(settlement).inc(len(groups))
        self._closed += groups
        self._sweep |= sweep and bool(groups)
