"""Assigns the processes of a run to the nodes of a cluster, by pure functions.

The learner's ranks fill nodes from the first on, equally many on each. Generators take the free GPUs. A rank takes a
GPU, or a whole node where no node has GPUs; there, generators take the nodes with the fewest processes. Under
`placement: shared` generators take the GPUs of the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gspo.cli.processes.placement import Placement, place
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import Gpu, gpus_of_engine
from gspo.common.streams.keys import GENERATION, LEARNER

LEARNER_PROCESS = f"{LEARNER}-0"


@dataclass(frozen=True)
class Node:
    """A node, and the GPUs that the run may have there."""

    name: str
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The nodes of every process of the engines; all other processes are on the first node.

    Attributes:
        nodes: By process, such as "generation-0"; only the learner may have several.
        placements: By node, the GPUs of its processes.
        ranks_a_node: Ranks of the learner on each of its nodes.
    """

    nodes: Mapping[str, tuple[str, ...]]
    placements: Mapping[str, Placement]
    ranks_a_node: int


def lay_out(config: Config, nodes: Sequence[Node]) -> Layout:
    """Assign the learner and every generator to nodes, and to GPUs there.

    Raises:
    InputError: The cluster has too few nodes or GPUs, a node's GPUs cannot hold what they get, or a key does not
        suit several nodes.
    """
    ranks = config.learner.ranks
    on_gpus = any(node.gpus for node in nodes)
    idle = {node.name: len(node.gpus) if on_gpus else 1 for node in nodes}
    of_learner = _learner_nodes(config, idle, on_gpus=on_gpus)
    ranks_a_node = ranks // len(of_learner)
    for name in of_learner:
        idle[name] -= ranks_a_node
    free = dict.fromkeys(of_learner, ranks_a_node) if config.placement == "shared" else idle
    generators = [f"{GENERATION}-{number}" for number in range(config.generation.replicas)]
    places: dict[str, tuple[str, ...]] = {
        name: (_generator_node(config, free, on_gpus=on_gpus),) for name in generators
    }
    places[LEARNER_PROCESS] = of_learner
    local = config.with_keys(learner={"ranks": ranks_a_node})
    placements = {
        node.name: place(local, [process for process, where in places.items() if node.name in where], node.gpus)
        for node in nodes
    }
    return Layout(places, placements, ranks_a_node)


def _learner_nodes(config: Config, free: Mapping[str, int], *, on_gpus: bool) -> tuple[str, ...]:
    """The fewest of the first nodes that hold all ranks, equally many on each, and each sequence group on one node."""
    ranks, group = config.learner.ranks, config.learner.sequence_ranks
    names = [name for name, slots in free.items() if slots]
    for number in range(1, len(names) + 1):
        if ranks % (number * group) == 0 and all(free[name] >= ranks // number for name in names[:number]):
            return tuple(names[:number])
    unit = "GPUs" if on_gpus else "nodes without GPUs, of which each takes one rank"
    raise InputError(
        "learner.ranks",
        f"{ranks} ranks, equally many on each node{f' in groups of {group}' if group > 1 else ''}, do not fit: "
        f"there are "
        f"{_counted(free) if on_gpus else len(free)} {unit}",
        "Lower it, or take more nodes, or nodes with more GPUs",
    )


def _generator_node(config: Config, free: dict[str, int], *, on_gpus: bool) -> str:
    """The node with the most free GPUs for the next generator, whose GPUs are taken from `free`."""
    needed = gpus_of_engine(config.generation.engine) if on_gpus else 1
    node = max(free, key=lambda name: free[name])  # the first of equals
    if on_gpus and free[node] < needed:
        raise InputError(
            "generation.replicas",
            f"{config.generation.replicas} generators of {needed} GPU(s), each on one node, do not fit "
            f"{'on the GPUs of' if config.placement == 'shared' else 'beside'} {config.learner.ranks} rank(s) "
            f"(learner.ranks): free on the nodes are {_counted(free)} GPUs",
            "Lower it, or take more nodes, or nodes with more GPUs",
        )
    free[node] -= needed
    return node


def _counted(free: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {slots}" for name, slots in free.items())
