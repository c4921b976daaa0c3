"""Scored rollouts come in: from the stream into the assembler, while the learner trains.

consumes: scored. produces: nothing; an entry is acknowledged once its rollout is on disk or its group has ended.
waits for: the reward service. Neighbours: assembly.py holds the rollouts, loop.py makes steps of them.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable

import structlog

from gspo_proto.rollout_pb2 import GroupFailure, Scored, ScoredRollout
from services.common import metrics
from services.common.keys import LEARNER
from services.common.runtime import Service
from services.common.streams import Delivery, Inbox
from services.learner.assembly import Added, Assembler
from services.learner.waits import Journeys

log = structlog.get_logger()
_BLOCK_S = 1.0
_AT_A_TIME = 256
# All that an earlier life took and did not finish; the open groups bound it.
_EVERYTHING = 1_000_000
# A learner that is killed hands on everything that waits for its group, so this is far more than accidents make.
_MOST_LIVES = 20


class Intake:
    """Takes entries of `scored` and remembers which of them stand for which group.

    Attributes:
        arrived: Set when something new came.
        journeys: Where the rollouts that are held have been, and when.
    """

    def __init__(self, service: Service, assembler: Assembler) -> None:
        self._service, self._assembler = service, assembler
        # One learner at a time holds the run, so its name may outlive the process and find its own entries again.
        self._inbox = Inbox(
            service.redis,
            service.keys,
            service.keys.scored,
            consumer=LEARNER,
            lease_s=service.config.services.lease_s,
        )
        self._held: dict[int, list[Delivery]] = defaultdict(list)
        self.arrived, self.journeys = asyncio.Event(), Journeys()

    async def run(self) -> None:
        """Take entries until cancelled; first those of an earlier life."""
        await self._add(await self._inbox.resume(_EVERYTHING))
        while True:
            if taken := await self._inbox.take(_AT_A_TIME, _BLOCK_S):
                await self._add(taken)

    async def acknowledge(self, groups: Iterable[int]) -> None:
        """Acknowledge every entry of groups that are settled on disk."""
        await self._inbox.acknowledge([entry for group in groups for entry in self._held.pop(group, [])])

    async def open_groups(self) -> dict[int, int]:
        """Groups issued and not settled -> the least version of their tokens, as the coordinator says."""
        found = await self._service.redis.hgetall(self._service.keys.open)
        return {int(group): int(json.loads(text)["min_version"]) for group, text in found.items()}

    async def _add(self, deliveries: list[Delivery]) -> None:
        await self._inbox.acknowledge([entry for entry in deliveries if not await self._take_in(entry)])
        self.arrived.set()

    async def _take_in(self, delivery: Delivery) -> bool:
        """Whether the entry is to be held; if not, it has no further use."""
        entry = _content(delivery.message)
        if delivery.attempt > _MOST_LIVES:
            entry = await self._give_up(delivery, entry)
        try:
            added = self._assembler.add(entry)
        except ValueError as error:
            metrics.ROLLOUTS_SKIPPED.labels("malformed").inc()
            await self._inbox.bury(delivery, str(error))
            return True
        if added is Added.NEW:
            group = entry.group if isinstance(entry, GroupFailure) else entry.rollout.group
            self._held[group].append(delivery)
            if isinstance(entry, ScoredRollout):
                self.journeys.add(entry)
            return True
        metrics.ROLLOUTS_SKIPPED.labels(added.value).inc()
        return False

    async def _give_up(self, delivery: Delivery, entry: ScoredRollout | GroupFailure) -> GroupFailure:
        """An entry that so many learners died over: its group fails, so that it holds no slot."""
        reason = f"handed to {delivery.attempt - 1} learners, and each died with it in hand"
        await self._inbox.bury(delivery, reason)
        group = entry.group if isinstance(entry, GroupFailure) else entry.rollout.group
        return GroupFailure(group=group, attempt=delivery.attempt, reason=reason)


def _content(scored: Scored) -> ScoredRollout | GroupFailure:
    return scored.failure if scored.WhichOneof("what") == "failure" else scored.rollout
