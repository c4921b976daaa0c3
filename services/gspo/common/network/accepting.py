"""Accepts the connections of an HTTP server, and no more than it may have, in all and from one address.

Connections count from the moment in which they are accepted, before TLS or a first byte.
"""

import asyncio
import resource
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from gspo.common.network.auth_log import note_refusal

# Descriptors that a service keeps for itself: Redis, gRPC, files, pipes of its processes.
RESERVED_DESCRIPTORS = 256
# A service raises its soft limit to this, where the system's hard limit allows it.
_WANTED_DESCRIPTORS = 65_536
# Until a connection has its TLS, and while the process has no descriptor left.
_HANDSHAKE_TIMEOUT_S, _NO_DESCRIPTOR_S = 10.0, 0.1
# The connection is reset, so that it leaves nothing to wait for.
_RESET = struct.pack("ii", 1, 0)


def raise_descriptor_limit() -> None:
    """Raise this process's limit on open files, 1,024 on most systems; its child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class ConnectionCounts:
    """The connections of one server.

    Args:
        most: The number of all addresses; fewer where the process may not have as many descriptors. One address may
            have half, so that Prometheus or kubelet come through.
    """

    def __init__(self, most: int) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            most = max(2, min(most, soft - RESERVED_DESCRIPTORS))
        self.most, self.most_of_one = most, most // 2
        self._of_address = Counter[str]()

    def begin(self, address: str) -> str:
        """Count a connection; returns why there may not be another one, which is then not counted.

        Args:
            address: Without its port; empty for a Unix socket, where all have none.
        """
        num, num_of_one = self._of_address.total(), self._of_address[address]
        if num >= self.most or (address and num_of_one >= self.most_of_one):
            return f"there are {num} connections, {num_of_one} of them from this address"
        self._of_address[address] += 1
        return ""

    def end(self, address: str) -> None:
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]


class Acceptor:
    """Accepts on one listening socket, which must not block.

    Args:
        make_protocol: Makes a connection's protocol; it gets a function to call once the connection is lost.
    """

    def __init__(
        self,
        listening: socket.socket,
        counts: ConnectionCounts,
        make_protocol: Callable[[Callable[[], None]], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listening, self._counts, self._make_protocol, self._tls = listening, counts, make_protocol, tls
        self._connecting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept until cancelled; connections that have their protocol then go on."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._listening)
                except OSError as error:  # no descriptor, or the caller was gone again
                    note_refusal("http", "accept", caller=":", target="", detail=str(error))
                    await asyncio.sleep(_NO_DESCRIPTOR_S)
                    continue
                host = address[0] if isinstance(address, tuple) else ""
                if reason := self._counts.begin(host):
                    note_refusal("http", "connections", caller=f"{host}:", target="", detail=reason)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    connection.close()
                    await asyncio.sleep(0)  # the other tasks of this loop go on
                    continue
                task = loop.create_task(self._connect(connection, host))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)
        finally:
            for task in self._connecting:
                task.cancel()

    async def _connect(self, connection: socket.socket, host: str) -> None:
        """Give a connection its protocol, after the handshake of TLS."""
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self._counts.end(host)

        timeout_s = _HANDSHAKE_TIMEOUT_S if self._tls else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(end), connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, TimeoutError, asyncio.CancelledError) as error:  # ssl.SSLError is an OSError
            with suppress(OSError):
                connection.close()
            end()
            if isinstance(error, asyncio.CancelledError):
                raise
