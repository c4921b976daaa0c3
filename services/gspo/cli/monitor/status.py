"""`gspo status`: the progress of a run, what bounds it, and what each of its processes does. It changes nothing."""

from __future__ import annotations

import asyncio
import shlex
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gspo.cli.monitor.page_call import page_line
from gspo.cli.monitor.screens import process_cells
from gspo.cli.monitor.view import (
    Phases,
    ServiceProcess,
    View,
    card_use_line,
    evaluation_line,
    left_out_line,
    load_history,
    mismatch_line,
    step_line,
    unscored_so_far,
)
from gspo.cli.monitor.watcher import disk_full_message, generator_problems
from gspo.cli.rundir.open_run import open_run, read_instances
from gspo.cli.rundir.start import COMPLETED, FAILED, PAGE_NAME, RecordedEnd, is_run_dir_locked, supervisor_facts
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.streams.instances import Instance
from gspo.common.streams.keys import COORDINATOR, GENERATION
from gspo.common.telemetry.advice import Verdict, verdict
from gspo.common.telemetry.clip_causes import clip_causes_line
from gspo.common.telemetry.learning import learning_findings
from gspo.common.telemetry.step_time import seconds_beside, seconds_by_function
from gspo.runlog.memory_shortages import shortage_line
from gspo.runlog.run_log import RunLog
from gspo.runlog.token_ledger import TokenLedger

_WATCH_S, _BAR_WIDTH = 1.0, 24
_PIPE_WIDTH = 10_000
# In a narrower terminal the addresses get a line of their own.
_WIDE = 130


def status(run_dir: Path | None, console: Console, *, watch: bool = False) -> None:
    """Print the state of a run, or of the newest run under ./runs.

    Args:
        watch: Draw it again and again, with CPU and memory of each process, until Ctrl-C or the end of the run.

    Raises:
        InputError: There is no run, or Redis does not answer.
    """
    run = open_run(run_dir, fix="Give one: gspo status path/to/run")
    status_page = StatusPage(run.run_dir, run.config)
    if not watch:
        if not console.is_terminal:  # a pipe has no width: every line is whole there
            console = Console(file=console.file, width=_PIPE_WIDTH)
        instances = asyncio.run(status_page.instances())
        console.print(status_page.draw(instances), highlight=False)
        for coordinator in (instance for instance in instances if instance.service == COORDINATOR):
            console.print(Text(page_line(coordinator, run.config)), soft_wrap=True)
        return
    meter = UsageMeter()
    is_stopped = False
    # Ctrl-C waits while it is blocked: as an exception it could interrupt a drawing, or be lost in a call of Redis.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with Live(console=console, auto_refresh=False) as live:
            while status_page.is_running and not is_stopped:
                try:
                    instances = asyncio.run(status_page.instances())
                except InputError:  # during start and shutdown there is no Redis
                    instances = []
                live.update(status_page.draw(instances, meter.measure(instances)), refresh=True)
                is_stopped = signal.sigtimedwait({signal.SIGINT}, _WATCH_S) is not None
            if not is_stopped:
                live.update(status_page.draw([]), refresh=True)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class StatusPage:
    """The state of one run; its log is read again only after it has changed."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run_dir, self._config = run_dir, config
        self._view, self._unscored = View(config, run_dir, {}, Phases()), ""
        self._ledger: TokenLedger | None = None
        self._read: tuple[int, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether processes work on the run, or may: with a Redis of the user they can be on other machines."""
        return is_run_dir_locked(self._run_dir) or self._config.services.redis_url is not None

    async def instances(self) -> list[Instance]:
        """The registered processes; none if the run does not run.

        Raises:
            InputError: Redis does not answer.
        """
        redis_url = self._config.services.redis_url or str(supervisor_facts(self._run_dir).get("redis_url", ""))
        return await read_instances(redis_url, self._config) if self.is_running else []

    def draw(self, instances: list[Instance], usage: dict[str, ProcessUsage] | None = None) -> RenderableType:
        """The progress of the run, the time of a step, and the processes.

        Args:
            usage: CPU and memory by uid of the instance; None leaves their columns out.
        """
        view, run_dir = self._history(), self._run_dir
        parts: list[RenderableType] = [Text(str(run_dir), "bold")]
        parts.append(Text(step_line(view) if view.step else "no step trained yet"))
        for file, (*_, last) in view.by_file.items():
            line = evaluation_line(last.figures)
            parts.append(Text(f"{file or 'held-out prompts'} at version {last.version}: {line}"))
        if view.best is not None:
            parts.append(Text(f"best by {self._config.evaluation.keep_best}: version {view.best[0]}"))
        if self._unscored:
            parts.append(Text(self._unscored, "yellow"))
        parts += [Text(text, "yellow") for text in learning_findings(list(view.steps), self._config).values()]
        if mismatch := mismatch_line(list(view.steps), self._config):
            parts.append(Text(mismatch))
        if causes := clip_causes_line(list(view.steps), self._config):
            parts.append(Text(causes))
        if shortage := shortage_line(RunLog(run_dir).shortages()):
            parts.append(Text(shortage, "yellow"))
        if left_out := left_out_line(RunLog(run_dir).left_out()):
            parts.append(Text(left_out, "yellow"))
        if self._ledger is not None:
            parts.append(Text(self._ledger.line, "yellow" if self._ledger.warning else ""))
        replicas = self._config.generation.replicas
        num_generators = sum(instance.service == GENERATION for instance in instances) or replicas
        if bound := verdict(list(view.steps), self._config, num_generators):
            parts += _step_time(bound, list(view.steps))
        if not self.is_running:
            return Group(*parts, Text(describe_end(run_dir, view.step)))
        if message := disk_full_message(run_dir):
            parts.append(Text(message, "yellow"))
        return Group(
            *parts,
            "",
            *instance_parts(instances, usage),
            *shift_lines(instances),
            *draft_lines(instances),
            *curriculum_lines(instances),
        )

    def _history(self) -> View:
        """The view of the current log, under the current configuration: a resume may have changed it."""
        state = (*RunLog(self._run_dir).sizes(), (self._run_dir / CONFIG_NAME).stat().st_mtime_ns)
        if state != self._read:
            self._config = read_config(self._run_dir / CONFIG_NAME)
            self._view, self._read = View(self._config, self._run_dir, {}, Phases()), state
            self._ledger = RunLog(self._run_dir).ledger()
            self._unscored = unscored_so_far(self._run_dir, load_history(self._view))
        return self._view


