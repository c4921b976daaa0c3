"""Which programs a run on one machine consists of, with their command lines.

It starts nothing: supervisor.py does. A test may hand another lineup to a session.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from gspo.cli.processes.child import Program
from gspo.cli.processes.placement import NO_GPUS, Placement
from gspo.cli.processes.preflight import Preflight
from gspo.cli.processes.redis_server import redis_command, write_password
from gspo.common.config.schema import Config
from gspo.common.network.credentials import EVERY_INTERFACE, is_loopback, redis_password
from gspo.common.streams.keys import LEARNER, SERVICES

LOOPBACK = "127.0.0.1"
REDIS = "redis"


@dataclass(frozen=True)
class Job:
    """What one supervisor runs.

    Attributes:
        services: Those that take part, in order.
        coordinator_options: Further words on the coordinator's command line.
        placement: The GPUs of its processes.
        first: Processes that wait to become the services' first ones.
    """

    config: Config
    run_dir: Path
    resume: bool = False
    services: tuple[str, ...] = SERVICES
    coordinator_options: tuple[str, ...] = ()
    placement: Placement = NO_GPUS
    first: Preflight = field(default_factory=Preflight)

    @property
    def has_external_learner(self) -> bool:
        """Whether a learner takes part that the user starts."""
        return LEARNER in self.services and self.config.learner.ranks == 0

    @property
    def names(self) -> list[str]:
        """Names of the processes, Redis apart."""
        return process_names(self.config, self.services)


def process_names(config: Config, services: Iterable[str]) -> list[str]:
    """Names of a run's processes, Redis apart."""
    replicas = {"generation": config.generation.replicas, "reward": config.reward.replicas}
    return [f"{service}-{number}" for service in services for number in range(replicas.get(service, 1))]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def redis_program(config: Config, run_dir: Path, port: int) -> Program:
    """The Redis of this run, with its data in the run directory; it binds what the services bind."""
    folder = run_dir / REDIS
    folder.mkdir(parents=True, exist_ok=True)
    host, password = config.services.host, redis_password(config)
    hosts = (LOOPBACK,) if is_loopback(host) else (host,) if host in EVERY_INTERFACE else (LOOPBACK, host)
    secrets = write_password(folder, password) if password else None
    return Program(REDIS, tuple(redis_command(hosts, port, folder, secrets)))


def service_programs(job: Job, redis_url: str) -> list[Program]:
    """Every service process of the run, but for a learner that the user starts."""
    names = [name for name in job.names if not (name.startswith(LEARNER) and job.has_external_learner)]
    return [_service_program(job, name, redis_url) for name in names]


def external_learner_command(job: Job, redis_url: str) -> str:
    """How to start the learner on several hosts, for a user to complete."""
    variables = "".join(f"{name}={value} " for name, value in job.placement.free_gpu_environment().items())
    return (
        "learner.ranks is 0, so start the learner, on every host of it with its own --node-rank, on this one 0: "
        f"{variables}torchrun --nnodes HOSTS --node-rank N --nproc-per-node RANKS --master-addr THIS_HOST "
        f"--master-port 29500 -m gspo.learner --run-dir {job.run_dir.resolve()} --redis-url {redis_url}"
    )


def _service_program(job: Job, name: str, redis_url: str) -> Program:
    service = name.rsplit("-", 1)[0]
    # A port that was chosen is the first replica's.
    ports = {"coordinator-0": job.config.services.coordinator_port, "reward-0": job.config.services.reward_port}
    command = [sys.executable, "-m", f"gspo.{service}", "--run-dir", str(job.run_dir), "--redis-url", redis_url]
    command += ["--name", name, "--http-port", str(ports.get(name, 0)), "--grpc-port", "0"]
    if service == "coordinator":
        command += job.coordinator_options
    program = Program(name, tuple(command), environment=job.placement.environment(name), first=job.first.take(name))
    if job.resume:
        return replace(program, command=(*command, "--resume"))
    return replace(program, again=("--resume",))
