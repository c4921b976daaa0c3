"""The learner's loop: assemble, log, acknowledge, train, record, publish; a checkpoint now and then.

A step ends with a copy of its weights, which push/version_pipeline.py makes a version of; its table says which event is
awaited before which. A checkpoint is copied between two steps and written beside the next ones. On shared GPUs a shift
of the learner lasts from before the training to the whole checkpoint, and the push begins after it.

consumes: batches (intake.py) and the events StopRequested, PromptsExhausted, EvaluationDone, Finished.
produces: step files, log/policy.jsonl, pushes, VersionLive, StepDone, TrainingDone. Its parts produce settlements and
checkpoints.
waits for: complete groups, unblocked by reward. At the end for Finished, unblocked by the coordinator.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import structlog

from gspo.common.service.app import Service
from gspo.common.service.failure import in_step
from gspo.common.streams.entries import body_of
from gspo.common.streams.events import Events
from gspo.common.telemetry import metrics
from gspo.learner.assembly.assembler import Batch
from gspo.learner.assembly.rows import TokenRecord
from gspo.learner.checkpointing import CheckpointWriter
from gspo.learner.evaluation_gate import EvaluationGate
from gspo.learner.intake import Intake
from gspo.learner.push.copy_memory import CopiesBeside
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.publisher import Publisher
from gspo.learner.push.shifts import LearnerShifts, ShiftStoppedError
from gspo.learner.push.version_pipeline import VersionPipeline
from gspo.learner.recovery import RecoveredState, hyperparameters_of
from gspo.learner.run_end import RunEndCondition, RunFailedError
from gspo.learner.step_report import StepClock, StepPhase, StepReport
from gspo.learner.storage.durable_files import DiskSpace
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.token_account import TokenAccount
from gspo.learner.trainer_thread import TrainerThread
from gspo.learner.training.trainer_api import Hyperparameters, NotFiniteError, TrainResult
from gspo_proto.learner_pb2 import CheckpointReply, GroupRange, ProgressReply, ResultsReply
from gspo_proto.rollout_pb2 import (
    RUN_END_FAILED,
    EvaluationDone,
    Event,
    Finished,
    PromptsExhausted,
    Stalled,
    StopRequested,
    TrainingDone,
    VersionLive,
)

log = structlog.get_logger()
_EXPORT = "export"


class Learner:
    """The loop over its parts, each with one duty.

    Attributes:
        trainer: Trains a step and writes its state, in a thread.
        publisher: Pushes the newest policy version to the generators.
        tokens: Keeps the token ledger.
        versions: Makes and publishes the version of each step.
        intake: Takes scored rollouts in and gives out the next batch.
        checkpoints: Writes a checkpoint when one is due or requested.

    Args:
        recovered: Trainer and assembler, in the state after the last logged step.
        executor: The one thread in which the trainer was started.
        disk: Waits for free disk space for checkpoints and exported models.
        shifts: The learner's on shared GPUs, in the first of which the trainer was started.
        beside: Whether a version is made, and a checkpoint is written, while the next step trains.
    """

    def __init__(
        self,
        service: Service,
        run_dir: RunDir,
        recovered: RecoveredState,
        executor: ThreadPoolExecutor,
        disk: DiskSpace,
        shifts: LearnerShifts,
        beside: CopiesBeside,
    ) -> None:
        self._service, self._run_dir, self._notices = service, run_dir, recovered.notices
        self._events = Events(service.redis, service.keys, service.options.name, epoch=run_dir.epoch)
        self._clock = StepClock(service.traces)
        self._end = RunEndCondition(service.config.run)
        self._gate = EvaluationGate(service.config, run_dir, service.activity)
        self._trained_s = run_dir.trained_s
        # Without a lag no step begins before the version is served.
        self._overlaps = beside.version and service.config.staleness.max_lag > 0
        self._shifts, self._disk = shifts, disk
        shifts.is_stopped = lambda: self._end.is_stopped
        self.trainer = TrainerThread(
            recovered.trainer, shifts, executor, disk, run_dir.path, keeps_copies=beside.version
        )
        self.publisher = Publisher(service, run_dir.epoch, self._announce_live, shifts, run_dir.append_pushes)
        self._report = StepReport(
            service.config, run_dir, self._events, self.trainer.gpus, lambda: self.publisher.generator_gpus
        )
        self.intake = Intake(service, run_dir, recovered.assembler, self.publisher, self._end, self._events)
        self.checkpoints = CheckpointWriter(
            service,
            run_dir,
            self.trainer,
            recovered.assembler.moments,
            self._events,
            self._clock,
            is_overlapped=beside.checkpoint,
            on_end=self.intake.wake,
        )
        self.tokens = TokenAccount(service, run_dir)
        self.versions = VersionPipeline(
            run_dir, self.trainer, self.publisher, self._clock, recovered.weights, self.intake.wake
        )
        self._trained_version = recovered.weights.version
        # Whether something waits for the version of the last step.
        self._is_awaited = False

    async def run(self) -> None:
        """Train until the run ends, and stay until the coordinator says that it is finished."""
        try:
            await self._start()
            while not (reason := self._reason_to_end()) or self.versions.is_busy or self.versions.has_failed:
                await self._train_next()
            await self._finish(reason)
        except ShiftStoppedError as stopped:
            # A resume trains the step that is logged, from the newest checkpoint on.
            log.warning("stopped_without_gpus", reason=str(stopped))
            self._end.finish_training(self._reason_to_end())
            await self._announce_end()
        except (RunFailedError, NotFiniteError) as error:
            log.error("run_failed", reason=str(error))
            await self._events.send(Event(finished=Finished(reason=str(error), end=RUN_END_FAILED)))
        finally:
            self.versions.close()

    async def _train_next(self) -> None:
        """A step with the next batch, beside the version before it; without a batch what waits for that version.

        Raises:
            NotFiniteError: A version or a gradient is not finite. Of both errors it is the earlier one's.
        """
        needs_version = self._is_awaited or self.checkpoints.is_requested
        batch = None if needs_version or self._reason_to_end() else await self._next_batch()
        with in_step(batch.step) if batch else nullcontext():
            try:
                trained = await self._train(batch) if batch else None
            finally:
                # A version that takes longer than this step's training is waited for in the next phase.
                with self._service.activity.doing("making version", str(self._trained_version)):
                    await self.versions.finish()
            if batch and trained:
                await self._end_step(batch, trained)
                return
        if self._is_awaited:
            await self._save_candidate()
            self._is_awaited = False
        if self.checkpoints.is_due(self._trained_version):
            await self.checkpoints.write(self._trained_version)

    async def _next_batch(self) -> Batch | None:
        """The next batch, if nothing interrupts the wait for it."""
        await self._end_shift()
        self.checkpoints.raise_error()
        batch = await self.intake.next_batch(self._trained_version, self._is_interrupted)
        self._raise_refusal()
        return batch

    async def _start(self) -> None:
        newest = self.versions.newest
        unmeasured = await asyncio.to_thread(self._gate.begin, newest)
        await self._save_candidate()
        self.versions.publish(unmeasured or newest)
        self._service.problems.clear()
        metrics.STEP_TIMESTAMP.set_to_current_time()
        log.info("learner_ready", version=newest.version, digest=newest.digest[:12], epoch=self._run_dir.epoch)
        if unmeasured is not None:
            log.info("measures_earlier_version", version=unmeasured.version)
            await self._wait_for_evaluations(unmeasured.version)
            self.versions.publish(newest)

    def _reason_to_end(self) -> str:
        return self._end.reason(self._trained_version, self._trained_s)

    def _is_interrupted(self) -> bool:
        """Whether the run's end, a request for a checkpoint, or something that failed comes before the next batch."""
        has_failed = self.versions.has_failed or self.checkpoints.has_failed or bool(self.publisher.refusal)
        return has_failed or bool(self._reason_to_end()) or self.checkpoints.is_requested

    def _raise_refusal(self) -> None:
        """End the run where no generator will ever take its weights: steps would train on rollouts of old ones.

        Raises:
            RunFailedError: Has the reasons of the generators.
        """
        if refusal := self.publisher.refusal:
            raise RunFailedError(f"no generator takes the policy ({refusal}). Correct the cause and resume the run")

    async def _train(self, batch: Batch) -> TrainResult:
        """Log, acknowledge, train: in this order, as record and publish after it, so that a kill loses nothing."""
        step, activity = batch.step, self._service.activity
        self._clock.begin(
            self.intake.take_timelines(batch.groups),
            waited_since_s=self.intake.waited_since_s,
            live_unix_s=self.publisher.live_unix_s,
            evaluated_unix_s=self._gate.recorded_unix_s,
        )
        self.versions.begin(batch)
        with activity.doing("logging", f"step {step}"):
            await asyncio.to_thread(self._run_dir.write_step, step, batch.rows)
            await self.intake.acknowledge_trained(batch.rows)
        if step == 1:
            await self.intake.report_first_answers(batch.rows)
        self._clock.end_phase(StepPhase.LOG)
        if self._shifts.are_needed:
            # The evaluation of the served version needs the engines.
            await self._hold(step)
            await self._shifts.begin(f"step {step}")
            self._clock.end_phase(StepPhase.SHIFT)
        with activity.doing("training", f"step {step}, {len(batch.rows)} rollouts"):
            trained = await self.trainer.train(step, batch.rows, self._hyperparameters(step))
        self._clock.end_training(trained.probe_s, trained.clip_split_s)
        return trained

    def _hyperparameters(self, step: int) -> Hyperparameters:
        return hyperparameters_of(self._service.config, step, None, self._run_dir.shortages)

    async def _end_step(self, batch: Batch, trained: TrainResult) -> None:
        """Record what a step left out, copy its weights for their version, and begin to publish and report it."""
        step = batch.step
        await self._report.report_not_applied(step, trained.not_applied)
        self._is_awaited = self._is_version_awaited(step)
        with self._service.activity.doing("making version", str(step)):
            await self.versions.make(step, self._hyperparameters(step), is_awaited=self._is_awaited)
        self._clock.end_phase(StepPhase.MAKE_VERSION)
        await self._hold(step)
        figures = trained.metrics | self._clock.end_step(step) | self.intake.untrained.take_metrics()
        self._trained_version, self._trained_s = step, self._trained_s + figures["step_s"]
        self.versions.finish_with(step, partial(self._report_step, batch, trained.tokens, figures))

    async def _report_step(
        self,
        batch: Batch,
        tokens: Sequence[TokenRecord],
        figures: dict[str, float],
        weights: PolicyWeights,
        overlapped_s: float,
    ) -> None:
        await asyncio.to_thread(self._run_dir.steplog.write_tokens, batch.step, tokens)
        await self._report.report(batch, weights.digest, {**figures, "version_beside_s": overlapped_s})
        await self.tokens.record(batch.step)

    def _is_version_awaited(self, step: int) -> bool:
        """Whether the version of a step is on record before the next step begins: also where something needs it."""
        return (
            not self._overlaps
            or self._gate.holds(step - 1)
            or self._gate.keeper_of(step) is not None
            or self.checkpoints.is_due(step)
        )

    async def _hold(self, step: int) -> None:
        """Wait for the evaluations of the version before a step's."""
        await self._wait_for_evaluations(step - 1)
        self._clock.end_phase(StepPhase.HOLD)
        if self._end.is_stopped and (served := self.publisher.newest) is not None:
            await self.trainer.write_copies(
                "a version that is not measured yet",
                lambda trainer: self._gate.keep_unmeasured(served, trainer.write_share),
            )

    async def _wait_for_evaluations(self, version: int) -> None:
        await self._gate.wait(version, lambda: self._end.is_stopped or bool(self.publisher.refusal))

    async def _end_shift(self) -> None:
        """Hand shared GPUs back, and wake the generators with the newest version."""
        if self._shifts.are_needed:
            self._clock.add_between(StepPhase.SHIFT, await self._shifts.end())
            self.publisher.wake()

    async def _announce_live(self, live: VersionLive) -> None:
        self._clock.live(live.version)
        await self._events.send(Event(version_live=live))

    async def _finish(self, reason: str) -> None:
        """Settle open groups (not after a stop: a resume trains them), save, and wait for the coordinator."""
        version = self.versions.newest.version
        self._end.finish_training(reason)
        await self._settle_unused()
        await self.checkpoints.write(version, is_last=True)
        with self._service.activity.doing("exporting", f"version {version}"):
            export = self._run_dir.path / _EXPORT
            await self.trainer.write("the exported model", lambda trainer: trainer.export(export))
            if not self._end.is_stopped:
                await self._save_candidate(last=True)
        await self._end_shift()
        await self._announce_end()

    async def _announce_end(self) -> None:
        """Say how training has ended, and wait for the coordinator."""
        newest, reason = self.versions.newest, self._end.done_reason
        version, digest = newest.version, newest.digest
        done = TrainingDone(step=version, version=version, digest=digest, reason=reason, end=self._end.kind)
        await self._events.send(Event(training_done=done))
        log.info("training_done", step=version, reason=reason)
        self._service.activity.set("waiting", "coordinator", "the last evaluation")
        max_wait_s = self._gate.max_wait_s + self.publisher.push_limit_s
        # The coordinator may have issued groups before it heard that this is the end.
        await self._end.wait_for_finished(max_wait_s, on_poll=self._settle_or_raise)
        # After a stop, a resume trains the rollouts in flight.
        await (self.tokens.record(version) if self._end.is_stopped else self.tokens.close(version))

    async def _settle_or_raise(self) -> None:
        await self._settle_unused()
        if not self._end.is_stopped:  # a stop needs no live version
            self._raise_refusal()

    async def _settle_unused(self) -> None:
        if not self._end.is_stopped:
            await self.intake.settle_unused(self._end.done_reason)

    async def _save_candidate(self, *, last: bool = False) -> None:
        """Save the newest version as a model folder if it will be measured, and the best version is kept."""
        version = self.versions.newest.version
        if (keeper := self._gate.keeper_of(version, last=last)) is not None:
            await self.trainer.write(
                "a version that may be the best", lambda trainer: keeper.save_candidate(version, trainer.export)
            )

    async def watch_events(self, position: bytes) -> None:
        """Follow the run's events from `position` until cancelled."""
        async for event in self._events.follow(position):
            match body_of(event):
                case EvaluationDone() as evaluation:
                    await self._gate.record(evaluation)
                case StopRequested(reason=reason):
                    self._end.stop(reason)
                case PromptsExhausted(num_groups=num_groups):
                    self.intake.expect_no_more_than(num_groups)
                case Stalled():
                    self.publisher.give_up_pushes()
                case Finished(reason=reason):
                    if not (self._end.done_reason or self._end.is_stopped):  # another service has ended the run
                        self._end.stop(reason)
                    self._end.finished.set()
            self.intake.wake()

    async def checkpoint_now(self) -> CheckpointReply:
        """A checkpoint as soon as the current step is done."""
        reply = self.checkpoints.request()
        self.intake.wake()
        return await reply

    def stop(self, reason: str) -> None:
        """End after the current step with a checkpoint, and do not wait for the coordinator."""
        self._end.stop(reason)
        self._end.finished.set()
        self.intake.wake()

    def progress(self) -> ProgressReply:
        """The learner's account of the run, for the coordinator."""
        settlements, newest = self._run_dir.settlements.without(self.versions.groups_in_training), self.versions.newest
        return ProgressReply(
            run=self._service.config.name,
            epoch=self._run_dir.epoch,
            step=newest.version,
            version=newest.version,
            digest=newest.digest,
            settled=[GroupRange(first=first, last=last) for first, last in settlements.ranges()],
            counts=settlements.counts(),
            live_version=self.publisher.live_version,
            end=self._end.kind,
            end_reason=self._end.done_reason,
            evaluations=list(self._run_dir.evaluations),
        )

    def results(self, first: int) -> ResultsReply:
        """The results of settled groups from place `first` of the log on."""
        return self._run_dir.results.page(self._service.config.name, first)

    def facts(self) -> dict[str, Any]:
        """Fields that the learner adds to its heartbeat."""
        return {
            "step": self.versions.newest.version,
            "version": self.versions.newest.version,
            "epoch": self._run_dir.epoch,
            "generators": self.publisher.describe(),
            "notices": self._notices,
            "works_beside": self._disk.is_writing or self.versions.is_busy,
            "shift": self._shifts.describe(),
        }
