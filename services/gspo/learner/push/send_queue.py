"""Which pushes are sent now, and how long each may take.

All pushes share the learner's one sender. Many at a time would each take many times as long, and none would meet its
deadline. So a few are sent at a time, in the order in which they asked; who has got every byte makes way for the next,
and stages and loads meanwhile. What it is not: it sends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

from gspo.common.weights.time_limit import TimeLimit
from gspo.learner.push.replicas import GeneratorReplica

Kind = Literal["full", "delta"]
# One whole policy at a time uses all of the sender. Changes are small: several at a time hide the round trips. Each
# kind has its own queue, so that changes never wait behind whole policies.
_NUM_SENT = {"full": 1, "delta": 4}
# Of the whole policy, transfer, digest and load together: a quarter of this (the margin) is a network of 200 Mbit/s.
_FIRST_BYTES_S = 1e8
# A generator whose pushes failed gets twice the time with each failure, so many times: its own network may be slower.
_MOST_DOUBLINGS = 3


class SendQueue:
    """Turns and time limits of pushes.

    Args:
        least_s: Least time limit of a push.
    """

    def __init__(self, least_s: float) -> None:
        self._turns = {kind: asyncio.Semaphore(num) for kind, num in _NUM_SENT.items()}
        self._limits = {kind: TimeLimit(least_s, _FIRST_BYTES_S) for kind in _NUM_SENT}

    @asynccontextmanager
    async def turn(self, kind: Kind, target: GeneratorReplica) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn to send, first come first served. It ends with the block, or earlier by the call given."""
        turns = self._turns[kind]
        target.waiting = turns.locked()
        try:
            await turns.acquire()
        finally:
            target.waiting = False
        with contextlib.ExitStack() as turn:
            turn.callback(turns.release)
            yield turn.close

    def limit_s(self, kind: Kind, num_bytes: int, num_failures: int = 0) -> float:
        """Seconds that a push may take, from its header to the answer.

        Args:
            num_bytes: Of the whole policy: changes are packed from it, and it is staged, digested and loaded.
            num_failures: Pushes in a row that failed at this generator.
        """
        return self._limits[kind].seconds(num_bytes) * 2.0 ** min(num_failures, _MOST_DOUBLINGS)

    def took(self, kind: Kind, num_bytes: int, seconds: float) -> None:
        """Note how long a push took that succeeded."""
        self._limits[kind].took(num_bytes, seconds)
