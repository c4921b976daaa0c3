"""CPU threads of the two engines: how many where nobody says, and how they wait for each other.

Both are read when torch is loaded, so they are set before, and nothing here imports it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# A thread at a barrier looks for its fellows for some 20 us and then sleeps. Most barriers are shorter, and waking a
# thread takes as long: never to look cost a learner alone a fifth of its speed. OpenMP's own 300,000 looks cost two
# engines that share the cores several times their work: each waits for a thread that the other keeps from running.
WAITING: Mapping[str, str] = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def wait_shortly() -> None:
    """Set how threads wait, for this process and those that it starts; what the user has set stays."""
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)


def generation_threads(configured: int) -> int:
    """Threads of an engine; 0 is every core but one, as vLLM has it: its scheduler and event loop need one."""
    return configured or max(1, len(os.sched_getaffinity(0)) - 1)
