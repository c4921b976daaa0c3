"""Where the processes of a run start when that is not one machine: the interface of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gspo.cli.processes.child import Program


class Nodes(Protocol):
    """The nodes of a run, with the processes of its engines on them."""

    async def watch(self) -> None:
        """Run until the cluster can no longer be used.

        Raises:
            NodeLostError: Why.
        """
        ...

    async def table(self) -> str:
        """A line for each process on each of its nodes."""
        ...

    async def add(self, processes: Sequence[str]) -> None:
        """Ask for places of further processes of known services.

        Raises:
            InputError: The cluster has too few.
        """
        ...

    async def remove(self, processes: Sequence[str]) -> None:
        """Give back the places of processes that have ended."""
        ...

    def placed(self, program: Program) -> Program:
        """The program as it starts on its nodes; one of this machine stays as it is."""
        ...

    async def check(self, process: str, command: tuple[str, ...]) -> tuple[int, str] | None:
        """Exit code and output of the check of a process on its node; None for a process of this machine.

        Raises:
            RunError: There is no answer in time.
        """
        ...
