"""`python -m examples.experiments long`: the experiments on long answers, and docs/long.md.

A finished run stays in docs/long.json, so that all of them can be made in pieces, on several days.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from benchmarks import DOCS
from benchmarks.harness.kept_runs import KeptRuns, chosen_names
from benchmarks.harness.section import Record
from examples.experiments.long.declared_runs import SCALES, declared_runs
from examples.experiments.long.long_page import write_page
from examples.experiments.long.measured_run import measured_long_run

console = Console()


def long(
    runs: Annotated[str, typer.Option(help="Which, such as 'dense-*,lag-4-*'; all by default")] = "",
    scale: Annotated[str, typer.Option(help=f"Sizes of model, answers and training: {', '.join(SCALES)}")] = "small",
    list_only: Annotated[
        bool, typer.Option("--list", help="Make no run: say which there are, and which are on disk")
    ] = False,
    again: Annotated[bool, typer.Option(help="Make runs anew that are on disk")] = False,
    page: Annotated[bool, typer.Option(help="Make no run: write the page from the results on disk")] = False,
) -> None:
    """Compare GSPO and GRPO on answers of hundreds of tokens, run by run, and write docs/long.md."""
    if scale not in SCALES:
        raise typer.BadParameter(f"{scale} is no scale; there are {', '.join(SCALES)}", param_hint="--scale")
    declared, sizes = declared_runs(), SCALES[scale]
    chosen = chosen_names(runs, list(declared))
    stem = "long" if scale == "small" else f"long-{scale}"
    kept = KeptRuns(DOCS / f"{stem}.json")
    if list_only:
        for name in chosen:
            console.print(f"{name}: {'on disk' if name in kept.results else 'not run yet'}", highlight=False)
        return

    def measure(name: str) -> Record:
        return measured_long_run(f"{scale}-{name}", declared[name], sizes, kept.results, again=again)

    kept.make([] if page else chosen, measure, again=again)
    console.print(f"written: {write_page(kept.results, sizes, DOCS / f'{stem}.md')}")
