"""The learner's loop: assemble, log, acknowledge, train, publish, announce; a checkpoint now and then.

consumes: scored rollouts (intake.py), StopRequested, PromptsExhausted, EvaluationDone, Finished.
produces: step files, versions, StepDone, GroupsSettled, VersionLive, CheckpointDone, TrainingDone.
waits for: complete groups, unblocked by reward; at the end for Finished, unblocked by the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import structlog

from gspo.common.service.app import Service
from gspo.common.streams.events import Events
from gspo.common.telemetry import metrics
from gspo.common.telemetry.advice import NEVER_CLIPPED_STEPS, advice
from gspo.common.telemetry.step_time import seconds_by_cause
from gspo.learner.assembly.assembler import Batch, NoUsableGroups, PromptsUsedUp, WaitingForGroups
from gspo.learner.assembly.intake import Intake
from gspo.learner.assembly.settlements import SettledGroup, Settlement
from gspo.learner.assembly.staleness_cost import StalenessCost
from gspo.learner.evaluation_gate import EvaluationGate
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.push.publisher import Publisher, VersionServed
from gspo.learner.recovery import RecoveredState
from gspo.learner.storage.disk_space import DiskSpace
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.telemetry.step_clock import StepClock
from gspo.learner.training.schedule import configured_hyperparameters
from gspo.learner.training.trainer_api import Hyperparameters, NotFiniteError
from gspo_proto.learner_pb2 import CheckpointReply, GroupRange, ProgressReply
from gspo_proto.rollout_pb2 import (
    RUN_END_COMPLETED,
    RUN_END_FAILED,
    RUN_END_STOPPED,
    RUN_END_UNSPECIFIED,
    CheckpointDone,
    Event,
    Finished,
    GroupsSettled,
    RunEnd,
    StepDone,
    TrainingDone,
    VersionLive,
)

log = structlog.get_logger()
T = TypeVar("T")
# A change of the open groups has no signal of its own.
_POLL_S = 0.25
# Within the time after which a silent rank is given up.
_SIGNS_IN_TIME = 4
_SECONDS_PER_HOUR = 3600.0
_EXPORT = "export"


class RunFailedError(RuntimeError):
    """The run cannot go on, for a reason that is the user's to know."""


