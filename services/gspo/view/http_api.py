"""The page of a run: verdict, curves, rollouts, a group, a rollout. GET alone; what a reader chose is in the URL.

The texts are a model's, so templates escape everything, and the page may load nothing but its own style sheet, scripts
and figures. Hosts and origins are checked in common/network/http_server.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import duckdb
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi import Path as InPath
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.middleware.base import RequestResponseEndpoint

from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.errors import InputError
from gspo.view.clip_parts import AnswerClip, answer_clip, why_off
from gspo.view.comparison import compared_curves, config_differences, shared_answers
from gspo.view.function_api import add_functions
from gspo.view.function_versions import RunFunctions
from gspo.view.log_query import PAGE_ROWS, SORTS, LogQuery, filter_of
from gspo.view.open_tabs import MAX_STREAMS, OpenTabs
from gspo.view.opening_api import add_opening
from gspo.view.page_text import (
    COLOURS,
    LEGENDS,
    MAX_CHARS,
    MAX_TOKENS,
    RECORDED_COLOURS,
    coloured_tokens,
    token_decoder,
    visible,
)
from gspo.view.replays.replay_api import add_replays
from gspo.view.trials.trial_api import add_trials
from gspo.view.trials.trial_process import MAX_ROLLOUTS, STEPS, TrialProcess
from gspo.view.viewed_run import Overview, ViewedRun

_TEMPLATES = Path(__file__).parent / "templates"
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_FILES = {"style.css": "text/css"} | dict.fromkeys(("curves.js", "follow.js", "trial.js"), "text/javascript")
_LIBRARY = _TEMPLATES / "uplot"
_LIBRARY_FILES = {"uPlot.iife.min.js": "text/javascript", "uPlot.min.css": "text/css"}
# A browser asks again by itself after the end of a stream.
_POLL_S, _STREAM_S, _COMMENT_S = 1.0, 3600.0, 15.0
_WHOLE = ("prompt", "text", "failure", "turns_json", "messages_json", "columns_json", "logged_json")
Place = Annotated[int, InPath(ge=0, lt=2**31)]
GroupId = Annotated[int, InPath(ge=0, lt=2**63)]


def make_page(runs: Sequence[ViewedRun], tokenizer_folders: list[Path], trial: TrialProcess | None = None) -> FastAPI:
    """The app of a run, and of others that it is compared with.

    Args:
        runs: The others follow the run.
        tokenizer_folders: Where the run's tokenizer may be.
        trial: Scores logged rollouts; None refuses that.
    """
    run = runs[0]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    logs = [LogQuery(run.run_dir / "log", 1 / len(runs)) for run in runs]
    log, page = logs[0], _renderer(run.name, len(runs))
    _add_answers(app, page)
    _add_files(app)
    tabs = OpenTabs()
    _add_overview(app, page, run.overview, tabs)
    add_opening(app, tabs, run.name)
    functions = RunFunctions(log, run.run_dir / "log")
    trial_s = trial.timeout_s if trial else None
    add_functions(app, page, functions, {"trial_s": trial_s, "steps": STEPS, "most": MAX_ROLLOUTS})
    add_trials(app, page, functions, trial)
    add_replays(app, page, run.run_dir)
    if len(runs) > 1:
        _add_comparison(app, page, runs, logs)

    _add_rollouts(app, page, run, log, tokenizer_folders)
    return app


def _add_rollouts(
    app: FastAPI, page: Callable[..., HTMLResponse], run: ViewedRun, log: LogQuery, tokenizer_folders: list[Path]
) -> None:
    """The table of rollouts, a group, a rollout, and each of its texts whole."""

    @cache
    def decoder() -> Callable[[int], str] | None:
        return token_decoder(tokenizer_folders)

    @app.get("/rollouts")
    def rollouts(request: Request) -> HTMLResponse:
        query = dict(request.query_params)
        chosen = filter_of(query)
        total, rows = log.rollouts(chosen)
        values = {"query": query, "chosen": chosen, "link": _link_maker(query), "unreadable": log.unreadable()}
        return page("rollouts.html", rows=rows, total=total, size=PAGE_ROWS, **values)

    @app.get("/steps/{step}/groups/{group}")
    def group_page(step: Place, group: GroupId) -> HTMLResponse:
        rows = log.group(step, group)
        if not rows:
            raise HTTPException(404, f"the log has no group {group} in step {step}")
        return page("group.html", rows=rows, step=step, group=group, clips=_clips(run, log, step, group))

    @app.get("/steps/{step}/groups/{group}/{number}")
    def rollout_page(
        step: Place, group: GroupId, number: Place, colour: str = "logp", start: Annotated[int, Query(ge=0)] = 0
    ) -> HTMLResponse:
        row = _existing(log.rollout(step, group, number))
        colours = COLOURS + (RECORDED_COLOURS if row.get("learner_logp") else ())
        if colour in RECORDED_COLOURS and colour not in colours:
            raise HTTPException(404, f"step {step} has no token records: set learner.token_records, or replay it so")
        if colour not in colours:
            raise HTTPException(400, f"colour must be one of {', '.join(colours)}")
        tokens = coloured_tokens(row, colour, start, decoder())
        chat = _pretty(row.get("turns_json"))
        parts = json.loads(row["parts_json"] or "[]")
        return page(
            "rollout.html", row=row, tokens=tokens, colour=colour, colours=colours, start=start, chat=chat, parts=parts,
            times=_times(row), decoded=decoder() is not None,
        )  # fmt: skip

    @app.get("/steps/{step}/groups/{group}/{number}/{column}")
    def whole_text(step: Place, group: GroupId, number: Place, column: str) -> PlainTextResponse:
        row = _existing(log.rollout(step, group, number))
        if column not in _WHOLE:
            raise HTTPException(404, f"give one of {', '.join(_WHOLE)}")
        return PlainTextResponse(visible(row.get(column) or ""))


def _add_files(app: FastAPI) -> None:
    """The style sheet, the script, and the library that draws."""

    @app.get("/{name}.{kind}")
    def own_file(name: str, kind: str) -> FileResponse:
        return _file(_TEMPLATES, f"{name}.{kind}", _FILES)

    @app.get("/uplot/{name}")
    def library_file(name: str) -> FileResponse:
        return _file(_LIBRARY, name, _LIBRARY_FILES)


def _file(folder: Path, name: str, known: dict[str, str]) -> FileResponse:
    if name not in known:
        raise HTTPException(404, "the page has no such file")
    return FileResponse(folder / name, media_type=known[name])


def _add_overview(app: FastAPI, page: Callable[..., HTMLResponse], overview: Overview, tabs: OpenTabs) -> None:
    """The first page, its curves, and a stream with a line for each change of the log."""

    @app.get("/")
    def run_page() -> HTMLResponse:
        return page("run.html", **overview.facts())

    @app.get("/api/curves")
    def curves() -> JSONResponse:
        return JSONResponse(overview.curves())

    @app.get("/api/changes")
    async def changes() -> StreamingResponse:
        if tabs.num_streams >= MAX_STREAMS:
            raise HTTPException(503, f"{MAX_STREAMS} browsers follow this page already; close tabs and load it again")
        return StreamingResponse(_changes(overview, tabs), media_type="text/event-stream")


def _add_comparison(
    app: FastAPI, page: Callable[..., HTMLResponse], runs: Sequence[ViewedRun], logs: Sequence[LogQuery]
) -> None:
    """The page that compares runs, and its curves."""

    @app.get("/compare")
    def compare(q: str = "") -> HTMLResponse:
        values = {"differences": config_differences(runs), "prompts": shared_answers(logs, q)}
        return page("compare.html", runs=runs, q=q, **values)

    @app.get("/api/comparison")
    def comparison() -> JSONResponse:
        return JSONResponse(compared_curves(runs))


async def _changes(overview: Overview, tabs: OpenTabs) -> AsyncIterator[str]:
    """Server-sent events: changes of the log, opened views; a comment so that a lost connection is noticed."""
    loop = asyncio.get_running_loop()
    end, state, sent = loop.time() + _STREAM_S, overview.state(), loop.time()
    yield ": follows the log\n\n"
    with tabs.listening() as views:
        while loop.time() < end:
            view = ""
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    view = await views.get()
            if view:
                yield f"event: view\ndata: {view}\n\n"
            changed = state != (state := overview.state())
            if changed or loop.time() > sent + _COMMENT_S:
                sent = loop.time()
                yield "data: changed\n\n" if changed else ": nothing new\n\n"


def _clips(run: ViewedRun, log: LogQuery, step: int, group: int) -> dict[int, AnswerClip | str]:
    """Of each rollout of a group its clip, or the reason why it shows none."""
    rows = log.clip_rows(step, group)
    try:
        algorithm = read_config(run.run_dir / CONFIG_NAME).algorithm
    except InputError as error:
        return dict.fromkeys(rows, f"the configuration cannot be read: {error}")
    return {number: why_off(algorithm, row) or answer_clip(algorithm, row) for number, row in rows.items()}


def _existing(row: dict[str, Any] | None) -> dict[str, Any]:
    if row is None:
        raise HTTPException(404, "the log has no such rollout")
    return row


def _add_answers(app: FastAPI, page: Callable[..., HTMLResponse]) -> None:
    """Headers of every answer, and pages for errors."""

    @app.middleware("http")
    async def add_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
        answer = await call_next(request)
        answer.headers.update(_HEADERS)
        return answer

    @app.exception_handler(HTTPException)
    def refused(_request: Request, error: HTTPException) -> HTMLResponse:
        return page("error.html", status=error.status_code, message=error.detail)

    @app.exception_handler(ValueError)
    def bad_value(_request: Request, error: ValueError) -> HTMLResponse:
        return page("error.html", status=400, message=str(error))

    @app.exception_handler(duckdb.Error)
    def unreadable(_request: Request, error: duckdb.Error) -> HTMLResponse:
        text = f"the log cannot be read now; load the page again ({str(error)[:300]})"
        return page("error.html", status=503, message=text)

    @app.exception_handler(TimeoutError)
    def busy(_request: Request, error: TimeoutError) -> HTMLResponse:
        return page("error.html", status=503, message=str(error))


def _renderer(name: str, num_runs: int) -> Callable[..., HTMLResponse]:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        visible=visible,
        parts=lambda text: json.loads(text or "[]"),
        cut=lambda text: visible(text[:MAX_CHARS]),
        figure=lambda value: "none" if value is None else f"{value:.4g}",
    )
    environment.globals.update(
        run_name=name, num_runs=num_runs, sorts=list(SORTS), legends=LEGENDS, max_chars=MAX_CHARS, max_tokens=MAX_TOKENS
    )

    def page(template: str, status: int = 200, **values: Any) -> HTMLResponse:
        return HTMLResponse(environment.get_template(template).render(**values), status)

    return page


def _link_maker(query: dict[str, str]) -> Callable[..., str]:
    def link(**changes: Any) -> str:
        return "/rollouts?" + urlencode({name: value for name, value in (query | changes).items() if value != ""})

    return link


def _pretty(turns_json: str | None) -> str:
    """The conversation as indented JSON; empty for a single answer."""
    return json.dumps(json.loads(turns_json), indent=2, ensure_ascii=False) if turns_json else ""


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
