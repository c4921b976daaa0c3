"""Pulls the tensors of a version that other ranks of the learner than the first own, each from its rank.

The header of a push names them. receiver.py stages the frames.
"""

from collections.abc import AsyncGenerator

import grpc

from gspo.common.config.schema import TlsConfig
from gspo.common.network.grpc_server import open_channel, token_metadata
from gspo_proto.generation_pb2 import PushHeader, WeightFrame
from gspo_proto.learner_pb2 import PullRequest
from gspo_proto.learner_pb2_grpc import SharesStub


class PullFailedError(Exception):
    """A rank did not send its share, as gRPC's status and a reason."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def pulled_frames(address: str, header: PushHeader, tls: TlsConfig, token: str) -> AsyncGenerator[WeightFrame]:
    """The frames of one rank, without a limit of time.

    Raises:
        PullFailedError: The rank is gone, or has newer versions alone.
    """
    request = PullRequest(version=header.version)
    if header.HasField("base_version"):
        request.base_version = header.base_version
    async with open_channel(address, tls) as channel:
        try:
            async for frame in SharesStub(channel).Pull(request, metadata=token_metadata(token)):
                yield frame
        except grpc.aio.AioRpcError as error:
            is_gone = error.code() is grpc.StatusCode.NOT_FOUND
            raise PullFailedError(
                grpc.StatusCode.ABORTED if is_gone else grpc.StatusCode.UNAVAILABLE,
                f"a rank of the learner at {address} did not send its share of version {header.version} "
                f"({error.code().name}: {error.details()}); nothing was loaded",
            ) from error
