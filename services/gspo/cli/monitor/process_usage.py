"""CPU and memory of a run's processes on this machine, with their child processes."""

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

    cpu: float | None = None
    memory_bytes: int | None = None

    def cells(self) -> list[str]:
        """('1.02 cores', '812 MiB'); dashes for a process of another machine, or before the second measurement."""
        memory = "-" if self.memory_bytes is None else f"{self.memory_bytes / 2**20:,.0f} MiB"
        return ["-" if self.cpu is None else f"{self.cpu:.2f} cores", memory]


class UsageMeter:
    """Measures CPU and memory of the run's processes on this machine, with their child processes.

    A process counts only if its command line has the name of the instance: the process id of another machine or
    container may belong to a foreign process here.
    """

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
            percent, memory, is_first = 0.0, 0, True
            for member in family:
                known = self._known.get(member.pid)
                try:
                    is_first = is_first and known is None
                    percent += (known or member).cpu_percent(None)
                    memory += member.memory_info().rss
                except psutil.Error:
                    continue  # it has just ended
                measured[member.pid] = known or member
            usage[instance.uid] = ProcessUsage(None if is_first else percent / 100, memory)
        self._known = measured
        return usage
