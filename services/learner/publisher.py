"""Keeps every registered generator at the newest policy version: a reconciliation loop, not a broadcast.

Each generator that is behind is pushed what it lacks: changed elements when it holds the version before, everything
otherwise. A push that fails or is late concerns that generator alone. consumes: published policies, heartbeats.
produces: PushWeights calls, and a call-back when a version is live. waits for: a new version, a generator that is
behind. Neighbours: weights.py cuts the frames, loop.py publishes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import structlog

from gspo_proto.generation_pb2 import PushResult, WeightFrame
from gspo_proto.generation_pb2_grpc import GenerationStub
from services.common import metrics
from services.common.members import Member, members
from services.common.rpc import open_channel, token_metadata
from services.common.runtime import Service
from services.learner.weights import Policy, push_frames

log = structlog.get_logger()
# Generators join and fall behind seldom; a new version wakes the loop at once.
_LOOK_EVERY_S = 0.5
_RETRY_AFTER_S = 2.0


@dataclass(frozen=True)
class Live:
    """A version that a generator serves: how long it took from its publication, and what it cost."""

    policy: Policy
    generator: str
    push_s: float
    stall_s: float
    num_bytes: int


@dataclass
class _Target:
    """One generator process as the learner knows it."""

    member: Member
    channel: grpc.aio.Channel
    version: int
    digest: str
    pushing: asyncio.Task[None] | None = None
    not_before: float = 0.0


class Publisher:
    """Pushes to generators.

    Args:
        epoch: Of this learner; generators refuse a lower one than they have seen.
        on_live: Awaited for the first generator that serves a version.
    """

    def __init__(self, service: Service, epoch: int, on_live: Callable[[Live], Awaitable[None]]) -> None:
        self._service, self._epoch, self._on_live = service, epoch, on_live
        self._newest: Policy | None = None
        self._before: Policy | None = None
        self._published_at = 0.0
        self._targets: dict[tuple[str, int], _Target] = {}
        self._woken = asyncio.Event()
        self.live_version = -1

    def publish(self, policy: Policy) -> None:
        """Make a version the newest; the one before stays as the base of deltas."""
        self._before, self._newest = self._newest, policy
        self._published_at = time.monotonic()
        self._woken.set()

    @property
    def num_generators(self) -> int:
        """Generators that are registered."""
        return len(self._targets)

    async def run(self) -> None:
        """Reconcile until cancelled."""
        try:
            while True:
                await self._look()
                for target in self._targets.values():
                    await self._reconcile(target)
                self._woken.clear()
                try:
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await self._woken.wait()
                except TimeoutError:
                    continue
        finally:
            for target in self._targets.values():
                await _close(target)

    async def _look(self) -> None:
        """Take notice of generators that came, left, or say something else than we know."""
        found = {(m.name, m.pid): m for m in await members(self._service.redis, self._service.keys, "generation")}
        for key in self._targets.keys() - found.keys():
            log.warning("generator_left", generator=key[0])
            await _close(self._targets.pop(key))
        for key, member in found.items():
            if key not in self._targets:
                version, digest = int(member.facts["version"]), str(member.facts["digest"])
                self._targets[key] = _Target(member, open_channel(member.grpc), version, digest)
                log.info("generator_joined", generator=member.name, version=version, digest=digest[:12])

    async def _reconcile(self, target: _Target) -> None:
        newest = self._newest
        if newest is None or (target.pushing and not target.pushing.done()):
            return
        if target.digest == newest.digest and target.version == newest.version:
            await self._announce(target, newest, PushResult(), num_bytes=0)
        elif time.monotonic() >= target.not_before:
            target.pushing = asyncio.create_task(self._push(target, newest))

    async def _push(self, target: _Target, policy: Policy) -> None:
        base = self._before if self._before and self._before.digest == target.digest else None
        kind, began, sent = ("delta" if base else "full"), time.monotonic(), _Counter()
        frames = push_frames(policy, base, run=self._service.config.name, epoch=self._epoch)
        try:
            result = await GenerationStub(target.channel).PushWeights(
                _counted(frames, sent),
                timeout=self._service.config.generation.push_timeout_s,
                metadata=token_metadata(self._service.options.token),
            )
        except grpc.aio.AioRpcError as error:
            self._note_failure(target, policy, error)
            return
        target.version, target.digest = result.version, result.digest
        metrics.PUSH_SECONDS.labels(kind).observe(time.monotonic() - began)
        metrics.PUSH_BYTES.labels(kind).inc(sent.num_bytes)
        await self._announce(target, policy, result, sent.num_bytes)
        self._woken.set()

    def _note_failure(self, target: _Target, policy: Policy, error: grpc.aio.AioRpcError) -> None:
        """The generator stays out until it has caught up; what it holds is asked anew, so the next push is whole."""
        log.warning(
            "push_failed",
            generator=target.member.name,
            version=policy.version,
            status=error.code().name,
            reason=error.details(),
        )
        target.digest = ""
        retry_at_once = error.code() == grpc.StatusCode.FAILED_PRECONDITION and self._before is not None
        target.not_before = time.monotonic() + (0.0 if retry_at_once else _RETRY_AFTER_S)

    async def _announce(self, target: _Target, policy: Policy, result: PushResult, num_bytes: int) -> None:
        if policy.version <= self.live_version:
            return
        self.live_version = policy.version
        stall_s = result.pause_s + result.load_s + result.resume_s
        push_s = time.monotonic() - self._published_at
        await self._on_live(Live(policy, target.member.name, push_s, stall_s, num_bytes))


@dataclass
class _Counter:
    num_bytes: int = 0


async def _counted(frames: AsyncIterator[WeightFrame], counter: _Counter) -> AsyncIterator[WeightFrame]:
    async for frame in frames:
        counter.num_bytes += len(frame.tensor.data) + len(frame.tensor.indices)
        yield frame


async def _close(target: _Target) -> None:
    if target.pushing:
        target.pushing.cancel()
    await target.channel.close(None)
