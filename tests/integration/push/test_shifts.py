"""The shifts on shared GPUs: their order, and that neither a death nor a delay gives the GPUs to both sides.

Real shifts, publisher, gRPC servicer and Redis; engines and the trainer only note what happens to their memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.network.grpc_server import open_channel
from gspo.common.service.app import Service
from gspo.common.streams.gpu_engines import GpuEngine, GpuEngines
from gspo.common.streams.gpu_shift import GpuShift, Shift, Written, new_shift
from gspo.common.streams.instances import Instance, Registration
from gspo.common.streams.keys import INSTANCE_TTL_S
from gspo.generation.shared_gpus import gpus_of
from gspo.learner.push import shifts
from gspo.learner.push.shifts import ShiftStoppedError
from gspo.learner.push.weight_updates import WholePolicy, push_header
from gspo_proto.generation_pb2 import PushResult, WeightFrame
from gspo_proto.generation_pb2_grpc import GenerationStub
from tests.support.push_peers import (
    PublishingLearner,
    PushTarget,
    generator,
    learner,
    policy,
    run_config,
    serve,
    service_of,
)
from tests.support.service_process import make_run

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]


class NotingTrainer:
    """Notes in the engines' histories when its states move."""

    def __init__(self, *generators: PushTarget) -> None:
        self._generators = generators

    def move_to_device(self) -> None:
        assert all(generator.engine.is_asleep for generator in self._generators)
        self._note("states on the GPUs")

    def move_to_host(self) -> None:
        self._note("states in host memory")

    def _note(self, event: str) -> None:
        for target in self._generators:
            target.engine.history.append(event)


def shared_config(folder: Path, start_timeout_s: float = 600.0) -> Config:
    run = {"directory": str(folder), "total_steps": 3, "start_timeout_s": start_timeout_s}
    return make_run(
        folder,
        folder,
        placement="shared",
        staleness={"max_lag": 0},
        generation={"dtype": "bfloat16", "push_timeout_s": 10},
        run=run,
    )


def with_states(learning: PublishingLearner, *generators: PushTarget) -> PublishingLearner:
    trainer: Any = NotingTrainer(*generators)
    learning.shifts.trainer = trainer
    return learning


async def goes_on(waiting: asyncio.Task[Any]) -> None:
    """A wait looks several times in this while."""
    await asyncio.sleep(0.6)
    assert not waiting.done()


