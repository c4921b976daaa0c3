"""Makes the version of each step from a copy of its weights: digest, record, push, report.

If the memory allows, that of step s is made while step s + 1 trains.
These events are awaited before others:

    The weights of step s are copied (`make`)     before anything of step s + 1.
    Version s is on record                        before its push, its report, and the slots of its groups.
    Version s is pushed and reported (`finish`)   before records of the training of s + 1, and its copy.
    It is so too                                  before a checkpoint, a saved model, the end of training.
    And where something needs the version         before anything of step s + 1.
    Version s is packed for the generators        before the copy of s + 1: only the newest stays whole.

produces: log/policy.jsonl, pushes. loop.py calls it, and reports each step.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeAlias

from gspo.common.service.failure import in_step
from gspo.common.telemetry import metrics
from gspo.learner.assembly.assembler import Batch
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.publisher import Publisher
from gspo.learner.step_report import StepClock
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.trainer_thread import TrainerThread
from gspo.learner.training.trainer_api import Hyperparameters, MakeVersion

# A version on record, and the seconds in which it was made beside training.
Made: TypeAlias = tuple[PolicyWeights, float]


class VersionPipeline:
    """The versions of one learner.

    Attributes:
        newest: The newest version on record.

    Args:
        clock: Notes when a version is handed to the publisher.
        recovered: The version that the run continues from.
        on_end: Called when a version is reported or has failed.
    """

    def __init__(
        self,
        run_dir: RunDir,
        trainer: TrainerThread,
        publisher: Publisher,
        clock: StepClock,
        recovered: PolicyWeights,
        on_end: Callable[[], None],
    ) -> None:
        self._run_dir, self._trainer, self._publisher, self._clock = run_dir, trainer, publisher, clock
        self._on_end = on_end
        # Step -> its groups, until its version is on record.
        self._groups: dict[int, tuple[int, ...]] = {}
        self._making: asyncio.Task[Made]
        self._finishing: asyncio.Task[None] | None = None
        self._make_newest(recovered)

    @property
    def groups_in_training(self) -> list[int]:
        """Groups that are settled on disk, but free their slots only when their version is the newest."""
        return [group for groups in self._groups.values() for group in groups]

    @property
    def is_busy(self) -> bool:
        """Whether a version is made, or reported."""
        return self._finishing is not None and not self._finishing.done()

    @property
    def has_failed(self) -> bool:
        """Whether `finish` would raise."""
        return self._finishing is not None and self._finishing.done() and bool(self._finishing.exception())

    def begin(self, batch: Batch) -> None:
        """The step of a batch begins."""
        self._groups[batch.step] = batch.groups

    async def make(self, step: int, hyperparameters: Hyperparameters, *, is_awaited: bool) -> None:
        """Copy the weights after a step, and begin to make their version.

        Args:
            is_awaited: Whether to wait for its record.
        """
        make = await self._trainer.begin_version(step)
        making = self._make(step, make, hyperparameters, is_awaited=is_awaited)
        self._making = asyncio.create_task(making)
        if is_awaited:
            await self._making

    def finish_with(self, step: int, report: Callable[[PolicyWeights, float], Awaitable[None]]) -> None:
        """Begin to wait for the version of `make`, and to publish and report it.

        Args:
            report: Gets the version, and the seconds in which it was made beside training.
        """
        self._finishing = asyncio.create_task(self._finish(step, self._making, report))
        self._finishing.add_done_callback(lambda _: self._on_end())

    async def finish(self) -> None:
        """Wait until the version of the last step is on record, published, reported and packed.

        Raises:
            NotFiniteError: It has weights that are not finite.
        """
        if self._finishing is not None:
            await self._finishing
            self._finishing = None
        # Then there is memory for a copy: of the earlier versions only the newest is still whole.
        await self._publisher.wait_until_packed()

    def close(self) -> None:
        """Give up the version in the making."""
        if self._finishing is not None:
            self._finishing.cancel()

    async def _make(self, step: int, make: MakeVersion, hyperparameters: Hyperparameters, *, is_awaited: bool) -> Made:
        """Record the version of a copy.

        Raises:
            NotFiniteError: It has weights that are not finite; there is no record of it.
        """
        began = time.monotonic()
        weights = await asyncio.to_thread(make)
        await asyncio.to_thread(
            self._run_dir.append_version, step, weights.digest, weights.dtype, asdict(hyperparameters)
        )
        self._make_newest(weights)
        return weights, 0.0 if is_awaited else time.monotonic() - began

    async def _finish(
        self, step: int, making: asyncio.Task[Made], report: Callable[[PolicyWeights, float], Awaitable[None]]
    ) -> None:
        with in_step(step):
            weights, overlapped_s = await making
            # Generators wait for the weights; nothing waits for the report.
            self.publish(weights)
            await report(weights, overlapped_s)

    def publish(self, weights: PolicyWeights) -> None:
        """Push a version to every generator, beside the next step."""
        self._clock.publish(weights.version)
        self._publisher.publish(weights)

    def _make_newest(self, weights: PolicyWeights) -> None:
        self.newest = weights
        self._groups.pop(weights.version, None)
        metrics.POLICY_VERSION.set(weights.version)
        metrics.STEP.set(weights.version)
