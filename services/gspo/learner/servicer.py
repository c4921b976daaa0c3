"""The learner's gRPC service: its progress, and a checkpoint on request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from gspo_proto import learner_pb2_grpc
from gspo_proto.learner_pb2 import CheckpointReply, CheckpointRequest, ProgressReply, ProgressRequest

SERVICE_NAME = "gspo.Learner"
Context = grpc.aio.ServicerContext[Any, Any]


class LearnerGrpcServicer(learner_pb2_grpc.LearnerServicer):
    """Serves gspo.Learner.

    Args:
        progress: Describes the learner now.
        checkpoint: Writes a checkpoint once the current step is done.
    """

    def __init__(
        self, progress: Callable[[], ProgressReply], checkpoint: Callable[[], Awaitable[CheckpointReply]]
    ) -> None:
        self._progress, self._checkpoint = progress, checkpoint

    async def Progress(self, request: ProgressRequest, context: Context) -> ProgressReply:
        """Version, settled groups, counts."""
        return self._progress()

    async def Checkpoint(self, request: CheckpointRequest, context: Context) -> CheckpointReply:
        """A checkpoint after the current step."""
        return await self._checkpoint()
