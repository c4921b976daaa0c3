"""A run's log keeps the source of each version that scores, and what its calls did."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo.reward.functions.run_record import RunRecord
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.scoring.scorer import open_scorer
from gspo.runlog.function_files import FOLDER, read_calls, read_source
from tests.support.reward_rollouts import make_rollout, reward_config

pytestmark = pytest.mark.asyncio(loop_scope="function")
SOURCE = "def reward(completions):\n    print('saw', *completions)\n    return [float(text) for text in completions]\n"


async def test_a_version_is_in_the_log_before_its_scores(tmp_path: Path, redis: Redis) -> None:
    usage, log = UsageCounter(redis), tmp_path / "log"
    record = RunRecord(log, usage, "p1")
    async with open_scorer(reward_config(tmp_path, SOURCE), name="reward-0", usage=usage, on_use=record.keep) as scorer:
        assert not log.exists(), "nothing has been used"
        (score,) = await scorer.score([make_rollout("3")])
        await scorer.score([make_rollout("bad")])
    await record.write()
    source = read_source(log, score.version)
    assert source is not None
    assert source.source == SOURCE
    assert source.is_tryable
    assert hashlib.sha256(source.source.encode()).hexdigest() == score.version
    calls = read_calls(log)["r", score.version]
    assert (calls.calls, calls.answers, dict(calls.failures)) == (2, 2, {"exception": 1})
    assert calls.printed == "saw 3\n"
    assert calls.failure["kind"] == "exception"
    assert "float" in calls.failure["traceback"]


async def test_a_full_disk_delays_no_score_and_is_tried_again(tmp_path: Path, redis: Redis) -> None:
    usage, log = UsageCounter(redis), tmp_path / "log"
    record = RunRecord(log, usage, "p1")
    log.write_text("no folder can be made here")
    async with open_scorer(reward_config(tmp_path, SOURCE), name="reward-0", usage=usage, on_use=record.keep) as scorer:
        (score,) = await scorer.score([make_rollout("3")])
        await record.write()
        assert score.reward == 3.0
        log.unlink()
        await scorer.score([make_rollout("4")])
        await record.write()
    assert {path.name for path in (log / FOLDER).iterdir()} == {f"source-{score.version}.json", "calls-p1.json"}
