"""A learner's publisher and generators for tests of the push: everything real but the engine.

The stand-in engine loads by promoting the staged copy, as slowly or badly as a test wants. The learner has one rank or
three: then by default the second owns the tensor that changes, and the third owns nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gspo.common.config.schema import Config, TlsConfig
from gspo.common.network.grpc_server import ADMITTED, GrpcApi, GrpcServer, open_channel
from gspo.common.service.app import Service
from gspo.common.service.options import Options
from gspo.common.streams.instances import Instance, Registration
from gspo.generation.engine.api import LoadFailedError, LoadTimes
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.servicer import SERVICE_NAME, Context, GenerationGrpcServicer
from gspo.learner.push.policy_weights import PolicyWeights, joined, own_weights, rank_manifest, weights_from
from gspo.learner.push.publisher import Publisher
from gspo.learner.push.shifts import LearnerShifts
from gspo.learner.shares.share_server import ShareServer
from gspo_proto import generation_pb2_grpc
from gspo_proto.generation_pb2 import PushHeader, PushResult, WeightFrame
from gspo_proto.generation_pb2_grpc import GenerationStub
from gspo_proto.rollout_pb2 import VersionLive

SHAPES = {"a": (300, 100), "b": (50,)}
# The tensors of each rank.
ONE_RANK: list[tuple[str, ...]] = [("a", "b", "c")]
THREE_RANKS: list[tuple[str, ...]] = [("b", "c"), ("a",), ()]
OWNED = ONE_RANK
# The file that generators have in common, unless a test names another one.
POLICIES: Path | None = None


def policy(version: int) -> PolicyWeights:
    """Version 0 is random; each later one differs from the one before in a few elements."""
    chance = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=chance).bfloat16() for name, shape in SHAPES.items()}
    for number in range(version):
        tensors["a"].view(-1)[number * 20 : number * 20 + 10] += 1.0
    return weights_from(version, tensors)


def service_of(name: str, config: Config, redis_url: str) -> Service:
    options = Options(name.partition("-")[0], config.run_dir, redis_url, name, "127.0.0.1", 0, 0, False, config)
    return Service(options)


class StandInEngine:
    """Engine as the receiver uses it.

    Attributes:
        load_s: How long a load takes.
        may_load: A load stands still, as one that has paused the engine, until it is set.
        loading: Set during a load.
        refusing: Whether loads fail.
        flaws: Loads after which the engine has other weights than those of the policy.
        is_asleep, may_sleep: Whether it sleeps; it falls asleep once it may.
        history: Its sleeps, and its wakes with their versions.
    """

    def __init__(self) -> None:
        self.version, self.load_s, self.refusing = 0, 0.0, False
        self.flaws, self.num_loads = 0, 0
        self.is_asleep, self.may_sleep, self.history = False, asyncio.Event(), list[str]()
        self.may_sleep.set()
        self.may_load, self.loading = asyncio.Event(), asyncio.Event()
        self.may_load.set()

    async def load(self, version: int, copies: PolicyCopies, *, on_update: str, timeout_s: float) -> LoadTimes:
        begun = copies.staged_digest()
        self.loading.set()
        try:
            await self.may_load.wait()
            await asyncio.sleep(self.load_s)
        finally:
            self.loading.clear()
        assert copies.staged_digest() == begun, "the copy was written to while it was being loaded"
        if self.refusing:
            raise LoadFailedError(f"version {version} did not load")
        copies.promote()
        self.version = version
        self.num_loads += 1
        return LoadTimes(0.0, self.load_s, 0.0)

    async def checksum(self, timeout_s: float) -> str:
        return f"{self.version}, flaw {self.num_loads}" if self.num_loads <= self.flaws else str(self.version)

    async def sleep(self, *, on_update: str, timeout_s: float) -> None:
        await self.may_sleep.wait()
        if not self.is_asleep:
            self.history.append("sleep")
        self.is_asleep = True

    async def wake(self, version: int, copies: PolicyCopies, *, timeout_s: float) -> LoadTimes:
        times = await self.load(version, copies, on_update="recompute", timeout_s=timeout_s)
        self.is_asleep = False
        self.history.append(f"wake {version}")
        return times


class IdleLoop:
    """The part of a generation loop that the servicer calls."""

    num_running = 0

    def weights_changed(self) -> None:
        """There is nothing to wait for."""


@dataclass
class PushTarget:
    """One generator.

    Attributes:
        headers: Those of the pushes it has received.
        corrupt: Changes their frames on the way.
        answer: What it answers to them, if it is to answer without taking them.
    """

    service: Service
    engine: StandInEngine
    copies: PolicyCopies
    servicer: GenerationGrpcServicer
    address: str = ""
    headers: list[PushHeader] = field(default_factory=list)
    corrupt: Callable[[WeightFrame], WeightFrame] | None = None
    answer: PushResult | None = None

    @property
    def serves(self) -> tuple[int, str]:
        return self.engine.version, self.copies.serving_digest()


def serve(generators: list[PushTarget], version: PolicyWeights) -> bool:
    """Whether each of them serves a version, by number and digest."""
    return all(generator.serves == (version.version, version.digest) for generator in generators)


def flipped(frame: WeightFrame) -> WeightFrame:
    """One bit of the weights, or of the packed changes, is another."""
    broken = WeightFrame()
    broken.CopyFrom(frame)
    run = broken.tensors[0]
    if run.HasField("changes"):
        run.changes.packed = _with_flipped_bit(run.changes.packed)
    else:
        run.data = _with_flipped_bit(run.data)
    return broken


def _with_flipped_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


async def sent_to(address: str, frames: AsyncIterator[WeightFrame], timeout_s: float | None = 10.0) -> PushResult:
    async with open_channel(address) as channel:
        return await GenerationStub(channel).PushWeights(frames, timeout=timeout_s)


class RecordingServicer(GenerationGrpcServicer):
    """Notes headers, and corrupts what the test wants corrupted."""

    generator: PushTarget

    def corrupt_pulled(self) -> None:
        """Corrupt the frames of other ranks too."""
        pull = self._receiver.pull

        async def pulled(address: str, header: PushHeader, tls: TlsConfig, token: str) -> AsyncGenerator[WeightFrame]:
            async for frame in pull(address, header, tls, token):
                yield self.generator.corrupt(frame) if self.generator.corrupt else frame

        self._receiver.pull = pulled

    async def PushWeights(self, request_iterator: AsyncIterator[WeightFrame], context: Context) -> PushResult:
        async def passed_on() -> AsyncIterator[WeightFrame]:
            async for frame in request_iterator:
                if frame.HasField("header"):
                    self.generator.headers.append(frame.header)
                elif self.generator.corrupt:
                    frame = self.generator.corrupt(frame)
                yield frame

        if self.generator.answer is None:
            return await super().PushWeights(passed_on(), context)
        await context.send_initial_metadata((ADMITTED,))
        async for _ in passed_on():
            continue
        return self.generator.answer


@asynccontextmanager
async def generator(
    config: Config,
    redis_url: str,
    name: str = "generation-0",
    ignored: Mapping[str, tuple[int, ...]] | None = None,
    gpus: Mapping[str, str] | None = None,
    model: Path | None = None,
    policies: Path | None = None,
) -> AsyncIterator[PushTarget]:
    """A generator that serves version 0, registered.

    Args:
        ignored: Further tensors of its model folder, which the learner does not have.
        gpus: Its GPUs with their kinds.
        model: The folder of its model, in place of the tests' own.
        policies: The file that generators of one host have in common.
    """
    service = service_of(name, config, redis_url)
    engine = StandInEngine()
    if model:
        copies = PolicyCopies.from_folder(model, config.generation.dtype)
    else:
        copies = PolicyCopies({**SHAPES, **(ignored or {})}, "bfloat16", policies or POLICIES)
        if not copies.serving.is_whole:
            for tensor, bits in policy(0).bits.items():
                copies.serving.put(tensor, bits.reshape(-1))
            copies.serving.finish()
    parts: Any = (engine, copies, None, IdleLoop())  # in place of engine, driver and loop, of which a push needs little
    servicer = RecordingServicer(service, *parts)
    servicer.generator = running = PushTarget(service, engine, copies, servicer)
    servicer.corrupt_pulled()
    server = GrpcServer(
        GrpcApi(SERVICE_NAME, lambda server: generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)),
        host="127.0.0.1",
        port=0,
        token="",
    )
    await server.start()
    running.address = server.address
    # The same process id for all, as the first process of every container has.
    instance = Instance("generation", name, grpc=server.address, pid=1, uid=service.uid)
    registration = Registration(
        service.redis, service.keys, instance, service.activity, lambda: {**servicer.facts(), "gpus": gpus or {}}
    )
    await registration.beat()
    beating = asyncio.create_task(registration.run())
    try:
        yield running
    finally:
        await server.stop(0.0)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await service.redis.aclose()
        copies.close()


class PublishingLearner:
    """A publisher and what went live; on shared GPUs with its shifts.

    Attributes:
        others: The servers of the other ranks.
    """

    def __init__(self, config: Config, redis_url: str, epoch: int) -> None:
        self.service = service_of("learner-0", config, redis_url)
        self.live: list[VersionLive] = []
        self.shifts = LearnerShifts(self.service, epoch)
        self.publisher = Publisher(self.service, epoch, self._on_live, self.shifts)
        self.running = asyncio.create_task(self.publisher.run())
        self.others = [ShareServer(self.service) for _ in OWNED[1:]]

    async def publish(self, version: PolicyWeights) -> None:
        """Publish a version from the shares of all ranks."""
        tensors = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in version.bits.items()}
        owned = [{name: tensors[name] for name in names if name in tensors} for names in OWNED]
        shares = [own_weights(version.version, share) for share in owned]
        for server, own in zip(self.others, shares[1:], strict=True):
            await asyncio.to_thread(server.forget_older)
            await asyncio.to_thread(server.add, own)
        addresses = ["", *(server.address for server in self.others)]
        parts = [rank_manifest(share, "", address) for share, address in zip(owned, addresses, strict=True)]
        shared = joined(version.version, shares[0], parts)
        # A test may have given it another digest.
        self.publisher.publish(replace(shared, digest=version.digest))

    async def _on_live(self, live: VersionLive) -> None:
        self.live.append(live)

    def states(self) -> list[str]:
        return sorted(target["state"] for target in self.publisher.describe())

    async def until(self, condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
        """Wait, as long as the publisher runs; what ended it is raised."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                if self.running.done():
                    self.running.result()
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for server in self.others:
            await server.stop()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.service.redis.aclose()


@asynccontextmanager
async def learner(config: Config, redis_url: str, epoch: int = 1) -> AsyncIterator[PublishingLearner]:
    """A learner that publishes."""
    publishing = PublishingLearner(config, redis_url, epoch)
    for server in publishing.others:
        await server.start()
    try:
        yield publishing
    finally:
        await publishing.close()


def run_config(folder: Path, make_run: Callable[..., Config], **generation: object) -> Config:
    """A run whose model is never read."""
    return make_run(folder, folder, generation={"dtype": "bfloat16", **generation})
