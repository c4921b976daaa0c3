"""Which run a command is about, and where the Redis of it is while it runs.

It asks nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gspo.cli.rundir.plan import check_run_dir, is_run_dir_locked, supervisor_facts
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError


@dataclass(frozen=True)
class OpenRun:
    """A run.

    Attributes:
        redis_url: Of the Redis that it uses; None where that is its own and it does not run.
    """

    run_dir: Path
    config: Config
    redis_url: str | None


def open_run(run_dir: Path | None) -> OpenRun:
    """A run by its directory; the newest one under ./runs where none is given.

    Raises:
        InputError: There is none.
    """
    run_dir = run_dir or _newest(Path("runs"))
    check_run_dir(run_dir)
    config = read_config(run_dir / CONFIG_NAME)
    own = str(supervisor_facts(run_dir).get("redis_url", "")) if is_run_dir_locked(run_dir) else ""
    return OpenRun(run_dir, config, config.services.redis_url or own or None)


def _newest(folder: Path) -> Path:
    found = [path.parent for path in folder.glob(f"*/{CONFIG_NAME}")]
    if not found:
        raise InputError(str(folder), "holds no run directory", "Give one with --run")
    return max(found, key=lambda path: path.stat().st_mtime)
