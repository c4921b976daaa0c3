"""`gspo status`: the progress of a run, what bounds it, and what each of its processes does. It changes nothing."""

import asyncio
import shlex
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gspo.cli.monitor.drawing import instance_parts, run_parts
from gspo.cli.monitor.page_call import page_line
from gspo.cli.monitor.process_usage import ProcessUsage, UsageMeter
from gspo.cli.monitor.view import Phases, ScreenLine, View, load_history
from gspo.cli.monitor.watcher import disk_full_message
from gspo.cli.rundir.open_run import open_run, read_instances
from gspo.cli.rundir.start import RecordedEnd, is_run_dir_locked, supervisor_facts
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.streams.entries import COMPLETED, FAILED
from gspo.common.streams.instances import Instance
from gspo.common.streams.keys import COORDINATOR, GENERATION
from gspo.runlog.left_out import left_out_line
from gspo.runlog.memory_shortages import shortage_line
from gspo.runlog.run_log import PAGE_NAME, RunLog
from gspo.runlog.sentences.unscored import unscored_so_far

_WATCH_S = 1.0
_PIPE_WIDTH = 10_000


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
        self._view = View(config, run_dir, {}, Phases())
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
        view = self._history()
        num_generators = sum(instance.service == GENERATION for instance in instances)
        parts = run_parts(view, num_generators or self._config.generation.replicas)
        parts.insert(0, Text(str(self._run_dir), "bold"))
        if not self.is_running:
            return Group(*parts, Text(describe_end(self._run_dir, view.step)))
        if message := disk_full_message(self._run_dir):
            parts.append(Text(message, "yellow"))
        if line := count_line(instances, supervisor_facts(self._run_dir).get("counts", {})):
            parts.append(Text(line, "yellow"))
        return Group(*parts, "", *instance_parts(instances, usage), *instance_lines(instances))

    def _history(self) -> View:
        """The view of the current log, under the current configuration: a resume may have changed it."""
        log = RunLog(self._run_dir)
        state = (*log.sizes(), (self._run_dir / CONFIG_NAME).stat().st_mtime_ns)
        if state != self._read:
            self._config = read_config(self._run_dir / CONFIG_NAME)
            self._view, self._read = View(self._config, self._run_dir, {}, Phases()), state
            steps, ledger = load_history(self._view), log.ledger()
            warnings = [unscored_so_far(self._run_dir, steps), shortage_line(log.shortages())]
            warnings += [left_out_line(log.left_out()), *(check.text for check in log.checks())]
            self._view.notes = [ScreenLine(text, "warning") for text in warnings if text]
            if ledger is not None:
                self._view.notes.append(ScreenLine(ledger.line, "warning" if ledger.warning else "note"))
        return self._view


def describe_end(run_dir: Path, step: int) -> str:
    """How a run ended at `step`; how to continue it if it was stopped, killed, or trained more steps since."""
    recorded = RecordedEnd.read(run_dir)
    if recorded.steps != step or recorded.end not in (COMPLETED, FAILED):
        return f"not running. Continue it: gspo run --resume {shlex.quote(str(run_dir))}"
    verb = "failed" if recorded.end == FAILED else "finished"
    ended = f"{verb}: {recorded.reason}. Report: {run_dir / PAGE_NAME}"
    return f"{ended}\nTo train on, change the key that ended it: gspo run CONFIG.yaml --resume"


def count_line(instances: Iterable[Instance], counts: Mapping[str, int]) -> str:
    """The services of which fewer or more processes run than they should have; empty where there are none."""
    running = Counter({instance.name: instance.service for instance in instances}.values())
    others = [
        f"{service} {running[service]} of {number}" for service, number in counts.items() if running[service] != number
    ]
    return f"running: {', '.join(others)}" if others else ""


def instance_lines(instances: Sequence[Instance]) -> list[str]:
    """Further facts of the heartbeats: shared GPUs, drafts, and the curriculum."""
    return [*_shift_lines(instances), *_draft_lines(instances), *curriculum_lines(instances)]


def _shift_lines(instances: Iterable[Instance]) -> list[str]:
    """The present user of shared GPUs, and since when; nothing where no GPUs are shared."""
    lines = []
    for shift in filter(None, (instance.facts.get("shift") for instance in instances)):
        learns, for_s = shift["side"] == "learning", time.time() - shift["since_unix_s"]
        users = f"the learner has the GPUs ({shift['purpose']})" if learns else "the generators have the GPUs"
        lines.append(f"{users}, for {for_s:.0f} s")
    return lines


def _draft_lines(instances: Iterable[Instance]) -> list[str]:
    """The share of draft tokens that was accepted by each generator since its start; nothing without drafts."""
    proposed = {i.name: drafts for i in instances if (drafts := i.facts.get("drafts")) and drafts["proposed"]}
    return [
        f"{name}: {drafts['accepted'] / drafts['proposed']:.0%} of {drafts['proposed']:,} draft tokens were accepted"
        for name, drafts in proposed.items()
    ]


def curriculum_lines(instances: Iterable[Instance]) -> list[str]:
    """For each source, the prompts that data.curriculum visits less often; nothing without a curriculum."""
    rows = [row for instance in instances for row in instance.facts.get("curriculum", ())]
    return [
        f"curriculum{' of ' + row['source'] if row['source'] else ''}: {row['equal']} of {row['prompts']} prompts had "
        f"equal rewards at their last visit; {row['passes']} passes are done"
        for row in rows
    ]
