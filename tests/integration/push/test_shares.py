"""The shares of a learner's other ranks: a rank that is gone, silent or ahead loads nothing, and a push comes through.

As in test_publisher.py, where all of it runs with three ranks too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from gspo.common.errors import InputError
from gspo.common.network.grpc_server import MAX_MESSAGE_BYTES, open_channel
from gspo.learner.push import replicas
from gspo.learner.push.policy_weights import PolicyWeights
from gspo_proto.learner_pb2 import PullRequest
from gspo_proto.learner_pb2_grpc import SharesStub
from tests.support import push_peers
from tests.support.push_peers import PublishingLearner, generator, learner, policy, run_config, serve
from tests.support.service_process import make_run

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def three_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And failed pushes are tried again soon."""
    monkeypatch.setattr(push_peers, "OWNED", push_peers.THREE_RANKS)
    monkeypatch.setattr(replicas, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(replicas, "_LONGEST_PAUSE_S", 0.05)


def is_live(learning: PublishingLearner, version: int) -> bool:
    return learning.publisher.live_version == version


def is_problem(learning: PublishingLearner, *reasons: str) -> bool:
    problems = [target["problem"] for target in learning.publisher.describe()]
    return any(all(reason in problem for reason in reasons) for problem in problems)


async def test_each_rank_sends_what_it_owns_and_the_account_has_the_bytes_of_all(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run)
    async with generator(config, redis_url) as only, learner(config, redis_url) as learning:
        for version in (1, 2):
            await learning.publish(policy(version))
            await learning.until(partial(serve, [only], policy(version)))
            await learning.until(partial(is_live, learning, version))
        # The third rank owns nothing, and is not asked.
        assert [list(header.sources) for header in only.headers] == [[learning.others[0].address]] * 2
        assert [header.base_version for header in only.headers if header.HasField("base_version")] == [1]
    assert learning.live[0].bytes > policy(1).num_bytes > 100 * learning.live[1].bytes > 0


async def test_a_rank_that_is_gone_leaves_the_old_weights_and_the_next_learner_gets_through(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run)
    async with generator(config, redis_url) as only:
        async with learner(config, redis_url) as learning:
            await learning.others[0].stop()
            await learning.publish(policy(1))
            reason = f"a rank of the learner at {learning.others[0].address} did not send its share of version 1"
            await learning.until(partial(is_problem, learning, "UNAVAILABLE", reason, "nothing was loaded"))
            assert only.serves == (0, policy(0).digest)
        async with learner(config, redis_url, epoch=2) as resumed:
            await resumed.publish(policy(1))
            await resumed.until(lambda: serve([only], policy(1)))


@asynccontextmanager
async def silent_rank() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Like a stopped process: it takes connections, and never answers. Its address, and whether it was called."""
    called = asyncio.Event()

    async def say_nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        called.set()
        await asyncio.sleep(30.0)

    stopped = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    host, port = stopped.sockets[0].getsockname()
    yield f"{host}:{port}", called
    stopped.close()


async def test_a_rank_that_is_silent_ends_the_push_at_its_deadline(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run, push_timeout_s=0.5)
    async with (
        silent_rank() as (silent, called),
        generator(config, redis_url) as only,
        learner(config, redis_url) as learning,
    ):
        address = learning.others[0].address
        learning.others[0].address = silent
        await learning.publish(policy(1))
        await learning.until(lambda: called.is_set() and is_problem(learning, "DEADLINE_EXCEEDED"))
        assert only.serves == (0, policy(0).digest)
        learning.others[0].address = address
        await learning.publish(policy(2))
        await learning.until(lambda: serve([only], policy(2)))


async def test_a_pull_from_an_older_learners_rank_ends_when_a_newer_learner_speaks(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run, push_timeout_s=50.0)
    async with (
        silent_rank() as (silent, called),
        generator(config, redis_url) as only,
        learner(config, redis_url, epoch=1) as old,
        learner(config, redis_url, epoch=2) as new,
    ):
        old.others[0].address = silent
        await old.publish(policy(1))
        await old.until(called.is_set)
        await new.publish(policy(2))
        await new.until(lambda: serve([only], policy(2)))
        with pytest.raises(InputError, match="another learner has taken over"):
            await old.until(lambda: False)


async def test_a_rank_keeps_the_last_two_versions_whole_and_says_what_it_has(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """A push of the version before may still ask for it."""
    config = run_config(tmp_path, make_run)
    async with learner(config, redis_url) as learning:
        server = learning.others[0]
        for version in (1, 2, 3):
            await learning.publish(policy(version))
        async with open_channel(server.address) as channel:

            async def num_bytes(version: int, base: int | None = None) -> int:
                request = PullRequest(version=version, base_version=base)
                return sum([frame.ByteSize() async for frame in SharesStub(channel).Pull(request)])

            whole = await num_bytes(3)
            assert await num_bytes(2) == whole > 2 * 300 * 100
            assert 0 < await num_bytes(2, 1) < await num_bytes(3, 1) < 0.1 * whole
            assert await num_bytes(3, 3) == 0
            assert await num_bytes(3, 0) == whole, "without the changes it sends every element"
            with pytest.raises(Exception, match="version 1 is asked, and 2, 3 is kept"):
                await num_bytes(1)


async def test_a_request_that_cannot_be_read_is_refused(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run)
    refusals = (
        (b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (bytes(MAX_MESSAGE_BYTES + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
    )
    async with learner(config, redis_url) as learning, open_channel(learning.others[0].address) as channel:
        for payload, code in refusals:
            pull: Any = channel.unary_stream("/gspo.Shares/Pull")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pull(payload, timeout=10).read()
            assert refused.value.code() is code


async def test_a_push_that_a_rank_has_left_behind_is_no_failure_of_the_generator(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path, make_run)
    async with generator(config, redis_url) as only, learner(config, redis_url) as learning:
        # The ranks are three versions ahead when version 1 is pushed.
        published, versions = learning.publisher.publish, list[PolicyWeights]()
        monkeypatch.setattr(learning.publisher, "publish", versions.append)
        for version in (1, 2, 3):
            await learning.publish(policy(version))
        published(versions[0])
        await learning.until(lambda: bool(only.headers))
        published(versions[2])
        await learning.until(lambda: serve([only], policy(3)))
        await learning.until(lambda: learning.states() == ["current"])
        assert only.headers[0].version == 1 and only.serves[0] == 3
