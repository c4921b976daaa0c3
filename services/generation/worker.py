"""The generation loop: takes groups from the prompts streams, and writes each rollout as soon as it is finished.

consumes: prompts, and eval_prompts when prompts has nothing. produces: rollouts, eval_rollouts.
waits for: room in the engine, a task, weights new enough for a task. unblocked by: a finished group, the
coordinator, a push. Neighbours: rollouts.py makes the rollouts, door.py changes the weights.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog

from gspo_proto.rollout_pb2 import GroupFailure, GroupTask, Scored
from services.common import metrics
from services.common.events import SCHEMA
from services.common.runtime import Service
from services.common.streams import Delivery, Inbox, Output, new_consumer
from services.generation.engine_api import EngineLike
from services.generation.outbox import Outbox
from services.generation.rollouts import AbortedError, Rollouts, mark_of

log = structlog.get_logger()
# How long an idle worker waits on prompts before it looks at eval_prompts again.
_IDLE_S = 0.05
# A version that is live elsewhere is here soon, unless something is wrong with this generator: then its tasks go to
# others, and it takes none until its weights change, or for so long.
_WEIGHTS_PATIENCE_S = 5.0
_OUT_S = 30.0


@dataclass(frozen=True)
class Source:
    """One stream of tasks and where its results go."""

    inbox: Inbox
    outbox: Outbox
    rollouts: str
    scored: str
    group_size: int  # rollouts of a task, at most


@dataclass
class Held:
    """One task in this worker's hands."""

    source: Source
    delivery: Delivery
    task: GroupTask
    num_running: int  # its rollouts that are not finished


