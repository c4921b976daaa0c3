"""Keeps every registered generator at the newest policy version: a reconciliation loop, not a broadcast.

Each generator that is behind is pushed what it lacks: changes when it holds the version before, everything otherwise.
A push that fails or is late concerns that generator alone; one that fails again and again is out until it has caught
up. Pushes that are due together are sent one after another. consumes: published policies, heartbeats. produces:
PushWeights calls, and a call-back when a version is live. waits for: a new version, a generator that is behind.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from gspo.common.errors import InputError
from gspo.common.network.auth_log import token_accepted_by, token_rejected_by
from gspo.common.network.grpc_server import open_channel, token_metadata
from gspo.common.service.app import Service
from gspo.common.streams.instances import list_instances
from gspo.common.telemetry import metrics
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.replicas import REPLICA_STATES, GeneratorReplica
from gspo.learner.push.send_queue import Kind, SendQueue
from gspo.learner.push.transfer import PushFailedError, push_failure, send_push
from gspo.learner.push.weight_frames import WeightFrames
from gspo_proto.generation_pb2 import DescribeRequest, PushHeader, PushResult
from gspo_proto.generation_pb2_grpc import GenerationStub

log = structlog.get_logger()
# Generators join and fall behind seldom; a new version wakes the loop at once.
_RECONCILE_EVERY_S = 0.5
_DESCRIBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class VersionServed:
    """A version that a generator serves, and what it cost.

    Attributes:
        push_s: From its publication until it was served.
        stage_s: Of it, until every byte had come and the digest was checked.
        stall_s: How long generation stood still.
    """

    policy: PolicyWeights
    generator: str
    push_s: float
    stage_s: float
    stall_s: float
    num_bytes: int


class Publisher:
    """Pushes to generators.

    Attributes:
        live_version: Newest version that a generator serves, -1 before any does; live_unix_s: since when.

    Args:
        epoch: Of this learner; generators refuse a lower one than they have seen.
        on_live: Awaited for the first generator that serves a version.
    """

    def __init__(self, service: Service, epoch: int, on_live: Callable[[VersionServed], Awaitable[None]]) -> None:
        self._service, self._epoch, self._on_live = service, epoch, on_live
        # Two learners of one epoch, in two run directories of one name, are told apart.
        self._learner = uuid.uuid4().hex[:12]
        self._metadata = token_metadata(service.options.token)
        self._newest: PolicyWeights | None = None
        self._before: PolicyWeights | None = None
        self._changes: WeightFrames | None = None
        self._published_at = 0.0
        self._replicas: dict[str, GeneratorReplica] = {}
        self._queue = SendQueue(service.config.generation.push_timeout_s)
        self._woken = asyncio.Event()
        self.live_version, self.live_unix_s = -1, 0.0

    def publish(self, policy: PolicyWeights) -> None:
        """Make a version the newest; the one before stays as the base of changes."""
        self._before, self._newest, self._changes = self._newest, policy, None
        self._published_at = time.monotonic()
        self._woken.set()

    def describe(self) -> list[dict[str, Any]]:
        """Every registered generator: state, version, and why it is behind or out."""
        return [target.describe() for target in self._replicas.values()]

    def problem(self) -> str:
        """Why nobody generates under weights that this learner pushed; empty while somebody may."""
        if not self._replicas:
            return "no generator is registered"
        if all(target.state == "out" for target in self._replicas.values()):
            return "every generator is out: " + "; ".join(f"{t.name}: {t.problem}" for t in self._replicas.values())
        return ""

    @property
    def push_limit_s(self) -> float:
        """Longest that a push of the newest version to a generator without any of it may take."""
        return self._queue.limit_s("full", self._newest.num_bytes if self._newest else 0)

    async def run(self) -> None:
        """Reconcile until cancelled.

        Raises:
            InputError: A generator obeys another learner of this run.
        """
        try:
            while True:
                self._woken.clear()
                await self._refresh_replicas()
                for target in self._replicas.values():
                    await self._reconcile(target)
                self._count()
                try:
                    async with asyncio.timeout(_RECONCILE_EVERY_S):
                        await self._woken.wait()
                except TimeoutError:
                    continue
        finally:
            for target in self._replicas.values():
                await target.close()

    async def _refresh_replicas(self) -> None:
        """Take notice of generators that came or left."""
        found = {
            m.uid: m for m in await list_instances(self._service.redis, self._service.keys, "generation") if m.grpc
        }
        for uid in self._replicas.keys() - found.keys():
            target = self._replicas.pop(uid)
            log.warning("generator_left", generator=target.name)
            token_accepted_by(self._service, target.name)
            await target.close()
        for uid in found.keys() - self._replicas.keys():
            instance = found[uid]
            version, digest = int(instance.facts["version"]), str(instance.facts["digest"])
            channel = open_channel(instance.grpc, self._service.config.services.tls)
            self._replicas[uid] = target = GeneratorReplica(instance, channel, version, digest)
            log.info("generator_joined", generator=target.name, version=version, digest=digest[:12])

    async def _reconcile(self, target: GeneratorReplica) -> None:
        if target.pushing and target.pushing.done():
            pushing, target.pushing = target.pushing, None
            pushing.result()
        newest = self._newest
        if newest is None:
            return
        if target.serves(newest):
            await self._announce(target, newest, PushResult(), num_bytes=0)
        else:
            target.fall_behind()
            if target.idle:
                target.pushing = asyncio.create_task(self._push(target))
                target.pushing.add_done_callback(lambda _: self._woken.set())

    async def _push(self, target: GeneratorReplica) -> None:
        """Bring a generator to the version that is the newest when its turn has come."""
        if target.num_failures and (silence := await self._describe_replica(target)):
            # Before its turn: a generator that does not answer keeps nobody else waiting.
            target.fail(str(silence))
            return
        kind: Kind = "delta" if self._base_of(target) else "full"
        async with self._queue.turn(kind, target) as end_turn:
            policy, base = self._newest, self._base_of(target)
            if policy is None or target.serves(policy) or (kind == "delta" and base is None):
                return  # While it waited, another push became due, or none: the next look begins it.
            began = time.monotonic()
            try:
                result, num_bytes = await self._send(target, kind, policy, base, end_turn)
            except (grpc.aio.AioRpcError, PushFailedError) as error:
                await self._note_failure(target, policy, base, error)
                return
        push_s = time.monotonic() - began
        self._queue.took(kind, policy.num_bytes, push_s)
        token_accepted_by(self._service, target.name)
        target.version, target.digest = result.version, result.digest
        metrics.PUSH_SECONDS.labels(kind).observe(push_s)
        metrics.PUSH_BYTES.labels(kind).inc(num_bytes)
        await self._announce(target, policy, result, num_bytes)

    def _base_of(self, target: GeneratorReplica) -> PolicyWeights | None:
        """The version that a generator holds, where changes to it can be sent."""
        return self._before if self._before and self._before.digest == target.digest else None

    async def _send(
        self,
        target: GeneratorReplica,
        kind: Kind,
        policy: PolicyWeights,
        base: PolicyWeights | None,
        on_sent: Callable[[], None],
    ) -> tuple[PushResult, int]:
        """One call: the header, and once the generator has admitted it, the frames; its answer and their bytes."""
        limit_s = self._queue.limit_s(kind, policy.num_bytes, target.num_failures)
        call = GenerationStub(target.channel).PushWeights(timeout=limit_s, metadata=self._metadata)
        return await send_push(call, self._header(policy, base), self._frames(policy, base), on_sent)

    def _header(self, policy: PolicyWeights, base: PolicyWeights | None) -> PushHeader:
        return PushHeader(
            run=self._service.config.name,
            epoch=self._epoch,
            learner=self._learner,
            version=policy.version,
            digest=policy.digest,
            base_digest=base.digest if base else "",
            dtype=policy.dtype,
            num_tensors=len(policy.bits),
            num_bytes=policy.num_bytes,
        )

    def _frames(self, policy: PolicyWeights, base: PolicyWeights | None) -> WeightFrames:
        """The whole policy, or its changes: packed once, however many generators take them."""
        if base is None or self._newest is not policy:
            return WeightFrames(policy, base)
        self._changes = self._changes or WeightFrames(policy, base)
        return self._changes

    async def _note_failure(
        self,
        target: GeneratorReplica,
        policy: PolicyWeights,
        base: PolicyWeights | None,
        error: grpc.aio.AioRpcError | PushFailedError,
    ) -> None:
        """Ask the generator what it holds: its answer may have been lost, or it is another than we thought."""
        failure = push_failure(error)
        reason = str(failure)
        metrics.PUSH_FAILURES.labels(failure.status.name.lower()).inc()
        if failure.status is grpc.StatusCode.UNAUTHENTICATED:
            token_rejected_by(self._service, target.name)
            target.fail(reason)
            return
        log.warning("push_failed", generator=target.name, version=policy.version, reason=reason)
        await self._describe_replica(target)
        if target.serves(policy):
            return  # it took the version, and only its answer was lost
        if base and target.digest != base.digest:
            return  # it has lost what the changes are to: a whole push is due at once
        if target.fail(reason):
            log.error("generator_out", generator=target.name, num_failures=target.num_failures, reason=reason)

    async def _describe_replica(self, target: GeneratorReplica) -> PushFailedError | None:
        """Take over what a generator says of itself; why it says nothing, where it does not answer.

        Raises:
            InputError: It obeys another learner.
        """
        target.digest = ""
        try:
            held = await GenerationStub(target.channel).Describe(
                DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            log.warning("generator_silent", generator=target.name, status=error.code().name)
            return push_failure(error)
        if held.epoch > self._epoch or (held.epoch == self._epoch and held.learner != self._learner):
            raise InputError(
                "name",
                f"another learner has taken over the run {self._service.config.name!r}: {target.name} obeys learner "
                f"{held.learner} of epoch {held.epoch}, this is {self._learner} of epoch {self._epoch}",
                "Give each run a name of its own, or leave the run to the other learner",
            )
        target.version, target.digest = held.version, held.digest
        return None

    async def _announce(
        self, target: GeneratorReplica, policy: PolicyWeights, result: PushResult, num_bytes: int
    ) -> None:
        """A generator serves a version."""
        if policy is self._newest and target.catch_up():
            log.info("generator_returned", generator=target.name, version=policy.version)
        if policy.version <= self.live_version:
            return
        self.live_version, self.live_unix_s = policy.version, time.time()
        push_s, stall_s = time.monotonic() - self._published_at, result.pause_s + result.load_s + result.resume_s
        await self._on_live(VersionServed(policy, target.instance.name, push_s, result.stage_s, stall_s, num_bytes))

    def _count(self) -> None:
        found = Counter(target.state for target in self._replicas.values())
        for state in REPLICA_STATES:
            metrics.GENERATORS.labels(state).set(found[state])
