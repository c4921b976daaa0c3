"""The generator's gRPC service: rollouts on request, weight updates, and a description of this generator."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import structlog

from gspo.common.errors import MalformedEntryError
from gspo.common.network.grpc_server import ADMITTED, refuse_message
from gspo.common.service.app import Service
from gspo.common.streams.entries import check_message
from gspo.common.telemetry import metrics
from gspo.generation.engine.api import EngineBrokenError, EngineLike, LoadFailedError, WrongTensorsError
from gspo.generation.engine.staging import ModelMismatchError, PolicyCopies, StagingError
from gspo.generation.loop import GenerationLoop
from gspo.generation.receiver import PushRefusedError, Receiver
from gspo.generation.rollout.driver import RolloutAbortedError, RolloutDriver
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo.generation.token_stream import stream_tokens
from gspo_proto import generation_pb2_grpc
from gspo_proto.generation_pb2 import (
    DescribeRequest,
    GenerateRequest,
    GeneratorDescription,
    PushResult,
    SampledTokens,
    SampleRequest,
    SleepReply,
    SleepRequest,
    WeightFrame,
)
from gspo_proto.rollout_pb2 import GroupTask, Rollout

log = structlog.get_logger()
SERVICE_NAME = "gspo.Generation"
Context = grpc.aio.ServicerContext[Any, Any]


class GenerationGrpcServicer(generation_pb2_grpc.GenerationServicer):
    """Serves gspo.Generation for one engine."""

    def __init__(
        self, service: Service, engine: EngineLike, copies: PolicyCopies, driver: RolloutDriver, loop: GenerationLoop
    ) -> None:
        self._service, self._engine, self._driver, self._loop = service, engine, driver, loop
        self._receiver = Receiver(service, engine, copies, loop.weights_changed)
        metrics.GENERATOR_VERSION.set(engine.version)

    def facts(self) -> dict[str, Any]:
        """The generator's own fields of its heartbeat."""
        receiver = self._receiver
        return self._description() | {"num_frames": receiver.num_frames, "takes_weights": receiver.is_working}

    def _description(self) -> dict[str, Any]:
        return {
            "version": self._engine.version,
            "digest": self._receiver.digest,
            "dtype": self._service.config.generation.dtype,
            "epoch": self._receiver.fence.epoch,
            "max_rollouts": self._service.config.generation.max_rollouts,
            "num_running": self._loop.num_running,
            "asleep": self._engine.is_asleep,
        }

    async def wait_until_broken(self) -> None:
        """Wait for the end of a broken engine, which ends the process.

        Raises:
            EngineBrokenError: The engine cannot serve any more.
        """
        raise EngineBrokenError(await self._receiver.broken)

    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Rollout]:
        """Rollouts of one task, each as soon as it is finished."""
        try:
            check_message(request.task)
        except MalformedEntryError as error:
            await refuse_message(context, error, "Generate")
        task, name = self._limit_tokens(request.task), self._service.options.name
        rollouts = [
            asyncio.create_task(self._driver.drive(InFlightRollout(task, number, name)))
            for number in range(task.num_rollouts)
        ]
        try:
            async with _refusing(context):
                for finished in asyncio.as_completed(rollouts):
                    if (rollout := await finished) is not None:  # without a segment none pauses
                        yield rollout
        finally:  # one has failed, or the caller has cancelled: the engine drops the others
            for driving in rollouts:
                driving.cancel()

    async def Sample(self, request: SampleRequest, context: Context) -> AsyncIterator[SampledTokens]:
        """Tokens behind a context, in pieces as they are sampled."""
        async with _refusing(context), aclosing(stream_tokens(self._engine, request)) as pieces:
            async for piece in pieces:
                yield piece

    def _limit_tokens(self, task: GroupTask) -> GroupTask:
        """The task, limited to the tokens that the engine has places for."""
        algorithm = self._service.config.algorithm
        places = algorithm.longest_branch - len(task.prompt.token_ids)
        if 0 < places < task.sampling.max_tokens:
            task.sampling.max_tokens = places
        return task

    async def PushWeights(self, request_iterator: AsyncIterator[WeightFrame], context: Context) -> PushResult:
        """Take one policy version; the old weights keep serving after any failure."""
        try:
            result = await self._receiver.receive(
                request_iterator,
                lambda takes_frames: context.send_initial_metadata((ADMITTED,) if takes_frames else ()),
                context.time_remaining(),
            )
        except (PushRefusedError, StagingError, LoadFailedError, EngineBrokenError) as error:
            metrics.PUSHES_RECEIVED.labels("refused").inc()
            log.warning("push_refused", reason=str(error), serving=self._engine.version)
            await context.abort(_status(error), str(error))
            raise
        metrics.PUSHES_RECEIVED.labels("loaded").inc()
        return result

    async def Sleep(self, request: SleepRequest, context: Context) -> SleepReply:
        """Give the GPUs to the learner until the next push."""
        try:
            await self._receiver.sleep(request)
        except (PushRefusedError, EngineBrokenError) as error:
            log.warning("sleep_refused", reason=str(error))
            await context.abort(_status(error), str(error))
        return SleepReply()

    async def Describe(self, request: DescribeRequest, context: Context) -> GeneratorDescription:
        """Version, digest, dtype and number of rollouts of this generator."""
        return GeneratorDescription(
            name=self._service.options.name,
            model=self._service.config.model.path,
            learner=self._receiver.fence.learner,
            **self._description(),
        )


@asynccontextmanager
async def _refusing(context: Context) -> AsyncIterator[None]:
    """Refuse a call whose request is wrong, or that the engine ends."""
    try:
        yield
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except (RolloutAbortedError, EngineBrokenError) as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


def _status(error: Exception) -> grpc.StatusCode:
    if isinstance(error, PushRefusedError):
        return error.status
    if isinstance(error, ModelMismatchError | WrongTensorsError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.DATA_LOSS if isinstance(error, StagingError) else grpc.StatusCode.INTERNAL
