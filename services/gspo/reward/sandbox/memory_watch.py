"""The memory of sandboxes with several processes, measured from outside: of the processes, and of the kernel for them.

The kernel limits each process by itself (inside/confine.py), and charges the buffers of sockets to none. Other memory
of the kernel is looked at once the machine has more of it (inside/kernel_memory.py). A sandbox with more than it may
have is ended. It may have more between two measurements.
"""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from gspo.reward.sandbox.inside.kernel_memory import descriptor_bytes, shared_mappings

_MIB = 2**20
# Processes start slowly; sockets can fill a gigabyte a second.
_PROCESSES_EVERY_S, _SOCKETS_EVERY_S = 0.2, 0.02
# At most this share of a core is spent on measurements.
_MAX_SHARE = 0.1
# Of all sockets of a sandbox together.
SOCKET_BYTES = 64 * _MIB
# A socket of TCP has more only while bytes wait in it, which is looked at from the given number of sockets on.
_TCP_BYTES, _FEW_TCP_SOCKETS = 128 * 1024, 16
# A descriptor holds kernel memory that no process is charged for, such as half of a small pipe.
_DESCRIPTOR_BYTES = 4096
# Of all watches and locks of a sandbox together; they are counted after the machine's memory of the kernel has grown.
WATCH_BYTES, _GROWTH_BYTES = 32 * _MIB, 16 * _MIB
_KERNEL_MEMORY = ("SUnreclaim", "Shmem")
_KERNEL_BUFFERS = ("/proc/sys/net/core/wmem_default", "/proc/sys/net/core/rmem_default")
log = structlog.get_logger()


@dataclass(frozen=True)
class _Watched:
    max_bytes: int
    end: Callable[[str], None]
    has_network: bool


class MemoryWatch:
    """Measures sandboxes while there are any, and ends those with too much memory."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._task: asyncio.Task[None] | None = None
        self._kernel_bytes = _kernel_bytes()  # of the machine, when it was looked at
        self._urgent_s = 0.0  # of the present round, which a growing machine is worth

    def add(self, pid: int, memory_mb: int, end: Callable[[str], None], *, has_network: bool) -> None:
        """Watch a sandbox until `remove`.

        Args:
            pid: Its first process; those below it are measured with it.
            memory_mb: Memory of its processes together, in MiB.
            end: Ends it; called with the reason in words.
            has_network: Whether it has a network namespace, whose sockets are its own.
        """
        self._watched[pid] = _Watched(memory_mb * _MIB, end, has_network)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def remove(self, pid: int) -> None:
        self._watched.pop(pid, None)

    async def _run(self) -> None:
        below: dict[int, list[int]] = {}
        next_full_s = 0.0
        while self._watched:
            began_s, self._urgent_s = time.monotonic(), 0.0
            try:
                if began_s >= next_full_s:
                    next_full_s = began_s + _PROCESSES_EVERY_S
                    below = await asyncio.to_thread(processes_below, list(self._watched))
                    await self._measure_processes(below)
                networks = {pid for pid, watched in self._watched.items() if watched.has_network}
                inside = {pid: pids[0] for pid, pids in below.items() if pid in networks and pids}
                measured = await asyncio.to_thread(_sockets_below, inside)
                self._end_over(measured, "had more than {} MiB in the buffers of its sockets", SOCKET_BYTES)
            except OSError as error:  # this process has no descriptor free for the moment
                log.warning("sandboxes_not_measured", reason=str(error))
            took_s = time.monotonic() - began_s - self._urgent_s
            await asyncio.sleep(max(_SOCKETS_EVERY_S, took_s / _MAX_SHARE))

    async def _measure_processes(self, below: Mapping[int, Sequence[int]]) -> None:
        sizes = await asyncio.to_thread(_each, below, memory_of)
        kernel_bytes = _kernel_bytes()
        self._kernel_bytes = min(self._kernel_bytes, kernel_bytes)
        if kernel_bytes > self._kernel_bytes + _GROWTH_BYTES:
            self._kernel_bytes, began_s = kernel_bytes, time.monotonic()
            watches = await asyncio.to_thread(_each, below, partial(descriptor_bytes, most=WATCH_BYTES))
            self._end_over(watches, "had more than {} MiB of watches, and of locks on files", WATCH_BYTES)
            shared = await asyncio.to_thread(_each, below, _shared_of)
            sizes = {pid: size + shared[pid] for pid, size in sizes.items()}
            self._urgent_s = time.monotonic() - began_s
        self._end_over(sizes, "had more memory than its {} MiB")

    def _end_over(self, measured: dict[int, int], why: str, most: int | None = None) -> None:
        for pid, num_bytes in measured.items():
            if (watched := self._watched.get(pid)) is None:
                continue
            limit = most or watched.max_bytes
            if num_bytes > limit:
                log.warning("sandbox_over_memory", memory_mb=num_bytes // _MIB, limit_mb=limit // _MIB)
                watched.end(why.format(limit // _MIB))


def processes_below(roots: Collection[int]) -> dict[int, list[int]]:
    """The processes below each of some, without it."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone
        if name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
    below: dict[int, list[int]] = {root: [] for root in roots}
    for pid in parents:
        place = parents[pid]
        while place and place not in below:
            place = parents.get(place, 0)
        if place and pid not in below:
            below[place].append(pid)
    return below


