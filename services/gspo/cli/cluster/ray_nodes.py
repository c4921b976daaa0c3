"""The nodes of a run on a Ray cluster, as preflight and supervisor need them: places, checks, children."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gspo.cli.cluster.layout import LEARNER_PROCESS
from gspo.cli.cluster.node_drains import NodeDrains
from gspo.cli.cluster.ray_calls import called
from gspo.cli.cluster.ray_child import RayChild
from gspo.cli.cluster.ray_cluster import RayCluster
from gspo.cli.cluster.reservations import Demand, Reservation, Seat
from gspo.cli.processes.child import Child, Program
from gspo.cli.processes.exit_codes import NodeLostError, RunError
from gspo.cli.processes.placement import NO_GPUS, Placement, aligned
from gspo.cli.processes.planned_memory import COLUMNS, planned_memory, read_planned_model
from gspo.cli.processes.preflight import CHECK_TIMEOUT_S
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.machine import Gpu
from gspo.common.tasks import task_group

# A line about a wait for bundles, at most so often; and a look at the cluster meanwhile.
_SAY_S, _LOOK_S = 60.0, 5.0


class RayNodes:
    """The places of every process that is not beside this one.

    Args:
        config: The run's.
        say: Called with a line for the user.
    """

    def __init__(
        self, cluster: RayCluster, config: Config, asked: Sequence[Demand], say: Callable[[str], None]
    ) -> None:
        self._cluster, self._config, self._say = cluster, config, say
        self._reservations = [Reservation(cluster, config, demand) for demand in asked]
        self._of_process = {name: it for it in self._reservations for name in it.demand.processes}
        self._waiting: dict[str, float] = {}
        self._children: dict[str, RayChild] = {}
        self._drains = NodeDrains(cluster, config, self._reservations, self._children, say)

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_error: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """End all actors with their processes, and leave the bundles to others."""
        for reservation in self._reservations:
            reservation.give_back()

    def await_bundles(self) -> None:
        """Wait until the cluster has given everything, and say who has it meanwhile."""
        for reservation in self._reservations:
            last_line_s = -_SAY_S
            while not reservation.is_placed(_LOOK_S):
                self._cluster.check_head()
                if time.monotonic() - last_line_s > _SAY_S:
                    last_line_s = time.monotonic()
                    self._say(self._wait_in_words(reservation.demand))

    def _wait_in_words(self, demand: Demand) -> str:
        own = [reservation.name for reservation in self._reservations]
        users = self._cluster.users_of(demand.resource, own)
        return f"waiting for {demand.in_words()} ({users})"

    # Of the interface Nodes

    async def watch(self) -> None:
        """Look after the head of the cluster and drained nodes, without end.

        Raises:
            NodeLostError: The head does not answer, or the node of this process is drained.
        """
        async with task_group(self._drains.follow()):
            while True:
                await asyncio.to_thread(self._cluster.check_head)
                await asyncio.sleep(1.0)

    async def table(self) -> str:
        """A line for each process on each of its nodes, with its GPUs and planned memory."""
        seats = {process: await it.seats(process) for process, it in self._of_process.items()}
        return await asyncio.to_thread(self._table, seats)

    def _table(self, seats_of: Mapping[str, Sequence[Seat]]) -> str:
        config, model = self._config, read_planned_model(self._config)
        on_node: dict[str, dict[str, tuple[Gpu, ...]]] = {}
        rows: list[tuple[str, ...]] = []
        for process, seats in seats_of.items():
            for seat in seats:
                on_node.setdefault(seat.node.name, {})[process] = seat.gpus
        on_gpus = any(gpus for of_node in on_node.values() for gpus in of_node.values())
        for node, gpus in on_node.items():
            placement = Placement({name: them for name, them in gpus.items() if them}) if on_gpus else NO_GPUS
            memory = planned_memory(config, placement, list(gpus), model) if model else {}
            for process, them in gpus.items():
                # The free memory of a node without GPUs is not this machine's.
                cells = memory[process].cells()[: None if on_gpus else -1] if process in memory else ()
                rows.append((process, node, *([",".join(g.name for g in them) or "-"] if on_gpus else []), *cells))
        columns = COLUMNS if on_gpus else COLUMNS[:-1]
        head = ("process", "node", *(["GPU"] if on_gpus else []), *(columns if model else ()))
        note = f"\n(planned GiB {'on each GPU' if on_gpus else 'of host memory'})" if model else ""
        return f"{aligned([head, *sorted(rows)])}{note}"

    async def add(self, processes: Sequence[str]) -> None:
        """Ask for places as those of the first process of their service; nodes that have joined are used too.

        Raises:
            InputError: The cluster has too few units free.
        """
        of_first = self._of_process[f"{processes[0].rpartition('-')[0]}-0"].demand
        asked = [replace(of_first, processes=(process,)) for process in processes]
        needed = of_first.bundles[0][of_first.resource] * len(asked)
        if needed > await called(partial(self._cluster.num_free, of_first.resource)):
            own = [it.name for it in self._reservations]
            users = await called(partial(self._cluster.users_of, of_first.resource, own))
            raise InputError(
                processes[-1],
                f"{len(asked)} more need {needed:g} {of_first.resource}, and {users} (others than this run)",
                "Take fewer, or start further nodes",
            )
        for demand in asked:
            reservation = Reservation(self._cluster, self._config, demand)
            self._reservations.append(reservation)
            self._of_process[demand.processes[0]] = reservation

    async def remove(self, processes: Sequence[str]) -> None:
        """Give back the places of processes that have ended, each of which has its own."""
        for process in processes:
            reservation = self._of_process.pop(process)
            self._reservations.remove(reservation)
            async with reservation.lock:
                await called(reservation.give_back)

    def placed(self, program: Program) -> Program:
        """The program with its places on the cluster; a process beside the driver stays as it is."""
        return replace(program, place=self._child) if program.name in self._of_process else program

    def _child(self, program: Program, log_dir: Path, variables: Mapping[str, str]) -> Child:
        error = self._cluster.errors.RayError
        child = RayChild(program, log_dir, variables, self._awaited_seats, self._lost, error)
        self._children[program.name] = child
        return child

    async def check(self, process: str, command: tuple[str, ...]) -> tuple[int, str] | None:
        """Exit code and output of a check at the process's first place; None for a process beside the driver.

        Raises:
            RunError: It took longer than CHECK_TIMEOUT_S, or its node was lost.
        """
        if process not in self._of_process:
            return None
        seats = await self._of_process[process].seats(process)
        variables = dict(seats[0].variables)
        if process == LEARNER_PROCESS and len(seats) > 1:
            # The check has no ranks beside it, but counts them.
            ranks = self._config.learner.ranks
            sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks // len(seats), "RANK": 0, "LOCAL_RANK": 0}
            variables |= {name: str(size) for name, size in sizes.items()}
        try:
            code, words = await seats[0].actor.check.remote(command, variables, CHECK_TIMEOUT_S)
        except self._cluster.errors.RayError as error:
            raise RunError(f"the check of {process} has lost its node: {error}") from error
        if code is None:
            raise RunError(f"the check of {process} took longer than {CHECK_TIMEOUT_S:g} s")
        return int(code), str(words)

    # Places during the run

    async def _awaited_seats(self, process: str) -> Sequence[Seat]:
        """The places of a process; a lost one is asked for until the run ends, while others of its service work.

        Raises:
            NodeLostError: No process of the service has had a place for run.start_timeout_s.
        """
        reservation = self._of_process[process]
        asking = asyncio.create_task(self._asked(reservation, process))
        since = time.monotonic()
        last_line_s = since - _SAY_S + _LOOK_S
        self._waiting[process] = since
        try:
            while not (await asyncio.wait({asking}, timeout=1.0))[0]:
                self._check_service(process)
                if time.monotonic() - last_line_s > _SAY_S:
                    last_line_s = time.monotonic()
                    self._say(await called(partial(self._wait_in_words, reservation.demand)))
            return await asking
        finally:
            asking.cancel()
            del self._waiting[process]

    async def _asked(self, reservation: Reservation, process: str) -> Sequence[Seat]:
        """The places of a process; again and again while a node is not fit, such as one that has come back empty."""
        before = ""
        while True:
            try:
                return await reservation.seats(process)
            except (InputError, RunError) as error:
                if str(error) != before:
                    self._say(f"{process} cannot start there, and waits: {error}")
                before = str(error)
                await asyncio.sleep(_LOOK_S)

    def _check_service(self, process: str) -> None:
        service = process.rpartition("-")[0]
        timeout_s = self._config.run.start_timeout_s
        all_of_it = [name for name in self._of_process if name.rpartition("-")[0] == service]
        since = [self._waiting.get(name, time.monotonic()) for name in all_of_it]
        if time.monotonic() - max(since) > timeout_s:
            demand = self._of_process[process].demand
            raise NodeLostError(
                f"the cluster has not given {demand.in_words()} again within run.start_timeout_s ({timeout_s:g} s), "
                f"and the run cannot go on without {service}. Resume it when the cluster has that"
            )

    def _lost(self, seat: Seat) -> str:
        """Why an actor is gone."""
        for reservation in self._reservations:
            reservation.drop(seat.actor)
        return f"its actor on {seat.node.name} has died, or the whole node"
