"""The checks of every HTTP request before the app: its host, the site that sent it, its type.

A browser sends requests to this machine on behalf of any page that it shows, and a page can give its own name this
machine's address (DNS rebinding). So a request must name a host that is ours, and a page of another origin is refused.
Starlette's TrustedHostMiddleware knows neither IP addresses nor pages. The token is checked in health.py or in the
app, and `BoundedBodies` bounds the bodies.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any

from gspo.common.network.auth_log import note_refusal

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON_TYPE, FORM_TYPE = "application/json", "multipart/form-data"
# Bodies of all requests of one service that are in memory at a time.
MAX_BUFFERED_BYTES = 64 * 2**20
MAX_BRACKETS = 30_000
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_CHANGING = ("POST", "PUT", "PATCH")


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
        max_bytes: Of one body.
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
            refusal = refusal or _too_nested(body)
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


def _too_nested(body: bytearray) -> _Refusal | None:
    """Few bytes can be many lists, and parsing those as JSON would delay every other request."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        return _Refusal(413, "body", f"the body has more than {MAX_BRACKETS} opening brackets")
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


async def reply(send: Send, status: int, body: dict[str, Any], headers: Collection[tuple[bytes, bytes]] = ()) -> None:
    """Answer one request with JSON."""
    text = json.dumps(body).encode()
    standard = [(b"content-type", JSON_TYPE.encode()), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*standard, *headers]})
    await send({"type": "http.response.body", "body": text})