def _each(below: Mapping[int, Sequence[int]], measure: Callable[[Sequence[int]], int]) -> dict[int, int]:
    return {root: measure((root, *pids)) for root, pids in below.items()}


def memory_of(pids: Sequence[int]) -> int:
    """Bytes of memory of some processes.

    Counted are their page tables, their descriptors, and pages that they have written or share, once a process. Pages
    of files are not. A process that ends meanwhile counts as nothing.
    """
    return sum(map(_memory_of, pids))


def _shared_of(pids: Sequence[int]) -> int:
    """Bytes of the pieces of shared memory that these have mapped, each at its largest."""
    sizes: dict[tuple[bytes, bytes], int] = {}
    for pid in pids:
        for key, size in shared_mappings(pid).items():
            sizes[key] = max(size, sizes.get(key, 0))
    return sum(sizes.values())


def _kernel_bytes() -> int:
    """Memory of the whole machine that no process is charged for and the kernel does not take back."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return sum(sizes.get(name, 0) for name in _KERNEL_MEMORY) * 1024


def _memory_of(pid: int) -> int:
    total = 0
    with suppress(OSError, ValueError, IndexError):
        total += Path(f"/proc/{pid}/fd").stat().st_size * _DESCRIPTOR_BYTES  # 0 before Linux 6.2
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith((b"RssAnon:", b"RssShmem:", b"VmPTE:")):
                total += int(line.split()[1]) * 1024
    return total


def _sockets_below(inside: dict[int, int]) -> dict[int, int]:
    """Bytes in the sockets of the network namespaces of processes, by the same keys."""
    measured = {}
    largest = max(int(Path(name).read_text()) for name in _KERNEL_BUFFERS)
    for key, pid in inside.items():
        with suppress(FileNotFoundError, ProcessLookupError, ValueError, IndexError):  # it has ended
            measured[key] = _socket_bytes(Path(f"/proc/{pid}/net"), largest)
    return measured


def _socket_bytes(net: Path, buffer_bytes: int) -> int:
    """An upper bound of the bytes in the sockets of a namespace, by its files in /proc."""
    counts: dict[bytes, int] = {}
    for name in ("sockstat", "sockstat6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6, or a process that has ended
            counts |= {line.split()[0]: int(line.split()[2]) for line in (net / name).read_bytes().splitlines()}
    num_tcp = counts.get(b"TCP:", 0) + counts.get(b"TCP6:", 0)
    num_others = max(0, counts.get(b"sockets:", 0) - num_tcp)  # none: its process has ended
    total = num_others * buffer_bytes + num_tcp * _TCP_BYTES
    if num_tcp > _FEW_TCP_SOCKETS:
        for name in ("tcp", "tcp6"):
            with suppress(FileNotFoundError):
                total += sum(map(_queued, (net / name).read_bytes().splitlines()[1:]))
    return total


def _queued(line: bytes) -> int:
    """Bytes that wait in a socket of TCP, to be sent and to be read."""
    sending, _, reading = line.split()[4].partition(b":")
    return int(sending, 16) + int(reading, 16)