async def test_generators_sleep_before_the_states_come_and_wake_after_they_have_gone(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = shared_config(tmp_path)
    async with (
        generator(config, redis_url, "generation-0") as first,
        generator(config, redis_url, "generation-1") as second,
        learner(config, redis_url) as learning,
    ):
        with_states(learning, first, second)
        for version in (1, 2):
            await learning.shifts.begin(f"step {version}")
            learning.publisher.publish(policy(version))
            await asyncio.sleep(0.1)
            assert first.engine.is_asleep and second.engine.is_asleep, "a version woke them in the learner's shift"
            await learning.shifts.end()
            learning.publisher.wake()
            await learning.until(partial(serve, [first, second], policy(version)))
        await learning.until(lambda: [live.version for live in learning.live] == [1, 2])
    shift = ["sleep", "states on the GPUs", "states in host memory"]
    assert first.engine.history == second.engine.history == [*shift, "wake 1", *shift, "wake 2"]


async def test_a_push_in_the_learners_shift_is_refused_and_wakes_nobody(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = shared_config(tmp_path)
    async with generator(config, redis_url) as target, learner(config, redis_url) as learning:
        await learning.shifts.begin("step 7")
        update = WholePolicy(policy(1))

        async def frames() -> AsyncIterator[WeightFrame]:
            yield WeightFrame(
                header=push_header(update.target, None, run="test", epoch=1, learner=learning.service.uid)
            )
            async for frame in update:
                yield WeightFrame.FromString(frame)

        async with open_channel(target.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                result: PushResult = await GenerationStub(channel).PushWeights(frames(), timeout=10)
                del result
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.details() == "the learner has the GPUs (step 7); weights come after its shift"
        assert target.engine.is_asleep and target.engine.history == ["sleep"]


async def test_a_generator_with_gpus_of_its_own_refuses_to_sleep(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    """Its vLLM has no sleep mode, and would not come back. The learner names it, and takes no GPUs."""
    config = shared_config(tmp_path, start_timeout_s=0.5)
    async with (
        generator(config.model_copy(update={"placement": "split"}), redis_url) as target,
        learner(config, redis_url) as learning,
    ):
        with_states(learning)
        refusal = r"generation-0 \(.*\): FAILED_PRECONDITION: this generator has GPUs of its own \(placement: split\)"
        with pytest.raises(TimeoutError, match=refusal):
            await learning.shifts.begin("step 1")
        assert not target.engine.is_asleep and target.engine.history == []


async def test_without_a_new_version_they_wake_with_the_one_they_have(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """As after a requested checkpoint; only the header is sent."""
    config = shared_config(tmp_path)
    async with generator(config, redis_url) as target, learner(config, redis_url) as learning:
        with_states(learning, target)
        learning.publisher.publish(policy(1))
        await learning.until(lambda: serve([target], policy(1)))
        await learning.shifts.begin("a checkpoint")
        await learning.shifts.end()
        await learning.until(lambda: not target.engine.is_asleep)
        assert target.engine.history[-1] == "wake 1"
        assert [bool(header.base_digest) for header in target.headers] == [False, True]
        assert target.headers[1].base_digest == target.headers[1].digest == policy(1).digest


async def test_one_that_does_not_sleep_ends_the_wait_with_its_name(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifts, "_ASK_S", 0.3)
    config = shared_config(tmp_path, start_timeout_s=1.0)
    async with (
        generator(config, redis_url, "generation-0") as good,
        generator(config, redis_url, "generation-1") as bad,
        learner(config, redis_url) as learning,
    ):
        bad.engine.may_sleep.clear()
        with_states(learning)
        with pytest.raises(
            TimeoutError, match=r"do not sleep after 1 s \(run.start_timeout_s\): generation-1 "
        ) as error:
            await learning.shifts.begin("step 1")
        assert "generation-0" not in str(error.value)
        assert good.engine.is_asleep and good.engine.history == ["sleep"]
        bad.engine.may_sleep.set()


@asynccontextmanager
async def starting_engine(config: Config, redis_url: str) -> AsyncIterator[Service]:
    """A generator that has begun to start its engine: with a heartbeat and a record, and no address yet."""
    service = service_of("generation-0", config, redis_url)
    instance = Instance("generation", "generation-0", uid=service.uid)
    registration = Registration(service.redis, service.keys, instance, service.activity, dict)
    beating = asyncio.create_task(registration.run())
    async with gpus_of(service):
        yield service
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    await service.redis.aclose()


def records_of(service: Service) -> GpuEngines:
    return GpuEngines(service.redis, service.keys)


async def test_one_that_starts_its_engine_is_waited_for_until_it_has_ended(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = shared_config(tmp_path)
    async with learner(config, redis_url) as learning:
        with_states(learning)
        await learning.shifts.begin("loading the model")
        await learning.shifts.end()
        async with starting_engine(config, redis_url):
            taking = asyncio.create_task(learning.shifts.begin("step 1"))
            await goes_on(taking)
            assert learning.service.activity.detail == "to sleep: generation-0 starts its engine"
        await asyncio.wait_for(taking, 10)


async def test_a_wipe_of_redis_forgets_no_engine_that_starts(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    """While a learner that starts again waits to load the model."""
    config = shared_config(tmp_path)
    async with learner(config, redis_url) as learning:
        shift = GpuShift(redis, learning.service.keys)
        assert await shift.write(new_shift(1, "generation")) == "first"
        async with starting_engine(config, redis_url):
            taking = asyncio.create_task(learning.shifts.begin("loading the model"))
            await asyncio.sleep(0.5)
            await redis.flushall()
            await asyncio.sleep(0.3)
            assert "Redis was wiped, and generators register again" in learning.service.activity.detail
            await asyncio.sleep(INSTANCE_TTL_S)
            assert learning.service.activity.detail == "to sleep: generation-0 starts its engine"
            present = await shift.read()
            assert present is not None and present.purpose == "loading the model"
            assert not taking.done()
        await asyncio.wait_for(taking, 10)


async def test_a_silent_one_is_waited_for_until_its_process_has_ended(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """It was stopped or killed: without a heartbeat, and perhaps with its memory."""
    async with learner(shared_config(tmp_path), redis_url) as learning:
        with_states(learning)
        records = records_of(learning.service)
        await records.keep("uid", GpuEngine("generation-0", "node-1", is_supervised=True))
        taking = asyncio.create_task(learning.shifts.begin("step 1"))
        await goes_on(taking)
        silent = "to sleep: generation-0 on node-1 is silent, and may still have its memory"
        assert learning.service.activity.detail == silent
        await records.forget_process("generation-1")
        await goes_on(taking)
        await records.forget_process("generation-0")
        await asyncio.wait_for(taking, 10)


@pytest.mark.parametrize("is_supervised", [True, False])
async def test_past_the_limit_a_silent_one_ends_the_wait_and_is_forgotten_where_nobody_watches_it(
    redis: Redis, redis_url: str, tmp_path: Path, *, is_supervised: bool
) -> None:
    async with learner(shared_config(tmp_path, start_timeout_s=0.5), redis_url) as learning:
        with_states(learning)
        records = records_of(learning.service)
        await records.keep("uid", GpuEngine("generation-0", "node-1", is_supervised=is_supervised))
        if is_supervised:
            with pytest.raises(TimeoutError, match="generation-0 on node-1 is silent"):
                await learning.shifts.begin("step 1")
        else:
            assert 0.5 <= await learning.shifts.begin("step 1") < 10
        assert bool(await records.read()) == is_supervised


async def test_a_stop_ends_the_wait_and_leaves_the_gpus_to_the_generators(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifts, "_STOPPED_S", 0.5)
    config = shared_config(tmp_path)
    async with (
        generator(config, redis_url, "generation-0") as good,
        generator(config, redis_url, "generation-1") as bad,
        learner(config, redis_url) as learning,
    ):
        bad.engine.may_sleep.clear()
        with_states(learning)
        learning.publisher.publish(policy(1))
        taking = asyncio.create_task(learning.shifts.begin("step 1"))
        await learning.until(lambda: good.engine.is_asleep)
        assert not taking.done()
        learning.service.stopping.set()
        with pytest.raises(ShiftStoppedError, match="generation-1 "):
            await asyncio.wait_for(taking, 15)
        assert not learning.shifts.has_gpus
        bad.engine.may_sleep.set()
        await learning.until(lambda: serve([good], policy(1)) and not good.engine.is_asleep)


async def test_a_generator_that_restarts_in_the_learners_shift_waits_for_its_own(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = shared_config(tmp_path)
    async with learner(config, redis_url) as learning:
        with_states(learning)
        await learning.shifts.begin("step 3")
        service, has_engine, may_end = service_of("generation-0", config, redis_url), asyncio.Event(), asyncio.Event()

        async def generate() -> None:
            async with gpus_of(service):
                has_engine.set()
                await may_end.wait()

        generating = asyncio.create_task(generate())
        await asyncio.sleep(0.6)
        assert not has_engine.is_set()
        activity = service.activity
        assert (activity.kind, activity.what, activity.detail) == ("waiting", "gpus", "the learner has them (step 3)")
        assert not await records_of(service).read()
        await learning.shifts.end()
        await asyncio.wait_for(has_engine.wait(), 10)
        assert list(await records_of(service).read()) == [service.uid]
        may_end.set()
        await generating
        assert not await records_of(service).read()
        await service.redis.aclose()


async def test_without_a_learner_the_wait_for_the_gpus_ends(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    service = service_of("generation-0", shared_config(tmp_path, start_timeout_s=0.5), redis_url)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no learner has handed over the GPUs \(placement: shared\)"):
        async with gpus_of(service):
            raise AssertionError
    assert 0.5 <= time.monotonic() - began < 10
    await service.redis.aclose()


async def test_a_learner_that_dies_in_its_shift_leaves_them_asleep_and_its_successor_takes_the_shift_up(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    config = shared_config(tmp_path)
    async with generator(config, redis_url) as target:
        async with learner(config, redis_url, epoch=1) as dying:
            with_states(dying, target)
            await dying.shifts.begin("step 1")
        assert target.engine.is_asleep
        async with learner(config, redis_url, epoch=2) as learning:
            with_states(learning, target)
            await learning.shifts.begin("loading the model")
            assert target.engine.history == ["sleep", "states on the GPUs", "states on the GPUs"]
            # The one before was only silent, and comes back: it gets the GPUs no more.
            with pytest.raises(InputError, match="another learner has taken over the run 'test' and its GPUs"):
                await dying.shifts.end()
            learning.publisher.publish(policy(0))
            await learning.shifts.end()
            await learning.until(lambda: not target.engine.is_asleep)
            assert target.engine.history[-1] == "wake 0"


async def test_the_shift_outlives_a_wipe_of_redis(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    async with learner(shared_config(tmp_path), redis_url) as learning:
        keeping = asyncio.create_task(learning.shifts.keep())
        await learning.shifts.begin("step 2")
        before = await GpuShift(redis, learning.service.keys).read()
        await redis.flushall()
        async with asyncio.timeout(10):
            while (after := await GpuShift(redis, learning.service.keys).read()) is None:
                await asyncio.sleep(0.05)
        assert after == before and after.purpose == "step 2"
        keeping.cancel()


async def test_an_earlier_shift_that_is_written_again_never_replaces_the_one_that_begins(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write is late: the connection is slow, say."""
    write = GpuShift.write

    async def write_slowly(self: GpuShift, shift: Shift) -> Written:
        await asyncio.sleep(0.3 if shift.side == "generation" else 0.0)
        return await write(self, shift)

    async with learner(shared_config(tmp_path), redis_url) as learning:
        with_states(learning)
        await learning.shifts.begin("loading the model")
        await learning.shifts.end()
        monkeypatch.setattr(GpuShift, "write", write_slowly)
        keeping = asyncio.create_task(learning.shifts.keep())
        await asyncio.sleep(0.1)
        await learning.shifts.begin("step 1")
        await asyncio.sleep(0.4)
        present = await GpuShift(redis, learning.service.keys).read()
        assert present is not None and present.purpose == "step 1"
        keeping.cancel()


async def test_a_learner_of_an_earlier_epoch_writes_no_shift(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    service = service_of("learner-0", shared_config(tmp_path), redis_url)
    shift = GpuShift(service.redis, service.keys)
    newer = new_shift(2, "generation")
    assert await shift.write(newer) == "first"
    assert await shift.write(new_shift(1, "learning", "step 1")) == "refused"
    assert await shift.read() == newer
    await service.redis.aclose()


async def test_with_gpus_of_its_own_a_learner_has_no_shifts(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, make_run)
    async with generator(config, redis_url) as target, learner(config, redis_url) as learning:
        assert await learning.shifts.begin("step 1") == await learning.shifts.end() == 0.0
        learning.publisher.publish(policy(1))
        await learning.until(lambda: serve([target], policy(1)))
        assert target.engine.history == [] and learning.shifts.describe() == {}
        assert not await redis.exists(learning.service.keys.shift)
