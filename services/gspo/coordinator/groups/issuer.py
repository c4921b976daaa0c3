"""Fills the free slots with groups, and announces the end of the prompts."""

from __future__ import annotations

import structlog

from gspo.common.service.app import Service
from gspo.common.telemetry import metrics
from gspo.coordinator.feed import EventFeed
from gspo.coordinator.groups.slots import Slots
from gspo.coordinator.groups.task_writer import TaskWriter
from gspo_proto.rollout_pb2 import Event, PromptsExhausted

log = structlog.get_logger()


class GroupIssuer:
    """Issues groups while slots are free.

    Attributes:
        has_more: Whether the last `issue` left slots free that the next one can fill.
    """

    def __init__(self, service: Service, slots: Slots, writer: TaskWriter, feed: EventFeed) -> None:
        self._activity, self._batch_size = service.activity, service.config.algorithm.rollout_batch_size
        self._slots, self._writer, self._feed = slots, writer, feed
        self.has_more = self._announced = False
        metrics.SLOTS.set(slots.num_slots)

    async def issue(self, *, allowed: bool, prepares: bool) -> None:
        """Issue groups for the free slots, or read the next batch's prompts; announce the end of the prompts once.

        Args:
            allowed: Whether groups may be issued now.
            prepares: Whether prompts are read ahead while no group can be issued.
        """
        self.has_more = False
        if allowed and self._slots.num_free and not self._slots.exhausted:
            with self._activity.doing("issuing"):
                num_issued = await self._writer.issue_new(self._slots.num_free)
            self.has_more = bool(num_issued and self._slots.num_free)
            log.debug("issued", groups=num_issued, taken=self._slots.num_taken)
        elif prepares:
            await self._writer.prepare(self._batch_size)
        if self._slots.exhausted and not self._announced:
            self._announced = True
            await self._feed.send(Event(prompts_exhausted=PromptsExhausted(num_groups=self._slots.num_issued)))
        metrics.GROUPS_OPEN.set(len(self._slots.open))

    def announce_again(self) -> None:
        """Announce the end of the prompts once more: a new learner has missed it."""
        self._announced = False
