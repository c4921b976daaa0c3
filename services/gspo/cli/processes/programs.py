"""The programs of a run on one machine, with their command lines and ports; supervisor.py starts them."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from gspo.cli.processes.child import Program
from gspo.cli.processes.nodes import Nodes
from gspo.cli.processes.placement import NO_GPUS, Placement
from gspo.cli.processes.preflight import Preflight
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.module_command import module_command
from gspo.common.network.credentials import check_credentials
from gspo.common.streams.keys import AGENTS, COORDINATOR, GATEWAY, GENERATION, LEARNER, REWARD, SERVICES

# The process that gets a configured port -> the key.
_PORTS = {"coordinator-0": "coordinator_port", "reward-0": "reward_port", "gateway-0": "gateway_port"}


@dataclass(frozen=True)
class Job:
    """The services of one supervisor.

    Attributes:
        services: Their names, in the order of their start.
        coordinator_options: Further options of the coordinator.
        placement: The GPUs of its processes.
        preflight: Processes that wait to become the services' first ones.
        leave_out: A logged step that the learner passes over.
        policies: The file in memory that the generators of this machine have in common.
        nodes: The nodes of a cluster, if the run has several; None starts everything on this machine.
    """

    config: Config
    run_dir: Path
    resume: bool = False
    services: tuple[str, ...] = SERVICES
    coordinator_options: tuple[str, ...] = ()
    placement: Placement = NO_GPUS
    preflight: Preflight = field(default_factory=Preflight)
    nodes: Nodes | None = None
    leave_out: int | None = None
    policies: Path | None = None

    @property
    def names(self) -> list[str]:
        """Names of the processes, Redis apart."""
        return process_names(self.config, self.services)


def services_of(config: Config) -> tuple[str, ...]:
    """The services of a run that trains; gateway and agents only where the configuration has them."""
    gateway = (GATEWAY,) if config.gateway.replicas else ()
    return (*SERVICES, *gateway, *((AGENTS,) if config.agent.is_started else ()))


def process_names(config: Config, services: Iterable[str]) -> list[str]:
    """Names of a run's processes, Redis apart."""
    replicas = {
        GENERATION: config.generation.replicas,
        REWARD: config.reward.replicas,
        GATEWAY: config.gateway.replicas,
    }
    return [f"{service}-{number}" for service in services for number in range(replicas.get(service, 1))]


def check_ports(config: Config) -> None:
    """Refuse ports that are in use or configured twice, and credentials that cannot work.

    Raises:
        InputError: Names the key.
    """
    services = config.services
    check_credentials(config, services.host, services.redis_url)
    taken: dict[int, str] = {}
    for key in _PORTS.values():
        if not (port := getattr(services, key)):
            continue
        if port in taken:
            raise InputError(f"services.{key}", f"{port} is services.{taken[port]} too", "Set another, or 0")
        taken[port] = key
        try:
            socket.create_server((services.host, port)).close()
        except OSError as error:
            raise InputError(
                f"services.{key}",
                f"{port} cannot be bound on {services.host} ({error.strerror})",
                "Set another port, or 0 for a free one",
            ) from error


def service_programs(job: Job, redis_url: str) -> list[Program]:
    """The program of every service process of the run."""
    ports = {name: getattr(job.config.services, key) for name, key in _PORTS.items()}
    programs = []
    for name in job.names:
        service = name.rpartition("-")[0]
        command = [*module_command(f"gspo.{service}")]
        command += ["--run-dir", str(job.run_dir), "--redis-url", redis_url]
        command += ["--name", name, "--http-port", str(ports.get(name, 0)), "--grpc-port", "0"]
        command += job.coordinator_options if service == COORDINATOR else ()
        command += ("--leave-out", str(job.leave_out)) if service == LEARNER and job.leave_out is not None else ()
        command += ("--policies", str(job.policies)) if service == GENERATION and job.policies and not job.nodes else ()
        program = Program(
            name, tuple(command), environment=job.placement.environment(name), preflight=job.preflight.take(name)
        )
        resume = {"command": (*command, "--resume")} if job.resume else {"restart_options": ("--resume",)}
        program = replace(program, **resume)
        programs.append(job.nodes.placed(program) if job.nodes else program)
    return programs
