"""The learner's loop: assemble, log, acknowledge, train, record, publish; a checkpoint now and then.

consumes: batches (intake.py) and the events StopRequested, PromptsExhausted, EvaluationDone, Finished.
produces: step files, log/policy.jsonl, pushes, VersionLive, StepDone, TrainingDone. Its parts produce settlements and
checkpoints.
waits for: complete groups, unblocked by reward. At the end for Finished, unblocked by the coordinator.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import structlog

from gspo.common.service.app import Service
from gspo.common.streams.entries import body_of
from gspo.common.streams.events import Events
from gspo.common.telemetry import metrics
from gspo.learner.assembly.assembler import Batch
from gspo.learner.checkpointing import CheckpointWriter
from gspo.learner.evaluation_gate import EvaluationGate
from gspo.learner.intake import Intake
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.publisher import Publisher
from gspo.learner.recovery import RecoveredState
from gspo.learner.run_end import RunEndCondition, RunFailedError
from gspo.learner.step_report import StepClock, StepPhase, StepReport
from gspo.learner.storage.durable_files import DiskSpace
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.trainer_thread import TrainerThread
from gspo.learner.training.trainer_api import NotFiniteError, configured_hyperparameters
from gspo_proto.learner_pb2 import CheckpointReply, GroupRange, ProgressReply
from gspo_proto.rollout_pb2 import (
    RUN_END_FAILED,
    EvaluationDone,
    Event,
    Finished,
    PromptsExhausted,
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
        intake: Takes scored rollouts in and gives out the next batch.
        checkpoints: Writes a checkpoint when one is due or requested.

    Args:
        recovered: Trainer and assembler, in the state after the last logged step.
        executor: The one thread in which the trainer was started.
        disk: Waits for free disk space for checkpoints and exported models.
    """

    def __init__(
        self,
        service: Service,
        run_dir: RunDir,
        recovered: RecoveredState,
        executor: ThreadPoolExecutor,
        disk: DiskSpace,
    ) -> None:
        self._service, self._run_dir, self._notices = service, run_dir, recovered.notices
        self._events = Events(service.redis, service.keys, service.options.name, epoch=run_dir.epoch)
        self._clock = StepClock(service.traces)
        self._end = RunEndCondition(service.config.run)
        self._gate = EvaluationGate(service.config, run_dir, service.activity)
        self._report = StepReport(service.config, run_dir, self._events)
        self._groups_in_training: tuple[int, ...] = ()
        self.trainer = TrainerThread(recovered.trainer, executor, disk, run_dir.path)
        self.publisher = Publisher(service, run_dir.epoch, self._announce_live)
        self.intake = Intake(service, run_dir, recovered.assembler, self.publisher, self._end, self._events)
        self.checkpoints = CheckpointWriter(
            service, run_dir, self.trainer, recovered.assembler.moments, self._events, self._clock
        )
        self._make_newest(recovered.weights)

    async def run(self) -> None:
        """Train until the run ends, and stay until the coordinator says that it is finished."""
        try:
            await self._start()
            while not (reason := self._reason_to_end()):
                batch = await self.intake.next_batch(self._newest.version, self._is_interrupted)
                if batch is not None:
                    await self._step(batch)
                await self.checkpoints.write_if_due(self._newest.version)
            await self._finish(reason)
        except (RunFailedError, NotFiniteError) as error:
            log.error("run_failed", reason=str(error))
            await self._events.send(Event(finished=Finished(reason=str(error), end=RUN_END_FAILED)))

    async def _start(self) -> None:
        await self._save_candidate()
        self._publish()
        self._service.problems.clear()
        metrics.STEP_TIMESTAMP.set_to_current_time()
        log.info(
            "learner_ready",
            version=self._newest.version,
            digest=self._newest.digest[:12],
            epoch=self._run_dir.epoch,
        )

    def _reason_to_end(self) -> str:
        return self._end.reason(self._newest.version, self._report.trained_s)

    def _is_interrupted(self) -> bool:
        """Whether the run's end or a request for a checkpoint comes before the next batch."""
        return bool(self._reason_to_end()) or self.checkpoints.is_requested

    async def _step(self, batch: Batch) -> None:
        """Log, acknowledge, train, record, publish: in this order, so that a kill anywhere loses nothing."""
        step, activity = batch.step, self._service.activity
        self._clock.begin(
            self.intake.take_timelines(batch.groups),
            waited_since_s=self.intake.waited_since_s,
            live_unix_s=self.publisher.live_unix_s,
            evaluated_unix_s=self._gate.recorded_unix_s,
        )
        self._groups_in_training = batch.groups
        with activity.doing("logging", f"step {step}"):
            await asyncio.to_thread(self._run_dir.write_step, step, batch.rows)
            await self.intake.acknowledge(batch.groups)
        self._clock.end_phase(StepPhase.LOG)
        with activity.doing("training", f"step {step}, {len(batch.rows)} rollouts"):
            hyperparameters = configured_hyperparameters(self._service.config, step)
            trained = await self.trainer.train(step, batch.rows, hyperparameters)
            await self._report.report_not_applied(step, trained.not_applied)
        self._clock.end_phase(StepPhase.TRAIN)
        with activity.doing("making version", str(step)):
            weights = await self.trainer.weights(step)
            await asyncio.to_thread(
                self._run_dir.append_version, step, weights.digest, weights.dtype, asdict(hyperparameters)
            )
            self._make_newest(weights)
        self._clock.end_phase(StepPhase.MAKE_VERSION)
        await self._gate.wait(step - 1, lambda: self._end.is_stopped)
        self._clock.end_phase(StepPhase.HOLD)
        step_metrics = trained.metrics | self._clock.metrics() | self.intake.untrained.take_metrics()
        # Generators wait for the weights; nothing waits for the report.
        self._publish()
        await self._report.report(batch, weights.digest, step_metrics)
        await self._save_candidate()

    def _make_newest(self, weights: PolicyWeights) -> None:
        """The version is on record, and so the newest; the groups that made it may free their slots."""
        self._newest, self._groups_in_training = weights, ()
        metrics.POLICY_VERSION.set(weights.version)
        metrics.STEP.set(weights.version)

    def _publish(self) -> None:
        """Push the newest version to every generator, beside the next step."""
        self._clock.publish(self._newest.version)
        self.publisher.publish(self._newest)

    async def _announce_live(self, live: VersionLive) -> None:
        self._clock.live(live.version)
        await self._events.send(Event(version_live=live))

    async def _finish(self, reason: str) -> None:
        """Settle open groups (not after a stop: a resume trains them), save, and wait for the coordinator."""
        version = self._newest.version
        self._end.finish_training(reason)
        await self._settle_unused()
        await self.checkpoints.write(version)
        with self._service.activity.doing("exporting", f"version {version}"):
            export = self._run_dir.path / _EXPORT
            await self.trainer.write("the exported model", lambda trainer: trainer.export(export))
            if not self._end.is_stopped:
                await self._save_candidate(last=True)
        done = TrainingDone(
            step=version, version=version, digest=self._newest.digest, reason=reason, end=self._end.kind
        )
        await self._events.send(Event(training_done=done))
        log.info("training_done", step=version, reason=reason)
        self._service.activity.set("waiting", "coordinator", "the last evaluation")
        max_wait_s = self._gate.max_wait_s + self.publisher.push_limit_s
        # The coordinator may have issued groups before it heard that this is the end.
        await self._end.wait_for_finished(max_wait_s, on_poll=self._settle_unused)

    async def _settle_unused(self) -> None:
        if not self._end.is_stopped:
            await self.intake.settle_unused(self._end.done_reason)

    async def _save_candidate(self, *, last: bool = False) -> None:
        """Save the newest version as a model folder if it will be measured, and the best version is kept."""
        version = self._newest.version
        await self.trainer.write(
            "a version that may be the best",
            lambda trainer: self._gate.save_candidate(version, trainer.export, last=last),
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
                case Finished():
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
        # Those in training are settled on disk, but their slots are free only when their version is the newest.
        settlements = self._run_dir.settlements.without(self._groups_in_training)
        return ProgressReply(
            run=self._service.config.name,
            epoch=self._run_dir.epoch,
            step=self._newest.version,
            version=self._newest.version,
            digest=self._newest.digest,
            settled=[GroupRange(first=first, last=last) for first, last in settlements.ranges()],
            counts=settlements.counts(),
            live_version=self.publisher.live_version,
            end=self._end.kind,
            end_reason=self._end.done_reason,
            evaluations=list(self._run_dir.evaluations),
        )

    def facts(self) -> dict[str, Any]:
        """Fields that the learner adds to its heartbeat."""
        return {
            "step": self._newest.version,
            "version": self._newest.version,
            "epoch": self._run_dir.epoch,
            "generators": self.publisher.describe(),
            "notices": self._notices,
        }
