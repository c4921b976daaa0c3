"""Pulls the tensors of a version that other ranks of the learner than the first own, each from its rank.

The header of a push names them. receiver.py stages the frames.
"""

from collections.abc import AsyncGenerator

from gspo.common.config.schema import TlsConfig
from gspo.common.network.grpc_server import open_channel, token_metadata
from gspo_proto.generation_pb2 import PushHeader, WeightFrame
from gspo_proto.learner_pb2 import PullRequest
from gspo_proto.learner_pb2_grpc import SharesStub


async def pulled_frames(address: str, header: PushHeader, tls: TlsConfig, token: str) -> AsyncGenerator[WeightFrame]:
    """The frames of one rank, without a limit of time."""
    request = PullRequest(version=header.version)
    if header.HasField("base_version"):
        request.base_version = header.base_version
    async with open_channel(address, tls) as channel:
        async for frame in SharesStub(channel).Pull(request, metadata=token_metadata(token)):
            yield frame
