"""Stands in for coordinator, generation and reward before a learner that runs as a process.

Not a test.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from gspo.common.config.schema import Config
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.inbox import append
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Event, Prompt, Rollout, Score, Scored, ScoredRollout
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model

NUM_ROLLOUTS = 4


class LearnerFeed:
    """Plays coordinator, generation and reward: opens groups and writes their scored rollouts."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self.keys = redis, keys

    async def feed(
        self,
        groups: range,
        version: int,
        *,
        failing: bool = False,
        rewards: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        """Open groups, and answer them at once; `rewards` of (group, number) other than number modulo 2."""
        for group in groups:
            await self._redis.hset(self.keys.open, group, json.dumps({"min_version": version}))
        await append(
            self._redis,
            self.keys.scored,
            [scored(g, n, version, failing, (rewards or {}).get((g, n))) for g in groups for n in range(4)],
        )

    async def event(self, what: str, timeout_s: float = 60, num: int = 1) -> Event:
        """The num-th event of a kind."""
        events, deadline = Events(self._redis, self.keys, "test"), time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            matching = [event for _, event in await events.read(FROM_START, 0.1) if event.WhichOneof("what") == what]
            if len(matching) >= num:
                return matching[num - 1]
            await asyncio.sleep(0.1)
        raise AssertionError(f"{num} {what} did not come within {timeout_s} s")


def scored(group: int, number: int, version: int, failing: bool = False, reward: float | None = None) -> bytes:
    """A scored rollout as the reward service writes it."""
    token_ids = [4 + (group + number + i) % 10 for i in range(3 + number)]
    rollout = Rollout(
        schema=1,
        group=group,
        number=number,
        attempt=1,
        num_rollouts=NUM_ROLLOUTS,
        prompt=Prompt(token_ids=[1, 5, 6], text="1+1="),
        token_ids=[*token_ids, 2],
        logp=[-4.6] * (len(token_ids) + 1),
        version=[version] * (len(token_ids) + 1),
        mask=b"\x01" * (len(token_ids) + 1),
        text="an answer",
        outcome=OUTCOME_EOS,
        temperature=1.0,
    )
    score = (
        Score(failure="ZeroDivisionError: division by zero")
        if failing
        else Score(reward=float(number % 2) if reward is None else reward)
    )
    return Scored(schema=1, rollout=ScoredRollout(rollout=rollout, score=score)).SerializeToString()


def run_of(tmp_path: Path, **sections: Any) -> Config:
    """A run of three steps with a tiny model; sections are laid over it."""
    # A clip that lets the untrained policy's ratios through, so that weights move.
    algorithm = {"pg_clip_low": 1.0, "pg_clip_high": 100.0}
    learner = {"learning_rate": 1e-3, "threads": 1, **sections.pop("learner", {})}
    model = make_tiny_model(tmp_path / "model")
    return make_run(tmp_path, model, **{"algorithm": algorithm, "learner": learner, **sections})


def lines(config: Config, name: str) -> list[dict[str, Any]]:
    """The records of a file of the run's log."""
    return [json.loads(line) for line in (config.run_dir / "log" / name).read_text().splitlines()]
