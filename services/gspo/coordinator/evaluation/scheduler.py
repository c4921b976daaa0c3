"""When the policy is measured: before training, every so many steps, and at the end; one held-out file at a time.

How is evaluation.py's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from redis.asyncio import Redis

from gspo.common.config.schema import Config
from gspo.common.streams.instances import wait_for_instance
from gspo.common.streams.keys import GENERATION, Keys, evaluation_label
from gspo.coordinator.evaluation.evaluator import EvaluationRecord, Evaluator
from gspo_proto.rollout_pb2 import EvaluationDone, Event


@dataclass(frozen=True)
class _EvaluationRequest:
    """One file to measure a version on; its first `limit` prompts, or all."""

    version: int
    file: str
    limit: int | None


class EvaluationScheduler:
    """The schedule of evaluations.

    Args:
        evaluator: None where the run has no held-out prompts; then nothing is ever measured.
    """

    def __init__(self, redis: Redis, keys: Keys, config: Config, evaluator: Evaluator | None) -> None:
        self._redis, self._keys, self._config, self._evaluator = redis, keys, config, evaluator
        self._task: asyncio.Task[EvaluationRecord] | None = None
        self._requests: deque[_EvaluationRequest] = deque()
        self._due: int | None = None
        self._requested_versions: set[int] = set()
        self._requested_in_full: set[str] = set()
        self.before_training = False
        self.records: list[EvaluationRecord] = []

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way or about to be."""
        return self._task is not None or bool(self._requests)

    def start(self, version: int, live_version: int, recorded: Collection[str]) -> None:
        """Take over what was measured in an earlier life; version 0 is measured before any group is issued."""
        # One between two steps may have seen only a part of the prompts, and its label does not tell.
        first = {evaluation_label(0, file) for file in self._files}
        self._requested_in_full = {*recorded} if self._config.evaluation.limit_between is None else first & {*recorded}
        if version == 0:
            self.before_training = self.measure(0)
        self.catch_up(version, live_version, recorded)

    def catch_up(self, version: int, live_version: int, recorded: Collection[str]) -> None:
        """What came due while nobody said so is due now: the learner may wait for its figures."""
        for made in (version, live_version):
            labels = {evaluation_label(made, file) for file in self._files}
            if made not in self._requested_versions and self._is_due(made) and labels - {*recorded}:
                self._due = made

    def on_step(self, step: int, version: int) -> None:
        """A step is done; its version is due where `evaluation.every` says so. The end measures the last one."""
        if version not in self._requested_versions and self._is_due(step):
            self._due = version

    def tick(self, live_version: int, *, over: bool) -> Event | None:
        """Start what is due and can start; returns the event of an evaluation that has ended.

        Raises:
            Exception: Whatever ended the evaluation under way.
        """
        event = None
        if self._task is not None and self._task.done():
            measured, self._task = self._task.result(), None
            self.records.append(measured)
            event = _event(measured)
        if self._due is not None and self._due <= live_version and not over and not self.busy:
            self._requested_versions.add(self._due)
            self._due = None
            self.measure(live_version, limit=self._config.evaluation.limit_between)
        if self._task is None and self._requests and self._evaluator is not None:
            self._task = asyncio.create_task(
                self._measure(self._evaluator, self._requests.popleft()), name="evaluation"
            )
        self.before_training &= self.busy
        return event

    def measure(self, version: int, limit: int | None = None) -> bool:
        """Measure a version on every file; False where all were asked in full already, or there is none."""
        files = [file for file in self._files if evaluation_label(version, file) not in self._requested_in_full]
        self._requests.extend(_EvaluationRequest(version, file, limit) for file in files)
        if limit is None:
            self._requested_in_full |= {evaluation_label(version, file) for file in self._files}
        return bool(files)

    async def cancel(self) -> None:
        """Drop the evaluation under way, and those to come."""
        self._requests.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task, self._due, self.before_training = None, None, False

    async def resend_tasks(self) -> None:
        """Redis was wiped: send the tasks under way again."""
        if self._evaluator is not None and self._task is not None:
            await self._evaluator.resend_tasks()

    def describe(self) -> str:
        """How far the evaluation under way is; empty where there is none."""
        if not self.busy or self._evaluator is None:
            return ""
        return self._evaluator.describe() or "a generator to join"

    def unrecorded(self, recorded: Collection[str]) -> list[Event]:
        """The events of what was measured in this life and is not among the labels that the learner has recorded."""
        return [_event(measured) for measured in self.records if measured.label not in recorded]

    @property
    def _files(self) -> list[str]:
        return list(self._evaluator.files) if self._evaluator is not None else []

    def _is_due(self, step: int) -> bool:
        return bool(self._files) and self._config.is_measured(step)

    async def _measure(self, evaluator: Evaluator, wish: _EvaluationRequest) -> EvaluationRecord:
        await wait_for_instance(self._redis, self._keys, GENERATION, self._config.run.start_timeout_s)
        return await evaluator.measure(wish.version, wish.file, wish.limit)


def _event(measured: EvaluationRecord) -> Event:
    # Step s makes version s, so the two are the same number.
    done = EvaluationDone(
        evaluation=measured.label,
        version=measured.version,
        step=measured.version,
        figures=measured.figures,
        file=measured.file,
        score=measured.score,
    )
    return Event(evaluation_done=done)
