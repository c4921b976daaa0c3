"""The state of a run as far as its events, its log and its heartbeats tell it; drawing.py draws it."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

from gspo.common.config.schema import Config
from gspo.common.streams.entries import body_of
from gspo.common.streams.instances import Instance
from gspo.common.telemetry.advice import findings
from gspo.common.telemetry.findings import Finding, RecentSteps
from gspo.common.telemetry.first_answers import FIRST_ANSWERS, first_answers, scores_finding
from gspo.common.telemetry.step_time import duration
from gspo.runlog.run_log import EvaluationRecord, RunLog, StepRecord, best_evaluated
from gspo.runlog.sentences.unscored import UNSCORED, Unscored
from gspo_proto.rollout_pb2 import (
    RUN_END_FAILED,
    CheckpointDone,
    EvaluationDone,
    Event,
    Finished,
    FirstAnswers,
    GroupsSettled,
    PromptsExhausted,
    ScoresDiffer,
    SettledGroup,
    Settlement,
    Stalled,
    StepDone,
    StopRequested,
    TrainingDone,
    VersionLive,
)

STEPS_FOR_ETA = 10
# Of a step's line: label, figure, format.
_STEP_CELLS = (
    ("reward", "reward_mean", "{:.3f}"),
    ("teacher's KL", "teacher_kl", "{:.3g}"),
    ("clipped", "clipped_sequences", "{:.0%}"),
    ("age", "age_mean", "{:.2f}"),
    ("max", "age_max", "{:.0f}"),
    ("grad norm", "grad_norm", "{:.3g}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("", "step_s", "{:.1f} s"),
)
Kind = Literal["step", "note", "warning", "error"]


@dataclass(frozen=True)
class ScreenLine:
    """An event for the reader. Only plain screens print the lines of kind "step"."""

    text: str
    kind: Kind = "note"


@dataclass
class Phases:
    """Wall-clock seconds by phase, of phases one after the other."""

    wall_s: dict[str, float] = field(default_factory=dict)
    current: str = "checks"
    _since: float = field(default_factory=time.monotonic)

    def enter(self, phase: str) -> None:
        """End the current phase and begin another; an empty one after the last."""
        now = time.monotonic()
        self.wall_s[self.current] = self.wall_s.get(self.current, 0.0) + now - self._since
        self.current, self._since = phase, now

    @property
    def elapsed_s(self) -> float:
        """Seconds since the current phase began."""
        return time.monotonic() - self._since


@dataclass
class ServiceProcess:
    """One expected process.

    Attributes:
        since_unix_s: Time of its start.
        instance: Its newest heartbeat.
        problem: The reason why it is not ready, where one is known.
    """

    name: str
    since_unix_s: float
    instance: Instance | None = None
    ready: bool = False
    problem: str = ""

    @property
    def service(self) -> str:
        """The service of the process: "learner" of "learner-0"."""
        return self.name.rpartition("-")[0]

    @property
    def is_called(self) -> bool:
        """Whether its gRPC server can be called, by its newest heartbeat."""
        return self.instance is not None and bool(self.instance.grpc)

    def doing(self) -> tuple[str, str, float]:
        """(busy or waiting, its activity, since when in unix seconds)."""
        if self.instance is None:
            return "busy", "importing its libraries", self.since_unix_s
        activity = self.instance.activity
        what = " ".join(str(activity.get(part, "")) for part in ("what", "detail")).strip()
        return str(activity.get("kind", "busy")), what, float(activity.get("since_unix_s", self.since_unix_s))

    def in_words(self) -> str:
        """'loading the model /m (for 12 s)', 'waiting for the learner ...', or the reason why it is not ready."""
        kind, what, since_unix_s = self.doing()
        text = self.problem or (f"waiting for {what}" if kind == "waiting" else what)
        return f"{text} (for {duration(max(0.0, time.time() - since_unix_s))})"


@dataclass
class View:
    """The content of a screen.

    Attributes:
        evaluations: In the order of recording.
        failures: Failed groups by reason.
        unscored: The answers without a score in the steps of this session.
        warned: The rules whose findings the newest steps have.
        checked: The checks that had findings: of the first answers, and of reward functions by their names.
        notes: What only the log knows, for a run that is looked at without its events.
    """

    config: Config
    run_dir: Path
    processes: dict[str, ServiceProcess]
    phases: Phases
    step: int = 0
    version: int = 0
    live_version: int | None = None
    recent: RecentSteps = field(init=False)
    rewards: list[float] = field(default_factory=list)
    step_unix_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_FOR_ETA + 1))
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    unscored: Unscored = field(default_factory=Unscored)
    warned: set[str] = field(default_factory=set)
    checked: set[str] = field(default_factory=set)
    notes: list[ScreenLine] = field(default_factory=list)
    finished: Finished | None = None

    def __post_init__(self) -> None:
        self.recent = RecentSteps(self.config.evaluation.headline)

    @property
    def steps(self) -> list[dict[str, float]]:
        """The figures of the newest steps, oldest first."""
        return list(self.recent.steps)

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the last step."""
        return self.recent.steps[-1] if self.recent.steps else {}

    @property
    def findings(self) -> dict[str, Finding]:
        """The findings of the newest steps and evaluations."""
        return findings(self.recent.judged(), self.config)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Take the next evaluation."""
        self.evaluations.append(record)
        self.recent.add_evaluation(record.file, record.version, record.figures)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None without run.total_steps."""
        return self.config.run.total_steps

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, by the median time of the last STEPS_FOR_ETA steps."""
        if self.total_steps is None or len(self.step_unix_s) < 2:
            return None
        pace_s = median(after - before for before, after in pairwise(self.step_unix_s))
        return max(0.0, (self.total_steps - self.step) * pace_s)

    @property
    def by_file(self) -> dict[str, list[EvaluationRecord]]:
        """The evaluations of each held-out file; a single file has an empty name."""
        by_file: dict[str, list[EvaluationRecord]] = {}
        for record in self.evaluations:
            by_file.setdefault(record.file, []).append(record)
        return by_file

    @property
    def best(self) -> tuple[int, float] | None:
        """(policy version, score) of the best version by evaluation.keep_best; None where no version has a score."""
        compared = self.config.best_figure
        return best_evaluated(self.evaluations, compared.weights if compared else None)

    @property
    def waiting_to_start(self) -> list[ServiceProcess]:
        """Processes that are not ready yet."""
        return [process for process in self.processes.values() if not process.ready]

    def waited_for(self) -> str:
        """The processes that are not ready, each with its activity and its duration."""
        return "; ".join(f"{process.name}: {process.in_words()}" for process in self.waiting_to_start) or "nothing"

    def apply(self, event: Event) -> list[ScreenLine]:
        """Apply one event; returns its lines for the screen."""
        match body_of(event):
            case StepDone() as done:
                return self._on_step(done, event.unix_s)
            case FirstAnswers() | ScoresDiffer() as check:
                return self._on_check(check)
            case GroupsSettled(groups=groups):
                return self._on_groups(groups)
            case VersionLive(version=version):
                self.live_version = version
            case EvaluationDone() as done:
                return self._on_evaluation(done, event.unix_s)
            case CheckpointDone(step=step, path=path):
                return [ScreenLine(f"checkpoint of step {step}: {path}")]
            case TrainingDone(step=step, reason=reason):
                self.step = step  # a resume may have trained it from the log, without an event
                self.phases.enter("evaluation_after")
                return [ScreenLine(f"training ended after step {step}: {reason}")]
            case StopRequested(reason=reason):
                return [ScreenLine(f"stop requested: {reason}")]
            case PromptsExhausted(num_groups=num_groups):
                return [ScreenLine(f"no more prompts after {num_groups} groups")]
            case Stalled(reason=reason):
                return [ScreenLine(f"nothing moves: {reason}", "warning")]
            case Finished() as finished:
                self.finished = finished
                failed = finished.end == RUN_END_FAILED
                kind: Kind = "error" if failed else "note"
                return [ScreenLine(f"{'failed' if failed else 'finished'}: {finished.reason}", kind)]
        return []

    def _on_step(self, done: StepDone, unix_s: float) -> list[ScreenLine]:
        figures = dict(done.figures)
        if self.phases.current in ("start", "evaluation_before"):
            self.phases.enter("training")
        self.step, self.version = done.step, done.version
        self.recent.add(done.step, figures)
        self.step_unix_s.append(unix_s)
        if "reward_mean" in figures:
            self.rewards.append(figures["reward_mean"])
        seen = self.findings
        new = [ScreenLine(finding.text, "warning") for name, finding in seen.items() if name not in self.warned]
        self.warned = set(seen)
        return [ScreenLine(step_line(self), "step"), *new, *self._on_unscored(int(figures.get(UNSCORED, 0)))]

    def _on_check(self, check: FirstAnswers | ScoresDiffer) -> list[ScreenLine]:
        """The warnings of a check, unless another process of its service, or one before it, made it too."""
        if isinstance(check, FirstAnswers):
            subject, seen = FIRST_ANSWERS, first_answers(check.figures, self.config)
        else:
            subject, seen = check.function, [scores_finding(check)]
        if subject in self.checked:
            return []
        self.checked |= {subject} if seen else set()
        return [ScreenLine(finding.text, "warning") for finding in seen]

    def _on_unscored(self, count: int) -> list[ScreenLine]:
        """A warning for each new reason, and whenever the number of such answers has one more digit."""
        before = self.unscored.counts.total()
        is_new = count and self.unscored.add_step(self.run_dir, self.step)
        total = self.unscored.counts.total()
        if not is_new and len(str(total)) == len(str(before)):
            return []
        so_far = f", {total} so far" if before else ""
        reasons = self.unscored.in_words()
        text = f"step {self.step}: {count} answers have no score{so_far}, and are left out: {reasons}"
        return [ScreenLine(text, "warning")]

    def _on_groups(self, groups: Sequence[SettledGroup]) -> list[ScreenLine]:
        """A warning for the first failure with a reason, the tenth, the hundredth and so on."""
        lines = []
        for group in groups:
            if group.settlement != Settlement.SETTLEMENT_FAILED:
                continue
            self.failures[group.reason] += 1
            count = self.failures[group.reason]
            if str(count).strip("0") == "1":
                number = group.group
                which = f"group {number} failed" if count == 1 else f"{count} groups have failed, the last {number}"
                lines.append(ScreenLine(f"{which}: {group.reason}", "warning"))
        return lines

    def _on_evaluation(self, done: EvaluationDone, unix_s: float) -> list[ScreenLine]:
        figures, score = dict(done.figures), done.score if done.HasField("score") else None
        record = EvaluationRecord(
            file=done.file, version=done.version, step=done.step, unix_s=unix_s, score=score, figures=figures
        )
        best_before = self.best
        self.add_evaluation(record)
        if self.phases.current == "evaluation_before" and len(self.by_file) >= len(self.config.evaluation.files):
            self.phases.enter("training")
        name = done.file or "held-out prompts"
        failed = figures.get("num_failed", 0)
        more = f"; {failed:.0f} answers could not be scored" if failed else ""
        is_best = score is not None and self.best not in (None, best_before)
        best = f"; the best by {self.config.evaluation.keep_best}" if is_best else ""
        return [ScreenLine(f"{name} at version {done.version}: {record.line or 'nothing scored'}{more}{best}")]


def load_history(view: View) -> list[StepRecord]:
    """Fill a view from the log of its run; returns the records of the steps."""
    log = RunLog(view.run_dir)
    steps = log.steps()
    for record in steps:
        view.step, view.version = record.step, record.version
        view.recent.add(record.step, record.figures)
        view.rewards += [record.figures["reward_mean"]] if "reward_mean" in record.figures else []
    if (left_out := log.left_out()) and left_out[-1] > view.step:
        view.step = view.version = left_out[-1]
    for evaluation in log.evaluations():
        view.add_evaluation(evaluation)
    return steps


def step_line(view: View) -> str:
    figures = view.figures
    parts = [f"step {view.step}/{view.total_steps}" if view.total_steps else f"step {view.step}"]
    parts += [f"{label} {form.format(figures[name])}".strip() for label, name, form in _STEP_CELLS if name in figures]
    parts.append(f"version {view.version}")
    if view.eta_s is not None:
        parts.append(f"{duration(view.eta_s)} to go")
    return "  ".join(parts)
