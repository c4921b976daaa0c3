"""`POST /api/view`: a script points a reader at a view, which every open tab then shows, with a way back.

The server knows the readers' tabs by their streams: each browser has one of server-sent events.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_type_hints
from urllib.parse import quote, unquote, urlencode, urlsplit

import httpx
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.routing import Match, Route

# Streams at a time. A browser opens one for all of its tabs where it can.
MAX_STREAMS = 64
_WAITING_VIEWS = 16
# Name of a view -> its path; further parameters go behind `?`.
VIEWS = {
    "run": "/",
    "rollouts": "/rollouts",
    "group": "/steps/{step}/groups/{group}",
    "rollout": "/steps/{step}/groups/{group}/{number}",
    "functions": "/functions",
    "function": "/functions/{version}",
    "difference": "/functions/{version}/against/{other}",
    "compare": "/compare",
}
_MAX_PATH_CHARS, _MAX_NOTE_CHARS = 2000, 300


class ViewBody(BaseModel):
    """The view to open: a path, or a name of VIEWS with parameters."""

    model_config = ConfigDict(extra="forbid")
    path: str | None = Field(None, max_length=_MAX_PATH_CHARS)
    view: str | None = None
    parameters: dict[str, str | int | float] = Field(default_factory=dict, max_length=32)
    note: str = Field("", max_length=_MAX_NOTE_CHARS, description="Shown to the reader above the view")
    run: str | None = Field(None, description="Refuse if the page is of another run")


class _ViewRefusedError(Exception):
    """The message says why; `status` is that of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class OpenTabs:
    """Hands each opened view to every stream; of one event loop."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[str]] = set()

    @property
    def num_streams(self) -> int:
        """Browsers that listen."""
        return len(self._queues)

    @contextmanager
    def listening(self) -> Iterator[asyncio.Queue[str]]:
        """A queue of the views that are opened during the block, as JSON."""
        queue: asyncio.Queue[str] = asyncio.Queue(_WAITING_VIEWS)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def open(self, view_json: str) -> int:
        """Send a view to every stream; the number of them that took it."""
        num_taken = 0
        for queue in self._queues:
            if not queue.full():
                queue.put_nowait(view_json)
                num_taken += 1
        return num_taken


class Opening:
    """Opens views of a page in its readers' tabs.

    Args:
        app: The page.
    """

    def __init__(self, app: FastAPI, tabs: OpenTabs, run_name: str) -> None:
        self._app, self._tabs, self._run_name = app, tabs, run_name
        app.post("/api/view")(self.open_view)

    async def open_view(self, body: ViewBody) -> JSONResponse:
        """Show a view, or say why not."""
        try:
            if body.run not in (None, self._run_name):
                raise _ViewRefusedError(409, f"this page is of the run {self._run_name}, not of {body.run}")
            path = await _checked(self._app, _path_of(body))
            num = self._tabs.open(json.dumps({"path": path, "note": body.note}))
            if not num:
                raise _ViewRefusedError(409, "no tab of this page is open; open one, then call again")
        except _ViewRefusedError as refused:
            return JSONResponse({"detail": str(refused)}, refused.status)
        return JSONResponse({"opened": path, "browsers": num})


def _path_of(body: ViewBody) -> str:
    """The path of the body, or that of its named view."""
    if (body.path is None) == (body.view is None):
        raise _ViewRefusedError(422, "give path, or view with its parameters")
    if body.path is not None:
        if body.parameters:
            raise _ViewRefusedError(422, "parameters belong to a view; put them behind ? in the path")
        return body.path
    if (template := VIEWS.get(body.view or "")) is None:
        raise _ViewRefusedError(422, f"view is {str(body.view)[:100]!r}; it must be one of {', '.join(VIEWS)}")
    rest = {name: str(value) for name, value in body.parameters.items()}
    path = template
    for name in [part[1:-1] for part in template.split("/") if part.startswith("{")]:
        if name not in rest:
            raise _ViewRefusedError(422, f"the view {body.view} needs the parameter {name}")
        path = path.replace(f"{{{name}}}", quote(rest.pop(name), safe=""))
    return f"{path}?{urlencode(rest)}" if rest else path


async def _checked(app: FastAPI, path: str) -> str:
    """The path, if it is one of a view that this page shows now.

    Raises:
        _ViewRefusedError: It is of another place, or the page cannot show it.
    """
    has_other = "\\" in path or not path.isascii() or any(char <= " " or char == "\x7f" for char in path)
    try:
        parts = urlsplit(path)
    except ValueError:
        has_other = True
    if has_other or not path.startswith("/") or path.startswith("//") or parts.scheme or parts.netloc:
        text = "is not a path of this page: begin it with one /, without host, and write other characters as %XX"
        raise _ViewRefusedError(422, f"{path[:200]!r} {text}")
    scope = {"type": "http", "method": "GET", "path": unquote(parts.path)}
    # The first match answers, as in the app.
    route = next((route for route in app.routes if route.matches(scope)[0] is Match.FULL), None)
    if not isinstance(route, Route) or get_type_hints(route.endpoint).get("return") is not HTMLResponse:
        raise _ViewRefusedError(
            404, f"{path[:200]!r} is not a view of this page; views are {', '.join(VIEWS.values())}"
        )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        answer = await client.get(path)
    if not answer.is_success:
        raise _ViewRefusedError(
            404, f"the page cannot show {path[:200]!r}: open it to see why (status {answer.status_code})"
        )
    return path
