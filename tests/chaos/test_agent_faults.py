"""Fifty agents play the rollouts of a run whose generators, gateways and workers are killed; then what it logged.

`gspo run` with a simulated engine and training step, real processes otherwise. Each worker is a `gspo agent`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from asyncio.subprocess import Process
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from benchmarks.chaos.faults import strike
from benchmarks.chaos.invariants import check
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.target import MAX_ATTEMPTS, RunUnderTest
from gspo.agents.relay import Streams
from gspo.common.streams.instances import list_instances
from tests.support.agents.lossy_processes import balancer
from tests.support.agents.sampled_texts import sampled_texts

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
WELL_S, NUM_WORKERS, AGENTS_EACH = 300.0, 2, 25
SECTIONS: dict[str, dict[str, Any]] = {
    "gateway": {"replicas": 2},
    "agent": {"external": True, "lease_s": 10.0, "timeout_s": 100.0, "max_rollouts": 32},
    "reward": {"functions": []},
    "algorithm": {
        "rollout_batch_size": 6,
        "num_return_sequences_in_group": 4,
        "prompt_length": 96,
        "response_length": 512,
        "rollout_length": 4096,
        "num_mini_batches": 1,
        "max_refill": 1000,
    },
    "staleness": {"max_lag": 4, "group_deadline_s": 120.0, "max_attempts": MAX_ATTEMPTS},
}
STRIKES = ("gateway-0", "generation-0", "worker", "gateway-1", "generation-1", "worker")
# The answers that it read go to a file, with a reward that no other rollout has.
AGENT = """
import dataclasses, json, random
from tests.support.agents.restless_agent import RestlessAgent

AGENT = RestlessAgent()

async def play(task):
    played = AGENT.played.pop(await AGENT(task))
    reward = random.random()
    with open({file!r}, "a") as file:
        file.write(json.dumps({{"reward": reward, **dataclasses.asdict(played)}}) + chr(10))
    return reward
"""


class Workers:
    """Processes of `gspo agent`, each of which is started again after its end."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._command = folder, [sys.executable, "-m", "gspo.cli", "agent", str(folder / "agent.py")]
        self._command += ["--url", url, "--rollouts", str(AGENTS_EACH), "--token-file", str(folder / "token")]
        self._running: list[Process] = []
        (folder / "agent.py").write_text(AGENT.format(file=str(folder / "played.jsonl")))

    async def keep(self) -> None:
        """Run until cancelled; then end them."""
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/proto:{ROOT}/services"}
        try:
            with (self._folder / "workers.log").open("ab") as log:
                while True:
                    self._running = [process for process in self._running if process.returncode is None]
                    while len(self._running) < NUM_WORKERS:
                        self._running.append(
                            await asyncio.create_subprocess_exec(
                                *self._command, stdout=log, stderr=log, env=environment, start_new_session=True
                            )
                        )
                    await asyncio.sleep(0.5)
        finally:
            for process in self._running:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def kill(self) -> None:
        """Kill the oldest."""
        os.kill(self._running[0].pid, signal.SIGKILL)


async def dial_gateway(world: RunUnderTest) -> Streams:
    """A connection to a gateway that runs."""
    try:
        gateways = await list_instances(world.redis, world.keys, "gateway")
    except RedisError as error:
        raise OSError(str(error)) from error
    if not gateways:
        raise OSError("no gateway runs")
    host, port = random.choice(gateways).http.rsplit(":", 1)  # noqa: S311 - of no secret
    return await asyncio.open_connection(host, int(port))


async def test_nothing_is_lost_doubled_or_mixed_up_under_kills(tmp_path: Path) -> None:
    async with (
        RunUnderTest(tmp_path, 0, with_network=False, sections=SECTIONS) as world,
        balancer(lambda: dial_gateway(world)) as url,
    ):
        workers = Workers(tmp_path, url)
        keeping = asyncio.create_task(workers.keep())
        try:
            assert await world.wait_until_well(0, WELL_S) == "", (tmp_path / "run.log").read_text()
            for target in STRIKES:
                if target == "worker":
                    workers.kill()
                else:
                    await strike(world, Fault(f"kill {target}", (target,), 0.0, 0.0))
                assert await world.wait_until_well(world.step, WELL_S) == "", target
            finished = await world.finish()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        findings = check(finished)
    for result in findings:
        assert result.broken == (), f"invariant {result.number} ({result.what}): {result.broken[:5]}"
    played = [json.loads(line) for line in (tmp_path / "played.jsonl").read_text().splitlines()]
    assert max(task["attempt"] for task in played) <= MAX_ATTEMPTS
    by_reward = {task["reward"]: task for task in played}
    rows = [row for _, row in finished.rows if row.failure is None]
    assert len({row.generator for row in rows}) > NUM_WORKERS, "the successors of killed workers play too"
    assert len({version for row in rows for version in row.version.tolist()}) > len(STRIKES)
    for row in rows:
        assert row.reward is not None
        task = by_reward[row.reward]
        assert task["id"] == f"{row.group}-{row.number}"
        missing = Counter(text.strip() for text in task["answers"]) - Counter(
            sampled_texts(row.token_ids.tolist(), (row.version >= 0).tolist(), row.branch_starts.tolist())
        )
        assert not missing, f"{task['id']}: its agent read {missing}"
