"""The next batch to train, of the scored rollouts that come in; groups that end without training are settled here.

consumes: scored (intake.py). produces: log/settled.jsonl, GroupsSettled.
waits for: complete groups, unblocked by reward.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable

import structlog

from gspo.common.service.app import Service
from gspo.common.streams.events import Events
from gspo.common.tasks import wait_until_set
from gspo.common.telemetry import metrics
from gspo.learner.assembly.assembler import Assembler, Batch, NoUsableGroups, PromptsUsedUp, WaitingForGroups
from gspo.learner.assembly.intake import Intake
from gspo.learner.assembly.settlements import SettledGroup, Settlement
from gspo.learner.push.publisher import Publisher
from gspo.learner.run_end import RunEndCondition, RunFailedError
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.telemetry.rollout_timelines import RolloutTimeline
from gspo_proto.rollout_pb2 import Event, GroupsSettled

log = structlog.get_logger()
# A change of the open groups has no signal of its own.
_POLL_S = 0.25


class Batches:
    """Gives out batches, one for each step.

    Attributes:
        intake: Takes entries of `scored` into the assembler, as a background task.
        waited_since_s: When the wait for the last batch began, by time.monotonic.
    """

    def __init__(
        self,
        service: Service,
        run_dir: RunDir,
        assembler: Assembler,
        publisher: Publisher,
        end: RunEndCondition,
        events: Events,
    ) -> None:
        self._activity, self._run_dir, self._assembler = service.activity, run_dir, assembler
        self._publisher, self._end, self._events = publisher, end, events
        self.intake = Intake(service, assembler)
        self.waited_since_s = 0.0
        self._is_generating = False
        self._untrained = UntrainedGroups()

    async def next(self, version: int, is_interrupted: Callable[[], bool]) -> Batch | None:
        """The batch that makes version + 1; None once it is interrupted, or the prompts are used up.

        Raises:
            RunFailedError: Too many groups in a row failed or were filtered.
        """
        self.waited_since_s = time.monotonic()
        while not is_interrupted():
            self.intake.arrived.clear()
            if not self._is_generating:
                # The time until the first engine serves belongs to the start, not to training.
                self.waited_since_s = time.monotonic()
                self._is_generating = self._publisher.live_version >= 0
            open_groups = await self.intake.open_groups()
            result = self._assembler.next_batch(version, open_groups, num_groups=self._end.num_groups)
            await self._settle(result.settled)
            match result:
                case Batch():
                    return result
                case NoUsableGroups():
                    raise RunFailedError(result.reason)
                case PromptsUsedUp():
                    self._end.use_up_prompts()
                    return None
                case WaitingForGroups():
                    await self._wait_for_rollouts(result)
        return None

    async def acknowledge(self, groups: Iterable[int]) -> None:
        """Acknowledge the entries of groups whose step is on disk."""
        await self.intake.acknowledge(groups)

    async def settle_unused(self, reason: str) -> None:
        """Settle every group that is open and was not trained."""
        await self._settle(self._assembler.settle_unused(await self.intake.open_groups(), reason))

    def take_timelines(self, groups: Iterable[int]) -> list[RolloutTimeline]:
        """The timelines of the rollouts of a batch, once."""
        return self.intake.timelines.take(groups)

    def take_untrained_metrics(self) -> dict[str, float]:
        """Metrics of the groups that ended without training since the step before, by their public names."""
        return self._untrained.take_metrics()

    def wake(self) -> None:
        """Have `next` look again at once: an event came, or a request."""
        self.intake.arrived.set()

    async def _wait_for_rollouts(self, waiting: WaitingForGroups) -> None:
        began, detail = time.monotonic(), waiting.detail
        if problem := self._publisher.problem():
            detail += f"; {problem}"
        self._activity.set("waiting", "rollouts", detail)
        try:
            await wait_until_set(self.intake.arrived, _POLL_S)
        finally:
            if waiting.what == "old_groups":
                self._untrained.add_wait(time.monotonic() - began)

    async def _settle(self, groups: tuple[SettledGroup, ...]) -> None:
        """End groups without training: on disk first, then their entries go, then their slots."""
        if not groups:
            return
        await asyncio.to_thread(self._run_dir.settle, groups)
        self._untrained.add(groups)
        numbers = [group.group for group in groups]
        await self.intake.acknowledge(numbers)
        self.intake.timelines.take(numbers)
        await self._events.send(Event(groups_settled=GroupsSettled(groups=[group.to_proto() for group in groups])))
        log.info("groups_settled", num=len(groups), last=groups[-1].settlement.value, reason=groups[-1].reason)


class UntrainedGroups:
    """Counts the groups that were not trained since the step before, and the cost of stale rollouts."""

    def __init__(self) -> None:
        self._counts: Counter[Settlement] = Counter()
        self._waited_s = 0.0
        self._dropped_tokens: list[int] = []

    def add_wait(self, seconds: float) -> None:
        """The learner waited for groups that a further version would make too old."""
        self._waited_s += seconds

    def add(self, groups: Iterable[SettledGroup]) -> None:
        """Groups ended without training; the lengths of those too old count."""
        for group in groups:
            self._counts[group.settlement] += 1
            self._dropped_tokens += group.response_tokens

    def take_metrics(self) -> dict[str, float]:
        """By their public names; the account begins anew."""
        counts, lengths, waited_s = self._counts, self._dropped_tokens, self._waited_s
        self._counts, self._dropped_tokens, self._waited_s = Counter(), [], 0.0
        metrics.STALE_TOKENS.labels("dropped").inc(sum(lengths))
        metrics.STALE_WAIT_SECONDS.inc(waited_s)
        account = {
            **{
                f"groups_{settlement}": float(counts[settlement])
                for settlement in (Settlement.FILTERED, Settlement.STALE, Settlement.FAILED)
            },
            "wait_old_s": waited_s,
            "dropped_rollouts": float(len(lengths)),
            "dropped_tokens": float(sum(lengths)),
        }
        if lengths:
            account["dropped_response_tokens_mean"] = sum(lengths) / len(lengths)
            account["dropped_response_tokens_max"] = float(max(lengths))
        return account
