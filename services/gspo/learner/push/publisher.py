"""Keeps every registered generator at the newest policy version: a reconciliation loop, not a broadcast.

A generator that is behind gets changes if it holds one of the versions before, and every element otherwise. A push
that fails or is late concerns that generator alone; after three failures it is out until it has caught up. On shared
GPUs nothing is pushed in the learner's shift, and a generator that sleeps gets a push also of the version that it has.
consumes: published versions, heartbeats. produces: PushWeights calls, which generation/servicer.py answers, and a
call-back when a version is live.
waits for: a new version, a generator that is behind.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
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
from gspo.common.weights.time_limit import TimeLimit
from gspo.learner.push.policy_weights import PolicyFacts, PolicyWeights
from gspo.learner.push.push_account import PushAccount
from gspo.learner.push.replicas import REPLICA_STATES, GeneratorReplica, LiveWeights, PushFailedError
from gspo.learner.push.shifts import LearnerShifts
from gspo.learner.push.weight_updates import ChainedChanges, ChangeChain, UpdateKind, WholePolicy, push_header
from gspo.runlog.pushes import PushRecord
from gspo_proto.generation_pb2 import PushResult
from gspo_proto.rollout_pb2 import VersionLive

log = structlog.get_logger()
# Generators join and fall behind seldom; a new version wakes the loop at once.
_RECONCILE_EVERY_S = 0.5
# One whole policy at a time uses all of the sender. Changes are small: several at a time hide the round trips. Each
# kind has its own slots, so that changes never wait behind whole policies.
_NUM_SLOTS = {"full": 1, "changes": 4}
# Of the whole policy, transfer, digest and load together: a quarter of this (the margin) is a network of 200 Mbit/s.
_FIRST_BYTES_S = 1e8
# A generator whose pushes failed gets twice the time with each failure, so many times: its own network may be slower.
_MOST_DOUBLINGS = 3


class Publisher:
    """Pushes to generators.

    Attributes:
        newest: The version that generators are to serve, with every element; None before the first.
        live_version: Newest version that a generator serves, -1 before any does.
        live_unix_s: When it was first served.

    Args:
        epoch: This learner's; generators refuse a lower one than they have seen.
        on_live: Awaited for the first generator that serves a version.
        shifts: On shared GPUs, this learner's.
        record: Writes the pushes of a version once the next one is published; None leaves them out.
    """

    def __init__(
        self,
        service: Service,
        epoch: int,
        on_live: Callable[[VersionLive], Awaitable[None]],
        shifts: LearnerShifts | None = None,
        record: Callable[[Sequence[PushRecord]], None] | None = None,
    ) -> None:
        self._service, self._epoch, self._on_live = service, epoch, on_live
        self._shifts = shifts or LearnerShifts(service, epoch)
        # Distinguishes two learners of one epoch, in two run directories of one name.
        self._learner = service.uid
        self.newest: PolicyWeights | None = None
        self._full: WholePolicy | None = None
        # The changes that made the newest version and those before it.
        self._chain = ChangeChain(service.config.staleness.max_lag + 1)
        # No change at all, for generators that sleep with the newest version.
        self._repeat: ChainedChanges | None = None
        self._published_s = 0.0
        self._replicas: dict[str, GeneratorReplica] = {}
        self._queue = SendQueue(service.config.generation.push_timeout_s)
        self._woken = asyncio.Event()
        self._account, self._accounted_version = PushAccount(record), -1
        self._live_weights = LiveWeights()
        self.live_version, self.live_unix_s = -1, 0.0

    def publish(self, policy: PolicyWeights) -> None:
        """Make a version the newest; the one before stays until the changes from it are packed."""
        if self.newest is not None:
            self._chain.add(policy, self.newest)
        self.newest, self._full = policy, WholePolicy(policy)
        self._repeat = ChainedChanges(policy.facts, policy.facts)
        self._published_s = time.monotonic()
        self.wake()

    def wake(self) -> None:
        """Look at the generators now."""
        self._woken.set()

    def give_up_pushes(self) -> None:
        """End the pushes in flight as failed, since nothing moves; each generator is then asked for its version."""
        for replica in self._replicas.values():
            replica.give_up()
        self.wake()

    async def wait_until_packed(self) -> None:
        """Wait until the newest version is the only one that is kept whole."""
        await self._chain.wait_until_packed()

    def describe(self) -> list[dict[str, Any]]:
        """Every registered generator: state, version, and why it is behind or out."""
        return [replica.describe(waiting=uid in self._queue.waiting) for uid, replica in self._replicas.items()]

    @property
    def generator_gpus(self) -> dict[str, str]:
        """The GPUs of all registered generators -> their kinds; none on CPUs."""
        gpus: dict[str, str] = {}
        for replica in self._replicas.values():
            gpus |= replica.instance.facts.get("gpus", {})
        return gpus

    def problem(self) -> str:
        """Why no generator samples under weights that this learner pushed; empty while one may."""
        if not self._replicas:
            return "no generator is registered"
        if all(replica.state == "out" for replica in self._replicas.values()):
            reasons = [f"{replica.name}: {replica.problem}" for replica in self._replicas.values()]
            return f"every generator is out: {'; '.join(reasons)}"
        return ""

    @property
    def refusal(self) -> str:
        """Why no generator will ever take this learner's policy; empty while one may."""
        if not self._replicas or not all(replica.refuses for replica in self._replicas.values()):
            return ""
        return "; ".join(f"{replica.name}: {replica.problem}" for replica in self._replicas.values())

    @property
    def push_limit_s(self) -> float:
        """Longest that a push of the newest version to a generator without any of it may take."""
        return self._queue.limit_s("full", self._full.target.num_bytes if self._full else 0)

    async def run(self) -> None:
        """Reconcile until cancelled.

        Raises:
            InputError: A generator takes pushes from another learner of this run.
        """
        try:
            while True:
                self._woken.clear()
                self._chain.forget_packed()
                await self._refresh_replicas()
                await self._record_pushes()
                for replica in self._replicas.values():
                    await self._reconcile(replica)
                states = Counter(replica.state for replica in self._replicas.values())
                for state in REPLICA_STATES:
                    metrics.GENERATORS.labels(state).set(states[state])
                await wait_until_set(self._woken, _RECONCILE_EVERY_S)
        finally:
            await self._account.write()
            self._chain.close()
            for replica in self._replicas.values():
                await replica.close()

    async def _record_pushes(self) -> None:
        """Record the pushes before the newest version's."""
        if self.newest is not None and self.newest.version != self._accounted_version:
            self._accounted_version = self.newest.version
            await self._account.write()

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
            channel = open_channel(instance.grpc, self._service.config.services.tls)
            metadata = token_metadata(self._service.options.token)
            self._replicas[uid] = replica = GeneratorReplica(instance, channel, metadata)
            log.info("generator_joined", generator=replica.name, version=replica.version, digest=replica.digest[:12])

    async def _reconcile(self, replica: GeneratorReplica) -> None:
        if replica.pushing and replica.pushing.done():
            pushing, replica.pushing = replica.pushing, None
            pushing.result()
        update = self._update_for(replica)
        if update is None or self._shifts.has_gpus:
            return
        if self._has(replica, update.target):
            await self._note_served(replica, update.target, PushResult(), num_bytes=0)
            return
        replica.fall_behind()
        if replica.idle:
            replica.pushing = asyncio.create_task(self._push(replica))
            replica.pushing.add_done_callback(lambda _: self._woken.set())

    def _has(self, replica: GeneratorReplica, policy: PolicyFacts) -> bool:
        """Whether a generator serves this version, and does not only keep it in its sleep."""
        return replica.serves(policy) and not replica.must_reload and replica.instance.uid not in self._shifts.asleep

    def _note_awake(self, replica: GeneratorReplica) -> None:
        """A generator has woken; in the learner's shift this is old news, for it was put to sleep after that."""
        if not self._shifts.has_gpus:
            self._shifts.asleep.discard(replica.instance.uid)

    def _update_for(self, replica: GeneratorReplica) -> WholePolicy | ChainedChanges | None:
        """The newest version as changes, if a generator holds a version whose changes are kept; else in full."""
        if self._repeat and replica.serves(self._repeat.target):
            return self._repeat
        return self._chain.update_from(replica.digest) or self._full

    async def _push(self, replica: GeneratorReplica) -> None:
        """Bring a generator to the version that is the newest when its push gets a slot."""
        # Before its slot: a generator that does not answer keeps no other one waiting.
        if replica.num_failures and (problem := await self._refresh(replica)):
            replica.fail(problem)
            return
        update = self._update_for(replica)
        kind: UpdateKind = update.kind if update else "full"
        async with self._queue.send_slot(kind, replica.instance.uid) as release_slot:
            update = self._update_for(replica)
            if update is None or update.kind != kind or self._has(replica, update.target) or self._shifts.has_gpus:
                return  # While it waited, another push became due, or none: the next look begins it.
            target, base = update.target, update.base
            began_s, num_bytes = time.monotonic(), target.num_bytes
            limit_s = self._queue.limit_s(kind, num_bytes, replica.num_failures)
            run = self._service.config.name
            header = push_header(target, base, run=run, epoch=self._epoch, learner=self._learner)
            frames = aiter(update)
            # While the generator loads, nothing here may keep the memory of a version that is no longer the newest.
            del update
            try:
                result, num_sent = await replica.push(header, frames, limit_s=limit_s, on_sent=release_slot)
            except PushFailedError as failure:
                await self._note_failure(replica, target, base, failure)
                return
        num_sent += result.pulled_bytes
        self._note_awake(replica)
        duration_s = time.monotonic() - began_s
        self._queue.limits[kind].record(num_bytes, duration_s)
        token_accepted_by(self._service, replica.name)
        metrics.PUSH_SECONDS.labels(kind).observe(duration_s)
        metrics.PUSH_BYTES.labels(kind).inc(num_sent)
        self._account.add_push(target.version, kind, num_sent, duration_s)
        replica.must_reload = False
        if other := self._live_weights.differing(replica, target.version, result.checksum):
            self._have_reloaded((replica, other), target.version)
            return
        await self._note_served(replica, target, result, num_sent)

    def _have_reloaded(self, replicas: Sequence[GeneratorReplica], version: int) -> None:
        """Two generators took the same version, and their engines have other weights: both load it again."""
        names = " and ".join(replica.name for replica in replicas)
        reason = f"the engines of {names} have different weights under the digest of version {version}"
        log.error("generators_differ", version=version, reason=reason)
        metrics.PUSH_FAILURES.labels("other_weights").inc()
        self._account.add_failure(version, reason)
        for replica in replicas:
            replica.must_reload = True
            replica.fall_behind()
            replica.fail(reason)

    async def _note_failure(
        self, replica: GeneratorReplica, target: PolicyFacts, base: PolicyFacts | None, failure: PushFailedError
    ) -> None:
        """Ask the generator for its version: its answer may have been lost, or it is another process by now."""
        reason = str(failure)
        metrics.PUSH_FAILURES.labels(failure.status.name.lower()).inc()
        self._account.add_failure(target.version, f"{replica.name}: {reason}")
        if failure.status is grpc.StatusCode.UNAUTHENTICATED:
            token_rejected_by(self._service, replica.name)
            replica.fail(reason)
            return
        log.warning("push_failed", generator=replica.name, version=target.version, reason=reason)
        await self._refresh(replica)
        if self._has(replica, target):
            return  # It took the version, and only its answer was lost.
        if base and replica.digest != base.digest:
            return  # It has lost the version that the changes are to: another push is due at once.
        if failure.status is grpc.StatusCode.ABORTED:
            return  # It waited for another generator of its host, which failed: a push to itself is due at once.
        is_newest = self._full is not None and target == self._full.target
        if failure.status is grpc.StatusCode.NOT_FOUND and not is_newest:
            return  # Another rank had newer versions alone: their push is due.
        if replica.fail(reason, refuses=failure.status is grpc.StatusCode.INVALID_ARGUMENT):
            log.error("generator_out", generator=replica.name, num_failures=replica.num_failures, reason=reason)

    async def _refresh(self, replica: GeneratorReplica) -> str:
        """Ask a generator for the version that it serves, and for its learner; why it does not answer, if so.

        Raises:
            InputError: It takes pushes from another learner.
        """
        try:
            description = await replica.refresh()
        except PushFailedError as failure:
            if failure.status is grpc.StatusCode.UNAUTHENTICATED:
                token_rejected_by(self._service, replica.name)
            else:
                log.warning("generator_silent", generator=replica.name, status=failure.status.name)
            return str(failure)
        if not description.asleep:
            self._note_awake(replica)
        epoch, learner = description.epoch, description.learner
        if epoch > self._epoch or (epoch == self._epoch and learner != self._learner):
            raise InputError(
                "name",
                f"another learner has taken over the run {self._service.config.name!r}: {replica.name} takes pushes "
                f"from learner {learner} of epoch {epoch}, this is {self._learner} of epoch {self._epoch}",
                "Give each run a name of its own, or leave the run to the other learner",
            )
        return ""

    async def _note_served(
        self, replica: GeneratorReplica, target: PolicyFacts, result: PushResult, num_bytes: int
    ) -> None:
        """A generator serves a version."""
        if self._full and target == self._full.target and replica.catch_up():
            log.info("generator_returned", generator=replica.name, version=target.version)
        if target.version <= self.live_version:
            return
        self.live_version, self.live_unix_s = target.version, time.time()
        live = VersionLive(
            version=target.version,
            digest=target.digest,
            generators=[replica.instance.name],
            push_s=time.monotonic() - self._published_s,
            stall_s=result.pause_s + result.load_s + result.resume_s,
            bytes=num_bytes,
        )
        await self._on_live(live)


