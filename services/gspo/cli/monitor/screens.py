"""The screens of a run: a live panel in a terminal, or plain lines elsewhere. drawing.py draws the view."""

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

from gspo.cli.monitor.drawing import STYLES, ProcessTable, run_parts
from gspo.cli.monitor.view import ScreenLine, View
from gspo.common.streams.keys import GENERATION
from gspo.common.telemetry.step_time import duration

# Seconds between lines about the start, without a live panel.
_QUIET_S = 10.0
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
        text = Text(f"{time.strftime('%H:%M:%S')}  {_with_label(line)}", STYLES[line.kind])
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
            self._live.console.print(Text(_with_label(line), STYLES[line.kind]), highlight=False)

    def show(self, view: View) -> None:
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
    processes = list(view.processes.values())
    num_generators = sum(process.service == GENERATION for process in processes)
    parts = [_progress(view), *run_parts(view, num_generators, is_short=True)]
    title = f"[bold]gspo[/] {view.config.name} · {view.phases.current.replace('_', ' ')} "
    title += duration(view.phases.elapsed_s)
    return Panel(
        Group(*parts, *(() if ended else ("", ProcessTable(processes, has_addresses=False)))),
        title=title,
        subtitle=None if ended else "Ctrl-C stops at a checkpoint",
        title_align="left",
        subtitle_align="right",
    )


def _progress(view: View) -> RenderableType:
    """The rewards so far, and how much of the run is done."""
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    bar = ProgressBar(total=view.total_steps, completed=view.step) if view.total_steps else ""
    row.add_row(Text(sparkline(view.rewards), "green"), bar)
    return row


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
