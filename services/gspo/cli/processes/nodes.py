"""Where the processes of a run start when that is not one machine: the interface of a cluster's scheduler."""

from __future__ import annotations

from typing import Protocol


class Nodes(Protocol):
    """The nodes of a run, with the processes of its engines on them."""

    def table(self) -> str:
        """A line for each process on each of its nodes."""
        ...

    def launcher(self, process: str) -> tuple[str, ...]:
        """The words that start a command as this process, on its nodes; none for a process of this machine."""
        ...

    def check_launcher(self, process: str) -> tuple[str, ...]:
        """The words that start the check of this process, once."""
        ...

    async def loss(self, process: str) -> str:
        """Why a process that has died cannot start again on its nodes; an empty text where it can.

        Raises:
            NodeLostError: It cannot, and the run cannot go on without it.
        """
        ...