class SendQueue:
    """Slots and time limits of pushes.

    All pushes share the learner's one sender: many at a time would each take many times as long, and none would meet
    its deadline. A generator that has every byte stages and loads it while the next one is sent to.

    Attributes:
        waiting: The uids of the generators whose pushes wait for a slot.
        limits: Time limits by kind, which learn from the pushes that succeed.

    Args:
        least_s: Least time limit of a push.
    """

    def __init__(self, least_s: float) -> None:
        self._slots = {kind: asyncio.Semaphore(num) for kind, num in _NUM_SLOTS.items()}
        self.limits = {kind: TimeLimit(least_s, _FIRST_BYTES_S) for kind in _NUM_SLOTS}
        self.waiting: set[str] = set()

    @asynccontextmanager
    async def send_slot(self, kind: UpdateKind, uid: str) -> AsyncIterator[Callable[[], None]]:
        """Wait for a slot to send to a generator, first come first served.

        The slot is free again at the end of the block, or at a call of the yielded function before it.
        """
        slots = self._slots[kind]
        if slots.locked():
            self.waiting.add(uid)
        try:
            await slots.acquire()
        finally:
            self.waiting.discard(uid)
        with contextlib.ExitStack() as slot:
            slot.callback(slots.release)
            yield slot.close

    def limit_s(self, kind: UpdateKind, num_bytes: int, num_failures: int = 0) -> float:
        """Seconds that a push may take, from its header to the answer.

        Args:
            num_bytes: Size of the whole policy: changes are packed from it, and it is staged, digested and loaded.
            num_failures: Pushes in a row that failed at this generator.
        """
        return self.limits[kind].seconds(num_bytes) * 2.0 ** min(num_failures, _MOST_DOUBLINGS)
