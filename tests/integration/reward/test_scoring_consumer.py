"""The scoring consumer within the test's own process, on a real Redis and the real sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo.common.service.app import Service
from gspo.common.service.options import Options
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import Inbox, append
from gspo.common.streams.keys import Keys
from gspo.common.telemetry import metrics
from gspo.common.telemetry.first_answers import scores_finding
from gspo.reward.scoring.consumer import ScoringConsumer
from gspo.reward.scoring.repeated_scores import NUM_REPEATED
from gspo.reward.scoring.scorer import open_scorer
from gspo_proto.rollout_pb2 import RewardUse
from tests.support.reward_rollouts import make_rollout
from tests.support.service_process import make_run

pytestmark = pytest.mark.asyncio(loop_scope="function")


def num_failed() -> float:
    return metrics.BY_SERVICE["reward"].get_sample_value("gspo_rollouts_scored_total", {"result": "failed"}) or 0.0


async def test_the_figures_of_finished_rollouts_survive_a_cancellation_by_the_lease_renewal(
    redis: Redis, redis_url: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply of Redis comes so late that a renewal finds the entries gone, and the handler still waiting."""
    (tmp_path / "r.py").write_text("def reward(completions): return map(float, completions)")
    reward = {"functions": [{"path": str(tmp_path / "r.py")}], "failure_window": 1, "max_failure_share": 0.5}
    config = make_run(tmp_path, tmp_path / "model", reward=reward, services={"lease_s": 0.3})
    cancelled, finish_many = asyncio.Event(), Inbox.finish_many

    async def with_late_reply(inbox: Inbox, *arguments: Any) -> set[bytes]:
        finished = await finish_many(inbox, *arguments)
        await asyncio.wait_for(cancelled.wait(), 20)
        return finished

    class Watched(ScoringConsumer):
        async def _score(self, *arguments: Any) -> None:
            try:
                await super()._score(*arguments)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    monkeypatch.setattr(Inbox, "finish_many", with_late_reply)
    service = Service(Options("reward", config.run_dir, redis_url, "reward-0", "127.0.0.1", 0, 0, False, config))
    num_before = num_failed()
    async with open_scorer(config.reward, name="reward-0") as scorer:
        consuming = asyncio.create_task(Watched(service, scorer).run())
        await append(redis, keys.rollouts, [make_rollout("no number").SerializeToString()])
        await asyncio.wait_for(cancelled.wait(), 20)
        async with asyncio.timeout(20):
            while not (events := await Events(redis, keys, "test").read(b"0", 0.1)):
                assert not consuming.done()
        service.stopping.set()
        await asyncio.wait_for(consuming, 20)
    await service.close()
    assert (num_failed() - num_before, events[0][1].HasField("scoring_fails")) == (1.0, True)


COUNTS = """
calls = []

def steady(completions):
    return [float(len(c)) for c in completions]

def counting(completions):
    calls.extend(completions)
    return [float(len(calls)) for c in completions]
"""


async def test_a_function_that_counts_its_calls_is_named_and_another_is_not(
    redis: Redis, redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    (tmp_path / "r.py").write_text(COUNTS)
    file, names = str(tmp_path / "r.py"), ("steady", "counting")
    functions = [{"path": file, "entry": name, "name": name} for name in names]
    reward = {"functions": functions, "batch_size": 8, "workers": 1}
    config = make_run(tmp_path, tmp_path / "model", reward=reward)
    service = Service(Options("reward", config.run_dir, redis_url, "reward-0", "127.0.0.1", 0, 0, False, config))
    async with open_scorer(config.reward, name="reward-0") as scorer:
        consuming = asyncio.create_task(ScoringConsumer(service, scorer).run())
        rollouts = [make_rollout("7" * (1 + number), group=number) for number in range(NUM_REPEATED)]
        for rollout in rollouts:
            rollout.rewards.extend(RewardUse(name=name, weight=1.0) for name in names)
        await append(redis, keys.rollouts, [rollout.SerializeToString() for rollout in rollouts])
        async with asyncio.timeout(30):
            while not (events := await Events(redis, keys, "test").read(b"0", 0.1)):
                assert not consuming.done()
        service.stopping.set()
        await asyncio.wait_for(consuming, 20)
    await service.close()
    (differ,) = [event.scores_differ for _, event in events]
    assert (differ.function, differ.num_differing, differ.num_answers) == ("counting", NUM_REPEATED, NUM_REPEATED)
    assert "counting when they were scored again" in scores_finding(differ).text
