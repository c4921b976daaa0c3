"""The share of the machine's processors that other processes take while something is measured.

It is neither a limit nor a wait: the caller decides what a disturbed measurement is worth.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Self

import psutil

from benchmarks.harness.child_process import process_tree

# A process that ends sooner than this after its start may count as another's.
_LOOK_S = 0.2


class OtherWork:
    """Within its block, counts the processor time of this process with its children, and that of all others."""

    def __init__(self) -> None:
        self._own_s: dict[tuple[int, float], float] = {}
        self._over = threading.Event()
        self._looks = threading.Thread(target=self._look, daemon=True)
        self.share = 0.0

    def __enter__(self) -> Self:
        self._read()
        self._before_s = dict(self._own_s)
        self._busy_s, self._all_s = _processor_times()
        self._looks.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._looks.join()
        self._read()
        busy_s, all_s = (
            after - before for after, before in zip(_processor_times(), (self._busy_s, self._all_s), strict=True)
        )
        own_s = sum(used_s - self._before_s.get(process, 0.0) for process, used_s in self._own_s.items())
        self.share = max(0.0, busy_s - own_s) / all_s if all_s else 0.0

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._read()

    def _read(self) -> None:
        """The processor time of each process so far; one that has ended keeps its last."""
        for process in process_tree(psutil.Process().pid):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                times = process.cpu_times()
                self._own_s[process.pid, process.create_time()] = times.user + times.system


def _processor_times() -> tuple[float, float]:
    """(seconds of work, all seconds) of the processors since the machine started."""
    times = psutil.cpu_times()
    every_s = float(sum(times)) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # within user
    return every_s - times.idle - getattr(times, "iowait", 0.0), every_s
