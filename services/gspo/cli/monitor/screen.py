"""Where a run is shown: a live terminal, or lines where there is none."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.text import Text

from gspo.cli.monitor.view import ScreenLine, View

STYLES = {"step": "", "note": "cyan", "warning": "yellow", "error": "bold red"}
# A line about the start-up that often, where there is no live view.
_PATIENCE_S = 10.0


class Screen(Protocol):
    """Shows a run."""

    def say(self, line: ScreenLine) -> None:
        """Show something that happened."""

    def show(self, view: View) -> None:
        """Show how things are; called several times a second."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainScreen:
    """One line a step, and a line for everything else that happens, with the time of day."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said = time.monotonic()

    def say(self, line: ScreenLine) -> None:
        """Print the line."""
        label = f"{line.kind}: " if line.kind in ("warning", "error") else ""
        clock = time.strftime("%H:%M:%S")
        self._console.print(Text(f"{clock}  {label}{line.text}", STYLES[line.kind]), soft_wrap=True, highlight=False)
        self._said = time.monotonic()

    def show(self, view: View) -> None:
        """While services start, say now and then what is waited for."""
        if view.phases.current == "start" and time.monotonic() - self._said > _PATIENCE_S:
            num_ready = len(view.processes) - len(view.waiting_to_start)
            self.say(ScreenLine(f"{num_ready} of {len(view.processes)} services are ready. {waited_for(view)}"))

    def close(self) -> None:
        """Nothing to put back."""


def waited_for(view: View) -> str:
    """Which processes are not ready, what each does, and for how long."""
    return "; ".join(f"{process.name}: {process.in_words()}" for process in view.waiting_to_start) or "nothing"
