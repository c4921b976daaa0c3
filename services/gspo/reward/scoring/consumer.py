"""Scoring from the streams: rollouts come in batches, their scores go out in the transaction that acknowledges them.

consumes: rollouts, eval_rollouts.
produces: scored, eval_scored, ScoresDiffer, and Finished if a teacher does not answer.
waits for: rollouts. unblocked by: generation.
The scorer calls the reward functions, taught_tokens.py a teacher at an address; this module knows neither.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import structlog

from gspo.common.service.app import Service
from gspo.common.service.traces import Traces
from gspo.common.streams.consumer import Consumer, Deliveries, Subscription
from gspo.common.streams.entries import scored_entry
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import Delivery, Inbox, new_consumer_name
from gspo.common.streams.keys import rollout_key
from gspo.common.telemetry import metrics
from gspo.reward.scoring.repeated_scores import NUM_REPEATED, repeat_scores
from gspo.reward.scoring.scorer import Scorer
from gspo.reward.scoring.taught_tokens import TaughtTokens, add_to
from gspo_proto.rollout_pb2 import RUN_END_FAILED, Event, Finished, Rollout, Score, ScoringFails

# Rollouts of a burst come one by one, milliseconds apart; a batch costs the same for one as for many.
LINGER_S = 0.02
# More than one, so that a slow function does not hold up the others.
MAX_BATCHES = 32
# An entry that so many scorers did not finish is the reason why.
MAX_DELIVERIES = 5
# Of a failure that an event quotes.
MAX_REASON_CHARS = 1000
log = structlog.get_logger()


class ScoringConsumer:
    """Scores the rollouts of both streams until the service stops."""

    def __init__(self, service: Service, scorer: Scorer) -> None:
        self._service, self._scorer = service, scorer
        reward, keys, name = service.config.reward, service.keys, new_consumer_name("reward")
        self._window = FailureWindow(reward.failure_window, reward.max_failure_share)
        self._events = Events(service.redis, keys, service.options.name)
        self._num_busy = 0
        self._first: list[tuple[Rollout, Score]] = []
        self._repeating: asyncio.Task[None] | None = None
        teacher = service.config.teacher
        self._teacher = TaughtTokens(teacher, self._end_run, self._note_teacher) if teacher.address else None
        self._subscriptions = [
            self._subscription(stream, output, name)
            for stream, output in ((keys.rollouts, keys.scored), (keys.eval_rollouts, keys.eval_scored))
        ]
        self._consumer = Consumer(
            self._subscriptions,
            stopping=service.stopping,
            order=self._alternate,
            drain_s=service.config.run.drain_timeout_s,
            max_batches=MAX_BATCHES,
        )

    async def run(self) -> None:
        """Score until the service stops; then finish the batches in flight, for drain_timeout_s at most."""
        self._service.activity.set("waiting", "rollouts")
        try:
            await self._consumer.run()
        finally:
            if self._repeating is not None:
                self._repeating.cancel()
                await asyncio.gather(self._repeating, return_exceptions=True)
            if self._teacher is not None:
                await self._teacher.close()

    async def _alternate(self) -> Sequence[Subscription]:
        """Each stream is first at every second look, so that a backlog of one does not hold up the other."""
        self._subscriptions = self._subscriptions[::-1]
        return self._subscriptions

    def _subscription(self, stream: str, output: str, name: str) -> Subscription:
        service = self._service
        inbox = Inbox(service.redis, service.keys, stream, consumer=name, lease_s=service.config.services.lease_s)
        return Subscription(
            inbox,
            handle=partial(self._score, inbox, output),
            capacity=lambda: service.config.reward.batch_size,
            # Rollouts that ask for other functions are another batch, so that none waits for another's function.
            batch_key=lambda delivery: tuple(use.name for use in delivery.message.rewards),
            linger_s=LINGER_S,
            max_deliveries=MAX_DELIVERIES,
            failure=partial(_failure, output),
        )

    async def _score(self, inbox: Inbox, output: str, batch: Deliveries) -> None:
        taken_unix_s = time.time()
        with self._busy():
            scores = await self._scores([delivery.message for delivery in batch])
            for score in scores:
                score.taken_unix_s = taken_unix_s
            # A renewal of the leases cancels handlers whose entries are gone. Once these are finished they are gone
            # too, and their figures shall be kept.
            await asyncio.shield(self._finish(inbox, output, batch, scores))

    async def _scores(self, rollouts: list[Rollout]) -> list[Score]:
        """The rewards, and beside them the log-probs of a teacher at an address."""
        if self._teacher is None:
            return await self._scorer.score(rollouts)
        scores, taught = await asyncio.gather(self._scorer.score(rollouts), self._teacher.score(rollouts))
        for score, logp in zip(scores, taught, strict=True):
            add_to(score, logp)
        return scores

    async def _end_run(self, reason: str) -> None:
        """The run ends for this reason; its rollouts stay, and a resume scores them."""
        log.error("teacher_is_silent", reason=reason)
        await self._events.send(Event(finished=Finished(reason=reason, end=RUN_END_FAILED)))

    def _note_teacher(self, problem: str) -> None:
        """Show that a teacher is waited for, or that it answers."""
        if problem:
            log.warning("teacher_does_not_answer", reason=problem)
            self._service.activity.set("waiting", "teacher", problem)
        elif self._service.activity.what == "teacher":
            self._service.activity.set("busy", "scoring")

    async def _finish(self, inbox: Inbox, output: str, batch: Sequence[Delivery], scores: Sequence[Score]) -> None:
        """Write the scores, and record those whose entries were still ours."""
        payloads = [scored_entry(delivery.payload, score) for delivery, score in zip(batch, scores, strict=True)]
        finished = await inbox.finish_many(output, list(zip(batch, payloads, strict=True)))
        for delivery, score in zip(batch, scores, strict=True):
            if delivery.entry not in finished:
                continue
            rollout: Rollout = delivery.message
            _count(rollout, score)
            if rollout.evaluation:
                continue
            _trace(self._service.traces, rollout, score)
            self._keep_first(rollout, score)
            if problem := self._window.add(score):
                log.error("scoring_fails", reason=problem)
                await self._events.send(Event(scoring_fails=ScoringFails(reason=problem)))

    def _keep_first(self, rollout: Rollout, score: Score) -> None:
        """Keep the first answers with a score, and score them again once there are enough."""
        if self._repeating is not None or score.WhichOneof("result") != "reward":
            return
        self._first.append((rollout, score))
        if len(self._first) == NUM_REPEATED:
            self._repeating = asyncio.create_task(self._repeat(), name="repeat scores")

    async def _repeat(self) -> None:
        first, self._first = self._first, []
        size = self._service.config.reward.batch_size
        for differing in await repeat_scores(self._scorer.library, first, batch_size=size):
            log.warning("scores_differ", function=differing.function, answers=differing.num_differing)
            await self._events.send(Event(scores_differ=differing))

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Batches share the activity: it is scoring while one of them is in flight."""
        self._num_busy += 1
        if self._num_busy == 1:
            self._service.activity.set("busy", "scoring")
        try:
            yield
        finally:
            self._num_busy -= 1
            if self._num_busy == 0:
                self._service.activity.set("waiting", "rollouts")


