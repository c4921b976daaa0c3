"""The learner's intake on a real Redis: entries that stay pending, and entries acknowledged and counted at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo.common.streams.events import Events
from gspo.common.streams.inbox import Delivery, append
from gspo.common.streams.keys import LEARNER, Keys
from gspo.common.telemetry import metrics
from gspo.learner import intake as intake_module
from gspo.learner.assembly.assembler import Assembler, Batch
from gspo.learner.assembly.settlements import GroupEnding, Settlements
from gspo.learner.intake import Intake
from gspo.learner.push.publisher import Publisher
from gspo.learner.run_end import RunEndCondition
from gspo.learner.storage.run_directory import RunDir
from gspo_core.advantage import RunningMoments
from gspo_proto.rollout_pb2 import GroupFailure, Scored
from tests.support.push_peers import service_of
from tests.support.service_process import make_run
from tests.support.training.learner_feed import scored
from tests.support.typed.redis_entries import dead_letters

pytestmark = pytest.mark.asyncio(loop_scope="function")


class RunningIntake:
    """An intake that runs, and its assembler."""

    def __init__(self, redis: Redis, keys: Keys, redis_url: str, folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "x", "vocab_size": 20}')
        config = make_run(folder, folder)
        settlements = Settlements()
        settlements.add(1, GroupEnding.TRAINED)
        settlements.add(2, GroupEnding.FAILED)
        self.assembler = Assembler(
            config.algorithm, config.staleness, seed=0, settlements=settlements, moments=RunningMoments()
        )
        self._redis, self._keys, self._service = redis, keys, service_of("learner-0", config, redis_url)
        self._run_dir = RunDir(folder / "run")

    async def take(self, *payloads: bytes) -> int:
        """Append entries, with groups 1 to 5 issued; how many are pending afterwards."""
        await self._redis.hset(self._keys.open, mapping={str(group): "{}" for group in range(1, 6)})
        await append(self._redis, self._keys.scored, payloads)
        intake = self._intake()
        asked, take = asyncio.Event(), intake._inbox.take

        async def noted(count: int, block_s: float) -> list[Delivery]:
            asked.set()
            return await take(count, min(block_s, 0.05))

        intake._inbox.take = noted  # type: ignore[method-assign]
        running = asyncio.create_task(intake.run())
        async with asyncio.timeout(30):
            # All are delivered once the last one is, and added once it asks for more.
            while await self._has_undelivered():
                await asyncio.sleep(0.02)
            asked.clear()
            await asked.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        pending: Any = await self._redis.xpending(self._keys.scored, LEARNER)
        assert pending["pending"] == await self._redis.xlen(self._keys.scored)
        return int(pending["pending"])

    def _intake(self) -> Intake:
        async def ignore(*_: object) -> None: ...

        publisher, end = Publisher(self._service, 1, ignore), RunEndCondition(self._service.config.run)
        events = Events(self._redis, self._keys, "learner-0")
        return Intake(self._service, self._run_dir, self.assembler, publisher, end, events)

    async def _has_undelivered(self) -> bool:
        stream = await self._redis.xinfo_stream(self._keys.scored)
        (group,) = await self._redis.xinfo_groups(self._keys.scored)
        return bool(group["last-delivered-id"] != stream["last-generated-id"])

    async def close(self) -> None:
        self._run_dir.close()
        await self._service.redis.aclose()


def skipped(reason: str) -> float:
    return metrics.BY_SERVICE["learner"].get_sample_value("gspo_rollouts_skipped_total", {"reason": reason}) or 0.0


@pytest.fixture
async def intake(redis: Redis, keys: Keys, redis_url: str, tmp_path: Path) -> Any:
    running = RunningIntake(redis, keys, redis_url, tmp_path)
    yield running
    await running.close()


async def test_late_and_repeated_rollouts_are_acknowledged_and_counted(intake: RunningIntake) -> None:
    late, repeated = skipped("late"), skipped("duplicate")
    # Of a trained group, of a failed one, and one of an open group twice.
    num_pending = await intake.take(scored(1, 0, 0), scored(2, 0, 0), scored(2, 1, 0), scored(5, 0, 0), scored(5, 0, 0))
    assert num_pending == 1
    assert (skipped("late") - late, skipped("duplicate") - repeated) == (2, 2)


async def test_a_rollout_that_does_not_fit_is_a_dead_letter(intake: RunningIntake, redis: Redis, keys: Keys) -> None:
    malformed = Scored.FromString(scored(5, 0, 0))
    del malformed.rollout.rollout.logp[0]
    before = skipped("malformed")
    # A failed rollout replaces it, so that the group does not wait.
    assert await intake.take(malformed.SerializeToString(), *(scored(5, number, 0) for number in (1, 2, 3))) == 4
    (dead,) = await dead_letters(redis, keys)
    assert (dead.group, dead.number, dead.stream) == (5, 0, "scored")
    assert "have lengths" in dead.reason
    assert skipped("malformed") == before + 1
    ended = intake.assembler.next_batch(0, {5: 0}, num_groups=3)
    assert isinstance(ended, Batch)
    (failed,) = [row for row in ended.rows if row.skipped]
    assert (failed.number, failed.failure) == (0, dead.reason)


async def test_a_group_or_number_that_was_never_issued_is_a_dead_letter(
    intake: RunningIntake, redis: Redis, keys: Keys
) -> None:
    failure = Scored(schema=1, failure=GroupFailure(group=9, reason="lost"))
    no_such_number = Scored.FromString(scored(5, 0, 0))
    no_such_number.rollout.rollout.number = 4
    num_pending = await intake.take(
        scored(8, 0, 0), failure.SerializeToString(), no_such_number.SerializeToString(), scored(5, 0, 0)
    )
    assert num_pending == 1
    assert [dead.reason for dead in await dead_letters(redis, keys)] == [
        "group 8 was never issued",
        "group 9 was never issued",
        "rollout 5-4: number 4 of 4, and a group of this run has 4",
    ]


async def test_an_entry_that_several_learners_died_over_fails_its_group(
    intake: RunningIntake, redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "_MAX_DELIVERIES", 3)
    assert await intake.take(scored(5, 0, 0)) == 1
    for _ in range(2):
        intake.assembler._groups.clear()  # as in a new learner
        assert await intake.take() == 1
    intake.assembler._groups.clear()
    assert await intake.take() == 0
    (dead,) = await dead_letters(redis, keys)
    assert (dead.group, dead.num_deliveries) == (5, 4)
    ended = intake.assembler.next_batch(0, {5: 0})
    assert [(group.group, group.settlement) for group in ended.settled] == [(5, GroupEnding.FAILED)]
    assert "3 learners" in ended.settled[0].reason
