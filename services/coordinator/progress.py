"""Asking the learner how far it is: its version, and which groups are settled.

It changes nothing; slots.py takes the answer over. Neighbour: services/common/members.py for the address.
"""

from __future__ import annotations

import grpc
import structlog
from redis.asyncio import Redis

from gspo_proto.learner_pb2 import ProgressReply, ProgressRequest
from gspo_proto.learner_pb2_grpc import LearnerStub
from services.common.keys import LEARNER, Keys
from services.common.members import members
from services.common.rpc import open_channel, token_metadata

_CALL_TIMEOUT_S = 10.0
log = structlog.get_logger()


class ProgressSource:
    """The learner's own account of the run, over gRPC."""

    def __init__(self, redis: Redis, keys: Keys, token: str) -> None:
        self._redis, self._keys, self._metadata = redis, keys, token_metadata(token)

    async def ask(self) -> ProgressReply | None:
        """One call; None where there is no learner or it does not answer."""
        found = [member for member in await members(self._redis, self._keys, LEARNER) if member.grpc]
        if not found:
            return None
        async with open_channel(found[0].grpc) as channel:
            try:
                reply: ProgressReply = await LearnerStub(channel).Progress(
                    ProgressRequest(), timeout=_CALL_TIMEOUT_S, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                log.info("learner_silent", address=found[0].grpc, code=error.code().name, detail=error.details())
                return None
        if reply.run != self._keys.run:
            log.warning("other_run", address=found[0].grpc, its_run=reply.run, our_run=self._keys.run)
            return None
        return reply
