"""The coordinator's sources about the run: the events, and over gRPC the learner's own account and its results."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import Message

from gspo.common.network.auth_log import token_accepted_by, token_rejected_by
from gspo.common.network.grpc_server import open_channel, token_metadata
from gspo.common.service.app import Service
from gspo.common.streams.entries import body_of
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import LEARNER
from gspo.coordinator.redis_state import newest_entries, readable
from gspo_proto.learner_pb2 import (
    REWARD_SPREAD_DIFFERENT,
    REWARD_SPREAD_UNSPECIFIED,
    ProgressReply,
    ProgressRequest,
    ResultsReply,
    ResultsRequest,
)
from gspo_proto.learner_pb2_grpc import LearnerStub
from gspo_proto.rollout_pb2 import CheckpointDone, Event, GroupsSettled, StepDone, TrainingDone, VersionLive

# Among so many events a starting coordinator finds the newest steps: a step has a handful.
_NUM_NEWEST = 200
# The learner's messages. Those of an epoch below the newest come from a learner that has lost the run.
_OF_LEARNER = (StepDone, GroupsSettled, VersionLive, CheckpointDone, TrainingDone)
_CALL_TIMEOUT_S = 10.0
_ASK_EVERY_S = 10.0
# So long a tick of the coordinator's loop waits for results.
_RESULTS_S = 1.0
Reply = TypeVar("Reply", ProgressReply, ResultsReply)
log = structlog.get_logger()


class EventFeed:
    """Reads the events from the coordinator's start on, without those of a learner that has lost the run.

    Attributes:
        epoch: The newest learner's, by the events and by its own answers.
    """

    def __init__(self, service: Service) -> None:
        self._redis, self._stream = service.redis, service.keys.events
        self._events = Events(service.redis, service.keys, service.options.name)
        self._position = FROM_START
        self.epoch = 0

    async def start(self) -> list[Message]:
        """Go behind the newest event. Returns the bodies of the newest 200 before it, the newest first."""
        entries = await newest_entries(self._redis, self._stream, _NUM_NEWEST)
        if entries:
            self._position = entries[0][0]
        return [body for _, event in readable(Event, entries) if (body := body_of(event)) is not None]

    async def read(self, block_s: float) -> list[Message]:
        """The bodies of the next events, oldest first; waits `block_s` at most, and returns none then."""
        bodies = []
        for entry, event in await self._events.read(self._position, block_s):
            self._position = entry
            body = body_of(event)
            if event.epoch < self.epoch and isinstance(body, _OF_LEARNER):
                log.warning("old_event", kind=event.WhichOneof("what"), epoch=event.epoch, newest=self.epoch)
                continue
            self.epoch = max(self.epoch, event.epoch)
            if body is not None:
                bodies.append(body)
        return bodies

    async def send(self, event: Event) -> None:
        """Send an event under the newest epoch."""
        event.epoch = self.epoch
        await self._events.send(event)

    def rewind(self) -> None:
        """Read from the start again: Redis was wiped, and its clock may have been set back since."""
        self._position = FROM_START


class LearnerProgress:
    """Asks the learner for its progress: its version, the settled groups, the recorded evaluations.

    Attributes:
        recorded: Labels of the evaluations that the learner had recorded at its last answer.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._call: asyncio.Task[ProgressReply | None] | None = None
        self._next_ask_s = 0.0
        self._epoch = 0
        self.recorded: frozenset[str] = frozenset()

    async def ask(self) -> ProgressReply | None:
        """One call; None where no learner is registered or it does not answer."""
        return await _ask(self._service, lambda learner: learner.Progress, ProgressRequest())

    def poll(self) -> ProgressReply | None:
        """Ask in the background every 10 s; returns each answer once."""
        if self._call is not None and self._call.done():
            reply, self._call = self._call.result(), None
            return reply
        if self._call is None and time.monotonic() >= self._next_ask_s:
            self._next_ask_s = time.monotonic() + _ASK_EVERY_S
            self._call = asyncio.create_task(self.ask(), name="progress")
        return None

    def ask_now(self) -> None:
        """Have the next `poll` ask without a wait."""
        self._next_ask_s = 0.0

    def note(self, reply: ProgressReply) -> bool:
        """Remember an answer. Returns whether it comes from a newer learner than the answers before."""
        self.recorded = frozenset(reply.evaluations)
        is_new, self._epoch = reply.epoch > self._epoch, max(self._epoch, reply.epoch)
        return is_new

    def cancel(self) -> None:
        """Give up the call in flight."""
        if self._call is not None:
            self._call.cancel()


class LearnerResults:
    """Asks the learner for the results of settled groups, which the prompts of a curriculum follow."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._call: asyncio.Task[ResultsReply | None] | None = None

    async def read(self, first: int) -> list[tuple[int, bool | None]]:
        """A page of the results from place `first` of the log on: groups, each with whether its rewards differed.

        Empty where the learner does not answer within a second. Its answer is then that of a later call, which must
        ask for the same place.
        """
        if self._call is None:
            asking = _ask(self._service, lambda learner: learner.Results, ResultsRequest(first=first))
            self._call = asyncio.create_task(asking, name="results")
        await asyncio.wait({self._call}, timeout=_RESULTS_S)
        if not self._call.done():
            return []
        reply, self._call = self._call.result(), None
        if reply is None:
            return []
        return [
            (group, None if spread == REWARD_SPREAD_UNSPECIFIED else spread == REWARD_SPREAD_DIFFERENT)
            for group, spread in zip(reply.groups, reply.spreads, strict=True)
        ]

    def cancel(self) -> None:
        """Give up the call in flight."""
        if self._call is not None:
            self._call.cancel()


async def _ask(
    service: Service, method: Callable[[Any], Callable[..., Awaitable[Reply]]], request: Message
) -> Reply | None:
    """The learner's answer to one call; None where none is registered, it does not answer, or it is another run's."""
    redis, keys = service.redis, service.keys
    address = next((learner.grpc for learner in await list_instances(redis, keys, LEARNER) if learner.grpc), "")
    if not address:
        return None
    async with open_channel(address, service.config.services.tls) as channel:
        try:
            metadata = token_metadata(service.options.token)
            reply = await method(LearnerStub(channel))(request, timeout=_CALL_TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                token_rejected_by(service, LEARNER)
                return None
            log.info("learner_unreachable", address=address, code=error.code().name, detail=error.details())
            return None
    token_accepted_by(service, LEARNER)
    if reply.run != keys.run:
        log.warning("other_run", address=address, its_run=reply.run, our_run=keys.run)
        return None
    return reply
