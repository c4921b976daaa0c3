"""The pages of reward functions: all of them, one version with its source, and the difference between two versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse, JSONResponse

from gspo.view.function_versions import FunctionVersion, RunFunctions, difference_of, function_curves

VersionPath = Annotated[str, InPath(pattern=r"^[0-9A-Za-z._-]{1,64}$")]


def add_functions(
    app: FastAPI, page: Callable[..., HTMLResponse], functions: RunFunctions, trial: dict[str, Any]
) -> None:
    """Add the pages of a run's functions.

    Args:
        trial: Of the page of a version: `trial_s`, `steps` and `most` of a trial; `trial_s` is None without trials.
    """

    @app.get("/functions")
    def all_functions() -> HTMLResponse:
        return page("functions.html", versions=functions.versions())

    @app.get("/api/functions")
    def curves() -> JSONResponse:
        return JSONResponse(function_curves(functions.versions()))

    @app.get("/functions/{version}")
    def one_version(version: VersionPath) -> HTMLResponse:
        known = _existing(functions, version)
        others = [other for other in functions.versions() if other.name == known[0].name and other.source]
        return page("function.html", known=known, first=known[0], others=others, **trial)

    @app.get("/functions/{version}/against/{other}")
    def difference(version: VersionPath, other: VersionPath) -> HTMLResponse:
        new, old = _existing(functions, version)[0], _existing(functions, other)[0]
        if new.source is None or old.source is None:
            missing = new if new.source is None else old
            raise HTTPException(404, f"the log has no source of version {missing.version[:12]}")
        lines = difference_of(old.source.whole_text, new.source.whole_text)
        return page("difference.html", old=old, new=new, lines=lines)


def _existing(functions: RunFunctions, version: str) -> list[FunctionVersion]:
    if not (known := functions.named(version)):
        raise HTTPException(404, f"no rollout of the log was scored by version {version[:12]}")
    return known