def _step_time(bound: Verdict, steps: Sequence[dict[str, float]]) -> list[RenderableType]:
    """The time of a step by cause, the longest first; the stage that bounds the run, and what to try against it."""
    mean = f", the mean of the last {bound.steps} steps" if bound.steps > 1 else ""
    functions = seconds_by_function(*steps[-bound.steps :])
    table = Table.grid(padding=(0, 2))
    for share in bound.shares:
        bar = ProgressBar(1.0, share.share, _BAR_WIDTH)
        names = f" ({', '.join(functions)})" if share.cause == "reward" and functions else ""
        table.add_row(f"{share.share:4.0%}", f"{share.seconds:.2f} s", bar, share.in_words + names)
    for words, seconds in seconds_beside(*steps[-bound.steps :]).items():
        table.add_row("", f"{seconds:.2f} s", "", words)
    lines = [use] if (use := card_use_line(steps[-bound.steps :])) else []
    lines += [f"bound by {bound.stage}: {bound.because}", *(f"  try {change}" for change in bound.change)]
    return ["", Text(f"a step takes {bound.seconds:.2f} s{mean}:"), table, *map(Text, lines)]


def describe_end(run_dir: Path, step: int) -> str:
    """How a run ended at `step`; how to continue it if it was stopped, killed, or trained more steps since."""
    recorded = RecordedEnd.read(run_dir)
    if recorded.steps != step or recorded.end not in (COMPLETED, FAILED):
        return f"not running. Continue it: gspo run --resume {shlex.quote(str(run_dir))}"
    verb = "failed" if recorded.end == FAILED else "finished"
    ended = f"{verb}: {recorded.reason}. Report: {run_dir / PAGE_NAME}"
    return f"{ended}\nTo train on, change the key that ended it: gspo run CONFIG.yaml --resume"


def instance_parts(instances: Sequence[Instance], usage: dict[str, ProcessUsage] | None) -> list[RenderableType]:
    """The table of the processes, and lines about generators with failed or long pushes."""
    if not instances:
        return ["no service has registered: the run is starting, or no process works on it"]
    return [_InstancesTable(instances, usage), *(Text(line, "yellow") for line in generator_problems(instances))]


