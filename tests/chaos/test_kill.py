"""A run whose generator, scorer and learner are killed once each, and what its log says afterwards.

Real engines, started as a user starts them; the kills come at moments that the run itself announces.
Not here: a kill between two given lines of the learner (tests/integration/learner).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from redis import Redis

from gspo.common.streams.inbox import FIELD
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import Event
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
# Ten groups in batches of four: the last step is a short one, which the learner takes only where it knows of the end.
NUM_PROMPTS, EPOCHS, GROUPS, SIZE, MAX_LAG = 5, 2, 4, 4, 1
REWARD = """
def reward(prompts, completions, **columns):
    return [float(c[0]["content"][:1] < "P") for c in completions]
"""


@dataclass
class KilledRun:
    """A run under way.

    Attributes:
        printed: The file of its output.
    """

    process: subprocess.Popen[bytes]
    run_dir: Path
    printed: Path

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.printed.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
            time.sleep(0.02)

    def logged(self, step: int) -> bool:
        return (self.run_dir / "log" / f"step-{step:06d}.parquet").exists()

    def announced(self, kind: str) -> bool:
        """Whether an event of the kind is in the stream of the run's own Redis."""
        facts = json.loads((self.run_dir / "services" / "supervisor.json").read_text())
        with Redis.from_url(facts["redis_url"]) as redis:
            entries: Any = redis.xrange(Keys("chaos").events)
        return kind in {Event.FromString(fields[FIELD]).WhichOneof("what") for _, fields in entries}

    def kill(self, service: str) -> None:
        """SIGKILL to the process of a service; its children find out by themselves."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
                if f"gspo.{service}" in child.cmdline():
                    child.kill()
                    return
        raise AssertionError(f"no process of {service}")


@dataclass(frozen=True)
class EndedRun:
    """What a run left."""

    run_dir: Path
    printed: str
    exit_code: int
    num_groups: int = NUM_PROMPTS * EPOCHS

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "log" / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> EndedRun:
    folder = tmp_path_factory.mktemp("chaos")
    command = [sys.executable, "-m", "gspo.cli", "run", str(write_input(folder)), "--plain"]
    printed = folder / "printed"
    with printed.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    running = KilledRun(process, folder / "runs" / "chaos", printed)
    try:
        running.until(lambda: running.logged(1), "the first step")
        running.kill("generation")
        running.kill("reward")
        running.until(lambda: running.announced("prompts_exhausted"), "the last group to be issued")
        running.kill("learner")
        process.wait(300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    return EndedRun(running.run_dir, printed.read_text(), process.returncode)


def write_input(folder: Path, epochs: int = EPOCHS, **sections: dict[str, object]) -> Path:
    """The input of a run with a tiny model; `sections` are added to its keys."""
    make_tiny_model(folder / "model", seed=3, scale=3.0)
    for name, numbers in (("prompts.jsonl", range(NUM_PROMPTS)), ("eval.jsonl", range(20, 24))):
        records = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}]} for n in numbers]
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "reward.py").write_text(REWARD)
    config: dict[str, Any] = {
        "name": "chaos",
        "model": {"path": "model"},
        "data": {"prompts": "prompts.jsonl"},
        "reward": {"functions": [{"path": "reward.py"}]},
        "algorithm": {
            "preset": "dr-grpo",
            "old_logprobs": "recompute",
            "behavior_correction": "truncate",
            "behavior_level": "product",
            "rollout_batch_size": GROUPS,
            "num_return_sequences_in_group": SIZE,
            "prompt_length": 64,
            "response_length": 24,
            "num_mini_batches": 1,
        },
        "staleness": {"max_lag": MAX_LAG},
        "generation": {"kv_cache_gb": 0.25, "max_rollouts": 64, "threads": 1},
        "learner": {"learning_rate": 1e-3, "threads": 1},
        "evaluation": {"prompts": "eval.jsonl", "num_answers": 2, "every": 0},
        "services": {"lease_s": 5.0},
        "run": {"total_epochs": epochs},
    }
    for section, keys in sections.items():
        config[section] = config.get(section, {}) | keys
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_the_run_goes_on_to_its_end(ended: EndedRun) -> None:
    assert ended.exit_code == 0, ended.printed
    for name in ("generation-0", "reward-0", "learner-0"):
        assert f"{name} died (killed by SIGKILL)" in " ".join(ended.printed.split()), ended.printed


def test_every_group_is_settled_once_and_no_rollout_is_trained_twice(ended: EndedRun) -> None:
    rows = [row for path in (ended.run_dir / "log").glob("step-*.parquet") for row in pq.read_table(path).to_pylist()]
    rollouts = Counter((row["group"], row["number"]) for row in rows)
    assert max(rollouts.values()) == 1
    trained, otherwise = {group for group, _ in rollouts}, [line["group"] for line in ended.lines("settled.jsonl")]
    assert sorted([*trained, *otherwise]) == list(range(ended.num_groups))
    counts = json.loads((ended.run_dir / "summary.json").read_text())["groups"]
    assert counts["issued"] == ended.num_groups
    assert sum(counts[name] for name in ("trained", "filtered", "stale", "failed", "unused")) == counts["issued"]
    assert counts["trained"] == len(trained)


def test_a_replayed_version_has_the_digest_that_was_recorded(ended: EndedRun) -> None:
    digests = defaultdict(list)
    for line in ended.lines("policy.jsonl"):
        digests[line["version"]].append(line["digest"])
    assert sorted(digests) == list(range(len(digests)))
    assert all(len(found) == 1 for found in digests.values()), digests


def test_no_token_is_older_than_the_lag(ended: EndedRun) -> None:
    for line in ended.lines("metrics.jsonl"):
        assert line["figures"]["age_max"] <= MAX_LAG


def test_what_was_measured_is_recorded(ended: EndedRun) -> None:
    first, last = ended.lines("evaluations.jsonl")
    assert first["version"] == 0
    assert last["version"] == max(line["version"] for line in ended.lines("policy.jsonl"))
