"""`gspo reward serve`: runs the reward service without a training run.

It is the same service as in a run, but gets no rollouts. Submitted functions are stored in the folder of
reward.registry.
"""

import asyncio
from pathlib import Path

from redis.asyncio import Redis
from rich.console import Console

from gspo.cli.processes.programs import Job, check_ports, service_programs
from gspo.cli.processes.redis_server import REDIS, check_redis, start_redis
from gspo.cli.processes.supervisor import ProcessSupervisor
from gspo.cli.run.session import Interrupts
from gspo.cli.rundir.open_run import api_url
from gspo.cli.rundir.start import (
    SERVICES_DIR,
    RunStart,
    config_file_of,
    lock_run_dir,
    prepare,
    write_supervisor_facts,
)
from gspo.common.config.loading import read_config
from gspo.common.config.reward import RewardFunction
from gspo.common.config.schema import Config
from gspo.common.config.sources import code_of
from gspo.common.streams.instances import wait_for_instance
from gspo.common.streams.keys import Keys
from gspo.common.tasks import task_group

START_TIMEOUT_S = 60.0
# A reserved name: with the name of a run the service would take its rollouts.
_NAME = "gspo-reward-serve"


def serve(config_file: Path, port: int, console: Console) -> int:
    """Serve until Ctrl-C or SIGTERM; the exit code.

    Raises:
        InputError: The configuration cannot work, or another process serves its folder.
        RunError: The service could not be kept alive.
    """
    config = serving_config(read_config(config_file_of(config_file)), port)
    check_ports(config)
    with lock_run_dir(config.run_dir):
        return asyncio.run(_serve(config, console))


def serving_config(config: Config, port: int) -> Config:
    """The configuration without registered functions, because the user submits those first."""
    first = config.sources[0]
    functions = tuple(
        spec for spec in code_of(config.sources).values() if isinstance(spec, RewardFunction) and not spec.registered
    )
    serving = config.with_keys(
        data={"prompts": first.prompts, "sources": ()},
        reward={
            "functions": functions or (RewardFunction(builtin="exact_match"),),
            "registry": config.registry_dir,
        },
        run={"directory": config.registry_dir / "service"},
        services={"reward_port": port or config.services.reward_port},
    )
    return serving.model_copy(update={"name": _NAME})


async def _serve(config: Config, console: Console) -> int:
    interrupts = Interrupts()
    interrupts.install()
    if config.services.redis_url:
        await check_redis(config.services.redis_url, config)
    prepare(RunStart(config, config.run_dir, resume=True))
    # As on resume, keys of an earlier service are its own.
    job = Job(config, config.run_dir, resume=True, services=("reward",))
    logs = config.run_dir / SERVICES_DIR
    async with ProcessSupervisor(logs, config.services.max_restarts, lambda text: console.print(text)) as supervisor:
        interrupts.supervisor = supervisor
        redis, redis_url = await start_redis(config, config.run_dir, supervisor, is_new_run=False)
        try:
            write_supervisor_facts(config.run_dir, redis_url)
            await redis.delete(Keys(config.name).instances, Keys(config.name).events)
            supervisor.start(service_programs(job, redis_url))
            async with task_group(supervisor.watch(), _announce(config, redis, console)):
                await interrupts.requested.wait()
        finally:
            await supervisor.end(0.0, last=REDIS)
            await redis.aclose()
    return 0


async def _announce(config: Config, redis: Redis, console: Console) -> None:
    """Print the address of the service as soon as it is registered."""
    instance = await wait_for_instance(redis, Keys(config.name), "reward", START_TIMEOUT_S)
    url = api_url(instance.http, config)
    console.print(f"reward functions at {url}, documented at {url}/docs; Ctrl-C ends the service", highlight=False)
    console.print(f"submitted functions stay in {config.registry_dir}", highlight=False)
