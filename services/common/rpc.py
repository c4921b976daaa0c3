"""gRPC as every service uses it: a server with health, reflection and the shared token, and channels to others.

Neighbours: the generated contract in gspo_proto, and the doors that add their servicers.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.errors import InputError
from services.common.runtime import reachable_host

# A frame of weights is about 1 MiB; a group of long rollouts stays well below this.
MAX_MESSAGE_BYTES = 64 * 2**20
TOKEN_HEADER = "authorization"  # noqa: S105 - the name of a header
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
]


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the shared token; health stays open for probes."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}"

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler[Any, Any]:
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_HEADER, "")
        open_to_all = handler_call_details.method.startswith("/grpc.health.v1.Health/")
        handler: grpc.RpcMethodHandler[Any, Any] = await continuation(handler_call_details)
        if open_to_all or hmac.compare_digest(str(given), self._expected):
            return handler
        return _refusal(handler)


def _refusal(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind that answers UNAUTHENTICATED: the kinds differ in how they are called."""
    why = "the shared token is missing or wrong: send it as 'authorization: Bearer TOKEN'"

    async def one(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(one)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(one)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(one)
    return grpc.unary_unary_rpc_method_handler(one)


class GrpcServer:
    """One server of one service.

    Args:
        add_servicers: Called with the server before it starts.
        service_names: Full names of the services added, for health and reflection.

    Raises:
        InputError: The address cannot be bound.
    """

    def __init__(
        self,
        add_servicers: Callable[[grpc.aio.Server], None],
        service_names: tuple[str, ...],
        *,
        host: str,
        port: int,
        token: str,
    ) -> None:
        interceptors = [_TokenCheck(token)] if token else []
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=interceptors)
        add_servicers(self._server)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._names = ("", *service_names)
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise _taken(host, port) from error
        self.address = f"{reachable_host(host)}:{bound}"

    async def start(self) -> None:
        """Serve, and say so on the health service."""
        await self._server.start()
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those under way `grace_s`, end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _taken(host: str, port: int) -> InputError:
    return InputError(
        "--grpc-port",
        f"{port} cannot be bound on {host}",
        "End what listens there, or give another port; 0 picks a free one",
    )


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to another service; every call on it gives its own timeout and `token_metadata`."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a caller shows; nothing where there is no token."""
    return ((TOKEN_HEADER, f"Bearer {token}"),) if token else ()
