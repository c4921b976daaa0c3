"""Arguments that several commands share: the directories of runs."""

from pathlib import Path
from typing import Annotated, TypeVar

import typer

Paths = TypeVar("Paths", list[Path], Path, Path | None)


def run_dirs(paths: Paths) -> Paths:
    """The run directory for each configuration, named as `gspo run` takes it; other paths stay.

    Raises:
        InputError: A configuration is refused.
    """
    from gspo.cli.rundir.start import run_dir_of  # of one command: importing it takes a second

    if isinstance(paths, list):
        return [run_dir_of(path) for path in paths]
    return paths if paths is None else run_dir_of(paths)


_OR_ITS_CONFIG = "Run directory, or the configuration that it was started from"
RunDir = Annotated[Path, typer.Argument(help=f"{_OR_ITS_CONFIG}.", show_default=False, callback=run_dirs)]
RunDirs = Annotated[
    list[Path], typer.Argument(help=f"{_OR_ITS_CONFIG}, and others to compare it with.", callback=run_dirs)
]
NewestRunDir = Annotated[
    Path | None,
    typer.Argument(help=f"{_OR_ITS_CONFIG}. By default the newest run under ./runs.", callback=run_dirs),
]
Run = Annotated[
    Path | None,
    typer.Option("--run", help=f"{_OR_ITS_CONFIG}. By default the newest run under ./runs.", callback=run_dirs),
]
