"""Pushes beside other events: other pushes that are due, a learner that resumes, a pause, another list of tensors.

Real publisher, frames, gRPC, servicer, staging and Redis; the engine is a stand-in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from redis.asyncio import Redis

from gspo.common.telemetry.metrics import PUSH_FAILURES
from gspo.common.weights.time_limit import TimeLimit
from gspo.learner.push import replicas
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.push.replicas import GeneratorReplica, PushFailedError
from gspo.learner.push.weight_updates import WholePolicy
from gspo_proto.generation_pb2 import PushResult
from tests.support import push_peers
from tests.support.push_peers import PublishingLearner, generator, learner, policy, run_config, serve
from tests.support.service_process import make_run

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]


RANKS = [pytest.param(push_peers.ONE_RANK, marks=pytest.mark.long), [("a", "c"), ("b",)]]


@pytest.fixture(params=RANKS, ids=["one rank", "two ranks"], autouse=True)
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it with the ranks of a larger learner too, which serve the tensors that they own."""
    monkeypatch.setattr(push_peers, "OWNED", request.param)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed pushes are tried again soon."""
    monkeypatch.setattr(replicas, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(replicas, "_LONGEST_PAUSE_S", 0.05)


def is_problem(learning: PublishingLearner, reason: str) -> bool:
    return reason in learning.publisher.problem()


def is_described(learning: PublishingLearner, reason: str) -> bool:
    return any(reason in target["problem"] for target in learning.publisher.describe())


async def test_an_answer_that_names_other_weights_makes_nothing_live(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run)
    async with generator(config, redis_url) as only, learner(config, redis_url) as learning:
        for wrong in (PushResult(version=1, digest=policy(2).digest), PushResult(version=0, digest=policy(1).digest)):
            only.answer = wrong
            await learning.publish(policy(1))
            reason = f"the generator answers that it serves version {wrong.version} with digest {wrong.digest[:12]}"
            await learning.until(partial(is_problem, learning, reason))
            assert learning.live == []
            assert only.serves == (0, policy(0).digest)
        only.answer = None
        await learning.until(lambda: serve([only], policy(1)) and learning.states() == ["current"])
        await learning.until(lambda: [live.version for live in learning.live] == [1])


async def test_whole_pushes_that_are_due_together_come_through(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six generators, and a deadline of twice a single push: sent all at once, each would take six times as long."""
    config = run_config(tmp_path, make_run)
    for sender in ("push.publisher", "shares.share_server"):
        monkeypatch.setattr(f"gspo.learner.{sender}.WholePolicy", FramesOfOneLink)
    async with learner(config, redis_url) as learning, contextlib.AsyncExitStack() as running:
        first = await running.enter_async_context(generator(config, redis_url))
        await learning.publish(policy(3))
        await learning.until(lambda: serve([first], policy(3)) and bool(learning.live))
        deadline_s = 2 * learning.live[0].push_s
        monkeypatch.setattr(TimeLimit, "seconds", lambda *_: deadline_s)
        failed = num_failures()
        six = [await running.enter_async_context(generator(config, redis_url)) for _ in range(6)]
        await learning.until(lambda: sum(target["waiting"] for target in learning.publisher.describe()) == 5)
        await learning.until(lambda: serve(six, policy(3)), 20.0)
        assert num_failures() == failed


class FramesOfOneLink(WholePolicy):
    """A dozen frames of a policy, which share one slow link with those of every other push."""

    link = asyncio.Lock()

    def __init__(self, policy: PolicyWeights) -> None:
        super().__init__(policy, frame_bytes=6000)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for frame in super().__aiter__():
            async with self.link:
                await asyncio.sleep(0.05)
            yield frame


def num_failures() -> float:
    """Pushes that failed so far, for any reason."""
    return sum(sample.value for metric in PUSH_FAILURES.collect() for sample in metric.samples)


async def test_a_token_is_named_although_the_first_push_failed_otherwise(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path, make_run)

    async def unreachable(*_asked: Any, **_options: Any) -> None:
        raise PushFailedError(grpc.StatusCode.UNAVAILABLE, "not reachable yet")

    async def refused(*_asked: Any) -> None:
        raise PushFailedError(grpc.StatusCode.UNAUTHENTICATED, "another token")

    async with generator(config, redis_url), learner(config, redis_url) as learning:
        monkeypatch.setattr(GeneratorReplica, "push", unreachable)
        monkeypatch.setattr(GeneratorReplica, "refresh", refused)
        await learning.publish(policy(1))
        await learning.until(lambda: "refuses our token" in str(learning.service.problems.values()))


