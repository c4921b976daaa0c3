"""The run's generators as one source of tokens: a request that loses its generator continues with another.

waits for: a generator. unblocked by: its heartbeat. Every wait ends with the request's own time.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import grpc
import structlog

from gspo.common.network.grpc_server import token_metadata
from gspo.common.service.app import Service
from gspo.common.service.replicas import ReplicaLostError, Replicas, ServiceReplica
from gspo.common.streams.keys import GENERATION
from gspo.common.telemetry import metrics
from gspo_proto.generation_pb2 import SampledTokens, SampleRequest
from gspo_proto.generation_pb2_grpc import GenerationStub
from gspo_proto.rollout_pb2 import Sampling

log = structlog.get_logger()
# After a failure a generator is the last choice for so long: its successor has another entry.
_AVOIDED_S = 5.0
_PAUSE_S = 0.2
# Sessions whose generator is remembered.
_MAX_SESSIONS = 100_000


class NoGeneratorError(RuntimeError):
    """The request's time is over, and no generator has finished it."""


class Generators:
    """Samples with any generator, the requests of a session with the same one where possible."""

    def __init__(self, service: Service) -> None:
        self._metadata = token_metadata(service.options.token)
        self._replicas = Replicas(service, GENERATION, "no generator answers")
        self._sessions: OrderedDict[str, str] = OrderedDict()

    async def run(self) -> None:
        """Follow the generators' heartbeats until cancelled; then close."""
        await self._replicas.run()

    async def sample(
        self, request_id: str, context: Sequence[int], sampling: Sampling, *, session: str | None, timeout_s: float
    ) -> AsyncGenerator[SampledTokens, None]:
        """The pieces of one answer; the last one has `finish`.

        Args:
            context: Token ids of the prompt.
            session: Requests with the same one go to one generator, whose cache has their common beginning.

        Raises:
            ValueError: The generator refuses the request.
            NoGeneratorError: No generator has finished it within `timeout_s`.
        """
        deadline_s, sampled, num_calls = time.monotonic() + timeout_s, list[int](), 0
        while True:
            rest = Sampling()
            rest.CopyFrom(sampling)
            rest.max_tokens -= len(sampled)
            if sampling.seed:  # with the same one the rest would be drawn with the random numbers of the beginning
                rest.seed += len(sampled)
            name = f"{request_id}:{num_calls}.{len(sampled)}"
            call = SampleRequest(request_id=name, token_ids=[*context, *sampled], sampling=rest)
            num_calls += 1
            async with aclosing(self._pieces(call, session, deadline_s)) as pieces:
                async for piece in pieces:
                    sampled += piece.token_ids
                    if piece.finish == "restart":  # a weight update: the answer continues under the new weights
                        piece.finish = ""
                    if len(sampled) >= sampling.max_tokens:
                        piece.finish = piece.finish or "length"
                    yield piece
                    if piece.finish:
                        return

    async def _pieces(
        self, request: SampleRequest, session: str | None, deadline_s: float
    ) -> AsyncGenerator[SampledTokens, None]:
        """The pieces that one generator sends; fewer than the request asks for where it ends."""
        replica = await self._choose(session, deadline_s)
        left_s = deadline_s - time.monotonic()
        if replica is None or left_s <= 0:
            raise NoGeneratorError("no generator has finished the answer in time: `gspo status` shows what they do")
        call = GenerationStub(replica.channel).Sample(request, timeout=left_s, metadata=self._metadata)
        try:
            with replica.counted():
                while isinstance(piece := await replica.while_alive(call.read()), SampledTokens):
                    yield piece
            reason = "the stream ended"
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise ValueError(error.details()) from error
            reason = f"{error.code().name}: {error.details()}"
        except ReplicaLostError as error:
            reason = str(error)
        finally:
            call.cancel()
        replica.avoided_until_s = time.monotonic() + _AVOIDED_S
        metrics.GATEWAY_GENERATORS_LOST.inc()
        log.warning("generator_lost", generator=replica.instance.name, request=request.request_id, reason=reason)
        await asyncio.sleep(_PAUSE_S)

    async def _choose(self, session: str | None, deadline_s: float) -> ServiceReplica | None:
        replica = await self._replicas.choose(deadline_s, self._sessions.get(session or ""))
        if replica is not None and session:
            self._sessions[session] = replica.instance.uid
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return replica
