"""The screens of a run: a live panel in a terminal, or plain lines elsewhere. All content comes from the view."""

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

from gspo.cli.monitor.view import ScreenLine, ServiceProcess, View, duration, evaluation_line
from gspo.common.streams.keys import GENERATION
from gspo.common.telemetry.advice import verdict

_STYLES = {"step": "", "note": "cyan", "warning": "yellow", "error": "bold red"}
# Seconds between lines about the start, without a live panel.
_QUIET_S = 10.0
# A longer wait is highlighted.
LONG_WAIT_S = 5.0
# Index of the local flags in the list of termios.
_LOCAL_FLAGS = 3
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 32


def open_screen(console: Console, *, plain: bool) -> PlainScreen | LiveScreen:
    """A live panel in a terminal; plain lines elsewhere, or with `plain`."""
    return PlainScreen(console) if plain or not console.is_terminal else LiveScreen(console)


class PlainScreen:
    """A line for each step and each event, with the time of day."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_line = time.monotonic()

    def say(self, line: ScreenLine) -> None:
        """Print the line."""
        text = Text(f"{time.strftime('%H:%M:%S')}  {_with_label(line)}", _STYLES[line.kind])
        self._console.print(text, soft_wrap=True, highlight=False)
        self._last_line = time.monotonic()

    def show(self, view: View) -> None:
        """While services start, print every _QUIET_S which of them are not ready."""
        if view.phases.current == "start" and time.monotonic() - self._last_line > _QUIET_S:
            num_ready = len(view.processes) - len(view.waiting_to_start)
            self.say(ScreenLine(f"{num_ready} of {len(view.processes)} services are ready. {view.waited_for()}"))

    def close(self) -> None:
        """Do nothing: plain lines need no restoring."""


class LiveScreen:
    """Draws the view in place; lines scroll above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._view: View | None = None
        self._flags = _hide_ctrl_c()
        self._live.start()

    def say(self, line: ScreenLine) -> None:
        """Print a line above the panel; steps are in the panel."""
        if line.kind != "step":
            self._live.console.print(Text(_with_label(line), _STYLES[line.kind]), highlight=False)

    def show(self, view: View) -> None:
        """Draw."""
        self._view = view
        self._live.update(draw(view), refresh=True)

    def close(self) -> None:
        """Leave the progress and the figures on the terminal, without the ended processes."""
        if self._view is not None:
            self._live.update(draw(self._view, ended=True), refresh=True)
        self._live.stop()
        if self._flags is not None:
            with suppress(termios.error, OSError):
                termios.tcsetattr(sys.stdin, termios.TCSANOW, self._flags)


