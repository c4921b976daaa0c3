"""The stream's side of scoring: takes rollouts, keeps their leases while they are scored, writes what came out.

consumes rollouts and eval_rollouts / produces scored and eval_scored / waits for rollouts / unblocked by generation.
It knows no reward function.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import structlog

from gspo.common.service.app import Service
from gspo.common.service.traces import Traces
from gspo.common.streams.entries import scored_entry
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import Delivery, Inbox, new_consumer
from gspo.common.streams.keys import rollout_id
from gspo.common.telemetry import metrics
from gspo.reward.scoring.failure_window import FailureWindow
from gspo.reward.scoring.scorer import Scorer
from gspo_proto.rollout_pb2 import Event, Rollout, Score, ScoringFails

BLOCK_S = 0.5
# Rollouts of a burst come one by one, milliseconds apart; a round costs the same for one as for many.
LINGER_S = 0.02
# Batches scored at a time: those of a slow function leave room for others'.
MAX_BATCHES = 16
# An entry that so many scorers did not finish is the reason why.
MAX_ATTEMPTS = 5
log = structlog.get_logger()


class ScoringConsumer:
    """Scores what comes until the service stops."""

    def __init__(self, service: Service, scorer: Scorer) -> None:
        self._service, self._scorer = service, scorer
        reward = service.config.reward
        self._batch_size = reward.batch_size
        self._window = FailureWindow(reward.failure_window, reward.max_failure_share)
        self._events = Events(service.redis, service.keys, service.options.name)
        self._num_busy = 0

    async def run(self) -> None:
        """Serve both streams; after a stop finish what is in hand, for drain_timeout_s at most."""
        keys, consumer = self._service.keys, new_consumer("reward")
        self._service.activity.set("waiting", "rollouts")
        loops: set[asyncio.Task[object]] = {
            asyncio.create_task(self._serve(self._inbox(source, consumer), out), name=source)
            for source, out in ((keys.rollouts, keys.scored), (keys.eval_rollouts, keys.eval_scored))
        }
        stop: asyncio.Task[object] = asyncio.create_task(self._service.stopping.wait(), name="stop")
        try:
            await asyncio.wait({*loops, stop}, return_when=asyncio.FIRST_COMPLETED)
            ended, under_way = await asyncio.wait(
                loops, timeout=self._service.config.run.drain_timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in ended:
                task.result()
            if under_way:
                log.warning("drain_timeout", detail="what is in hand goes to another scorer when its lease ends")
        finally:
            for task in (*loops, stop):
                task.cancel()
            await asyncio.gather(*loops, stop, return_exceptions=True)

    def _inbox(self, stream: str, consumer: str) -> Inbox:
        lease_s = self._service.config.services.lease_s
        return Inbox(self._service.redis, self._service.keys, stream, consumer=consumer, lease_s=lease_s)

    async def _serve(self, inbox: Inbox, out: str) -> None:
        """Take batches and score them side by side; ends when what was taken is scored."""
        now = asyncio.get_running_loop().time
        next_reclaim = now()
        working: set[asyncio.Task[None]] = set()
        try:
            while not self._service.stopping.is_set():
                working = await _with_room(working)
                deliveries: list[Delivery] = []
                if now() >= next_reclaim:
                    deliveries = await inbox.reclaim(self._batch_size)
                    next_reclaim = now() + inbox.lease_s / 2
                if deliveries := deliveries or await self._take(inbox):
                    for batch in _by_functions(await self._give_up(inbox, out, deliveries)):
                        working.add(asyncio.create_task(self._work(inbox, out, batch), name="batch"))
            await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

    async def _take(self, inbox: Inbox) -> list[Delivery]:
        """A batch, as far as one comes together."""
        deliveries = await inbox.take(self._batch_size, BLOCK_S)
        if 0 < len(deliveries) < self._batch_size:
            await asyncio.sleep(LINGER_S)
            deliveries += await inbox.take(self._batch_size - len(deliveries), 0.001)
        return deliveries

    async def _work(self, inbox: Inbox, out: str, rollouts: list[tuple[Delivery, Rollout]]) -> None:
        taken_unix_s = time.time()
        with self._busy():
            async with keep_leases(inbox, [delivery for delivery, _ in rollouts]):
                scores = await self._scorer.score([rollout for _, rollout in rollouts])
            for score in scores:
                score.taken_unix_s = taken_unix_s
            outputs = [
                (delivery, scored_entry(delivery.payload, score))
                for (delivery, _), score in zip(rollouts, scores, strict=True)
            ]
            finished = await inbox.finish_many(out, outputs)
        for (delivery, rollout), score in zip(rollouts, scores, strict=True):
            if delivery.entry in finished:
                _count(rollout, score)
                if not rollout.evaluation:
                    _trace(self._service.traces, rollout, score)
                if not rollout.evaluation and (said := self._window.add(score)):
                    log.error("scoring_fails", reason=said)
                    await self._events.send(Event(scoring_fails=ScoringFails(reason=said)))

    async def _give_up(self, inbox: Inbox, out: str, deliveries: Sequence[Delivery]) -> list[tuple[Delivery, Rollout]]:
        """The rollouts; those that too many scorers were lost over are failures, and dead letters for people."""
        found = []
        for delivery in deliveries:
            rollout: Rollout = delivery.message
            if delivery.attempt <= MAX_ATTEMPTS:
                found.append((delivery, rollout))
                continue
            reason = f"handed out more than {MAX_ATTEMPTS} times: every scorer that took it was lost"
            score = Score(failure=reason, failure_kind="crash")
            if await inbox.dead_letter(delivery, reason, [(out, scored_entry(delivery.payload, score))]):
                _count(rollout, score)
        return found

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Two loops share the activity: it is scoring while one of them is."""
        self._num_busy += 1
        if self._num_busy == 1:
            self._service.activity.set("busy", "scoring")
        try:
            yield
        finally:
            self._num_busy -= 1
            if self._num_busy == 0:
                self._service.activity.set("waiting", "rollouts")


