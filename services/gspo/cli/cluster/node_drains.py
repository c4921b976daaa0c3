"""Moves processes from nodes that are drained, before those end.

A generator, reward replica, gateway or service of agents hands over its work, as for `gspo scale`. The learner writes a
checkpoint and is killed, since its SIGTERM would end the run. All start again in new bundles.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import grpc

from gspo.cli.cluster.layout import LEARNER_PROCESS
from gspo.cli.cluster.ray_calls import called
from gspo.cli.cluster.ray_child import RayChild
from gspo.cli.cluster.ray_cluster import RayCluster
from gspo.cli.cluster.reservations import Reservation
from gspo.cli.processes.exit_codes import NodeLostError
from gspo.cli.processes.supervisor import have_ended
from gspo.cli.rundir.open_run import open_run, read_instances
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.network.credentials import shared_token
from gspo.common.network.grpc_server import open_channel, token_metadata
from gspo.common.streams.keys import LEARNER
from gspo.common.tasks import task_group
from gspo_proto.learner_pb2 import CheckpointRequest
from gspo_proto.learner_pb2_grpc import LearnerStub

_LOOK_S = 1.0


class NodeDrains:
    """Moves processes while the run runs.

    Args:
        reservations: All of the run, now and later.
        children: By process, those that have started.
        say: Called with a line for the user.
    """

    def __init__(
        self,
        cluster: RayCluster,
        config: Config,
        reservations: Sequence[Reservation],
        children: Mapping[str, RayChild],
        say: Callable[[str], None],
    ) -> None:
        self._cluster, self._config, self._say = cluster, config, say
        self._reservations, self._children = reservations, children

    async def follow(self) -> None:
        """Look for drained nodes, without end.

        Raises:
            NodeLostError: It is the node of this process.
        """
        known: set[str] = set()
        async with task_group() as moves:
            while True:
                drained = await asyncio.to_thread(self._cluster.drained)
                for node_id in drained.keys() - known:
                    await self._leave(node_id, drained[node_id], moves)
                known |= drained.keys()
                await asyncio.sleep(_LOOK_S)

    async def _leave(self, node_id: str, left_s: float | None, moves: asyncio.TaskGroup) -> None:
        if node_id == self._cluster.own_id:
            raise NodeLostError("the node of this command is drained or has left the cluster, so the run ends")
        groups = await called(partial(self._cluster.groups_on, node_id))
        leaving = [reservation for reservation in self._reservations if reservation.group_id in groups]
        if not leaving:
            return
        nodes = {node.id: node.name for node in await called(self._cluster.nodes)}
        name = nodes.get(node_id, node_id[:6])
        names = ", ".join(process for reservation in leaving for process in reservation.demand.processes)
        when = "" if left_s is None else f" and ends in {left_s:.0f} s"
        self._say(f"node {name} is drained{when}: {names} hand over their work, and start again elsewhere")
        for reservation in leaving:
            moves.create_task(self._move(reservation, name))

    async def _move(self, reservation: Reservation, node: str) -> None:
        """End the processes of a reservation, and ask for other bundles; their supervisor starts them again."""
        async with reservation.lock:
            children = [self._children[name] for name in reservation.demand.processes if name in self._children]
            if any(child.name == LEARNER_PROCESS and child.is_running for child in children):
                await self._save()
            for child in children:
                is_learner = child.name == LEARNER_PROCESS
                child.leave(f"its node {node} is drained", signal.SIGKILL if is_learner else signal.SIGTERM)
            await have_ended(children, self._config.run.drain_timeout_s)
            if reservation in self._reservations:  # `gspo scale` has not ended it meanwhile
                await called(reservation.ask_again)

    async def _save(self) -> None:
        """Ask the learner for a checkpoint; without one it repeats the steps since the last one from its log."""
        with suppress(InputError, grpc.aio.AioRpcError):
            run = open_run(self._config.run_dir)
            learners = await read_instances(run.redis_url, run.config) if run.redis_url else []
            address = next((it.grpc for it in learners if it.service == LEARNER and it.grpc), "")
            if address:
                metadata, timeout_s = token_metadata(shared_token(run.config)), run.config.run.drain_timeout_s
                async with open_channel(address, run.config.services.tls) as channel:
                    await LearnerStub(channel).Checkpoint(CheckpointRequest(), timeout=timeout_s, metadata=metadata)
