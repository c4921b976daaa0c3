"""The pages of reward functions: all of them, one version with its source, the difference between two versions.

`POST /api/functions/{version}/trial` answers what a recorded version would have changed, as a part of its page.
"""

from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, HTTPException
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool

from gspo.view.function_versions import FunctionVersion, RunFunctions, difference_of, function_curves
from gspo.view.log_trial import MAX_ROLLOUTS, STEPS, LogTrials, TrialError

VersionPath = Annotated[str, InPath(pattern=r"^[0-9A-Za-z._-]{1,64}$")]


class TrialBody(BaseModel):
    """The function whose scores the version replaces, one that had the version."""

    model_config = ConfigDict(extra="forbid")
    function: str


class FunctionPages:
    """The pages of a run's functions.

    Args:
        trial: Scores logged rollouts; None refuses that.
    """

    def __init__(self, page: Callable[..., HTMLResponse], functions: RunFunctions, trial: LogTrials | None) -> None:
        self._page, self._functions, self._trial = page, functions, trial

    def add_to(self, app: FastAPI) -> None:
        app.get("/functions")(self.all_functions)
        app.get("/api/functions")(self.curves)
        app.get("/functions/{version}")(self.version)
        app.get("/functions/{version}/against/{other}")(self.difference)
        app.post("/api/functions/{version}/trial")(self.try_version)

    def all_functions(self) -> HTMLResponse:
        return self._page("functions.html", versions=self._functions.versions())

    def curves(self) -> JSONResponse:
        """Scores and failures over steps."""
        return JSONResponse([curve.as_json() for curve in function_curves(self._functions.versions())])

    def version(self, version: VersionPath) -> HTMLResponse:
        known = self._existing(version)
        others = [other for other in self._functions.versions() if other.name == known[0].name and other.source]
        trial_s = self._trial.timeout_s if self._trial else None
        values = {"trial_s": trial_s, "steps": STEPS, "most": MAX_ROLLOUTS}
        return self._page("function.html", known=known, first=known[0], others=others, **values)

    def difference(self, version: VersionPath, other: VersionPath) -> HTMLResponse:
        """The lines that two versions do not share."""
        new, old = self._existing(version)[0], self._existing(other)[0]
        if new.source is None or old.source is None:
            missing = new if new.source is None else old
            raise HTTPException(404, f"the log has no source of version {missing.version[:12]}")
        lines = difference_of(old.source.whole_text, new.source.whole_text)
        return self._page("difference.html", old=old, new=new, lines=lines)

    async def try_version(self, version: VersionPath, body: TrialBody) -> Response:
        """Changes that the version would have made, or why they are unknown."""
        try:
            if self._trial is None:
                command = f"gspo reward compare RUN_DIR {version[:12]}"
                raise TrialError(403, f"this page runs no function; on the machine of the log: {command}")
            known = _tryable(await run_in_threadpool(self._functions.named, version), body.function)
            rollouts = await self._trial.tried(known.version, known.name)
        except TrialError as error:
            return JSONResponse({"detail": str(error)}, error.status)
        return self._page("trial.html", rollouts=rollouts, changed=[it for it in rollouts if it.is_changed])

    def _existing(self, version: str) -> list[FunctionVersion]:
        if not (known := self._functions.named(version)):
            raise HTTPException(404, f"no rollout of the log was scored by version {version[:12]}")
        return known


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
