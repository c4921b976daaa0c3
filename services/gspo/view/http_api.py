"""The page of a run: verdict, curves, rollouts, a group, a rollout. GET alone; what a reader chose is in the URL.

The texts are a model's, so templates escape everything, and the page may load nothing but its own style sheet, scripts
and figures. Hosts and origins are checked in common/network/http_server.py.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import duckdb
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi import Path as InPath
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.middleware.base import RequestResponseEndpoint

from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.errors import InputError
from gspo.view.clip_parts import AnswerClip, answer_clip, why_off
from gspo.view.comparison import compared_curves, compared_results, config_differences, shared_answers
from gspo.view.function_api import FunctionPages
from gspo.view.function_versions import RunFunctions
from gspo.view.log_query import PAGE_ROWS, SORTS, LogQuery, filter_of
from gspo.view.log_trial import LogTrials
from gspo.view.opening_api import MAX_STREAMS, Opening, OpenTabs
from gspo.view.page_text import COLOURS, RECORDED_COLOURS, coloured_tokens, token_decoder, visible
from gspo.view.picture.page import FILES, TEMPLATES, Templates
from gspo.view.picture.viewed_run import ViewedRun
from gspo.view.replay_api import ReplayPages

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
# A browser asks again by itself after the end of a stream.
_POLL_S, _STREAM_S, _COMMENT_S = 1.0, 3600.0, 15.0
_WHOLE = ("prompt", "text", "failure", "turns_json", "messages_json", "columns_json", "logged_json")
Place = Annotated[int, InPath(ge=0, lt=2**31)]
GroupId = Annotated[int, InPath(ge=0, lt=2**63)]


def make_page(runs: Sequence[ViewedRun], tokenizer_folders: list[Path], trial: LogTrials | None = None) -> FastAPI:
    """The app of a run, and of others that it is compared with.

    Args:
        runs: The others follow the run.
        tokenizer_folders: Where the run's tokenizer may be.
        trial: Scores logged rollouts; None refuses that.
    """
    run = runs[0]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.middleware("http")(_with_headers)
    logs = [LogQuery(run.run_dir / "log", 1 / len(runs)) for run in runs]
    page, tabs = Page(run.name, len(runs)), OpenTabs()
    for kind in (HTTPException, ValueError, duckdb.Error, TimeoutError):
        app.add_exception_handler(kind, page.refusal)
    app.get("/{name}.{kind}")(_own_file)
    app.get("/uplot/{name}")(_library_file)
    RunPages(page, run, tabs).add_to(app)
    Opening(app, tabs, run.name)
    FunctionPages(page, RunFunctions(logs[0], run.run_dir / "log"), trial).add_to(app)
    ReplayPages(page, run.run_dir).add_to(app)
    if len(runs) > 1:
        ComparisonPages(page, runs, logs).add_to(app)
    RolloutPages(page, run, logs[0], tokenizer_folders).add_to(app)
    return app


class Page:
    """Answers with a page of a template."""

    def __init__(self, run_name: str, num_runs: int) -> None:
        self._templates = Templates(run_name, num_runs)

    def __call__(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        return HTMLResponse(self._templates.text(template, **values), status)

    def refusal(self, _request: Request, error: Exception) -> HTMLResponse:
        match error:
            case HTTPException():
                return self("error.html", error.status_code, message=error.detail)
            case duckdb.Error():
                text = f"the log cannot be read now; load the page again ({str(error)[:300]})"
                return self("error.html", 503, message=text)
            case TimeoutError():
                return self("error.html", 503, message=str(error))
        return self("error.html", 400, message=str(error))


async def _with_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    answer = await call_next(request)
    answer.headers.update(_HEADERS)
    return answer


def _own_file(name: str, kind: str) -> FileResponse:
    return _file(f"{name}.{kind}")


def _library_file(name: str) -> FileResponse:
    return _file(f"uplot/{name}")


def _file(name: str) -> FileResponse:
    if name not in FILES:
        raise HTTPException(404, "the page has no such file")
    return FileResponse(TEMPLATES / name, media_type=FILES[name])


class RunPages:
    """The first page, its curves, and a stream with a line for each change of the log."""

    def __init__(self, page: Page, run: ViewedRun, tabs: OpenTabs) -> None:
        self._page, self._run, self._tabs = page, run, tabs

    def add_to(self, app: FastAPI) -> None:
        app.get("/")(self.run_page)
        app.get("/api/curves")(self.curves)
        app.get("/api/changes")(self.changes)

    def run_page(self) -> HTMLResponse:
        return self._page("run.html", **self._run.facts())

    def curves(self) -> JSONResponse:
        return JSONResponse([curve.as_json() for curve in self._run.curves()])

    async def changes(self) -> StreamingResponse:
        if self._tabs.num_streams >= MAX_STREAMS:
            raise HTTPException(503, f"{MAX_STREAMS} browsers follow this page already; close tabs and load it again")
        return StreamingResponse(_changes(self._run, self._tabs), media_type="text/event-stream")


class RolloutPages:
    """The table of rollouts, a group, a rollout, and each of its texts whole."""

    def __init__(self, page: Page, run: ViewedRun, log: LogQuery, tokenizer_folders: list[Path]) -> None:
        self._page, self._run, self._log, self._folders = page, run, log, tokenizer_folders

    def add_to(self, app: FastAPI) -> None:
        app.get("/rollouts")(self.rollouts)
        app.get("/steps/{step}/groups/{group}")(self.group)
        app.get("/steps/{step}/groups/{group}/{number}")(self.rollout)
        app.get("/steps/{step}/groups/{group}/{number}/{column}")(self.whole_text)

    @cached_property
    def _decoder(self) -> Callable[[int], str] | None:
        return token_decoder(self._folders)

    def rollouts(self, request: Request) -> HTMLResponse:
        query = dict(request.query_params)
        chosen = filter_of(query)
        total, rows = self._log.rollouts(chosen)
        return self._page(
            "rollouts.html", rows=rows, total=total, size=PAGE_ROWS, link=partial(_link, query), query=query,
            chosen=chosen, sorts=SORTS, unreadable=self._log.unreadable(),
        )  # fmt: skip

    def group(self, step: Place, group: GroupId) -> HTMLResponse:
        rows = self._log.group(step, group)
        if not rows:
            raise HTTPException(404, f"the log has no group {group} in step {step}")
        clips = _clips(self._run, self._log, step, group)
        return self._page("group.html", rows=rows, step=step, group=group, clips=clips)

    def rollout(
        self, step: Place, group: GroupId, number: Place, colour: str = "logp",
        start: Annotated[int, Query(ge=0)] = 0,
    ) -> HTMLResponse:  # fmt: skip
        row = self._existing(step, group, number)
        colours = COLOURS + (RECORDED_COLOURS if row.get("learner_logp") else ())
        if colour in RECORDED_COLOURS and colour not in colours:
            raise HTTPException(404, f"step {step} has no token records: set learner.token_records, or replay it so")
        if colour not in colours:
            raise HTTPException(400, f"colour must be one of {', '.join(colours)}")
        tokens = coloured_tokens(row, colour, start, self._decoder)
        # Empty for a single answer.
        chat = json.dumps(json.loads(row["turns_json"]), indent=2, ensure_ascii=False) if row.get("turns_json") else ""
        parts = json.loads(row["parts_json"] or "[]")
        return self._page(
            "rollout.html", row=row, tokens=tokens, colour=colour, colours=colours, start=start, chat=chat, parts=parts,
            times=_times(row), decoded=self._decoder is not None,
        )  # fmt: skip

    def whole_text(self, step: Place, group: GroupId, number: Place, column: str) -> PlainTextResponse:
        row = self._existing(step, group, number)
        if column not in _WHOLE:
            raise HTTPException(404, f"give one of {', '.join(_WHOLE)}")
        return PlainTextResponse(visible(row.get(column) or ""))

    def _existing(self, step: int, group: int, number: int) -> dict[str, Any]:
        row = self._log.rollout(step, group, number)
        if row is None:
            raise HTTPException(404, "the log has no such rollout")
        return row


class ComparisonPages:
    """The page that compares runs, and its curves."""

    def __init__(self, page: Page, runs: Sequence[ViewedRun], logs: Sequence[LogQuery]) -> None:
        self._page, self._runs, self._logs = page, runs, logs

    def add_to(self, app: FastAPI) -> None:
        app.get("/compare")(self.compare)
        app.get("/api/comparison")(self.curves)

    def compare(self, q: str = "") -> HTMLResponse:
        """Held-out results, the differing keys, and answers to prompts with a text."""
        differences, prompts = config_differences(self._runs), shared_answers(self._logs, q)
        results = compared_results(self._runs)
        return self._page(
            "compare.html", runs=self._runs, q=q, results=results, differences=differences, prompts=prompts
        )

    def curves(self) -> JSONResponse:
        return JSONResponse([curve.as_json() for curve in compared_curves(self._runs)])


async def _changes(run: ViewedRun, tabs: OpenTabs) -> AsyncIterator[str]:
    """Server-sent events: changes of the log, opened views; a comment so that a lost connection is noticed."""
    loop = asyncio.get_running_loop()
    end, state, sent = loop.time() + _STREAM_S, run.state(), loop.time()
    yield ": follows the log\n\n"
    with tabs.listening() as views:
        while loop.time() < end:
            view = ""
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    view = await views.get()
            if view:
                yield f"event: view\ndata: {view}\n\n"
            changed = state != (state := run.state())
            if changed or loop.time() > sent + _COMMENT_S:
                sent = loop.time()
                yield "data: changed\n\n" if changed else ": nothing new\n\n"


def _clips(run: ViewedRun, log: LogQuery, step: int, group: int) -> dict[int, AnswerClip | str]:
    """For each rollout of a group its clip, or the reason why it shows none."""
    rows = log.clip_rows(step, group)
    try:
        algorithm = read_config(run.run_dir / CONFIG_NAME).algorithm
    except InputError as error:
        return dict.fromkeys(rows, f"the configuration cannot be read: {error}")
    return {number: why_off(algorithm, row) or answer_clip(algorithm, row) for number, row in rows.items()}


def _link(query: dict[str, str], **changes: Any) -> str:
    return "/rollouts?" + urlencode({name: value for name, value in (query | changes).items() if value != ""})


def _times(row: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Parts of the way in sequence: name, seconds since the group was issued, seconds of the part."""
    names = {"wait for a generator": "started", "sampling": "finished", "scoring and its wait": "scored"}
    times: list[tuple[str, float, float]] = []
    before = row["issued_unix_s"]
    for what, end in names.items():
        after = row[f"{end}_unix_s"]
        if before is None or after is None:
            return times
        times.append((what, before - row["issued_unix_s"], max(0.0, after - before)))
        before = after
    return times
