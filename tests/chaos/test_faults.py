"""The short form of `make chaos`: a strike against a simulated run, and every invariant afterwards.

The nightly tests have others. Not here: every kind of fault, and the time of a recovery (docs/chaos.md).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.chaos.faults import strike
from benchmarks.chaos.invariants import check
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.target import GROUPS, MAX_LAG, SIZE, RunUnderTest

pytestmark = pytest.mark.timeout(400)
IS_ROOT = os.geteuid() == 0
WELL_S = 120.0
# A second of Redis' own work; without the slots, generation would add hundreds of rollouts.
_STEADY_BYTES = 100_000
STRIKES = [Fault("flush redis", ("redis",), 0.0, 0.0)]
MORE_STRIKES = [
    Fault("kill learner", ("learner-0",), 0.0, 0.0),
    Fault("corrupt push", ("generation-1",), 0.0, 0.0),
    # Only root can have a small disk and a network of its own.
    *([Fault("fill disk", (), 3.0, 0.0), Fault("cut network", ("learner-0", "generation-0"), 3.0, 0.0)] * IS_ROOT),
]


@pytest.fixture(
    scope="module", params=[STRIKES, pytest.param(MORE_STRIKES, marks=pytest.mark.long)], ids=["one", "more"]
)
def played(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, int]:
    return asyncio.run(_play(tmp_path_factory.mktemp("chaos"), request.param))


async def _play(folder: Path, strikes: list[Fault]) -> dict[str, int]:
    async with RunUnderTest(folder, 0, with_network=IS_ROOT) as world:
        assert await world.wait_until_well(0, WELL_S) == "", (folder / "run.log").read_text()
        while_stopped = await _without_a_learner(world)
        for planned in strikes:
            await strike(world, planned)
            assert await world.wait_until_well(world.step, WELL_S) == "", planned
        findings = check(await world.finish())  # before the run directory goes with its disk
        for result in findings:
            assert result.broken == (), f"invariant {result.number} ({result.what}): {result.broken[:5]}"
        return while_stopped | {f"broken {result.number}": len(result.broken) for result in findings}


async def _without_a_learner(world: RunUnderTest) -> dict[str, int]:
    """Stop the learner until the others have nothing left to do; what they made of it."""
    pid = world.pid("learner-0")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline, scored, memory = time.monotonic() + 60, -1, 0
        while time.monotonic() < deadline:
            await asyncio.sleep(1.0)
            before, scored = scored, await world.redis.xlen(world.keys.scored)
            now = (await world.redis.info("memory"))["used_memory"]
            grown, memory = now - memory, now
            if scored == before and grown < _STEADY_BYTES and not await world.redis.xlen(world.keys.prompts):
                break
        return {
            "scored": await world.redis.xlen(world.keys.scored),
            "open": await world.redis.hlen(world.keys.open),
            "grown": grown,
        }
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_learner_that_stops_makes_generation_wait(played: dict[str, int]) -> None:
    seen = played
    slots = (MAX_LAG + 1) * GROUPS
    assert 0 < seen["open"] <= slots
    assert 0 < seen["scored"] <= slots * SIZE
    assert seen["grown"] < _STEADY_BYTES, "generation goes on while the learner stands still"


def test_every_invariant_holds_after_the_strikes(played: dict[str, int]) -> None:
    seen = played
    assert {name: count for name, count in seen.items() if name.startswith("broken")} == {
        f"broken {number}": 0 for number in range(1, 9)
    }
