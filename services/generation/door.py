"""The generator's gRPC face: rollouts on request, new weights, and what this generator is.

A push is staged beside the weights that serve and checked by digest before generation pauses, so a broken or late
push changes nothing. Neighbours: staging.py, engine.py; the learner calls PushWeights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import structlog

from gspo_proto import generation_pb2_grpc
from gspo_proto.generation_pb2 import (
    DescribeRequest,
    GenerateRequest,
    GeneratorDescription,
    PushHeader,
    PushResult,
    TensorFrame,
    WeightFrame,
)
from gspo_proto.rollout_pb2 import Rollout
from services.common import metrics
from services.common.runtime import Service
from services.generation.engine import Engine, EngineBrokenError, LoadFailedError
from services.generation.rollouts import AbortedError, Rollouts
from services.generation.staging import StagedWeights, StagingError
from services.generation.worker import Worker

log = structlog.get_logger()
SERVICE_NAME = "gspo.Generation"
Context = grpc.aio.ServicerContext[Any, Any]


class Refused(Exception):  # noqa: N818 - an answer to the caller, not a fault of ours
    """A push that must not be applied; the status says whether another kind of push would do."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Door(generation_pb2_grpc.GenerationServicer):
    """Serves gspo.Generation for one engine.

    Attributes:
        broken: Resolves with the reason once the engine cannot serve any more.
    """

    def __init__(
        self, service: Service, engine: Engine, staged: StagedWeights, rollouts: Rollouts, worker: Worker
    ) -> None:
        self._service, self._engine, self._staged = service, engine, staged
        self._rollouts, self._worker = rollouts, worker
        self._digest = staged.digest()
        self._epoch = 0
        self._pushing = asyncio.Lock()
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        metrics.GENERATOR_VERSION.set(engine.version)

    def facts(self) -> dict[str, Any]:
        """What this generator adds to its heartbeat."""
        return {
            "version": self._engine.version,
            "digest": self._digest,
            "dtype": self._service.config.generation.dtype,
            "epoch": self._epoch,
            "max_rollouts": self._service.config.generation.max_rollouts,
            "num_running": self._worker.num_running,
        }

    async def until_broken(self) -> None:
        """Ends the process by an error when the engine cannot serve any more."""
        raise EngineBrokenError(await self.broken)

    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Rollout]:
        """Rollouts of one task, each as soon as it is finished."""
        task = request.task
        pending = [self._rollouts.generate(task, number) for number in range(max(1, task.num_rollouts))]
        try:
            for finished in asyncio.as_completed(pending):
                yield await finished
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (AbortedError, EngineBrokenError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def PushWeights(self, request_iterator: AsyncIterator[WeightFrame], context: Context) -> PushResult:
        """Take one version; old weights stay in place on any failure."""
        try:
            async with self._pushing:
                result = await self._push(request_iterator)
        except (Refused, StagingError, LoadFailedError, EngineBrokenError) as error:
            metrics.PUSHES_RECEIVED.labels("refused").inc()
            log.warning("push_refused", reason=str(error), serving=self._engine.version)
            if isinstance(error, EngineBrokenError) and not self.broken.done():
                self.broken.set_result(str(error))
            status = error.status if isinstance(error, Refused) else grpc.StatusCode.INTERNAL
            await context.abort(status, str(error))
            raise
        metrics.PUSHES_RECEIVED.labels("loaded").inc()
        metrics.PUSH_PAUSE_SECONDS.observe(result.pause_s + result.load_s + result.resume_s)
        return result

    async def Describe(self, request: DescribeRequest, context: Context) -> GeneratorDescription:
        """Version, digest, dtype and load of this generator."""
        config = self._service.config
        return GeneratorDescription(
            name=self._service.options.name,
            version=self._engine.version,
            digest=self._digest,
            dtype=config.generation.dtype,
            model=config.model.path,
            epoch=self._epoch,
            max_rollouts=config.generation.max_rollouts,
            num_running=self._worker.num_running,
        )

    async def _push(self, frames: AsyncIterator[WeightFrame]) -> PushResult:
        began = time.monotonic()
        first = await anext(aiter(frames), None)
        if first is None or first.WhichOneof("what") != "header":
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "a push begins with its header")
        header = first.header
        self._check_header(header)
        await self._stage(header, frames)
        digest = await asyncio.to_thread(self._staged.next_digest)
        if digest != header.digest:
            raise Refused(
                grpc.StatusCode.DATA_LOSS,
                f"version {header.version} has digest {header.digest[:12]} and {digest[:12]} came; nothing was loaded",
            )
        staged_s = time.monotonic() - began
        with self._service.activity.doing("loading weights", f"version {header.version}"):
            times = await self._engine.load(
                header.version,
                self._staged,
                on_update=self._service.config.generation.on_update,
                timeout_s=self._service.config.generation.push_timeout_s,
            )
        self._digest, self._epoch = digest, header.epoch
        metrics.GENERATOR_VERSION.set(header.version)
        self._worker.weights_changed()
        log.info("version_loaded", version=header.version, digest=digest[:12], stage_s=round(staged_s, 4))
        return PushResult(
            version=header.version,
            digest=digest,
            stage_s=staged_s,
            pause_s=times.pause_s,
            load_s=times.load_s,
            resume_s=times.resume_s,
        )

    def _check_header(self, header: PushHeader) -> None:
        config = self._service.config
        if header.run != config.name:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, f"this generator is of run {config.name}, not {header.run}"
            )
        if header.epoch < self._epoch:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"a learner of epoch {self._epoch} has taken over; this push is of epoch {header.epoch}",
            )
        if header.dtype != config.generation.dtype:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this generator serves {config.generation.dtype}, not {header.dtype}",
            )
        if header.base_digest and header.base_digest != self._digest:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the changes are to {header.base_digest[:12]} and {self._digest[:12]} is here; push every element",
            )
        if header.num_tensors != len(self._staged.places) or header.num_bytes != _num_bytes(self._staged):
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the push has {header.num_tensors} tensors of {header.num_bytes} bytes, this model "
                f"{len(self._staged.places)} of {_num_bytes(self._staged)}",
            )

    async def _stage(self, header: PushHeader, frames: AsyncIterator[WeightFrame]) -> None:
        if header.base_digest:
            self._staged.begin_delta()
        else:
            self._staged.begin_full()
        async for frame in frames:
            self._write(frame.tensor)

    def _write(self, frame: TensorFrame) -> None:
        if frame.indices:
            self._staged.patch(frame.name, np.frombuffer(frame.indices, "<u8"), frame.data)
        else:
            self._staged.write(frame.name, frame.data, frame.offset)


def _num_bytes(staged: StagedWeights) -> int:
    return sum(place.num_bytes for place in staged.places.values())
