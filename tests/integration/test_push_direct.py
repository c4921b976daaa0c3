"""Pushes whose bytes go over a direct road (real gloo), and what becomes of them when one end dies or stands still.

Neighbours: test_push.py has what holds for every transport, push_process.py is the end that dies.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from redis.asyncio import Redis

from gspo_proto.generation_pb2 import PushHeader, WeightFrame
from gspo_proto.generation_pb2_grpc import GenerationStub
from services.common.config import Config
from services.common.direct import Bytes
from services.common.metrics import PUSH_FAILURES
from services.common.rpc import open_channel
from services.generation import direct_road
from services.learner import publisher, targets
from services.learner.direct_road import DirectRoad
from services.learner.frames import Frames
from services.learner.weights import Policy
from tests.integration import push_process
from tests.integration.push_peers import Generator, generator, learner, policy, run_config
from tests.service_process import make_run

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(120)]
BOTH_ENDS = pytest.mark.parametrize("how", ["kill", "stop"])


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed pushes are tried again soon, and a version goes in many frames."""
    monkeypatch.setattr(targets, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(targets, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(publisher, "DIRECT_FRAME_BYTES", push_process.FRAME_BYTES)


@contextmanager
def other_side(side: str, how: str, config: Config, redis_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process that ends, or stands still, in the middle of its first push."""
    command = [sys.executable, "-m", "tests.integration.push_process", side, how, str(config.run_dir), redis_url]
    with (config.run_dir / f"{side}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait(20)


def has_ended(process: subprocess.Popen[bytes], how: str) -> bool:
    """Whether it has been killed, or stands still, by its own hand."""
    if how == "kill":
        return process.poll() == -signal.SIGKILL
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def serves(one: Generator, version: Policy) -> bool:
    return one.serves == (version.version, version.digest)


async def pushed(one: Generator, version: Policy, road: DirectRoad, *, frames: Frames | None = None) -> None:
    """One push by hand, of learner a in epoch 1."""
    header = PushHeader(
        run="test",
        epoch=1,
        learner="a",
        version=version.version,
        digest=version.digest,
        dtype=version.dtype,
        num_tensors=len(version.bits),
        num_bytes=version.num_bytes,
    )
    async with open_channel(one.address) as channel:
        call = GenerationStub(channel).PushWeights(timeout=10)
        await publisher.deliver(call, header, frames or Frames(version), road)


@BOTH_ENDS
async def test_a_learner_that_ends_in_the_middle_leaves_the_old_weights_and_a_free_generator(
    redis: Redis, redis_url: str, tmp_path: Path, how: str
) -> None:
    config = run_config(tmp_path, make_run, "gloo", push_timeout_s=5.0)
    async with generator(config, redis_url) as only:
        with other_side("learner", how, config, redis_url) as dying:
            async with learner(config, redis_url, epoch=2) as watching:
                await watching.until(lambda: has_ended(dying, how), 60)
                assert only.headers and only.headers[0].transport == "gloo"
                assert serves(only, policy(0))
                began = time.monotonic()
                watching.publisher.publish(policy(2))
                await watching.until(lambda: serves(only, policy(2)))
                assert time.monotonic() - began < 5.0


@BOTH_ENDS
async def test_a_generator_that_ends_in_the_middle_holds_nobody_up(
    redis: Redis, redis_url: str, tmp_path: Path, how: str
) -> None:
    config = run_config(tmp_path, make_run, "gloo", push_timeout_s=2.0)
    async with generator(config, redis_url) as good, learner(config, redis_url) as learning:
        with other_side("generator", how, config, redis_url) as dying:
            await learning.until(lambda: len(learning.publisher.describe()) == 2, 60)
            began, failed_before = time.monotonic(), num_failures()
            learning.publisher.publish(policy(1))
            await learning.until(lambda: serves(good, policy(1)))
            await learning.until(lambda: has_ended(dying, how))
            await learning.until(lambda: num_failures() > failed_before)
            assert time.monotonic() - began < 10.0
            learning.publisher.publish(policy(2))
            await learning.until(lambda: serves(good, policy(2)))


def num_failures() -> float:
    """Pushes that failed, for whatever reason: of a generator that is gone the learner tells nothing more."""
    family = next(family for family in PUSH_FAILURES.collect())
    return sum(sample.value for sample in family.samples)


async def test_one_link_serves_one_push_after_another_and_a_new_one_comes_after_a_failure(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run, "gloo")
    async with generator(config, redis_url) as only, learner(config, redis_url) as learning:
        for version in (1, 2, 3):
            learning.publisher.publish(policy(version))
            await learning.until(lambda version=version: serves(only, policy(version)))
        links = [header.link for header in only.headers]
        assert links[0] == "" and links[1] == links[2] != ""
        assert [bool(header.base_digest) for header in only.headers] == [False, True, True]

        only.engine.refusing = True
        learning.publisher.publish(policy(4))
        await learning.until(lambda: len(only.headers) > 4)
        only.engine.refusing = False
        await learning.until(lambda: serves(only, policy(4)))
        assert only.headers[3].link == links[2] and only.headers[4].link == ""


async def test_a_frame_that_fits_no_tensor_is_refused_by_name(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run, "gloo")
    other = Policy(1, policy(1).digest, "bfloat16", {"a": policy(1).bits["a"], "c": policy(1).bits["b"]})
    road = DirectRoad("gloo", "127.0.0.1", 10.0)
    async with generator(config, redis_url) as only:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pushed(only, other, road)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "no tensor 'c' in this model" in refused.value.details()
        assert serves(only, policy(0))
        await pushed(only, policy(1), road)
        assert serves(only, policy(1))


async def test_a_generator_keeps_no_link_of_a_push_that_failed(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run, "gloo")
    road = DirectRoad("gloo", "127.0.0.1", 10.0)
    async with generator(config, redis_url) as only:
        with pytest.raises(grpc.aio.AioRpcError, match="nothing was loaded"):
            await pushed(only, Policy(1, policy(2).digest, "bfloat16", policy(1).bits), road)
        assert only.door._receiver._road._link is None
        await pushed(only, policy(1), road)
        assert only.door._receiver._road._link is not None
        road.close()


class TooMuch(Frames):
    """One frame of more than a socket holds, and than the tensor has."""

    async def apart(self) -> AsyncIterator[tuple[WeightFrame, Bytes]]:
        frame, data = WeightFrame(), np.zeros(2**28, np.uint8)
        frame.tensor.name, frame.tensor.direct_bytes = "a", len(data)
        yield frame, data


async def test_a_sender_in_the_middle_of_a_frame_hears_that_it_is_refused(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run, "gloo")
    async with generator(config, redis_url) as only:
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError, match="reach beyond its end") as refused:
            await pushed(only, policy(1), DirectRoad("gloo", "127.0.0.1", 60.0), frames=TooMuch(policy(1)))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert time.monotonic() - began < 9.0


@pytest.mark.parametrize(
    ("transport", "told"), [("nccl", "needs a GPU, and this process sees none"), ("smoke", "'smoke' is none of gloo")]
)
async def test_a_road_that_cannot_be_is_refused_with_the_reason(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, told: str
) -> None:
    config = run_config(tmp_path, make_run)
    monkeypatch.setattr("services.learner.direct_road.device_id", lambda _: "")
    async with generator(config, redis_url) as only:
        with pytest.raises(grpc.aio.AioRpcError, match=told) as refused:
            await pushed(only, policy(1), DirectRoad(transport, "127.0.0.1", 10.0))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert serves(only, policy(0))


async def test_nccl_between_two_processes_of_one_gpu_is_refused_by_name(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path, make_run)
    monkeypatch.setattr("services.learner.direct_road.device_id", lambda _: "GPU-1")
    monkeypatch.setattr(direct_road, "device_id", lambda _: "GPU-1")
    monkeypatch.setattr(direct_road, "unavailable", lambda _: "")
    async with generator(config, redis_url) as only:
        with pytest.raises(grpc.aio.AioRpcError, match=r"share GPU-1.*set learner.push_transport to grpc or gloo"):
            await pushed(only, policy(1), DirectRoad("nccl", "127.0.0.1", 10.0))
