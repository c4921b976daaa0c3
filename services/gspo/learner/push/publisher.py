"""Keeps every registered generator at the newest policy version: a reconciliation loop, not a broadcast.

A generator that is behind gets changes where it holds the version before, and every element otherwise. A push that
fails or is late concerns that generator alone; after three failures it is out until it has caught up.
consumes: published versions, heartbeats. produces: PushWeights calls, and a call-back when a version is live.
waits for: a new version, a generator that is behind.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from gspo.common.tasks import wait_until_set
from gspo.common.telemetry import metrics
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.replicas import REPLICA_STATES, GeneratorReplica
from gspo.learner.push.transfer import Kind, PushFailedError, SendQueue
from gspo.learner.push.weight_frames import WeightFrames
from gspo_proto.generation_pb2 import PushHeader, PushResult

log = structlog.get_logger()
# Generators join and fall behind seldom; a new version wakes the loop at once.
_RECONCILE_EVERY_S = 0.5


@dataclass(frozen=True)
class VersionServed:
    """A version that a generator serves, and its cost.

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
        live_version: Newest version that a generator serves, -1 before any does.
        live_unix_s: When it was first served.

    Args:
        epoch: Of this learner; generators refuse a lower one than they have seen.
        on_live: Awaited for the first generator that serves a version.
    """

    def __init__(self, service: Service, epoch: int, on_live: Callable[[VersionServed], Awaitable[None]]) -> None:
        self._service, self._epoch, self._on_live = service, epoch, on_live
        # Distinguishes two learners of one epoch, in two run directories of one name.
        self._learner = uuid.uuid4().hex[:12]
        self._newest: PolicyWeights | None = None
        self._before: PolicyWeights | None = None
        self._changes: WeightFrames | None = None
        self._published_s = 0.0
        self._replicas: dict[str, GeneratorReplica] = {}
        self._queue = SendQueue(service.config.generation.push_timeout_s)
        self._woken = asyncio.Event()
        self.live_version, self.live_unix_s = -1, 0.0

    def publish(self, policy: PolicyWeights) -> None:
        """Make a version the newest; the one before stays as the base of changes."""
        self._before, self._newest, self._changes = self._newest, policy, None
        self._published_s = time.monotonic()
        self._woken.set()

    def describe(self) -> list[dict[str, Any]]:
        """Every registered generator: state, version, and why it is behind or out."""
        return [replica.describe(waiting=uid in self._queue.waiting) for uid, replica in self._replicas.items()]

    def problem(self) -> str:
        """Why no generator samples under weights that this learner pushed; empty while one may."""
        if not self._replicas:
            return "no generator is registered"
        if all(replica.state == "out" for replica in self._replicas.values()):
            reasons = [f"{replica.name}: {replica.problem}" for replica in self._replicas.values()]
            return f"every generator is out: {'; '.join(reasons)}"
        return ""

    @property
    def push_limit_s(self) -> float:
        """Longest that a push of the newest version to a generator without any of it may take."""
        return self._queue.limit_s("full", self._newest.num_bytes if self._newest else 0)

    async def run(self) -> None:
        """Reconcile until cancelled.

        Raises:
            InputError: A generator takes pushes from another learner of this run.
        """
        try:
            while True:
                self._woken.clear()
                await self._refresh_replicas()
                for replica in self._replicas.values():
                    await self._reconcile(replica)
                states = Counter(replica.state for replica in self._replicas.values())
                for state in REPLICA_STATES:
                    metrics.GENERATORS.labels(state).set(states[state])
                await wait_until_set(self._woken, _RECONCILE_EVERY_S)
        finally:
            for replica in self._replicas.values():
                await replica.close()

    async def _refresh_replicas(self) -> None:
        """Take notice of generators that came or went."""
        instances = await list_instances(self._service.redis, self._service.keys, "generation")
        registered = {instance.uid: instance for instance in instances if instance.grpc}
        for uid in self._replicas.keys() - registered.keys():
            replica = self._replicas.pop(uid)
            log.warning("generator_left", generator=replica.name)
            token_accepted_by(self._service, replica.name)
            await replica.close()
        for uid in registered.keys() - self._replicas.keys():
            instance = registered[uid]
            version, digest = int(instance.facts["version"]), str(instance.facts["digest"])
            channel = open_channel(instance.grpc, self._service.config.services.tls)
            metadata = token_metadata(self._service.options.token)
            self._replicas[uid] = replica = GeneratorReplica(instance, channel, version, digest, metadata)
            log.info("generator_joined", generator=replica.name, version=version, digest=digest[:12])

    async def _reconcile(self, replica: GeneratorReplica) -> None:
        if replica.pushing and replica.pushing.done():
            pushing, replica.pushing = replica.pushing, None
            pushing.result()
        newest = self._newest
        if newest is None:
            return
        if replica.serves(newest):
            await self._note_served(replica, newest, PushResult(), num_bytes=0)
            return
        replica.fall_behind()
        if replica.idle:
            replica.pushing = asyncio.create_task(self._push(replica))
            replica.pushing.add_done_callback(lambda _: self._woken.set())

    async def _push(self, replica: GeneratorReplica) -> None:
        """Bring a generator to the version that is the newest when its push gets a slot."""
        if replica.num_failures:
            # Before its slot: a generator that does not answer keeps no other one waiting.
            try:
                await self._refresh(replica)
            except PushFailedError as failure:
                replica.fail(str(failure))
                return
        kind: Kind = "delta" if self._base_of(replica) else "full"
        async with self._queue.send_slot(kind, replica.instance.uid) as release_slot:
            policy, base = self._newest, self._base_of(replica)
            if policy is None or replica.serves(policy) or (kind == "delta" and base is None):
                return  # While it waited, another push became due, or none: the next look begins it.
            began_s = time.monotonic()
            limit_s = self._queue.limit_s(kind, policy.num_bytes, replica.num_failures)
            header, frames = self._header(policy, base), self._frames(policy, base)
            try:
                result, num_bytes = await replica.push(header, frames, limit_s=limit_s, on_sent=release_slot)
            except PushFailedError as failure:
                await self._note_failure(replica, policy, base, failure)
                return
        push_s = time.monotonic() - began_s
        self._queue.record(kind, policy.num_bytes, push_s)
        token_accepted_by(self._service, replica.name)
        metrics.PUSH_SECONDS.labels(kind).observe(push_s)
        metrics.PUSH_BYTES.labels(kind).inc(num_bytes)
        await self._note_served(replica, policy, result, num_bytes)

    def _base_of(self, replica: GeneratorReplica) -> PolicyWeights | None:
        """The version that a generator holds, where changes to it can be sent."""
        return self._before if self._before and self._before.digest == replica.digest else None

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
        self, replica: GeneratorReplica, policy: PolicyWeights, base: PolicyWeights | None, failure: PushFailedError
    ) -> None:
        """Ask the generator for its version: its answer may have been lost, or it is another process by now."""
        reason = str(failure)
        metrics.PUSH_FAILURES.labels(failure.status.name.lower()).inc()
        if failure.status is grpc.StatusCode.UNAUTHENTICATED:
            token_rejected_by(self._service, replica.name)
            replica.fail(reason)
            return
        log.warning("push_failed", generator=replica.name, version=policy.version, reason=reason)
        with contextlib.suppress(PushFailedError):
            await self._refresh(replica)
        if replica.serves(policy):
            return  # It took the version, and only its answer was lost.
        if base and replica.digest != base.digest:
            return  # It has lost the version that the changes are to: a whole push is due at once.
        if replica.fail(reason):
            log.error("generator_out", generator=replica.name, num_failures=replica.num_failures, reason=reason)

    async def _refresh(self, replica: GeneratorReplica) -> None:
        """Ask a generator for the version that it serves, and for its learner.

        Raises:
            InputError: It takes pushes from another learner.
            PushFailedError: It does not answer.
        """
        try:
            description = await replica.refresh()
        except PushFailedError as failure:
            log.warning("generator_silent", generator=replica.name, status=failure.status.name)
            raise
        epoch, learner = description.epoch, description.learner
        if epoch > self._epoch or (epoch == self._epoch and learner != self._learner):
            raise InputError(
                "name",
                f"another learner has taken over the run {self._service.config.name!r}: {replica.name} takes pushes "
                f"from learner {learner} of epoch {epoch}, this is {self._learner} of epoch {self._epoch}",
                "Give each run a name of its own, or leave the run to the other learner",
            )

    async def _note_served(
        self, replica: GeneratorReplica, policy: PolicyWeights, result: PushResult, num_bytes: int
    ) -> None:
        """A generator serves a version."""
        if policy is self._newest and replica.catch_up():
            log.info("generator_returned", generator=replica.name, version=policy.version)
        if policy.version <= self.live_version:
            return
        self.live_version, self.live_unix_s = policy.version, time.time()
        push_s, stall_s = time.monotonic() - self._published_s, result.pause_s + result.load_s + result.resume_s
        await self._on_live(VersionServed(policy, replica.instance.name, push_s, result.stage_s, stall_s, num_bytes))
