"""The push as a reconciliation loop: each generator gets its missing weights, and serves the old ones after a failure.

Real publisher, frames, gRPC servicer, staging and Redis; the engine is a stand-in that can be slow or refuse.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from gspo.common.errors import InputError
from gspo.common.telemetry import metrics
from gspo.common.weights.changes import pack_changes
from gspo.generation.receiver import PushRefusedError, Receiver
from gspo.learner.push import replicas, weight_updates
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.weight_updates import push_header
from gspo_proto.generation_pb2 import PushResult, WeightFrame
from tests.support import push_peers
from tests.support.push_peers import flipped, generator, learner, policy, run_config, sent_to, serve
from tests.support.service_process import make_run

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]
value = metrics.BY_SERVICE["learner"].get_sample_value


LAYOUTS = {
    "one rank": (push_peers.ONE_RANK, False),
    "three ranks": (push_peers.THREE_RANKS, False),
    "one host": (push_peers.THREE_RANKS, True),
}


@pytest.fixture(params=LAYOUTS, autouse=True)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of it with the ranks of a larger learner too, and with generators that have their policies in one file."""
    owned, has_file = LAYOUTS[request.param]
    monkeypatch.setattr(push_peers, "OWNED", owned)
    number = os.memfd_create("policies")
    if has_file:
        monkeypatch.setattr(push_peers, "POLICIES", Path(f"/proc/{os.getpid()}/fd/{number}"))
    yield
    os.close(number)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed pushes are tried again soon."""
    monkeypatch.setattr(replicas, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(replicas, "_LONGEST_PAUSE_S", 0.05)


def header_of(version: PolicyWeights, *, epoch: int, learner: str) -> WeightFrame:
    return WeightFrame(header=push_header(version.facts, None, run="test", epoch=epoch, learner=learner))


async def test_changes_go_to_who_has_the_version_before_and_everything_to_who_joins(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run)
    async with generator(config, redis_url, gpus={"GPU-1": "A"}) as first, learner(config, redis_url) as learning:
        for version in (3, 4):
            await learning.publish(policy(version))
            await learning.until(partial(serve, [first], policy(version)))
        assert [bool(header.base_digest) for header in first.headers] == [False, True]
        # In the middle of the run; the name and the process id are the first one's, as in two containers.
        async with generator(config, redis_url, gpus={"GPU-1": "A", "GPU-2": "B"}) as second:
            await learning.until(lambda: serve([second], policy(4)))
            assert learning.publisher.generator_gpus == {"GPU-1": "A", "GPU-2": "B"}
            await learning.publish(policy(5))
            await learning.until(lambda: serve([first, second], policy(5)))
            await learning.until(lambda: learning.states() == ["current", "current"])
            assert [bool(header.base_digest) for header in second.headers] == [False, True]
    assert [live.version for live in learning.live] == [3, 4, 5]
    assert learning.live[1].bytes < 0.01 * learning.live[0].bytes


async def test_a_generator_that_is_some_versions_behind_gets_their_changes_each_packed_once(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two generators misses two versions; with a lag of two the changes of three versions are kept."""
    packed: list[int] = []

    def noted(new: Any, old: Any) -> Any:
        packed.append(len(new))
        return pack_changes(new, old)

    monkeypatch.setattr(weight_updates, "pack_changes", noted)
    config = make_run(tmp_path, tmp_path, generation={"dtype": "bfloat16"}, staleness={"max_lag": 2})
    async with (
        generator(config, redis_url, "generation-0") as slow,
        generator(config, redis_url, "generation-1") as quick,
        learner(config, redis_url) as learning,
    ):
        await learning.publish(policy(1))
        await learning.until(lambda: serve([slow, quick], policy(1)))
        await learning.until(lambda: learning.states() == ["current", "current"])
        slow.engine.refusing = True
        for version in (2, 3):
            await learning.publish(policy(version))
            await learning.until(partial(serve, [quick], policy(version)))
        # Its next push brings version 4: of the two before it has neither.
        slow.engine.refusing = False
        await learning.publish(policy(4))
        await learning.until(lambda: serve([slow, quick], policy(4)))
    # It may have asked for version 3 again before version 4 was published.
    assert any(header.base_digest == policy(1).digest and header.version > 2 for header in slow.headers)
    assert [bool(header.base_digest) for header in slow.headers[1:]] == [True] * (len(slow.headers) - 1)
    num_elements = sum(bits.size for bits in policy(0).bits.values())
    assert sum(packed) == 3 * num_elements, "the changes of a version were packed again"