def _hide_ctrl_c() -> list[Any] | None:
    """Keep the terminal from writing ^C into the panel, which would move it by a line; returns the flags before."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None
    with suppress(termios.error, OSError):
        before = termios.tcgetattr(sys.stdin)
        quiet = [*before]
        quiet[_LOCAL_FLAGS] &= ~termios.ECHOCTL
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
        return before
    return None


def _with_label(line: ScreenLine) -> str:
    return f"{line.kind}: {line.text}" if line.kind in ("warning", "error") else line.text


def draw(view: View, *, ended: bool = False) -> RenderableType:
    """The whole panel; at the end of a session without processes and without the hint about Ctrl-C."""
    processes = Table.grid(padding=(0, 2))
    processes.add_column(no_wrap=True)
    processes.add_column(no_wrap=True)
    for process in view.processes.values():
        processes.add_row(process.name, *process_cells(process))
    parts = [_progress(view), _figures(view), _evaluations(view), _step_time(view)]
    title = f"[bold]gspo[/] {view.config.name} · {view.phases.current.replace('_', ' ')} "
    title += duration(view.phases.elapsed_s)
    return Panel(
        Group(*parts, *(() if ended else (Text(), processes))),
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
    to_go = f"{duration(view.eta_s)} to go" if view.eta_s is not None else ""
    row.add_row(label, ProgressBar(total=total, completed=view.step) if total else "", to_go)
    return row


def _figures(view: View) -> RenderableType:
    table = Table.grid(padding=(0, 3))
    figures = view.figures
    reward = f"{figures['reward_mean']:.3f}" if "reward_mean" in figures else "-"
    table.add_row("reward", f"[bold]{reward}[/]", f"[green]{sparkline(view.rewards)}[/]", "")
    age = f"{figures['age_mean']:.2f} / {figures['age_max']:.0f}" if {"age_mean", "age_max"} <= figures.keys() else "-"
    clipped = f"{figures['clipped_sequences']:.0%}" if "clipped_sequences" in figures else "-"
    table.add_row("token age, mean / max", age, "clipped", clipped)
    live = f" (generators have {view.live_version})" if view.live_version not in (None, view.version) else ""
    speed = f"{figures['tokens_per_s']:,.0f}" if "tokens_per_s" in figures else "-"
    table.add_row("policy version", f"{view.version}{live}", "trained tokens/s", speed)
    if "teacher_kl" in figures:
        table.add_row("KL to the teacher", f"{figures['teacher_kl']:.3g}", "", "")
    return table


def _evaluations(view: View) -> RenderableType:
    """A row for each held-out file."""
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True)
    for file in view.config.evaluation.files:
        table.add_row(f"held-out, {file}" if file else "held-out reward", _evaluation_cell(view, file))
    return table


def _evaluation_cell(view: View, file: str) -> str:
    """The newest mean of a held-out file, the first one, the other figures, and the best version."""
    records = [record for record in view.by_file.get(file, []) if "sampled_mean" in record.figures]
    if not records:
        return "[bold]-[/]"
    first, last = records[0], records[-1]
    parts = [f"[bold]{last.figures['sampled_mean']:.3f}[/] at version {last.version}"]
    if len(records) > 1:
        parts[0] += f" (was {first.figures['sampled_mean']:.3f} at {first.version})"
    parts += evaluation_line(last.figures).split(", ")[1:]
    compared = view.config.best_figure
    if view.best is not None and compared is not None and file in compared.weights:
        parts.append(f"best: version {view.best[0]}")
    return "  ".join(parts)


def _step_time(view: View) -> RenderableType:
    """The largest shares of a step's time, and the stage that bounds the run."""
    num_generators = sum(process.service == GENERATION for process in view.processes.values())
    table = Table.grid(padding=(0, 3))
    if bound := verdict(list(view.steps), view.config, num_generators):
        table.add_row("step time", "  ".join(f"{share.share:.0%} {share.in_words}" for share in bound.shares[:3]))
        table.add_row("bound by", f"[bold]{bound.stage}[/]" + (f": try {bound.change[0]}" if bound.change else ""))
    return table


def process_cells(process: ServiceProcess) -> tuple[Text, Text]:
    """('3 s', 'waiting for rewards of 3 groups'); highlighted if it waits longer than LONG_WAIT_S."""
    kind, what, since = process.doing()
    for_s = max(0.0, time.time() - since)
    if kind == "waiting":
        style = "bold yellow" if for_s > LONG_WAIT_S else "dim"
        return Text(duration(for_s), style), Text(f"waiting for {what}", style)
    problem = f" ({process.problem})" if process.problem and not process.ready else ""
    return Text(duration(for_s), "dim"), Text(what + problem, "green" if process.ready else "cyan")


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """The values as a row of at most `width` bars, each the mean of equally many values."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(chunk) / len(chunk) for at in range(0, len(values), size) if (chunk := values[at : at + size])]
    low, high = min(means), max(means)
    if high == low:
        return _SPARKS[0] * len(means)
    return "".join(_SPARKS[round((mean - low) / (high - low) * (len(_SPARKS) - 1))] for mean in means)
