"""The tasks that this gateway offers to agents: taken from the streams, opened, and written when agents finish them.

consumes: prompts, eval_prompts. produces: rollouts, eval_rollouts.
waits for: workers. unblocked by: results and the ends of leases, which it looks for; the group's own deadline.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import structlog

from gspo.common.service.app import Service
from gspo.common.streams.consumer import Consumer, DeadLetterError, Deliveries, Subscription
from gspo.common.streams.entries import group_failure
from gspo.common.streams.inbox import Delivery, EntryOutput, Inbox, new_consumer_name
from gspo.common.streams.keys import rollout_key
from gspo.common.streams.saved_states import DONE
from gspo.common.streams.token_counts import RolloutTokens, num_sampled
from gspo.common.telemetry import metrics
from gspo.gateway.sessions.agent_rollout import agent_rollout
from gspo.gateway.sessions.session_store import SessionStore
from gspo.gateway.sessions.turns import Conversation
from gspo_proto.rollout_pb2 import GroupTask, Rollout

log = structlog.get_logger()
_LOOK_EVERY_S = 0.2
# Workers that wait for a task see within it that the run has ended.
_LINGER_S = 0.5


@dataclass(frozen=True)
class TaskStream:
    """A stream of tasks, and where its rollouts and the failures of its groups go."""

    inbox: Inbox
    finished_stream: str
    scored_stream: str


class Board:
    """Keeps as many rollouts open as workers may play at a time, and writes those that have ended."""

    def __init__(self, service: Service, store: SessionStore) -> None:
        config, keys = service.config, service.keys
        self._service, self._store = service, store
        self._max_rollouts, self._max_attempts = config.agent.max_rollouts, config.staleness.max_attempts
        self._most_tokens = config.algorithm.longest_rollout
        self._num_open = 0
        name, lease_s = new_consumer_name(service.options.name), config.services.lease_s
        streams = [
            TaskStream(Inbox(service.redis, keys, stream, consumer=name, lease_s=lease_s), finished, scored)
            for stream, finished, scored in (
                (keys.prompts, keys.rollouts, keys.scored),
                (keys.eval_prompts, keys.eval_rollouts, keys.eval_scored),
            )
        ]
        self._consumer = Consumer(
            [
                Subscription(
                    stream.inbox,
                    handle=partial(self._work, stream),
                    capacity=self._capacity,
                    batch_key=attrgetter("entry"),
                    failure=partial(_failure, stream),
                )
                for stream in streams
            ],
            stopping=service.stopping,
            drain_s=config.run.drain_timeout_s / 2,
        )

    async def run(self) -> None:
        """Work until the service is stopping; tasks that are unfinished then go to other gateways."""
        await self._consumer.run()
        await asyncio.sleep(_LINGER_S)

    def _capacity(self) -> int:
        """Groups that may be taken; one where nothing is open, however large it is."""
        size = self._service.config.algorithm.num_return_sequences_in_group
        return max((self._max_rollouts - self._num_open) // size, 0 if self._num_open else 1)

    def _count(self, change: int) -> None:
        self._num_open += change
        metrics.AGENT_ROLLOUTS_OPEN.set(self._num_open)
        if self._num_open:
            self._service.activity.set("waiting", "agents", f"{self._num_open} rollouts are open or played")
        else:
            self._service.activity.set("waiting", "prompts", "no rollout is open")

    async def _work(self, stream: TaskStream, batch: Deliveries) -> None:
        (delivery,) = batch
        task: GroupTask = delivery.message
        names = {rollout_key(task.group, number, task.evaluation): number for number in range(task.num_rollouts)}
        waiting = set(names)
        self._count(len(waiting))  # before the first wait, after which the capacity is asked again
        try:
            states = await stream.inbox.load(list(names))
            done = {name for name, state in zip(names, states, strict=True) if state == DONE}
            waiting -= done
            self._count(-len(done))
            for name in waiting:
                await self._store.open(task, names[name], self._most_tokens)
            while waiting:
                ended = await self._write_ended(stream, delivery, sorted(waiting))
                waiting -= ended
                self._count(-len(ended))
                if waiting:
                    await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            self._count(-len(waiting))
        await stream.inbox.finish(delivery)

    async def _write_ended(self, stream: TaskStream, delivery: Delivery, names: list[str]) -> set[str]:
        """Write the rollouts that have ended, and open those again whose worker is lost; the names of the former."""
        rollouts: dict[str, Rollout] = {}
        for name, played in zip(names, await self._store.played(names), strict=True):
            if played.session is not None and played.result is not None:
                turns = Conversation(await self._store.turns(name))
                rollouts[name] = agent_rollout(played.session, turns, played.result, played.worker, self._most_tokens)
                end = "failed" if rollouts[name].episode.failure_kind else "finished"
                metrics.AGENT_ROLLOUTS.labels(end).inc()
            elif played.is_unknown:
                raise DeadLetterError(f"rollout {name} is not in Redis any more")
            elif attempt := await self._store.reopen(name):
                await self._on_lost(name, attempt)
        outputs = [
            EntryOutput(
                delivery,
                stream.finished_stream,
                rollout.SerializeToString(),
                name,
                # Its tokens are reported already, with the turns; those that no branch has are superseded.
                RolloutTokens(num_sampled(rollout.version)),
            )
            for name, rollout in rollouts.items()
        ]
        if not all(await stream.inbox.put(outputs)):
            log.info("lease_lost", entry=delivery.entry.decode(), detail="its group ended, or another gateway has it")
            return set()
        await self._store.forget(list(rollouts))
        return set(rollouts)

    async def _on_lost(self, name: str, attempt: int) -> None:
        """A worker was silent for too long, or has given its rollout back."""
        metrics.AGENT_LEASES_LOST.inc()
        log.warning("agent_lost", rollout=name, attempt=attempt, detail="its worker was silent for too long, or lost")
        if attempt > self._max_attempts:
            raise DeadLetterError(f"rollout {name} was handed to {attempt - 1} workers, and none finished it")


def _failure(stream: TaskStream, delivery: Delivery, reason: str) -> list[tuple[str, bytes]]:
    """The failure that settles a group which agents cannot play."""
    return [(stream.scored_stream, group_failure(delivery.message, f"agent: {reason}"))]
