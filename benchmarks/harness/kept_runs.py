"""Results of runs that take minutes each: kept on disk by name, and not made again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import typer
from rich.console import Console

from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.section import Record

_console = Console()


class KeptRuns:
    """The results in a JSON file, by the names of their runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def results(self) -> dict[str, Record]:
        """All results on disk."""
        results: dict[str, Record] = json.loads(self._path.read_text()) if self._path.exists() else {}
        return results

    def make(self, names: Sequence[str], measure: Callable[[str], Record], *, again: bool = False) -> None:
        """Measure the runs that have no result yet, and keep each result as it comes.

        Raises:
            Exit: A run failed; those before it are kept.
        """
        for name in names:
            if name in self.results and not again:
                _console.print(f"{name}: on disk", style="dim")
                continue
            try:
                self._keep(name, measure(name))
            except MeasurementError as error:
                _console.print(f"{name}: {error}", style="red", markup=False, highlight=False)
                raise typer.Exit(1) from error
            _console.print(f"{name}: done", style="dim")

    def _keep(self, name: str, result: Record) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in (self.results | {name: result}).items())
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        unfinished.replace(self._path)


def chosen_names(patterns: str, names: Sequence[str]) -> list[str]:
    """The names that fit one of some patterns, `gspo-*,grpo-2`; all without any.

    Raises:
        BadParameter: A pattern fits no name.
    """
    chosen = [pattern.strip() for pattern in patterns.split(",")] if patterns else ["*"]
    for pattern in chosen:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise typer.BadParameter(f"{pattern} is no run; there are {', '.join(names)}", param_hint="--runs")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in chosen)]
