"""The HTTP API of a run's replays: pages and curves, recorded and replayed figures beside each other."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, HTTPException
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse, JSONResponse

from gspo.view.picture.replay_results import NAME, REPLAYS, ReplayResult, read_result, replay_names

NamePath = Annotated[str, InPath(pattern=f"^{NAME.pattern}$")]


class ReplayPages:
    """The pages of a run's replays."""

    def __init__(self, page: Callable[..., HTMLResponse], run_dir: Path) -> None:
        self._page, self._run_dir = page, run_dir

    def add_to(self, app: FastAPI) -> None:
        app.get("/replays")(self.all_replays)
        app.get("/replays/{name}")(self.replay)
        app.get("/api/replays/{name}")(self.curves)

    def all_replays(self) -> HTMLResponse:
        return self._page("replays.html", replays=list(self._readable()))

    def replay(self, name: NamePath) -> HTMLResponse:
        return self._page("replay.html", name=name, result=self._existing(name))

    def curves(self, name: NamePath) -> JSONResponse:
        return JSONResponse([curve.as_json() for curve in self._existing(name).curves()])

    def _readable(self) -> Iterator[tuple[str, ReplayResult | None, str]]:
        """Name, result, and why there is none, of each replay."""
        for name in replay_names(self._run_dir):
            try:
                yield name, read_result(self._run_dir, name), ""
            except (OSError, ValueError) as error:
                yield name, None, str(error)

    def _existing(self, name: str) -> ReplayResult:
        try:
            return read_result(self._run_dir, name)
        except OSError as error:
            raise HTTPException(404, f"{REPLAYS} of the run directory has no finished replay {name}") from error