class Learner:
    """One life of the learner.

    Args:
        recovered: Trainer and assembler, in the state after the last logged step.
        thread: The one thread that calls the trainer.
        disk: Waits for room for checkpoints and exported models.
    """

    def __init__(
        self,
        service: Service,
        run_dir: RunDir,
        recovered: RecoveredState,
        thread: ThreadPoolExecutor,
        disk: DiskSpace,
    ) -> None:
        self._service, self._config, self._run_dir = service, service.config, run_dir
        self._trainer, self._assembler, self._thread, self._disk = recovered.trainer, recovered.assembler, thread, disk
        self._notices = recovered.notices
        self.intake = Intake(service, self._assembler)
        self.publisher = Publisher(service, run_dir.epoch, self._on_live)
        self._evaluation_gate = EvaluationGate(self._config, run_dir, service.activity)
        self._events = Events(service.redis, service.keys, service.options.name)
        self._version, self._digest = recovered.step, ""
        self._in_training: tuple[int, ...] = ()
        self._ended_untrained: Counter[Settlement] = Counter()
        self._age_cost = StalenessCost()
        self._recent: list[Mapping[str, float]] = []
        self._trained_s, self._clock = run_dir.trained_s, StepClock(self.intake.timelines, service.traces)
        self._is_generated = False
        self._num_groups: int | None = None
        self._stop_reason = self._done_reason = ""
        self._training_end: RunEnd.ValueType = RUN_END_UNSPECIFIED
        self._finished = asyncio.Event()
        self._checkpoint_step = run_dir.checkpoints.newest() or 0
        self._checkpoint_wanted: list[asyncio.Future[CheckpointReply]] = []

    async def run(self) -> None:
        """Train until the run ends, and stay until the coordinator says that it is finished."""
        try:
            await self._start()
            while not (reason := self._reason_to_end()):
                batch = await self._assemble()
                if batch is None:
                    continue
                await self._step(batch)
                await self._checkpoint_if_due()
            await self._end(reason)
        except (RunFailedError, NotFiniteError) as error:
            log.error("run_failed", reason=str(error))
            await self._announce(finished=Finished(reason=str(error), end=RUN_END_FAILED))

    async def watch_events(self, position: bytes) -> None:
        """Follow the run's events from `position`, for as long as the learner lives."""
        async for event in self._events.follow(position):
            what = event.WhichOneof("what")
            if what == "evaluation_done":
                await self._evaluation_gate.record(event.evaluation_done)
            elif what == "stop_requested":
                self._stop_reason = f"stopped: {event.stop_requested.reason}"
            elif what == "prompts_exhausted":
                self._num_groups = event.prompts_exhausted.num_groups
            elif what == "finished":
                self._finished.set()
            self.intake.arrived.set()

    async def send_rank_heartbeats(self) -> None:
        """Show the other ranks that this one lives, and notice when one of them does not."""
        while True:
            await asyncio.sleep(self._config.learner.rank_timeout_s / _SIGNS_IN_TIME)
            await self._in_thread(self._trainer.rank_heartbeat)

    async def release_ranks(self) -> None:
        """Let the other ranks end."""
        await self._in_thread(self._trainer.close)

    def progress(self) -> ProgressReply:
        """The learner's account of the run, for the coordinator."""
        # What is being trained is settled on disk, but its slots are free only when the version made of it is live.
        settlements = self._run_dir.settlements.without(self._in_training)
        return ProgressReply(
            run=self._config.name,
            epoch=self._run_dir.epoch,
            step=self._version,
            version=self._version,
            digest=self._digest,
            settled=[GroupRange(first=first, last=last) for first, last in settlements.ranges()],
            counts=settlements.counts(),
            live_version=self.publisher.live_version,
            end=self._training_end,
            end_reason=self._done_reason,
            evaluations=self._run_dir.evaluations(),
        )

    def facts(self) -> dict[str, Any]:
        """What the learner adds to its heartbeat."""
        return {
            "step": self._version,
            "version": self._version,
            "epoch": self._run_dir.epoch,
            "generators": self.publisher.describe(),
            "notices": self._notices,
        }

    def stop(self, reason: str) -> None:
        """End after the step under way with a checkpoint, and do not wait for the coordinator."""
        self._stop_reason = f"stopped: {reason}"
        self._finished.set()
        self.intake.arrived.set()

    async def checkpoint_now(self) -> CheckpointReply:
        """A checkpoint as soon as the step under way is done."""
        wanted: asyncio.Future[CheckpointReply] = asyncio.get_running_loop().create_future()
        self._checkpoint_wanted.append(wanted)
        self.intake.arrived.set()
        return await wanted

    async def _start(self) -> None:
        policy = await self._in_thread(self._make_policy, self._version)
        await self._record_version(policy)
        self._set_version(policy)
        await self._save_candidate()
        self.publisher.publish(policy)
        self._service.problems.clear()
        metrics.STEP_TIMESTAMP.set_to_current_time()
        log.info("learner_ready", version=policy.version, digest=policy.digest[:12], epoch=self._run_dir.epoch)

    def _reason_to_end(self) -> str:
        run = self._config.run
        if self._stop_reason:
            return self._stop_reason
        if self._done_reason:
            return self._done_reason
        if run.total_steps is not None and self._version >= run.total_steps:
            return f"total_steps {run.total_steps} reached"
        if run.total_hours is not None and self._trained_s >= run.total_hours * _SECONDS_PER_HOUR:
            return f"total_hours {run.total_hours:g} reached"
        return ""

    async def _assemble(self) -> Batch | None:
        """The next batch; None when something else came first: an end, a wish for a checkpoint."""
        began = time.monotonic()
        while not (self._reason_to_end() or self._checkpoint_wanted):
            self.intake.arrived.clear()
            if not self._is_generated:
                # The time until the first engine serves is the start of this life, not training.
                began, self._is_generated = time.monotonic(), self.publisher.live_version >= 0
            open_groups = await self.intake.open_groups()
            found = self._assembler.next_batch(self._version, open_groups, num_groups=self._num_groups)
            await self._settle(found.settled)
            if isinstance(found, Batch):
                self._clock.wait_over(
                    began,
                    live_unix_s=self.publisher.live_unix_s,
                    evaluated_unix_s=self._evaluation_gate.recorded_unix_s,
                )
                return found
            if isinstance(found, NoUsableGroups):
                raise RunFailedError(found.reason)
            if isinstance(found, PromptsUsedUp):
                self._done_reason = "all prompts are used"
                break
            await self._wait_for_rollouts(found)
        await self._write_wanted_checkpoint()
        return None

    async def _wait_for_rollouts(self, waiting: WaitingForGroups) -> None:
        began, detail = time.monotonic(), waiting.detail
        if trouble := self.publisher.trouble():
            detail += f"; {trouble}"
        self._service.activity.set("waiting", "rollouts", detail)
        try:
            async with asyncio.timeout(_POLL_S):
                await self.intake.arrived.wait()
        except TimeoutError:
            return
        finally:
            if waiting.what == "old_groups":
                self._age_cost.waited(time.monotonic() - began)

    async def _step(self, batch: Batch) -> None:
        """Log, acknowledge, train, publish, record, announce: in this order, so that a kill anywhere loses nothing."""
        self._clock.begin(batch.groups)
        self._in_training = batch.groups
        with self._service.activity.doing("logging", f"step {batch.step}"):
            await asyncio.to_thread(self._run_dir.write_step, batch.step, batch.rows)
            await self.intake.acknowledge(batch.groups)
        self._clock.over("log_s")
        with self._service.activity.doing("training", f"step {batch.step}, {len(batch.rows)} rollouts"):
            used = configured_hyperparameters(self._config, batch.step)
            done = await self._in_thread(self._trainer.train, batch.step, batch.rows, (), used)
            not_applied = [asdict(left_out) for left_out in done.not_applied]
            for left_out in not_applied:
                log.warning("mini_batch_not_applied", step=batch.step, **left_out)
            await asyncio.to_thread(self._run_dir.append_not_applied, batch.step, not_applied)
        self._clock.over("train_s")
        with self._service.activity.doing("publishing", f"version {batch.step}"):
            policy = await self._in_thread(self._make_policy, batch.step)
            await self._record_version(policy, used)
        self._set_version(policy)
        self._clock.over("publish_s")
        await self._evaluation_gate.wait(batch.step - 1, lambda: bool(self._stop_reason))
        self._clock.over("hold_s")
        figures = done.figures | self._clock.figures()
        figures["tokens_per_s"] = figures["tokens"] / figures["step_s"]
        untrained = (Settlement.FILTERED, Settlement.STALE, Settlement.FAILED)
        figures |= {f"groups_{ending}": float(self._ended_untrained[ending]) for ending in untrained}
        self._ended_untrained.clear()
        figures |= self._age_cost.figures()
        self._clock.published(policy.version)
        # Generators wait for the weights, nobody for the record.
        self.publisher.publish(policy)
        await self._record(batch, figures)
        await self._save_candidate()

    async def _record(self, batch: Batch, figures: dict[str, float]) -> None:
        """The step's figures: on disk, in the metrics, on the events stream."""
        self._trained_s += figures["step_s"]
        self._recent = [*self._recent, figures][-NEVER_CLIPPED_STEPS:]
        texts = list(advice(self._recent, self._config).values())
        for text in texts:
            log.warning("advice", step=batch.step, text=text)
        await asyncio.to_thread(self._run_dir.append_metrics, batch.step, self._version, figures)
        _show(figures, batch.step)
        done = StepDone(
            step=batch.step,
            version=self._version,
            digest=self._digest,
            groups=batch.groups,
            figures=figures,
            advice=texts,
        )
        await self._announce(step_done=done)

    async def _settle(self, settled: Iterable[SettledGroup]) -> None:
        """End groups without training: on disk first, then their entries go, then their slots."""
        groups = list(settled)
        if not groups:
            return
        await asyncio.to_thread(self._run_dir.settle, groups)
        self._ended_untrained.update(group.settlement for group in groups)
        self._age_cost.ended(groups)
        await self.intake.acknowledge(group.group for group in groups)
        self.intake.timelines.take(group.group for group in groups)
        await self._announce(groups_settled=GroupsSettled(groups=[group.to_proto() for group in groups]))
        log.info("groups_settled", num=len(groups), last=groups[-1].settlement.value, reason=groups[-1].reason)

    async def _checkpoint_if_due(self) -> None:
        if self._version - self._checkpoint_step >= self._config.run.checkpoint_every:
            await self._checkpoint()
        await self._write_wanted_checkpoint()

    async def _write_wanted_checkpoint(self) -> None:
        wanted, self._checkpoint_wanted = self._checkpoint_wanted, []
        if wanted:
            path = await self._checkpoint()
            for future in wanted:
                if not future.done():
                    future.set_result(CheckpointReply(step=self._version, path=str(path)))

    async def _checkpoint(self) -> Path:
        """Write a checkpoint of the version now, unless there is one, and remove what need not be kept."""
        path = self._run_dir.checkpoints.path(self._version)
        if self._run_dir.checkpoints.is_whole(self._version):
            return path
        began = time.monotonic()
        with self._service.activity.doing("checkpoint", f"step {self._version}"):
            await self._in_thread(self._when_disk_has_space, "a checkpoint", self._write_checkpoint)
            run = self._config.run
            await asyncio.to_thread(
                self._run_dir.prune, keep_checkpoints=run.keep_checkpoints, keep_log_steps=run.keep_log_steps
            )
        self._checkpoint_step = self._version
        self._clock.checkpoint(time.monotonic() - began)
        await self._announce(checkpoint_done=CheckpointDone(step=self._version, path=str(path)))
        return path

    def _write_checkpoint(self) -> None:
        folder = self._run_dir.checkpoints.begin(self._version)
        self._trainer.save(folder, {"moments": asdict(self._assembler.moments)})
        self._run_dir.checkpoints.finish(self._version)

    async def _end(self, reason: str) -> None:
        """Settle what is open (not after a stop: a resume goes on with it), save, and wait for the coordinator."""
        self._done_reason, self._training_end = reason, RUN_END_STOPPED if self._stop_reason else RUN_END_COMPLETED
        await self._settle_unused(reason)
        await self._checkpoint()
        with self._service.activity.doing("exporting", f"version {self._version}"):
            export = self._run_dir.path / _EXPORT
            await self._in_thread(self._when_disk_has_space, "the exported model", lambda: self._trainer.export(export))
            if not self._stop_reason:
                await self._save_candidate(last=True)
        await self._announce(
            training_done=TrainingDone(
                step=self._version,
                version=self._version,
                digest=self._digest,
                reason=reason,
                end=self._training_end,
            )
        )
        log.info("training_done", step=self._version, reason=reason)
        self._service.activity.set("waiting", "coordinator", "the last evaluation")
        max_wait_s = self._evaluation_gate.max_wait_s + self.publisher.push_limit_s
        try:
            async with asyncio.timeout(max_wait_s):
                while not self._finished.is_set():
                    # The coordinator may have issued some before it heard that this is the end.
                    await self._settle_unused(reason)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_S):
                            await self._finished.wait()
        except TimeoutError as error:
            raise RunFailedError(f"the coordinator did not finish the run within {max_wait_s:g} s") from error

    async def _settle_unused(self, reason: str) -> None:
        """Settle what is open and was not trained; not after a stop, for a resume goes on with it."""
        if not self._stop_reason:
            await self._settle(self._assembler.settle_unused(await self.intake.open_groups(), reason))

    async def _save_candidate(self, *, last: bool = False) -> None:
        """Where the best version is kept: this one stays on the disk until it is measured, if it will be."""

        def keep() -> None:
            self._evaluation_gate.save_candidate(self._version, self._trainer.export, last=last)

        await self._in_thread(self._when_disk_has_space, "a version that may be the best", keep)

    async def _on_live(self, live: VersionServed) -> None:
        self._clock.live(live.policy.version)
        version_live = VersionLive(
            version=live.policy.version,
            digest=live.policy.digest,
            generators=[live.generator],
            push_s=live.push_s,
            stall_s=live.stall_s,
            bytes=live.num_bytes,
        )
        await self._announce(version_live=version_live)

    async def _announce(self, **what: Any) -> None:
        await self._events.send(Event(epoch=self._run_dir.epoch, **what))

    def _when_disk_has_space(self, what: str, write: Callable[[], None]) -> None:
        """Wait for room; not with other ranks, which may be a call ahead: all are started again then."""
        if self._trainer.has_other_ranks:
            write()
        else:
            self._disk.write(what, self._run_dir.path, write)

    def _make_policy(self, version: int) -> PolicyWeights:
        return weights_from(version, self._trainer.policy())

    async def _record_version(self, policy: PolicyWeights, used: Hyperparameters | None = None) -> None:
        """On disk, before anybody hears of the version."""
        values = asdict(used) if used else None
        version, digest, dtype = policy.version, policy.digest, policy.dtype
        await asyncio.to_thread(
            lambda: self._run_dir.append_version(version, digest, version, dtype=dtype, hyperparameters=values)
        )

    def _set_version(self, policy: PolicyWeights) -> None:
        self._version, self._digest, self._in_training = policy.version, policy.digest, ()
        metrics.POLICY_VERSION.set(policy.version)
        metrics.STEP.set(policy.version)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run in the trainer's thread; the event loop goes on taking rollouts and pushing weights."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _show(figures: Mapping[str, float], step: int) -> None:
    """The step's figures in the metrics."""
    for name, value in figures.items():
        metrics.STEP_FIGURE.labels(name).set(value)
    for phase in ("wait", "log", "train", "publish", "hold"):
        metrics.STEP_SECONDS.labels(phase).observe(figures[f"{phase}_s"])
    for cause, seconds in seconds_by_cause(figures).items():
        metrics.STEP_TIME_SECONDS.labels(cause).inc(seconds)
    metrics.STEP_TIMESTAMP.set_to_current_time()
    metrics.STALE_TOKENS.labels("masked").inc(figures.get("skipped_tokens_stale", 0.0))
    metrics.TOKENS_TRAINED.inc(figures["tokens"])
    metrics.ROLLOUTS_TRAINED.inc(figures["sequences"])
    shown = {key: round(figures[key], 6) for key in ("reward_mean", "loss", "step_s") if key in figures}
    log.info("step_done", step=step, **shown)
