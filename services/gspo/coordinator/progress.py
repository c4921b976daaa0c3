"""Asking the learner how far it is: its version, and which groups are settled.

It changes nothing; slots.py takes the answer over.
"""

from __future__ import annotations

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
log = structlog.get_logger()


class ProgressSource:
    """The learner's own account of the run, over gRPC."""

    def __init__(self, service: Service) -> None:
        self._service, self._redis, self._keys = service, service.redis, service.keys
        self._metadata = token_metadata(service.options.token)

    async def ask(self) -> ProgressReply | None:
        """One call; None where there is no learner or it does not answer."""
        found = [instance for instance in await list_instances(self._redis, self._keys, LEARNER) if instance.grpc]
        if not found:
            return None
        async with open_channel(found[0].grpc, self._service.config.services.tls) as channel:
            try:
                reply: ProgressReply = await LearnerStub(channel).Progress(
                    ProgressRequest(), timeout=_CALL_TIMEOUT_S, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    token_rejected_by(self._service, LEARNER)
                    return None
                log.info("learner_unreachable", address=found[0].grpc, code=error.code().name, detail=error.details())
                return None
        token_accepted_by(self._service, LEARNER)
        if reply.run != self._keys.run:
            log.warning("other_run", address=found[0].grpc, its_run=reply.run, our_run=self._keys.run)
            return None
        return reply
