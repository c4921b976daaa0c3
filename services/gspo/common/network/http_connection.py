"""One HTTP connection: uvicorn's, which would wait for its caller for ever and stand beside any number of others.

Neighbour: http_server.py uses it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gspo.common.network.auth_log import note_refusal

# From the first byte of a request to the last of its body; and for a caller to go on reading an answer.
REQUEST_TIMEOUT_S = 30.0
# One address may not take all connections: Prometheus and kubelet come from others.
MAX_CONNECTIONS, MAX_CONNECTIONS_OF_ONE = 512, 256


class HttpConnection(H11Protocol):
    """By h11: uvicorn's other protocol, httptools, keeps headers without end."""

    timeout_s = REQUEST_TIMEOUT_S
    _request: asyncio.TimerHandle | None = None
    _answer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, unless there are too many."""
        super().connection_made(transport)
        num_of_one = sum(_address(self) == _address(other) for other in self.connections)
        if len(self.connections) > MAX_CONNECTIONS or num_of_one > MAX_CONNECTIONS_OF_ONE:
            num = len(self.connections)
            self._end("connections", f"there are {num} connections, {num_of_one} of them from this address")
        else:
            self._watch_request()

    def handle_events(self) -> None:
        """Read what has come, also behind a request that was just answered, and see whether the request is whole."""
        super().handle_events()
        self._watch_request()

    def _watch_request(self) -> None:
        """Count the time from a request's first byte until it is whole."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            _forget(self._request)
            self._request = None
        elif self._request is None:
            self._request = self._later("a request was not whole")

    def pause_writing(self) -> None:
        """The caller does not read: not for ever."""
        super().pause_writing()
        self._answer = self._answer or self._later("an answer was left unread")

    def resume_writing(self) -> None:
        """The caller reads."""
        _forget(self._answer)
        self._answer = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even where the caller leaves the end of an answer unread."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        _forget(self._request)
        _forget(self._answer)
        super().connection_lost(exc)

    def _later(self, what: str) -> asyncio.TimerHandle:
        return self.loop.call_later(self.timeout_s, self._end, "slow", f"{what} after {self.timeout_s:g} s")

    def _end(self, reason: str, detail: str) -> None:
        note_refusal("http", reason, caller=f"{_address(self)}:", asked="", detail=detail)
        self.transport.abort()


def _address(connection: Any) -> str:
    """Of the other end, without its port."""
    return connection.client[0] if connection.client else ""


def _forget(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
