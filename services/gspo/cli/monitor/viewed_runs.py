"""The runs that `gspo view` shows, under names of their own."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from gspo.cli.monitor.service_states import service_states
from gspo.cli.rundir.start import check_run_dir
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.errors import InputError
from gspo.view.comparison import MAX_RUNS
from gspo.view.picture.viewed_run import ViewedRun


def viewed_runs(run_dirs: Sequence[Path]) -> list[ViewedRun]:
    """The runs by their configured names, or by parts of their paths where two are equal.

    Raises:
        InputError: A folder is not a run directory, is given twice, or there are too many.
    """
    if len(run_dirs) > MAX_RUNS:
        raise InputError(
            "RUN_DIR", f"is given {len(run_dirs)} times", f"Give at most {MAX_RUNS}: a curve has a colour for each"
        )
    for run_dir in run_dirs:
        check_run_dir(run_dir)
        if sum(run_dir.resolve() == other.resolve() for other in run_dirs) > 1:
            raise InputError(str(run_dir), "is given twice", "Give each run once")
    names = [read_config(run_dir / CONFIG_NAME).name for run_dir in run_dirs]
    if len(set(names)) < len(names):
        names = _distinct_parts(run_dirs)
    return [ViewedRun(name, run_dir, service_states) for name, run_dir in zip(names, run_dirs, strict=True)]


def _distinct_parts(paths: Sequence[Path]) -> list[str]:
    """Each path without the folders at its beginning and its end that all of them have."""
    parts = [path.resolve().parts for path in paths]
    first = next(place for place, names in enumerate(zip_longest(*parts)) if len(set(names)) > 1)
    behind = next(place for place, names in enumerate(zip_longest(*map(reversed, parts))) if len(set(names)) > 1)
    return ["/".join(names[first : len(names) - behind]) or names[-1] for names in parts]
