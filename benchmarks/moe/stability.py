"""`python -m benchmarks moe`: GSPO against GRPO on a small mixture of experts, and docs/moe.md.

The results of a run stay on disk, so all of them can be made in pieces. It reports no times: other work may run
beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import DOCS, RESULTS
from benchmarks.harness.child_process import MeasurementError
from benchmarks.moe.comparison_run import ALGORITHMS, measured_run
from benchmarks.moe.stability_page import write_page

console = Console()
SEEDS = (0, 1, 2)
STEPS, QUICK_STEPS = 50, 2


def moe(
    runs: Annotated[str, typer.Option(help="Which, such as gspo-0,grpo-2; all by default")] = "",
    quick: Annotated[bool, typer.Option(help="Two steps of one seed, to see that it works")] = False,
    again: Annotated[bool, typer.Option(help="Make runs anew that are on disk")] = False,
    page: Annotated[bool, typer.Option(help="Make no run: write the page from the results on disk")] = False,
) -> None:
    """Train a mixture of experts with both algorithms, seed by seed, and write docs/moe.md."""
    folder = RESULTS / ("moe-quick" if quick else "moe")
    seeds = SEEDS[:1] if quick else SEEDS
    names = [f"{algorithm}-{seed}" for seed in seeds for algorithm in ALGORITHMS]
    chosen = [name.strip() for name in runs.split(",")] if runs else names
    if unknown := [name for name in chosen if name not in names]:
        raise typer.BadParameter(f"{unknown[0]} is no run; there are {', '.join(names)}", param_hint="--runs")
    for name in () if page else chosen:
        _make(name, folder / f"{name}.json", QUICK_STEPS if quick else STEPS, again=again)
    if missing := [name for name in names if not (folder / f"{name}.json").exists()]:
        console.print(f"missing: {', '.join(missing)}", style="yellow")
    # A seed counts with both algorithms, or not at all.
    paths = [[folder / f"{algorithm}-{seed}.json" for algorithm in ALGORITHMS] for seed in seeds]
    results = [json.loads(path.read_text()) for pair in paths if all(map(Path.exists, pair)) for path in pair]
    if not results:
        console.print("no page: no seed has both runs")
        return
    console.print(f"written: {write_page(results, folder if quick else DOCS)}")


def _make(name: str, path: Path, steps: int, *, again: bool) -> None:
    if path.exists() and not again:
        console.print(f"{name}: on disk", style="dim")
        return
    algorithm, _, seed = name.partition("-")
    try:
        result = measured_run(algorithm, int(seed), steps, again=again)
    except MeasurementError as error:
        console.print(f"{name}: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")
    console.print(f"{name}: done", style="dim")
