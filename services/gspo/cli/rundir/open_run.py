"""The run that a command works on: its directory, its Redis while it runs, and its registered processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gspo.cli.rundir.lock import is_run_dir_locked, supervisor_facts
from gspo.cli.rundir.plan import check_run_dir
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.network.credentials import redis_arguments, redis_refusal
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import Keys

_RUNS = Path("runs")
_CONNECT_S, _REPLY_S = 3.0, 10.0


@dataclass(frozen=True)
class OpenRun:
    """A run.

    Attributes:
        redis_url: Address of its Redis; None if the run starts its own Redis and does not run.
    """

    run_dir: Path
    config: Config
    redis_url: str | None


def open_run(run_dir: Path | None, patterns: Sequence[str] = ("*",), fix: str = "Give one with --run") -> OpenRun:
    """Open a run by its directory, or the newest run under ./runs.

    Args:
        patterns: Where run directories are below ./runs.
        fix: What to do if there is no run, for the error.

    Raises:
        InputError: There is no run, or the folder is not a run directory.
    """
    run_dir = run_dir or _newest_run(patterns, fix)
    check_run_dir(run_dir)
    config = read_config(run_dir / CONFIG_NAME)
    own_url = str(supervisor_facts(run_dir).get("redis_url", "")) if is_run_dir_locked(run_dir) else ""
    return OpenRun(run_dir, config, config.services.redis_url or own_url or None)


def _newest_run(patterns: Sequence[str], fix: str) -> Path:
    """The newest run directory; a locked one comes before all others."""
    run_dirs = [path.parent for pattern in patterns for path in _RUNS.glob(f"{pattern}/{CONFIG_NAME}")]
    if not run_dirs:
        raise InputError(str(_RUNS), "holds no run directory", fix)
    return max(run_dirs, key=lambda path: (is_run_dir_locked(path), path.stat().st_mtime))


@asynccontextmanager
async def connect_once(url: str, config: Config) -> AsyncIterator[Redis]:
    """A client of a run's Redis for one question; it does not try again.

    Raises:
        InputError: Redis does not answer, or refuses the password.
    """
    redis = Redis.from_url(
        url, protocol=2, socket_connect_timeout=_CONNECT_S, socket_timeout=_REPLY_S, **redis_arguments(url, config)
    )
    try:
        yield redis
    except (RedisError, OSError) as error:
        if refusal := redis_refusal(error):
            raise refusal from error
        fix = "The run may be starting or ending; try again"
        raise InputError("redis", f"does not answer ({error})", fix) from error
    finally:
        await redis.aclose()


async def read_instances(url: str, config: Config) -> list[Instance]:
    """The registered processes of a run.

    Raises:
        InputError: Redis does not answer.
    """
    async with connect_once(url, config) as redis:
        return await list_instances(redis, Keys(config.name))
