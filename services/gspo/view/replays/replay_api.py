"""The HTTP API of a run's replays: pages and curves, recorded and replayed figures beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, HTTPException
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse, JSONResponse

from gspo.view.replays.replay_results import NAME, REPLAYS, ReplayResult, read_result, replay_names

NamePath = Annotated[str, InPath(pattern=f"^{NAME.pattern}$")]


def add_replays(app: FastAPI, page: Callable[..., HTMLResponse], run_dir: Path) -> None:
    """Add the pages of a run's replays."""

    @app.get("/replays")
    def all_replays() -> HTMLResponse:
        return page("replays.html", replays=list(_readable(run_dir)))

    @app.get("/replays/{name}")
    def one_replay(name: NamePath) -> HTMLResponse:
        return page("replay.html", name=name, result=_existing(run_dir, name))

    @app.get("/api/replays/{name}")
    def curves(name: NamePath) -> JSONResponse:
        return JSONResponse(_existing(run_dir, name).curves())


def _readable(run_dir: Path) -> Iterator[tuple[str, ReplayResult | None, str]]:
    """Name, result, and why there is none, of each replay."""
    for name in replay_names(run_dir):
        try:
            yield name, read_result(run_dir, name), ""
        except (OSError, ValueError) as error:
            yield name, None, str(error)


def _existing(run_dir: Path, name: str) -> ReplayResult:
    try:
        return read_result(run_dir, name)
    except OSError as error:
        raise HTTPException(404, f"{REPLAYS} of the run directory has no finished replay {name}") from error
