"""The runs of a page, and what the page asks about each besides its rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

MAX_RUNS = 6


class Overview(Protocol):
    """The verdict, the curves and the configuration of a run."""

    def state(self) -> str:
        """Another text after each change of the log."""
        ...

    def facts(self) -> dict[str, Any]:
        """The values of the template run.html."""
        ...

    def curves(self) -> list[dict[str, Any]]:
        """Lines over steps, which curves.js draws."""
        ...

    def keys(self) -> dict[str, str]:
        """Every key of the configuration with its value as text; empty if it cannot be read."""
        ...


@dataclass(frozen=True)
class ViewedRun:
    """A run of the page.

    Attributes:
        name: Of its own among the viewed runs.
    """

    name: str
    run_dir: Path
    overview: Overview
