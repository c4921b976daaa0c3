"""`python -m benchmarks`: measure, part by part, and write docs/benchmarks.md.

A part that was measured before is kept on disk, so any of them can be measured again alone. Wants the machine to
itself.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.engine import token_rate
from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.measurement import Measurement, SectionResults, load_results
from benchmarks.harness.sizes import DOCS, RESULTS
from benchmarks.learner import logprobs, step_time
from benchmarks.page.writer import write_page
from benchmarks.pipeline import rollout_rate
from benchmarks.push import weight_update
from benchmarks.reward import sandbox_cost
from benchmarks.system import lag, startup, step_rate
from benchmarks.tails import long_answers

console = Console()
PARTS = {
    "A": "engine",
    "B": "learner",
    "C": "system",
    "D": "learning",
    "L": "logprobs",
    "Q": "pipeline",
    "R": "reward",
    "S": "start",
    "T": "tail",
    "W": "push",
}
_PARTS_HELP = "Parts: " + ", ".join(f"{letter} {name}" for letter, name in PARTS.items())
_BUSY_SHARE = 0.1


def main(
    only: Annotated[str, typer.Option(help=_PARTS_HELP)] = "A,B,C,D,L,Q,R,S,T,W",
    quick: Annotated[bool, typer.Option(help="Two rounds or steps of everything, to see that it works")] = False,
    steps: Annotated[int | None, typer.Option(min=4, help="Steps of each run in C (8) and in D (40)")] = None,
    page: Annotated[bool, typer.Option(help="Measure nothing: write the page from what was measured")] = False,
) -> None:
    """Measure speed and learning on this machine, and write docs/benchmarks.md."""
    # A terminated benchmark ends its children as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = RESULTS / "quick" if quick else RESULTS
    if not page:
        _measure(_chosen(only), results, quick=quick, steps=steps)
    found = load_results(results)
    if not found:
        raise typer.BadParameter(f"{results} holds no results; measure first", param_hint="--page")
    written = write_page(found, results / "page" if quick else DOCS)
    console.print(f"written: {written}")


def _chosen(only: str) -> list[str]:
    chosen = [part.strip().upper() for part in only.split(",")]
    if unknown := [part for part in chosen if part not in PARTS]:
        raise typer.BadParameter(f"{unknown[0]} is no part; there are {', '.join(PARTS)}", param_hint="--only")
    return list(dict.fromkeys(chosen))


def _measure(parts: list[str], results: Path, *, quick: bool, steps: int | None) -> None:
    _warn_if_busy()
    makers: dict[str, Callable[[], Iterable[Measurement]]] = {
        "A": lambda: token_rate.cases(quick=quick),
        "B": lambda: step_time.cases(quick=quick),
        "C": lambda: step_rate.cases(quick=quick, steps=steps),
        "D": lambda: lag.cases(quick=quick, steps=steps),
        "L": lambda: logprobs.cases(quick=quick),
        "Q": lambda: rollout_rate.cases(quick=quick),
        "R": lambda: sandbox_cost.cases(quick=quick),
        "S": lambda: startup.cases(quick=quick),
        "T": lambda: long_answers.cases(quick=quick),
        "W": lambda: weight_update.cases(quick=quick),
    }
    todo = {part: list(makers[part]()) for part in parts}
    columns = (BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f}"), TimeElapsedColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        bar = progress.add_task("measuring", total=sum(map(len, todo.values())))
        for part, cases in todo.items():
            kept = SectionResults(results, PARTS[part])
            for case in cases:
                progress.update(bar, description=f"{PARTS[part]}: {case.label}")
                began = time.monotonic()
                try:
                    kept.add(case)
                except MeasurementError as error:
                    raise typer.Exit(_failed(case, error)) from error
                console.print(f"{PARTS[part]}: {case.label}: {time.monotonic() - began:.0f} s", style="dim")
                progress.advance(bar)


def _failed(case: Measurement, error: MeasurementError) -> int:
    console.print(f"{case.label}: {error}", style="red", markup=False, highlight=False)
    return 1


def _warn_if_busy() -> None:
    """Numbers from a machine that does other things are worth little; say so, and go on."""
    busy = psutil.cpu_percent(interval=1.0) / 100
    if busy > _BUSY_SHARE:
        console.print(f"the machine is {busy:.0%} busy with other things: the numbers will show that", style="yellow")


if __name__ == "__main__":
    typer.run(main)
