"""CPU and memory of the run's processes on this machine, those that they started included.

Only a process of this machine that was started under the instance's name: a process id of another machine, or of a
container, may be anybody's here. Neighbour: status.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from gspo.common.streams.instances import Instance


@dataclass(frozen=True)
class ProcessUsage:
    """Of one service's process and its children.

    Attributes:
        cpu: Cores, on average since the last look; None at the first.
        memory_bytes: Resident; what children share with their parent counts once for each.
    """

    cpu: float | None
    memory_bytes: int


class UsageMeter:
    """Looks at processes again and again."""

    def __init__(self) -> None:
        self._seen: dict[int, psutil.Process] = {}

    def look(self, members: Iterable[Instance]) -> dict[str, ProcessUsage]:
        """By uid of the instance; those that are not on this machine are left out."""
        found: dict[str, ProcessUsage] = {}
        seen: dict[int, psutil.Process] = {}
        for instance in members:
            try:
                process = self._seen.get(instance.pid) or psutil.Process(instance.pid)
                if instance.name not in process.cmdline():
                    continue
                family = [process, *process.children(recursive=True)]
            except psutil.Error:
                continue
            found[instance.uid] = self._sum(family, seen)
        self._seen = seen
        return found

    def _sum(self, family: Iterable[psutil.Process], seen: dict[int, psutil.Process]) -> ProcessUsage:
        percent, memory, is_first = 0.0, 0, True
        for process in family:
            known = self._seen.get(process.pid)
            try:
                is_first = is_first and known is None
                percent += (known or process).cpu_percent(None)
                memory += process.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
            seen[process.pid] = known or process
        return ProcessUsage(None if is_first else percent / 100, memory)
