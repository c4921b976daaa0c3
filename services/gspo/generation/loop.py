"""The generation loop: leased groups keep the engine full, and each rollout is written as soon as it has ended.

consumes: prompts, paused_prompts, eval_prompts. produces: rollouts, eval_rollouts, paused_prompts.
waits for: capacity, a task, newer weights. unblocked by: a finished rollout, the coordinator, a weight update.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from functools import partial
from operator import attrgetter

import structlog
from redis.exceptions import RedisError

from gspo.common.service.app import Service
from gspo.common.service.traces import Traces
from gspo.common.streams.consumer import Consumer, DeadLetterError, Deliveries, Subscription
from gspo.common.streams.entries import group_failure
from gspo.common.streams.inbox import EntryOutput, Inbox, new_consumer_name
from gspo.common.streams.keys import rollout_key
from gspo.common.streams.saved_states import DONE
from gspo.common.tasks import task_group, wait_until_set
from gspo.common.telemetry import metrics
from gspo.generation.engine.api import EngineLike
from gspo.generation.leased_task import LeasedTask, Saver, TaskSource
from gspo.generation.rollout.driver import RolloutAbortedError, RolloutDriver
from gspo.generation.rollout.in_flight import InFlightRollout, num_failed_deliveries
from gspo_proto.rollout_pb2 import Rollout

log = structlog.get_logger()
# A version that another generator serves comes soon. If it does not, the tasks go to others, and this generator takes
# none until its weights change, or for so long.
_WEIGHTS_PATIENCE_S = 5.0
_TOO_OLD_S = 30.0
# Waiting for weights looks again after this, so that a lost signal costs no more.
_RECHECK_S = 1.0
# More than there can be: how many tasks are paused is not counted yet.
_UNCOUNTED = sys.maxsize


class GenerationLoop:
    """Keeps the engine full and no fuller: a task is taken only while its rollouts fit."""

    def __init__(self, service: Service, engine: EngineLike, driver: RolloutDriver) -> None:
        config, keys = service.config, service.keys
        self._service, self._engine, self._driver = service, engine, driver
        self._max_rollouts, self._max_deliveries = config.generation.max_rollouts, config.staleness.max_attempts
        consumer, lease_s = new_consumer_name(service.options.name), config.services.lease_s
        training, paused, evaluation = (
            Inbox(service.redis, keys, stream, consumer=consumer, lease_s=lease_s)
            for stream in (keys.prompts, keys.paused_prompts, keys.eval_prompts)
        )
        size, segment = config.algorithm.num_return_sequences_in_group, config.generation.segment_tokens
        self._training = TaskSource(training, keys.rollouts, keys.scored, size, segment)
        self._paused = TaskSource(paused, keys.rollouts, keys.scored, size, segment)
        self._evaluation = TaskSource(evaluation, keys.eval_rollouts, keys.eval_scored, config.evaluation.num_answers)
        self._leased: list[LeasedTask] = []
        self._saver = Saver(config.generation, engine, self._leased)
        # Tasks that were paused under the version before: a new version begins with them.
        self._num_paused_due = _UNCOUNTED
        self._too_old_until = 0.0
        self._new_weights = asyncio.Event()
        self._subscriptions = [self._subscription(s) for s in (self._training, self._paused, self._evaluation)]
        self._consumer = Consumer(
            self._subscriptions,
            stopping=service.stopping,
            drain_s=config.run.drain_timeout_s / 2,
            order=self._order,
            on_cut_off=self._cut_off,
        )
        self._cuts_off = False

    @property
    def num_running(self) -> int:
        """Rollouts that are in flight, or wait for weights new enough."""
        return sum(leased.num_running for leased in self._leased)

    def weights_changed(self) -> None:
        """A new version serves: wake the tasks that wait for it, and take tasks again, those that are paused first."""
        self._too_old_until = 0.0
        self._num_paused_due = _UNCOUNTED
        self._new_weights.set()
        self._consumer.wake()

    async def run(self) -> None:
        """Work until the service is stopping; then finish the leased groups, as far as the drain's time allows."""
        if self._service.config.agent.used:  # agents take the tasks at the gateway, and ask this engine for tokens
            self._service.activity.set("waiting", "requests", "agents play the rollouts")
            await self._service.stopping.wait()
            return
        async with task_group(self._saver.run()):
            await self._consumer.run()

    def _subscription(self, source: TaskSource) -> Subscription:
        return Subscription(
            source.inbox,
            handle=partial(self._work, source),
            capacity=partial(self._capacity, source),
            batch_key=attrgetter("entry"),  # no two deliveries have the same: each task is a batch of its own
            failure=lambda delivery, reason: [
                (source.scored_stream, group_failure(delivery.message, f"generation: {reason}"))
            ],
        )

    async def _order(self) -> Sequence[Subscription]:
        """A new version begins with the paused tasks, and takes no other before; after that, paused tasks come last."""
        self._describe()
        if self._num_paused_due:  # other generators take them too
            self._num_paused_due = min(self._num_paused_due, await self._paused.inbox.num_untaken())
        return self._subscriptions[1:2] if self._num_paused_due else self._subscriptions

    def _capacity(self, source: TaskSource) -> int:
        """Whole groups that fit into the engine: no task waits here while another generator is free."""
        if self._engine.is_asleep or time.monotonic() < self._too_old_until:
            return 0
        num_running = self.num_running
        num_groups = max((self._max_rollouts - num_running) // source.group_size, 0 if num_running else 1)
        return min(num_groups, self._num_paused_due) if self._num_paused_due else num_groups

    def _describe(self) -> None:
        """Show what the leased tasks are doing."""
        activity, num_running = self._service.activity, self.num_running
        metrics.ROLLOUTS_RUNNING.set(num_running)
        if self._engine.is_asleep:
            activity.set("waiting", "gpus", "the learner has them")
        elif any(not leased.awaits_weights for leased in self._leased):
            what = "draining" if self._service.stopping.is_set() else "generating"
            activity.set("busy", what, f"{num_running} rollouts")
        elif self._leased:
            min_version = min(leased.task.min_version for leased in self._leased)
            activity.set("waiting", "weights", f"version {min_version}, serving {self._engine.version}")
        elif time.monotonic() < self._too_old_until:
            activity.set("waiting", "weights", f"newer than version {self._engine.version}")
        else:
            activity.set("waiting", "prompts", "nothing to generate")

    async def _work(self, source: TaskSource, batch: Deliveries) -> None:
        (delivery,) = batch
        leased = LeasedTask(source, delivery, num_running=delivery.message.num_rollouts)
        self._leased.append(leased)
        if source is self._paused:
            self._num_paused_due = max(0, self._num_paused_due - 1)
        try:
            await self._generate_group(leased)
        except (ValueError, RolloutAbortedError) as error:
            raise DeadLetterError(str(error)) from error
        finally:
            self._leased.remove(leased)
            self._describe()

    async def _generate_group(self, leased: LeasedTask) -> None:
        unfinished = await self._unfinished(leased)
        num_failed = num_failed_deliveries(leased.delivery.num_deliveries, unfinished)
        if unfinished and num_failed > self._max_deliveries:
            raise DeadLetterError(f"handed out {num_failed - 1} times and never finished")
        if not await self._has_version(leased):
            await self._requeue(leased)
            return
        leased.in_flight = {rollout.number: rollout for rollout in unfinished}
        self._release(leased, leased.num_running - len(unfinished))
        async with task_group() as tasks:
            for rollout in unfinished:
                tasks.create_task(self._generate_rollout(leased, rollout))
        await self._finish_or_pause(leased)

    async def _unfinished(self, leased: LeasedTask) -> list[InFlightRollout]:
        """The rollouts that no earlier generator has finished, each as it was saved last."""
        numbers = range(leased.task.num_rollouts)
        states = await leased.source.inbox.load(
            [rollout_key(leased.task.group, number, leased.task.evaluation) for number in numbers]
        )
        metrics.ROLLOUTS_RESUMED.inc(sum(state is not None and state != DONE for state in states))
        return [
            InFlightRollout(leased.task, number, self._service.options.name, state)
            for number, state in zip(numbers, states, strict=True)
            if state != DONE
        ]

    async def _has_version(self, leased: LeasedTask) -> bool:
        """Whether the engine serves the task's least version or a newer one, within a while."""
        deadline, min_version = time.monotonic() + _WEIGHTS_PATIENCE_S, leased.task.min_version
        while self._engine.version < min_version and (left_s := deadline - time.monotonic()) > 0:
            leased.awaits_weights = True
            self._new_weights.clear()
            await wait_until_set(self._new_weights, min(left_s, _RECHECK_S))
        leased.awaits_weights = False
        return self._engine.version >= min_version

    async def _requeue(self, leased: LeasedTask) -> None:
        """Leave a task to generators whose weights are new enough, and take none for now."""
        version, needed = self._engine.version, leased.task.min_version
        if time.monotonic() >= self._too_old_until:
            log.warning("weights_too_old", serving=version, needed=needed, detail="its tasks are left to others")
        self._too_old_until = time.monotonic() + _TOO_OLD_S
        # A group that was never issued, or that has ended, is dropped here: no other generator needs it either.
        group = None if leased.task.evaluation else leased.task.group
        await leased.source.inbox.requeue(leased.delivery, group=group)

    async def _generate_rollout(self, leased: LeasedTask, rollout: InFlightRollout) -> None:
        """Go on with one rollout until it has ended, or has to leave its place to others."""
        try:
            finished = await self._finished(leased, rollout)
        except BaseException:
            # A drain leaves it to others. Otherwise another generator has it, or its group has ended.
            self._driver.hand_over(rollout, None if self._cuts_off else partial(_goes_on, leased))
            raise
        self._release(leased, 1)
        if finished is None:
            return
        del leased.in_flight[rollout.number]
        stream, payload = leased.source.finished_stream, finished.SerializeToString()
        output = EntryOutput(leased.delivery, stream, payload, rollout.rollout_key, rollout.tokens())
        if not await leased.source.outbox.put(output):
            detail = "dropped: its group ended, or another generator has it"
            log.info("lease_lost", rollout=rollout.rollout_key, detail=detail)
        elif not finished.evaluation:
            _trace(self._service.traces, finished)

    async def _finished(self, leased: LeasedTask, rollout: InFlightRollout) -> Rollout | None:
        """The finished rollout; None where it pauses, because other tasks wait."""
        while (finished := await self._driver.drive(rollout, leased.source.segment_tokens)) is None:
            leased.pauses = leased.pauses or await self._others_wait(leased.source)
            if leased.pauses:
                return None
        return finished

    async def _cut_off(self) -> None:
        """The drain has taken too long: the leased tasks go on elsewhere at once."""
        self._cuts_off = True
        await self._saver.save(self._leased, paused=True)

    def _release(self, leased: LeasedTask, num: int) -> None:
        """Free the places of rollouts that have ended, or will not run."""
        leased.num_running -= num
        self._describe()
        self._consumer.wake()

    async def _others_wait(self, source: TaskSource) -> bool:
        """Whether tasks wait for a place: while there is capacity, a pause would win none."""
        if self._capacity(source):
            return False
        return any([await waiting.inbox.num_untaken() for waiting in (self._training, self._paused)])

    async def _finish_or_pause(self, leased: LeasedTask) -> None:
        """Acknowledge a task whose rollouts are all written; save the others, and leave them to any generator."""
        inbox, delivery = leased.source.inbox, leased.delivery
        if not leased.in_flight:
            await inbox.finish(delivery)
            return
        metrics.ROLLOUTS_PAUSED.inc(len(leased.in_flight))
        await self._saver.save([leased], paused=True)
        await inbox.requeue(delivery, stream=self._paused.inbox.stream, group=leased.task.group)


async def _goes_on(leased: LeasedTask) -> bool:
    """Whether a task is still in its stream, for this generator or another one."""
    try:
        return await leased.source.inbox.has(leased.delivery)
    except RedisError as error:
        log.warning("task_unknown", reason=str(error), detail="its sessions stay open for others")
        return True


def _trace(traces: Traces, rollout: Rollout) -> None:
    """Trace the wait for a generator, and the generation."""
    which = (rollout.group, rollout.number)
    traces.add("queue", *which, rollout.issued_unix_s, rollout.started_unix_s, before="generate")
    span = (*which, rollout.started_unix_s, rollout.finished_unix_s)
    traces.add("generate", *span, tokens=len(rollout.token_ids), attempt=rollout.attempt, generator=rollout.generator)
