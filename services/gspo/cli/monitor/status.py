"""`gspo status`: what everyone in a run is doing or waiting for, now.

It changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gspo.cli.monitor.disk_space import disk_full_message
from gspo.cli.monitor.generators import generator_problems
from gspo.cli.monitor.live import process_cells
from gspo.cli.monitor.process_usage import ProcessUsage, UsageMeter
from gspo.cli.monitor.unscored import unscored_so_far
from gspo.cli.monitor.verdict import over_steps, step_time_table, verdict_lines, verdict_of
from gspo.cli.monitor.view import Phases, ServiceProcess, View, evaluation_line, load_history, step_line
from gspo.cli.rundir.plan import (
    COMPLETED,
    FAILED,
    PAGE_NAME,
    SUMMARY_NAME,
    check_run_dir,
    is_run_dir_locked,
    supervisor_facts,
)
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.network.credentials import redis_arguments, redis_refusal
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import GENERATION, Keys
from gspo.runlog.run_log import RunLog

_ANSWER_S = 3.0
_WATCH_S = 1.0
_PIPE_WIDTH = 10_000
# Narrower, and the addresses get a line of their own.
_WIDE = 130


def status(run_dir: Path | None, console: Console, *, watch: bool = False) -> None:
    """Print the state of a run; of the newest one under ./runs where none is given.

    Args:
        watch: Draw it again and again, with CPU and memory of each process, until Ctrl-C or until the run is over.

    Raises:
        InputError: There is no run, or Redis does not answer.
    """
    run_dir = run_dir or _newest(Path("runs"))
    check_run_dir(run_dir)
    look = StatusPage(run_dir, read_config(run_dir / CONFIG_NAME))
    if not watch:
        if not console.is_terminal:  # a pipe has no width: every line is whole there
            console = Console(file=console.file, width=_PIPE_WIDTH)
        console.print(look.page(asyncio.run(look.members())), highlight=False)
        return
    usage = UsageMeter()
    with _until_ctrl_c() as asked, Live(console=console, auto_refresh=False) as live:
        while look.runs and not asked.is_set():
            try:
                found = asyncio.run(look.members())
            except InputError:  # Redis is the last to start and the first to be missed
                found = []
            live.update(look.page(found, usage.look(found)), refresh=True)
            asked.wait(_WATCH_S)
        if not asked.is_set():
            live.update(look.page([]), refresh=True)


@contextmanager
def _until_ctrl_c() -> Iterator[threading.Event]:
    """Set by Ctrl-C. As an exception it could come amid a drawing, or be taken by an answer of Redis under way."""
    asked = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


class StatusPage:
    """Looks at one run, again and again; what it has logged is read again only where that has changed."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._run_dir, self._config = run_dir, config
        self._view, self._unscored = View(config, run_dir, {}, Phases()), ""
        self._read: tuple[int, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether somebody works on it, or may."""
        return is_run_dir_locked(self._run_dir) or self._config.services.redis_url is not None

    async def members(self) -> list[Instance]:
        """Everyone who is registered; nobody where the run does not go.

        Raises:
            InputError: Redis does not answer.
        """
        given = self._config.services.redis_url
        redis_url = given or str(supervisor_facts(self._run_dir).get("redis_url", ""))
        return await read_instances(redis_url, self._config) if self.runs else []

    def page(self, found: list[Instance], used: dict[str, ProcessUsage] | None = None) -> RenderableType:
        """The run so far, where a step's time goes, who does what; `used` adds what each process uses."""
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
        num_generators = sum(instance.service == GENERATION for instance in found) or self._config.generation.replicas
        if bound := verdict_of(view, num_generators):
            parts += ["", Text(over_steps(bound)), step_time_table(bound, view), *map(Text, verdict_lines(bound))]
        if not self.runs:
            return Group(*parts, Text(describe_end(run_dir, view.step)))
        if told := disk_full_message(run_dir):
            parts.append(Text(told, "yellow"))
        return Group(*parts, "", *instance_parts(found, used))

    def _history(self) -> View:
        """What is logged by now, under the configuration of now: a resume may have changed it."""
        now = (*RunLog(self._run_dir).sizes(), (self._run_dir / CONFIG_NAME).stat().st_mtime_ns)
        if now != self._read:
            self._config = read_config(self._run_dir / CONFIG_NAME)
            self._view, self._read = View(self._config, self._run_dir, {}, Phases()), now
            self._unscored = unscored_so_far(self._run_dir, load_history(self._view))
        return self._view


def describe_end(run_dir: Path, step: int) -> str:
    """How a run ended that came to its end at `step`, by its summary; of another, how to go on with it."""
    try:
        summary = json.loads((run_dir / SUMMARY_NAME).read_text())
    except (OSError, ValueError):
        summary = {}
    if summary.get("steps") != step or summary.get("end") not in (COMPLETED, FAILED):
        return f"not running. Go on with it: gspo run --resume {shlex.quote(str(run_dir))}"
    verb = "failed" if summary["end"] == FAILED else "finished"
    ended = f"{verb}: {summary['end_reason']}. Report: {run_dir / PAGE_NAME}"
    return f"{ended}\nTo train on, change what ended it: gspo run CONFIG.yaml --resume"


def _newest(folder: Path) -> Path:
    found = [path.parent for path in folder.glob(f"*/{CONFIG_NAME}")]
    if not found:
        raise InputError(str(folder), "holds no run directory", "Give one: gspo status path/to/run")
    return max(found, key=lambda path: path.stat().st_mtime)


async def read_instances(url: str, config: Config) -> list[Instance]:
    """Everyone who is registered with a run.

    Raises:
        InputError: Redis does not answer.
    """
    given = redis_arguments(url, config)
    redis = Redis.from_url(url, protocol=2, socket_connect_timeout=_ANSWER_S, socket_timeout=_ANSWER_S, **given)
    try:
        return await list_instances(redis, Keys(config.name))
    except (RedisError, OSError) as error:
        if refusal := redis_refusal(error):
            raise refusal from error
        raise InputError(
            "redis", f"does not answer ({error})", "The run may be starting or ending; try again"
        ) from error
    finally:
        await redis.aclose()


def instance_parts(found: list[Instance], used: dict[str, ProcessUsage] | None) -> list[RenderableType]:
    """Who does or waits for what, with CPU and memory where they are given, and the generators in trouble."""
    if not found:
        return ["no service has registered: the run is starting, or nobody works on it"]
    return [_InstancesTable(found, used), *(Text(line, "yellow") for line in generator_problems(found))]


@dataclass(frozen=True)
class _InstancesTable:
    """A row for each instance; where the terminal is narrow, a second one for its addresses."""

    found: list[Instance]
    used: dict[str, ProcessUsage] | None

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        is_wide = options.max_width >= _WIDE
        usage_columns = [] if self.used is None else ["CPU", "memory"]
        addresses = ["HTTP", "gRPC", "process"] if is_wide else []
        table = Table("service", "for", *usage_columns, "what", *addresses, box=None, header_style="dim")
        for column in table.columns:
            column.no_wrap, column.overflow = column.header != "what", "fold"
        for instance in self.found:
            process = ServiceProcess(instance.name, instance.beat_unix_s, instance, ready=True)
            for_, what = process_cells(process)
            cells = [] if self.used is None else _usage_cells(self.used.get(instance.uid))
            last = (instance.http, instance.grpc, str(instance.pid))
            table.add_row(instance.name, for_, *cells, what, *(last if is_wide else ()))
            if not is_wide:
                named = zip(("HTTP", "gRPC", "process"), last, strict=True)
                text = "  ".join(f"{name} {value}" for name, value in named if value)
                table.add_row("", "", *([""] * len(usage_columns)), Text(text, "dim"))
        yield table


def _usage_cells(used: ProcessUsage | None) -> list[str]:
    """('1.02 cores', '812 MiB'); a dash for what is not known: of another machine, or at the first look."""
    if used is None:
        return ["-", "-"]
    return ["-" if used.cpu is None else f"{used.cpu:.2f} cores", f"{used.memory_bytes / 2**20:,.0f} MiB"]
