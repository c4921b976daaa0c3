"""Scored rollouts come in while the learner trains, and go out as batches; groups that end untrained are settled.

consumes: scored. produces: log/settled.jsonl, GroupsSettled, dead letters.
waits for: complete groups, unblocked by reward.
An entry stays pending until its rollout is on disk or its group has ended. The learner keeps its consumer name over
restarts: no lease is renewed or reclaimed, so the shared consumer loop is not used here.
"""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import structlog

from gspo.common.service.app import Service
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import Delivery, Inbox
from gspo.common.streams.keys import LEARNER
from gspo.common.streams.token_counts import NO_TOKENS, EndedTokens
from gspo.common.tasks import wait_until_set
from gspo.common.telemetry import metrics
from gspo.learner.assembly.assembler import (
    AddResult,
    Assembler,
    Batch,
    NoUsableGroups,
    PromptsUsedUp,
    WaitingForGroups,
)
from gspo.learner.assembly.ended_tokens import PendingEntry, dead_tokens, late_tokens, row_key, trained_tokens
from gspo.learner.assembly.rollout_limits import rollout_limits
from gspo.learner.assembly.row_metrics import row_metrics
from gspo.learner.assembly.rows import Row
from gspo.learner.assembly.settlements import EndedGroup, GroupEnding
from gspo.learner.push.publisher import Publisher
from gspo.learner.run_end import RunEndCondition, RunFailedError
from gspo.learner.step_report import RolloutTimeline
from gspo.learner.storage.run_directory import RunDir
from gspo.runlog.token_ledger import SUPERSEDED
from gspo_proto.rollout_pb2 import (
    Event,
    FirstAnswers,
    GroupFailure,
    GroupsSettled,
    Rollout,
    Score,
    Scored,
    ScoredRollout,
)

log = structlog.get_logger()
_BLOCK_S = 1.0
_AT_A_TIME = 256
# All entries that an earlier process took and did not finish; the open groups bound them.
_EVERYTHING = 1_000_000
# A killed learner hands on every entry that waits for its group, so accidents alone never reach this number.
_MAX_DELIVERIES = 20
# A change of the open groups has no signal of its own.
_POLL_S = 0.25


