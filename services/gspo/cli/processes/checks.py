"""What is checked before anything starts: each service's own check, and what only the whole run can know.

Ports and Redis are checked here; models, prompts and rewards by the services, as processes at the same time.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gspo.cli.processes.child import describe_exit
from gspo.cli.processes.exit_codes import RunError, ServiceRefusedError
from gspo.cli.processes.placement import NO_GPUS, Placement
from gspo.cli.processes.preflight import Preflight
from gspo.common.config.schema import Config
from gspo.common.errors import EXIT_BAD_INPUT, WARNING, InputError
from gspo.common.model.batch_memory import check_fits, redis_bytes
from gspo.common.network.credentials import check_credentials, redis_arguments, redis_refusal, without_password
from gspo.common.streams.keys import Keys

# How a service's check begins a line that stops nothing.
_CONNECT_S = 5.0
# XAUTOCLAIM came with it.
_OLDEST_REDIS = (6, 2)


async def check_services(
    services: tuple[str, ...],
    config_file: Path,
    placement: Placement = NO_GPUS,
    processes: Preflight | None = None,
) -> list[str]:
    """Run every service's own check, all at once; what they warn of.

    Args:
        placement: Each check sees the GPUs of the service's first process.
        processes: Where the checks run; elsewhere, they end with their check.

    Raises:
        ServiceRefusedError: The first service, in the given order, that refuses the configuration.
        RunError: A check broke or took longer than CHECK_TIMEOUT_S.
    """
    first = processes or Preflight()
    try:
        answers = await asyncio.gather(
            *(first.check(service, config_file, placement.environment(f"{service}-0")) for service in services)
        )
    finally:
        if processes is None:
            first.end()
    for service, (code, words) in zip(services, answers, strict=True):
        if code == EXIT_BAD_INPUT:
            raise ServiceRefusedError(_message(words).removeprefix("error: "))
        if code != 0:
            raise RunError(f"the check of {service} broke ({describe_exit(code)}): {_message(words)}")
    return [
        line.removeprefix(WARNING) for _, words in answers for line in words.splitlines() if line.startswith(WARNING)
    ]


def _message(errors: str) -> str:
    """The service's message, without what libraries print before it."""
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith("error: "):
            return "\n".join(lines[number:])
    return "\n".join(lines[-8:]) or "it said nothing"


def check_ports(config: Config) -> None:
    """Refuse ports that are in use, or asked for twice, and secrets and certificates that cannot work.

    Raises:
        InputError: Names the key.
    """
    services = config.services
    check_credentials(config, services.host, services.redis_url)
    if services.coordinator_port and services.coordinator_port == services.reward_port:
        raise InputError(
            "services.reward_port", f"{services.reward_port} is services.coordinator_port too", "Set another, or 0"
        )
    for key in ("coordinator_port", "reward_port"):
        if port := getattr(services, key):
            _check_port(f"services.{key}", services.host, port)


def _check_port(key: str, host: str, port: int) -> None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise InputError(
            key, f"{port} cannot be bound on {host} ({error.strerror})", "Set another port, or 0 for a free one"
        ) from error


async def check_redis(url: str, config: Config) -> str:
    """Refuse a Redis that does not answer, is too old, or cannot hold a batch; a warning of what it may not hold.

    Raises:
        InputError: Names the key; a password in services.redis_url is not shown.
    """
    key, given = "services.redis_url", redis_arguments(url, config)
    try:
        client = Redis.from_url(url, protocol=2, socket_connect_timeout=_CONNECT_S, socket_timeout=_CONNECT_S, **given)
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
            "Start that Redis or mend the address; without the key the run starts its own",
        ) from error
    finally:
        await client.aclose()
    found = str(facts["redis_version"])
    if tuple(int(part) for part in found.split(".")[:2]) < _OLDEST_REDIS:
        raise InputError(key, f"Redis {found} is older than 6.2", "Take a newer one, or leave the key out")
    limit = int(facts.get("maxmemory", 0)) or int(facts.get("total_system_memory", 0))
    left = limit - int(facts.get("used_memory", 0)) if limit else float("inf")
    return check_fits(config, redis_bytes(config), left, "the memory of the Redis in services.redis_url")


async def check_unused(redis: Redis, config: Config) -> None:
    """Refuse a new run whose name has keys in a Redis that others use.

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
