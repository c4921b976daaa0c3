"""The generation loop: takes groups from the prompts streams, and writes each rollout as soon as it is finished.

consumes: paused_prompts when a step begins, prompts, and eval_prompts when there is nothing else. produces: rollouts,
eval_rollouts, paused_prompts.
waits for: room in the engine, a task, weights new enough for a task. unblocked by: a finished group, the
coordinator, a push.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import structlog

from gspo.common.service.app import Service
from gspo.common.service.traces import Traces
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.inbox import DONE, Delivery, EntryOutput, Inbox, new_consumer
from gspo.common.telemetry import metrics
from gspo.generation.engine.api import EngineLike
from gspo.generation.leased_task import LeasedTask, TaskSource, num_failed_attempts
from gspo.generation.outbox import Outbox
from gspo.generation.rollout.driver import RolloutAbortedError, RolloutDriver
from gspo.generation.rollout.in_flight import InFlightRollout, rollout_key
from gspo.generation.rollout.saver import Saver
from gspo_proto.rollout_pb2 import GroupFailure, GroupTask, Rollout, Scored

log = structlog.get_logger()
# How long an idle worker waits on prompts before it looks at eval_prompts again.
_IDLE_S = 0.05
# A version that is live elsewhere is here soon, unless something is wrong with this generator: then its tasks go to
# others, and it takes none until its weights change, or for so long.
_WEIGHTS_PATIENCE_S = 5.0
_TOO_OLD_S = 30.0


class Worker:
    """Keeps the engine full and no fuller."""

    def __init__(self, service: Service, engine: EngineLike, rollouts: RolloutDriver) -> None:
        config, keys = service.config, service.keys
        consumer, lease_s = new_consumer(service.options.name), config.services.lease_s
        self._service, self._engine, self._rollouts = service, engine, rollouts
        self._max_rollouts, self._max_attempts = config.generation.max_rollouts, config.staleness.max_attempts
        training, paused, evaluation = (
            Inbox(service.redis, keys, stream, consumer=consumer, lease_s=lease_s)
            for stream in (keys.prompts, keys.paused_prompts, keys.eval_prompts)
        )
        size, segment = config.algorithm.num_return_sequences_in_group, config.generation.segment_tokens
        self._training = TaskSource(training, Outbox(training), keys.rollouts, keys.scored, size, segment)
        self._paused = TaskSource(paused, Outbox(paused), keys.rollouts, keys.scored, size, segment)
        self._evaluation = TaskSource(
            evaluation, Outbox(evaluation), keys.eval_rollouts, keys.eval_scored, config.evaluation.num_answers
        )
        self._sources = [self._training, self._paused, self._evaluation]
        # Tasks that had their tokens of the step before: they go first when a step begins, after the others within it.
        self._num_paused_due = 0
        self._step_begins = True
        self._leased: dict[asyncio.Task[None], LeasedTask] = {}
        self._saver = Saver(config.generation, engine, self._in_flight)
        self._num_running = 0
        self._changed = asyncio.Event()
        self._too_old_until = 0.0

    @property
    def num_running(self) -> int:
        """Rollouts under way, or waiting for weights new enough."""
        return self._num_running

    def weights_changed(self) -> None:
        """A step begins. Tell the tasks that wait for newer weights; take tasks again."""
        self._too_old_until = 0.0
        self._step_begins = True
        self._changed.set()

    async def run(self) -> None:
        """Work until the service is stopping; then finish what is under way, as far as the deadline allows."""
        background = [asyncio.create_task(self._keep_leases()), asyncio.create_task(self._saver.run())]
        try:
            while not self._service.stopping.is_set():
                for task in background:
                    if task.done():
                        task.result()
                await self._tick()
            await self._drain()
        finally:
            for task in (*background, *self._leased):
                task.cancel()

    async def _tick(self) -> None:
        self._raise_failures()
        if not self._capacity(self._training):
            if not self._num_running:
                self._service.activity.set("waiting", "weights", f"newer than version {self._engine.version}")
            await self._wait_for_change()
            return
        if self._step_begins:
            self._step_begins, self._num_paused_due = False, await self._paused.inbox.num_untaken()
        if self._num_paused_due:
            if room := min(self._capacity(self._paused), self._num_paused_due):
                taken = await self._paused.inbox.take(room, block_s=0)
                self._num_paused_due = self._num_paused_due - len(taken) if taken else 0
                self._start(self._paused, taken)
            return
        for source in self._sources:
            if (room := self._capacity(source)) and (taken := await source.inbox.take(room, block_s=0)):
                self._start(source, taken)
                return
        self._describe_idle()
        if room := self._capacity(self._training):  # what others let go may have come in meanwhile
            self._start(self._training, await self._training.inbox.take(room, block_s=_IDLE_S))

    def _capacity(self, source: TaskSource) -> int:
        """Whole groups that fit into the engine: what is taken must not wait there while another worker is free."""
        if time.monotonic() < self._too_old_until:
            return 0
        free = self._max_rollouts - self._num_running
        return max(free // source.group_size, 0 if self._num_running else 1)

    def _start(self, source: TaskSource, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            task: GroupTask = delivery.message
            held = LeasedTask(source, delivery, task, task.num_rollouts)
            self._num_running += held.num_running
            metrics.ROLLOUTS_RUNNING.set(self._num_running)
            self._service.activity.set("busy", "generating", f"{self._num_running} rollouts")
            self._leased[asyncio.create_task(self._work(held))] = held

    async def _work(self, held: LeasedTask) -> None:
        try:
            await self._generate_group(held)
        finally:
            self._release(held, held.num_running)

    def _release(self, held: LeasedTask, num: int) -> None:
        """Rollouts that are finished, or will not be made: their room is free."""
        held.num_running -= num
        self._num_running -= num
        metrics.ROLLOUTS_RUNNING.set(self._num_running)
        self._changed.set()

    async def _generate_group(self, held: LeasedTask) -> None:
        delivery, task = held.delivery, held.task
        unfinished = await self._unfinished(held)
        fruitless = num_failed_attempts(delivery.attempt, unfinished)
        if unfinished and fruitless > self._max_attempts:
            await self._give_up(held, f"handed out {fruitless - 1} times and never finished")
            return
        if not await self._has_version(task.min_version):
            await self._requeue(held)
            return
        held.in_flight = {rollout.number: rollout for rollout in unfinished}
        self._release(held, held.num_running - len(unfinished))
        playing = [self._play_one(held, rollout) for rollout in unfinished]
        results = await asyncio.gather(*playing, return_exceptions=True)
        errors = [result for result in results if result is not None]
        if not errors:
            await self._finish_or_pause(held)
        elif isinstance(errors[0], (ValueError, RolloutAbortedError)):
            await self._give_up(held, str(errors[0]))
        else:
            raise errors[0]

    async def _play_one(self, held: LeasedTask, rollout: InFlightRollout) -> None:
        """Go on with one rollout until it has ended, or has to make room for others."""
        while not await self._rollouts.drive(rollout, held.source.segment_tokens):
            held.pauses = held.pauses or await self._others_wait(held.source)
            if held.pauses:
                self._release(held, 1)
                return
        self._release(held, 1)
        finished = self._rollouts.finished(rollout)
        del held.in_flight[rollout.number]
        output = EntryOutput(held.delivery, held.source.rollouts, finished.SerializeToString(), rollout.rollout_key)
        if not await held.source.outbox.put(output):
            log.info(
                "lease_lost", rollout=rollout.rollout_key, detail="dropped: its group ended, or another worker has it"
            )
        elif not finished.evaluation:
            _trace(self._service.traces, finished)

    async def _others_wait(self, source: TaskSource) -> bool:
        """Whether tasks wait that fit into no engine: this one's room would have been filled."""
        if self._capacity(source):
            return False
        return any([await waiting.inbox.num_untaken() for waiting in (self._training, self._paused)])

    async def _finish_or_pause(self, held: LeasedTask) -> None:
        """Acknowledge a task whose rollouts are all written; save what is not, and leave it to any generator."""
        inbox, delivery = held.source.inbox, held.delivery
        if not held.in_flight:
            await inbox.finish(delivery)
            return
        metrics.ROLLOUTS_PAUSED.inc(len(held.in_flight))
        await self._saver.save(held.rollouts(), paused=True)
        await inbox.requeue(delivery, stream=self._paused.inbox.stream, group=held.task.group)

    async def _unfinished(self, held: LeasedTask) -> list[InFlightRollout]:
        """The rollouts that no earlier holder has finished, each as it was saved last."""
        numbers = range(held.task.num_rollouts)
        saved = await held.source.inbox.load([rollout_key(held.task, number) for number in numbers])
        metrics.ROLLOUTS_RESUMED.inc(sum(state is not None and state != DONE for state in saved))
        return [
            self._rollouts.begin(held.task, number, state)
            for number, state in zip(numbers, saved, strict=True)
            if state != DONE
        ]

    def _in_flight(self) -> Iterator[tuple[Inbox, Delivery, InFlightRollout]]:
        for task, held in self._leased.items():
            if not task.done():
                yield from held.rollouts()

    async def _give_up(self, held: LeasedTask, reason: str) -> None:
        """Settle the way of a group that cannot be generated: a failure for the learner, a dead letter for people."""
        failure = GroupFailure(group=held.task.group, attempt=held.task.attempt, reason=f"generation: {reason}")
        payload = Scored(schema=SCHEMA, failure=failure).SerializeToString()
        log.error("group_given_up", group=held.task.group, evaluation=held.task.evaluation, reason=reason)
        await held.source.inbox.dead_letter(held.delivery, reason, [(held.source.scored, payload)])

    async def _has_version(self, min_version: int) -> bool:
        """Whether the engine serves `min_version` or a newer one, within a while."""
        deadline = time.monotonic() + _WEIGHTS_PATIENCE_S
        while self._engine.version < min_version and time.monotonic() < deadline:
            with self._service.activity.waiting("weights", f"version {min_version}, serving {self._engine.version}"):
                await self._wait_for_change()
        return self._engine.version >= min_version

    async def _requeue(self, held: LeasedTask) -> None:
        """Leave a task to generators whose weights are new enough, and take none for now."""
        version, needed = self._engine.version, held.task.min_version
        if time.monotonic() >= self._too_old_until:
            log.warning("weights_too_old", serving=version, needed=needed, detail="its tasks are left to others")
        self._too_old_until = time.monotonic() + _TOO_OLD_S
        # A group that nobody has issued, or that has ended, is wanted by no other either.
        group = None if held.task.evaluation else held.task.group
        await held.source.inbox.requeue(held.delivery, group=group)

    async def _wait_for_change(self, most_s: float = 1.0) -> None:
        """Until a group ended or weights changed; a second at most, so that a lost signal only costs that."""
        self._changed.clear()
        try:
            async with asyncio.timeout(min(1.0, most_s)):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _keep_leases(self) -> None:
        """Renew what is held, drop what was lost, and take over what other workers let go."""
        while True:
            await asyncio.sleep(self._training.inbox.lease_s / 3)
            for source in self._sources:
                await self._renew(source)
                await self._take_over(source)

    async def _renew(self, source: TaskSource) -> None:
        mine = {task: held for task, held in self._leased.items() if held.source is source and not task.done()}
        kept = await source.inbox.renew([held.delivery for held in mine.values()])
        for task, held in mine.items():
            if held.delivery.entry not in kept and not task.done():
                log.info("lease_lost", group=held.task.group)
                task.cancel()

    async def _take_over(self, source: TaskSource) -> None:
        """Start what other workers let go, as much as fits: a dead one may have held as many groups as we can run."""
        while (room := self._capacity(source)) and not self._service.stopping.is_set():
            left = await source.inbox.reclaim(room)
            if not left:
                return
            self._start(source, left)

    def _raise_failures(self) -> None:
        """Forget what is done; an error that is not the task's own ends the worker."""
        for task in [task for task in self._leased if task.done()]:
            del self._leased[task]
            if not task.cancelled() and (error := task.exception()):
                raise error

    def _describe_idle(self) -> None:
        if self._num_running:
            self._service.activity.set("busy", "generating", f"{self._num_running} rollouts")
        else:
            self._service.activity.set("waiting", "prompts", "nothing to generate")

    async def _drain(self) -> None:
        """Finish the groups under way; what the deadline cuts off is saved, and goes on elsewhere at once."""
        deadline = time.monotonic() + self._service.config.run.drain_timeout_s / 2
        for source in self._sources:
            await self._renew(source)  # at the end of a run the coordinator has taken its tasks back
        while any(not task.done() for task in self._leased) and time.monotonic() < deadline:
            self._service.activity.set("busy", "draining", f"{self._num_running} rollouts")
            await self._wait_for_change(max(0.0, deadline - time.monotonic()))
        left = {task: held for task, held in self._leased.items() if not task.done()}
        await self._saver.save([entry for held in left.values() for entry in held.rollouts()], paused=True)
        for task, held in left.items():
            task.cancel()
            await held.source.inbox.requeue(held.delivery)


def _trace(traces: Traces, rollout: Rollout) -> None:
    """Its wait for a generator, and its generation."""
    which = (rollout.group, rollout.number)
    traces.add("queue", *which, rollout.issued_unix_s, rollout.started_unix_s, before="generate")
    about: dict[str, Any] = {
        "tokens": len(rollout.token_ids),
        "attempt": rollout.attempt,
        "generator": rollout.generator,
    }
    traces.add("generate", *which, rollout.started_unix_s, rollout.finished_unix_s, **about)
