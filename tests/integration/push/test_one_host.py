"""Generators of one host, with their policies in one file: a push to one of them is for all.

Real publisher, frames, gRPC servicer, staging and Redis; the engine is a stand-in.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo.generation.engine import staging
from gspo.generation.engine.staging import PolicyCopies, PolicyPlace
from gspo.learner.push import replicas
from gspo.learner.push.replicas import GeneratorReplica
from gspo.learner.push.weight_updates import push_header
from gspo_proto.generation_pb2 import WeightFrame
from tests.support import push_peers
from tests.support.push_peers import (
    PublishingLearner,
    PushTarget,
    flipped,
    generator,
    learner,
    policy,
    run_config,
    sent_to,
    serve,
)
from tests.support.service_process import make_run

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed pushes are tried again soon."""
    monkeypatch.setattr(replicas, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(replicas, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(push_peers, "OWNED", push_peers.THREE_RANKS)


@pytest.fixture
def file() -> Iterator[Path]:
    """As `gspo run` makes it."""
    number = os.memfd_create("policies")
    yield Path(f"/proc/{os.getpid()}/fd/{number}")
    os.close(number)


def num_slots(target: PushTarget) -> int:
    """The slots with memory."""
    slots = target.copies._file
    return sum(slots.has_memory(slot) for slot in range(len(slots)))


def num_frames(*targets: PushTarget) -> int:
    return sum(target.servicer.facts()["num_frames"] for target in targets)


async def published(learning: PublishingLearner, version: int, *targets: PushTarget) -> None:
    await learning.publish(policy(version))
    await learning.until(lambda: serve([*targets], policy(version)))
    await learning.until(lambda: learning.states() == ["current"] * len(targets))


async def test_a_version_comes_once_for_all_and_is_there_for_who_starts_again(
    redis: Redis, redis_url: str, tmp_path: Path, file: Path
) -> None:
    config = run_config(tmp_path, make_run)
    async with learner(config, redis_url) as learning, generator(config, redis_url, policies=file) as first:
        async with (
            generator(config, redis_url, policies=file) as second,
            generator(config, redis_url, policies=file) as third,
        ):
            before = 0
            for version in range(1, 5):
                await published(learning, version, first, second, third)
                # Both tensors, or the one that has changed.
                assert num_frames(first, second, third) - before == (2 if version == 1 else 1)
                assert num_slots(first) <= 2
                before = num_frames(first, second, third)
        async with generator(config, redis_url, policies=file) as again:
            await learning.until(lambda: serve([first, again], policy(4)))
            assert num_frames(again) == 0
    # All of them have gone, and who started them has the last version.
    async with learner(config, redis_url, epoch=2) as learning, generator(config, redis_url, policies=file) as again:
        await published(learning, 4, again)
        assert num_frames(again) == 0


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that count, as the name of the generator and the reason."""
    fail, noted = GeneratorReplica.fail, list[str]()

    def note(self: GeneratorReplica, problem: str, **more: bool) -> bool:
        noted.append(f"{self.instance.name}: {problem}")
        return fail(self, problem, **more)

    monkeypatch.setattr(GeneratorReplica, "fail", note)
    return noted


@pytest.mark.parametrize("version", [1, 2])
async def test_who_gets_other_bits_keeps_them_from_the_others_and_loads_what_they_have(
    redis: Redis, redis_url: str, tmp_path: Path, file: Path, failures: list[str], version: int
) -> None:
    """Of whole tensors, and of changes."""
    config = run_config(tmp_path, make_run)
    async with generator(config, redis_url, "bad", policies=file) as bad, learner(config, redis_url) as learning:
        for good_version in range(1, version):
            await published(learning, good_version, bad)
        bad.corrupt = flipped
        await learning.publish(policy(version))
        await learning.until(lambda: bool(failures))
        assert bad.serves == (version - 1, policy(version - 1).digest)
        assert [header.base_digest for header in bad.headers][-1] == (policy(1).digest if version > 1 else "")
        async with generator(config, redis_url, "good", policies=file) as good:
            await learning.until(lambda: serve([bad, good], policy(version)))
    assert failures and all(failure.startswith("bad: DATA_LOSS: ") for failure in failures)


async def test_those_who_wait_for_one_that_fails_have_not_failed_and_take_the_version_at_once(
    redis: Redis, redis_url: str, tmp_path: Path, file: Path, failures: list[str]
) -> None:
    config = run_config(tmp_path, make_run)
    async with (
        generator(config, redis_url, "generation-0", policies=file) as first,
        generator(config, redis_url, "generation-1", policies=file) as second,
        learner(config, redis_url) as learning,
    ):
        failing = PolicyCopies(push_peers.SHAPES, "bfloat16", file)
        assert failing.find(policy(1).digest) is PolicyPlace.NOWHERE
        await learning.publish(policy(1))
        await learning.until(lambda: len(first.headers) == len(second.headers) == 1)
        await asyncio.sleep(3 * staging.LOOK_S)
        assert first.serves == second.serves == (0, policy(0).digest)
        failing.abandon()
        await learning.until(lambda: serve([first, second], policy(1)))
        assert num_frames(first, second) == len(policy(1).bits)
        failing.close()
    assert failures == []


async def test_six_that_restart_together_take_the_newest_version_from_the_file(
    redis: Redis, redis_url: str, tmp_path: Path, file: Path, failures: list[str]
) -> None:
    """While the next version comes."""
    config = run_config(tmp_path, make_run)

    @asynccontextmanager
    async def six() -> AsyncIterator[list[PushTarget]]:
        async with AsyncExitStack() as running:
            names = [f"generation-{number}" for number in range(6)]
            yield [
                await running.enter_async_context(generator(config, redis_url, name, policies=file)) for name in names
            ]

    async with learner(config, redis_url) as learning:
        async with six() as before:
            await published(learning, 1, *before)
        async with six() as again:
            await learning.until(lambda: serve(again, policy(1)))
            assert num_frames(*again) == 0
            await published(learning, 2, *again)
            assert num_frames(*again) == 1
    assert failures == []


async def test_a_generator_that_serves_an_old_version_keeps_it_and_its_memory_comes_back(
    redis: Redis, redis_url: str, tmp_path: Path, file: Path
) -> None:
    config = run_config(tmp_path, make_run)
    async with (
        generator(config, redis_url, policies=file) as slow,
        generator(config, redis_url, policies=file) as quick,
        learner(config, redis_url) as learning,
    ):
        slow.engine.refusing = True
        for version in (1, 2, 3):
            await learning.publish(policy(version))
            await learning.until(partial(serve, [quick], policy(version)))
        assert slow.serves == (0, policy(0).digest)
        assert num_slots(quick) in (3, 4)  # those of both, and the next one of one or both
        slow.engine.refusing = False
        for version in (4, 5, 6):
            await published(learning, version, slow, quick)
        assert num_slots(quick) == 2


async def test_nobody_waits_for_a_generator_whose_push_stands_still(
    redis: Redis, redis_url: str, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_STILL_S", 0.3)
    config = run_config(tmp_path, make_run)
    target = policy(1)

    async def standing() -> AsyncIterator[WeightFrame]:
        yield WeightFrame(header=push_header(target.facts, None, run="test", epoch=1, learner="old"))
        await asyncio.sleep(50.0)

    async with generator(config, redis_url, policies=file) as stuck:
        push = asyncio.create_task(sent_to(stuck.address, standing(), timeout_s=50.0))
        while stuck.copies.staged is stuck.copies.serving:
            await asyncio.sleep(0.01)
        async with (
            generator(config, redis_url, "generation-1", policies=file) as free,
            learner(config, redis_url, epoch=2) as learning,
        ):
            await learning.publish(target)
            await learning.until(lambda: serve([free], target))
        push.cancel()


async def test_a_file_of_another_model_is_not_touched(redis: Redis, redis_url: str, tmp_path: Path, file: Path) -> None:
    config = run_config(tmp_path, make_run)
    async with (
        generator(config, redis_url, policies=file) as first,
        generator(config, redis_url, ignored={"other": (3,)}, policies=file) as other,
        learner(config, redis_url) as learning,
    ):
        await published(learning, 1, first, other)
        assert num_frames(first) == num_frames(other) == len(policy(0).bits)
