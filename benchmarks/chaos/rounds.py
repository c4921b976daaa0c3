"""One round: a run from start to end, its faults one after the other, and the findings as plain values."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ROOT
from benchmarks.chaos.engine_invariants import ENGINES
from benchmarks.chaos.faults import strike
from benchmarks.chaos.invariants import InvariantResult, check
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.target import RunUnderTest
from benchmarks.chaos.workloads import Workload
from benchmarks.harness.section import Record, machine_facts

_START_S = 600.0


@dataclass(frozen=True)
class FaultOutcome:
    """The course of one fault.

    Attributes:
        at_s: Its time since the start of the run was complete.
        recovered_s: From its beginning until the run had recovered; None if that took too long.
        problem: The reason then.
    """

    kind: str
    targets: tuple[str, ...]
    at_s: float
    lasts_s: float
    recovered_s: float | None
    problem: str
    step: int

    def __str__(self) -> str:
        recovery = f"NOT RECOVERED: {self.problem}" if self.problem else f"recovered after {self.recovered_s:.1f} s"
        return f"{self.at_s:6.1f} s  {self.kind} {' '.join(self.targets)}: {recovery}"


@dataclass(frozen=True)
class Round:
    """The result of a round.

    Attributes:
        workload: Its name.
        planned: The number of faults in its schedule; those after one without a recovery are left out.
        commit: That of the code, with a plus sign if files were changed.
        began_unix_s: When it began.
    """

    workload: str
    seed: int
    number: int
    planned: int
    commit: str
    began_unix_s: float
    machine: Record
    faults: list[FaultOutcome]
    findings: list[InvariantResult]
    steps: int
    groups: dict[str, int]
    longest: dict[str, int]
    dead_letters: int
    wall_s: float

    @property
    def broken(self) -> list[str]:
        """Everything that went wrong."""
        breaks = [f"invariant {result.number}: {text}" for result in self.findings for text in result.broken]
        return [str(fault) for fault in self.faults if fault.problem] + breaks


async def run_round(workload: Workload, faults: Sequence[Fault], *, seed: int, number: int, keep: Path) -> Round:
    """Start a run, inject the faults, end it, check.

    Args:
        keep: Folder for the logs of a round in which something broke.
    """
    is_root, commit = os.geteuid() == 0, _commit()
    with tempfile.TemporaryDirectory(prefix="gspo-chaos-", ignore_cleanup_errors=True) as folder:
        began, began_unix_s, log = time.monotonic(), time.time(), Path(folder) / "run.log"
        is_alone = is_root and workload.is_simulated
        async with RunUnderTest(
            Path(folder), seed, with_network=is_alone, with_disk=is_root, workload=workload
        ) as world:
            is_sound = False
            try:
                if problem := await world.wait_until_well(0, _START_S):
                    output = log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the run did not start: {problem}. The end of its output: {output}")
                outcomes = await _inject(world, faults, workload.recovery_s)
                run = await world.finish()
                played = Round(
                    workload=workload.name,
                    seed=seed,
                    number=number,
                    planned=len(faults),
                    commit=commit,
                    began_unix_s=began_unix_s,
                    machine=machine_facts(),
                    faults=outcomes,
                    findings=check(run) if workload.is_simulated else check(run, ENGINES),
                    steps=world.step,
                    groups=run.groups,
                    longest=run.longest,
                    dead_letters=run.in_redis["dead"],
                    wall_s=time.monotonic() - began,
                )
                is_sound = not played.broken
            finally:
                if not is_sound:
                    shutil.rmtree(keep, ignore_errors=True)
                    if world.run_dir.exists():
                        shutil.copytree(world.run_dir, keep, ignore=shutil.ignore_patterns("checkpoints", "export"))
                    keep.mkdir(exist_ok=True)
                    shutil.copy2(log, keep)
            return played


async def _inject(world: RunUnderTest, faults: Sequence[Fault], recovery_s: float) -> list[FaultOutcome]:
    """Inject one fault after the other, up to the first without a recovery."""
    started = time.monotonic()
    outcomes: list[FaultOutcome] = []
    for fault in faults:
        await asyncio.sleep(fault.pause_s)
        outcomes.append(await _outcome(world, fault, started, recovery_s))
        print(outcomes[-1], flush=True)
        if outcomes[-1].problem:
            break
    return outcomes


async def _outcome(world: RunUnderTest, fault: Fault, started: float, recovery_s: float) -> FaultOutcome:
    began = time.monotonic()
    try:
        await strike(world, fault)
        step = world.step
        problem = await world.wait_until_well(step, recovery_s)
    except TimeoutError as error:
        step, problem = world.step, str(error)
    recovered_s = None if problem else time.monotonic() - began
    return FaultOutcome(fault.kind, fault.targets, began - started, fault.lasts_s, recovered_s, problem, step)


def _commit() -> str:
    """The commit of this code; empty outside of a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=8", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
