"""`python -m benchmarks chaos`: rounds of faults, docs/chaos.md, and exit code 1 if something broke."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
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
    broken: list[str] = []
    for number in [] if report else [only] if only is not None else range(rounds):
        print(f"round {number} of seed {seed}", flush=True)
        broken += _play(seed, number, kind, results, lasts_s)
    for text in broken:
        print(f"BROKEN: {text}", file=sys.stderr)
    if only is None:
        write_report(results, seed, out)
    raise typer.Exit(1 if broken else 0)


def _play(seed: int, number: int, among: list[str] | None, results: Path, lasts_s: float) -> list[str]:
    from benchmarks.chaos.rounds import run_round

    is_root = os.geteuid() == 0
    playing = run_round(
        round_of(seed, number, among or kinds(cuts=is_root, disks=is_root)),
        seed=seed,
        number=number,
        with_network=is_root,
        lasts_s=lasts_s,
        keep=results / f"broken-seed-{seed}-round-{number}",
    )
    played = asyncio.run(playing)
    (results / f"seed-{seed}-round-{number}.json").write_text(json.dumps(asdict(played), indent=1))
    return played.broken
