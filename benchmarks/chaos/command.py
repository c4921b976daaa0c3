"""`python -m benchmarks chaos`: rounds of faults, docs/chaos.md, and exit code 1 if something broke."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import DOCS
from benchmarks.chaos.report import write_report
from benchmarks.chaos.schedule import kinds, round_of

RESULTS = Path(".cache/chaos")
_ROUNDS, _LASTS_S = 7, 420.0


def chaos(
    seed: Annotated[int, typer.Option(help="Of the schedule; the same seed repeats it")] = 0,
    rounds: Annotated[int, typer.Option(help="Faults of each kind")] = _ROUNDS,
    only: Annotated[int | None, typer.Option(help="Play this round alone, and write its file")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Inject these kinds alone")] = None,
    lasts_s: Annotated[float, typer.Option(help="Seconds of training in a round")] = _LASTS_S,
    results: Annotated[Path, typer.Option(help="Folder of the rounds' files")] = RESULTS,
    report: Annotated[bool, typer.Option(help="Play nothing: write the report of the files that are there")] = False,
    out: Annotated[Path, typer.Option(help="Folder of chaos.md, chaos.json and chaos.png")] = DOCS,
) -> None:
    """Inject every kind of fault into a simulated run, check its log, and write docs/chaos.md."""
    results.mkdir(parents=True, exist_ok=True)
    numbers = [] if report else [only] if only is not None else list(range(rounds))
    broken = [text for number in numbers for text in _play(number, seed, kind, results, lasts_s)]
    for text in broken:
        print(f"BROKEN: {text}", file=sys.stderr)
    if only is None:
        write_report(results, seed, out)
    raise typer.Exit(1 if broken else 0)


def _play(number: int, seed: int, among: list[str] | None, results: Path, lasts_s: float) -> list[str]:
    from benchmarks.chaos.rounds import RoundPlan, run_round

    is_root = os.geteuid() == 0
    print(f"round {number} of seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gspo-chaos-", ignore_cleanup_errors=True) as folder:
        plan = RoundPlan(
            folder=Path(folder),
            seed=seed,
            number=number,
            faults=round_of(seed, number, among or kinds(cuts=is_root, disks=is_root)),
            with_network=is_root,
            lasts_s=lasts_s,
            keep=results / f"broken-seed-{seed}-round-{number}",
            say=lambda line: print(line, flush=True),
        )
        played = asyncio.run(run_round(plan))
    (results / f"seed-{seed}-round-{number}.json").write_text(played.to_json())
    return played.broken
