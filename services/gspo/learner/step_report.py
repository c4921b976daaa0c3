"""Reports a trained step: its metrics go to the log, to Prometheus and to the events stream, with advice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import structlog

from gspo.common.config.schema import Config
from gspo.common.streams.events import Events
from gspo.common.telemetry import metrics
from gspo.common.telemetry.advice import NEVER_CLIPPED_STEPS, advice
from gspo.common.telemetry.step_time import seconds_by_cause
from gspo.learner.assembly.assembler import Batch
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.telemetry.step_clock import StepPhase
from gspo.learner.training.trainer_api import SkippedUpdate
from gspo_proto.rollout_pb2 import Event, StepDone

log = structlog.get_logger()
_IN_LOG_LINE = ("reward_mean", "loss", "step_s")


class StepReport:
    """Reports the steps of one learner.

    Attributes:
        trained_s: Seconds that all recorded steps took.
    """

    def __init__(self, config: Config, run_dir: RunDir, events: Events) -> None:
        self._config, self._run_dir, self._events = config, run_dir, events
        self._recent: list[Mapping[str, float]] = []
        self.trained_s = run_dir.trained_s

    async def record_skipped(self, step: int, updates: Sequence[SkippedUpdate]) -> None:
        """Record the mini-batches of a step that were not applied; on the disk when this returns."""
        records = [asdict(update) for update in updates]
        for record in records:
            log.warning("mini_batch_not_applied", step=step, **record)
        await asyncio.to_thread(self._run_dir.append_not_applied, step, records)

    async def record(self, batch: Batch, digest: str, step_metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step whose version is published.

        Args:
            digest: Of the version that the step made.
            step_metrics: By their public names; among them `tokens`, `sequences` and the clock's seconds.
        """
        step = batch.step
        figures = {**step_metrics, "tokens_per_s": step_metrics["tokens"] / step_metrics["step_s"]}
        self.trained_s += figures["step_s"]
        self._recent = [*self._recent, figures][-NEVER_CLIPPED_STEPS:]
        texts = list(advice(self._recent, self._config).values())
        for text in texts:
            log.warning("advice", step=step, text=text)
        await asyncio.to_thread(self._run_dir.append_metrics, step, figures)
        _export(figures)
        log.info("step_done", step=step, **{key: round(figures[key], 6) for key in _IN_LOG_LINE if key in figures})
        done = StepDone(
            step=step,
            version=step,
            digest=digest,
            groups=batch.groups,
            figures=figures,
            advice=texts,
        )
        await self._events.send(Event(step_done=done))


def _export(figures: Mapping[str, float]) -> None:
    """The step's metrics for Prometheus."""
    for name, value in figures.items():
        metrics.STEP_FIGURE.labels(name).set(value)
    for phase in StepPhase:
        metrics.STEP_SECONDS.labels(phase.removesuffix("_s")).observe(figures[phase])
    for cause, seconds in seconds_by_cause(figures).items():
        metrics.STEP_TIME_SECONDS.labels(cause).inc(seconds)
    metrics.STEP_TIMESTAMP.set_to_current_time()
    metrics.STALE_TOKENS.labels("masked").inc(figures.get("skipped_tokens_stale", 0.0))
    metrics.TOKENS_TRAINED.inc(figures["tokens"])
    metrics.ROLLOUTS_TRAINED.inc(figures["sequences"])