@asynccontextmanager
async def keep_leases(inbox: Inbox, deliveries: Sequence[Delivery]) -> AsyncIterator[None]:
    """Renew the leases of `deliveries` as long as the block lasts."""

    async def renew() -> None:
        while True:
            await asyncio.sleep(inbox.lease_s / 3)
            kept = await inbox.renew(deliveries)
            if len(kept) < len(deliveries):
                log.info("leases_lost", num=len(deliveries) - len(kept))

    renewing = asyncio.create_task(renew(), name="leases")
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)


async def _with_room(working: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """The batches still under way, when there is room for one more; one that raised raises here."""
    if not working:
        return working
    waits = None if len(working) >= MAX_BATCHES else 0
    done, pending = await asyncio.wait(working, timeout=waits, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return pending


def _by_functions(rollouts: Sequence[tuple[Delivery, Rollout]]) -> list[list[tuple[Delivery, Rollout]]]:
    """Rollouts apart by the functions that they ask for, so that none waits for another's."""
    found: dict[tuple[str, ...], list[tuple[Delivery, Rollout]]] = {}
    for delivery, rollout in rollouts:
        found.setdefault(tuple(use.name for use in rollout.rewards), []).append((delivery, rollout))
    return list(found.values())


def _trace(traces: Traces, rollout: Rollout, score: Score) -> None:
    """Its wait for this scorer, and its scoring."""
    which = (rollout.group, rollout.number)
    traces.add("queue", *which, rollout.finished_unix_s, score.taken_unix_s, before="score")
    result = {"reward": score.reward} if score.HasField("reward") else {"failure": score.failure}
    traces.add("score", *which, score.taken_unix_s, score.scored_unix_s, scorer=score.scorer, **result)


def _count(rollout: Rollout, score: Score) -> None:
    metrics.SCORE_QUEUE_SECONDS.observe(max(0.0, score.taken_unix_s - rollout.finished_unix_s))
    failed = score.WhichOneof("result") == "failure"
    metrics.ROLLOUTS_SCORED.labels("failed" if failed else "scored").inc()
    if failed:
        metrics.SCORE_FAILURES.labels(score.failure_kind or "exception").inc()
        log.warning("score_failed", rollout=rollout_id(rollout.group, rollout.number), reason=score.failure)
