"""`gspo replay`: says the cost, makes the steps in a folder of the replay's own, and compares them as they come."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from rich.console import Console

from gspo.cli.processes.exit_codes import RunError
from gspo.cli.replay.replay_folder import LEAD_CONFIG, check_folder, fill, take_loss
from gspo.cli.replay.replay_plan import ReplayPlan, make_plan
from gspo.cli.replay.replay_process import ReplayProcess
from gspo.cli.replay.replay_tables import print_result, result_of
from gspo.cli.replay.step_comparison import ComparedValue, StepComparison, first_difference
from gspo.cli.rundir.start import lock_run_dir
from gspo.common.config.loading import CONFIG_NAME
from gspo.common.errors import EXIT_FAILED, InputError
from gspo.common.host.durable_write import replace_file
from gspo.common.telemetry.step_time import duration
from gspo.runlog.checkpoint_files import CHECKPOINTS, whole_checkpoints
from gspo.runlog.memory_shortages import shortage_line
from gspo.runlog.run_log import LOG_FOLDER, RunLog, StepRecord
from gspo.view.picture.page import replay_file
from gspo.view.picture.replay_results import RESULT_NAME

PLOT_NAME = "replay.html"


@dataclass(frozen=True)
class ReplayRequest:
    """The arguments of `gspo replay`.

    Attributes:
        steps: Such as 10..20; None for all that the log can make.
        settings: KEY=VALUE of --with.
        until_differs: Stop at the first step that is not the recorded one.
        tolerance: Largest relative difference of figures, where rounding may differ.
        cost_only: Only say what it would make.
    """

    run_dir: Path
    steps: str | None = None
    settings: tuple[str, ...] = ()
    until_differs: bool = False
    out: Path | None = None
    tolerance: float = 0.01
    as_json: bool = False
    cost_only: bool = False


def replay(request: ReplayRequest, console: Console, progress: Console) -> int:
    """Replay, print, and return the exit code: 0 if nothing differs that must not, 1 otherwise.

    Args:
        progress: Where everything but the result goes.

    Raises:
        InputError: The input cannot work.
        RunError: A step could not be made.
        InterruptedRunError: The user stopped it.
    """
    if not 0 < request.tolerance < 1:
        raise InputError("--tolerance", f"{request.tolerance:g} is not between 0 and 1", "Give a share, such as 0.01")
    plan = make_plan(request.run_dir, request.steps, request.settings)
    path = check_folder(plan, request.out)
    for line in plan.describe():
        progress.print(line, highlight=False, soft_wrap=True)
    if request.cost_only:
        return 0
    _make_folder(path)
    with lock_run_dir(path):
        is_new = fill(plan, path)
        progress.print(f"{'Writing to' if is_new else 'Continuing in'} {path}", highlight=False, soft_wrap=True)
        steps = ReplayedSteps(plan, path, request, progress)
        error = None
        try:
            steps.make()
        except RunError as failure:
            if not steps.values:
                raise
            error = failure
        result = result_of(plan, path, steps.values)
        if plan.changed.trains_otherwise and any(value.difference is not None for value in steps.values):
            result["plot"] = str(path / PLOT_NAME)
            replace_file(path / PLOT_NAME, replay_file(path.name, plan.recorded.name, result))
        replace_file(path / RESULT_NAME, (json.dumps(result, indent=2) + "\n").encode())
    if request.as_json:
        console.print_json(json.dumps(result)) if console.is_terminal else print(json.dumps(result, indent=2))
    else:
        print_result(plan, result, steps.values, console)
    if error is not None:
        raise error
    return EXIT_FAILED if steps.first_difference is not None else 0


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"{path} cannot be written ({error.strerror})"
        raise InputError("--out", rule, "Name a folder on a disk where you may write") from error


@dataclass
class ReplayedSteps:
    """The steps of one replay, compared as they come.

    Attributes:
        values: Compared so far: by step, the digest first. Those of the start are its digest alone.
    """

    plan: ReplayPlan
    path: Path
    request: ReplayRequest
    progress: Console
    values: list[ComparedValue] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._log = RunLog(self.path)
        tolerance = self.request.tolerance if self.plan.rounding else None
        self._comparison = StepComparison(tolerance, self.plan.steps, self.path / LOG_FOLDER)
        self._compared: set[int] = set()
        self._sizes: tuple[int, ...] = ()
        self._is_running, self._began_s, self._num_before = False, 0.0, 0

    @property
    def first_difference(self) -> ComparedValue | None:
        """The first one that must not be: under other keys only those before they act, unless they are asked for."""
        values: Sequence[ComparedValue] = self.values
        if self.plan.changed.trains_otherwise and not self.request.until_differs:
            values = [value for value in values if value.step < self.plan.first]
        return first_difference(values)

    def make(self) -> None:
        """Make the steps that are not there yet; a finished replay starts no process.

        Raises:
            RunError: A step could not be made.
            InterruptedRunError: The user stopped it.
        """
        is_over, plan = self._is_enough(), self.plan
        self._is_running, self._began_s, self._num_before = True, time.monotonic(), len(self._compared)
        if not is_over and plan.has_lead and max(whole_checkpoints(self.path), default=0) < plan.first - 1:
            self._run(LEAD_CONFIG, plan.first - 1, lead=True)
            is_over = self._is_enough()
        if not is_over:
            self._run(CONFIG_NAME, plan.last, lead=False)
        if self._is_complete:
            shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        elif not (self.request.until_differs and self.first_difference):
            raise RunError(f"the replay ended before step {plan.last}; its log is in {self.path / 'services'}")

    @property
    def _is_complete(self) -> bool:
        return {*range(self.plan.start, self.plan.last + 1)} <= self._compared

    def _run(self, config: str, last: int, *, lead: bool) -> None:
        take_loss(self.plan, self.path, lead=lead)
        arguments = [config, "--last", str(last)]
        if not lead and self.plan.changed.configured:
            arguments += ["--configured", *self.plan.changed.configured]
        if not lead and self.plan.changed.reassembles:
            arguments += ["--reassembled"]
        patience_s = self.plan.recorded.run.drain_timeout_s
        self._say("loading the model")
        while ReplayProcess(self.path, arguments, patience_s, self._say).run(self._is_enough):
            self._say(shortage_line(self._log.shortages()))

    def _say(self, text: str) -> None:
        self.progress.print(text, highlight=False, soft_wrap=True)

    def _is_enough(self) -> bool:
        """Compare the steps that have come since the last call; whether no more are needed."""
        sizes = self._log.sizes()
        if sizes != self._sizes or self.plan.start not in self._compared:
            self._sizes = sizes
            self._compare_new()
        return self._is_complete or bool(self.request.until_differs and self.first_difference)

    def _compare_new(self) -> None:
        versions = {record.version: record for record in self._log.versions()}
        start = self.plan.start
        if start in versions and start not in self._compared:
            self._add(start, [self._comparison.version(self.plan.versions.get(start), versions[start])])
        records: dict[int, StepRecord | None] = dict.fromkeys(self._log.left_out())
        records |= {record.step: record for record in self._log.steps()}
        for step, record in sorted(records.items(), key=itemgetter(0)):
            if step in self._compared or step not in versions or not start < step <= self.plan.last:
                continue
            digest = self._comparison.version(self.plan.versions.get(step), versions[step])
            values = [digest, *(self._comparison.figures(record) if record else ())]
            self._add(step, values)
            if self._is_running:
                self._say(self._progress_line(step, values))
            if self.request.until_differs and self.first_difference:
                return

    def _add(self, step: int, values: list[ComparedValue]) -> None:
        self._compared.add(step)
        self.values += values

    def _progress_line(self, step: int, values: Sequence[ComparedValue]) -> str:
        differing = [value.name for value in values if value.is_equal is False]
        verdict = f"differs ({', '.join(differing[:3])})" if differing else "as recorded"
        if self.plan.changed.trains_otherwise and step >= self.plan.first:
            verdict = "made"
        num_new = len(self._compared) - self._num_before
        each_s = (time.monotonic() - self._began_s) / max(1, num_new)
        remaining_s = duration(each_s * (self.plan.last - step))
        return f"step {step} of {self.plan.last}: {verdict}; about {remaining_s} left"
