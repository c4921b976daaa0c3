"""One round: a run from start to end, its faults one after the other, and the findings as plain values."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import strike
from benchmarks.chaos.invariants import FinishedRun, InvariantResult, check
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.target import RunUnderTest

_START_S, _RECOVERY_S = 200.0, 120.0
# Longest recovery before the run ends.
_MARGIN_S = 40.0


@dataclass(frozen=True)
class FaultOutcome:
    """One strike as it went.

    Attributes:
        at_s: Since the run was well first.
        recovered_s: From the strike's beginning until the run was well again; None where it was not in time.
        amiss: What was not well then.
    """

    kind: str
    targets: tuple[str, ...]
    at_s: float
    lasts_s: float
    recovered_s: float | None
    amiss: str
    step: int


@dataclass(frozen=True)
class Round:
    """The result of a round."""

    seed: int
    number: int
    struck: list[FaultOutcome]
    findings: list[InvariantResult]
    steps: int
    groups: dict[str, int]
    longest: dict[str, int]
    dead_letters: int
    wall_s: float

    @property
    def broken(self) -> list[str]:
        """Everything that went wrong."""
        late = [f"{one.kind} {' '.join(one.targets)}: not well again: {one.amiss}" for one in self.struck if one.amiss]
        return late + [f"invariant {found.number}: {text}" for found in self.findings for text in found.broken]

    def to_json(self) -> str:
        """For a file."""
        return json.dumps(asdict(self), indent=1)


@dataclass(frozen=True)
class RoundPlan:
    """The plan of a round.

    Attributes:
        lasts_s: Seconds of training in the run; strikes for which no time is left are not played.
        keep: Folder for the logs of a round in which something broke.
        say: Called with a line for each strike.
    """

    folder: Path
    seed: int
    number: int
    strikes: Sequence[Fault]
    with_network: bool
    lasts_s: float
    keep: Path
    say: Callable[[str], None]


async def run_round(plan: RoundPlan) -> Round:
    """Run it, strike, let it end, check."""
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
    if amiss := await world.wait_until_well(0, _START_S):
        raise RuntimeError(f"the run did not start: {amiss}. Its words: {_last_words(plan.folder)}")
    well_at = time.monotonic()
    struck = []
    for one in plan.strikes:
        if time.monotonic() - well_at + one.lasts_s + _MARGIN_S > plan.lasts_s:
            continue
        await asyncio.sleep(one.pause_s)
        struck.append(await _strike(world, one, well_at))
        plan.say(_line(struck[-1]))
        if struck[-1].recovered_s is None:
            break
    exit_code = await world.finish()
    waiting = frozenset(await world.groups_in_streams())
    left = FinishedRun(
        world.run_dir, world.config, exit_code, await world.left_in_redis(), dict(world.longest), waiting
    )
    summary: Any = json.loads((world.run_dir / "summary.json").read_text())
    return Round(
        plan.seed,
        plan.number,
        struck,
        check(left),
        world.step,
        summary["groups"],
        left.longest,
        left.in_redis["dead"],
        time.monotonic() - began,
    )


async def _strike(world: RunUnderTest, planned: Fault, well_at: float) -> FaultOutcome:
    began = time.monotonic()
    try:
        await strike(world, planned)
        step = world.step
        amiss = await world.wait_until_well(step, _RECOVERY_S)
    except TimeoutError as error:
        step, amiss = world.step, str(error)
    recovered_s = None if amiss else time.monotonic() - began
    return FaultOutcome(planned.kind, planned.targets, began - well_at, planned.lasts_s, recovered_s, amiss, step)


def _line(struck: FaultOutcome) -> str:
    told = f"well after {struck.recovered_s:.1f} s" if struck.recovered_s is not None else f"NOT WELL: {struck.amiss}"
    return f"{struck.at_s:6.1f} s  {struck.kind} {' '.join(struck.targets)}: {told}"


def _last_words(folder: Path) -> str:
    return (folder / "run.log").read_text(errors="replace")[-2000:]