class Worker:
    """Keeps the engine full and no fuller."""

    def __init__(self, service: Service, engine: EngineLike, rollouts: Rollouts) -> None:
        config, keys = service.config, service.keys
        consumer, lease_s = new_consumer(service.options.name), config.services.lease_s
        self._service, self._engine, self._rollouts = service, engine, rollouts
        self._max_rollouts, self._max_attempts = config.generation.max_rollouts, config.staleness.max_attempts
        training = Inbox(service.redis, keys, keys.prompts, consumer=consumer, lease_s=lease_s)
        evaluation = Inbox(service.redis, keys, keys.eval_prompts, consumer=consumer, lease_s=lease_s)
        self._training = Source(
            training, Outbox(training), keys.rollouts, keys.scored, config.algorithm.num_return_sequences_in_group
        )
        self._evaluation = Source(
            evaluation, Outbox(evaluation), keys.eval_rollouts, keys.eval_scored, config.evaluation.num_answers
        )
        self._held: dict[asyncio.Task[None], Held] = {}
        self._num_running = 0
        self._changed = asyncio.Event()
        self._out_until = 0.0

    @property
    def num_running(self) -> int:
        """Rollouts under way, or waiting for weights new enough."""
        return self._num_running

    def weights_changed(self) -> None:
        """Tell the tasks that wait for newer weights; take tasks again."""
        self._out_until = 0.0
        self._changed.set()

    async def run(self) -> None:
        """Work until the service is stopping; then finish what is under way, as far as the deadline allows."""
        renewing = asyncio.create_task(self._keep_leases())
        try:
            while not self._service.stopping.is_set():
                if renewing.done():
                    renewing.result()
                await self._step()
            await self._drain()
        finally:
            renewing.cancel()
            for task in self._held:
                task.cancel()

    async def _step(self) -> None:
        self._raise_failures()
        if not self._room(self._training):
            if not self._num_running:
                self._service.activity.set("waiting", "weights", f"newer than version {self._engine.version}")
            await self._wait_for_change()
            return
        for source in (self._training, self._evaluation):
            if (room := self._room(source)) and (taken := await source.inbox.take(room, block_s=0)):
                self._start(source, taken)
                return
        self._describe_idle()
        room = self._room(self._training)
        self._start(self._training, await self._training.inbox.take(room, block_s=_IDLE_S))

    def _room(self, source: Source) -> int:
        """Whole groups that fit into the engine: what is taken must not wait there while another worker is free."""
        if time.monotonic() < self._out_until:
            return 0
        free = self._max_rollouts - self._num_running
        return max(free // source.group_size, 0 if self._num_running else 1)

    def _start(self, source: Source, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            task = GroupTask.FromString(delivery.payload)
            held = Held(source, delivery, task, task.num_rollouts)
            self._num_running += held.num_running
            metrics.ROLLOUTS_RUNNING.set(self._num_running)
            self._service.activity.set("busy", "generating", f"{self._num_running} rollouts")
            self._held[asyncio.create_task(self._work(held))] = held

    async def _work(self, held: Held) -> None:
        try:
            await self._generate_group(held)
        finally:
            self._release(held, held.num_running)

    def _release(self, held: Held, num: int) -> None:
        """Rollouts that are finished, or will not be made: their room is free."""
        held.num_running -= num
        self._num_running -= num
        metrics.ROLLOUTS_RUNNING.set(self._num_running)
        self._changed.set()

    async def _generate_group(self, held: Held) -> None:
        inbox, delivery, task = held.source.inbox, held.delivery, held.task
        if delivery.attempt > self._max_attempts:
            await self._give_up(held, f"handed out {delivery.attempt - 1} times and never finished")
            return
        if not await self._has_version(task.min_version):
            await self._hand_back(held)
            return
        todo = await self._unfinished(task)
        results = await asyncio.gather(*(self._generate_one(held, number) for number in todo), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if not errors:
            await inbox.finish(delivery)
        elif isinstance(errors[0], (ValueError, AbortedError)):
            await self._give_up(held, str(errors[0]))
        else:
            raise errors[0]

    async def _generate_one(self, held: Held, number: int) -> None:
        rollout = await self._rollouts.generate(held.task, number)
        self._release(held, 1)
        mark = mark_of(held.task, number)
        output = Output(held.delivery, held.source.rollouts, rollout.SerializeToString(), mark)
        if not await held.source.outbox.put(output):
            log.warning("lease_lost", rollout=mark, detail="another worker has this group; the result is dropped")

    async def _unfinished(self, task: GroupTask) -> list[int]:
        """Numbers of the rollouts that no earlier attempt has finished."""
        marks = [mark_of(task, number) for number in range(task.num_rollouts)]
        done = await self._service.redis.hmget(self._service.keys.partial, marks)
        return [number for number, mark in enumerate(done) if mark != b"done"]

    async def _give_up(self, held: Held, reason: str) -> None:
        """Settle the way of a group that cannot be generated: a failure for the learner, a dead letter for people."""
        failure = GroupFailure(group=held.task.group, attempt=held.task.attempt, reason=f"generation: {reason}")
        payload = Scored(schema=SCHEMA, failure=failure).SerializeToString()
        log.error("group_given_up", group=held.task.group, evaluation=held.task.evaluation, reason=reason)
        outputs = [(held.source.scored, payload), (self._service.keys.dead, payload)]
        await held.source.inbox.finish(held.delivery, outputs)

    async def _has_version(self, min_version: int) -> bool:
        """Whether the engine serves `min_version` or a newer one, within a while."""
        deadline = time.monotonic() + _WEIGHTS_PATIENCE_S
        while self._engine.version < min_version and time.monotonic() < deadline:
            with self._service.activity.waiting("weights", f"version {min_version}, serving {self._engine.version}"):
                await self._wait_for_change()
        return self._engine.version >= min_version

    async def _hand_back(self, held: Held) -> None:
        """Leave a task to generators whose weights are new enough, and take none for now."""
        version, needed = self._engine.version, held.task.min_version
        if time.monotonic() >= self._out_until:
            log.warning("weights_too_old", serving=version, needed=needed, detail="its tasks are left to others")
        self._out_until = time.monotonic() + _OUT_S
        await held.source.inbox.finish(held.delivery, [(held.source.inbox.stream, held.delivery.payload)])

    async def _wait_for_change(self) -> None:
        """Until a group ended or weights changed; a second at most, so that a lost signal only costs that."""
        self._changed.clear()
        try:
            async with asyncio.timeout(1.0):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _keep_leases(self) -> None:
        """Renew what is held, drop what was lost, and take over what other workers let go."""
        while True:
            await asyncio.sleep(self._training.inbox.lease_s / 3)
            for source in (self._training, self._evaluation):
                mine = {task: held for task, held in self._held.items() if held.source is source and not task.done()}
                kept = await source.inbox.renew([held.delivery for held in mine.values()])
                for task, held in mine.items():
                    if held.delivery.entry not in kept and not task.done():
                        log.warning("lease_lost", group=held.task.group)
                        task.cancel()
                await self._take_over(source)

    async def _take_over(self, source: Source) -> None:
        """Start what other workers let go, as much as fits: a dead one may have held as many groups as we can run."""
        while (room := self._room(source)) and not self._service.stopping.is_set():
            left = await source.inbox.reclaim(room)
            if not left:
                return
            self._start(source, left)

    def _raise_failures(self) -> None:
        """Forget what is done; an error that is not the task's own ends the worker."""
        for task in [task for task in self._held if task.done()]:
            del self._held[task]
            if not task.cancelled() and (error := task.exception()):
                raise error

    def _describe_idle(self) -> None:
        if self._num_running:
            self._service.activity.set("busy", "generating", f"{self._num_running} rollouts")
        else:
            self._service.activity.set("waiting", "prompts", "nothing to generate")

    async def _drain(self) -> None:
        """Finish the groups under way; what the deadline cuts off goes on elsewhere when its lease ends."""
        deadline = time.monotonic() + self._service.config.run.drain_timeout_s / 2
        while any(not task.done() for task in self._held) and time.monotonic() < deadline:
            self._service.activity.set("busy", "draining", f"{self._num_running} rollouts")
            await self._wait_for_change()
