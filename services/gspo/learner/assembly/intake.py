"""Scored rollouts come in: from the stream into the assembler, while the learner trains.

consumes: scored. produces: dead letters. waits for: entries. unblocked by: the reward service.
An entry stays pending until its rollout is on disk or its group has ended. The learner keeps its consumer name over
restarts: no lease is renewed or reclaimed, so the shared consumer loop is not used here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import structlog

from gspo.common.service.app import Service
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.inbox import Delivery, Inbox
from gspo.common.streams.keys import LEARNER
from gspo.common.telemetry import metrics
from gspo.learner.assembly.assembler import AddResult, Assembler
from gspo.learner.assembly.rollout_limits import rollout_limits
from gspo.learner.telemetry.rollout_timelines import RolloutTimelines
from gspo_proto.rollout_pb2 import GroupFailure, Rollout, Score, Scored, ScoredRollout

log = structlog.get_logger()
_BLOCK_S = 1.0
_AT_A_TIME = 256
# All entries that an earlier process took and did not finish; the open groups bound them.
_EVERYTHING = 1_000_000
# A killed learner hands on every entry that waits for its group, so accidents alone never reach this number.
_MAX_DELIVERIES = 20


class Intake:
    """Takes entries of `scored` and keeps those of each group for their acknowledgement.

    Attributes:
        arrived: Set when a new entry has come.
        timelines: The times of every kept rollout at each service.
    """

    def __init__(self, service: Service, assembler: Assembler) -> None:
        self._service, self._assembler = service, assembler
        self._limits = rollout_limits(service.config)
        # One learner at a time holds the run, so its name may outlive the process and find its own entries again.
        self._inbox = Inbox(
            service.redis,
            service.keys,
            service.keys.scored,
            consumer=LEARNER,
            lease_s=service.config.services.lease_s,
        )
        self._unacknowledged: dict[int, list[Delivery]] = defaultdict(list)
        self.arrived, self.timelines = asyncio.Event(), RolloutTimelines()

    async def run(self) -> None:
        """Take entries until cancelled; first those of an earlier process."""
        await self._add(await self._inbox.take_own_pending(_EVERYTHING))
        while True:
            if taken := await self._inbox.take(_AT_A_TIME, _BLOCK_S):
                await self._add(taken)

    async def acknowledge(self, groups: Iterable[int]) -> None:
        """Acknowledge every entry of groups that are settled on disk."""
        await self._inbox.acknowledge([entry for group in groups for entry in self._unacknowledged.pop(group, [])])

    async def open_groups(self) -> dict[int, int]:
        """Groups that the coordinator has issued and that are not settled -> the least version of their tokens."""
        groups = await self._service.redis.hgetall(self._service.keys.open)
        return {int(group): _min_version(text) for group, text in groups.items()}

    async def _add(self, deliveries: list[Delivery]) -> None:
        strange = await self._never_issued(deliveries)
        used_up = []
        for delivery in deliveries:
            if (group := _group(_content(delivery.message))) in strange:
                await self._refuse(delivery, f"group {group} was never issued", [])
            elif not await self._take_in(delivery):
                used_up.append(delivery)
        await self._inbox.acknowledge(used_up)
        self.arrived.set()

    async def _never_issued(self, deliveries: Iterable[Delivery]) -> set[int]:
        """Groups that were never issued: the assembler does not know them, and they are not in `open`.

        A group is in `open` from the transaction that issues it until the coordinator has heard that it is settled.
        """
        groups = {_group(_content(delivery.message)) for delivery in deliveries}
        unknown = [group for group in groups if not self._assembler.knows(group)]
        if not unknown:
            return set()
        entries = await self._service.redis.hmget(self._service.keys.open, [str(group) for group in unknown])
        return {group for group, entry in zip(unknown, entries, strict=True) if entry is None}

    async def _take_in(self, delivery: Delivery) -> bool:
        """Whether the entry has to be kept; otherwise it has no further use."""
        entry = _content(delivery.message)
        if delivery.num_deliveries > _MAX_DELIVERIES:
            entry = await self._give_up(delivery, entry)
        try:
            if isinstance(entry, ScoredRollout):
                self._limits.check(entry)
            added = self._assembler.add(entry)
        except ValueError as error:
            await self._refuse(delivery, str(error), self._replacement_for(entry, str(error)))
            return True
        if added is AddResult.NEW:
            # For its acknowledgement; the assembler has its content.
            self._unacknowledged[_group(entry)].append(replace(delivery, payload=b"", message=None))
            if isinstance(entry, ScoredRollout):
                self.timelines.add(entry)
            return True
        metrics.ROLLOUTS_SKIPPED.labels(added.value).inc()
        return False

    async def _refuse(self, delivery: Delivery, reason: str, in_its_place: list[bytes]) -> None:
        metrics.ROLLOUTS_SKIPPED.labels("malformed").inc()
        await self._inbox.dead_letter(delivery, reason, [(self._service.keys.scored, entry) for entry in in_its_place])

    def _replacement_for(self, entry: ScoredRollout | GroupFailure, reason: str) -> list[bytes]:
        """A failed rollout without tokens: a refused rollout is done for the generators, which do not repeat it."""
        if isinstance(entry, GroupFailure) or not self._limits.has_rollout(entry.rollout):
            return []
        refused = entry.rollout
        rollout = Rollout(
            schema=SCHEMA,
            group=refused.group,
            number=refused.number,
            attempt=refused.attempt,
            num_rollouts=refused.num_rollouts,
        )
        score = Score(failure=reason, failure_kind="malformed", scored_unix_s=time.time())
        return [Scored(schema=SCHEMA, rollout=ScoredRollout(rollout=rollout, score=score)).SerializeToString()]

    async def _give_up(self, delivery: Delivery, entry: ScoredRollout | GroupFailure) -> GroupFailure:
        """Dead-letter an entry that so many learners died over: its group fails, and its slot is free."""
        reason = f"handed to {delivery.num_deliveries - 1} learners, and each died with it in hand"
        await self._inbox.dead_letter(delivery, reason)
        issued = entry if isinstance(entry, GroupFailure) else entry.rollout
        return GroupFailure(group=issued.group, attempt=issued.attempt, reason=reason)


@lru_cache(maxsize=100_000)  # an entry changes only when it is issued again, and is read many times a step
def _min_version(open_group: bytes) -> int:
    return int(json.loads(open_group)["min_version"])


def _content(scored: Scored) -> ScoredRollout | GroupFailure:
    return scored.failure if scored.WhichOneof("what") == "failure" else scored.rollout


def _group(entry: ScoredRollout | GroupFailure) -> int:
    return entry.group if isinstance(entry, GroupFailure) else entry.rollout.group