class FailureWindow:
    """The share of failed scores over the newest `size` rollouts, compared with its bound.

    The consumer sends a problem as an event; the coordinator then pauses the run.

    Args:
        max_share: A larger share of failures is a problem.
    """

    def __init__(self, size: int, max_share: float) -> None:
        self._max_share = max_share
        self._kinds: deque[str] = deque(maxlen=size)  # "" is a score

    def add(self, score: Score) -> str | None:
        """Count a score.

        Returns:
            The problem if too many of a full window failed, and None otherwise. The window then starts anew.
        """
        failed = score.WhichOneof("result") == "failure"
        self._kinds.append(score.failure_kind or "exception" if failed else "")
        if not failed or len(self._kinds) < (self._kinds.maxlen or 0):
            return None
        kinds = Counter(kind for kind in self._kinds if kind)
        share = kinds.total() / len(self._kinds)
        if share <= self._max_share:
            return None
        of = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        problem = (
            f"{share:.0%} of the last {len(self._kinds)} scores failed ({of}), more than reward.max_failure_share "
            f"{self._max_share:g}; the last one: {score.failure[:MAX_REASON_CHARS]}"
        )
        self._kinds.clear()
        return problem


def _failure(output: str, delivery: Delivery, reason: str) -> Sequence[tuple[str, bytes]]:
    """The score of a rollout that is given up."""
    score = Score(failure=f"{reason}: every scorer that took it was lost", failure_kind="crash")
    _count(delivery.message, score)
    return [(output, scored_entry(delivery.payload, score))]


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
        log.warning("score_failed", rollout=rollout_key(rollout.group, rollout.number), reason=score.failure)
