"""The report of each step: the time of its phases, the causes of the wait before it, and its metrics.

produces: log/metrics.jsonl, log/not_applied.jsonl, StepDone, the learner's spans in the traces of rollouts.
A batch is complete when its last rollout is. So each moment of the wait belongs to the stage of that rollout at the
time. The coordinator judges the figures (services/gspo/common/telemetry/advice.py).
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Self

import structlog

from gspo.common.config.schema import Config
from gspo.common.service.traces import Traces
from gspo.common.streams.events import Events
from gspo.common.telemetry import metrics
from gspo.common.telemetry.gpu_use import gpu_use
from gspo.common.telemetry.source_figures import PREFIX, figures_of
from gspo.common.telemetry.step_time import REWARD_PREFIX, seconds_by_cause
from gspo.learner.assembly.assembler import Batch
from gspo.learner.assembly.row_metrics import row_metrics
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.training.trainer_api import UpdateNotApplied
from gspo_proto.rollout_pb2 import Event, ScoredRollout, StepDone

log = structlog.get_logger()
_IN_LOG_LINE = ("reward_mean", "loss", "step_s")


class StepPhase(StrEnum):
    """The phases of a step in their order, by their columns in the log; together they are its step_s."""

    WAIT = "wait_s"
    LOG = "log_s"
    # On shared GPUs: until the generators sleep and the states are on the GPUs, and back after the step before.
    SHIFT = "shift_s"
    TRAIN = "train_s"
    PROBE = "probe_s"
    CLIP_SPLIT = "clip_split_s"
    # To gather and copy the weights; where the version is not made beside training, also its digest and its record.
    MAKE_VERSION = "publish_s"
    HOLD = "hold_s"


@dataclass(frozen=True)
class RolloutTimeline:
    """When a rollout passed each stage, in Unix seconds by that stage's service.

    Attributes:
        function: The reward function that took longest on it.
    """

    group: int
    number: int
    issued: float
    started: float
    finished: float
    scored: float
    function: str

    @classmethod
    def of(cls, scored: ScoredRollout) -> Self:
        rollout, score = scored.rollout, scored.score
        return cls(
            group=rollout.group,
            number=rollout.number,
            issued=rollout.issued_unix_s,
            started=rollout.started_unix_s,
            finished=rollout.finished_unix_s,
            scored=score.scored_unix_s,
            function=max(score.seconds, key=lambda name: score.seconds[name], default=""),
        )


class StepClock:
    """The clock of one learner.

    Args:
        traces: Where the spans of a step go.
    """

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._timelines: Sequence[RolloutTimeline] = ()
        self._phases: dict[str, float] = {}
        self._phase_began_s = self._ended_s = 0.0
        # Seconds of work between two steps, by their columns; they count to the step after it.
        self._between: dict[str, float] = {}
        self._began_unix_s = self._trained_unix_s = 0.0
        # Version -> its rollouts, and when its step ended or it was handed to the publisher, until it is live.
        self._pushed: dict[int, tuple[Sequence[RolloutTimeline], float]] = {}

    def begin(
        self,
        timelines: Sequence[RolloutTimeline],
        *,
        waited_since_s: float,
        live_unix_s: float,
        evaluated_unix_s: float,
    ) -> None:
        """A step of these rollouts begins, now that they are complete.

        Args:
            waited_since_s: When the wait for them began, by time.monotonic: the time of day may be set meanwhile.
            live_unix_s: When the learner's version was first served.
            evaluated_unix_s: When the last evaluation was recorded; it holds up the issue before the first step alone.
        """
        now_s, self._began_unix_s, self._timelines = time.monotonic(), time.time(), timelines
        wait_s, is_first = now_s - waited_since_s, not self._ended_s
        for timeline in timelines:
            metrics.ROLLOUT_WAIT_SECONDS.observe(max(0.0, self._began_unix_s - timeline.scored))
        causes = seconds_waited(
            timelines,
            began=self._began_unix_s - wait_s,
            ended=self._began_unix_s,
            live=live_unix_s,
            evaluated=evaluated_unix_s if is_first else 0.0,
        )
        report_s = 0.0 if is_first else now_s - self._ended_s - wait_s
        self._phases = {
            StepPhase.WAIT: wait_s,
            **causes,
            StepPhase.PROBE: 0.0,
            "checkpoint_s": 0.0,
            "checkpoint_beside_s": 0.0,
            **self._between,
            "record_s": max(0.0, report_s),  # the report of the step before
        }
        self._phase_began_s, self._between = now_s, {}

    def end_phase(self, phase: StepPhase) -> None:
        """A phase of the step, or a part of it, is over: it took the time since the one before."""
        now_s = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now_s - self._phase_began_s
        self._phase_began_s = self._ended_s = now_s

    def end_training(self, probe_s: float, clip_split_s: float) -> None:
        """The training phase is over; so many seconds of it were those of measurements beside the updates."""
        self.end_phase(StepPhase.TRAIN)
        self._trained_unix_s = time.time()
        self._phases[StepPhase.TRAIN] -= probe_s + clip_split_s
        self._phases |= {StepPhase.PROBE: probe_s, StepPhase.CLIP_SPLIT: clip_split_s}

    def end_step(self, version: int) -> dict[str, float]:
        """The step that made a version is over, whose push may begin while the next step is trained.

        Returns:
            Seconds by phase; step_s is from the wait to the end of the last phase, without the time before the wait.
            And how many of its rollouts were sampled at a time.
        """
        if self._traces.on:
            for timeline in self._timelines:
                rollout = timeline.group, timeline.number
                self._traces.add("wait", *rollout, timeline.scored, self._began_unix_s)
                self._traces.add("train", *rollout, self._began_unix_s, self._trained_unix_s, step=version)
            self._pushed[version] = self._timelines, time.time()
        step_s = sum(self._phases.get(phase, 0.0) for phase in StepPhase)
        return self._phases | {"step_s": step_s} | rollouts_at_once(self._timelines)

    def publish(self, version: int) -> None:
        """The version is handed to the publisher; the spans of its rollouts end when it is live."""
        if version in self._pushed:
            self._pushed[version] = self._pushed[version][0], time.time()

    def live(self, version: int) -> None:
        """A generator serves the version, and with it every earlier one is over."""
        now_unix_s = time.time()
        for earlier in [published for published in self._pushed if published <= version]:
            timelines, published_unix_s = self._pushed.pop(earlier)
            for timeline in timelines:
                self._traces.add("push", timeline.group, timeline.number, published_unix_s, now_unix_s, version=earlier)

    def end_checkpoint(self, seconds: float, overlapped_s: float) -> None:
        """A checkpoint is whole, after so long, some of it beside training; that counts to the next step to begin."""
        metrics.CHECKPOINT_SECONDS.observe(seconds)
        self._between["checkpoint_beside_s"] = self._between.get("checkpoint_beside_s", 0.0) + overlapped_s

    def add_between(self, column: str, seconds: float) -> None:
        """Work after the last phase of a step took so long; it counts to the step after it."""
        self._between[column] = self._between.get(column, 0.0) + seconds
        if self._ended_s:
            self._ended_s += seconds


class StepReport:
    """Reports the steps of one learner.

    Args:
        learner_gpus: Those of the ranks, with their peak flop/s.
        generator_gpus: The present GPUs of all generators, with their kinds.
    """

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        events: Events,
        learner_gpus: Mapping[str, float | None],
        generator_gpus: Callable[[], Mapping[str, str]],
    ) -> None:
        self._config, self._run_dir, self._events = config, run_dir, events
        self._learner_gpus, self._generator_gpus = learner_gpus, generator_gpus
        self._mismatch_step = run_dir.mismatch_step

    async def report_not_applied(self, step: int, updates: Sequence[UpdateNotApplied]) -> None:
        """Report the mini-batches of a step that were not applied; on the disk when this returns."""
        records = [asdict(update) for update in updates]
        for record in records:
            log.warning("mini_batch_not_applied", step=step, **record)
        await asyncio.to_thread(self._run_dir.append_not_applied, step, records)

    async def report(self, batch: Batch, digest: str, step_metrics: Mapping[str, float]) -> None:
        """Report a step whose version is handed to the publisher: to the log, Prometheus and the run's events.

        Args:
            digest: That of the version that the step made.
            step_metrics: Those of updates and clock by their public names, among them `step_s`.
        """
        step = batch.step
        figures = {**await asyncio.to_thread(row_metrics, batch.rows, step), **step_metrics}
        figures["tokens_per_s"] = figures["tokens"] / figures["step_s"]
        figures |= gpu_use(figures, self._learner_gpus, self._generator_gpus())
        if "sigma_token" in figures:
            self._mismatch_step = step
        if self._mismatch_step is not None:
            figures["mismatch_age"] = float(step - self._mismatch_step)
        await asyncio.to_thread(self._run_dir.append_metrics, step, figures)
        export_figures(figures, [source.name for source in self._config.sources])
        log.info("step_done", step=step, **{key: round(figures[key], 6) for key in _IN_LOG_LINE if key in figures})
        done = StepDone(step=step, version=step, digest=digest, groups=batch.groups, figures=figures)
        await self._events.send(Event(step_done=done))


def rollouts_at_once(timelines: Sequence[RolloutTimeline]) -> dict[str, float]:
    """The mean number of a step's rollouts that were generated or played at a time; empty without their times."""
    known = [timeline for timeline in timelines if 0 < timeline.started < timeline.finished]
    if not known:
        return {}
    whole_s = max(timeline.finished for timeline in known) - min(timeline.started for timeline in known)
    return {"rollouts_at_once": sum(timeline.finished - timeline.started for timeline in known) / whole_s}


