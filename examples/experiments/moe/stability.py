"""`python -m examples.experiments moe`: GSPO against GRPO on a small mixture of experts, and docs/moe.md.

The results of a run stay on disk, so all of them can be made in pieces. It reports no times: other work may run
beside it.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from benchmarks import DOCS, RESULTS
from benchmarks.harness.kept_runs import KeptRuns, chosen_names
from benchmarks.harness.section import Record
from examples.experiments.moe.comparison_run import COMPARED, measured_run
from examples.experiments.moe.stability_page import write_page

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
    kept = KeptRuns(RESULTS / ("moe-quick" if quick else "moe") / "runs.json")
    seeds, steps = (SEEDS[:1], QUICK_STEPS) if quick else (SEEDS, STEPS)
    names = [f"{algorithm}-{seed}" for seed in seeds for algorithm in COMPARED]
    chosen = chosen_names(runs, names)

    def measure(name: str) -> Record:
        algorithm, _, seed = name.partition("-")
        return measured_run(algorithm, int(seed), steps, again=again)

    kept.make([] if page else chosen, measure, again=again)
    results = kept.results
    if missing := [name for name in names if name not in results]:
        console.print(f"missing: {', '.join(missing)}", style="yellow")
    # A seed counts with both algorithms, or not at all.
    pairs = [[f"{algorithm}-{seed}" for algorithm in COMPARED] for seed in seeds]
    of_page = [results[name] for pair in pairs if set(pair) <= set(results) for name in pair]
    if not of_page:
        console.print("no page: no seed has both runs")
        return
    console.print(f"written: {write_page(of_page, RESULTS / 'moe-quick' if quick else DOCS)}")
