"""Draws a run and its processes with rich: `gspo status` in full, the live panel of `gspo run` in short."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gspo.cli.monitor.process_usage import ProcessUsage
from gspo.cli.monitor.view import ServiceProcess, View, step_line
from gspo.cli.monitor.watcher import generator_problems
from gspo.common.streams.instances import Instance
from gspo.common.telemetry.advice import Verdict, verdict
from gspo.common.telemetry.clip_causes import clip_causes_line, mismatch_line
from gspo.common.telemetry.gpu_use import gpu_use_line
from gspo.common.telemetry.step_time import duration, overlapped_seconds, seconds_by_function
from gspo.runlog.sentences.held_out import best_choice, change_in_words, difference

STYLES = {"step": "", "note": "cyan", "warning": "yellow", "error": "bold red"}
# A longer wait is highlighted.
_LONG_WAIT_S = 5.0
# The largest causes of a step's time in the live panel.
_CAUSES_SHOWN, _BAR_WIDTH = 3, 24
# In a narrower terminal the addresses get a line of their own.
_WIDE = 130


def run_parts(view: View, num_generators: int, *, is_short: bool = False) -> list[RenderableType]:
    """The newest step, the held-out results, findings, the time of a step, and the stage that bounds it.

    Args:
        is_short: With the largest causes alone. It lacks the findings, which the terminal shows as lines.
    """
    steps, config = list(view.steps), view.config
    parts: list[RenderableType] = [Text(step_line(view) if view.step else "no step trained yet")]
    if view.live_version not in (None, view.version):
        parts.append(Text(f"generators have version {view.live_version}"))
    for file, records in view.by_file.items():
        first, last = records[0], records[-1]
        change = difference(first.figures, last.figures) if first is not last else None
        words = change_in_words(*change) if change else ""
        since = f" ({f'{words} since' if words else 'first at'} version {first.version})" if first is not last else ""
        parts.append(Text(f"{file or 'held-out prompts'} at version {last.version}: {last.line}{since}"))
    if (best := best_choice(view.evaluations, config)) is not None:
        parts.append(Text(f"best version: {best.line}"))
    if not is_short:
        parts += [Text(finding.text, "yellow") for finding in view.findings.values()]
        parts += [Text(line) for line in (mismatch_line(steps, config), clip_causes_line(steps, config)) if line]
        parts += [Text(note.text, "yellow" if note.kind == "warning" else "") for note in view.notes]
    if bound := verdict(steps, config, num_generators):
        parts += _short_time(bound) if is_short else _step_time(bound, steps)
    return parts


def _step_time(bound: Verdict, steps: Sequence[dict[str, float]]) -> list[RenderableType]:
    """The time of a step by cause, the longest first; the stage that bounds the run, and what to try against it."""
    mean = f", the mean of the last {bound.steps} steps" if bound.steps > 1 else ""
    functions = seconds_by_function(*steps[-bound.steps :])
    table = Table.grid(padding=(0, 2))
    for share in bound.shares:
        bar = ProgressBar(1.0, share.share, _BAR_WIDTH)
        names = f" ({', '.join(functions)})" if share.cause == "reward" and functions else ""
        table.add_row(f"{share.share:4.0%}", f"{share.seconds:.2f} s", bar, share.in_words + names)
    for words, seconds in overlapped_seconds(*steps[-bound.steps :]).items():
        table.add_row("", f"{seconds:.2f} s", "", words)
    lines = [use] if (use := gpu_use_line(steps[-bound.steps :])) else []
    lines += [f"bound by {bound.stage}: {bound.because}", *(f"  try {change}" for change in bound.change)]
    return ["", Text(f"a step takes {bound.seconds:.2f} s{mean}:"), table, *map(Text, lines)]


def _short_time(bound: Verdict) -> list[RenderableType]:
    causes = "  ".join(f"{share.share:.0%} {share.in_words}" for share in bound.shares[:_CAUSES_SHOWN])
    change = f": try {bound.change[0]}" if bound.change else ""
    return [Text(f"step time: {causes}"), Text(f"bound by {bound.stage}{change}")]


def instance_parts(instances: Sequence[Instance], usage: dict[str, ProcessUsage] | None) -> list[RenderableType]:
    """The table of the registered processes, and lines about generators with failed or long pushes."""
    if not instances:
        return ["no service has registered: the run is starting, or no process works on it"]
    processes = [ServiceProcess(instance.name, instance.beat_unix_s, instance, ready=True) for instance in instances]
    return [ProcessTable(processes, usage), *(Text(line, "yellow") for line in generator_problems(instances))]


@dataclass(frozen=True)
class ProcessTable:
    """A row for each process; in a narrow terminal, a second row for its addresses.

    Attributes:
        usage: CPU and memory by uid of the instance; None leaves their columns out.
    """

    processes: Sequence[ServiceProcess]
    usage: dict[str, ProcessUsage] | None = None
    has_addresses: bool = True

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        is_wide = options.max_width >= _WIDE
        usage_columns = [] if self.usage is None else ["CPU", "memory"]
        addresses = ["HTTP", "gRPC", "process"] if self.has_addresses else []
        table = Table(
            "service", "for", *usage_columns, "what", *(addresses if is_wide else ()), box=None, header_style="dim"
        )
        for column in table.columns:
            column.no_wrap, column.overflow = column.header != "what", "fold"
        for process in self.processes:
            for_, what = process_cells(process)
            instance = process.instance
            uid = instance.uid if instance else ""
            cells = [] if self.usage is None else self.usage.get(uid, ProcessUsage()).cells()
            last = (instance.http, instance.grpc, str(instance.pid)) if instance and self.has_addresses else ()
            table.add_row(process.name, for_, *cells, what, *(last if is_wide else ()))
            if last and not is_wide:
                named = zip(addresses, last, strict=True)
                text = "  ".join(f"{name} {value}" for name, value in named if value)
                table.add_row("", "", *([""] * len(usage_columns)), Text(text, "dim"))
        yield table


def process_cells(process: ServiceProcess) -> tuple[Text, Text]:
    """('3 s', 'waiting for rewards of 3 groups'); highlighted if it waits longer than _LONG_WAIT_S."""
    kind, what, since = process.doing()
    for_s = max(0.0, time.time() - since)
    if kind == "waiting":
        style = "bold yellow" if for_s > _LONG_WAIT_S else "dim"
        return Text(duration(for_s), style), Text(f"waiting for {what}", style)
    problem = f" ({process.problem})" if process.problem and not process.ready else ""
    return Text(duration(for_s), "dim"), Text(what + problem, "green" if process.ready else "cyan")