def seconds_waited(
    timelines: Iterable[RolloutTimeline], *, began: float, ended: float, live: float, evaluated: float
) -> dict[str, float]:
    """Seconds of the wait by metric; they add up to its length.

    The last rollout was at first not issued: a push or an evaluation delayed that, or nothing did. Then it was queued,
    generated, scored, and on its way to the learner.

    Args:
        began, ended: Those of the wait, in Unix seconds, as all times here.
        live: When the learner's version was first served by a generator; it frees slots.
        evaluated: When the last evaluation was recorded; before the first step it delays the issue.
    """
    last = max(timelines, key=lambda timeline: timeline.scored, default=None)
    if last is None:
        return {"wait_intake_s": ended - began}
    until = (
        ("wait_push_s", min(live, last.issued)),
        ("wait_evaluation_s", min(evaluated, last.issued)),
        ("wait_issue_s", last.issued),
        ("wait_queue_s", last.started),
        ("wait_generation_s", last.finished),
        ("wait_reward_s", last.scored),
        ("wait_intake_s", ended),
    )
    seconds, begin = {}, began
    for name, stage_end in until:
        end = max(begin, min(stage_end, ended))
        seconds[name], begin = end - begin, end
    if last.function:
        seconds[f"{REWARD_PREFIX}{last.function}_s"] = seconds["wait_reward_s"]
    return seconds


def export_figures(figures: Mapping[str, float], sources: Iterable[str]) -> None:
    """Show a step's figures in Prometheus, those of sources with the source as a label."""
    for name, value in figures.items():
        if not name.startswith(PREFIX):
            metrics.STEP_FIGURE.labels(name).set(value)
    for source in sources:
        for name, value in figures_of(source, figures).items():
            metrics.SOURCE_FIGURE.labels(source, name).set(value)
    for phase in StepPhase:
        if phase in figures:
            metrics.STEP_SECONDS.labels(phase.removesuffix("_s")).observe(figures[phase])
    for cause, seconds in seconds_by_cause(figures).items():
        metrics.STEP_TIME_SECONDS.labels(cause).inc(seconds)
    metrics.STEP_TIMESTAMP.set_to_current_time()
    metrics.STALE_TOKENS.labels("masked").inc(figures.get("skipped_tokens_stale", 0.0))
    metrics.TOKENS_TRAINED.inc(figures["tokens"])
    metrics.ROLLOUTS_TRAINED.inc(figures["sequences"])