class Intake:
    """Takes entries of `scored` into the assembler, and gives out a batch for each step.

    Attributes:
        untrained: The groups that ended without training since the step before.
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
        self._service, self._run_dir, self._assembler = service, run_dir, assembler
        self._publisher, self._end, self._events = publisher, end, events
        self._limits = rollout_limits(service.config)
        # One learner at a time holds the run, so its name may outlive the process and find its own entries again.
        self._inbox = Inbox(
            service.redis,
            service.keys,
            service.keys.scored,
            consumer=LEARNER,
            lease_s=service.config.services.lease_s,
        )
        # Of each group: its entries until they are acknowledged, and when its rollouts passed each service.
        self._unacknowledged: dict[int, list[PendingEntry]] = defaultdict(list)
        # Tokens of the last logged step by rollout; read where an earlier process has left its entries.
        self._logged: dict[str, EndedTokens] | None = None
        self._timelines: dict[int, list[RolloutTimeline]] = defaultdict(list)
        self.untrained = UntrainedGroups()
        self._filtered_first: list[Row] | None = []
        self._woken = asyncio.Event()
        self._is_generating = False
        self._num_groups: int | None = None
        self.waited_since_s = 0.0

    async def run(self) -> None:
        """Take entries until cancelled; first those of an earlier process."""
        await self._add(await self._inbox.take_own_pending(_EVERYTHING))
        while True:
            if taken := await self._inbox.take(_AT_A_TIME, _BLOCK_S):
                await self._add(taken)

    async def next_batch(self, version: int, is_interrupted: Callable[[], bool]) -> Batch | None:
        """The batch that makes version + 1; None once it is interrupted, or the prompts are used up.

        Raises:
            RunFailedError: Too many groups in a row failed or were filtered.
        """
        self.waited_since_s = time.monotonic()
        while not is_interrupted():
            self._woken.clear()
            if not self._is_generating:
                # The time until the first engine serves belongs to the start, not to training.
                self.waited_since_s = time.monotonic()
                self._is_generating = self._publisher.live_version >= 0
            open_groups = await self._open_groups()
            result = self._assembler.next_batch(version, open_groups, num_groups=self._num_groups)
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

    async def report_first_answers(self, rows: Sequence[Row]) -> None:
        """Tell the answers of the first policy to judge, once, with those of the groups that were filtered before."""
        if self._filtered_first is None:
            return
        rows, self._filtered_first = [*self._filtered_first, *rows], None
        figures = await asyncio.to_thread(row_metrics, rows, 1)
        figures["groups"] = float(len({row.group for row in rows}))
        await self._events.send(Event(first_answers=FirstAnswers(figures=figures)))

    def expect_no_more_than(self, num_groups: int) -> None:
        """The prompts are exhausted: so many groups were issued in all, and the last batches may be smaller."""
        self._num_groups = num_groups

    def wake(self) -> None:
        """Have `next_batch` look again at once: an event came, or a request."""
        self._woken.set()

    async def acknowledge_trained(self, rows: Sequence[Row]) -> None:
        """Acknowledge every entry of a logged step."""
        trained = {row_key(row): trained_tokens(row) for row in rows}
        await self._acknowledge({row.group for row in rows}, lambda pending: trained[pending.key])

    async def _acknowledge(self, groups: Iterable[int], tokens: Callable[[PendingEntry], EndedTokens]) -> None:
        """Acknowledge every entry of groups that are settled on disk, each with its tokens."""
        pending = [entry for group in groups for entry in self._unacknowledged.pop(group, [])]
        await self._inbox.acknowledge((entry.delivery, tokens(entry)) for entry in pending)

    def take_timelines(self, groups: Iterable[int]) -> list[RolloutTimeline]:
        """The timelines of the rollouts of groups that have ended, once."""
        return [timeline for group in groups for timeline in self._timelines.pop(group, [])]

    async def settle_unused(self, reason: str) -> None:
        """Settle every group that is open and was not trained."""
        await self._settle(self._assembler.settle_unused(await self._open_groups(), reason))

    async def _open_groups(self) -> dict[int, int]:
        """Groups that the coordinator has issued and that are not settled -> the least version of their tokens."""
        groups = await self._service.redis.hgetall(self._service.keys.open)
        return {int(group): _min_version(text) for group, text in groups.items()}

    async def _add(self, deliveries: list[Delivery]) -> None:
        """Give entries to the assembler; those that it has no use for are acknowledged at once."""
        never_issued = await self._never_issued(deliveries)
        useless = []
        for delivery in deliveries:
            entry = _entry_of(delivery)
            if (group := _issued(entry).group) in never_issued:
                await self._refuse(delivery, f"group {group} was never issued")
                continue
            if delivery.num_deliveries > _MAX_DELIVERIES:
                entry = await self._give_up(delivery, entry)
            try:
                if isinstance(entry, ScoredRollout):
                    self._limits.check(entry)
                added = self._assembler.add(entry)
            except ValueError as error:
                await self._refuse(delivery, str(error), self._replacement_for(entry, str(error)))
                continue
            if added is not AddResult.NEW:
                metrics.ROLLOUTS_SKIPPED.labels(added.value).inc()
                useless.append((delivery, self._tokens_of_useless(delivery, added)))
                continue
            # For its acknowledgement; the assembler has its content.
            self._unacknowledged[group].append(PendingEntry.of(delivery, _issued(entry)))
            if isinstance(entry, ScoredRollout):
                self._timelines[group].append(RolloutTimeline.of(entry))
        await self._inbox.acknowledge(useless)
        self._woken.set()

    def _tokens_of_useless(self, delivery: Delivery, added: AddResult) -> EndedTokens:
        """The tokens of an entry that nothing waits for.

        A learner that was killed between the record of an ending and the acknowledgement leaves its entries to the
        next one. An entry of which this is the first delivery was made twice, or came late.
        """
        entry, is_first = _entry_of(delivery), delivery.num_deliveries == 1
        if isinstance(entry, GroupFailure):
            return NO_TOKENS
        ending = self._run_dir.settlements.get(entry.rollout.group)
        if ending is GroupEnding.TRAINED and not is_first:
            if self._logged is None:
                self._logged = {row_key(row): trained_tokens(row) for row in self._run_dir.last_rows()}
            return self._logged.get(row_key(entry.rollout)) or late_tokens(entry.rollout, "trained")
        if added is AddResult.DUPLICATE:
            return late_tokens(entry.rollout, SUPERSEDED)
        return late_tokens(entry.rollout, (ending or GroupEnding.FAILED).value)

    async def _never_issued(self, deliveries: Iterable[Delivery]) -> set[int]:
        """Groups that were never issued: the assembler does not know them, and they are not in `open`.

        A group is in `open` from the transaction that issues it until the coordinator has heard that it is settled.
        """
        groups = {_issued(_entry_of(delivery)).group for delivery in deliveries}
        unknown = [group for group in groups if not self._assembler.knows(group)]
        if not unknown:
            return set()
        open_groups = await self._service.redis.hmget(self._service.keys.open, [str(group) for group in unknown])
        return {group for group, open_group in zip(unknown, open_groups, strict=True) if open_group is None}

    async def _refuse(self, delivery: Delivery, reason: str, replacement: Scored | None = None) -> None:
        metrics.ROLLOUTS_SKIPPED.labels("malformed").inc()
        outputs = [(self._service.keys.scored, replacement.SerializeToString())] if replacement else []
        await self._inbox.dead_letter(delivery, reason, outputs, dead_tokens(_issued(_entry_of(delivery))))

    def _replacement_for(self, entry: ScoredRollout | GroupFailure, reason: str) -> Scored | None:
        """A failed rollout without tokens: a refused rollout is done for the generators, which do not repeat it."""
        if isinstance(entry, GroupFailure) or not self._limits.has_rollout(entry.rollout):
            return None
        refused = entry.rollout
        rollout = Rollout(
            schema=SCHEMA,
            group=refused.group,
            number=refused.number,
            attempt=refused.attempt,
            num_rollouts=refused.num_rollouts,
        )
        score = Score(failure=reason, failure_kind="malformed", scored_unix_s=time.time())
        return Scored(schema=SCHEMA, rollout=ScoredRollout(rollout=rollout, score=score))

    async def _give_up(self, delivery: Delivery, entry: ScoredRollout | GroupFailure) -> GroupFailure:
        """Dead-letter an entry that so many learners died over: its group fails, and its slot is free."""
        reason = f"handed to {delivery.num_deliveries - 1} learners, and each died with it in hand"
        await self._inbox.dead_letter(delivery, reason, tokens=dead_tokens(_issued(entry)))
        issued = _issued(entry)
        return GroupFailure(group=issued.group, attempt=issued.attempt, reason=reason)

    async def _wait_for_rollouts(self, waiting: WaitingForGroups) -> None:
        began, detail = time.monotonic(), waiting.detail
        if problem := self._publisher.problem():
            detail += f"; {problem}"
        self._service.activity.set("waiting", "rollouts", detail)
        try:
            await wait_until_set(self._woken, _POLL_S)
        finally:
            if waiting.what == "old_groups":
                self.untrained.add_wait(time.monotonic() - began)

    async def _settle(self, groups: tuple[EndedGroup, ...]) -> None:
        """End groups without training: on disk first, then their entries go, then their slots."""
        if not groups:
            return
        await asyncio.to_thread(self._run_dir.settle, groups)
        self.untrained.add(groups)
        endings = {group.group: group.settlement for group in groups}
        await self._acknowledge(endings, lambda pending: pending.ended_as(endings[pending.group]))
        self.take_timelines(endings)
        if self._filtered_first is not None:
            self._filtered_first += [row for group in groups for row in group.first_rows]
            if len({row.group for row in self._filtered_first}) >= self._service.config.algorithm.rollout_batch_size:
                await self.report_first_answers([])
        await self._events.send(Event(groups_settled=GroupsSettled(groups=[group.to_proto() for group in groups])))
        log.info("groups_settled", num=len(groups), last=groups[-1].settlement.value, reason=groups[-1].reason)


class UntrainedGroups:
    """The groups that were not trained since the step before, and the cost of stale rollouts."""

    def __init__(self) -> None:
        self._groups: list[EndedGroup] = []
        self._waited_s = 0.0

    def add_wait(self, seconds: float) -> None:
        """The learner waited for groups that a further version would make too old."""
        self._waited_s += seconds

    def add(self, groups: Iterable[EndedGroup]) -> None:
        """Groups ended without training; the lengths of those too old count."""
        self._groups += groups

    def take_metrics(self) -> dict[str, float]:
        """By their public names; the account begins anew."""
        groups, waited_s = self._groups, self._waited_s
        self._groups, self._waited_s = [], 0.0
        counts = Counter(group.settlement for group in groups)
        lengths = [length for group in groups for length in group.response_tokens]
        metrics.STALE_TOKENS.labels("dropped").inc(sum(lengths))
        metrics.STALE_WAIT_SECONDS.inc(waited_s)
        account = {
            f"groups_{settlement}": float(counts[settlement])
            for settlement in (GroupEnding.FILTERED, GroupEnding.STALE, GroupEnding.FAILED)
        }
        account |= {
            "wait_old_s": waited_s,
            "dropped_rollouts": float(len(lengths)),
            "dropped_tokens": float(sum(lengths)),
        }
        if lengths:
            account["dropped_response_tokens_mean"] = sum(lengths) / len(lengths)
            account["dropped_response_tokens_max"] = float(max(lengths))
        return account


@lru_cache(maxsize=100_000)  # one changes only when it is issued again, and is read many times a step
def _min_version(open_group: bytes) -> int:
    return int(json.loads(open_group)["min_version"])


def _entry_of(delivery: Delivery) -> ScoredRollout | GroupFailure:
    scored: Scored = delivery.message
    return scored.failure if scored.WhichOneof("what") == "failure" else scored.rollout


def _issued(entry: ScoredRollout | GroupFailure) -> Rollout | GroupFailure:
    """The part of an entry that names its group and attempt."""
    return entry if isinstance(entry, GroupFailure) else entry.rollout
