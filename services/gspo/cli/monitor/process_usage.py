"""CPU and memory of the run's processes on this machine, with their child processes.

A process counts only if its command line has the name of the instance: the process id of another machine or container
may belong to a foreign process here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from gspo.common.streams.instances import Instance


@dataclass(frozen=True)
class ProcessUsage:
    """The use of one service's process and its children.

    Attributes:
        cpu: Cores, on average since the last measurement; None at the first.
        memory_bytes: Resident; memory that children share with their parent counts once for each.
    """

    cpu: float | None
    memory_bytes: int


class UsageMeter:
    """Measures processes again and again."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def measure(self, instances: Iterable[Instance]) -> dict[str, ProcessUsage]:
        """The use by uid of the instance, without instances of other machines."""
        usage: dict[str, ProcessUsage] = {}
        measured: dict[int, psutil.Process] = {}
        for instance in instances:
            try:
                process = self._known.get(instance.pid) or psutil.Process(instance.pid)
                if instance.name not in process.cmdline():
                    continue
                family = [process, *process.children(recursive=True)]
            except psutil.Error:
                continue
            usage[instance.uid] = self._sum(family, measured)
        self._known = measured
        return usage

    def _sum(self, family: Iterable[psutil.Process], measured: dict[int, psutil.Process]) -> ProcessUsage:
        percent, memory, is_first = 0.0, 0, True
        for process in family:
            known = self._known.get(process.pid)
            try:
                is_first = is_first and known is None
                percent += (known or process).cpu_percent(None)
                memory += process.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
            measured[process.pid] = known or process
        return ProcessUsage(None if is_first else percent / 100, memory)
