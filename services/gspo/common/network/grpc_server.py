"""The gRPC server of every service (health, reflection, the shared token, TLS), and channels to other services."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gspo.common.config.services import TlsConfig
from gspo.common.errors import InputError
from gspo.common.network.credentials import pem, reachable_host
from gspo.common.network.grpc_guard import TOKEN_HEADER, GrpcGuard

# A frame of weights is about 1 MiB; a group of long rollouts stays well below this.
MAX_MESSAGE_BYTES = 64 * 2**20
# Initial metadata of a push whose header is admitted: the learner may send the frames.
ADMITTED = ("gspo-admitted", "1")
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
]


class GrpcServer:
    """One server of one service.

    Args:
        add_servicers: Called with the server before it starts.
        service_names: Full names of the services added, for health and reflection.
        token: The token that callers must send; empty if none is required.
        may_call: Whether a caller with another token is served too.
        tls: Plain text if None or not on.

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
        may_call: Callable[[str], bool] | None = None,
        tls: TlsConfig | None = None,
    ) -> None:
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=[GrpcGuard(token, may_call)])
        add_servicers(self._server)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._names = ("", *service_names)
        try:
            bound = self._bind(f"{host}:{port}", tls)
        except RuntimeError as error:
            raise _taken(host, port) from error
        self.address = f"{reachable_host(host)}:{bound}"

    def _bind(self, address: str, tls: TlsConfig | None) -> int:
        if tls is None or not tls.is_on:
            return self._server.add_insecure_port(address)
        pair = (pem(tls.key) or b"", pem(tls.cert) or b"")
        return self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))

    async def start(self) -> None:
        """Serve, and set the health service to SERVING."""
        await self._server.start()
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those in flight `grace_s`, end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _taken(host: str, port: int) -> InputError:
    return InputError(
        "--grpc-port",
        f"{port} cannot be bound on {host}",
        "End what listens there, or give another port; 0 picks a free one",
    )


def open_channel(address: str, tls: TlsConfig | None = None) -> grpc.aio.Channel:
    """A channel to another service; every call on it gives its own timeout and `token_metadata`."""
    if tls is None or not tls.is_on:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    named: list[tuple[str, int | str]] = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pem(tls.ca)), options=_OPTIONS + named)


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a caller; empty without a token."""
    return ((TOKEN_HEADER, f"Bearer {token}"),) if token else ()
