"""Bytes of a host's own memory in a run on GPUs, by part: of its ranks and its generators."""

from dataclasses import dataclass

from gspo.common.config.schema import Config
from gspo.common.host.machine import GIB, gpus_of_engine
from gspo.common.model.trained_parameters import TrainedSize
from gspo.common.planning.memory import learner_host_bytes, published_bytes, staged_bytes

# Interpreter, libraries and engine of four services, before the first weight.
PROCESSES_GIB = 5.0
# Assumed of a host that is not known, for each byte of its GPUs; the machines of clouds have 1.5 to 3.
HOST_SHARE = 2


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one host.

    Attributes:
        ranks: What its ranks offload, on shared GPUs all their states; or the model while it loads, if that is more.
            The first rank's host also has an earlier version of the trained weights.
        published: The layers of policies that its ranks keep for pushes.
        staged: Policies that its generators keep: the served and the next one, and one more for those that are behind.
        processes: Programs and libraries.
    """

    ranks: float
    published: float
    staged: float
    processes: float

    @property
    def total(self) -> float:
        return self.ranks + self.published + self.staged + self.processes


def host_memory(config: Config, size: TrainedSize, *, ranks: int, ranks_here: int, generators_here: int) -> HostMemory:
    """The memory of a host with so many of the ranks, the first one included, and so many generators."""
    has_ranks = ranks_here > 0
    return HostMemory(
        ranks=learner_host_bytes(config, size, ranks, ranks_here, on_gpu=True) if has_ranks else 0.0,
        published=published_bytes(config, size.num_parameters, ranks, ranks_here),
        staged=staged_bytes(config, size.num_parameters, generators_here),
        processes=PROCESSES_GIB * GIB,
    )


def generators_a_host(config: Config, num_gpus: int, gpus_per_host: int) -> int:
    """Generators of a host that has some: all of them on one host, else as many as fit beside no rank."""
    replicas = config.generation.replicas
    if num_gpus <= gpus_per_host:
        return replicas
    return min(replicas, gpus_per_host // gpus_of_engine(config.generation.engine))


def fullest_host(config: Config, size: TrainedSize, ranks: int, num_gpus: int, gpus_per_host: int) -> HostMemory:
    """The memory of the host that needs the most.

    One host has everything; of several, some have ranks alone and others generators.
    """
    generators_here = generators_a_host(config, num_gpus, gpus_per_host)
    if num_gpus <= gpus_per_host:
        return host_memory(config, size, ranks=ranks, ranks_here=ranks, generators_here=generators_here)
    hosts = (
        host_memory(config, size, ranks=ranks, ranks_here=min(ranks, gpus_per_host), generators_here=0),
        host_memory(config, size, ranks=ranks, ranks_here=0, generators_here=generators_here),
    )
    return max(hosts, key=lambda host: host.total)
