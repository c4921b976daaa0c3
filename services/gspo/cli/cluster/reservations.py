"""The places of a run on a Ray cluster: a placement group for each process, and an actor in each of its bundles.

Ray gives a bundle on another node if its node is lost. An actor that has died is made again in the same bundle.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from gspo.cli.cluster.layout import LEARNER_PROCESS, Layout, Node, lay_out
from gspo.cli.cluster.node_survey import gpus_of
from gspo.cli.cluster.process_actor import ProcessActor
from gspo.cli.cluster.ray_calls import called
from gspo.cli.cluster.ray_cluster import ClusterNode, RayCluster
from gspo.cli.processes.exit_codes import RunError
from gspo.cli.processes.placement import Placement
from gspo.common.config.schema import Config
from gspo.common.host.machine import Gpu, gpus_of_engine
from gspo.common.streams.keys import COORDINATOR, GENERATION

# Calls that an actor answers at a time; a wait for the end of a process takes one.
_THREADS = 64
# Actors that die at their start, before the run gives up.
_MOST_STARTS = 3


@dataclass(frozen=True)
class Demand:
    """Bundles that are asked for together.

    Attributes:
        processes: Those that start in them; the first one has all of them.
        bundles: By bundle, units of each resource.
        strategy: As Ray calls it.
    """

    processes: tuple[str, ...]
    bundles: tuple[Mapping[str, float], ...]
    strategy: str = "PACK"

    @property
    def resource(self) -> str:
        """The resource that is scarce."""
        return "GPU" if any("GPU" in bundle for bundle in self.bundles) else "CPU"

    def in_words(self) -> str:
        """For example "2 x 8 GPU for learner-0"."""
        number = self.bundles[0][self.resource]
        times = f"{len(self.bundles)} x " if len(self.bundles) > 1 else ""
        return f"{times}{number:g} {self.resource} for {', '.join(self.processes)}"


def demands(config: Config, layout: Layout, processes: Sequence[str]) -> list[Demand]:
    """The bundles of every process that is not beside the driver, the learner's first.

    A rank or a generator has its GPUs, or one CPU of Ray's count where no node has GPUs. Other processes have one CPU.
    """
    on_gpus = any(placement.gpus for placement in layout.placements.values())
    ranks = {"GPU": float(layout.ranks_a_node)} if on_gpus else {}
    elsewhere = [name for name in processes if name != LEARNER_PROCESS and not name.startswith(COORDINATOR)]
    shared = [name for name in elsewhere if name.startswith(GENERATION) and config.placement == "shared"]
    # Ranks stay together for the sake of their exchange. On nodes without GPUs they are apart.
    bundles = ({**ranks, "CPU": 1.0},) * len(layout.nodes[LEARNER_PROCESS])
    asked = [Demand((LEARNER_PROCESS, *shared), bundles, "PACK" if on_gpus else "SPREAD")]
    engine = {"GPU": float(gpus_of_engine(config.generation.engine))} if on_gpus else {}
    return asked + [
        Demand((name,), ({**(engine if name.startswith(GENERATION) else {}), "CPU": 1.0},))
        for name in elsewhere
        if name not in shared
    ]


@dataclass(frozen=True)
class Seat:
    """A place of a process: an actor on a node, and the GPUs and variables of the process there."""

    actor: Any
    node: ClusterNode
    gpus: tuple[Gpu, ...]
    variables: Mapping[str, str]


class Reservation:
    """The bundles of one demand, with an actor in each.

    Args:
        config: The run's; its learner has the ranks of all nodes.

    Attributes:
        lock: Bundles change under it alone.
    """

    def __init__(self, cluster: RayCluster, config: Config, demand: Demand) -> None:
        self._cluster, self._config, self.demand = cluster, config, demand
        self.name = f"gspo:{config.name}:{demand.processes[0]}"
        self._group = self._new_group()
        self._actors: dict[int, Any] = {}
        self.lock = asyncio.Lock()

    def _new_group(self) -> Any:
        bundles = [dict(bundle) for bundle in self.demand.bundles]
        return self._cluster.ray.util.placement_group(bundles, strategy=self.demand.strategy, name=self.name)

    @property
    def group_id(self) -> str:
        """As Ray's table of placement groups has it."""
        return str(self._group.id.hex())

    def is_placed(self, timeout_s: float) -> bool:
        """Whether the cluster has given all bundles, within so many seconds."""
        return bool(self._group.wait(timeout_s))

    async def seats(self, process: str) -> list[Seat]:
        """The places of a process, with actors. It waits for lost bundles without limit.

        Raises:
            RunError: Actors die at their start.
            InputError: A node that has joined is not fit.
        """
        async with self.lock:
            work = (self._facts(at) for at in range(len(self.demand.bundles)))
            facts = await asyncio.gather(*work)
        nodes = [await called(partial(self._cluster.node, str(of_actor["node_id"]))) for of_actor in facts]
        of_bundles = [gpus_of(node.facts, of_actor["gpus"]) for node, of_actor in zip(nodes, facts, strict=True)]
        placements = self._placements(of_bundles)
        ranks = {"PET_NNODES": len(nodes), "PET_MASTER_ADDR": nodes[0].address, "PET_MASTER_PORT": facts[0]["port"]}
        seats = []
        for at, node in enumerate(nodes):
            if process == self.demand.processes[0] or process in placements[at].gpus:
                variables = placements[at].environment(process)
                if process == LEARNER_PROCESS and len(nodes) > 1:
                    # As torchrun reads them, which starts the ranks of each node.
                    variables |= {name: str(value) for name, value in {**ranks, "PET_NODE_RANK": at}.items()}
                seats.append(Seat(facts[at]["actor"], node, placements[at].gpus.get(process, ()), variables))
        return seats

    def _placements(self, of_bundles: Sequence[tuple[Gpu, ...]]) -> list[Placement]:
        """By bundle, the GPUs of its processes; bundles are laid out as nodes."""
        if len(self.demand.processes) == 1:
            return [Placement({self.demand.processes[0]: gpus} if gpus else {}) for gpus in of_bundles]
        layout = lay_out(self._config, [Node(str(at), gpus) for at, gpus in enumerate(of_bundles)])
        return [layout.placements[str(at)] for at in range(len(of_bundles))]

    async def _facts(self, at: int) -> dict[str, Any]:
        """The actor in a bundle with its facts; it is started if there is none."""
        ray = self._cluster.ray
        for _ in range(_MOST_STARTS):
            if at not in self._actors:
                while not await asyncio.to_thread(self._cluster.answers):
                    await asyncio.sleep(1.0)
                self._actors[at] = await called(partial(self._new_actor, at))
            actor = self._actors[at]
            try:
                facts = dict(await actor.facts.remote())
                if any(process.startswith(GENERATION) for process in self.demand.processes):
                    await self._share_policies(actor, self._cluster.holders[str(facts["node_id"])])
            except ray.exceptions.RayActorError as error:
                self.drop(actor)
                reason = error
                continue
            if facts["version"] != version("gspo"):
                raise RunError(
                    f"node {facts['node_id'][:6]} has gspo {facts['version']}, and the run {version('gspo')}"
                )
            return {**facts, "actor": actor}
        raise RunError(f"{self.demand.in_words()}: actors of Ray die at their start, the last one of this: {reason}")

    async def _share_policies(self, actor: Any, holders: list[Any]) -> None:
        """Let a new actor have the policies of another one on its node: a push is then one for all generators there."""
        if actor in holders:
            return
        earlier = [*holders]
        holders.append(actor)
        for other in earlier:
            try:
                path = await other.policies.remote()
            except self._cluster.errors.RayActorError:
                holders.remove(other)
                continue
            if await actor.share_policies.remote(path):
                return

    def _new_actor(self, at: int) -> Any:
        ray = self._cluster.ray
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, at)
        options = {"num_cpus": 0, "num_gpus": self.demand.bundles[at].get("GPU", 0), "max_restarts": 0}
        actor = ray.remote(ProcessActor).options(**options, max_concurrency=_THREADS, scheduling_strategy=strategy)
        return actor.remote(dict(os.environ))

    def ask_again(self) -> None:
        """Give everything back, and ask for as much: Ray gives nothing on a node that is drained."""
        self.give_back()
        self._group = self._new_group()

    def drop(self, actor: Any) -> None:
        """Kill an actor with its processes; the next call of `seats` makes another."""
        for at, known in list(self._actors.items()):
            if known is actor:
                del self._actors[at]
        with suppress(Exception):
            self._cluster.ray.kill(actor)

    def give_back(self) -> None:
        """Kill the actors, and leave the bundles to others."""
        for actor in list(self._actors.values()):
            self.drop(actor)
        if not self._cluster.answers():
            return  # the call would wait for the head
        with suppress(Exception):
            self._cluster.ray.util.remove_placement_group(self._group)
