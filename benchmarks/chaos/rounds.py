"""One round: a run from start to end, its faults one after the other, and the findings as plain values."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.chaos.faults import strike
from benchmarks.chaos.invariants import InvariantResult, check
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.target import RunUnderTest

_START_S, _RECOVERY_S = 200.0, 120.0
# Longest recovery before the run ends.
_MARGIN_S = 40.0


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
    """The result of a round."""

    seed: int
    number: int
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

    def to_json(self) -> str:
        """The content of its file."""
        return json.dumps(asdict(self), indent=1)


@dataclass(frozen=True)
class RoundPlan:
    """The plan of a round.

    Attributes:
        lasts_s: Seconds of training in the run; it leaves out faults that no longer fit.
        keep: Folder for the logs of a round in which something broke.
        say: Called with a line for each fault.
    """

    folder: Path
    seed: int
    number: int
    faults: Sequence[Fault]
    with_network: bool
    lasts_s: float
    keep: Path
    say: Callable[[str], None]


async def run_round(plan: RoundPlan) -> Round:
    """Start a run, inject the faults, let it end, check."""
    async with RunUnderTest(plan.folder, plan.seed, with_network=plan.with_network, lasts_s=plan.lasts_s) as world:
        is_sound = False
        try:
            played = await _play(world, plan)
            is_sound = not played.broken
        finally:
            if not is_sound:
                shutil.rmtree(plan.keep, ignore_errors=True)
                shutil.copytree(world.run_dir, plan.keep, ignore=shutil.ignore_patterns("checkpoints", "export"))
                shutil.copy2(plan.folder / "run.log", plan.keep)
        return played


async def _play(world: RunUnderTest, plan: RoundPlan) -> Round:
    began = time.monotonic()
    if problem := await world.wait_until_well(0, _START_S):
        output = (plan.folder / "run.log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the run did not start: {problem}. The end of its output: {output}")
    started = time.monotonic()
    outcomes: list[FaultOutcome] = []
    for fault in plan.faults:
        if time.monotonic() - started + fault.lasts_s + _MARGIN_S > plan.lasts_s:
            continue
        await asyncio.sleep(fault.pause_s)
        outcomes.append(await _outcome(world, fault, started))
        plan.say(str(outcomes[-1]))
        if outcomes[-1].problem:
            break
    run = await world.finish()
    return Round(
        seed=plan.seed,
        number=plan.number,
        faults=outcomes,
        findings=check(run),
        steps=world.step,
        groups=run.groups,
        longest=run.longest,
        dead_letters=run.in_redis["dead"],
        wall_s=time.monotonic() - began,
    )


async def _outcome(world: RunUnderTest, fault: Fault, started: float) -> FaultOutcome:
    began = time.monotonic()
    try:
        await strike(world, fault)
        step = world.step
        problem = await world.wait_until_well(step, _RECOVERY_S)
    except TimeoutError as error:
        step, problem = world.step, str(error)
    recovered_s = None if problem else time.monotonic() - began
    return FaultOutcome(fault.kind, fault.targets, began - started, fault.lasts_s, recovered_s, problem, step)
