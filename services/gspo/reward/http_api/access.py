"""Access to the REST API: known callers, few enough calls, and the form of a refusal."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from gspo.common.network.auth_log import note_refusal
from gspo.common.network.http_server import ASGIApp, Receive, Scope, Send, caller_of, header
from gspo.reward.registry.records import ConflictError, NotRegisteredError
from gspo.reward.submissions.admission import MAX_PROBLEMS, InputRefusedError, Problem
from gspo.reward.submissions.callers import ANONYMOUS, Caller, Callers, RateLimit

# A source of 256 KiB in which every character is escaped, with its test cases.
MAX_BODY_BYTES = 4 * 2**20
# A body counts as one more call for each: reading it delays other callers as long as a few calls do.
BYTES_OF_A_CALL = 16 * 2**10
NO_TOKEN = "a token is missing or wrong: send it as 'Authorization: Bearer TOKEN'"  # noqa: S105 - a message
# For the description at /docs; `AccessControl` has checked the token before.
BEARER = HTTPBearer(auto_error=False, description="A token of reward.tokens, or the token that the services share")

MAX_PROBLEM_CHARS = 500
_NOT_AN_OBJECT = ("dict_type", "model_type", "model_attributes_type")


class Refusal(BaseModel):
    """Why a call was refused."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "detail": "line 3, column 1: imports 'requests', which is neither in the standard library nor "
                    "among reward.allowed_packages (numpy, sympy). Do without it, or have it added there",
                    "problems": [{"rule": "import", "text": "imports 'requests'", "line": 3, "column": 1}],
                }
            ]
        }
    )
    detail: str
    problems: list[Problem] = []


class AccessControl:
    """The app behind checks of token, role and rate, before a body is read; its page at /docs is open to all."""

    def __init__(self, app: ASGIApp, callers: Callers, calls_per_minute: int) -> None:
        self._app, self._callers, self._rate = app, callers, RateLimit(calls_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/v1/"):
            try:
                scope.setdefault("state", {})["caller"] = self._admit(scope)
            except HTTPException as error:
                if error.status_code == 401:
                    note_refusal("http", "token", caller=caller_of(scope), target=scope["path"], detail=NO_TOKEN)
                await refusal_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        """The caller of a request.

        Raises:
            HTTPException: The token is unknown, its role does not allow the call, or the rate is exceeded.
        """
        scheme, _, token = header(scope, b"authorization").partition(" ")
        caller = self._callers.find(token.strip() if scheme.lower() == "bearer" else "")
        if caller is None:
            raise HTTPException(401, NO_TOKEN, headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return caller
        if caller.role != "submit":
            raise HTTPException(403, f"{caller.name} has a token to read; this call needs one to submit")
        # Without tokens, callers differ by their address alone.
        who = caller_of(scope).rpartition(":")[0] if caller is ANONYMOUS else caller.name
        if wait_s := self._rate.wait_s(who, _kind(scope), cost=1 + _num_bytes(scope) // BYTES_OF_A_CALL):
            detail = f"{caller.name} has made more calls of this kind than reward.calls_per_minute; wait {wait_s:.1f} s"
            raise HTTPException(429, detail, headers={"Retry-After": str(int(wait_s) + 1)})
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

    async def refuse(_: Request, error: Exception) -> Response:
        return refusal_response(error)

    for kind in (HTTPException, NotRegisteredError, ConflictError, RequestValidationError, InputRefusedError):
        app.add_exception_handler(kind, refuse)


def refusal_response(error: Exception) -> Response:
    """The response to a request that such an error refuses."""
    status, detail, problems, headers = 422, str(error), list[Problem](), None
    match error:
        case HTTPException():
            status, detail, headers = error.status_code, str(error.detail), error.headers
        case NotRegisteredError():
            status = 404
        case ConflictError():
            status = 409
        case RequestValidationError():
            problems = problems_of(error.errors())
        case InputRefusedError():
            problems = error.problems
    refusal = Refusal(detail=problems[0].text if problems else detail, problems=problems)
    return JSONResponse(refusal.model_dump(), status, headers)


def problems_of(errors: Sequence[Any]) -> list[Problem]:
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
        problems.append(Problem("field", cut(text), field=field))
    return problems


def cut(text: str) -> str:
    """The beginning of a text, without half surrogate pairs, which UTF-8 cannot carry."""
    short = text if len(text) <= MAX_PROBLEM_CHARS else f"{text[:MAX_PROBLEM_CHARS]}..."
    return short.encode(errors="replace").decode()
