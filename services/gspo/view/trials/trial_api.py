"""`POST /api/functions/{version}/trial`: what a recorded version would have changed, as a part of its page."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool

from gspo.view.function_api import VersionPath
from gspo.view.function_versions import FunctionVersion, RunFunctions
from gspo.view.trials.trial_process import TrialError, TrialProcess


class TrialBody(BaseModel):
    """The function whose scores the version replaces, one that had the version."""

    model_config = ConfigDict(extra="forbid")
    function: str


def add_trials(
    app: FastAPI, page: Callable[..., HTMLResponse], functions: RunFunctions, trial: TrialProcess | None
) -> None:
    """Add the call; without a process it is refused."""

    @app.post("/api/functions/{version}/trial")
    async def try_version(version: VersionPath, body: TrialBody) -> Response:
        try:
            if trial is None:
                command = f"gspo reward compare RUN_DIR {version[:12]}"
                raise TrialError(403, f"this page runs no function; on the machine of the log: {command}")
            known = _tryable(await run_in_threadpool(functions.named, version), body.function)
            rollouts = await trial.tried(known.version, known.name)
        except TrialError as error:
            return JSONResponse({"detail": str(error)}, error.status)
        changed = [rollout for rollout in rollouts if rollout["new"] != rollout["old"] or rollout["failure"]]
        return page("trial.html", rollouts=rollouts, changed=changed)


def _tryable(versions: list[FunctionVersion], function: str) -> FunctionVersion:
    """The one of the function, whose source the log has.

    Raises:
        TrialError: The log has none, or it is more than a source.
    """
    known = next((version for version in versions if version.name == function), None)
    if known is None:
        names = ", ".join(version.name for version in versions) or "none"
        raise TrialError(404, f"the log has no such version of {function[:100]!r}; functions with it: {names}")
    if known.source is None or not known.source.is_tryable:
        raise TrialError(422, "the log has no source of it that can run alone: it is a server, a model, or runs code")
    return known