async def test_tensors_that_the_architecture_ignores_are_no_mismatch(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run)
    more = {"ignored": (30, 10)}
    async with generator(config, redis_url, ignored=more) as only, learner(config, redis_url) as learning:
        assert only.serves != (0, policy(0).digest)
        for version in (0, 1, 2):
            await learning.publish(policy(version))
            await learning.until(partial(serve, [only], policy(version)))
        assert [bool(header.base_digest) for header in only.headers] == [False, True, True]


async def test_a_tensor_that_the_generator_does_not_have_is_refused_by_name(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run)
    bits = {name: torch.from_numpy(it).view(torch.bfloat16) for name, it in policy(1).bits.items()}
    cases = (
        ({"a": bits["a"], "c": bits["b"]}, "no tensor 'c' in this model", True),
        # It may be damage on the way: the next push may be whole.
        ({"a": bits["a"], "b": bits["b"][:9]}, "with 2 of 2 tensors; nothing was loaded", False),
        ({**bits, "c": bits["b"]}, "the push has 3 tensors", True),
    )
    async with generator(config, redis_url) as only:
        for epoch, (tensors, reason, is_final) in enumerate(cases, 1):
            async with learner(config, redis_url, epoch) as learning:
                await learning.publish(replace(weights_from(1, tensors), digest=policy(1).digest))
                await learning.until(partial(is_described, learning, reason))
                assert (reason in learning.publisher.refusal) is is_final
        assert only.serves == (0, policy(0).digest)


async def test_a_learner_that_resumes_while_every_engine_is_paused_gets_through(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """The learner dies while its version is being loaded: the loads end without it, and the engines go on."""
    config = run_config(tmp_path, make_run)
    async with generator(config, redis_url) as first, generator(config, redis_url) as second:
        both = [first, second]
        async with learner(config, redis_url) as dying:
            for peer in both:
                peer.engine.may_load.clear()
            await dying.publish(policy(3))
            await dying.until(lambda: all(peer.engine.loading.is_set() for peer in both))
        async with learner(config, redis_url, epoch=2) as resumed:
            # It starts from its newest checkpoint, one version before the version in the engine's load.
            await resumed.publish(policy(2))
            await resumed.until(lambda: len(first.headers) == 2)
            assert first.serves == (0, policy(0).digest)
            for peer in both:
                peer.engine.may_load.set()
            await resumed.until(lambda: serve(both, policy(2)))
            await resumed.publish(policy(3))
            await resumed.until(lambda: serve(both, policy(3)))
            await resumed.until(lambda: [live.version for live in resumed.live] == [2, 3])


async def test_a_generator_that_is_started_again_in_the_middle_of_a_pause_gets_everything(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run)
    async with learner(config, redis_url) as learning:
        async with generator(config, redis_url, "generation-0") as dying:
            dying.engine.may_load.clear()
            await learning.publish(policy(1))
            await learning.until(dying.engine.loading.is_set)
        # The same name, another process: what it holds is the model folder again.
        async with generator(config, redis_url, "generation-0") as again:
            await learning.until(lambda: serve([again], policy(1)))
            await learning.publish(policy(2))
            await learning.until(lambda: serve([again], policy(2)))
            assert [bool(header.base_digest) for header in again.headers] == [False, True]
            await learning.until(lambda: [live.version for live in learning.live] == [1, 2])


async def test_engines_with_other_weights_under_one_digest_load_them_again(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run, checksums_every=2)
    async with (
        generator(config, redis_url, "generation-0") as flawed,
        generator(config, redis_url, "generation-1") as sound,
        generator(config, redis_url, "generation-2", gpus={"GPU-1": "of another kind"}) as other,
        learner(config, redis_url) as learning,
    ):
        flawed.engine.flaws, other.engine.flaws = 2, 100
        for version in (1, 2):
            await learning.publish(policy(version))
            await learning.until(partial(serve, [flawed, sound, other], policy(version)))
            assert is_problem(learning, "") or version == 2
        # The load of version 2 was the second of all; the next one puts it right, without a tensor on the wire.
        await learning.until(lambda: flawed.engine.num_loads == 3 and sound.engine.num_loads == 3)
        await learning.until(lambda: learning.states() == ["current"] * 3)
        assert other.engine.num_loads == 2
        assert (flawed.headers[-1].base_digest, flawed.headers[-1].version) == (policy(2).digest, 2)


async def test_engines_that_stay_different_are_named(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run, checksums_every=1)
    reason = "have different weights under the digest of version 1"
    async with (
        generator(config, redis_url, "generation-0") as flawed,
        generator(config, redis_url, "generation-1"),
        learner(config, redis_url) as learning,
    ):
        flawed.engine.flaws = 1000
        await learning.publish(policy(1))
        for loads in (1, 2, 3):
            await learning.until(lambda: flawed.engine.num_loads > loads and is_described(learning, reason))  # noqa: B023
