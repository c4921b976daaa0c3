"""Access at the coordinator's address: programs with the token may do everything, a reader's browser sees the page.

A browser cannot send the token, so a program with the token asks for a link. The link works once and for LINK_S; it
leaves a cookie that only this process knows. Without a token, on loopback, the page is as open as the API.
"""

import hashlib
import hmac
import html
import secrets
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from gspo.common.network.auth_log import note_refusal
from gspo.common.network.caller_key import WRONG_KEY, caller_key, is_token, refuse_key
from gspo.common.network.http_server import ASGIApp, Receive, Scope, Send, caller_of, header, reply

LINK_PATH, ENTRY_PATH = "/v1/page/link", "/page"
# Everything else is the page's.
API_PREFIXES = ("/v1/", "/docs", "/redoc", "/openapi.json", "/static-offline-docs/")
LINK_S, COOKIE_S = 600.0, 12 * 3600.0
MAX_LINKS, MAX_READERS = 64, 64
_SECRET_BYTES = 32
_HOW = "`gspo status RUN_DIR` prints a new one."
_PAGE_HEADERS = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"default-src 'none'; base-uri 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class Secrets:
    """Random values that expire; only their digests are kept.

    Args:
        lifetime_s: Seconds that each is valid.
        max_count: The oldest goes when there are more.
    """

    def __init__(self, lifetime_s: float, max_count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime_s, self._max_count, self._clock = lifetime_s, max_count, clock
        self._ends: dict[bytes, float] = {}

    def make(self) -> str:
        value = secrets.token_urlsafe(_SECRET_BYTES)
        while len(self._ends) >= self._max_count:
            del self._ends[next(iter(self._ends))]
        self._ends[_digest(value)] = self._clock() + self._lifetime_s
        return value

    def has(self, value: str) -> bool:
        """Whether the value was made here and has not expired. Every value is compared in constant time."""
        return self._find(value) is not None

    def take(self, value: str) -> bool:
        """As `has`, for one time."""
        digest = self._find(value)
        if digest is not None:
            del self._ends[digest]
        return digest is not None

    def _find(self, value: str) -> bytes | None:
        now, asked, match = self._clock(), _digest(value), None
        self._ends = {digest: end for digest, end in self._ends.items() if end > now}
        for digest in self._ends:
            if hmac.compare_digest(digest, asked):
                match = digest
        return match


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode(errors="replace")).digest()


class PageAccess:
    """Admits callers to the API and to the page.

    Args:
        api: The run's HTTP API, without a check of its own.
        page: The page, without a check of its own.
        token: Empty where the run has none.
        is_tls: Whether the server has a certificate.
        clock: For tests.
    """

    def __init__(
        self, api: ASGIApp, page: ASGIApp, token: str, *, is_tls: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._page, self._token, self._is_tls = api, page, token, is_tls
        self._links, self._readers = Secrets(LINK_S, MAX_LINKS, clock), Secrets(COOKIE_S, MAX_READERS, clock)
        # Cookies are shared by all ports of a host: another run's page there has a cookie of its own.
        self._cookie = ("__Host-" if is_tls else "") + f"gspo-page-{secrets.token_hex(4)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, has_token = scope["path"], is_token(caller_key(scope), self._token)
        if path == ENTRY_PATH:
            await self._enter(scope, send)
        elif path.startswith(API_PREFIXES):
            if not has_token:
                await refuse_key(scope, send, WRONG_KEY)
            elif path == LINK_PATH and scope["method"] == "POST":
                await self._make_link(send)
            else:
                await self._api(scope, receive, send)
        elif has_token or self._readers.has(self._cookie_of(scope)):
            await self._page(scope, receive, send)
        else:
            why = "a browser needs a link that lets it in once"
            note_refusal("http", "page", caller=caller_of(scope), target=path[:200], detail=why)
            await _say(send, 401, f"This page needs a link that lets a browser in once. {_HOW}")

    async def _make_link(self, send: Send) -> None:
        """A path that opens the page once; without a token the page itself."""
        path = f"{ENTRY_PATH}?key={self._links.make()}" if self._token else "/"
        await reply(send, 201, {"path": path, "expires_s": LINK_S if self._token else None})

    async def _enter(self, scope: Scope, send: Send) -> None:
        """Exchange a link for a cookie."""
        if scope["method"] != "GET" or header(scope, b"sec-purpose") or header(scope, b"purpose"):
            await _say(send, 405, "Open this link in a browser.")  # a preview must not use it up
            return
        keys = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=4).get("key", [])
        if self._token and not (keys and self._links.take(keys[0])):
            note_refusal(
                "http", "page_link", caller=caller_of(scope), target=ENTRY_PATH, detail="used, expired or wrong"
            )
            await _say(send, 401, f"This link was used, or has expired. {_HOW}")
            return
        cookie = f"{self._cookie}={self._readers.make()}; Path=/; Max-Age={COOKIE_S:.0f}; HttpOnly; SameSite=Strict"
        cookie += "; Secure" if self._is_tls else ""
        # No redirect: a browser that comes from elsewhere sends a strict cookie only with the page's own requests.
        refresh = (b"refresh", b"0; url=/")
        await _say(send, 200, "The page opens.", (b"set-cookie", cookie.encode()), refresh)

    def _cookie_of(self, scope: Scope) -> str:
        try:
            cookies = SimpleCookie(header(scope, b"cookie"))
        except CookieError:
            return ""
        return cookies[self._cookie].value if self._cookie in cookies else ""


async def _say(send: Send, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
    """A page of one sentence."""
    body = f'<!doctype html><html lang="en"><title>gspo</title><p>{html.escape(text)}</p></html>'.encode()
    await send({"type": "http.response.start", "status": status, "headers": [*_PAGE_HEADERS, *headers]})
    await send({"type": "http.response.body", "body": body})
