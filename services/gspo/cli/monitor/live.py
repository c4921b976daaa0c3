"""The live terminal: progress, the figures that matter, and what every process is doing or waiting for.

It holds no state but the display: everything comes from view.py. Neighbour: screen.py for terminals without it.
"""

from __future__ import annotations

import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gspo.cli.monitor.screen import STYLES
from gspo.cli.monitor.verdict import in_one_line, verdict_of
from gspo.cli.monitor.view import ScreenLine, ServiceProcess, View, duration, evaluation_line
from gspo.common.streams.keys import GENERATION

# Waiting longer than this is worth a look.
LONG_WAIT_S = 5.0
# Place of the local flags in what termios gives.
_LOCAL_FLAGS = 3
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 32


class LiveScreen:
    """Draws the view in place; lines scroll above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._view: View | None = None
        self._echo = _Echo()
        self._live.start()

    def say(self, line: ScreenLine) -> None:
        """Print a line above; steps are in the panel."""
        if line.kind == "step":
            return
        label = f"{line.kind}: " if line.kind in ("warning", "error") else ""
        self._live.console.print(Text(label + line.text, STYLES[line.kind]), highlight=False)

    def show(self, view: View) -> None:
        """Draw."""
        self._view = view
        self._live.update(draw(view), refresh=True)

    def close(self) -> None:
        """Leave the progress and the figures on the terminal, without what processes did that have ended."""
        if self._view is not None:
            self._live.update(draw(self._view, ended=True), refresh=True)
        self._live.stop()
        self._echo.restore()


class _Echo:
    """Keeps the terminal from writing ^C into the drawing, which would move it by a line."""

    def __init__(self) -> None:
        self._before: Any = None
        if sys.stdin is None or not sys.stdin.isatty():
            return
        with suppress(termios.error, OSError):
            self._before = termios.tcgetattr(sys.stdin)
            quiet = [*self._before]
            quiet[_LOCAL_FLAGS] &= ~termios.ECHOCTL
            termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)

    def restore(self) -> None:
        """Leave the terminal as it was."""
        if self._before is not None:
            with suppress(termios.error, OSError):
                termios.tcsetattr(sys.stdin, termios.TCSANOW, self._before)


def draw(view: View, *, ended: bool = False) -> RenderableType:
    """The whole panel; at the end of a session without its processes, and without what Ctrl-C would do."""
    parts = [_progress(view), _figures(view), _held_out(view), _time(view)]
    title = f"[bold]gspo[/] {view.config.name} · {view.phases.current.replace('_', ' ')} "
    title += duration(view.phases.elapsed_s)
    return Panel(
        Group(*parts, *(() if ended else (Text(), _processes(view)))),
        title=title,
        subtitle=None if ended else "Ctrl-C stops at a checkpoint",
        title_align="left",
        subtitle_align="right",
    )


def _progress(view: View) -> RenderableType:
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    total = view.total_steps
    label = f"step [bold]{view.step}[/]" + (f" of {total}" if total else "")
    left = f"{duration(view.eta_s)} to go" if view.eta_s is not None else ""
    row.add_row(label, ProgressBar(total=total, completed=view.step) if total else "", left)
    return row


def _figures(view: View) -> RenderableType:
    table = Table.grid(padding=(0, 3))
    figures = view.figures
    reward = f"{figures['reward_mean']:.3f}" if "reward_mean" in figures else "-"
    table.add_row("reward", f"[bold]{reward}[/]", f"[green]{sparkline(view.rewards)}[/]", "")
    age = f"{figures['age_mean']:.2f} / {figures['age_max']:.0f}" if {"age_mean", "age_max"} <= figures.keys() else "-"
    table.add_row("token age, mean / max", age, "clipped", _share(figures.get("clipped_sequences")))
    live = f" (generators have {view.live_version})" if view.live_version not in (None, view.version) else ""
    speed = f"{figures['tokens_per_s']:,.0f}" if "tokens_per_s" in figures else "-"
    table.add_row("policy version", f"{view.version}{live}", "trained tokens/s", speed)
    return table


def _held_out(view: View) -> RenderableType:
    """Each held-out file in a line."""
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True)
    for file in view.config.evaluation.files:
        table.add_row(f"held-out, {file}" if file else "held-out reward", _held_out_text(view, file))
    return table


def _held_out_text(view: View, file: str) -> str:
    """Its newest mean, what it was at first, the other figures, and which version is the best."""
    sampled = [record for record in view.by_file.get(file, []) if "sampled_mean" in record.figures]
    if not sampled:
        return "[bold]-[/]"
    first, last = sampled[0], sampled[-1]
    parts = [f"[bold]{last.figures['sampled_mean']:.3f}[/] at version {last.version}"]
    if len(sampled) > 1:
        parts[0] += f" (was {first.figures['sampled_mean']:.3f} at {first.version})"
    parts += evaluation_line(last.figures).split(", ")[1:]
    wanted = view.config.best_figure
    if view.best is not None and wanted is not None and wanted.file == file:
        parts.append(f"best: version {view.best[0]}")
    return "  ".join(parts)


def _time(view: View) -> RenderableType:
    """Where a step's time goes, and which stage bounds the run."""
    num_generators = sum(process.service == GENERATION for process in view.processes.values())
    table = Table.grid(padding=(0, 3))
    if found := verdict_of(view, num_generators):
        table.add_row("step time", in_one_line(found))
        table.add_row("bound by", f"[bold]{found.stage}[/]" + (f": try {found.change[0]}" if found.change else ""))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _processes(view: View) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for process in view.processes.values():
        table.add_row(process.name, *process_cells(process))
    return table


def process_cells(process: ServiceProcess) -> tuple[Text, Text]:
    """('for 3 s', 'waiting for rewards of 3 groups'); highlighted where it waits longer than LONG_WAIT_S."""
    kind, what, since = process.doing()
    for_s = max(0.0, time.time() - since)
    if kind == "waiting":
        style = "bold yellow" if for_s > LONG_WAIT_S else "dim"
        return Text(duration(for_s), style), Text(f"waiting for {what}", style)
    problem = f" ({process.problem})" if process.problem and not process.ready else ""
    return Text(duration(for_s), "dim"), Text(what + problem, "green" if process.ready else "cyan")


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """The values as a row of bars, means of equal stretches where there are more than `width`."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(chunk) / len(chunk) for at in range(0, len(values), size) if (chunk := values[at : at + size])]
    low, high = min(means), max(means)
    if high == low:
        return _SPARKS[0] * len(means)
    return "".join(_SPARKS[round((mean - low) / (high - low) * (len(_SPARKS) - 1))] for mean in means)
