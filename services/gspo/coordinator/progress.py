"""The learner's own account of the run over gRPC: its version, the settled groups, the recorded evaluations."""

from __future__ import annotations

import asyncio
import time

import grpc
import structlog

from gspo.common.network.auth_log import token_accepted_by, token_rejected_by
from gspo.common.network.grpc_server import open_channel, token_metadata
from gspo.common.service.app import Service
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import LEARNER
from gspo_proto.learner_pb2 import ProgressReply, ProgressRequest
from gspo_proto.learner_pb2_grpc import LearnerStub

_CALL_TIMEOUT_S = 10.0
_ASK_EVERY_S = 10.0
log = structlog.get_logger()


class LearnerProgress:
    """Asks the learner for its progress.

    Attributes:
        recorded: Labels of the evaluations that the learner had recorded at its last answer.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._metadata = service, token_metadata(service.options.token)
        self._call: asyncio.Task[ProgressReply | None] | None = None
        self._next_ask_s = 0.0
        self._epoch = 0
        self.recorded: frozenset[str] = frozenset()

    async def ask(self) -> ProgressReply | None:
        """One call; None where no learner is registered or it does not answer."""
        redis, keys = self._service.redis, self._service.keys
        address = next((learner.grpc for learner in await list_instances(redis, keys, LEARNER) if learner.grpc), "")
        if not address:
            return None
        async with open_channel(address, self._service.config.services.tls) as channel:
            try:
                reply: ProgressReply = await LearnerStub(channel).Progress(
                    ProgressRequest(), timeout=_CALL_TIMEOUT_S, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    token_rejected_by(self._service, LEARNER)
                    return None
                log.info("learner_unreachable", address=address, code=error.code().name, detail=error.details())
                return None
        token_accepted_by(self._service, LEARNER)
        if reply.run != keys.run:
            log.warning("other_run", address=address, its_run=reply.run, our_run=keys.run)
            return None
        return reply

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
