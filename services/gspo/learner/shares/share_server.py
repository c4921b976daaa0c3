"""Serves the tensors that this rank owns to the generators, on every rank but the first.

The last two versions stay whole: rank zero publishes a version after the ranks have made it, and generators may still
take the one before. Older ones are there as changes alone, as in weight_updates.py.
consumes: this rank's versions. produces: frames. waits for: nothing. Its publisher is rank zero's.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

import grpc
import structlog

from gspo.common.network.credentials import is_loopback
from gspo.common.network.grpc_server import GrpcApi, GrpcServer
from gspo.common.service.app import Service
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.weight_updates import ChainedChanges, ChangeChain, WholePolicy
from gspo_proto.learner_pb2 import PullRequest

log = structlog.get_logger()
NAME = "gspo.Shares"
Context = grpc.aio.ServicerContext[Any, Any]


class ShareServer:
    """The server, on the event loop that it is made in. The trainer's threads call `forget_older` and `add`.

    Attributes:
        address: Where generators reach it.
        is_on_loopback: Whether those of its own host alone do.
    """

    def __init__(self, service: Service) -> None:
        options, config = service.options, service.config
        self._loop = asyncio.get_running_loop()
        # The older one first.
        self._whole: deque[PolicyWeights] = deque(maxlen=2)
        self._chain = ChangeChain(config.staleness.max_lag + 2)
        api = GrpcApi(NAME, self._add_handler)
        self._server = GrpcServer(api, host=options.host, port=0, token=options.token, tls=config.services.tls)
        self.address, self.is_on_loopback = self._server.address, is_loopback(options.host)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """End, with the calls in flight."""
        self._chain.close()
        await self._server.stop(0.0)

    def forget_older(self) -> None:
        """Keep the newest version alone whole, once nothing is packed from others.

        Raises:
            Exception: As the packing raised it.
        """
        self._make(self._forget_older())

    def add(self, own: PolicyWeights) -> None:
        """Serve this rank's tensors of a new version from now on."""
        self._make(self._take(own))

    def own_weights(self, version: int) -> PolicyWeights:
        """This rank's tensors of one of the last two versions.

        Raises:
            KeyError: It is another one.
        """
        return {own.version: own for own in self._whole}[version]

    def _make(self, change: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(change, self._loop).result()

    async def _forget_older(self) -> None:
        await self._chain.wait_until_packed()
        self._chain.forget_packed()
        while len(self._whole) > 1:
            self._whole.popleft()

    async def _take(self, own: PolicyWeights) -> None:
        if self._whole:
            self._chain.add(own, self._whole[-1])
        self._whole.append(own)

    def _update(self, request: PullRequest) -> Iterable[WholePolicy | ChainedChanges] | None:
        """Updates to a version: none for a generator that has it, changes, or every element; None if it is gone."""
        if request.HasField("base_version"):
            if request.base_version == request.version:
                return ()
            if changes := self._chain.between(request.base_version, request.version):
                return (changes,)
        return next(((WholePolicy(own),) for own in self._whole if own.version == request.version), None)

    def _add_handler(self, server: grpc.aio.Server) -> None:
        # Without a serializer: the frames of changes are written once for all generators.
        pull: Any = grpc.unary_stream_rpc_method_handler(self._pull, PullRequest.FromString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, {"Pull": pull}),))

    async def _pull(self, request: PullRequest, context: Context) -> AsyncIterator[bytes]:
        if (updates := self._update(request)) is None:
            kept = ", ".join(str(own.version) for own in self._whole) or "none"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"version {request.version} is asked, and {kept} is kept")
        for update in updates or ():
            async for frame in update:
                yield frame
