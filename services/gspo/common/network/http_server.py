"""The HTTP server of every service: the checks of each request, and bounds on bodies, headers, time and connections.

A browser sends requests to this machine on behalf of any page that it shows, and a page can give its own name this
machine's address (DNS rebinding). So a request must name a host that is ours, and a page of another origin is refused.
Starlette's TrustedHostMiddleware knows neither IP addresses nor pages. The token is checked in health.py or in the app.
"""

import asyncio
import contextlib
import ipaddress
import json
import re
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gspo.common.config.schema import ServicesConfig, TlsConfig
from gspo.common.errors import InputError
from gspo.common.network.accepting import Acceptor, ConnectionCounts
from gspo.common.network.auth_log import note_refusal
from gspo.common.network.credentials import reachable_host
from gspo.common.plain_json import TOO_MANY_MEMBERS, has_many_members

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON_TYPE, FORM_TYPE = "application/json", "multipart/form-data"
# Bodies of all requests of one service that are in memory at a time.
MAX_BUFFERED_BYTES = 64 * 2**20
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_CHANGING = ("POST", "PUT", "PATCH")
# All headers of a request together; a connection that sends more is answered with 400 and closed.
MAX_HEADER_BYTES = 64 * 2**10
MAX_URL_BYTES = 16 * 2**10
# From the first byte of a request to the last of its body; and for a caller to go on reading an answer.
REQUEST_TIMEOUT_S = 30.0
# Of a server that has no configuration.
MAX_CONNECTIONS = 512


@dataclass(frozen=True)
class _Refusal:
    status: int
    reason: str
    detail: str


class HttpGuard:
    """Refuses requests for another host, from another site's page, and changes that are not JSON.

    Args:
        hosts: Names that the service may be called by besides localhost and this machine's own; `*.example.org`
            stands for every name below it. IP addresses are always accepted: no name server can redirect them.
        takes_forms: Whether a change may come as a multipart form, too.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = (), *, takes_forms: bool = False) -> None:
        self._app = app
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in hosts)}
        self._types = (JSON_TYPE, FORM_TYPE) if takes_forms else (JSON_TYPE,)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        note_refusal("http", refusal.reason, caller=caller_of(scope), target=scope["path"][:200], detail=refusal.detail)
        await reply(send, refusal.status, {"detail": refusal.detail, "problems": []})

    def _refusal(self, scope: Scope) -> _Refusal | None:
        if (num_bytes := len(scope.get("raw_path") or b"") + len(scope["query_string"])) > MAX_URL_BYTES:
            return _Refusal(414, "url", f"the path and query have {num_bytes} bytes, and at most {MAX_URL_BYTES}")
        host = header(scope, b"host")
        if host and not self._is_ours(host):
            detail = f"this service is not called {host[:100]!r}. Call it by an IP address, or add that name to "
            return _Refusal(421, "host", f"{detail}services.http_hosts in the configuration")
        if _is_cross_site(scope, host):
            return _Refusal(403, "cross_site", "a page of another site may not call this service")
        if header(scope, b"upgrade").lower() == "websocket":
            return _Refusal(400, "websocket", "this service has no websocket; send a plain request")
        kind = header(scope, b"content-type").partition(";")[0].strip().lower()
        if scope["method"] in _CHANGING and kind not in self._types:
            types = " or ".join(self._types)
            return _Refusal(415, "content_type", f"send content-type: {types}; this is {kind[:100] or 'none'}")
        return None

    def _is_ours(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]").lower().removesuffix(".")
        parents = (f"*.{name[at + 1 :]}" for at, char in enumerate(name) if char == ".")
        return name in self._names or _is_address(name) or any(parent in self._names for parent in parents)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_cross_site(scope: Scope, host: str) -> bool:
    """Whether a browser sends this for a page of another origin; following a link from there is allowed."""
    site, origin = header(scope, b"sec-fetch-site"), header(scope, b"origin").lower()
    follows_link = (
        scope["method"] in ("GET", "HEAD")
        and header(scope, b"sec-fetch-mode") == "navigate"
        and header(scope, b"sec-fetch-dest") == "document"
    )
    if site not in ("", "same-origin", "none") and not follows_link:
        return True
    return bool(origin) and origin not in (f"http://{host}".lower(), f"https://{host}".lower())


class BoundedBodies:
    """Reads each body before the app sees the request. Refuses one that is too large, and too many at a time.

    Args:
        max_bytes: The most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes, self._buffered_bytes = app, max_bytes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length, body = header(scope, b"content-length"), bytearray()
        refusal = self._refusal(int(length) if length.isdecimal() else 0)
        try:
            while refusal is None:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message.get("body", b"")
                self._buffered_bytes += len(message.get("body", b""))
                refusal = self._refusal(len(body))
                if not message.get("more_body", False):
                    break
            if refusal is None and has_many_members(body):
                refusal = _Refusal(413, "body", f"the body has {TOO_MANY_MEMBERS}")
            if refusal is not None:
                await reply(send, refusal.status, {"detail": refusal.detail, "problems": []})
                return
            await self._app(scope, _replay(bytes(body), receive), send)
        finally:
            self._buffered_bytes -= len(body)

    def _refusal(self, num_bytes: int) -> _Refusal | None:
        if num_bytes > self._max_bytes:
            return _Refusal(413, "body", f"the body has more than {self._max_bytes} bytes")
        if self._buffered_bytes > MAX_BUFFERED_BYTES:
            return _Refusal(503, "bodies", "too many large requests at a time; come back in a moment")
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def next_message() -> Message:
        return next(messages, None) or await receive()

    return next_message


