"""The services on the page of a run: heartbeats of a running one, the ends of the logs of others."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo.cli.monitor.service_states import service_states
from gspo.common.config.schema import Config
from gspo.common.streams.instances import Instance, Registration
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.activity import Activity
from gspo.view.picture.viewed_run import ServiceState
from tests.conftest import free_port

HOSTILE = "\x1b[31m<b>"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A run directory in which a learner ended, and a generator was killed while it wrote."""
    folder = tmp_path / "services"
    folder.mkdir()
    ended = {"event": "bad_input", "reason": HOSTILE, "timestamp": "2026-01-02T03:04:05.678Z"}
    (folder / "learner-0.log").write_text(json.dumps({"event": "step_done"}) + "\n" + json.dumps(ended) + "\nbye\n")
    (folder / "generation-0.log").write_text('x" 1\n12\n{"event": "st')
    (folder / "redis.log").write_text("ready\n")
    return tmp_path


def test_an_ended_run_shows_the_last_record_of_each_log(config: Config, logs: Path) -> None:
    shown = service_states(logs, config)
    assert shown.states == [
        ServiceState("generation-0", "", "no record at the end of its log"),
        ServiceState("learner-0", "2026-01-02 03:04:05", f"bad input: {HOSTILE}"),
    ]
    assert "the last records in their logs" in shown.source
    assert sorted(path.name for path in (logs / "services").iterdir()) == [
        "generation-0.log",
        "learner-0.log",
        "redis.log",
    ], "a look leaves nothing behind"


def test_a_redis_that_is_gone_is_named_and_the_logs_tell(config: Config, logs: Path) -> None:
    gone = config.with_keys(services={"redis_url": f"redis://127.0.0.1:{free_port()}/0"})
    shown = service_states(logs, gone)
    assert "The run's Redis cannot be asked: redis: does not answer" in shown.source
    assert [state.name for state in shown.states] == ["generation-0", "learner-0"]


@pytest.mark.asyncio(loop_scope="function")
async def test_a_running_one_shows_what_each_service_waits_for(
    config: Config, logs: Path, redis: Redis, redis_url: str
) -> None:
    running = config.with_keys(services={"redis_url": redis_url})
    activity = Activity("learner")
    activity.set("waiting", "rewards", "of 3 groups")
    activity.since_unix_s = time.time() - 90
    facts = {"notices": ["a notice of the learner"]}
    instance = Instance("learner", "learner-0")
    await Registration(redis, Keys(running.name), instance, activity, lambda: facts).beat()
    shown = await asyncio.to_thread(service_states, logs, running)
    assert [(state.name, state.activity) for state in shown.states] == [
        ("learner-0", "waiting for rewards of 3 groups")
    ]
    assert shown.states[0].when.startswith("1 min 3")
    assert shown.lines == ["a notice of the learner"]
    assert "as in gspo status" in shown.source
