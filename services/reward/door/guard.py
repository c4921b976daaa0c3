"""Who may call, how much and how often: bodies are bounded before they are read, callers known before they are heard.

Neighbours: services/reward/callers.py finds the caller; app.py puts this in front of the routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from services.reward.callers import Caller, Callers, RateLimit
from services.reward.door.views import ProblemView, Refusal
from services.reward.registered import ConflictError, NotRegisteredError
from services.reward.source_check import RefusedError

# A source of 256 KiB in which every character is escaped, with its test cases.
MAX_BODY_BYTES = 4 * 2**20
NO_TOKEN = "a token is missing or wrong: send it as 'Authorization: Bearer TOKEN'"  # noqa: S105 - a message
_BEARER = HTTPBearer(auto_error=False, description="A token of reward.tokens, or the one that the services share")

_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class RefuseError(Exception):
    """An answer other than what was asked for."""

    def __init__(
        self, status: int, detail: str, problems: Sequence[ProblemView] = (), headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.refusal, self.headers = status, Refusal(detail=detail, problems=list(problems)), headers


class Guard:
    """Dependencies of the routes: each gives the caller, or refuses.

    Attributes:
        callers: Who may call; gRPC asks there too.
    """

    def __init__(self, callers: Callers, rate: RateLimit) -> None:
        self.callers, self._rate = callers, rate

    def may_read(
        self, request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)] = None
    ) -> Caller:
        """Whoever has a token."""
        caller = self.callers.find(given.credentials if given else "")
        if caller is None:
            raise RefuseError(401, NO_TOKEN, headers={"WWW-Authenticate": "Bearer"})
        request.state.caller = caller
        return caller

    def may_submit(
        self, request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)] = None
    ) -> Caller:
        """Whoever has a token for changes, and has not made too many."""
        caller = self.may_read(request, given)
        if caller.role != "submit":
            raise RefuseError(403, f"{caller.name} has a token to read; this call needs one to submit")
        if wait_s := self._rate.wait_s(caller.name):
            detail = f"{caller.name} has made more calls than reward.calls_per_minute; wait {wait_s:.1f} s"
            raise RefuseError(429, detail, headers={"Retry-After": str(int(wait_s) + 1)})
        return caller


def add_error_answers(app: FastAPI) -> None:
    """Every refusal is a `Refusal`, whoever found it."""

    @app.exception_handler(RefuseError)
    async def refused(_: Request, error: RefuseError) -> Response:
        return _answer(error.status, error.refusal, error.headers)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return _answer(error.status_code, Refusal(detail=str(error.detail)), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _answer(422, refusal_of(error.errors()))

    @app.exception_handler(NotRegisteredError)
    async def missing(_: Request, error: NotRegisteredError) -> Response:
        return _answer(404, Refusal(detail=str(error)))

    @app.exception_handler(ConflictError)
    async def conflict(_: Request, error: ConflictError) -> Response:
        return _answer(409, Refusal(detail=str(error)))

    @app.exception_handler(RefusedError)
    async def not_taken(_: Request, error: RefusedError) -> Response:
        problems = [ProblemView(**vars(problem)) for problem in error.problems]
        return _answer(422, Refusal(detail=problems[0].text, problems=problems))


def refusal_of(errors: Sequence[Any]) -> Refusal:
    """What pydantic found in a request."""
    problems = []
    for error in errors:
        field = ".".join(str(part) for part in error["loc"] if part not in ("body", "path", "query")) or None
        if error["type"] == "json_invalid":  # its place is a character's
            at = [f"at character {part}" for part in error["loc"] if isinstance(part, int)]
            why = error.get("ctx", {}).get("error", error["msg"])
            text, field = ", ".join([f"the body is not JSON: {why}", *at]), None
        elif error["type"] == "extra_forbidden":
            text = f"{field}: is no field of this call; /docs lists them"
        elif error["type"] in _NO_OBJECT and field is None:
            text = "the body: is no JSON object; send one, with content-type: application/json"
        else:
            text = f"{field or 'the body'}: {error['msg']}"
        problems.append(ProblemView(rule="field", text=_plain(text), field=field))
    return Refusal(detail=problems[0].text, problems=problems)


def _plain(text: str) -> str:
    """Without half surrogate pairs, which UTF-8 cannot carry."""
    return text.encode(errors="replace").decode()


def _answer(status: int, refusal: Refusal, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(refusal.model_dump(), status_code=status, headers=headers or None)


class BoundedBodies:
    """Reads each body before the app sees the request, and refuses one of more than MAX_BODY_BYTES."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                refusal = Refusal(detail=f"the body has more than {MAX_BODY_BYTES} bytes")
                await _answer(413, refusal)(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        messages = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def replay() -> Message:
            return next(messages, None) or await receive()

        await self._app(scope, replay, send)
