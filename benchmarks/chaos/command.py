"""`python -m benchmarks chaos`: rounds of faults, docs/chaos.md, and exit code 1 if something broke.

Each round has a process of its own, so that several can be played at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import DOCS, ROOT
from benchmarks.chaos.kept_rounds import RoundName, keep_round, kept_rounds, missing_rounds
from benchmarks.chaos.report import write_report
from benchmarks.chaos.schedule import round_of
from benchmarks.chaos.workloads import SIMULATED, WORKLOADS

RESULTS = Path(".cache/chaos")
_ROUNDS, _ENGINE_ROUNDS = 10, 1
# A round that is interrupted ends its run first.
_END_S = 60.0


def chaos(
    seed: Annotated[int, typer.Option(help="Of the schedule; the same seed repeats it")] = 0,
    rounds: Annotated[int, typer.Option(help="Simulated rounds, with a fault of each kind")] = _ROUNDS,
    engine_rounds: Annotated[int, typer.Option(help="Rounds of each run with the real engines")] = _ENGINE_ROUNDS,
    parallel: Annotated[int, typer.Option(help="Simulated rounds at once; most of a round is waiting")] = 1,
    workload: Annotated[
        list[str] | None, typer.Option(help="simulated, conversations or agents; by default all")
    ] = None,
    only: Annotated[int | None, typer.Option(help="Play this round of one workload, and write its file")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Inject these kinds alone")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the rounds' files")] = RESULTS,
    report: Annotated[bool, typer.Option(help="Play nothing: write the report of the files that are there")] = False,
    out: Annotated[Path, typer.Option(help="Folder of chaos.md, chaos.json and chaos.png")] = DOCS,
) -> None:
    """Inject every kind of fault, check the log, and write docs/chaos.md; rounds that have a file are not repeated."""
    results = results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    chosen = workload or list(WORKLOADS)
    if unknown := set(chosen) - set(WORKLOADS):
        raise typer.BadParameter(f"{', '.join(unknown)} is none of {', '.join(WORKLOADS)}", param_hint="--workload")
    if only is not None:
        raise typer.Exit(_play(RoundName(chosen[0], seed, only), kind, results))
    if not report:
        options = [word for name in kind or () for word in ("--kind", name)]
        numbers = {name: rounds if name == SIMULATED.name else engine_rounds for name in chosen}
        asyncio.run(_play_missing(missing_rounds(results, seed, numbers.items()), results, parallel, options))
    write_report(results, seed, out)
    raise typer.Exit(1 if any(played["broken"] for played in kept_rounds(results, seed)) else 0)


def _play(name: RoundName, among: list[str] | None, results: Path) -> int:
    """Play a round in this process; the exit code."""
    from benchmarks.chaos.rounds import run_round

    workload = WORKLOADS[name.workload]
    planned = round_of(name.seed, name.number, among or workload.kinds(is_root=os.geteuid() == 0), workload.processes)
    # A shell lets its background processes ignore it, and a round that is interrupted ends its run first.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    playing = run_round(workload, planned, seed=name.seed, number=name.number, keep=results / f"broken-{name}")
    played = asyncio.run(playing)
    keep_round(results, played)
    for text in played.broken:
        print(f"BROKEN: {text}", file=sys.stderr)
    return 1 if played.broken else 0


async def _play_missing(names: list[RoundName], results: Path, parallel: int, options: list[str]) -> None:
    """Play rounds in processes of their own: simulated ones side by side, then the others one after the other."""
    side_by_side = asyncio.Semaphore(parallel)

    async def play(name: RoundName) -> None:
        async with side_by_side:
            await _play_beside(name, results, options)

    async with asyncio.TaskGroup() as playing:
        for name in names:
            if WORKLOADS[name.workload].is_simulated:
                playing.create_task(play(name))
    for name in names:
        if not WORKLOADS[name.workload].is_simulated:
            await _play_beside(name, results, options)


async def _play_beside(name: RoundName, results: Path, options: list[str]) -> None:
    words = ["--seed", str(name.seed), "--workload", name.workload, "--only", str(name.number)]
    command = [sys.executable, "-m", "benchmarks", "chaos", *words, "--results", str(results), *options]
    with (results / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=log, stderr=log)
        print(f"{name} begins; its course is in {log.name}", flush=True)
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                await asyncio.wait_for(process.wait(), _END_S)
    has_file = name.file(results).exists()
    print(f"{name} {'ended' if has_file else 'FAILED, and has no result'} (exit code {code})", flush=True)
