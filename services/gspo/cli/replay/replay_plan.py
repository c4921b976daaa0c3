"""The plan of a replay: the steps, their start and their cost, and whether bits can be equal.

It reads the run directory alone, and changes nothing in it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from gspo.cli.replay.replay_keys import OPTION, SHAPES, ChangedKeys, change_keys
from gspo.cli.rundir.start import check_run_dir, environment
from gspo.common.config.loading import CONFIG_NAME, ENVIRONMENT_NAME, read_mapping
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.telemetry.step_time import duration
from gspo.runlog.checkpoint_files import whole_checkpoints
from gspo.runlog.run_log import RunLog, StepRecord, VersionRecord

_STEPS = re.compile(r"(\d+)?(\.\.)?(\d+)?")
_FORM = "Write them as 10..20, 10.., ..20 or 12"
# The parts of a step that a replay makes too.
_REPLAYED_S = ("train_s", "publish_s")
# Facts of environment.json that decide the bits of a step, beside the cores where they decide the threads.
_OF_BITS = ("device", "machine", "torch", "deepspeed", "transformers", "numpy")


@dataclass(frozen=True)
class ReplayPlan:
    """The work of a replay.

    Attributes:
        run_dir: Directory of the recorded run.
        recorded: Its configuration.
        changed: The keys of --with, and the configuration with them.
        first, last: The steps that were asked for.
        start: The version that it starts from: of a checkpoint, or 0 for the model.
        steps: The recorded figures of each step.
        versions: The recorded policy versions.
        seconds: Time of all its steps as recorded; None where the record has none.
        rounding: Why digests cannot be expected to be equal; empty where they can.
        notes: Sentences for the user.
    """

    run_dir: Path
    recorded: Config
    changed: ChangedKeys
    first: int
    last: int
    start: int
    steps: Mapping[int, StepRecord]
    versions: Mapping[int, VersionRecord]
    seconds: float | None
    rounding: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """Steps to make, those before the first one that was asked for included."""
        return self.last - self.start

    @property
    def is_exact(self) -> bool:
        """Whether every digest and figure must be the recorded one, to the bit."""
        return not self.rounding and not self.changed.trains_otherwise

    def describe(self) -> list[str]:
        """Its work and cost, a sentence a line."""
        begin = f"the checkpoint of step {self.start}" if self.start else f"the model ({self.recorded.model.path})"
        steps = "step" if self.num_steps == 1 else "steps"
        lines = [f"{self.num_steps} {steps} to make, {self.start + 1} to {self.last}, from {begin}."]
        if self.seconds is None:
            lines.append("The record has no times of them.")
        else:
            each = self.seconds / self.num_steps
            lines.append(
                f"As recorded that is {each:.3g} s a step, about {duration(self.seconds)} in all, and the time to "
                "load the model."
            )
        return [*lines, *self._expectation(), *self.notes]

    def _expectation(self) -> list[str]:
        if self.changed.trains_otherwise:
            lead = f"Steps {self.start + 1} to {self.first - 1} as recorded, then with" if self.has_lead else "With"
            return [f"{lead} {'; '.join(self.changed.lines())}."]
        if self.rounding:
            return [
                "Digests cannot be expected to be equal, so figures are compared: " + "; ".join(self.rounding) + "."
            ]
        return ["Every digest and every figure must be the recorded one."]

    @property
    def has_lead(self) -> bool:
        """Whether steps are made as recorded before the changed keys act."""
        return self.changed.trains_otherwise and self.start < self.first - 1


def make_plan(run_dir: Path, steps: str | None, settings: Sequence[str]) -> ReplayPlan:
    """Plan a replay.

    Raises:
        InputError: The folder is not a run directory, the log cannot make these steps, or a setting cannot act.
    """
    check_run_dir(run_dir)
    before = _recorded_environment(run_dir)
    try:
        keys = read_mapping(run_dir / CONFIG_NAME)
        recorded = change_keys(keys, run_dir, ()).config
    except InputError as error:
        now = version("gspo")
        if before.get("gspo") == now:
            raise
        rule = f"{error.rule}. gspo {before.get('gspo', 'of an unknown version')} made this run, and this is {now}"
        raise InputError(error.where, rule, f"{error.fix}; or replay it with that version") from error
    changed = change_keys(keys, run_dir, settings)
    log = RunLog(run_dir)
    versions = {record.version: record for record in log.versions()}
    logged = [step for step in log.step_files() if step in versions]
    starts = _starts(logged, list(whole_checkpoints(run_dir)))
    first, last = _range(steps, logged, starts)
    records = {record.step: record for record in log.steps()}
    plan_start = starts[first]
    _check_model(changed.config)
    _check_ranks(changed.config)
    _check_shapes(changed, plan_start)
    figures = [records[step].figures for step in range(plan_start + 1, last + 1) if step in records]
    seconds = [sum(of_step.get(name, 0.0) for name in _REPLAYED_S) for of_step in figures]
    rounding, notes = _compare_environments(changed, before)
    return ReplayPlan(
        run_dir.resolve(),
        recorded,
        changed,
        first,
        last,
        plan_start,
        records,
        versions,
        fmean(seconds) * (last - plan_start) if seconds and any(seconds) else None,
        tuple(rounding),
        (*notes, *_live_note(run_dir), *log.problems),
    )


def _starts(logged: Sequence[int], checkpoints: Sequence[int]) -> dict[int, int]:
    """Step -> the nearest version before it from which the log can make it: of a checkpoint, or 0."""
    starts: dict[int, int] = {}
    for step in logged:
        if step - 1 in checkpoints or step == 1:
            starts[step] = step - 1
        elif step - 1 in starts:
            starts[step] = starts[step - 1]
    return starts


def _range(text: str | None, logged: Sequence[int], starts: Mapping[int, int]) -> tuple[int, int]:
    """First and last step that the text asks for; the newest unbroken range where there is none.

    Raises:
        InputError: The text is not a range, or the log cannot make a step of it.
    """
    if not starts:
        raise InputError(
            "--steps",
            f"no step can be made again: the log has {_ranges(logged) or 'no step file with a recorded version'}"
            + (", and no checkpoint or step 1 leads there" if logged else ""),
            "A run that is to be replayed keeps its log: leave run.keep_log_steps out",
        )
    ranges = _unbroken(sorted(starts))
    if text is None:
        return ranges[-1][0], ranges[-1][-1]
    match = _STEPS.fullmatch(text.strip())
    if not match or not (match[1] or match[3]) or (match[3] and not match[2]):
        raise InputError("--steps", f"'{text}' is not a range of steps", _FORM)
    first = int(match[1]) if match[1] else min(starts)
    last = int(match[3]) if match[3] else (max(starts) if match[2] else first)
    if first > last:
        raise InputError("--steps", f"'{text}' begins after its end", _FORM)
    missing = next((step for step in range(first, last + 1) if step not in starts), None)
    if missing is not None:
        raise _missing(missing, logged, starts)
    return first, last


def _missing(step: int, logged: Sequence[int], starts: Mapping[int, int]) -> InputError:
    if step in logged:
        rule = f"step {step} is in the log, but no kept checkpoint leads there, nor does the log from step 1"
    else:
        rule = f"step {step} is not in the log"
    return InputError("--steps", f"{rule}, which can make {_ranges(sorted(starts))}", "Take steps in that range")


def _unbroken(steps: Sequence[int]) -> list[list[int]]:
    numbered = groupby(enumerate(steps), key=lambda item: item[1] - item[0])
    return [[step for _, step in part] for _, part in numbered]


def _ranges(steps: Sequence[int]) -> str:
    return ", ".join(f"{part[0]}..{part[-1]}" if len(part) > 1 else str(part[0]) for part in _unbroken(steps))


def _check_model(config: Config) -> None:
    """Refuse a folder that has moved since; another one's weights would show in the digest of the start."""
    path = Path(config.model.path)
    if path.is_absolute() and not path.is_dir():
        rule = f"{path}, the model that the run started from, is not a folder here"
        raise InputError("model.path", rule, f"Put it back, or add {OPTION} model.path=FOLDER")


