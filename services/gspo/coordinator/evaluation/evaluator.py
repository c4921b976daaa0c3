"""One evaluation of the policy on held-out prompts: it sends the tasks, collects the scored answers, returns figures.

consumes: eval_scored. produces: eval_prompts. waits for: answers, evaluation.timeout_s at most. unblocked by:
generation and reward. `scheduler.py` decides when to evaluate, `results.py` has the figures.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import structlog
from redis.asyncio import Redis

from gspo.common.config.schema import Config
from gspo.common.config.sources import Source
from gspo.common.streams.consumer import Consumer, Deliveries, Subscription
from gspo.common.streams.inbox import Inbox, append, new_consumer_name
from gspo.common.streams.keys import COORDINATOR, GENERATION, Keys, evaluation_label, rollout_key
from gspo.common.streams.saved_states import remove_states
from gspo.common.streams.token_counts import NO_TOKENS
from gspo.common.telemetry import metrics
from gspo.coordinator.data.prompts import PromptSet
from gspo.coordinator.evaluation.results import NEWEST_VERSION, EvaluationResults
from gspo.coordinator.groups.tasks import evaluation_tasks
from gspo.coordinator.redis_state import all_entries
from gspo_proto.rollout_pb2 import GroupTask

_TAKE = 256
_PROMPTS_AT_ONCE = 32
_KEYS_AT_ONCE = 1000
log = structlog.get_logger()


@dataclass(frozen=True)
class FinishedEvaluation:
    """An evaluation that has ended.

    Attributes:
        file: Name of the held-out file; empty where there is one without.
        problem: Why answers are missing or failed; empty where none is.
        score: What evaluation.keep_best compares; None where it does not compare this file, or nothing is scored.
    """

    label: str
    version: int
    file: str
    figures: dict[str, float]
    problem: str
    score: float | None


class Evaluator:
    """Runs one evaluation at a time.

    Args:
        redis: Client with binary replies.
    """

    def __init__(self, redis: Redis, keys: Keys, config: Config) -> None:
        self._redis, self._keys, self._config = redis, keys, config
        self._inbox = Inbox(
            redis, keys, keys.eval_scored, consumer=new_consumer_name(COORDINATOR), lease_s=config.services.lease_s
        )
        # Twice what the engines run at a time: they never wait for tasks, and the stream stays short.
        self._window = 2 * config.generation.max_rollouts * config.generation.replicas
        self._in_flight: dict[int, GroupTask] = {}
        self._tally: EvaluationResults | None = None

    def describe(self) -> str:
        """How far the running evaluation is; empty where there is none."""
        tally = self._tally
        return f"{tally.label}: {len(tally)} of {tally.num_expected} answers scored" if tally else ""

    async def measure(self, version: int, file: str, prompts: PromptSet, limit: int | None) -> FinishedEvaluation:
        """Measure `version` on the first `limit` prompts of a file (all for None) and return the figures."""
        num_prompts = min(limit or len(prompts), len(prompts))
        tally = EvaluationResults(evaluation_label(version, file), version, num_prompts, self._config.evaluation)
        self._tally = tally
        await self._remove_leftovers(tally)
        try:
            problem = await self._collect(tally, prompts, self._config.source_of(file))
        finally:
            self._tally, self._in_flight = None, {}
            await self._remove_leftovers(tally)
        figures = tally.figures()
        metrics.EVALUATION_VERSION.labels(file).set(version)
        for name, value in figures.items():
            metrics.EVALUATION_FIGURE.labels(file, name).set(value)
        write = log.warning if problem else log.info
        write("evaluated", evaluation=tally.label, problem=problem, **figures)
        return FinishedEvaluation(tally.label, version, file, figures, problem, self._score(tally, file))

    def _score(self, tally: EvaluationResults, file: str) -> float | None:
        """The figure of evaluation.keep_best, of the prompts that an evaluation between two steps asks too.

        None where newer weights took part: a learner that was started again did not hold them back.
        """
        best = self._config.best_figure
        if best is None or file not in best.weights:
            return None
        figures = tally.figures(first=self._config.evaluation.limit_between)
        return None if NEWEST_VERSION in figures else figures.get(best.figure)

    async def resend_tasks(self) -> None:
        """Send every task in flight again: Redis lost them."""
        await append(self._redis, self._keys.eval_prompts, [t.SerializeToString() for t in self._in_flight.values()])

    async def _collect(self, tally: EvaluationResults, prompts: PromptSet, source: Source) -> str:
        """Send tasks and take answers until all are in or time is up; returns the problem, if there is one."""
        complete, limit_s = asyncio.Event(), self._config.evaluation.timeout_s
        rows = iter(range(0, tally.num_prompts, _PROMPTS_AT_ONCE))

        async def absorb(answers: Deliveries) -> None:
            for delivery in answers:
                tally.add(delivery.message)
            missing = set(tally.incomplete_groups(self._in_flight))
            self._in_flight = {group: task for group, task in self._in_flight.items() if group in missing}
            await self._send_tasks(tally, prompts, source, rows)
            # Last: a handler whose entries are gone is taken for one that has lost its lease, and ended.
            await self._inbox.acknowledge((answer, NO_TOKENS) for answer in answers)
            if tally.complete:
                complete.set()

        subscription = Subscription(self._inbox, absorb, capacity=lambda: _TAKE)
        consumer = Consumer([subscription], stopping=complete, drain_s=self._inbox.lease_s, max_batches=1)
        try:
            async with asyncio.timeout(limit_s):
                await absorb([])
                await consumer.run()
        except TimeoutError:
            return f"given up after {limit_s:g} s (evaluation.timeout_s) with answers missing"
        return tally.failure

    async def _send_tasks(
        self, tally: EvaluationResults, prompts: PromptSet, source: Source, first_rows: Iterator[int]
    ) -> None:
        """Send tasks until the window is full or none is left; `first_rows` are those of the parts not sent."""

        def num_in_flight() -> int:
            return sum(task.num_rollouts for task in self._in_flight.values())

        while num_in_flight() < self._window and (first := next(first_rows, None)) is not None:
            rows = range(first, min(first + _PROMPTS_AT_ONCE, tally.num_prompts))
            tasks = [
                task
                for row, prompt in zip(rows, await asyncio.to_thread(prompts.prompts, rows), strict=True)
                for task in evaluation_tasks(
                    self._config, source, row, prompt, label=tally.label, version=tally.version
                )
            ]
            now = time.time()
            for task in tasks:
                task.issued_unix_s, task.deadline_unix_s = now, now + self._config.evaluation.timeout_s
                self._in_flight[task.group] = task
            await append(self._redis, self._keys.eval_prompts, [task.SerializeToString() for task in tasks])

    async def _remove_leftovers(self, tally: EvaluationResults) -> None:
        """Remove the tasks and rollout keys of this label: a key without its answer would prevent that answer."""
        entries = await all_entries(self._redis, self._keys.eval_prompts)
        rollout_keys = [rollout_key(group, number, tally.label) for group, number in tally.expected()]
        async with self._redis.pipeline(transaction=True) as pipe:
            for entry, _ in entries:
                pipe.xack(self._keys.eval_prompts, GENERATION, entry)
                pipe.xdel(self._keys.eval_prompts, entry)
            await pipe.execute()
        for start in range(0, len(rollout_keys), _KEYS_AT_ONCE):
            await remove_states(self._redis, self._keys, rollout_keys[start : start + _KEYS_AT_ONCE])