def shift_lines(instances: Iterable[Instance]) -> list[str]:
    """The present user of shared cards, and since when; nothing where no cards are shared."""
    shifts = [shift for instance in instances if (shift := instance.facts.get("shift"))]
    return [f"{_card_users(shift)}, for {time.time() - shift['since_unix_s']:.0f} s" for shift in shifts]


def draft_lines(instances: Iterable[Instance]) -> list[str]:
    """The share of draft tokens that was accepted by each generator since its start; nothing without drafts."""
    proposed = {i.name: drafts for i in instances if (drafts := i.facts.get("drafts")) and drafts["proposed"]}
    return [
        f"{name}: {drafts['accepted'] / drafts['proposed']:.0%} of {drafts['proposed']:,} draft tokens were accepted"
        for name, drafts in proposed.items()
    ]


def curriculum_lines(instances: Iterable[Instance]) -> list[str]:
    """Of each source, the prompts that data.curriculum visits less often; nothing without a curriculum."""
    rows = [row for instance in instances for row in instance.facts.get("curriculum", ())]
    return [
        f"curriculum{' of ' + row['source'] if row['source'] else ''}: {row['equal']} of {row['prompts']} prompts had "
        f"equal rewards at their last visit; {row['passes']} passes are done"
        for row in rows
    ]


def _card_users(shift: Mapping[str, Any]) -> str:
    if shift["side"] == "learning":
        return f"the learner has the cards ({shift['purpose']})"
    return "the generators have the cards"


@dataclass(frozen=True)
class ProcessUsage:
    """The use of one service's process and its children.

    Attributes:
        cpu: Cores, on average since the last measurement; None at the first.
        memory_bytes: Resident; memory that children share with their parent counts once for each.
    """

    cpu: float | None = None
    memory_bytes: int | None = None

    def cells(self) -> list[str]:
        """('1.02 cores', '812 MiB'); dashes for a process of another machine, or before the second measurement."""
        memory = "-" if self.memory_bytes is None else f"{self.memory_bytes / 2**20:,.0f} MiB"
        return ["-" if self.cpu is None else f"{self.cpu:.2f} cores", memory]


@dataclass(frozen=True)
class _InstancesTable:
    """A row for each instance; in a narrow terminal, a second row for its addresses."""

    instances: Sequence[Instance]
    usage: dict[str, ProcessUsage] | None

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        is_wide = options.max_width >= _WIDE
        usage_columns = [] if self.usage is None else ["CPU", "memory"]
        addresses = ["HTTP", "gRPC", "process"] if is_wide else []
        table = Table("service", "for", *usage_columns, "what", *addresses, box=None, header_style="dim")
        for column in table.columns:
            column.no_wrap, column.overflow = column.header != "what", "fold"
        for instance in self.instances:
            process = ServiceProcess(instance.name, instance.beat_unix_s, instance, ready=True)
            for_, what = process_cells(process)
            cells = [] if self.usage is None else self.usage.get(instance.uid, ProcessUsage()).cells()
            last = (instance.http, instance.grpc, str(instance.pid))
            table.add_row(instance.name, for_, *cells, what, *(last if is_wide else ()))
            if not is_wide:
                named = zip(("HTTP", "gRPC", "process"), last, strict=True)
                text = "  ".join(f"{name} {value}" for name, value in named if value)
                table.add_row("", "", *([""] * len(usage_columns)), Text(text, "dim"))
        yield table


class UsageMeter:
    """Measures CPU and memory of the run's processes on this machine, with their child processes.

    A process counts only if its command line has the name of the instance: the process id of another machine or
    container may belong to a foreign process here.
    """

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def measure(self, instances: Iterable[Instance]) -> dict[str, ProcessUsage]:
        """The use by uid of the instance, without instances of other machines."""
        usage: dict[str, ProcessUsage] = {}
        measured: dict[int, psutil.Process] = {}
        for instance in instances:
            try:
                process = self._known.get(instance.pid) or psutil.Process(instance.pid)
                if instance.name not in process.cmdline():
                    continue
                family = [process, *process.children(recursive=True)]
            except psutil.Error:
                continue
            percent, memory, is_first = 0.0, 0, True
            for member in family:
                known = self._known.get(member.pid)
                try:
                    is_first = is_first and known is None
                    percent += (known or member).cpu_percent(None)
                    memory += member.memory_info().rss
                except psutil.Error:
                    continue  # it has just ended
                measured[member.pid] = known or member
            usage[instance.uid] = ProcessUsage(None if is_first else percent / 100, memory)
        self._known = measured
        return usage