def _check_ranks(config: Config) -> None:
    if not config.learner.ranks:
        raise InputError(
            "learner.ranks",
            "0: this run's ranks were started by hand, and a replay starts its own",
            f"Add {OPTION} learner.ranks=N; digests are equal only with as many as the run had",
        )


def _check_shapes(changed: ChangedKeys, start: int) -> None:
    shapes = [name for name in SHAPES if name in changed.values]
    if shapes and start:
        raise InputError(
            f"{OPTION} {shapes[0]}",
            f"gives adapters another shape than the checkpoint of step {start} has, where this replay starts",
            "Begin with --steps 1.., if the log has step 1",
        )


def _recorded_environment(run_dir: Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads((run_dir / ENVIRONMENT_NAME).read_text()))
    except (OSError, ValueError):
        return {}


def _compare_environments(changed: ChangedKeys, before: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Why rounding differs from the recorded run's, and notes on other differences."""
    now = environment(changed.config)
    names = [*_OF_BITS, *(() if changed.config.learner.threads else ("cores",))]
    rounding = [
        f"{name} was {before.get(name, 'not recorded')} and is {now.get(name, 'not installed')}"
        for name in names
        if before.get(name) != now.get(name)
    ]
    rounding += [line for name, line in zip(changed.values, changed.lines(), strict=True) if name in changed.rounding]
    notes = []
    if before.get("gspo") != now.get("gspo"):
        notes.append(
            f"gspo {before.get('gspo', 'of an unknown version')} made this run, and this is {now.get('gspo')}: "
            "a difference may be one of the code."
        )
    return rounding, notes


def _live_note(run_dir: Path) -> list[str]:
    """A sentence where the run's learner is at work on this machine; it reads the lock and takes none."""
    try:
        match = re.match(r"pid (\d+) ", (run_dir / "lock").read_text())
        if match and "gspo.learner" in " ".join(psutil.Process(int(match[1])).cmdline()):
            return ["The run is training: the replay shares the machine with it, and takes the steps recorded so far."]
    except (OSError, psutil.Error):
        pass
    return []
