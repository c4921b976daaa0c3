"""Access to the REST API: known callers, few enough calls, and the form of a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from gspo.common.network.auth_log import note_refusal
from gspo.common.network.http_server import ASGIApp, Receive, Scope, Send, caller_of, header
from gspo.reward.http_api.views import ProblemView, Refusal
from gspo.reward.registry.records import ConflictError, NotRegisteredError
from gspo.reward.submissions.callers import ANONYMOUS, Caller, Callers, RateLimit
from gspo.reward.submissions.source_check import MAX_PROBLEMS, SubmissionRefusedError

# A source of 256 KiB in which every character is escaped, with its test cases.
MAX_BODY_BYTES = 4 * 2**20
# A body counts as one more call for each: reading it delays other callers as long as a few calls do.
BYTES_OF_A_CALL = 16 * 2**10
NO_TOKEN = "a token is missing or wrong: send it as 'Authorization: Bearer TOKEN'"  # noqa: S105 - a message
# For the description at /docs; `AccessControl` has checked the token before.
BEARER = HTTPBearer(auto_error=False, description="A token of reward.tokens, or the token that the services share")

MAX_PROBLEM_CHARS = 500
_NOT_AN_OBJECT = ("dict_type", "model_type", "model_attributes_type")


class RestRefusalError(Exception):
    """A request that is refused, with its status and problems."""

    def __init__(
        self, status: int, detail: str, problems: Sequence[ProblemView] = (), headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.refusal, self.headers = status, Refusal(detail=detail, problems=list(problems)), headers


class AccessControl:
    """Checks token, role and rate of a call before its body is read.

    Attributes:
        callers: The known callers, also of gRPC.
    """

    def __init__(self, callers: Callers, rate: RateLimit) -> None:
        self.callers, self._rate = callers, rate

    def before(self, app: ASGIApp) -> ASGIApp:
        """The app behind the checks; its page at /docs is open to all."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if not scope["path"].startswith("/v1/"):
                await app(scope, receive, send)
                return
            try:
                caller = self._admit(scope)
            except RestRefusalError as error:
                if error.status == 401:
                    note_refusal("http", "token", caller=caller_of(scope), target=scope["path"], detail=NO_TOKEN)
                await refusal_response(error.status, error.refusal, error.headers)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
            await app(scope, receive, send)

        return guarded

    def _admit(self, scope: Scope) -> Caller:
        """The caller of a request.

        Raises:
            RestRefusalError: The token is unknown, its role does not allow the call, or the rate is exceeded.
        """
        scheme, _, token = header(scope, b"authorization").partition(" ")
        caller = self.callers.find(token.strip() if scheme.lower() == "bearer" else "")
        if caller is None:
            raise RestRefusalError(401, NO_TOKEN, headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return caller
        if caller.role != "submit":
            raise RestRefusalError(403, f"{caller.name} has a token to read; this call needs one to submit")
        # Without tokens, callers differ by their address alone.
        who = caller_of(scope).rpartition(":")[0] if caller is ANONYMOUS else caller.name
        if wait_s := self._rate.wait_s(who, _kind(scope), cost=1 + _num_bytes(scope) // BYTES_OF_A_CALL):
            detail = f"{caller.name} has made more calls of this kind than reward.calls_per_minute; wait {wait_s:.1f} s"
            raise RestRefusalError(429, detail, headers={"Retry-After": str(int(wait_s) + 1)})
        return caller


def _num_bytes(scope: Scope) -> int:
    """Size of the body, by its header; the largest allowed if it has none."""
    length = header(scope, b"content-length")
    if length.isdecimal():
        return int(length)
    return MAX_BODY_BYTES if header(scope, b"transfer-encoding") else 0


def _kind(scope: Scope) -> str:
    """The kind of change, each with a rate of its own: many quick trials must not keep a caller from submitting."""
    if scope["method"] != "POST":
        return "remove"
    last = scope["path"].rstrip("/").rpartition("/")[2]
    return last if last in ("try", "activate") else "submit"


def add_error_answers(app: FastAPI) -> None:
    """Give every refusal the form of a `Refusal`."""

    @app.exception_handler(RestRefusalError)
    async def refused(_: Request, error: RestRefusalError) -> Response:
        return refusal_response(error.status, error.refusal, error.headers)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return refusal_response(error.status_code, Refusal(detail=str(error.detail)), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return refusal_response(422, refusal_of(error.errors()))

    @app.exception_handler(NotRegisteredError)
    async def missing(_: Request, error: NotRegisteredError) -> Response:
        return refusal_response(404, Refusal(detail=str(error)))

    @app.exception_handler(ConflictError)
    async def conflict(_: Request, error: ConflictError) -> Response:
        return refusal_response(409, Refusal(detail=str(error)))

    @app.exception_handler(SubmissionRefusedError)
    async def not_taken(_: Request, error: SubmissionRefusedError) -> Response:
        problems = [ProblemView(**vars(problem)) for problem in error.problems]
        return refusal_response(422, Refusal(detail=problems[0].text, problems=problems))


def refusal_of(errors: Sequence[Any]) -> Refusal:
    """The problems that pydantic reports in a request: the first MAX_PROBLEMS, each cut to MAX_PROBLEM_CHARS."""
    problems = []
    for error in errors[:MAX_PROBLEMS]:
        field = cut(".".join(str(part) for part in error["loc"] if part not in ("body", "path", "query"))) or None
        if error["type"] == "json_invalid":  # its place is a character's
            at = [f"at character {part}" for part in error["loc"] if isinstance(part, int)]
            why = error.get("ctx", {}).get("error", error["msg"])
            text, field = ", ".join([f"the body is not JSON: {why}", *at]), None
        elif error["type"] == "extra_forbidden":
            text = f"{field}: this call has no such field; /docs lists them"
        elif error["type"] in _NOT_AN_OBJECT and field is None:
            text = "the body: is not a JSON object; send one, with content-type: application/json"
        else:
            text = f"{field or 'the body'}: {error['msg']}"
        problems.append(ProblemView(rule="field", text=cut(text), field=field))
    return Refusal(detail=problems[0].text, problems=problems)


def cut(text: str) -> str:
    """The beginning of a text, without half surrogate pairs, which UTF-8 cannot carry."""
    short = text if len(text) <= MAX_PROBLEM_CHARS else f"{text[:MAX_PROBLEM_CHARS]}..."
    return short.encode(errors="replace").decode()


def refusal_response(status: int, refusal: Refusal, headers: dict[str, str] | None = None) -> Response:
    """A refusal as an HTTP response."""
    return JSONResponse(refusal.model_dump(), status_code=status, headers=headers or None)
