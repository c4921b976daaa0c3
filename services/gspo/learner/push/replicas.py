"""One generator as the learner knows it: what it serves, whether pushes to it work, and when the next may begin.

What it is not: it sends nothing. Neighbour: publisher.py.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from gspo.common.streams.instances import Instance
from gspo.learner.push.policy_weights import PolicyWeights

State = Literal["current", "behind", "out"]
REPLICA_STATES: tuple[State, ...] = ("current", "behind", "out")
# One failure is an accident of the network; three in a row are a bad engine, which then costs one attempt in 30 s.
_OUT_AFTER = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


@dataclass
class GeneratorReplica:
    """A generator process.

    Attributes:
        digest: Of what it serves; empty where that is not known.
        problem: Why the last push failed.
        num_failures: Pushes that failed since the last that succeeded.
        behind_since_unix_s: When it was first seen without the newest version; None while it has it.
        waiting: Whether its push waits for others to be sent.
    """

    instance: Instance
    channel: grpc.aio.Channel
    version: int
    digest: str
    pushing: asyncio.Task[None] | None = None
    problem: str = ""
    num_failures: int = 0
    not_before: float = 0.0
    behind_since_unix_s: float | None = None
    waiting: bool = False

    @property
    def name(self) -> str:
        """Its name in the run and its address: replicas may share a name."""
        return f"{self.instance.name} ({self.instance.grpc})"

    def serves(self, policy: PolicyWeights) -> bool:
        """Whether it serves this version."""
        return (self.version, self.digest) == (policy.version, policy.digest)

    @property
    def state(self) -> State:
        """`out` after too many failures, until it has caught up."""
        if self.num_failures >= _OUT_AFTER:
            return "out"
        return "current" if self.behind_since_unix_s is None else "behind"

    @property
    def idle(self) -> bool:
        """Whether no push to it is under way and the next one is due."""
        return self.pushing is None and time.monotonic() >= self.not_before

    def fall_behind(self) -> None:
        """There is a newer version than it serves."""
        self.behind_since_unix_s = self.behind_since_unix_s or time.time()

    def catch_up(self) -> bool:
        """It serves the newest version; whether it was out until now."""
        was_out = self.state == "out"
        self.problem, self.num_failures, self.not_before, self.behind_since_unix_s = "", 0, 0.0, None
        return was_out

    def fail(self, problem: str) -> bool:
        """A push failed: the next waits, the longer the more have failed; whether this one put it out."""
        was_out = self.state == "out"
        self.problem = problem
        self.num_failures += 1
        self.not_before = time.monotonic() + min(_FIRST_PAUSE_S * 2.0 ** (self.num_failures - 1), _LONGEST_PAUSE_S)
        return self.state == "out" and not was_out

    def describe(self) -> dict[str, Any]:
        """For the learner's heartbeat."""
        return {
            "name": self.name,
            "state": self.state,
            "version": self.version,
            "num_failures": self.num_failures,
            "problem": self.problem,
            "since_unix_s": self.behind_since_unix_s,
            "waiting": self.waiting,
        }

    async def close(self) -> None:
        """End the push under way and the channel."""
        if self.pushing:
            self.pushing.cancel()
        await self.channel.close(None)
