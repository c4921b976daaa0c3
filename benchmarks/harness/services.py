"""Services of gspo with their Redis, without the run around them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from benchmarks.harness.child_process import MeasurementError
from gspo.cli.processes.child import Program
from gspo.cli.processes.programs import Job, service_programs
from gspo.cli.processes.redis_server import start_redis
from gspo.cli.processes.supervisor import ProcessSupervisor
from gspo.common.config.loading import CONFIG_NAME, write_config
from gspo.common.config.schema import Config
from gspo.common.streams.inbox import create_consumer_groups
from gspo.common.streams.keys import Keys
from gspo.common.tasks import task_group

# The clock runs meanwhile, and a look at the length of a stream costs a service next to nothing.
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class RunningServices:
    """Redis and services that run."""

    redis: Redis
    redis_url: str
    keys: Keys
    supervisor: ProcessSupervisor

    async def wait_for_entries(self, stream: str, count: int, timeout_s: float) -> None:
        """Wait until a stream has so many entries.

        Raises:
            MeasurementError: It has fewer after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while (length := await self.redis.xlen(stream)) < count:
            if time.monotonic() > deadline:
                raise MeasurementError(f"{stream} has {length} of {count} entries after {timeout_s:g} s")
            await asyncio.sleep(_LOOK_EVERY_S)


@asynccontextmanager
async def running_services(
    config: Config, *services: str, change: Callable[[Program], Program] = lambda program: program
) -> AsyncIterator[RunningServices]:
    """Redis and these services in a new run directory.

    Args:
        change: Returns the program to start instead of a service's own.

    Raises:
        RunError: Redis did not answer, or a process died.
    """
    config.run_dir.mkdir()
    write_config(config, config.run_dir / CONFIG_NAME)
    async with ProcessSupervisor(config.run_dir / "services", 0, lambda _: None) as supervisor:
        redis, url = await start_redis(config, config.run_dir, supervisor, is_new_run=True)
        try:
            await create_consumer_groups(redis, Keys(config.name))
            job = Job(config, config.run_dir, services=services)
            supervisor.start([change(program) for program in service_programs(job, url)])
            async with task_group(supervisor.watch()):
                yield RunningServices(redis, url, Keys(config.name), supervisor)
        finally:
            await redis.aclose()
