"""`python -m benchmarks.moe.stability`: GSPO against GRPO on a small mixture of experts, and docs/moe.md.

A run that is on disk is not made again, so the whole of it can be done in pieces. It reports no times: other work may
run beside it.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.sizes import DOCS, RESULTS
from benchmarks.moe.comparison_run import ALGORITHMS, measured_run
from benchmarks.moe.stability_page import write_page

console = Console()
SEEDS = (0, 1, 2)
STEPS, QUICK_STEPS = 50, 2


def main(
    runs: Annotated[str, typer.Option(help="Which, such as gspo-0,grpo-2; all by default")] = "",
    quick: Annotated[bool, typer.Option(help="Two steps of one seed, to see that it works")] = False,
    again: Annotated[bool, typer.Option(help="Make runs anew that are on disk")] = False,
    page: Annotated[bool, typer.Option(help="Make no run: write the page from what is on disk")] = False,
) -> None:
    """Train a mixture of experts with both algorithms, seed by seed, and write docs/moe.md."""
    # A terminated benchmark ends its children as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = RESULTS / ("moe-quick" if quick else "moe")
    names = [f"{algorithm}-{seed}" for seed in (SEEDS[:1] if quick else SEEDS) for algorithm in ALGORITHMS]
    for name in [] if page else _chosen(runs, names):
        _make(name, folder / f"{name}.json", QUICK_STEPS if quick else STEPS, again=again)
    if missing := [name for name in names if not (folder / f"{name}.json").exists()]:
        console.print(f"missing: {', '.join(missing)}", style="yellow")
    # A seed counts with both algorithms, or not at all.
    seeds = {name.partition("-")[2] for name in names} - {name.partition("-")[2] for name in missing}
    found = [json.loads((folder / f"{name}.json").read_text()) for name in names if name.partition("-")[2] in seeds]
    if not found:
        console.print("no page: no seed has both runs")
        return
    console.print(f"written: {write_page(found, folder if quick else DOCS)}")


def _chosen(runs: str, names: list[str]) -> list[str]:
    chosen = [name.strip() for name in runs.split(",")] if runs else names
    if unknown := [name for name in chosen if name not in names]:
        raise typer.BadParameter(f"{unknown[0]} is no run; there are {', '.join(names)}", param_hint="--runs")
    return chosen


def _make(name: str, path: Path, steps: int, *, again: bool) -> None:
    if path.exists() and not again:
        console.print(f"{name}: on disk", style="dim")
        return
    algorithm, _, seed = name.partition("-")
    try:
        found: dict[str, Any] = measured_run(algorithm, int(seed), steps, again=again)
    except MeasurementError as error:
        console.print(f"{name}: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n")
    console.print(f"{name}: done", style="dim")


if __name__ == "__main__":
    typer.run(main)
