"""The run that a command works on: its directory, its Redis while it runs, its processes and their HTTP APIs."""

from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gspo.cli.rundir.start import check_run_dir, is_run_dir_locked, supervisor_facts
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.schema import Config, TlsConfig
from gspo.common.errors import InputError
from gspo.common.network.credentials import client_context, redis_arguments, redis_refusal, shared_token
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
    if run_dir is None:
        run_dirs = [path.parent for pattern in patterns for path in _RUNS.glob(f"{pattern}/{CONFIG_NAME}")]
        if not run_dirs:
            raise InputError(str(_RUNS), "holds no run directory", fix)
        # A locked one comes before all others.
        run_dir = max(run_dirs, key=lambda path: (is_run_dir_locked(path), path.stat().st_mtime))
    check_run_dir(run_dir)
    config = read_config(run_dir / CONFIG_NAME)
    own_url = str(supervisor_facts(run_dir).get("redis_url", "")) if is_run_dir_locked(run_dir) else ""
    return OpenRun(run_dir, config, config.services.redis_url or own_url or None)


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


def api_url(address: str, config: Config) -> str:
    """The address of a heartbeat as a URL."""
    return f"{'https' if config.services.tls.is_on else 'http'}://{address}"


def api_client(config: Config, *, timeout_s: float) -> httpx.AsyncClient:
    """A client of the HTTP APIs of one run, with the token of that run."""
    return httpx.AsyncClient(timeout=timeout_s, **api_access(config.services.tls, shared_token(config)))


def api_access(tls: TlsConfig, token: str) -> dict[str, Any]:
    """The settings of an HTTP client that may call services; no token where it is empty."""
    # A proxy of the environment would not reach services of this machine or cluster.
    return {"auth": _Credentials(tls, token), "trust_env": False, "verify": client_context(tls)}


class _Credentials(httpx.Auth):
    """Adds the token, and expects services.tls.server_name in the certificate, if it is set."""

    def __init__(self, tls: TlsConfig, token: str) -> None:
        self._name, self._token = tls.server_name, token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Called by httpx for each request."""
        if self._token:
            request.headers["authorization"] = f"Bearer {self._token}"
        if self._name:
            request.extensions = {**request.extensions, "sni_hostname": self._name}
        yield request
