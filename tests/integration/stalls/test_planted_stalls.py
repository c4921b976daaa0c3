"""Three stalls, planted into a run whose engine and training step alone are simulated: each ends by itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis.asyncio import Redis

from benchmarks.simulated.settings import Settings
from gspo.common.streams.keys import GENERATION, LEARNER, Keys
from gspo.common.streams.redis_client import connect_redis
from tests.integration.stalls.silent_services import LIMIT_S, SILENT
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(300), pytest.mark.long]
ROOT = Path(__file__).parents[3]
LEASE_S = 6.0
QUICK = Settings(decode_s=0.01, decode_s_per_request=0.0, length_median=4, train_s=0.2, load_s=0.02)


class PlantedRun:
    """A run on the test's Redis."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder, self.silent, self.keys = folder, folder / "silent", Keys("planted")
        self.redis: Redis = connect_redis(redis_url)
        make_tiny_model(folder / "model", seed=3)
        records = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(40)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "score.py").write_text(
            "def reward(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n"
        )
        config: dict[str, Any] = {
            "name": "planted",
            "model": {"path": "model"},
            "data": {"prompts": "prompts.jsonl"},
            "reward": {"functions": [{"path": "score.py"}], "workers": 1},
            "algorithm": {
                "prompt_length": 16,
                "response_length": 8,
                "rollout_batch_size": 4,
                "num_return_sequences_in_group": 2,
                "max_refill": 1000,
            },
            # Within the test no deadline helps.
            "staleness": {"max_lag": 0, "group_deadline_s": 10_000.0},
            "generation": {"push_timeout_s": 10_000.0},
            "run": {"total_steps": 1_000_000},
            "services": {"redis_url": redis_url, "lease_s": LEASE_S},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    @property
    def step(self) -> int:
        path = self.folder / "runs" / "planted" / "log" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    async def start(self) -> asyncio.subprocess.Process:
        path = os.pathsep.join([str(ROOT), str(ROOT / "proto"), str(ROOT / "services")])
        env = {
            **os.environ,
            **QUICK.to_environment(),
            "PYTHONPATH": path,
            SILENT: str(self.silent),
            LIMIT_S: str(LEASE_S),
        }
        words = ("-m", "tests.integration.stalls.silent_services", str(self.folder / "config.yaml"), "--plain")
        with (self.folder / "run.log").open("wb") as out:
            return await asyncio.create_subprocess_exec(
                sys.executable, *words, cwd=self.folder, env=env, stdout=out, stderr=out, start_new_session=True
            )

    async def lose_a_reply(self) -> None:
        """Redis has delivered scored rollouts to the learner, which has not received them."""
        while not await self.redis.xreadgroup(LEARNER, LEARNER, {self.keys.scored: ">"}, count=2, block=1000):
            continue

    async def lose_slots(self) -> None:
        """Every task is lost without a trace, so no slot is freed."""
        for _ in range(20):
            entries: Any = await self.redis.xreadgroup(GENERATION, "nobody", {self.keys.prompts: ">"}, block=100)
            for _, tasks in entries or []:
                for entry, _ in tasks:
                    await self.redis.xack(self.keys.prompts, GENERATION, entry)
                    await self.redis.xdel(self.keys.prompts, entry)

    async def lose_an_answer(self) -> None:
        """The next push gets no answer."""
        self.silent.touch()
        while self.silent.exists():
            await asyncio.sleep(0.05)


async def until(condition: Callable[[], bool], running: asyncio.subprocess.Process, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert running.returncode is None and time.monotonic() < deadline, f"{timeout_s:g} s passed, or the run ended"
        await asyncio.sleep(0.1)


async def test_each_planted_stall_ends_within_two_lease_times(tmp_path: Path, redis: Redis, redis_url: str) -> None:
    run = PlantedRun(tmp_path, redis_url)
    running = await run.start()
    stalls: dict[str, Callable[[], Awaitable[None]]] = {
        "a lost reply": run.lose_a_reply,
        "slots": run.lose_slots,
        "a push": run.lose_an_answer,
    }
    took_s: dict[str, float] = {}
    try:
        await until(lambda: run.step >= 3, running, 120.0)
        for name, plant in stalls.items():
            await asyncio.wait_for(plant(), 30.0)
            began_s, step = time.monotonic(), run.step
            # One step may have been in flight.
            await until(lambda step=step: run.step >= step + 3, running, 60.0)  # type: ignore[misc]
            took_s[name] = time.monotonic() - began_s
        printed = (tmp_path / "run.log").read_text()
        assert all(seconds < 2 * LEASE_S + 3.0 for seconds in took_s.values()), (took_s, printed)
        assert "nothing moves: nothing has moved for 6 s: learner-0 waits for rollouts" in printed
    finally:
        if running.returncode is None:
            running.terminate()
            await running.wait()
        await run.redis.aclose()
