"""HTTP clients of servers that are not ours: their answers are read as they come, up to a bound, and leave no cookie.

A cookie would reach the server again with the requests of every other rollout.
"""

from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx


class AnswerTooLargeError(Exception):
    """The body of an answer has more bytes than its reader takes; the message completes the address."""


def outer_headers(headers: dict[str, str]) -> dict[str, str]:
    """Headers of every request: no answer is to be encoded, since it could unpack to more than the bound."""
    return {**headers, "accept-encoding": "identity"}


def no_cookies() -> CookieJar:
    """A jar that takes none."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))


def outer_client(headers: dict[str, str], timeout: httpx.Timeout, **keys: Any) -> httpx.AsyncClient:
    """A client for `bounded_answer`; `keys` are further ones of httpx.AsyncClient."""
    return httpx.AsyncClient(headers=outer_headers(headers), timeout=timeout, cookies=no_cookies(), **keys)


async def bounded_answer(
    client: httpx.AsyncClient, method: str, url: str, most_bytes: int, **keys: Any
) -> tuple[httpx.Response, bytes]:
    """An answer and its body, as it was sent.

    Args:
        keys: Further ones of httpx.AsyncClient.stream.

    Raises:
        AnswerTooLargeError: The body is longer.
        httpx.TransportError, httpx.InvalidURL: There is none.
    """
    received = bytearray()
    async with client.stream(method, url, **keys) as answer:
        async for part in answer.aiter_raw():
            received += part
            if len(received) > most_bytes:
                raise AnswerTooLargeError(f"answered with more than {most_bytes} bytes")
    return answer, bytes(received)
