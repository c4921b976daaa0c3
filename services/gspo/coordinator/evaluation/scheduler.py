"""When the policy is evaluated: before training, every evaluation.every steps, and at the end; one file at a time.

evaluator.py runs an evaluation.
"""

import asyncio
from collections import deque
from collections.abc import Collection

from gspo.common.evaluation_schedule import overdue
from gspo.common.service.app import Service
from gspo.common.streams.instances import wait_for_instance
from gspo.common.streams.keys import GENERATION, evaluation_label
from gspo.coordinator.data.prompts import PromptSet
from gspo.coordinator.evaluation.evaluator import Evaluator, FinishedEvaluation
from gspo.coordinator.feed import EventFeed
from gspo.coordinator.redis_state import RedisEpoch
from gspo_proto.rollout_pb2 import (
    RUN_END_COMPLETED,
    RUN_END_STOPPED,
    EvaluationDone,
    Event,
    Finished,
    StopRequested,
)

_BLOCK_S = 0.2


class EvaluationScheduler:
    """The schedule of evaluations; without held-out files nothing is ever due.

    Args:
        files: The held-out prompts of each file, by its name.

    Attributes:
        before_training: Whether version 0 is being measured, so that no group may be issued yet.
        records: The evaluations of this process, oldest first.
    """

    def __init__(self, service: Service, files: dict[str, PromptSet]) -> None:
        self._service, self._config, self._files = service, service.config, files
        self._evaluator = Evaluator(service.redis, service.keys, service.config)
        self._task: asyncio.Task[FinishedEvaluation] | None = None
        # Version, file, and how many of its first prompts to measure on, all for None.
        self._requests: deque[tuple[int, str, int | None]] = deque()
        self._due: int | None = None
        self._requested_versions: set[int] = set()
        self._requested_in_full: set[str] = set()
        self.before_training = False
        self.records: list[FinishedEvaluation] = []

    @property
    def busy(self) -> bool:
        """Whether an evaluation is in flight or requested."""
        return self._task is not None or bool(self._requests)

    def start(self, version: int, recorded: Collection[str]) -> None:
        """Take over the evaluations of an earlier process; version 0 is measured before any group is issued."""
        # An evaluation between two steps may have asked only a part of the prompts, and its label is the same.
        first = {evaluation_label(0, file) for file in self._files}
        self._requested_in_full = {*recorded} if self._config.evaluation.limit_between is None else first & {*recorded}
        if version == 0:
            self.before_training = self.request(0)

    def catch_up(self, version: int, live_version: int, recorded: Collection[str]) -> None:
        """Make a version due whose step had no event, or whose evaluation an earlier process did not end.

        The learner may wait for its figures. If it has the weights no more, the version that is live is measured.
        """
        for candidate in (version, live_version):
            due = overdue(self._config, max(0, candidate), recorded)
            if due and due not in self._requested_versions:
                self._due = due

    def on_step(self, step: int, version: int) -> None:
        """A step is done; its version is due by evaluation.every. The last version is measured at the end."""
        if version not in self._requested_versions and self._config.is_measured(step):
            self._due = version

    def tick(self, live_version: int, *, over: bool) -> Event | None:
        """Start a due evaluation whose version is live; returns the event of an evaluation that has ended.

        Raises:
            Exception: An error ended the evaluation in flight.
        """
        event = None
        if self._task is not None and self._task.done():
            measured, self._task = self._task.result(), None
            self.records.append(measured)
            event = _event(measured)
        if self._due is not None and self._due <= live_version and not over and not self.busy:
            self._requested_versions.add(self._due)
            self._due = None
            self.request(live_version, limit=self._config.evaluation.limit_between)
        if self._task is None and self._requests:
            self._task = asyncio.create_task(self._measure(*self._requests.popleft()), name="evaluation")
        self.before_training &= self.busy
        return event

    def request(self, version: int, limit: int | None = None) -> bool:
        """Have a version measured on every file; False where all of them were requested in full before."""
        labels = {file: evaluation_label(version, file) for file in self._files}
        files = [file for file, label in labels.items() if label not in self._requested_in_full]
        self._requests.extend((version, file, limit) for file in files)
        if limit is None:
            self._requested_in_full |= {*labels.values()}
        return bool(files)

    async def cancel(self) -> None:
        """Drop the evaluation in flight and the requested ones."""
        self._requests.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task, self._due, self.before_training = None, None, False

    async def resend_tasks(self) -> None:
        """Redis was wiped: send the tasks in flight again."""
        await self._evaluator.resend_tasks()

    def describe(self) -> str:
        """The progress of the evaluation in flight; empty where there is none."""
        return (self._evaluator.describe() or "a generator to join") if self.busy else ""

    def unrecorded(self, recorded: Collection[str]) -> list[Event]:
        """The events of this process's evaluations whose labels the learner has not recorded."""
        return [_event(measured) for measured in self.records if measured.label not in recorded]

    async def _measure(self, version: int, file: str, limit: int | None) -> FinishedEvaluation:
        redis, keys = self._service.redis, self._service.keys
        await wait_for_instance(redis, keys, GENERATION, self._config.run.start_timeout_s)
        return await self._evaluator.measure(version, file, self._files[file], limit)


async def run_standalone_evaluation(service: Service, scheduler: EvaluationScheduler) -> None:
    """Measure version 0 on every file without a learner, send the figures, and end the run.

    A stop, the run's end or SIGTERM ends the evaluation early.
    """
    redis_epoch, feed = RedisEpoch(service.redis, service.keys), EventFeed(service)
    await redis_epoch.open()
    await feed.start()
    service.problems.pop("starting", None)
    scheduler.request(0)
    while scheduler.busy and not service.stopping.is_set():
        for body in await feed.read(_BLOCK_S):
            match body:
                case StopRequested() | Finished():
                    service.stopping.set()
        if await redis_epoch.was_wiped():
            feed.rewind()
            await scheduler.resend_tasks()
        if ended := scheduler.tick(0, over=False):
            await feed.send(ended)
        service.activity.set("waiting", "evaluation", scheduler.describe())
    finished = Finished(reason="the evaluation is done", end=RUN_END_COMPLETED)
    if scheduler.busy:
        finished = Finished(reason="stopped before the evaluation was done", end=RUN_END_STOPPED)
    await scheduler.cancel()
    await feed.send(Event(finished=finished))


def _event(measured: FinishedEvaluation) -> Event:
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
