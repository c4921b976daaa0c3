"""Passes requests for the run's page on to its process, a bounded number at a time.

consumes: requests whose callers page_access.py has admitted. produces: the process's answers, as they come.
waits for: a free place among MAX_QUERIES. unblocked by: the end of another request, or WAIT_S.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import structlog
from fastapi import Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.background import BackgroundTask

from gspo.common.network.http_server import Receive, Scope, Send
from gspo.coordinator.page.page_process import PageProcess, PageUnavailableError

MAX_QUERIES, MAX_STREAMS, WAIT_S = 4, 64, 30.0
# A question to a long log; and the silence of a stream, which sends a comment every 15 s.
_ANSWER_S = 120.0
_STREAM = "/api/changes"
_METHODS = ("GET", "HEAD", "POST")
_SENT = ("content-type",)
_PASSED = (
    "content-type", "content-length", "content-security-policy", "x-content-type-options", "referrer-policy",
    "cache-control", "location", "etag", "last-modified", "allow",
)  # fmt: skip
log = structlog.get_logger()


class PagePassage:
    """The app of the page's paths.

    Args:
        process: The page's process.
    """

    def __init__(self, process: PageProcess) -> None:
        self._process = process
        self._queries, self._streams = asyncio.Semaphore(MAX_QUERIES), asyncio.Semaphore(MAX_STREAMS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response = await self._answer(request)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if request.method not in _METHODS:
            return PlainTextResponse("the page takes GET and POST", 405)
        places = self._streams if request.url.path == _STREAM else self._queries
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(WAIT_S):
                    await stack.enter_async_context(places)
                stack.enter_context(self._process.in_use())
                try:
                    return await self._passed_on(request, stack)
                except httpx.ConnectError:
                    if not await self._process.has_ended():
                        raise
                    return await self._passed_on(request, stack)
        except TimeoutError:
            return PlainTextResponse("too many questions to the page at a time; load it again", 503)
        except httpx.InvalidURL as error:
            return PlainTextResponse(f"the address is none: {error}", 400)
        except (PageUnavailableError, httpx.HTTPError) as error:
            log.warning("page_does_not_answer", reason=str(error) or type(error).__name__)
            return PlainTextResponse(str(error) or "the page's process does not answer; load it again", 502)

    async def _passed_on(self, request: Request, stack: AsyncExitStack) -> Response:
        """The process's answer. It takes over the things that the stack closes."""
        transport = httpx.AsyncHTTPTransport(uds=str(await self._process.socket()))
        client = httpx.AsyncClient(transport=transport, timeout=_ANSWER_S, base_url="http://localhost")
        await stack.enter_async_context(client)
        path = request.scope["raw_path"].decode("latin-1")
        query = request.scope["query_string"].decode("latin-1")
        asked = client.build_request(
            request.method,
            f"http://localhost{path}" + (f"?{query}" if query else ""),
            headers={name: request.headers[name] for name in _SENT if name in request.headers},
            content=await request.body(),
        )
        answer = await client.send(asked, stream=True)
        stack.push_async_callback(answer.aclose)
        headers = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
        kept = stack.pop_all()
        return StreamingResponse(
            _parts(answer, kept), answer.status_code, headers, background=BackgroundTask(kept.aclose)
        )


async def _parts(answer: httpx.Response, stack: AsyncExitStack) -> AsyncIterator[bytes]:
    """The body as it comes; a reader that leaves closes the question too."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await stack.aclose()
