"""When the policy is measured: before training, every so many steps, and at the end; never two at a time.

How is evaluation.py's. Neighbour: loop.py asks at every turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from redis.asyncio import Redis

from gspo_proto.rollout_pb2 import EvaluationDone, Event
from services.common.config import Config
from services.common.keys import GENERATION, Keys
from services.common.members import wait_for_member
from services.coordinator.evaluation import Evaluator, Measured, label_of


class Measuring:
    """The schedule of evaluations.

    Args:
        evaluator: None where the run has no held-out prompts; then nothing is ever measured.
    """

    def __init__(self, redis: Redis, keys: Keys, config: Config, evaluator: Evaluator | None) -> None:
        self._redis, self._keys, self._config, self._evaluator = redis, keys, config, evaluator
        self._task: asyncio.Task[Measured] | None = None
        self._due: int | None = None
        self._in_full: set[str] = set()
        self.before_training = False
        self.records: list[Measured] = []

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way."""
        return self._task is not None

    def start(self, version: int, recorded: list[str]) -> None:
        """Take over what was measured in an earlier life; version 0 is measured before any group is issued."""
        # One between two steps may have seen only a part of the prompts, and its label does not tell.
        self._in_full = set(recorded) if self._config.evaluation.limit_between is None else {label_of(0)} & {*recorded}
        if version == 0 and label_of(0) not in self._in_full:
            self.before_training = self.measure(0)

    def on_step(self, step: int, version: int) -> None:
        """A step is done; its version is due where `evaluation.every` says so. The end measures the last one."""
        every = self._config.evaluation.every
        if every and step % every == 0 and step != self._config.run.total_steps:
            self._due = version

    def turn(self, live_version: int, *, over: bool) -> Event | None:
        """Start what is due and can start; returns the event of an evaluation that has ended.

        Raises:
            Exception: Whatever ended the evaluation under way.
        """
        if self._task is not None and self._task.done():
            measured, self._task = self._task.result(), None
            self.before_training = False
            return self._record(measured)
        if self._due is not None and self._due <= live_version and not over and not self.busy:
            self._due = None
            self.measure(live_version, limit=self._config.evaluation.limit_between)
        return None

    def measure(self, version: int, limit: int | None = None) -> bool:
        """Start measuring a version; False where it was measured in full already, or there is nothing to ask."""
        if self._evaluator is None or label_of(version) in self._in_full:
            return False
        self._task = asyncio.create_task(self._measure(self._evaluator, version, limit), name="evaluation")
        if limit is None:
            self._in_full.add(label_of(version))
        return True

    async def cancel(self) -> None:
        """Drop the evaluation under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task, self._due, self.before_training = None, None, False

    async def send_again(self) -> None:
        """Redis was wiped: send the tasks under way again."""
        if self._evaluator is not None and self.busy:
            await self._evaluator.send_again()

    def describe(self) -> str:
        """How far the evaluation under way is; empty where there is none."""
        if not self.busy or self._evaluator is None:
            return ""
        return self._evaluator.describe() or "a generator to join"

    async def _measure(self, evaluator: Evaluator, version: int, limit: int | None) -> Measured:
        await wait_for_member(self._redis, self._keys, GENERATION, self._config.run.start_timeout_s)
        return await evaluator.measure(version, limit)

    def unrecorded(self, recorded: Collection[str]) -> list[Event]:
        """The events of what was measured in this life and is not among the labels that the learner has recorded."""
        return [_event(measured) for measured in self.records if measured.label not in recorded]

    def _record(self, measured: Measured) -> Event:
        self.records.append(measured)
        return _event(measured)


def _event(measured: Measured) -> Event:
    # Step s makes version s, so the two are the same number.
    done = EvaluationDone(
        evaluation=measured.label, version=measured.version, step=measured.version, figures=measured.figures
    )
    return Event(evaluation_done=done)