def header(scope: Scope, name: bytes) -> str:
    """The first header of a name in lower case; empty if there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def caller_of(scope: Scope) -> str:
    """Address and port of the caller."""
    host, port = scope.get("client") or ("unknown", 0)
    return f"{host}:{port}"


async def reply(send: Send, status: int, body: dict[str, Any]) -> None:
    """Answer one request with JSON."""
    text = json.dumps(body).encode()
    headers = [(b"content-type", JSON_TYPE.encode()), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


class HttpServer:
    """Serves an app on a socket that is bound at once, so that its port is known.

    Args:
        host: The path of a Unix socket, which must not exist, serves there and on no port.
        services: The service's host names and certificate; neither where it is None.
        takes_forms: Whether a change may come as a multipart form instead of JSON.
        request_timeout_s: Longest time for a request to arrive, and for a caller to leave an answer unread.

    Raises:
        InputError: The address cannot be bound.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        services: ServicesConfig | None = None,
        *,
        takes_forms: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._socket = _bound(host, port)
        is_path = self._socket.family == socket.AF_UNIX
        self.address = host if is_path else f"{reachable_host(host)}:{self._socket.getsockname()[1]}"
        tls = services.tls if services else TlsConfig()
        names = [host, *(services.http_hosts if services else ()), *filter(None, (tls.server_name,))]
        settings = uvicorn.Config(
            HttpGuard(app, names, takes_forms=takes_forms),
            http=type("Connection", (HttpConnection,), {"timeout_s": request_timeout_s}),
            # A request for a websocket is then an ordinary request, which the guard refuses.
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            # Each message that is not HTTP would be a warning.
            log_level="error",
            access_log=False,
            lifespan="off",
        )
        if tls.cert is not None:
            settings.ssl_certfile, settings.ssl_keyfile = tls.cert, tls.key
        counts = ConnectionCounts(services.http_connections if services else MAX_CONNECTIONS)
        self._server = _QuietServer(settings, self._socket, counts)

    async def run(self) -> None:
        """Serve until cancelled; the address is free then."""
        try:
            await self._server.serve(sockets=[])
        finally:
            self.close()

    def close(self) -> None:
        """Free the address."""
        self._server.stop_accepting()
        self._socket.close()


def _bound(host: str, port: int) -> socket.socket:
    try:
        if host.startswith("/"):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(host)
            listener.listen(128)
        else:
            listener = socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise InputError(
            "--http-port",
            f"{port} cannot be bound on {host} ({error.strerror})",
            "End what listens there, or give another port; 0 picks a free one",
        ) from error
    listener.setblocking(False)
    return listener


class _QuietServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to service/app.py and the accepting to accepting.py."""

    def __init__(self, settings: uvicorn.Config, listening: socket.socket, counts: ConnectionCounts) -> None:
        super().__init__(settings)
        self._listening, self._counts = listening, counts
        self._accepting: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections from now on."""
        await super().startup(sockets)
        acceptor = Acceptor(self._listening, self._counts, self._connection, self.config.ssl)
        self._accepting = asyncio.create_task(acceptor.run())

    def _connection(self, on_lost: Callable[[], None]) -> asyncio.Protocol:
        connection: HttpConnection = self.config.http_protocol_class(  # type: ignore[assignment, call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        connection.on_lost = on_lost
        return connection

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and end the open connections."""
        self.stop_accepting()
        await super().shutdown(sockets)

    def stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()


class HttpConnection(H11Protocol):
    """One connection with a deadline for its caller.

    uvicorn alone would wait for a caller for ever. By h11: uvicorn's other protocol, httptools, keeps headers without
    end.
    """

    timeout_s = REQUEST_TIMEOUT_S
    on_lost: Callable[[], None] | None = None
    _request: asyncio.TimerHandle | None = None
    _answer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the time of its first request."""
        super().connection_made(transport)
        self._watch_request()

    def handle_events(self) -> None:
        """Read the bytes that have arrived, and see whether the request is whole."""
        super().handle_events()
        self._watch_request()

    def _watch_request(self) -> None:
        """Count the time from a request's first byte until it is whole."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            _cancel(self._request)
            self._request = None
        elif self._request is None:
            self._request = self._later("a request was not whole")

    def pause_writing(self) -> None:
        """The caller has stopped reading: give it a deadline."""
        super().pause_writing()
        self._answer = self._answer or self._later("an answer was left unread")

    def resume_writing(self) -> None:
        """The caller reads again."""
        _cancel(self._answer)
        self._answer = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also where the end of an answer is still unread."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        _cancel(self._request)
        _cancel(self._answer)
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)

    def _later(self, what: str) -> asyncio.TimerHandle:
        return self.loop.call_later(self.timeout_s, self._end, "slow", f"{what} after {self.timeout_s:g} s")

    def _end(self, reason: str, detail: str) -> None:
        note_refusal("http", reason, caller=f"{self.client[0] if self.client else ''}:", target="", detail=detail)
        self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