async def test_a_generator_that_misses_its_deadline_holds_nobody_up_and_is_asked_what_it_has(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run, push_timeout_s=0.5)
    async with (
        generator(config, redis_url) as slow,
        generator(config, redis_url) as quick,
        learner(config, redis_url) as learning,
    ):
        slow.engine.load_s = 1.5
        await learning.publish(policy(1))
        await learning.until(lambda: serve([quick], policy(1)))
        await learning.publish(policy(2))
        await learning.until(lambda: serve([quick], policy(2)))
        assert slow.serves == (0, policy(0).digest)
        # Its load continues after the call has ended, and the loaded version is the base of the next changes.
        await learning.until(lambda: slow.engine.version == 1)
        slow.engine.load_s = 0.0
        await learning.until(lambda: serve([slow], policy(2)))
        await learning.until(lambda: learning.states() == ["current", "current"])


async def test_a_push_that_never_answers_is_given_up_where_nothing_moves(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own time limit may be far away; once a generator has taken the version, only the answer was lost."""
    receive, silent = Receiver.receive, asyncio.Event()

    async def no_answer(self: Receiver, *args: Any) -> PushResult:
        result = await receive(self, *args)
        if not silent.is_set():
            silent.set()
            await asyncio.sleep(50.0)
        return result

    monkeypatch.setattr(Receiver, "receive", no_answer)
    config = run_config(tmp_path, make_run, push_timeout_s=50.0)
    async with generator(config, redis_url) as only, learner(config, redis_url) as learning:
        await learning.publish(policy(1))
        await silent.wait()
        assert serve([only], policy(1)) and not only.servicer.facts()["takes_weights"]
        assert only.servicer.facts()["num_frames"] == len(policy(1).bits)
        learning.publisher.give_up_pushes()
        await learning.until(lambda: [live.version for live in learning.live] == [1])
        assert learning.states() == ["current"]
        assert only.headers[1:] == []


async def test_what_comes_with_another_digest_is_never_loaded(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run)
    async with (
        generator(config, redis_url, "generation-0", policies=tmp_path / "of another host") as bad,
        generator(config, redis_url, "generation-1") as good,
        learner(config, redis_url) as learning,
    ):
        bad.corrupt = flipped
        for version in (1, 2):
            await learning.publish(policy(version))
            await learning.until(partial(serve, [good], policy(version)))
        await learning.until(lambda: learning.states() == ["current", "out"])
        assert bad.serves == (0, policy(0).digest)
        assert learning.publisher.problem() == ""
        (out,) = [target for target in learning.publisher.describe() if target["state"] == "out"]
        assert out["name"] == f"generation-0 ({bad.address})"
        assert "DATA_LOSS: version 2 has digest" in out["problem"] and "nothing was loaded" in out["problem"]
        # Counted at the publisher's next look.
        await learning.until(lambda: value("gspo_generators", {"state": "out"}) == 1)
        assert (value("gspo_push_failures_total", {"status": "data_loss"}) or 0) >= 3

        bad.corrupt = None
        await learning.until(lambda: serve([bad, good], policy(2)))
        await learning.until(lambda: learning.states() == ["current", "current"])
        await learning.until(lambda: value("gspo_generators", {"state": "out"}) == 0)


async def test_where_every_engine_refuses_the_learner_says_so(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run)
    async with learner(config, redis_url) as learning:
        assert learning.publisher.problem() == "no generator is registered"
        async with generator(config, redis_url) as only:
            only.engine.refusing = True
            await learning.publish(policy(1))
            await learning.until(lambda: learning.states() == ["out"])
            assert only.serves == (0, policy(0).digest)
            problem = learning.publisher.problem()
            assert problem == f"every generator is out: generation-0 ({only.address}): INTERNAL: version 1 did not load"
            only.engine.refusing = False
            await learning.until(lambda: serve([only], policy(1)) and learning.states() == ["current"])
            assert learning.publisher.problem() == ""


async def test_a_newer_learner_takes_over_and_the_older_one_ends(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run)
    async with generator(config, redis_url) as only, learner(config, redis_url, epoch=1) as old:
        await old.publish(policy(1))
        await old.until(lambda: serve([only], policy(1)))
        async with learner(config, redis_url, epoch=2) as new:
            await new.publish(policy(5))
            await new.until(lambda: serve([only], policy(5)))
            await old.publish(policy(2))
            with pytest.raises(InputError, match=r"another learner has taken over the run 'test'.*epoch 2"):
                await old.until(lambda: False)
            assert serve([only], policy(5))
        # A second learner of the same epoch, as of another run directory of the same name.
        async with learner(config, redis_url, epoch=2) as second:
            await second.publish(policy(6))
            with pytest.raises(InputError, match="another learner has taken over"):
                await second.until(lambda: False)
        assert serve([only], policy(5))


async def test_what_an_older_learner_was_sending_ends_when_a_newer_one_speaks(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run, push_timeout_s=50.0)

    async def for_ever() -> AsyncIterator[WeightFrame]:
        yield header_of(policy(9), epoch=1, learner="old")
        await asyncio.sleep(50.0)

    async with generator(config, redis_url) as only, learner(config, redis_url, epoch=2) as new:
        stuck = asyncio.create_task(sent_to(only.address, for_ever(), timeout_s=50.0))
        while not only.headers:
            await asyncio.sleep(0.01)
        await new.publish(policy(1))
        await new.until(lambda: serve([only], policy(1)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stuck
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_an_admitted_push_of_an_older_learner_ends_too(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run, push_timeout_s=50.0)
    admitted = asyncio.Event()

    async def header_alone() -> AsyncIterator[WeightFrame]:
        yield header_of(policy(9), epoch=1, learner="old")

    async def slow_to_admit(_takes_frames: bool) -> None:
        admitted.set()
        await asyncio.sleep(50.0)

    async with generator(config, redis_url) as only, learner(config, redis_url, epoch=2) as new:
        stuck = asyncio.create_task(only.servicer._receiver.receive(header_alone(), slow_to_admit, 50.0))
        await admitted.wait()
        await new.publish(policy(1))
        await new.until(lambda: serve([only], policy(1)))
        with pytest.raises(PushRefusedError, match=r"accepts learner .* of epoch 2"):
            await stuck


async def test_the_fence_is_raised_by_a_push_that_fails_too(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run)

    async def header_alone(epoch: int) -> AsyncIterator[WeightFrame]:
        yield header_of(policy(1), epoch=epoch, learner=f"learner-{epoch}")

    async with generator(config, redis_url) as only:
        for epoch, status in ((7, "DATA_LOSS"), (6, "PERMISSION_DENIED"), (7, "DATA_LOSS"), (8, "DATA_LOSS")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await sent_to(only.address, header_alone(epoch))
            assert refused.value.code().name == status
        assert only.serves == (0, policy(0).digest)


async def test_a_push_that_stalls_ends_at_the_generator_too(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run)

    async def stalling() -> AsyncIterator[WeightFrame]:
        yield header_of(policy(1), epoch=1, learner="a")
        await asyncio.sleep(20.0)

    async def admitted(takes_frames: bool) -> None:
        assert takes_frames

    async with generator(config, redis_url) as only:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await sent_to(only.address, stalling(), timeout_s=0.3)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert only.serves == (0, policy(0).digest)
        # Also without a cancellation: a learner that stands still cancels nothing.
        with pytest.raises(PushRefusedError, match="was not here by the deadline of the call; nothing was loaded"):
            await only.servicer._receiver.receive(stalling(), admitted, 0.1)
        # It is free for the next one at once.
        async with learner(config, redis_url, epoch=2) as learning:
            await learning.publish(policy(1))
            await learning.until(lambda: serve([only], policy(1)), 5.0)
        with pytest.raises(grpc.aio.AioRpcError, match="a push needs a deadline"):
            await sent_to(only.address, stalling(), timeout_s=None)


async def test_frames_that_cannot_be_made_end_the_learner_with_the_reason(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path, make_run)
    monkeypatch.setattr("gspo.learner.push.weight_updates.pack_changes", lambda *_: 1 / 0)
    async with generator(config, redis_url) as only, learner(config, redis_url) as learning:
        await learning.publish(policy(1))
        await learning.until(lambda: serve([only], policy(1)))
        await learning.publish(policy(2))
        with pytest.raises(ZeroDivisionError):
            await learning.until(lambda: False)
